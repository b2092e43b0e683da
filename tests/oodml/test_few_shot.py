"""Few-shot adaptation: cached features, triplets, what is kept of runs, and the table of several of them."""

import dataclasses
import io
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from composed import arguments
from omegaconf import OmegaConf
from oodml_runs import IMAGES, NUM_TEST_CLASSES, small_run

from dmlbench.apps.loading import load_run
from dmlbench.components import component
from dmlbench.config import compose, read_config
from dmlbench.evaluation.embeddings.embed import load_embeddings
from dmlbench.evaluation.evaluate import evaluate
from dmlbench.evaluation.spec import EvaluationSpec
from dmlbench.losses.miners import distance_weighted_triplets
from dmlbench.models.projection import Projection
from dmlbench.oodml import few_shot as module
from dmlbench.oodml.episodes import drawn_support
from dmlbench.oodml.few_shot import (
    FEW_SHOT,
    Adaptation,
    CachedFeatures,
    Compared,
    FewShotPlan,
    adapt,
    cache_features,
    few_shot_of_run,
    initial_boundary,
)
from dmlbench.oodml.few_shot_table import Row, draw, few_shot, few_shot_table
from dmlbench.oodml.split_runs import SplitRun, chosen_runs
from dmlbench.results.store import EMBEDDINGS, read_result, write_result
from dmlbench.runtime import read_json, write_json
from dmlbench.types import ConfigError, EmbeddingSet, RunError

SPEC = EvaluationSpec(metrics=("p_at_1", "oodml_map_at_1000", "map_at_r"))
PLAN = FewShotPlan((2, 3), 2, SPEC, steps=3, batch_size=8)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs that the tests only read."""
    root = tmp_path_factory.mktemp("few_shot")
    for fold in range(2):
        small_run(root, fold=fold)
    return root / "out"


@pytest.fixture
def output(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "out"))


def run_of(output: Path, fold: int = 0) -> Path:
    (found,) = output.glob(f"*/*/*/fold{fold}_rep0")
    return found


# --- features


def features_of(run_dir: Path, *, memory_bytes: int = 2**30) -> tuple[CachedFeatures, np.ndarray]:
    setup = load_run(run_dir, {"num_workers": 0}, device="cpu")
    rows = setup.data.split.test.query
    return cache_features(setup, rows, memory_bytes=memory_bytes, describe="x"), rows


def test_maps_are_cached_within_the_limit_if_the_pooling_projects_first(tmp_path: Path) -> None:
    run_dir = small_run(tmp_path, "pooling=weldon", choices={"pooling": "weldon"})
    features, rows = features_of(run_dir)
    assert features.values.ndim == 4 and features.pooling is not None
    stored = load_embeddings(run_dir / EMBEDDINGS).queries
    assert torch.allclose(features.all_embeddings(features.projection), stored.rows, rtol=1e-5, atol=1e-6)
    before = features.projection.weight.clone()
    labels = stored.labels.numpy()
    adapted = adapt(features, np.arange(len(rows)), labels, Adaptation(2, 1e-2, 0.0, batch_size=8), seed=0)
    assert not torch.equal(adapted.weight, before) and torch.equal(features.projection.weight, before)
    with pytest.raises(RunError, match=r"maps for Weldon of .* memory_bytes allows 0.00 GiB. Set"):
        features_of(run_dir, memory_bytes=1000)


def test_a_head_of_unit_parts_is_adapted(tmp_path: Path) -> None:
    run_dir = small_run(tmp_path, "head=unit_parts", "head.weights=[0.5,1,1,2]", choices={"head": "unit_parts"})
    features, rows = features_of(run_dir)
    assert features.values.ndim == 2 and features.pooling is None  # vectors, as the projection follows the pooling
    stored = load_embeddings(run_dir / EMBEDDINGS).queries
    assert torch.allclose(features.all_embeddings(features.projection), stored.rows, rtol=1e-5, atol=1e-6)
    adaptation = Adaptation(2, 1e-2, 0.0, batch_size=8)
    adapted = adapt(features, np.arange(len(rows)), stored.labels.numpy(), adaptation, seed=0)
    assert not torch.equal(adapted.weight, features.projection.weight)
    lengths = features.all_embeddings(adapted).unflatten(1, (4, 2)).norm(dim=2)
    assert torch.allclose(lengths, torch.tensor([0.5, 1.0, 1.0, 2.0]).expand_as(lengths), atol=1e-5)


# --- adaptation


def test_far_negatives_are_drawn_in_an_adaptation(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cutoff at 1.4 is commented out in ooDML's batchminer/distance.py:128; all images are anchors."""
    rows = torch.tensor([[1.0, 0.0], [1.0, 0.1], [-1.0, 0.0], [-1.0, 0.1]])  # two classes, 2 apart
    features = CachedFeatures(rows, None, Projection(2, 2), torch.device("cpu"), "float32", 16)
    with torch.no_grad():
        features.projection.weight.copy_(torch.eye(2))
    mined = []

    def noted(*arguments: Any, **options: Any) -> Any:
        mined.append((arguments[1], distance_weighted_triplets(*arguments, **options)))
        return mined[-1][1]

    monkeypatch.setattr(module, "distance_weighted_triplets", noted)
    adapt(features, np.arange(4), np.array([0, 0, 1, 1]), Adaptation(20, 1e-6, 0.0, batch_size=4), seed=0)
    both = [triplets for labels, triplets in mined if len(labels.unique()) == 2]
    assert len(both) < len(mined) == 20  # classes are drawn with replacement
    assert all(len(anchor) == 4 for anchor, *_ in both)


def hidden_signal() -> tuple[CachedFeatures, torch.Tensor]:
    """Features of 12 images in each of 5 classes, of which the projection sees noise above all."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(5).repeat_interleave(12)
    signal = torch.eye(5)[labels] + 0.1 * torch.randn(60, 5, generator=generator)
    values = torch.cat([signal, torch.randn(60, 8, generator=generator)], 1)
    projection = Projection(13, 13)
    with torch.no_grad():
        projection.weight.copy_(torch.diag(torch.tensor([0.2] * 5 + [1.0] * 8)))
    return CachedFeatures(values, None, projection, torch.device("cpu"), "float32", 16), labels


def test_adaptation_finds_the_signal_and_keeps_the_trained_projection() -> None:
    features, labels = hidden_signal()
    support = np.flatnonzero(np.arange(60) % 12 < 4)
    before = features.projection.weight.clone()
    adapted = adapt(features, support, labels.numpy()[support], Adaptation(100, 2e-2, 0.0, batch_size=20), seed=1)
    queries = np.setdiff1d(np.arange(60), support)

    def score(projection: Projection) -> float:
        rows = features.all_embeddings(projection)[queries]
        return evaluate(EmbeddingSet(rows, labels[queries], torch.arange(40)), None, SPEC).scores["p_at_1"]

    assert score(features.projection) < 0.5 < 0.85 < score(adapted)
    assert torch.equal(features.projection.weight, before)
    again = adapt(features, support, labels.numpy()[support], Adaptation(100, 2e-2, 0.0, batch_size=20), seed=1)
    assert torch.equal(again.weight, adapted.weight)


def test_errors_of_adaptations() -> None:
    for changes, message in (
        ({"steps": 0}, "steps: got 0"),
        ({"lr": 0.0}, "lr: got 0.0"),
        ({"images_per_class": 1}, "images_per_class: got 1"),
        ({"batch_size": 3}, "batch_size: got 3"),
    ):
        with pytest.raises(ConfigError, match=message):
            Adaptation(**{"steps": 1, "lr": 1.0, "weight_decay": 0.0} | changes)
    features, labels = hidden_signal()
    with pytest.raises(ConfigError, match="got 1 class"):
        adapt(features, np.arange(4), labels.numpy()[:4], Adaptation(1, 1.0, 0.0), seed=0)
    for changes, message in (
        ({"episodes": 0}, "episodes: got 0"),
        ({"shots": ()}, "shots: got an empty list"),
        ({"spec": EvaluationSpec(metrics=("p_at_1", "nmi"))}, "metric: got 'nmi', expected a metric of rankings"),
        ({"spec": EvaluationSpec(metrics=("p_at_1",), shortlist=5)}, "shortlist"),
    ):
        with pytest.raises(ConfigError, match=message):
            dataclasses.replace(PLAN, **changes)


# --- runs


def test_zero_shot_scores_are_those_of_the_stored_query_embeddings(output: Path) -> None:
    run_dir = run_of(output)
    found = few_shot_of_run(run_dir, PLAN, device="cpu", num_workers=0)
    stored, seed = load_embeddings(run_dir / EMBEDDINGS).queries, read_result(run_dir)["seed"]
    for shots in (2, 3):
        for episode in range(2):
            support = drawn_support(stored.labels.numpy(), shots=shots, seed=seed, episode=episode)
            queries = np.setdiff1d(np.arange(len(stored)), support)
            assert len(queries) == NUM_TEST_CLASSES * (IMAGES - shots)
            part = EmbeddingSet(stored.rows[queries], stored.labels[queries], stored.ids[queries])
            expected = evaluate(part, None, SPEC).scores
            assert {name: found[shots].zero_shot[name][episode] for name in expected} == pytest.approx(expected)


def test_few_shot_scores_are_those_of_each_episodes_own_adapted_head(
    output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir, calls = run_of(output), []

    def recorded(features: Any, support: Any, *rest: Any, seed: int) -> Any:
        calls.append((features, support, seed, adapt(features, support, *rest, seed=seed)))
        return calls[-1][-1]

    monkeypatch.setattr(module, "adapt", recorded)
    plan = dataclasses.replace(PLAN, shots=(2,), steps=20)
    found = few_shot_of_run(run_dir, plan, device="cpu", num_workers=0)[2]
    stored = load_embeddings(run_dir / EMBEDDINGS).queries
    assert len({seed for _, _, seed, _ in calls}) == len(calls) == 2
    for episode, (features, support, _, adapted) in enumerate(calls):
        queries = np.setdiff1d(np.arange(len(stored)), support)
        rows = features.all_embeddings(adapted)
        part = EmbeddingSet(rows[torch.from_numpy(queries)], stored.labels[queries], stored.ids[queries])
        expected = evaluate(part, None, SPEC).scores
        assert {name: found.few_shot[name][episode] for name in expected} == pytest.approx(expected)
    assert found.few_shot["map_at_r"] != found.zero_shot["map_at_r"]


def test_a_second_call_computes_only_what_is_missing(output: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_dir, calls = run_of(output), []
    monkeypatch.setattr(module, "adapt", lambda *a, **k: calls.append(a[1]) or adapt(*a, **k))
    first = few_shot_of_run(run_dir, PLAN, device="cpu", num_workers=0)
    assert len(calls) == 4
    more = dataclasses.replace(PLAN, shots=(2,), episodes=3)
    found = few_shot_of_run(run_dir, more, device="cpu", num_workers=0)
    assert found[2].few_shot["p_at_1"][:2] == first[2].few_shot["p_at_1"]
    assert len(calls) == 5
    monkeypatch.setattr(module, "load_run", None)  # nothing is missing, so nothing is loaded
    assert few_shot_of_run(run_dir, PLAN) == first
    monkeypatch.undo()
    monkeypatch.setattr(module, "adapt", lambda *a, **k: calls.append(a[1]) or adapt(*a, **k))
    others = (
        dataclasses.replace(PLAN, steps=2),
        dataclasses.replace(PLAN, spec=SPEC.replaced(metrics=("r_precision",))),
    )
    for number, other in enumerate(others, start=1):
        few_shot_of_run(run_dir, other, device="cpu", num_workers=0)
        assert len(calls) == 5 + 4 * number
    kept = read_json(run_dir / FEW_SHOT)
    write_json(run_dir / FEW_SHOT, {**kept, "best_sha256": "of other weights"})
    assert few_shot_of_run(run_dir, PLAN, device="cpu", num_workers=0) == first
    assert len(calls) == 17
    (run_dir / FEW_SHOT).write_text((run_dir / FEW_SHOT).read_text().replace("few_shot", "few_shut", 1))
    assert few_shot_of_run(run_dir, PLAN, device="cpu", num_workers=0) == first
    assert len(calls) == 21


def test_an_interrupted_call_keeps_finished_episodes(output: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_dir, calls = run_of(output), []

    def dying(*arguments: Any, **options: Any) -> Any:
        calls.append(arguments)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return adapt(*arguments, **options)

    monkeypatch.setattr(module, "adapt", dying)
    with pytest.raises(KeyboardInterrupt):
        few_shot_of_run(run_dir, PLAN, device="cpu", num_workers=0)
    kept = read_json(run_dir / FEW_SHOT)["adaptations"]
    assert sorted(len(one["episodes"]) for one in kept.values()) == [1, 2]
    resumed = few_shot_of_run(run_dir, PLAN, device="cpu", num_workers=0)
    assert len(calls) == 5
    (run_dir / FEW_SHOT).unlink()
    assert few_shot_of_run(run_dir, PLAN, device="cpu", num_workers=0) == resumed


def test_settings_of_an_adaptation_are_those_of_the_public_code(made: Path) -> None:
    """OOD-Study_FewShot.sh: 1,000 and 1,500 iterations; utilities/finetune_utils.py:42: Adam without decay."""
    trained_by = component(read_config(run_of(made) / "config.yaml")["optim"])
    trained_by = dataclasses.replace(trained_by, lr_multipliers={"head": 3.0, "loss": 7.0})
    plan = FewShotPlan((2, 5), 10, SPEC)
    found = plan.adaptation(trained_by, 0.6, 2)
    assert found == Adaptation(1000, found.lr, 0.0, 112, 2, 0.6, 0.2)
    assert found.lr == pytest.approx(10 * 3.0 * 1e-3)
    assert plan.adaptation(trained_by, 1.2, 5).steps == 1500
    other = dataclasses.replace(plan, steps=7, lr_factor=2.0, weight_decay=None, beta=0.9)
    found = other.adaptation(dataclasses.replace(trained_by, lr_multipliers={}), 0.6, 5)
    assert (found.steps, found.lr, found.weight_decay, found.beta) == (
        7, pytest.approx(2e-3), trained_by.weight_decay, 0.9
    )  # fmt: skip


@pytest.mark.parametrize(
    ("overrides", "beta"),
    [
        (["loss=multi_similarity_oodml"], 1.2),
        pytest.param(["loss=arcface"], 1.2, marks=pytest.mark.slow),
        (["loss=margin_oodml", "miner=rho_distance_weighted", "regularizer=s2sd"], 0.6),
        pytest.param(["loss=diva", "head=unit_parts"], 1.2, marks=pytest.mark.slow),
    ],
)
def test_the_boundary_is_the_one_that_the_run_started_with(overrides: list[str], beta: float) -> None:
    """--loss_margin_beta of OOD-Study_FewShot.sh's commands: 0.6 for S2SD, 1.2 (parameters.py) for the others."""
    cfg = compose("train", ["recipe=oodml", "dataset=cars196", "backbone=resnet50", *overrides])
    assert initial_boundary(cfg.loss) == beta


def test_errors_of_runs_that_cannot_be_adapted(output: Path) -> None:
    run_dir = run_of(output)
    result, config = read_result(run_dir), (run_dir / "config.yaml").read_text()
    del result["config_file_sha256"]  # write_result adds that of the file
    with pytest.raises(ConfigError, match=rf"got {IMAGES}, expected at most {IMAGES - 2}"):
        few_shot_of_run(run_dir, dataclasses.replace(PLAN, shots=(2, IMAGES)), device="cpu", num_workers=0)
    assert not (run_dir / FEW_SHOT).exists()
    with pytest.raises(RunError, match="memory_bytes allows"):
        few_shot_of_run(run_dir, dataclasses.replace(PLAN, memory_bytes=10), device="cpu", num_workers=0)
    (run_dir / "config.yaml").write_text(
        config.replace("dmlbench.models.projection.Projection", "dmlbench.models.avsl.AvslHead")
    )
    write_result(run_dir, result)
    with pytest.raises(RunError, match="got AvslHead, expected a linear layer"):
        few_shot_of_run(run_dir, PLAN)
    hyperbolic = OmegaConf.create(config)
    hyperbolic.head = {"_target_": "dmlbench.models.hyperbolic_head.HyperbolicHead", "out_features": 8}
    (run_dir / "config.yaml").write_text(OmegaConf.to_yaml(hyperbolic))
    write_result(run_dir, result)
    with pytest.raises(RunError, match="got a run with its own distance, expected one that compares unit vectors"):
        few_shot_of_run(run_dir, PLAN)
    (run_dir / "config.yaml").write_text(config)
    write_result(run_dir, {**result, "metrics": {"val": result["metrics"]["test"]}})
    with pytest.raises(RunError, match="has no test scores"):
        few_shot_of_run(run_dir, PLAN)


# --- table and picture


def made_up_rows() -> list[Row]:
    def row(label: str, fold: int, zero: list[float], few: list[float]) -> Row:
        result = {"fold": fold, "repeat": 0, "facts": {"distance": 10.0 * fold}, "val_is_test": fold == 1,
                  "search": "exact", "dataset_fingerprint": "f"}  # fmt: skip
        run = SplitRun(Path(f"config/fold{fold}_rep0"), result, label)
        return run, {2: Compared({"p_at_1": zero}, {"p_at_1": few})}

    return [row("gap", 0, [0.4, 0.5], [0.6, 0.5]), row("gap", 1, [0.0, 0.2], [0.3, 0.4]),
            row("gsp", 0, [0.5, 0.5], [0.6, 0.7])]  # fmt: skip


def test_a_table_has_both_scores_and_the_gain_of_every_run() -> None:
    table = few_shot_table("cars196 under oodml", made_up_rows(), ["p_at_1"])
    text = table.to_markdown()
    assert "| gap | 0 (0) | 0 | 45.00 ± 5.00 | 55.00 ± 5.00 | 25.00 ± 25.00 |" in text
    assert "| gap | 1 (10) | 0 | 10.00 ± 10.00 | 35.00 ± 5.00 | undefined |" in text
    assert "- gap (fold1_rep0): SELECTED ON TEST" in text and "over 2 episodes" in text
    frame = pd.read_csv(io.StringIO(table.to_csv()))
    assert frame["gain_mean"].tolist() == pytest.approx([0.25, np.nan, 0.3], nan_ok=True)
    assert frame["few_shot_std"].tolist() == pytest.approx([0.05, 0.05, 0.05])
    assert frame["distance"].tolist() == [0, 10, 0]


def test_a_picture_is_drawn_even_where_no_gain_is_defined(tmp_path: Path) -> None:
    rows = made_up_rows()
    draw("x", rows, tmp_path / "all.png", score="p_at_1")
    draw("x", rows[1:2], tmp_path / "undefined.png", score="p_at_1")
    assert all((tmp_path / name).stat().st_size > 5_000 for name in ("all.png", "undefined.png"))


def test_the_command_writes_a_table_of_the_runs_of_configs(output: Path) -> None:
    printed = "\n".join(few_shot(arguments("oodml_few_shot", *[
        "configs=glyphs/*", "shots=[2]", "episodes=2", "steps=2", "device=cpu", "num_workers=0", "metrics=[p_at_1]",
        f"paths.output_dir={output}",
    ])))  # fmt: skip
    written = output / "tables/few_shot-glyphs-shifted.md"
    assert written.read_text() in printed
    assert "| gap | 0 (1.5) | 0 |" in printed and "| gap | 1 (2.5) | 0 |" in printed
    assert len(pd.read_csv(written.with_suffix(".csv"))) == 2
    assert written.with_name("few_shot-glyphs-shifted-p_at_1.png").exists()
    settings = [one["settings"] for one in json.loads((run_of(output) / FEW_SHOT).read_text())["adaptations"].values()]
    assert [(one["shots"], one["steps"]) for one in settings] == [(2, 2)]


def test_runs_are_chosen_by_a_pattern(made: Path) -> None:
    with pytest.raises(RunError, match=r"no complete run under .* matches 'none'"):
        chosen_runs([], "none", str(made))
    assert chosen_runs([], "**", str(made)) == [run_of(made, 0), run_of(made, 1)]
