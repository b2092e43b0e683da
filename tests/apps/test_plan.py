"""Plans: configs composed once, the state of runs, shards, and runs that must come first."""

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from omegaconf import OmegaConf
from written_runs import write_run

from dmlbench.apps.experiment_rows import Row
from dmlbench.apps.paper_comparison import (
    PUBLISHED,
    Provenance,
    are_published,
    differences_to_paper,
    expected_differences,
    given_by_hand,
    mixtures,
    moving,
    provenance_of,
)
from dmlbench.apps.plan import Plan, compose_configs, make_plan, require_writable
from dmlbench.apps.time_estimate import RunTime, measured_times, total_time
from dmlbench.identity import Overrides, PlannedConfig, planned_config
from dmlbench.papers import load_table
from dmlbench.results.store import EMBEDDINGS, ERROR, LOCK, RESULT, locked, make_directory
from dmlbench.runtime import derive_seed, git_commit
from dmlbench.types import ConfigError

CONFIGS = [("pooling=gap",), ("pooling=gmp",)]
INCEPTION, RESNET = (PUBLISHED[name].ljust(64, "0") for name in ("bn_inception", "resnet50"))


class Composer:
    """Composes by overrides as Hydra would, and counts how often."""

    def __init__(self, protocol: str = "Mlrc", **values: object) -> None:
        self.protocol = {"_target_": f"dmlbench.data.protocols.{protocol}", **values}
        self.count = 0

    def __call__(self, overrides: Overrides) -> PlannedConfig:
        self.count += 1
        given = dict(override.split("=") for override in overrides)
        if given["pooling"] == "wrong":
            raise ConfigError("pooling=wrong is unknown")
        protocol = {**self.protocol, **({"stage": int(given["protocol.stage"])} if "protocol.stage" in given else {})}
        cfg = OmegaConf.create(
            {
                "dataset": {"name": "glyphs", "table": {}}, "backbone": {}, "protocol": protocol,
                "pooling": {"name": given["pooling"]}, "fit": {},
                "loss": {}, "runtime": {"choices": {"pooling": given["pooling"], "loss": "l", "backbone": "b"}},
                "base_seed": 0, "fold": 0, "repeat": 0,
            }
        )  # fmt: skip
        return planned_config(overrides, cfg)


def _plan(
    folder: Path, compose: Composer, wanted: Sequence[tuple[str, ...]] = CONFIGS, **coordinates: list[int]
) -> Plan:
    found = [config for config in compose_configs(wanted, compose).values() if not isinstance(config, str)]
    return make_plan(found, compose, str(folder / "out"), coordinates)


def _write(run, **changes: object) -> None:
    own = {"config_sha256": run.config.sha256, "dataset_fingerprint": "f" * 64, "num_folds": 2, "num_repeats": 2}
    write_run(run.path, **own | {"wall_s": 7200.0, "git_commit": "abc"} | changes)


def test_a_config_is_composed_once_for_all_folds_and_repeats(tmp_path: Path) -> None:
    compose = Composer(num_folds=2, num_repeats=2)
    plan = _plan(tmp_path, compose, [*CONFIGS, *CONFIGS])
    assert compose.count == 2
    assert [(run.fold, run.repeat, run.config.name.split("-")[1]) for run in plan.runs] == [
        *((fold, repeat, name) for repeat in (0, 1) for fold in (0, 1) for name in ("gap", "gmp"))
    ]


def test_what_became_of_a_run_is_told_with_its_reason_and_nothing_is_deleted(tmp_path: Path) -> None:
    plan = _plan(tmp_path, Composer(num_folds=2, num_repeats=4), [CONFIGS[0]])
    done, lost, cut, foreign, other, moved, failed, running = plan.runs
    _write(done)
    _write(lost, embeddings_sha256="x")
    _write(cut)
    (cut.path / RESULT).write_text((cut.path / RESULT).read_text()[:50])
    _write(foreign, config_sha256="y")
    _write(other, base_seed=1, seed=derive_seed(1, other.fold, other.repeat))
    _write(done, fold=0)
    _write(moved)
    os.rename(moved.path / RESULT, moved.path / "kept.json")
    (moved.path / RESULT).write_text((done.path / RESULT).read_text())
    make_directory(failed.path)
    (failed.path / ERROR).write_text("Traceback\nValueError: the disk is full\n")
    make_directory(running.path)
    before = sorted(path for path in tmp_path.rglob("*"))
    with locked(running.path):
        found = plan.refreshed().runs
        assert [run.state for run in found] == ["done", "done", *["unusable"] * 4, "failed", "running"]
    problems = [run.problem for run in found]
    assert problems[0] == ""
    for text, problem in zip(
        (f"lost its {EMBEDDINGS}", "is damaged", "another configuration", "base_seed=1", "it was copied or renamed"),
        problems[1:], strict=False,
    ):  # fmt: skip
        assert text in problem, problem
    assert problems[6] == "ValueError: the disk is full"
    assert sorted(path for path in tmp_path.rglob("*")) == before
    (wave,) = plan.refreshed().waves()
    assert [run.path for run in wave] == [failed.path, running.path]  # what cannot be used is not run over
    (done.path / LOCK).touch()  # of a process that was killed after it wrote the result
    assert [run.path for run in plan.refreshed().waves()[0]] == [done.path, failed.path, running.path]


def test_shards_share_out_all_runs_whatever_is_done_by_then(tmp_path: Path) -> None:
    compose = Composer(num_folds=4, num_repeats=3)
    plan = _plan(tmp_path, compose, [CONFIGS[0]])
    parts = [plan.waves((i, 5))[0] for i in range(1, 6)]
    assert sorted(run.path for part in parts for run in part) == sorted(run.path for run in plan.runs)
    _write(parts[0][0], num_folds=4, num_repeats=3)
    after = plan.refreshed()
    assert [run.path for run in after.waves((1, 5))[0]] == [run.path for run in parts[0][1:]]
    assert [run.path for run in after.waves((2, 5))[0]] == [run.path for run in parts[1]]


def test_runs_that_plan_others_come_first_and_are_no_rows(tmp_path: Path) -> None:
    compose = Composer("TwoStage", num_repeats=2)
    configs = [(*config, f"protocol.stage={stage}") for config in CONFIGS for stage in (1, 2)]
    plan = _plan(tmp_path, compose, configs)
    assert [config.overrides for config in plan.configs] == [configs[1], configs[3]]
    before, after = plan.waves()
    assert [run.overrides[1] for run in before] == ["protocol.stage=1"] * 4
    assert [run.overrides[1] for run in after] == ["protocol.stage=2"] * 4
    half_before, half = plan.waves((1, 2))
    assert [(r.config.overrides[0], r.repeat) for r in half_before] == [(r.config.overrides[0], r.repeat) for r in half]
    assert len(half) == 2


def test_mixed_code_and_data_are_named(tmp_path: Path) -> None:
    plan = _plan(tmp_path, Composer(num_folds=2, num_repeats=2))
    for run, changes in zip(plan.runs, ({}, {"git_commit": "def"}, {"dataset_fingerprint": "g" * 64}), strict=False):
        _write(run, **changes)
    code, data = mixtures(plan.refreshed().runs, to_do=False)
    assert code == "MIXED CODE: abc (2 runs), def (1 run)"
    assert data == f"MIXED DATA: glyphs with the fingerprints {'f' * 12} (2 runs), {'g' * 12} (1 run)"
    same = [run for run in plan.refreshed().runs if run.result.get("git_commit") == "abc"][:1]
    assert mixtures(same, to_do=False) == []
    (added,) = mixtures(same, to_do=True)
    assert str(git_commit())[:12] in added
    _write(plan.runs[0], weights_code="xyz")
    both, *_ = mixtures([run for run in plan.refreshed().runs if run.result.get("git_commit") == "abc"], to_do=False)
    assert both == "MIXED CODE: abc (2 runs), xyz (1 run)"


def test_times_are_those_of_complete_runs_of_the_config_else_of_its_kind(tmp_path: Path) -> None:
    plan = _plan(tmp_path, Composer(num_folds=2, num_repeats=2))
    gap, gmp = (config.sha256 for config in plan.configs)
    assert measured_times(plan) == {}
    _write(plan.runs[0])
    _write(plan.runs[2], wall_s=3600.0)
    assert measured_times(plan.refreshed()) == {
        gap: RunTime(5400.0, "mean of complete runs"), gmp: RunTime(5400.0, "mean of complete runs of this kind"),
    }  # fmt: skip
    _write(plan.runs[1], wall_s=60.0)
    assert measured_times(plan.refreshed())[gmp] == RunTime(60.0, "mean of complete runs")


def test_the_time_of_runs_is_added_up_and_unknown_ones_are_counted(tmp_path: Path) -> None:
    plan = _plan(tmp_path, Composer(num_folds=2, num_repeats=2))
    gap, gmp = (config.sha256 for config in plan.configs)
    assert total_time(plan.runs, {}) == total_time(plan.runs, {gap: RunTime(None, "no data")}) == ""
    assert total_time(plan.runs, {gap: RunTime(1800.0, "")}) == "about 2 h 0 min, plus 4 runs of unknown time"
    times = {gap: RunTime(1800.0, ""), gmp: RunTime(86400.0, "", is_bound=True)}
    assert total_time(plan.runs, times) == "at most 4 d 2 h"
    own, shared = (RunTime(60.0, "", caching=caching, cache=cache) for caching, cache in ((3600.0, "a"), (7200.0, "b")))
    assert total_time(plan.runs, {gap: own, gmp: shared}) == "about 3 h 8 min"
    assert total_time(plan.runs, {gap: own, gmp: own}) == "about 1 h 8 min"
    assert str(times[gap]) == "about 30 min per run ()"
    assert str(RunTime(None, "no data")) == "time unknown: no data"


def test_an_output_folder_may_be_new_but_must_be_writable(tmp_path: Path, monkeypatch) -> None:
    require_writable(str(tmp_path / "new" / "folder"))
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"paths.output_dir: got .*new, but .*file is not a writable folder"):
        require_writable(str(tmp_path / "file" / "new"))
    monkeypatch.setattr("os.access", lambda path, mode: False)
    with pytest.raises(ConfigError, match="is not a writable folder"):
        require_writable(str(tmp_path))


def test_differences_to_the_paper_are_known_before_the_runs(tmp_path: Path) -> None:
    (config,) = _plan(tmp_path, Composer(num_folds=4), [CONFIGS[0]]).configs
    own = [score for score in load_table("gsp/table2") if score.row == "C2+GAP" and score.dataset == "cub200"]
    settings = {
        "head": {"out_features": 128}, "backbone": {"pretrained": True}, "evaluation": {"shortlist": None},
        "runtime": {"choices": {"backbone": "bn_inception"}},
    }  # fmt: skip
    config = replace(config, dataset="cub200", protocol=own[0].protocol)
    assert {score.embedding_size for score in own} == {128, 512}  # separated, and of four folds together
    for score in own:
        row = Row("C2+GAP", (), score)
        assert expected_differences(row, config, settings, ()) == []
        changed = {**settings, "head": {"out_features": 64}, "evaluation": {"shortlist": 50}}
        found = expected_differences(row, replace(config, dataset="cars196"), changed, ("images re-encoded",))
        assert found == [
            "data set cars196 instead of cub200",
            f"{64 if score.kind == 'separated' else 256} dimensions instead of {score.embedding_size}",
            "NOT THE PUBLISHED DATA: images re-encoded",
            "APPROXIMATE SEARCH: shortlist@50 ranks a shortlist of each query",
        ]
    random = {**settings, "backbone": {"pretrained": False}}
    assert expected_differences(Row("", (), own[0]), config, random, ()) == ["OTHER WEIGHTS: random ones"]


def test_what_was_given_by_hand_and_moves_a_number_is_told(tmp_path: Path) -> None:
    free = ("device=cpu", "paths.data_dir=x", "dataset=cub200", "fold=1", "dataset.table.root=y", "logger=tensorboard")
    assert given_by_hand(free) == []
    for moved in ("protocol.num_repeats=1", "dataset.table.num_classes=3", "fit.max_steps=2", "~schedule"):
        assert given_by_hand([moved]) == [f"given by hand: {moved}"]
    assert moving(["evaluation.device=cuda", "evaluation.tile_bytes=4096", "device=cuda"]) == []
    assert moving(["backbone.weights_file=gone/bn_inception-52deb4733.pth"]) == []
    other = tmp_path / "bn_inception-52deb4733.pth"
    other.write_bytes(b"other weights")
    assert moving([f"backbone.weights_file={other}"]) == [f"backbone.weights_file={other}"]
    assert given_by_hand([f"backbone.weights_file={other}"]) == []  # the runs say what they started from


def test_scores_of_something_else_than_the_papers_are_told() -> None:
    score = next(s for s in load_table("gsp/table2") if s.dataset == "cub200" and s.kind == "separated")
    summary = {"dataset": "cub200", "protocol": "mlrc", "choices": {"backbone": "bn_inception_levels"}, "scores": {}}
    unknown = Provenance()
    assert differences_to_paper(score, summary | {"dimension": {"separated": 128}}, unknown) == []
    choices = {"backbone": "resnet20"}
    changed = {"dataset": "glyphs", "protocol": "hpo", "choices": choices, "dimension": {"separated": 8}}
    assert differences_to_paper(score, summary | changed, Provenance(("OTHER WEIGHTS: random ones",), 128)) == [
        "data set glyphs instead of cub200",
        "protocol hpo instead of mlrc",
        "backbone resnet20 instead of bn_inception",
        "8 dimensions instead of 128",
        "OTHER WEIGHTS: random ones",
    ]
    # a rule over repeats sums up no dimensions: the runs' own configuration has them
    assert differences_to_paper(score, summary, Provenance(embedding_size=64)) == ["64 dimensions instead of 128"]
    assert differences_to_paper(score, summary, Provenance(embedding_size=128)) == []


def _provenance(folder: Path, backbone: str, *hashes: str | None, **node: object) -> Provenance:
    size = {"head": {"out_features": 8}, "runtime": {"embedding_size": 24}}
    OmegaConf.save({"backbone": {"weights_file": None, **node}, **size}, folder / "config.yaml")
    return provenance_of(folder / "config.yaml", backbone, hashes)


def test_the_hash_that_a_run_recorded_decides_and_not_the_file_of_today(tmp_path: Path) -> None:
    file = tmp_path / "bn_inception-52deb4733.pth"
    file.write_bytes(b"something else by now")
    node = {"pretrained": True, "weights_file": str(file)}
    assert _provenance(tmp_path, "bn_inception", INCEPTION, **node) == Provenance((), 24)
    assert _provenance(tmp_path, "bn_inception_levels", INCEPTION, "f" * 64, **node).other_weights == (
        f"OTHER WEIGHTS: {file} (SHA-256 ffffffffffff)",
    )
    assert _provenance(tmp_path, "resnet50", INCEPTION, **node).other_weights  # another backbone's
    assert _provenance(tmp_path, "bn_inception", None, **node).other_weights == (f"OTHER WEIGHTS: {file}",)
    file.unlink()
    assert _provenance(tmp_path, "bn_inception", None, **node).other_weights == ()  # by its name


@pytest.mark.parametrize(
    ("backbone", "node", "said"),
    [
        ("resnet50", {"pretrained": True, "name": "resnet50.tv_in1k"}, ()),
        ("resnet50_levels", {"pretrained": True, "name": "resnet50.a1_in1k"}, ("resnet50.a1_in1k of timm",)),
        ("resnet50", {"pretrained": False, "name": "resnet50.tv_in1k"}, ("random ones",)),
        ("bn_inception", {"pretrained": False}, ("random ones",)),
        ("resnet20", {}, ()),  # which no paper has
    ],
)
def test_weights_that_no_file_was_named_for(tmp_path: Path, backbone: str, node: dict, said: tuple[str, ...]) -> None:
    found = _provenance(tmp_path, backbone, None, **node).other_weights
    assert found == tuple(f"OTHER WEIGHTS: {text}" for text in said)


def test_the_embedding_size_of_levels_is_that_of_the_compared_rows(tmp_path: Path) -> None:
    for inference, size in (("rectified", 512), ("concat", 1536)):
        head = {"level_size": 512, "num_levels": 3, "inference": inference}
        OmegaConf.save({"head": head, "runtime": {"embedding_size": 3072}}, tmp_path / "config.yaml")
        assert provenance_of(tmp_path / "config.yaml", "resnet20", []).embedding_size == size


def test_a_file_is_hashed_again_when_it_has_changed(tmp_path: Path) -> None:
    file = tmp_path / "resnet50-0676ba61.pth"
    assert are_published(str(file))
    file.write_bytes(b"1")
    assert not are_published(str(file))
