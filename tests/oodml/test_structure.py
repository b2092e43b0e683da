"""Measures of training embeddings, what is kept of them, and their correlation with test scores."""

import itertools
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from oodml_runs import small_run
from scipy.stats import rankdata

from dmlbench.apps.trained import load_run
from dmlbench.config import compose
from dmlbench.oodml import structure as module
from dmlbench.oodml.correlation import (
    Measured,
    correlate,
    correlation,
    correlation_tables,
    correlations,
    correlations_frame,
    draw,
    normalized,
    points_frame,
    points_of,
)
from dmlbench.oodml.split_runs import SplitRun
from dmlbench.oodml.structure import MEASURES, STRUCTURE, Structure, structure, structure_of_run
from dmlbench.results.store import read_result
from dmlbench.runtime import read_json, write_json
from dmlbench.types import ConfigError, DataError, RetrievalSet, RunError

# --- the measures


def naive(rows: np.ndarray, labels: np.ndarray) -> Structure:
    unit = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    classes = [unit[labels == label] for label in np.unique(labels)]
    intra = [
        np.mean([1 - a @ b for a, b in itertools.combinations(members, 2)]) for members in classes if len(members) > 1
    ]
    centers = [members.mean(0) / np.linalg.norm(members.mean(0)) for members in classes]
    inter = np.mean([1 - a @ b for a, b in itertools.combinations(centers, 2)])
    values = np.sqrt(np.linalg.eigvalsh(unit.T @ unit))
    shares, even = values / values.sum(), 1 / len(values)
    return Structure(np.mean(intra), inter, np.mean(intra) / inter, sum(even * np.log(even / s) for s in shares))


def test_measures_are_those_of_a_naive_loop() -> None:
    random = np.random.default_rng(0)
    labels = np.array([3, 0, 0, 3, 3, 7, 9, 9, 9, 9, 0, 3])  # 7 has one image
    rows = random.normal(size=(12, 4)) * random.uniform(0.1, 9, size=(12, 1))
    ours, theirs = structure(rows, labels), naive(rows, labels)
    for name in MEASURES:
        assert getattr(ours, name) == pytest.approx(getattr(theirs, name), rel=1e-9)


def test_measures_are_those_of_the_public_code(golden_dir: Path) -> None:
    with np.load(golden_dir / "metrics.npz", allow_pickle=False) as golden:
        keys = [key for key in golden.files if "_oodml_dists_" in key]
        assert len(keys) == 8
        for key in keys:
            case, _, name = key.partition("_oodml_dists_")
            found = structure(golden[f"{case}_query"], golden[f"{case}_query_labels"])
            ours = {"intra": found.intra, "inter": found.inter, "intra_over_inter": found.density}[name]
            assert ours == pytest.approx(float(golden[key]), rel=1e-5, abs=1e-6)


def test_spectral_decay_of_even_and_of_missing_directions() -> None:
    even = np.concatenate([np.eye(3), np.eye(3)])
    labels = np.array([0, 1, 2, 0, 1, 2])
    assert structure(even, labels).spectral_decay == pytest.approx(0, abs=1e-12)
    four, one = np.repeat(np.eye(2), [4, 1], axis=0), np.array([0, 0, 1, 1, 0])
    expected = 0.5 * (np.log(0.5 / (2 / 3)) + np.log(0.5 / (1 / 3)))  # singular values 2 and 1
    assert structure(four, one).spectral_decay == pytest.approx(expected)
    flat = np.random.default_rng(0).normal(size=(20, 2)) @ np.ones((2, 3))
    assert structure(flat.astype(np.float32), np.arange(20) % 4).spectral_decay is None


def test_density_is_undefined_where_the_classes_have_one_center() -> None:
    found = structure(np.array([[1.0, 0], [0, 1], [1, 0], [0, 1]]), np.array([0, 0, 1, 1]))
    assert (found.intra, found.inter, found.density) == (pytest.approx(1), pytest.approx(0, abs=1e-12), None)


def test_sets_without_measures_are_refused() -> None:
    rows = np.random.default_rng(0).normal(size=(4, 3))
    for given, labels, message in (
        (rows, [0, 0, 0, 0], "4 images of 1 classes"),
        (rows, [0, 1, 2, 3], "4 images of 4 classes"),
        (rows * np.nan, [0, 0, 1, 1], "NaN"),
    ):
        with pytest.raises(DataError, match=message):
            structure(given, labels)


# --- runs


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that the tests only read."""
    root = tmp_path_factory.mktemp("structure")
    return small_run(root).relative_to(root / "out"), root / "out"


@pytest.fixture
def run_dir(made: tuple[Path, Path], tmp_path: Path) -> Path:
    name, output = made
    return Path(shutil.copytree(output, tmp_path / "out")) / name


def test_the_training_images_of_a_run_are_measured_once(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = structure_of_run(run_dir, device="cpu", num_workers=0)
    setup = load_run(run_dir, {"num_workers": 0}, device="cpu")
    rows, _ = setup.embed(RetrievalSet(setup.data.split.train))
    assert len(np.intersect1d(rows.ids, setup.data.split.test.query)) == 0
    assert found.intra == pytest.approx(naive(rows.rows.double().numpy(), rows.labels.numpy()).intra)
    monkeypatch.setattr(module, "load_run", None)
    assert structure_of_run(run_dir) == found
    monkeypatch.undo()
    kept = read_json(run_dir / STRUCTURE)
    wrong = {**kept["measures"], "intra": 0.5}
    write_json(run_dir / STRUCTURE, {**kept, "measures": wrong, "best_sha256": "of other weights"})
    assert structure_of_run(run_dir, device="cpu", num_workers=0) == found
    (run_dir / STRUCTURE).write_text("{")
    assert structure_of_run(run_dir, device="cpu", num_workers=0) == found


def test_runs_that_cannot_be_measured_are_refused(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "distance_of_run", lambda run_dir: "its own")
    with pytest.raises(RunError, match="compares embeddings by its own distance"):
        structure_of_run(run_dir)
    (run_dir / "best.ckpt").unlink()
    with pytest.raises(RunError, match=r"has no best\.ckpt"):
        structure_of_run(run_dir)


def test_the_command_writes_table_points_and_picture(run_dir: Path) -> None:
    output = run_dir.parents[3]
    options = ["configs=glyphs/*", "device=cpu", "num_workers=0", f"paths.output_dir={output}"]
    printed = "\n".join(correlate(compose("oodml_structure", [*options, "metrics=[p_at_1,oodml_map_at_1000]"])))
    stem = output / "tables/structure-glyphs-shifted"
    assert stem.with_suffix(".md").read_text() in printed
    assert printed.count("| density | undefined | undefined |") == 2  # one run is no correlation
    (row,) = pd.read_csv(f"{stem}-runs.csv").to_dict("records")
    assert row["p_at_1"] == read_result(run_dir)["metrics"]["test"]["p_at_1"] and row["distance"] == 1.5
    assert row["intra"] == pytest.approx(read_json(run_dir / STRUCTURE)["measures"]["intra"])
    assert stem.with_suffix(".png").stat().st_size > 5_000


# --- correlation


def frame_of(points: list[tuple[str, int, float | None, float]]) -> pd.DataFrame:
    return pd.DataFrame(points, columns=["label", "fold", "intra", "p_at_1"]).assign(
        **{name: lambda frame: frame.intra for name in MEASURES[1:]}
    )


def test_values_are_normalized_on_each_split_and_ranked_together() -> None:
    random = np.random.default_rng(0)
    table = random.normal(size=(3, 5, 2)) * [[[1.0]], [[10.0]], [[100.0]]] + [[[0.0]], [[50.0]], [[-9.0]]]
    points = frame_of([(f"m{i}", fold, *table[fold, i]) for fold in range(3) for i in range(5)])
    low, high = table.min(1, keepdims=True), table.max(1, keepdims=True)
    scaled = ((table - low) / (high - low)).reshape(15, 2)
    assert np.allclose(normalized(points, "intra", "p_at_1")[["x", "y"]], scaled)
    ranks = rankdata(scaled, axis=0)
    expected = np.corrcoef(ranks.T)[0, 1]
    found = correlations(points, "p_at_1")["intra"]
    assert found[None].rho == pytest.approx(expected) and found[None].count == 15
    for fold in range(3):
        assert found[fold].rho == pytest.approx(np.corrcoef(rankdata(table[fold], axis=0).T)[0, 1])


def test_constant_missing_and_too_few_values_are_undefined_and_left_out() -> None:
    rising = [(f"m{i}", 0, float(i), i / 4) for i in range(4)]
    constant = [(f"m{i}", 1, 2.0, i / 4) for i in range(4)]
    missing = [(f"m{i}", 2, None, i / 4) for i in range(4)]
    few = [("a", 3, 1.0, 0.5), ("b", 3, 2.0, 0.1)]
    for points in (constant, missing, few, []):
        assert str(correlation(frame_of(points), "intra", "p_at_1")) == "undefined"
    together = correlation(frame_of([*rising, *constant, *missing]), "intra", "p_at_1")
    assert (together.rho, together.count) == (pytest.approx(1.0), 4)


def measured(label: str, fold: int, repeat: int, intra: float, score: float, **facts: Any) -> Measured:
    result = {"fold": fold, "repeat": repeat, "facts": {"distance": 5.0 * fold, **facts}, "val_is_test": False,
              "search": "exact", "dataset_fingerprint": "f", "data_notes": ["smaller"]}  # fmt: skip
    run = SplitRun(Path(f"config-{label}/fold{fold}_rep{repeat}"), result, label)
    return Measured(run, Structure(intra, 0.5, 2 * intra, None), {"p_at_1": score})


def several() -> list[Measured]:
    kinds = {0: "swapped", 1: "default"}
    return [
        measured(label, fold, repeat, intra + 0.1 * repeat, 1 - intra + 0.02 * fold, kind=kinds[fold])
        for label, intra in (("margin", 0.2), ("arcface", 0.3), ("multi_similarity", 0.5)) for fold in (0, 1)
        for repeat in (0, 1)
    ]  # fmt: skip


def test_repeats_are_one_point_and_tables_say_what_is_undefined() -> None:
    points = points_of(several())
    assert len(points) == 6 and points.intra[0] == pytest.approx(0.25)
    assert points.spectral_decay.isna().all()
    text = correlation_tables("cub200 under oodml", several(), ["p_at_1"])
    assert "| P@1 | overall | 0 (0) | 1 (5), default |" in text
    assert "| intra-class distance | -1.00 | -1.00 | -1.00 |" in text
    assert "| inter-class distance | undefined | undefined | undefined |" in text
    assert "- points overall: intra-class distance 6, inter-class distance 0" in text
    assert "NOT THE PUBLISHED DATA: smaller" in text
    frame = correlations_frame(several(), ["p_at_1"])
    assert frame["spearman"].isna().sum() == 6 and len(frame) == 12
    assert len(points_frame(several())) == 12


def test_a_picture_has_a_panel_a_measure_and_a_line_of_the_default_split(tmp_path: Path, monkeypatch) -> None:
    figures = []
    monkeypatch.setattr("dmlbench.oodml.correlation.save_figure", lambda figure, path: figures.append(figure))
    draw("x", several(), tmp_path / "a.png", scores=["p_at_1"])
    (figure,) = figures
    assert len(figure.axes) == len(MEASURES)
    lines = [line for line in figure.axes[0].lines if line.get_marker() == "None"]
    assert [line.get_linestyle() for line in lines] == ["-", "--"]
    assert lines[1].get_ydata()[0] == pytest.approx(1.0, abs=0.1)  # the more compact, the better
    assert not figure.axes[1].lines  # of a constant there is nothing to see
    too_many = [measured(f"m{i}", 0, 0, 0.1 * i, 0.5) for i in range(11)]
    with pytest.raises(ConfigError, match="11 methods are more than"):
        draw("x", too_many, tmp_path / "a.png", scores=["p_at_1"])
