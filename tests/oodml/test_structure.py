"""Measures of training embeddings, what is kept of them, and their correlation with test scores."""

import itertools
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from composed import arguments
from oodml_runs import small_run
from scipy.stats import rankdata

from dmlbench.apps.loading import load_run
from dmlbench.oodml import structure as module
from dmlbench.oodml.split_runs import SplitRun
from dmlbench.oodml.structure import (
    MEASURES,
    STRUCTURE,
    correlate,
    correlation,
    correlation_tables,
    correlations,
    draw,
    frame_of_runs,
    normalized,
    points_of,
    structure,
    structure_of_run,
)
from dmlbench.results.store import read_result
from dmlbench.runtime import read_json, write_json
from dmlbench.types import ConfigError, DataError, RetrievalSet, RunError

# --- the measures


def naive(rows: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    unit = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    classes = [unit[labels == label] for label in np.unique(labels)]
    intra = [
        np.mean([1 - a @ b for a, b in itertools.combinations(members, 2)]) for members in classes if len(members) > 1
    ]
    centers = [members.mean(0) / np.linalg.norm(members.mean(0)) for members in classes]
    inter = np.mean([1 - a @ b for a, b in itertools.combinations(centers, 2)])
    values = np.sqrt(np.linalg.eigvalsh(unit.T @ unit))
    shares, even = values / values.sum(), 1 / len(values)
    decay = sum(even * np.log(even / s) for s in shares)
    return {"intra": np.mean(intra), "inter": inter, "density": np.mean(intra) / inter, "spectral_decay": decay}


def test_measures_are_those_of_a_naive_loop() -> None:
    random = np.random.default_rng(0)
    labels = np.array([3, 0, 0, 3, 3, 7, 9, 9, 9, 9, 0, 3])  # 7 has one image
    rows = random.normal(size=(12, 4)) * random.uniform(0.1, 9, size=(12, 1))
    assert structure(rows, labels) == pytest.approx(naive(rows, labels), rel=1e-9)


def test_measures_are_those_of_the_public_code(golden) -> None:
    recorded = golden("metrics")
    keys = [key for key in recorded if "_oodml_dists_" in key]
    assert len(keys) == 8
    for key in keys:
        case, _, name = key.partition("_oodml_dists_")
        found = structure(recorded[f"{case}_query"], recorded[f"{case}_query_labels"])
        ours = found["density" if name == "intra_over_inter" else name]
        assert ours == pytest.approx(float(recorded[key]), rel=1e-5, abs=1e-6)


def test_spectral_decay_of_even_and_of_missing_directions() -> None:
    even = np.concatenate([np.eye(3), np.eye(3)])
    labels = np.array([0, 1, 2, 0, 1, 2])
    assert structure(even, labels)["spectral_decay"] == pytest.approx(0, abs=1e-12)
    four, one = np.repeat(np.eye(2), [4, 1], axis=0), np.array([0, 0, 1, 1, 0])
    expected = 0.5 * (np.log(0.5 / (2 / 3)) + np.log(0.5 / (1 / 3)))  # singular values 2 and 1
    assert structure(four, one)["spectral_decay"] == pytest.approx(expected)
    flat = np.random.default_rng(0).normal(size=(20, 2)) @ np.ones((2, 3))
    assert structure(flat.astype(np.float32), np.arange(20) % 4)["spectral_decay"] is None
    few = np.random.default_rng(0).normal(size=(8, 12))  # fewer images than dimensions
    assert structure(few, np.arange(8) % 4)["spectral_decay"] is None


def test_density_is_undefined_where_the_classes_have_one_center() -> None:
    found = structure(np.array([[1.0, 0], [0, 1], [1, 0], [0, 1]]), np.array([0, 0, 1, 1]))
    assert (found["intra"], found["inter"]) == pytest.approx((1, 0), abs=1e-12) and found["density"] is None


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
    assert found["intra"] == pytest.approx(naive(rows.rows.double().numpy(), rows.labels.numpy())["intra"])
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
    monkeypatch.setattr("dmlbench.apps.loading.distance_of_run", lambda run_dir: "its own")
    with pytest.raises(RunError, match="got a run with its own distance"):
        structure_of_run(run_dir)
    (run_dir / "best.ckpt").unlink()
    with pytest.raises(RunError, match=r"has no best\.ckpt"):
        structure_of_run(run_dir)


def test_the_command_writes_table_points_and_picture(run_dir: Path) -> None:
    output = run_dir.parents[3]
    options = ["configs=glyphs/*", "device=cpu", "num_workers=0", f"paths.output_dir={output}"]
    printed = "\n".join(correlate(arguments("oodml_structure", *options, "metrics=[p_at_1,oodml_map_at_1000]")))
    stem = output / "tables/structure-glyphs-shifted"
    assert stem.with_suffix(".md").read_text() in printed
    assert printed.count("| density | undefined | undefined |") == 2  # one run is no correlation
    (row,) = pd.read_csv(f"{stem}-runs.csv").to_dict("records")
    assert row["p_at_1"] == read_result(run_dir)["metrics"]["test"]["p_at_1"] and row["distance"] == 1.5
    assert row["intra"] == pytest.approx(read_json(run_dir / STRUCTURE)["measures"]["intra"])
    assert stem.with_suffix(".png").stat().st_size > 5_000


# --- correlation


def frame_of(points: list[tuple[str, int, float | None, float]]) -> pd.DataFrame:
    return pd.DataFrame(points, columns=["row", "fold", "intra", "p_at_1"]).assign(
        inter=lambda frame: frame.intra, density=lambda frame: frame.intra, spectral_decay=lambda frame: frame.intra
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
    found = correlations(points, ["p_at_1"])
    rho = found[found.measure == "intra"].set_index("split").spearman
    assert rho["overall"] == pytest.approx(expected) and found.points[0] == 15
    for fold in range(3):
        assert rho[fold] == pytest.approx(np.corrcoef(rankdata(table[fold], axis=0).T)[0, 1])


def test_constant_missing_and_too_few_values_are_undefined_and_left_out() -> None:
    rising = [(f"m{i}", 0, float(i), i / 4) for i in range(4)]
    constant = [(f"m{i}", 1, 2.0, i / 4) for i in range(4)]
    missing = [(f"m{i}", 2, None, i / 4) for i in range(4)]
    few = [("a", 3, 1.0, 0.5), ("b", 3, 2.0, 0.1)]
    for points in (constant, missing, few, []):
        assert np.isnan(correlation(frame_of(points), "intra", "p_at_1")[0])
    together = correlation(frame_of([*rising, *constant, *missing]), "intra", "p_at_1")
    assert together == pytest.approx((1.0, 4))


def split_run(label: str, fold: int, repeat: int, **facts: Any) -> SplitRun:
    result = {"fold": fold, "repeat": repeat, "facts": {"distance": 5.0 * fold, **facts}, "val_is_test": False,
              "search": "exact", "dataset_fingerprint": "f", "data_notes": ["smaller"]}  # fmt: skip
    return SplitRun(Path(f"config-{label}/fold{fold}_rep{repeat}"), result, label)


def several() -> tuple[list[SplitRun], pd.DataFrame]:
    """Runs of three methods on two splits, and the frame of their measures and scores."""
    runs, values = [], []
    for label, intra in (("margin", 0.2), ("arcface", 0.3), ("multi_similarity", 0.5)):
        for fold, kind in enumerate(("swapped", "default")):
            for repeat in (0, 1):
                runs.append(split_run(label, fold, repeat, kind=kind))
                own = intra + 0.1 * repeat
                measures = {"intra": own, "inter": 0.5, "density": 2 * own, "spectral_decay": None}
                values.append({**measures, "p_at_1": 1 - intra + 0.02 * fold})
    return runs, frame_of_runs(runs, values)


def test_repeats_are_one_point_and_tables_say_what_is_undefined() -> None:
    runs, frame = several()
    points = points_of(frame, ["p_at_1"])
    assert len(frame) == 12 and len(points) == 6 and points.intra[0] == pytest.approx(0.25)
    assert points.spectral_decay.isna().all()
    found = correlations(points, ["p_at_1"])
    assert found["spearman"].isna().sum() == 6 and len(found) == 12
    text = correlation_tables("cub200 under oodml", runs, found)
    assert "| P@1 | overall | 0 (0) | 1 (5), default |" in text
    assert "| intra-class distance | -1.00 | -1.00 | -1.00 |" in text
    assert "| inter-class distance | undefined | undefined | undefined |" in text
    assert "- points overall: intra-class distance 6, inter-class distance 0" in text
    assert "NOT THE PUBLISHED DATA: smaller" in text


def test_a_picture_has_a_panel_a_measure_and_a_line_of_the_default_split(tmp_path: Path, monkeypatch) -> None:
    figures = []
    monkeypatch.setattr(module, "save_figure", lambda figure, path: figures.append(figure))
    runs, frame = several()
    draw("x", runs, points_of(frame, ["p_at_1"]), tmp_path / "a.png", scores=["p_at_1"])
    panels = figures[0].axes
    assert [line.get_linestyle() for line in panels[0].lines if line.get_marker() == "None"] == ["-", "--"]
    assert len(panels) == len(MEASURES) and not panels[1].lines  # of a constant there is nothing to see
    many = frame_of([(f"m{i}", 0, 0.1 * i, 0.5) for i in range(11)])
    with pytest.raises(ConfigError, match="got 11 methods, expected at most"):
        draw("x", runs, many, tmp_path / "a.png", scores=["p_at_1"])
