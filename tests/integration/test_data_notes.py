"""How data differ from the published ones goes wherever the scores go that they give, and names no config."""

import csv
import json
import logging
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure
from PIL import Image

from dmlbench.apps import explain
from dmlbench.apps.report import page
from dmlbench.cli.main import main
from dmlbench.config import compose
from dmlbench.evaluation.embeddings.embed import load_embeddings
from dmlbench.evaluation.evaluate import evaluate
from dmlbench.identity import config_id
from dmlbench.results.store import EMBEDDINGS, find_runs
from dmlbench.runner import _warn_of_data, run

OVERRIDES = [
    *("dataset=cub200", "dataset.table.check_counts=false", "backbone=resnet20_small", "fit.max_steps=1", "device=cpu"),
    *("fit.validate_every=1", "fit.keep=best", "head.out_features=8", "protocol.num_folds=2", "image_cache=false"),
    *("transform.train.crop=24", "transform.train.resize=28", "transform.eval.crop=24", "transform.eval.resize=28"),
    *("sampler.classes_per_batch=2", "sampler.images_per_class=2", "num_workers=0", "paths.cache_dir=cache"),
    *("paths.data_dir=birds", "paths.output_dir=out", "protocol.num_repeats=1"),
]
NOTES = ["a subset: 32 of 11,788 images", "images rescaled to 32 x 32 pixels", "of unknown edition, 2010 or 2011"]
SAID = f"NOT THE PUBLISHED DATA: {'; '.join(NOTES)}; 16 of 5,924 queries"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of two poolings on rescaled images of a subset: of one both folds, of the other the first."""
    root = tmp_path_factory.mktemp("subset")
    pixels = np.random.default_rng(0).integers(0, 256, (32, 32, 32, 3), dtype=np.uint8)
    for k, image in enumerate(pixels):
        c = (1, 2, 3, 4, 101, 102, 103, 104)[k // 4]
        path = root / "birds" / f"{c:03}.Bird_{c}" / f"{k}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(path)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        for pooling, fold in (("gap", 0), ("gap", 1), ("gmp", 0)):
            cfg = compose("train", [*OVERRIDES, f"pooling={pooling}", f"fold={fold}"])
            cfg.runtime.choices = {"pooling": pooling}
            run(cfg)
        with pytest.raises(SystemExit):
            main(["aggregate", "paths.output_dir=out", "allow_partial=true"])
    return root


@pytest.fixture
def inside(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(folder)
    yield folder


def test_a_run_says_so_in_its_log_and_its_result(inside: Path, caplog: pytest.LogCaptureFixture) -> None:
    cfg = compose("train", [*OVERRIDES, "paths.output_dir=again", "fit.max_steps=0"])
    name = config_id(cfg)
    _warn_of_data.cache_clear()
    with caplog.at_level(logging.WARNING):
        run_dir = run(cfg)
        run(compose("train", [*OVERRIDES, "paths.output_dir=again", "fit.max_steps=0", "repeat=1"]))
    result = json.loads((run_dir / "result.json").read_text())
    assert (result["data_notes"], result["n_query"], result["n_query_published"]) == (NOTES, 16, 5924)
    assert run_dir.parent.name == name
    warned = (
        f"cub200 differs from the published data set: {'; '.join(NOTES)}. Scores may not be comparable with papers."
    )
    assert caplog.text.count(warned) == 1  # not for each run of a sweep


def test_summaries_tables_comparisons_and_evaluations_say_so(inside: Path, command: Callable[..., str]) -> None:
    assert command("aggregate", "paths.output_dir=out", "allow_partial=true").count(SAID) == 2
    assert SAID in command("table", "paths.output_dir=out", "allow_partial=true")
    tables = inside / "out" / "tables"
    assert f"- {SAID}" in (tables / "cub200-mlrc.md").read_text()
    (caption,) = [line for line in (tables / "cub200-mlrc.tex").read_text().splitlines() if "caption" in line]
    assert SAID in caption and "gmp: PARTIAL: 1 of 2 runs" in caption
    rows = list(csv.DictReader((tables / "cub200-mlrc.csv").open()))
    assert [SAID in row["notes"] for row in rows] == [True, True]
    assert [SAID in row["notes"] for row in csv.DictReader((tables / "runs.csv").open())] == [True] * 3
    arguments = ("table", "paths.output_dir=out", "compare=[*gap*,*gmp*]", "allow_partial=true")
    assert SAID in command(*arguments)
    first = find_runs(inside / "out", "*gap*")[0].path
    assert SAID in command("evaluate", f"run={first}", "output=scores.json")
    assert json.loads((inside / "scores.json").read_text())["notes"][0] == SAID


def test_the_picture_says_so_and_shows_queries_of_named_classes_that_agree_with_the_scores(
    inside: Path, command: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    figures: list[Figure] = []
    keep = page.save_figure
    monkeypatch.setattr(page, "save_figure", lambda figure, path: (figures.append(figure), keep(figure, path)))
    options = ("paths.output_dir=out", "allow_partial=true", "queries=4", "evaluation.metrics=[p_at_1]")
    command("report", "--picture", *options)
    (figure,) = figures
    label = figure.get_supxlabel().replace("\n", " ")
    assert SAID in label
    assert "gmp: PARTIAL: 1 of 2 runs" in label
    top, bottom = figure.subfigs
    axis = top.axes[0]
    assert [text.get_text() for text in top.legends[0].get_texts()] == ["gap", "gmp PARTIAL"]
    assert [axis.get_title().split("\n")[1] for axis in top.axes] == ["separated (8-D)", "concatenated (8/16-D)"]
    # one collection each, so no config has a deviation
    assert [len(bars.get_segments()) for bars in axis.collections] == [0]
    galleries = [np.reshape(panel.axes, (4, -1)) for panel in np.ravel(bottom.subfigs)]
    assert len(galleries) == 2
    names = [[row[0].get_ylabel().replace("\n", " ") for row in gallery] for gallery in galleries]
    assert names[0] == names[1]
    assert all(name.startswith("10") and "Bird 10" in name for name in names[0])
    for pattern, gallery, panel in zip(("*gap*", "*gmp*"), galleries, np.ravel(bottom.subfigs), strict=True):
        scores = evaluate(load_embeddings(find_runs(inside / "out", pattern)[0].path / EMBEDDINGS).queries).scores
        right = [row[1].spines["left"].get_linestyle() == "-" for row in gallery]
        assert abs(np.mean(right) - scores["p_at_1"]) <= 1 / 4
        title = panel.get_suptitle().replace("\n", " ")
        assert f"{sum(right)} of 4 queries right, P@1 {100 * scores['p_at_1']:.1f} %" in title
    assert "about the same share right" in bottom.get_suptitle()
    assert (inside / "out" / "tables" / "cub200-mlrc.png").stat().st_size > 10_000


def test_explanations_say_so(inside: Path, command: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    figures: list[Figure] = []
    keep = explain.save_figure
    monkeypatch.setattr(explain, "save_figure", lambda figure, path: (figures.append(figure), keep(figure, path)))
    first = find_runs(inside / "out", "*gap*")[0].path
    command("explain", f"run={first}", "num_images=2", "device=cpu")
    assert figures[0].get_supxlabel().replace("\n", " ") == f"NOT THE PUBLISHED DATA: {'; '.join(NOTES)}"
