"""From a data set to splits, runs over them and their scores, by the commands that users give."""

import os
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from oodml_runs import small_run
from PIL import Image
from safetensors.numpy import load_file, save_file
from written_runs import write_run

from dmlbench.apps.loading import load_run
from dmlbench.cli.main import main
from dmlbench.config import compose
from dmlbench.data.readers.glyphs import glyphs
from dmlbench.data.split_file import read_splits
from dmlbench.evaluation.spec import EvaluationSpec
from dmlbench.identity import config_id
from dmlbench.models.resnet_cifar import ResNet20
from dmlbench.oodml import scores
from dmlbench.results.aggregate import aggregate_config, read_aggregate
from dmlbench.results.rules import area_under
from dmlbench.results.store import find_runs, read_result, runs_by_config
from dmlbench.runner import run
from dmlbench.runtime import read_json, seed_everything, write_json

DATA = ["dataset=glyphs", "dataset.table.num_classes=16", "dataset.table.images_per_class=5", "device=cpu",
        "dataset.table.image_size=24"]  # fmt: skip
SPLITS = [*DATA, "backbone=resnet20_small", "exchanges=4", "reversed_exchanges=2", "removals=3", "keep=0.5", "picks=3",
          "per_step=1", "points=40", "num_workers=0"]  # fmt: skip
RUN = [*DATA, "transform.train.padding=2", "fit=untrained", "fit.keep=none", "head.out_features=8", "protocol=oodml",
       "protocol.num_repeats=2", "fit.monitor=recall_at_1",
       "evaluation.metrics=[recall_at_1,oodml_map_at_1000]"]  # fmt: skip


def dmlbench(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    return int(ended.value.code or 0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("oodml")
    assert dmlbench("oodml", "splits", *SPLITS, *places(root)) == 0
    return root


def places(root: Path) -> list[str]:
    return [f"paths.output_dir={root}/out", f"paths.cache_dir={root}/cache"]


def splits_of(folder: Path) -> Path:
    return folder / "out" / "oodml" / "glyphs-resnet20_small.json"


def test_splits_are_disjoint_grow_apart_and_are_reproducible(folder: Path, capsys) -> None:
    path = splits_of(folder)
    file = read_splits(path)
    distances = [split.distance for split in file.splits]
    assert distances == sorted(set(distances))
    assert "default" in [split.kind for split in file.splits]
    assert all(not set(split.train) & set(split.test) for split in file.splits)
    assert "RANDOM weights" in file.measured_by
    assert {path.name for path in path.parent.iterdir()} == {
        *("glyphs-resnet20_small.json", "glyphs-resnet20_small-way.png", "glyphs-resnet20_small-embedding.png")
    }
    stored = read_json(path)
    assert len(stored["alike"]) == 5
    before = path.read_bytes()
    assert dmlbench("oodml", "splits", *SPLITS, *places(folder), "points=0", f"also={path}") == 0
    assert path.read_bytes() == before
    assert "halves of the same classes, drawn at random" in capsys.readouterr().out
    assert dmlbench("oodml", "splits", *SPLITS, *places(folder), "points=0", "picks=2") == 1
    assert "holds other splits, which runs may need. Set output=<another file>" in capsys.readouterr().err
    assert path.read_bytes() == before


def test_a_step_moves_two_classes_by_default(folder: Path, tmp_path: Path) -> None:
    given = [key for key in SPLITS if key != "per_step=1"]
    made = [tmp_path / f"{name}.json" for name in ("default", "two")]
    for own, path in zip(([], ["per_step=2"]), made, strict=True):
        assert dmlbench("oodml", "splits", *given, *own, *places(folder), "points=0", f"output={path}") == 0
    assert made[0].read_bytes() == made[1].read_bytes() != splits_of(folder).read_bytes()


def test_kept_features_of_another_shape_are_computed_again(folder: Path) -> None:
    (kept,) = (folder / "cache" / "features").glob("*.safetensors")
    features, before = load_file(kept), splits_of(folder).read_bytes()
    save_file({"rows": features["rows"][1:]}, kept)
    assert dmlbench("oodml", "splits", *SPLITS, *places(folder), "points=0") == 0
    assert splits_of(folder).read_bytes() == before
    np.testing.assert_array_equal(load_file(kept)["rows"], features["rows"])


def test_features_are_means_over_all_positions_of_the_last_map(folder: Path) -> None:
    (file,) = (folder / "cache" / "features").iterdir()
    pixels = glyphs(num_classes=16, images_per_class=5, image_size=24, cache_dir=f"{folder}/cache").pixels
    images = torch.from_numpy(np.repeat(pixels[:, None], 3, axis=1))
    seed_everything(0)
    backbone = ResNet20(stem_stride=2).eval()
    with torch.no_grad():
        maps = backbone(backbone.preprocess(images))[-1].double().numpy()
    assert maps.shape == (80, 64, 3, 3)
    total = np.zeros((80, 64))
    for i in range(3):
        for j in range(3):
            total += maps[:, :, i, j]
    np.testing.assert_allclose(load_file(file)["rows"], total / 9, rtol=1e-5, atol=1e-6)


def test_given_splits_are_measured_as_they_were_made(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = folder / "measured.json"
    arguments = [*DATA, "backbone=resnet20_small", "num_workers=0", *places(folder), f"splits={splits_of(folder)}"]
    assert dmlbench("oodml", "distances", *arguments, f"output={output}") == 0
    measured = read_json(output)
    assert measured["spearman"] == pytest.approx(1)
    for own in measured["distances"]:
        assert own["here"] == pytest.approx(own["given"], rel=1e-9)
    assert "rank correlation" in capsys.readouterr().out


def test_runs_over_splits_are_scored_over_their_distance(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    named = [*RUN, f"protocol.splits={splits_of(folder)}", *places(folder)]
    for fold in range(3):
        for repeat in range(2):
            run(compose("train", [*named, f"fold={fold}", f"repeat={repeat}"]))
    ((config, runs),) = runs_by_config(find_runs(folder / "out")).items()
    results = [read_result(run.path) for run in runs]
    distances = [split.distance for split in read_splits(splits_of(folder)).splits]
    assert [result["facts"]["distance"] for result in results] == np.repeat(distances, 2).tolist()
    summary = aggregate_config(runs, progress=False)
    recall = np.array([result["metrics"]["test"]["recall_at_1"] for result in results]).reshape(3, 2)
    at = (np.array(distances) - distances[0]) / (distances[-1] - distances[0])
    areas = [
        sum((at[i + 1] - at[i]) * (recall[i, r] + recall[i + 1, r]) / 2 for i in range(2)) for r in range(2)
    ]  # fmt: skip
    assert summary["scores"]["AGS"]["recall_at_1"]["mean"] == pytest.approx(np.mean(areas), abs=1e-15)
    assert summary["scores"]["AGS"]["recall_at_1"]["std"] == pytest.approx(np.std(areas), abs=1e-15)
    assert summary["scores"]["mean"]["recall_at_1"]["mean"] == pytest.approx(recall.mean(), abs=1e-15)
    assert summary["n_query"] == sum(result["n_query"] for result in results[::2])
    assert [own["distance"] for own in summary["by_split"]] == distances
    assert summary["by_split"][1]["scores"]["recall_at_1"]["mean"] == pytest.approx(recall[1].mean(), abs=1e-15)
    without = aggregate_config(
        [one for one in runs if one.path.name != "fold2_rep1"], allow_partial=True, progress=False
    )
    assert (without["n_runs"], without["n_runs_expected"]) == (3, 6)
    assert without["missing"] == ["fold0_rep1", "fold1_rep1", "fold2_rep1"]
    assert without["scores"]["AGS"]["recall_at_1"]["mean"] == pytest.approx(areas[0], abs=1e-15)
    assert dmlbench("oodml", "scores", *places(folder)[:1], "metrics=recall_at_1,map_at_r", "name=letters") == 0
    printed = capsys.readouterr().out
    assert f"1 ({distances[0]:.1f})" in printed
    assert f"{100 * summary['scores']['AGS']['recall_at_1']['mean']:.2f} ±" in printed
    assert "SELECTED ON TEST" in printed.upper() or "test half" in printed
    names = {path.name for path in (folder / "out" / "tables").iterdir()}
    assert names == {
        f"letters{end}" for end in (".md", ".csv", ".tex", "-recall_at_1.png", "-map_at_r.png", "-areas.png")
    }
    kept = read_aggregate(config)
    assert kept is not None and "map_at_r" in kept["by_split"][0]["scores"]
    assert dmlbench("table", *places(folder)[:1], "facts=[distance]", "metrics=recall_at_1") == 0
    assert "AGS" in capsys.readouterr().out
    assert dmlbench("report", *places(folder)[:1], "metrics=recall_at_1", "overlays=false") == 0
    run(compose("train", [*named, "fold=0", "repeat=0", "head.out_features=4"]))
    capsys.readouterr()
    assert dmlbench("table", *places(folder)[:1], "metrics=recall_at_1", "allow_partial=true") == 0
    out, error = capsys.readouterr()
    assert "AGS" in out and "got splits of 1 distance, expected at least two distances" in error


def test_features_as_they_are_become_a_row_and_a_curve(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = folder / "frozen.json"
    arguments = [*DATA, "backbone=resnet20_small", "num_workers=0", *places(folder), f"splits={splits_of(folder)}"]
    assert dmlbench("oodml", "frozen", *arguments, f"output={output}", "metrics=recall_at_1") == 0
    stored = read_json(output)
    curve = [split["scores"]["recall_at_1"] for split in stored["by_split"]]
    distances = [split["distance"] for split in stored["by_split"]]
    assert stored["AGS"]["recall_at_1"] == pytest.approx(float(area_under(curve, distances)))
    # split 1 by a loop: cosines of the test images' features, each without itself
    (file,) = (folder / "cache" / "features").iterdir()
    rows = load_file(file)["rows"].astype(np.float64)
    table = glyphs(num_classes=16, images_per_class=5, image_size=24, cache_dir=f"{folder}/cache")
    names = read_splits(splits_of(folder)).splits[0].test
    test = [i for i, label in enumerate(table.labels) if table.class_names[label] in names]
    unit = rows[test] / np.linalg.norm(rows[test], axis=1, keepdims=True)
    nearest = (unit @ unit.T - 2 * np.eye(len(test))).argmax(axis=1)
    labels = table.labels[test]
    assert curve[0] == pytest.approx((labels[nearest] == labels).mean())
    assert dmlbench("oodml", "scores", *places(folder)[:1], "metrics=recall_at_1", f"frozen={output}") == 0
    assert "as it is: resnet20_small" in capsys.readouterr().out


def test_features_are_those_of_the_network_as_it_is_configured(folder: Path) -> None:
    """The same first weights with another stride give other features, which must not be taken from the cache."""
    before = set((folder / "cache" / "features").iterdir())
    arguments = [*DATA, "backbone=resnet20", "num_workers=0", *places(folder), f"splits={splits_of(folder)}"]
    assert dmlbench("oodml", "frozen", *arguments, "metrics=recall_at_1") == 0
    (new,) = set((folder / "cache" / "features").iterdir()) - before
    others = [load_file(file)["rows"] for file in before]
    assert not any(np.array_equal(load_file(new)["rows"], rows) for rows in others)


def test_features_of_edited_images_are_computed_again(tmp_path: Path) -> None:
    for c in range(8):
        (tmp_path / "data" / str(c)).mkdir(parents=True)
        pixels = np.random.default_rng(c).integers(0, 256, (24, 24, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(tmp_path / "data" / str(c) / "0.bmp")
    data = ["dataset=folder", f"dataset.table.root={tmp_path}/data", *places(tmp_path), "transform=cifar"]
    given = ["backbone=resnet20_small", "picks=2", "points=0", "num_workers=0", f"output={tmp_path}/a.json"]
    assert dmlbench("oodml", "splits", *data, *given) == 0
    os.utime(tmp_path / "data" / "0" / "0.bmp", (1, 1))
    assert dmlbench("oodml", "splits", *data, *given) == 0
    assert len([*(tmp_path / "cache" / "features").iterdir()]) == 2


def test_a_model_is_tested_on_other_data(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """On its own data, as the trivial other: the scores of its own test half under another protocol."""
    few = ["fit.max_steps=1", "sampler.classes_per_batch=2", "sampler.images_per_class=2"]
    named = [*RUN, *few, "protocol=conventional", "fit.keep=best", "protocol.num_repeats=1"]
    named = [name for name in named if name not in ("fit.keep=none", "protocol=oodml", "protocol.num_repeats=2")]
    directory = run(compose("train", [*named, *places(folder)]))
    output = folder / "transfer.json"
    arguments = [*DATA, "backbone=resnet20_small", "num_workers=0", *places(folder), "metrics=recall_at_1,p_at_1"]
    assert dmlbench("oodml", "transfer", *arguments, f"runs={directory}", f"output={output}") == 0
    stored = read_json(output)
    assert [row["trained_on"] for row in stored["rows"]] == ["glyphs", "as it is"]
    expected = read_result(Path(directory))["metrics"]["test"]["recall_at_1"]
    assert stored["rows"][0]["scores"]["recall_at_1"] == expected
    assert "glyphs -> glyphs" in capsys.readouterr().out


def by_loops(rows: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    """R@1 and MAP@R of each item against all others, by cosine."""
    unit = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    hits, precision = [], []
    for q in range(len(unit)):
        others = [i for i in np.argsort(-unit @ unit[q]) if i != q]
        number = sum(labels[i] == labels[q] for i in others)
        right = [labels[i] == labels[q] for i in others[:number]]
        hits.append(right[0])
        precision.append(sum(right[k] * sum(right[: k + 1]) / (k + 1) for k in range(number)) / number)
    return {"recall_at_1": float(np.mean(hits)), "map_at_r": float(np.mean(precision))}


def test_a_model_embeds_the_images_of_another_data_set_as_its_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By its own transform, which crops nothing, while the features of the command's backbone are of crops."""
    directory = small_run(tmp_path)
    data = ["dataset=glyphs", "dataset.table.num_classes=12", "dataset.table.images_per_class=5", "device=cpu",
            "dataset.table.image_size=32", "dataset.table.seed=1", "transform=mlrc", "transform.eval.resize=24",
            "transform.eval.crop=20", "backbone=resnet20_small", "num_workers=0", *places(tmp_path)]  # fmt: skip
    named = [f"runs={directory}", f"output={tmp_path}/a.json", "metrics=[recall_at_1,map_at_r]"]
    assert dmlbench("oodml", "transfer", *data, *named) == 0
    (file,) = (tmp_path / "cache" / "features").iterdir()
    table = glyphs(num_classes=12, images_per_class=5, image_size=32, seed=1, cache_dir=f"{tmp_path}/cache")
    test = table.role == "test"
    labels, images = table.labels[test], torch.from_numpy(np.repeat(table.pixels[test][:, None], 3, axis=1))
    with torch.no_grad():
        model = load_run(directory, {"num_workers": 0}, device="cpu").model
        embeddings = model(images).embedding.double().numpy()
    rows = read_json(tmp_path / "a.json")["rows"]
    assert [row["trained_on"] for row in rows] == ["glyphs", "as it is"]
    printed = capsys.readouterr().out.splitlines()
    for row, line, vectors in zip(rows, printed[1:], (embeddings, load_file(file)["rows"][test]), strict=False):
        expected = by_loops(vectors, labels)
        assert row["scores"] == pytest.approx(expected)
        percent = [100 * expected[name] for name in ("recall_at_1", "map_at_r")]
        assert [float(score) for score in line.split()[-2:]] == pytest.approx(percent, abs=0.006)
    assert rows[0]["scores"] != rows[1]["scores"]


def test_the_config_hash_includes_the_contents_of_the_split_file(folder: Path, tmp_path: Path) -> None:
    copied = tmp_path / "elsewhere.json"
    copied.write_bytes(splits_of(folder).read_bytes())
    here, there = (
        compose("train", [*RUN, f"protocol.splits={path}"], with_hydra=False) for path in (splits_of(folder), copied)
    )
    for cfg in (here, there):
        cfg.runtime.choices = {}
    assert config_id(here) == config_id(there)
    changed = read_json(copied)
    copied.write_text(copied.read_text().replace(changed["measured_by"], "another network"))
    other = compose("train", [*RUN, f"protocol.splits={copied}"])
    other.runtime.choices = {}
    assert config_id(other) != config_id(here)


def test_areas_have_a_closed_form() -> None:
    assert area_under([1.0, 0.5], [3, 8]) == pytest.approx(0.75)
    assert area_under([[1.0, 0.5, 0.0], [1, 1, 1]], [10, 15, 20]).tolist() == [0.5, 1.0]


def write_runs_over_splits(root: Path) -> None:
    """Two repeats of three splits, whose order in the file is not the order of their distances: b, c, a."""
    splits = [("a", 8.0, (0.2, 0.4)), ("b", 2.0, (0.6, 0.8)), ("c", 4.0, (0.5, 0.5))]
    for fold, (name, distance, recall) in enumerate(splits):
        facts = {"split": name, "kind": "exchanged", "distance": distance, "distance_by": "a ruler"}
        for repeat in (0, 1):
            path = root / "out" / "glyphs" / "oodml" / "config-1" / f"fold{fold}_rep{repeat}"
            write_run(
                path, "fit: {max_steps: 1}\n", protocol="oodml", aggregation="over_splits", num_folds=3, num_repeats=2,
                facts=facts, metrics={"test": {"recall_at_1": recall[repeat]}}, monitor="recall_at_1",
            )  # fmt: skip


# trapezoids at distances 2, 4, 8, which are 0, 1/3 and 1 of the way
AREAS = [0.55 / 3 + 0.35 * 2 / 3, 0.65 / 3 + 0.45 * 2 / 3]


def test_areas_are_under_splits_in_the_order_of_their_distances(tmp_path: Path) -> None:
    write_runs_over_splits(tmp_path)
    summary = aggregate_config(find_runs(tmp_path / "out"), EvaluationSpec(metrics=("recall_at_1",)), progress=False)
    area, by_split = summary["scores"]["AGS"]["recall_at_1"], summary["by_split"]
    assert area == pytest.approx({"mean": np.mean(AREAS), "std": abs(AREAS[1] - AREAS[0]) / 2})
    assert [(own["split"], own["distance"]) for own in by_split] == [("b", 2.0), ("c", 4.0), ("a", 8.0)]
    assert [own["scores"]["recall_at_1"]["mean"] for own in by_split] == pytest.approx([0.7, 0.5, 0.3])


def test_tables_and_figures_have_percent_over_ascending_distances(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_runs_over_splits(tmp_path)
    curve = [{"split": name, "distance": at, "scores": {"recall_at_1": value}}
             for name, at, value in (("b", 2.0, 0.1), ("c", 4.0, 0.2), ("a", 8.0, 0.05))]  # fmt: skip
    document = {"dataset": "glyphs", "network": "net", "notes": [], "by_split": curve, "AGS": {"recall_at_1": 0.125}}
    write_json(tmp_path / "frozen.json", document)
    figures = []
    monkeypatch.setattr(scores, "save_figure", lambda figure, path: figures.append(figure))
    given = ["metrics=recall_at_1", f"frozen={tmp_path}/frozen.json", "name=a"]
    assert dmlbench("oodml", "scores", *places(tmp_path)[:1], *given) == 0
    table = pd.read_csv(tmp_path / "out" / "tables" / "a.csv")
    means = table.filter(regex=" mean$")
    assert means.columns.tolist() == [f"R@1 {head} mean" for head in ("b (2.0)", "c (4.0)", "a (8.0)", "AGS")]
    trained, frozen = [70, 50, 30, 100 * np.mean(AREAS)], [10, 20, 5, 12.5]
    np.testing.assert_allclose(means, [trained, frozen])
    top = figures[0].axes[0]
    np.testing.assert_allclose([line.get_xdata() for line in top.lines], [[2, 4, 8]] * 2)
    np.testing.assert_allclose([line.get_ydata() for line in top.lines], [trained[:3], frozen[:3]])
    assert figures[1].axes[0].patches[0].get_height() == pytest.approx(trained[3])


@pytest.mark.fast_sample(3)
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["oodml"], "dmlbench oodml: got '', expected a subcommand: choose one of distances"),
        (["oodml", "split"], "got 'split', expected a subcommand: did you mean 'splits'?"),
        (["oodml", "splits", *SPLITS, "picks=1"], "picks: got 1, expected at least 2."),
        (["oodml", "splits", *SPLITS, "keep=2"], "keep: got 2.0, expected a number in [0, 1]."),
        (["oodml", "splits", *SPLITS, "over=pixels"], "over 'pixels' is unknown"),
        (["oodml", "splits", *SPLITS, "also=none.json"], "split file none.json is missing"),
        (["oodml", "distances", *DATA], "got splits=None and train=None, expected one of them"),
        (["oodml", "distances", *DATA, "train=sop", "splits=a"], "got splits=a and train=sop, expected one of them"),
        (["oodml", "distances", *DATA, "train=cifar100_collage_distilled"], "CIFAR-100 cannot be found"),
        (["oodml", "frozen", *DATA], "splits is missing: expected splits=<file of"),
        (["oodml", "transfer", *DATA], "runs is missing: expected runs=<run directory>"),
        (["oodml", "scores", "frozen=none.json"], "'none.json' has no scores of frozen features"),
        (["oodml", "structure", "name=a/b"], "name: got 'a/b', expected a file name"),
        (["oodml", "few_shot", "shots=[2,x]"], "shots: got [2, 'x'], expected whole numbers"),
        (["oodml", "few_shot", "merge_order=[a,b]"], "merge_order: got ['a', 'b'] without official=<file>"),
        (["oodml", "few_shot", "official=a.pkl"], "merge_order: got [], expected [<folder>,<folder>]"),
        (["oodml", "few_shot", "run=a", "configs=b"], "got run=['a'] and configs=b, expected one of them"),
        (["train", *RUN], "protocol.splits: got nothing, expected a file of splits"),
        (["train", *RUN, "protocol.splits=none.json"], "protocol.splits: got none.json, expected a file of splits"),
    ],
)
def test_errors_of_oodml(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert dmlbench(*arguments, *(places(tmp_path) if len(arguments) > 2 else [])) in (1, 2)
    assert message in capsys.readouterr().err
