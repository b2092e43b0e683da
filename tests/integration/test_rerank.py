"""rerank=diml from training to tables: trained as without, tested on lists ranked again, found again from files."""

import shutil
from pathlib import Path

import pytest
import torch
from composed import arguments
from omegaconf import DictConfig, OmegaConf

from dmlbench import build
from dmlbench import runner as run_module
from dmlbench.apps.compare_configs import build_tables, find_configs
from dmlbench.apps.embeddings import evaluate_from
from dmlbench.apps.loading import distance_of_run
from dmlbench.checks import check
from dmlbench.cli import simple_commands
from dmlbench.config import compose
from dmlbench.evaluation.embeddings.embed import load_embeddings
from dmlbench.evaluation.spec import EvaluationSpec
from dmlbench.oodml.few_shot import FewShotPlan, few_shot_of_run
from dmlbench.oodml.structure import structure_of_run
from dmlbench.results.aggregate import aggregate_config
from dmlbench.results.store import find_runs, read_result, runs_by_config
from dmlbench.runtime import file_sha256
from dmlbench.types import ConfigError, RunError

TINY = (
    "dataset.table.num_classes=16", "dataset.table.images_per_class=8", "dataset.table.image_size=32",
    "sampler.classes_per_batch=4", "sampler.images_per_class=4", "fit.max_steps=2", "fit.validate_every=1",
    "fit.log_every=1", "device=cpu", "num_workers=0",
)  # fmt: skip


def config(folder: Path, *overrides: str) -> DictConfig:
    cfg = compose("train", [*TINY, f"paths.output_dir={folder}", f"paths.cache_dir={folder / 'cache'}", *overrides])
    choices = dict(override.split("=") for override in ("pooling=gap", *overrides) if "." not in override)
    OmegaConf.update(cfg, "runtime.choices", choices, force_add=True)
    return cfg


@pytest.mark.slow
@pytest.mark.parametrize("pooling", ["gap", "gsp_small"])
def test_a_test_is_ranked_again_and_nothing_else_differs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], pooling: str
) -> None:
    asked = (f"pooling={pooling}", "rerank=diml", "rerank.num_neighbors=20")
    by_itself = run_module.run(config(tmp_path / "one", *asked))
    plain = run_module.run(config(tmp_path / "two", f"pooling={pooling}"))

    def no_training(*arguments: object, **options: object) -> None:
        raise AssertionError("it has the weights")

    monkeypatch.setattr(run_module, "fit", no_training)
    taken = run_module.run(config(tmp_path / "two", *asked))
    assert taken.parent != plain.parent and "-diml-" in taken.parent.name
    results = {run: read_result(run) for run in (by_itself, plain, taken)}
    assert results[taken]["weights_of"] == plain.parent.name and "weights_of" not in results[by_itself]
    assert results[taken]["rerank"] == "DIML, 4 x 4, first 20" and "rerank" not in results[plain]
    for key in ("steps", "best_step", "stop_reason"):
        assert results[taken][key] == results[by_itself][key] == results[plain][key]
    assert results[taken]["metrics"] == results[by_itself]["metrics"]
    assert results[taken]["metrics"]["val"] == results[plain]["metrics"]["val"]
    assert results[taken]["metrics"]["test"] != results[plain]["metrics"]["test"]
    assert file_sha256(taken / "embeddings.safetensors") == file_sha256(by_itself / "embeddings.safetensors")

    rows = [load_embeddings(run / "embeddings.safetensors").queries.rows for run in (plain, taken)]
    assert rows[1].shape == (len(rows[0]), 17 * rows[0].shape[1])
    distance = distance_of_run(taken)
    assert distance is not None
    torch.testing.assert_close(distance.center_rows(rows[1]), rows[0])

    with pytest.raises(RunError, match="uses rerank, which episodes do not support"):
        few_shot_of_run(taken, FewShotPlan((2,), 1, EvaluationSpec(metrics=("p_at_1",))))
    with pytest.raises(RunError, match="with its own distance"):
        structure_of_run(taken)
    with pytest.raises(RunError, match="not as unit vectors"):
        evaluate_from(arguments("evaluate", f"embeddings={taken}/embeddings.safetensors"))

    again = evaluate_from(arguments("evaluate", f"run={taken}"))
    embedded = evaluate_from(arguments("evaluate", f"run={taken}", "from_checkpoint=true", "device=cpu"))
    of_plain = evaluate_from(
        arguments("evaluate", f"run={plain}", "from_checkpoint=true", "device=cpu", *asked[1:], "hardest=1")
    )
    for found in (again, embedded, of_plain):
        assert found.evaluation.scores == results[taken]["metrics"]["test"]
        assert any(note.startswith("RE-RANKED: DIML, 4 x 4, first 20") for note in found.notes())
    assert of_plain.stored == results[plain]["metrics"]["test"]
    simple_commands.evaluate(arguments("evaluate", f"run={taken}", "hardest=1"))
    assert "the similarity to their nearest images" in capsys.readouterr().out


@pytest.mark.slow
def test_tables_and_collections_say_what_was_ranked_again(tmp_path: Path) -> None:
    for fold in range(2):
        for overrides in ((), ("rerank=diml",), ("rerank=diml", "rerank.temperature=0.2")):
            run_module.run(
                config(tmp_path, "protocol.num_folds=2", "protocol.num_repeats=1", f"fold={fold}", *overrides)
            )
    spec = EvaluationSpec(metrics=("p_at_1", "ndcg_at_4"))  # one that runs do not have
    for runs in runs_by_config(find_runs(str(tmp_path), "*")).values():
        aggregate_config(runs, spec, distance_of=distance_of_run, progress=False)
    grouped = find_configs(str(tmp_path), "*", spec)
    (table,) = build_tables(grouped, spec).values()
    names = [
        "gap", "gap rerank.temperature=0.05 (DIML, 4 x 4, first 100)",
        "gap rerank.temperature=0.2 (DIML, 4 x 4, first 100)",
    ]  # fmt: skip
    found = {label: entries for label, *entries in table.frame.itertuples(name=None)}
    assert list(found) == names
    assert all(found["gap"]) and [entry is None for entry in found[names[1]]] == [False, False, True, True]
    assert found[names[1]][:2] != found["gap"][:2]
    text = table.to_text()
    assert f"{names[1]}, {names[2]}: RE-RANKED: DIML" in text and "gap: RE-RANKED" not in text
    assert "separated (128-D)" in text and "concatenated (256-D)" in text


@pytest.mark.slow
def test_a_kill_before_the_test_is_made_up_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(run_module.runtime, "git_commit", lambda: "of an earlier day")
        plain = run_module.run(config(tmp_path))
    with monkeypatch.context() as patch:
        patch.setattr(run_module, "_result", lambda *arguments: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            run_module.run(config(tmp_path, "rerank=diml"))
    run = run_module.run(config(tmp_path, "rerank=diml"))
    result = read_result(run)
    assert result["weights_of"] == plain.parent.name
    assert result["weights_code"] == read_result(plain)["git_commit"] != result["git_commit"]
    shutil.rmtree(plain.parent)
    written = (run / "result.json").read_bytes()
    assert run_module.run(config(tmp_path, "rerank=diml")) == run  # complete without the other
    assert (run / "result.json").read_bytes() == written


def test_making_the_distance_changes_no_random_numbers(tmp_path: Path) -> None:
    cfg = config(tmp_path, "rerank=diml")
    before = torch.get_rng_state()
    build.build_rerank(cfg)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("head=avsl", "pooling=none", "backbone=resnet20_levels", "loss=layered"), "got a head with AvslDistance"),
        (("head=concatenated_levels", "backbone=resnet20_levels"), "rerank: got .*ConcatenatedLevels, expected a head"),
        (("pooling=native",), "compares cells of a map, but Native uses no map"),
        (("pooling=transformer",), "Transformer makes no average of projected pixels"),
        (("pooling=netvlad",), "got embeddings of .* from NetVlad, expected 16"),
        (("evaluation.metrics=[map_at_r,nmi]",), "got nmi, but DimlDistance does not compare unit vectors"),
    ],
)
def test_what_cannot_be_matched_is_refused_before_it_is_trained(
    tmp_path: Path, overrides: tuple[str, ...], message: str
) -> None:
    cfg = config(tmp_path, "rerank=diml", *overrides)
    with pytest.raises(ConfigError, match=message):
        check(cfg)
        build.build_data(cfg)
        build.build_rerank(cfg, build.build_model(cfg))
