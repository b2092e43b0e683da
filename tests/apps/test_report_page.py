"""The page of a report: its numbers by other ways, and what a person does with it in a real browser."""

import base64
import copy
import dataclasses
import io
import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from composed import arguments
from PIL import Image
from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import Select, WebDriverWait

from dmlbench.apps.compare_configs import (
    ConfigSummary,
    _require_readable,
    build_tables,
    compare_configs,
    find_configs,
)  # fmt: skip
from dmlbench.apps.import_embeddings import import_config
from dmlbench.apps.report import numbers, page
from dmlbench.apps.report.numbers import paper_scores
from dmlbench.cli.main import main
from dmlbench.components import component
from dmlbench.config import compose
from dmlbench.evaluation.embeddings.embed import load_embeddings
from dmlbench.evaluation.spec import EvaluationSpec
from dmlbench.papers import load_table
from dmlbench.results.store import EMBEDDINGS
from dmlbench.runner import run
from dmlbench.runtime import generator
from dmlbench.training.log import read_history
from dmlbench.types import RunError

pytestmark = pytest.mark.slow

SMALL = [
    *("dataset=glyphs_collage", "dataset.table.num_classes=16", "dataset.table.images_per_class=6"),
    *("dataset.table.image_size=32", "transform=shift", "transform.train.padding=2", "backbone=resnet20_small"),
    *("loss=contrastive", "sampler.classes_per_batch=4", "sampler.images_per_class=2", "head.out_features=8"),
    *("device=cpu", "num_workers=0", "fit.max_steps=6", "fit.validate_every=3", "fit.log_every=2", "fit.keep=best"),
    *("protocol.num_folds=2", "protocol.num_repeats=2", "paths.output_dir=out", "paths.cache_dir=cache"),
]
SPEC = EvaluationSpec(metrics=("p_at_1", "map_at_r"))
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
DRIVER = shutil.which("chromedriver")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Runs of three poolings and of the untrained network, and a page of them; one pooling lacks a run."""
    root = tmp_path_factory.mktemp("report")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        rows = [
            ("gap", "", 4),
            ("gsp_small", "pooling.memory_rows=16 pooling.num_prototypes=8", 4),
            ("gmp", "", 3),
            ("gap", "fit.max_steps=0", 4),
        ]
        for pooling, more, count in rows:
            cfg = compose("train", [*SMALL, f"pooling={pooling}", *more.split()])
            cfg.runtime.choices = {"pooling": pooling, "loss": "contrastive", "backbone": "resnet20_small"}
            cfg.runtime.given = [override.partition("=")[0] for override in more.split()]
            for i in range(count):
                cfg.fold, cfg.repeat = divmod(i, 2)
                run(copy.deepcopy(cfg))
        _import_rows(root)
        for command in (["aggregate"], ["report", "queries=4", "nearest=3", "device=cpu"]):
            with pytest.raises(SystemExit) as exited:
                main([*command, "paths.output_dir=out", "allow_partial=true"])
            assert exited.value.code == 0
        yield root


def _import_rows(root: Path) -> None:
    """Test rows of other code, which has no model, no history and no curves."""
    data = [override for override in SMALL if override.startswith(("dataset", "protocol.num", "paths"))]
    names = "embeddings=rows/fold{fold}_rep{repeat}.npz"
    args = arguments("import", "name=theirs", *data)
    args.embeddings = names.partition("=")[2]
    table, rng = component(args.dataset["table"]), np.random.default_rng(0)
    (root / "rows").mkdir()
    for fold, repeat in np.ndindex(2, 2):
        test = component(args.protocol).split(table, fold=fold).test.query
        rows = rng.normal(size=(len(test), 4)).astype(np.float32)
        np.savez(root / f"rows/fold{fold}_rep{repeat}.npz", rows=rows, labels=table.labels[test], ids=test)
    import_config(args)


@pytest.fixture(scope="module")
def configs(folder: Path) -> list[ConfigSummary]:
    ((_, found),) = find_configs("out", "**", SPEC, allow_partial=True).items()
    return list(found)


@pytest.fixture(scope="module")
def content(folder: Path) -> dict[str, Any]:
    text = (folder / "out/tables/report.html").read_text()
    (data,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', text, flags=re.DOTALL)
    return json.loads(data)


def _decoded(picture: str) -> Image.Image:
    assert picture.startswith("data:image/webp;base64,")
    return Image.open(io.BytesIO(base64.b64decode(picture.partition(",")[2])))


def test_scores_are_those_of_the_table(configs: list[ConfigSummary], content: dict[str, Any]) -> None:
    (table,) = build_tables({("a", "b"): configs}, SPEC).values()
    found = content["groups"][0]["leaderboard"]
    assert [column["metric"] for column in found["columns"]] == [metric for _, metric in table.columns]
    for (label, *entries), row in zip(table.frame.itertuples(name=None), found["rows"], strict=True):
        assert row["label"].removesuffix(" PARTIAL") == label
        for entry, score in zip(entries, row["scores"], strict=True):
            assert score["text"] == str(entry)
            assert score["mean"] == pytest.approx(entry.mean, rel=1e-5)
            assert score["std"] == (None if entry.std is None else pytest.approx(entry.std, rel=1e-5, abs=1e-9))
    partial = [row for row in found["rows"] if row["label"].endswith("PARTIAL")]
    assert [row["label"] for row in partial] == ["gmp PARTIAL"]
    assert "without fold1_rep1" in " ".join(partial[0]["notes"])
    assert not partial[0]["competes"]
    note = "Rows also differ in pooling.memory_rows, pooling.num_prototypes (values: column settings of the CSV)"
    assert note in found["notes"]
    assert (
        configs[[c.label for c in configs].index("gsp_small")].settings["pooling.num_prototypes"] == "8 (given by hand)"
    )
    shared = content["groups"][0]["shared"]
    assert shared.startswith(
        "All rows but imported ones: resnet20_small backbone (random initial weights), 32 x 32 pixels, "
    )
    assert " Trained rows: contrastive loss, batches of 4 classes x 2 images, " in shared


def test_the_headline_names_the_first_two_ranked_configs_and_their_paired_interval(
    configs: list[ConfigSummary], content: dict[str, Any], folder: Path
) -> None:
    (table,) = build_tables({("a", "b"): configs}, SPEC).values()
    (column,) = [name for name in table.frame if name[0].startswith("separated") and name[1] == "MAP@R"]
    entries = zip(table.frame[column], table.frame.index, table.competes, strict=True)
    (top, best), (lower, other), *_ = sorted(
        ((e.mean, label) for e, label, competes in entries if competes), reverse=True
    )
    headline = content["groups"][0]["headline"]
    start = f"Highest MAP@R: {best}, {top:.2f} % (separated); {top - lower:.2f} points above {other}, the next config. "
    labels = [config.label for config in configs]
    a, b = sorted((labels.index(best), labels.index(other)))
    pairs = content["groups"][0]["differences"]
    joint = next(d for d in pairs if (d["a"], d["b"], d["metric"]) == (a, b, "map_at_r"))["joint"]
    low, high = sorted(x if labels[b] == best else -x for x in joint)
    zero = "includes" if low <= 0 <= high else "excludes"
    interval = f"(Bonferroni, 4 comparisons), [{low:+.2f}, {high:+.2f}], {zero} 0."
    assert headline == f"{start}The 95 % interval of the paired difference {interval}"
    text = (folder / "out/tables/report.html").read_text()
    assert f'<div id="headlines"><p>{headline}</p></div>' in text  # also without JavaScript
    assert "<noscript><p>Enable JavaScript" in text


_PAIR = {"a": 0, "b": 1, "metric": "map_at_r", "interval": [-0.2, 0.9], "joint": [-0.2, 0.9]}
_FIRST = "Highest MAP@R: c0, 12.50 % (mean); 0.50 points above c1, the next config. "
_SECOND = "Highest MAP@R: c1, 12.50 % (mean); 0.50 points above c0, the next config. "


@pytest.mark.parametrize(
    ("means", "pair", "expected"),
    [
        ((12.0, 12.5), {}, _SECOND + "The 95 % interval of the paired difference, [-0.20, +0.90], includes 0."),
        ((12.5, 12.0), {"joint": [-0.9, -0.1]},
         _FIRST + "The 95 % interval of the paired difference, [+0.10, +0.90], excludes 0."),
        ((12.5, 12.0), {"why": "they have no run in common", "joint": None},
         _FIRST + "No interval of the paired difference: they have no run in common."),
        ((12.5, 12.0), {"joint": None},
         _FIRST + "No interval of the paired difference: too few different pairs of runs."),
        ((12.5, 12.0), {"metric": "p_at_1"},
         _FIRST + "No interval of the paired difference: single runs do not have this score."),
        ((12.5, None), {}, "Highest MAP@R: c0, 12.50 % (mean); no other config is ranked."),
        ((None, None), {}, "No config is ranked by MAP@R: see the notes below the scores."),
    ],
)  # fmt: skip
def test_the_headline_of_two_configs(means: tuple[float | None, ...], pair: dict[str, Any], expected: str) -> None:
    pairs = [{**_PAIR, **pair}]
    board = {
        "columns": [{"kind": "mean (8-D)", "metric": "P@1"}, {"kind": "mean (8-D)", "metric": "MAP@R"}],
        "main": 1,
        "rows": [
            {
                "label": f"c{i}",
                "competes": True,
                "scores": [None, mean and {"text": f"{mean:.2f} ± 1.00", "mean": mean}],
            }
            for i, mean in enumerate(means)
        ],
    }
    metrics = [{"name": "p_at_1", "label": "P@1"}, {"name": "map_at_r", "label": "MAP@R"}]
    assert numbers.headline(board, metrics, pairs) == expected
    assert numbers.headline({**board, "main": None}, metrics, pairs) == ""
    columns = [{**column, "kind": "best"} for column in board["columns"]]
    if None not in means:
        best = expected.partition(". ")[0].replace("(mean)", "(best)")
        why = "No interval of the paired difference: pairs of runs are compared by their mean, not by best."
        assert numbers.headline({**board, "columns": columns}, metrics, pairs) == f"{best}. {why}"


def test_curves_have_names_in_words() -> None:
    names = ("train/loss", "train/dml", "train/zsr", "lr", "val/recall_at_10")
    assert [numbers.curve_label(name) for name in names] == [
        "training loss", "training loss of the metric-learning objective (without regularizers)", "training: zsr",
        "learning rate", "validation R@10",
    ]  # fmt: skip


def test_differences_are_those_of_the_command_and_the_joint_interval_is_wider(
    configs: list[ConfigSummary], content: dict[str, Any]
) -> None:
    found = content["groups"][0]["differences"]
    assert len(found) == 10 * 2  # pairs of five configs, two scores
    of = {config.label: i for i, config in enumerate(configs)}
    first, second = sorted((of["gap"], of["gsp_small"]))
    one = next(d for d in found if (d["a"], d["b"], d["metric"]) == (first, second, "map_at_r"))
    patterns = [str(configs[i].path.relative_to("out")) for i in (first, second)]
    told = compare_configs("out", patterns, SPEC).differences["map_at_r"]
    assert one["difference"] == pytest.approx(100 * told.difference, rel=1e-4, abs=1e-9)
    assert one["interval"] == pytest.approx([100 * x for x in told.interval or ()], rel=1e-4)
    assert (one["pairs"], one["of"], one["over"]) == (4, 4, "repeats within folds")
    width, joint = (one[key][1] - one[key][0] for key in ("interval", "joint"))
    # four comparisons of a config, two degrees of freedom: t of 1 - 0.05/8 over t of 0.975
    assert joint / width == pytest.approx(8.8602 / 4.3027, rel=1e-3)
    with_gmp = next(d for d in found if of["gmp"] in (d["a"], d["b"]))
    assert (with_gmp["pairs"], with_gmp["of"]) == (3, 4)


def test_curves_are_means_over_runs(configs: list[ConfigSummary], content: dict[str, Any]) -> None:
    place = next(i for i, config in enumerate(configs) if config.label == "gap")
    assert next(iter(content["groups"][0]["curves"])) == "val/map_at_r"
    assert content["groups"][0]["curve_labels"]["val/map_at_r"] == "validation MAP@R"
    own = content["groups"][0]["curves"]["val/map_at_r"][place]
    logged = [
        {step: value for step, name, value in read_history(run.path / "history.csv") if name == "val/map_at_r"}
        for run in configs[place].runs
    ]
    assert own["steps"] == [3, 6]
    assert own["runs"] == 4
    for part, function in (("mean", np.mean), ("min", min), ("max", max)):
        assert own[part] == pytest.approx([100 * function([h[s] for h in logged]) for s in (3, 6)], rel=1e-4)


def test_classes_are_means_over_their_queries(configs: list[ConfigSummary], content: dict[str, Any]) -> None:
    found = content["groups"][0]["classes"]
    assert (found["of"], len(found["rows"])) == (8, 8)
    place = next(i for i, config in enumerate(configs) if config.label == "gmp")
    frames = [pd.read_csv(run.path / "per_query.csv") for run in configs[place].runs if run.state == "done"]
    label = frames[0]["label"].min()
    expected = np.mean([100 * frame[frame["label"] == label]["p_at_1"].mean() for frame in frames])
    assert found["rows"][0]["scores"][0][place] == pytest.approx(expected, rel=1e-4)
    assert found["rows"][0]["queries"] == 6
    hardest = numbers.classes(configs, ["p_at_1"], None, 3)["rows"]
    mean = [np.mean(row["scores"][0]) for row in found["rows"]]
    assert sorted(np.mean(row["scores"][0]) for row in hardest) == pytest.approx(sorted(mean)[:3])


def test_galleries_show_what_is_nearest_of_a_random_sample_then_of_failures(
    configs: list[ConfigSummary], content: dict[str, Any]
) -> None:
    gallery = content["groups"][0]["gallery"]
    assert gallery["random"] == 4 and len(gallery["queries"]) == 6  # and half as many failures
    assert len(set(gallery["queries"])) == 6
    total = configs[0].summary["n_query"]
    order = generator("report", total).permutation(total).tolist()
    stored = load_embeddings(next(r.path for r in configs[0].runs if r.state == "done") / EMBEDDINGS).queries
    assert gallery["queries"][:4] == [int(stored.ids[place]) for place in order[:4]]
    fails = []
    for i, own in gallery["configs"].items():
        stored = load_embeddings(next(r.path for r in configs[int(i)].runs if r.state == "done") / EMBEDDINGS).queries
        rows, ids = stored.rows.double().numpy(), stored.ids.tolist()
        rows = rows / np.linalg.norm(rows, axis=1, keepdims=True)
        for query, near in zip(gallery["queries"], own["nearest"], strict=True):
            alike = rows @ rows[ids.index(query)]
            alike[ids.index(query)] = -np.inf
            best = np.argsort(-alike)[:3]
            assert [row for row, _ in near] == [ids[j] for j in best]
            right = stored.labels.numpy()[best] == stored.labels.numpy()[ids.index(query)]
            assert [is_right for _, is_right in near] == right.tolist()
            fails.append((query, not right[0]))
    wrong = {query: sum(fail for q, fail in fails if q == query) for query in gallery["queries"][4:]}
    assert all(count > len(gallery["configs"]) / 2 for count in wrong.values())
    assert set(gallery["images"]) == set(gallery["names"])
    assert set(gallery["configs"]) == {str(i) for i in range(len(configs))}
    for i, own in gallery["configs"].items():
        assert own["score"] == f", P@1 {100 * configs[int(i)].summary['raw'][own['run']]['p_at_1']:.1f} %"


def test_a_representative_sample_has_the_share_of_right_queries_of_every_config() -> None:
    rng = np.random.default_rng(0)
    places = rng.permutation(1000)[:200]
    right = rng.random((3, 200)) < np.array([[0.1], [0.5], [0.9]])
    drawn = page.DrawnQueries(places, right)
    chosen = drawn.representative(10)
    found = [right[:, places.tolist().index(place)] for place in chosen]
    assert np.abs(np.mean(found, axis=0) - right.mean(1)).max() < 0.1
    assert len(set(chosen.tolist())) == 10 and drawn.representative(10).tolist() == chosen.tolist()
    failures = drawn.failures(5, after=20).tolist()
    assert not set(failures) & set(drawn.first(20).tolist())
    assert [int((~right[:, places.tolist().index(place)]).sum()) for place in failures] == [3] * 5
    assert page.DrawnQueries(places, np.ones_like(right)).failures(5, after=0).tolist() == []


def test_only_configs_with_unequal_pooling_weights_have_overlays(
    configs: list[ConfigSummary], content: dict[str, Any]
) -> None:
    overlays = content["groups"][0]["overlays"]
    places = {config.label: str(i) for i, config in enumerate(configs)}
    assert set(overlays["configs"]) == {places["gsp_small"], places["gmp"]}
    assert set(overlays["why"]) == {places["theirs (imported)"]}
    assert all(parts[2] is None for parts in overlays["configs"][places["gmp"]])
    of_gsp = overlays["configs"][places["gsp_small"]]
    assert all(parts[2] is not None for parts in of_gsp)
    assert max(np.ptp(np.asarray(_decoded(parts[1]), dtype=int), axis=2).max() for parts in of_gsp) > 30


def test_settings_and_provenance_are_those_of_the_runs(configs: list[ConfigSummary], content: dict[str, Any]) -> None:
    group, places = content["groups"][0], {config.label: i for i, config in enumerate(configs)}
    settings = group["settings"]
    a, b = settings[places["gap"]], settings[places["gap (no training)"]]
    assert {key for key in a if a[key] != b.get(key)} == {"fit.max_steps"}
    assert (a["fit.max_steps"], b["fit.max_steps"]) == ("6", "0")
    told = dict(group["provenance"][places["gmp"]])
    assert told["runs"] == "3 of 4, base seed 0"
    assert told["selected by"] == "map_at_r, on validation classes"
    theirs = places["theirs (imported)"]
    assert dict(group["provenance"][theirs])["selected by"] == "unknown (imported)"
    assert all(own[theirs] is None for own in group["curves"].values())
    assert "imported" in group["overlays"]["why"][str(theirs)]
    assert str(theirs) in group["gallery"]["configs"]


def test_a_paper_stands_beside_a_config_of_its_recipe_and_choices(configs: list[ConfigSummary]) -> None:
    choices = {"recipe": "gsp", "pooling": "gsp", "loss": "contrastive", "head": "linear", "backbone": "resnet20_small"}
    choices |= {"regularizer": "zsr", "miner": "None"}
    summary = {**configs[1].summary, "dataset": "cub200", "choices": choices}
    found = paper_scores([ConfigSummary(configs[1].path, configs[1].runs, summary, "x")])
    printed = {
        (s.metric, s.kind): str(s.mean) for s in load_table("gsp/table2") if (s.row, s.dataset) == ("C2+GSP", "cub200")
    }
    ours = [one for one in found if one["table"] == "gsp/table2"]
    assert {one["row"] for one in ours} == {"C2+GSP"}
    assert {one["paper"] for one in ours} == set(printed.values())
    assert all(one["verdict"] == "not comparable" and "resnet20_small instead of" in one["note"] for one in ours)
    assert all("fit.max_steps 6 instead of " in one["note"] for one in ours)
    assert paper_scores(configs) == []  # no recipe
    again = {**summary, "choices": {**choices, "rerank": "diml"}}
    assert not paper_scores([ConfigSummary(configs[1].path, configs[1].runs, again, "x")])  # no row is reranked


@pytest.fixture(scope="module")
def browser() -> Iterator[webdriver.Chrome]:
    if CHROMIUM is None or DRIVER is None:
        pytest.skip("no Chromium with its driver on PATH; on Debian: apt-get install chromium chromium-driver")
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for argument in ("--headless=new", "--disable-gpu", "--window-size=1300,1000", "--disable-dev-shm-usage"):
        options.add_argument(argument)
    if hasattr(os, "geteuid") and os.geteuid() == 0:
        options.add_argument("--no-sandbox")  # root has none
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    yield driver
    driver.quit()


@pytest.fixture
def opened(browser: webdriver.Chrome, folder: Path) -> webdriver.Chrome:
    _open(browser, folder / "out/tables/report.html")
    return browser


def _open(browser: webdriver.Chrome, path: Path) -> None:
    """Open a page that has rows; the first one of a browser may be reported as loaded before its script has run."""
    browser.get(path.resolve().as_uri())
    WebDriverWait(browser, 60).until(lambda driver: driver.find_elements(By.CSS_SELECTOR, "#leaderboard tbody tr"))


def _labels(browser: webdriver.Chrome, table: str = "leaderboard", column: int = 1) -> list[str]:
    configs = browser.find_elements(By.CSS_SELECTOR, f"#{table} tbody tr td:nth-child({column})")
    return [config.text for config in configs]


def _numbers(texts: list[str]) -> list[float]:
    return [float(text.split(" ")[0]) for text in texts]


@pytest.mark.slow
def test_heads_sort_and_words_filter(opened: webdriver.Chrome) -> None:
    assert _numbers(_labels(opened, column=3)) == sorted(_numbers(_labels(opened, column=3)), reverse=True)
    opened.find_elements(By.CSS_SELECTOR, "#leaderboard th button")[1].click()
    assert _numbers(_labels(opened, column=2)) == sorted(_numbers(_labels(opened, column=2)), reverse=True)
    opened.find_elements(By.CSS_SELECTOR, "#leaderboard th button")[1].click()
    assert _numbers(_labels(opened, column=2)) == sorted(_numbers(_labels(opened, column=2)))
    box = opened.find_element(By.ID, "filter")
    box.send_keys("gap no")
    assert _labels(opened) == ["gap (no training)"]
    assert opened.find_element(By.ID, "count").text == "1 of 5 rows"
    assert len(opened.find_elements(By.CSS_SELECTOR, "#bars-chart .bars .point")) == 1
    box.clear()
    box.send_keys(Keys.SPACE)
    assert len(_labels(opened)) == 5


@pytest.mark.slow
def test_choosing_configs_and_scores_changes_what_is_shown(opened: webdriver.Chrome, content: dict[str, Any]) -> None:
    labels = [row["label"] for row in content["groups"][0]["leaderboard"]["rows"]]
    Select(opened.find_element(By.ID, "config-a")).select_by_visible_text("gap")
    Select(opened.find_element(By.ID, "config-b")).select_by_visible_text("gap (no training)")
    settings = [_labels(opened, "settings-table", column) for column in (1, 2, 3)]
    assert settings == [["fit.max_steps"], ["6"], ["0"]]
    for other in set(labels) - {"gap"}:
        row = _labels(opened, "differences-table").index(other)
        a, b = sorted((labels.index("gap"), labels.index(other)))
        one = next(
            d for d in content["groups"][0]["differences"] if (d["a"], d["b"], d["metric"]) == (a, b, "map_at_r")
        )
        sign = 1 if b == labels.index(other) else -1
        told = float(_labels(opened, "differences-table", 2)[row])
        assert told == pytest.approx(sign * one["difference"], abs=0.0051)
    Select(opened.find_element(By.ID, "score")).select_by_index(3)
    assert "MAP@R" in opened.find_element(By.CSS_SELECTOR, "#bars-chart .xtitle").text
    headings = [heading.text for heading in opened.find_elements(By.CSS_SELECTOR, "#gallery-body h3")]
    assert headings == ["4 queries drawn at random", "2 failures"]
    frames = opened.find_elements(By.CSS_SELECTOR, "#gallery-body .retrieval")
    a = str(labels.index("gap"))
    for q, frame in enumerate(frames):
        line = frame.find_elements(By.CSS_SELECTOR, ":scope > div:last-child .retrieved")[0]
        shown = ["right" in item.get_attribute("class") for item in line.find_elements(By.TAG_NAME, "li")]
        assert shown == [is_right for _, is_right in content["groups"][0]["gallery"]["configs"][a]["nearest"][q]]
    assert len(frames) == 6
    assert frames[0].find_element(By.TAG_NAME, "img").size["width"] > 150


def test_the_page_opens_on_the_headline_shared_settings_and_scores(
    opened: webdriver.Chrome, content: dict[str, Any]
) -> None:
    assert opened.find_element(By.CSS_SELECTOR, "main > *").text == content["groups"][0]["headline"]
    sections = [section.get_attribute("id") for section in opened.find_elements(By.CSS_SELECTOR, "main section")]
    assert sections[:5] == ["scores", "bars", "differences", "papers", "curves"]
    curve = Select(opened.find_element(By.ID, "curve"))
    assert curve.first_selected_option.text == "validation MAP@R"
    titles = {option.text: option.get_attribute("title") for option in curve.options}
    assert titles["training loss of the metric-learning objective (without regularizers)"] == "train/dml"
    assert opened.find_element(By.CSS_SELECTOR, "#curves-chart .ytitle").text == "validation MAP@R"
    assert opened.find_element(By.ID, "shared").text == content["groups"][0]["shared"]
    opened.find_element(By.CSS_SELECTOR, "#settings summary").click()
    names = [name.text for name in opened.find_elements(By.CSS_SELECTOR, "#shared-settings dt")]
    assert "optim.lr" in names and "fit.max_steps" not in names


def test_pooling_weights_are_hidden_where_neither_config_has_any(opened: webdriver.Chrome) -> None:
    def choose(a: str, b: str) -> tuple[bool, bool, int]:
        Select(opened.find_element(By.ID, "config-a")).select_by_visible_text(a)
        Select(opened.find_element(By.ID, "config-b")).select_by_visible_text(b)
        section = opened.find_element(By.ID, "overlays")
        link = opened.find_element(By.CSS_SELECTOR, "#sections a[href='#overlays']")
        return section.is_displayed(), link.is_displayed(), len(section.find_elements(By.CSS_SELECTOR, ".sides > div"))

    assert choose("gap", "gap (no training)") == (False, False, 0)
    assert choose("gap", "gsp_small") == (True, True, 1)
    assert choose("theirs (imported)", "gsp_small") == (True, True, 2)  # with the reason


def test_only_scores_are_choices_and_the_axis_of_differences_has_0(
    browser: webdriver.Chrome, content: dict[str, Any], tmp_path: Path
) -> None:
    changed = copy.deepcopy(content)
    (group,) = changed["groups"]
    group["leaderboard"]["columns"].append({"kind": "", "metric": "trained"})
    for row in group["leaderboard"]["rows"]:
        row["scores"].append("1,000")
    rows = len(group["leaderboard"]["rows"])
    group["differences"] = [
        {"a": a, "b": b, "metric": "map_at_r", "difference": 2, "over": "folds", "interval": [1, 3],
         "joint": [0.5, 3.5], "pairs": 4, "of": 4}
        for b in range(rows) for a in range(b)
    ]  # fmt: skip
    (tmp_path / "x.html").write_text(page._filled(changed))
    _open(browser, tmp_path / "x.html")
    assert len(browser.find_elements(By.CSS_SELECTOR, "#leaderboard th")) == 1 + 4 + 1 + 1  # and notes
    choices = [option.get_attribute("textContent") for option in Select(browser.find_element(By.ID, "score")).options]
    assert len(choices) == 4 and all(text.endswith(("P@1", "MAP@R")) for text in choices)
    Select(browser.find_element(By.ID, "config-a")).select_by_index(0)
    low, high = browser.execute_script("return document.getElementById('differences-chart')._fullLayout.xaxis.range")
    assert low < 0 and high > 3.5
    assert browser.find_elements(By.CSS_SELECTOR, "#differences-chart .zerolinelayer path")
    assert "Bonferroni-corrected for 4 comparisons" in browser.find_element(By.ID, "differences-note").text


def test_one_comparison_has_no_joint_interval(
    browser: webdriver.Chrome, configs: list[ConfigSummary], tmp_path: Path
) -> None:
    two = [config for config in configs if config.label in ("gap", "gsp_small")]
    options = {"num_queries": 0, "num_nearest": 1, "num_classes": 1, "with_overlays": False, "device": "cpu"}
    page.write_page({("glyphs", "mlrc"): two}, tmp_path / "x.html", spec=SPEC, **options)
    _open(browser, tmp_path / "x.html")
    heads = [head.text for head in browser.find_elements(By.CSS_SELECTOR, "#differences-table th")]
    assert heads == ["config", "difference from A", "95 % interval", "pairs of runs", "over"]
    assert len(_labels(browser, "differences-table", 5)) == 1
    assert browser.find_element(By.ID, "differences-note").text.endswith("95 % t intervals.")
    assert browser.get_log("browser") == []


def test_light_and_dark_without_errors_or_network(opened: webdriver.Chrome) -> None:
    opened.find_element(By.ID, "theme").click()
    assert opened.execute_script("return document.documentElement.dataset.theme") == "dark"
    assert opened.get_log("browser") == []
    loaded = opened.execute_script("return performance.getEntriesByType('resource').map((one) => one.name)")
    assert [name for name in loaded if not name.startswith("data:")] == []
    broken = "return [...document.images].filter((one) => one.complete && !one.naturalWidth).length"
    assert opened.execute_script(broken) == 0


def test_names_are_text_never_markup(browser: webdriver.Chrome, content: dict[str, Any], tmp_path: Path) -> None:
    hostile = "</script><script>window.taken = 1</script><img src=x onerror='window.taken = 2'>"
    changed = copy.deepcopy(content)
    group = changed["groups"][0]
    group["title"] = group["headline"] = hostile
    group["leaderboard"]["rows"][0]["label"] = hostile
    group["gallery"]["names"] = dict.fromkeys(group["gallery"]["names"], hostile)
    (tmp_path / "x.html").write_text(page._filled(changed))
    _open(browser, tmp_path / "x.html")
    assert browser.find_element(By.ID, "title").text == hostile
    assert browser.find_element(By.ID, "headlines").text == hostile
    assert browser.execute_script("return window.taken") is None
    assert browser.get_log("browser") == []


def test_configs_of_other_images_have_no_images_beside_those_of_the_first(
    configs: list[ConfigSummary], tmp_path: Path
) -> None:
    first = next(config for config in configs if config.label == "gap")
    other = dataclasses.replace(first, label="other", summary={**first.summary, "n_query": 10**6})
    assert page.that_can_be_shown([first, other]) == [first]
    group = {("glyphs", "mlrc"): [first, other]}
    options = {"num_queries": 1, "num_nearest": 1, "num_classes": 1, "with_overlays": True, "device": "cpu"}
    page.write_page(group, tmp_path / "page.html", spec=SPEC, **options)
    assert "tested on other images than gap" in (tmp_path / "page.html").read_text()


def test_a_missing_or_damaged_file_of_a_trained_run_is_said(
    configs: list[ConfigSummary], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = next(config for config in configs if config.label == "gap")
    kept = tmp_path / "kept"
    kept.mkdir()
    run_dir = config.runs[0].path
    names = ("history.csv", "best.ckpt", "embeddings.safetensors")
    history = (run_dir / "history.csv").read_text()
    (run_dir / "history.csv").write_text(history[: len(history) // 2])
    with pytest.raises(RunError, match=r"history.csv: got SHA-256 .* as in result.json"):
        numbers.curves([config])
    (run_dir / "history.csv").write_text(history)
    scores = (run_dir / "per_query.csv").read_text()
    lines = scores.splitlines()
    (run_dir / "per_query.csv").write_text("\n".join(lines[:-1]))
    with pytest.raises(RunError, match=r"per_query.csv: got SHA-256"):
        _require_readable([run_dir])
    (run_dir / "per_query.csv").write_text(f"{lines[0]}\n0,x,{','.join('y' * lines[0].count(','))}")
    with pytest.raises(RunError, match=r"per_query.csv is damaged"):
        numbers.classes([config], ["p_at_1"], None, 5)
    (run_dir / "per_query.csv").write_text(scores)
    for name in names:
        shutil.move(run_dir / name, kept / name)
    try:
        assert page.that_can_be_shown([config]) == []
        shutil.move(kept / names[2], run_dir / names[2])
        curves = numbers.curves([config])
        page.write_page(
            {("glyphs", "mlrc"): [config]}, tmp_path / "page.html", spec=SPEC,
            num_queries=1, num_nearest=1, num_classes=1, with_overlays=True, device="cpu",
        )  # fmt: skip
    finally:
        for path in kept.iterdir():
            shutil.move(path, run_dir / path.name)
    assert "embeddings.safetensors is missing: no images are shown for gap" in caplog.text
    assert curves["val/map_at_r"][0]["runs"] == 3
    assert f"{run_dir / 'history.csv'} is missing" in caplog.text
    assert "no overlays for gap" in caplog.text and "has no best.ckpt" in caplog.text
