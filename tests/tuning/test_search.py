"""A search over runs that only pretend to train: claims of trials, resuming after a kill, and repeated values."""

import contextlib
import dataclasses
import math
import sqlite3
import threading
from collections import Counter
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from dmlbench import runner
from dmlbench.results import store
from dmlbench.runtime import derive_seed, read_json, write_json
from dmlbench.training.checkpoint import save_checkpoint
from dmlbench.tuning import best_trial, search
from dmlbench.tuning.space import grid, make_space
from dmlbench.types import ConfigError, Diverged, Pruned, RunError

optuna = pytest.importorskip("optuna", reason="extra tune")

STEPS, EVERY = 40, 10
LR = {"low": 1e-4, "high": 1e-1, "log": True}


class Killed(BaseException):
    """Stands for SIGKILL: nothing catches it."""


class Runs:
    """Runs whose score is best at a rate of 0.01, with the files by which a search knows them.

    Attributes:
        trained: steps by run; one that is done twice counts twice.
        kill_at: number of a step, over all runs, at which the process dies.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.trained: Counter[str] = Counter()
        self.kill_at = math.inf
        monkeypatch.setattr(runner, "run", self.run)
        monkeypatch.setattr(runner, "directory_of", lambda cfg: Path(cfg.paths.output_dir) / self.name(cfg))
        monkeypatch.setattr(search, "checked", lambda asked, compose: {"space": str(asked.space)})

    @staticmethod
    def name(cfg) -> str:
        return f"glyphs/hpo/{'-'.join(f'{key}={cfg[key]}' for key in ('lr', 'part'))}/fold0_rep0"

    @staticmethod
    def score(cfg, step: int) -> float:
        return (1 - abs(math.log10(cfg.lr) + 2) / 3) * step / STEPS * (0.9 if cfg.part else 1)

    def run(self, cfg, follow) -> Path:
        run_dir = Path(cfg.paths.output_dir) / self.name(cfg)
        run_dir.mkdir(parents=True, exist_ok=True)
        if (run_dir / store.RESULT).exists():
            return run_dir
        if cfg.lr > 0.08:
            raise Diverged("loss = nan; lower optim.lr")
        if cfg.lr > 0.05:
            raise ConfigError("loss.margin: got 0.06, expected at most 0.05.")
        history = run_dir / "history.csv"
        lines = history.read_text().splitlines() if history.exists() else ["step,name,value"]
        for step in range(10 * len(lines), STEPS + 1, EVERY):  # from where the last checkpoint was
            for _ in range(EVERY):
                if sum(self.trained.values()) >= self.kill_at:
                    raise Killed
                self.trained[self.name(cfg)] += 1
            lines.append(f"{step},val/map_at_r,{self.score(cfg, step)!r}")
            history.write_text("\n".join([*lines, ""]))
            if step < STEPS and not follow(step, self.score(cfg, step)):
                raise Pruned("stopped", step)
        result = {
            "base_seed": 0, "fold": 0, "repeat": 0, "seed": derive_seed(0, 0, 0), "steps": STEPS, "wall_s": 1.0,
            "protocol": "hpo", "choices": {}, "dataset_fingerprint": "f", "monitor": "map_at_r",
            "metrics": {"val": {"map_at_r": self.score(cfg, STEPS)}},
        }  # fmt: skip
        (run_dir / store.CONFIG).write_text(f"lr: {cfg.lr}\n")
        store.write_result(run_dir, result)
        return run_dir


def made(folder: Path, **given) -> search.Search:
    space = make_space(given.pop("space", {"lr": LR}), {})
    return search.Search(**{
        "name": "s", "folder": folder / "tuning" / "s", "output_dir": folder, "space": space, "overrides": (),
        "runs": (("part=0",),), "trials": 9, "seed": 3, "startup_trials": 3,
        "pruner": {"startup_trials": 2, "warmup_steps": 0}, **given,
    })  # fmt: skip


def conducted(asked: search.Search) -> list[search.Outcome]:
    def compose(overrides):
        values = OmegaConf.from_dotlist([o for o in overrides if o.startswith(("lr=", "part="))])
        more = {"fit": {"monitor": "map_at_r"}, "paths": {"output_dir": str(asked.output_dir)}}
        return runner.ComposedRun(OmegaConf.merge(values, more))

    return search.conduct(asked, compose)


def test_a_good_first_run_does_not_shield_a_bad_second_one(tmp_path, monkeypatch) -> None:
    Runs(monkeypatch)
    plain = Runs.score
    monkeypatch.setattr(Runs, "score", staticmethod(lambda cfg, step: plain(cfg, step) if cfg.part else 1.0))
    found = conducted(made(tmp_path, runs=(("part=0",), ("part=1",)), space={"lr": {**LR, "high": 0.05}}))
    stopped = [outcome for outcome in found if outcome.state == "pruned"]
    assert stopped and all(outcome.steps > STEPS for outcome in stopped)
    assert all(0 < outcome.score <= 1 for outcome in stopped)


@pytest.mark.slow
def test_a_killed_search_resumes_to_the_trials_of_one_that_was_not(tmp_path, monkeypatch) -> None:
    runs, two = Runs(monkeypatch), {"runs": (("part=0",), ("part=1",))}
    whole = conducted(made(tmp_path / "whole", **two))
    states = Counter(outcome.state for outcome in whole)
    assert states["complete"] >= 2 and states["pruned"] >= 2 and states.total() == 9
    steps = sum(runs.trained.values())
    runs.trained.clear()
    for runs.kill_at in (5, 95, math.inf):
        with contextlib.suppress(Killed):
            found = conducted(made(tmp_path / "killed", **two))
    assert found == whole
    stale = tmp_path / "killed/tuning/s/trials/8"  # SIGKILL leaves the lock
    stale.mkdir(parents=True, exist_ok=True)
    (stale / store.LOCK).touch()
    assert conducted(made(tmp_path / "killed", **two)) == whole and not stale.exists()
    assert steps <= sum(runs.trained.values()) <= steps + 2 * EVERY  # what is behind a checkpoint is not done again
    best = best_trial.ranked(found)[0]
    assert best.score == max(o.score for o in found if o.state == "complete")
    assert all(o.steps < 2 * STEPS for o in found if o.state == "pruned")
    lines = best_trial.trials_table(made(tmp_path, **two), found, "map_at_r").to_csv().splitlines()
    assert lines[1].startswith(f"{best.number + 1},complete,{best.score},{2 * STEPS},{best.values['lr']},")
    text = best_trial.trials_table(made(tmp_path, **two), found, "map_at_r").to_markdown()
    assert "points above the next best values" in text and f"{states['pruned']} of 9 trials were pruned" in text


@pytest.mark.slow
def test_repeated_values_cost_nothing_and_trials_that_diverge_or_are_invalid_fail(tmp_path, monkeypatch) -> None:
    runs = Runs(monkeypatch)
    asked = made(tmp_path, space={"lr": {"choices": [0.001, 0.01, 0.06, 0.1]}}, trials=9, pruner=None)
    found = conducted(asked)
    assert sum(runs.trained.values()) == 2 * STEPS  # of 9 trials of four values, one of which diverges, one is invalid
    assert {outcome.values["lr"]: outcome.state for outcome in found} == {
        0.001: "complete", 0.01: "complete", 0.06: "failed", 0.1: "failed",
    }  # fmt: skip
    assert all(("nan" in o.note, "margin" in o.note) == (o.values["lr"] == 0.1, o.values["lr"] == 0.06) for o in found)
    failed = [o for o in found if o.state == "failed"]
    assert any(
        note.startswith(f"{len(failed)} failed: ") and "margin" in note for note in best_trial.notes(asked, found)
    )
    assert conducted(asked) == found and len(conducted(dataclasses.replace(asked, trials=10))) == 10


def test_a_grid_tries_every_combination_once(tmp_path, monkeypatch) -> None:
    Runs(monkeypatch)
    space = {"lr": {"choices": [0.01, 0.001]}, "width": {"choices": [8, 16]}}
    asked = made(tmp_path, space=space, trials=4, pruner=None, method="grid")
    expected = [(0.01, 8), (0.01, 16), (0.001, 8), (0.001, 16)]
    assert [tuple(outcome.values.values()) for outcome in conducted(asked)] == expected
    with pytest.raises(ConfigError, match=r"method: got grid, but space.lr has bounds\. Give it choices"):
        grid(make_space({"lr": LR}, {}))


def test_a_trial_has_one_process_and_is_free_once_that_is_gone(tmp_path, monkeypatch) -> None:
    Runs(monkeypatch)
    asked = made(tmp_path, trials=2)
    asked.folder.mkdir(parents=True)
    first, second = (search._open(asked, {"space": ""}) for _ in range(2))
    with pytest.raises(Killed), search._claimed(asked, first) as one:
        with search._claimed(asked, second) as other, search._claimed(asked, second) as none:
            assert (one.number, other.number, none) == (0, 1, None)
            second.tell(1, 0.5)
        raise Killed
    with search._claimed(asked, second) as again:
        assert (again.number, again.params) == (0, one.params)


def test_a_trial_that_ends_while_another_process_claims_is_not_resumed(tmp_path, monkeypatch) -> None:
    asked = made(tmp_path, trials=2)
    asked.folder.mkdir(parents=True)
    first, second = (search._open(asked, {"space": ""}) for _ in range(2))
    with contextlib.ExitStack() as stack:
        held = stack.enter_context(contextlib.ExitStack())
        held.enter_context(search._claimed(asked, first))

        def end() -> None:
            first.tell(0, 0.5)
            held.close()

        ending, lock_of = threading.Thread(target=end), search._lock_of

        def locked_late(asked, number):  # between the list of trials and the lock, the first process ends its trial
            if not ending.ident:
                ending.start()
                ending.join(0.3)
            return lock_of(asked, number)

        monkeypatch.setattr(search, "_lock_of", locked_late)
        with search._claimed(asked, second) as trial:
            assert trial.number == 1
        ending.join(10)
    assert not ending.is_alive() and not list((asked.folder / "trials").iterdir())


def test_a_kill_while_the_folder_was_made_leaves_a_search_that_can_begin(tmp_path, monkeypatch) -> None:
    asked = made(tmp_path)
    asked.folder.mkdir(parents=True)
    set_user_attr = optuna.study.Study.set_user_attr

    def killed(study, key, value):
        set_user_attr(study, key, value)
        raise Killed

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(optuna.study.Study, "set_user_attr", killed)
        search._open(asked, {"space": "a", "runs": "b"})
    assert search._open(asked, {"space": "a", "runs": "b"}).user_attrs["runs"] == "b"
    with pytest.raises(RunError, match=r"other settings \(runs\)"):
        search._open(asked, {"space": "a", "runs": "c"})


def test_who_reports_last_knows_of_all_trials(tmp_path, monkeypatch) -> None:
    Runs(monkeypatch)
    asked, seen, at_lock = made(tmp_path, trials=1), [], threading.Event()
    conducted(asked)

    def last() -> None:
        conducted(dataclasses.replace(asked, trials=2))
        at_lock.set()
        with search.reporting(asked) as found:
            seen.append(len(found))

    with search.reporting(asked) as found:
        other = threading.Thread(target=last)
        other.start()
        assert at_lock.wait(30)
        other.join(0.3)
        assert (len(found), seen) == (1, [])  # it waits until this report is written
    other.join(10)
    assert seen == [2]


def _edit_value(database: Path, lr: float) -> None:
    with contextlib.closing(sqlite3.connect(database)) as connection, connection:
        connection.execute("UPDATE trial_params SET param_value = ? WHERE trial_id = 1 AND param_name = 'lr'", (lr,))


@pytest.mark.fast_sample(1)
@pytest.mark.parametrize("attribute", ['"runs"', "5", "{", "[1, 2]"])
def test_a_storage_with_attributes_of_another_type_is_one_line(tmp_path, monkeypatch, attribute: str) -> None:
    Runs(monkeypatch)
    asked = made(tmp_path, trials=2, pruner=None)
    conducted(asked)
    with contextlib.closing(sqlite3.connect(asked.folder / search.STORAGE)) as connection, connection:
        connection.execute("UPDATE trial_user_attributes SET value_json = ? WHERE key = 'runs'", (attribute,))
    with pytest.raises(RunError, match=r"study.db cannot be read .*Remove it, or choose another name"):
        conducted(asked)


def test_scores_are_those_of_the_results_and_a_folder_holds_one_search(tmp_path, monkeypatch) -> None:
    Runs(monkeypatch)
    asked = made(tmp_path, trials=2, pruner=None)
    found = conducted(asked)
    with pytest.raises(RunError, match=r"holds a search with other settings \(space\). Choose another name"):
        conducted(made(tmp_path, space={"lr": {**LR, "high": 1}}))
    _edit_value(asked.folder / search.STORAGE, 0.0123)
    with pytest.raises(RunError, match=r"trial 1 of .* has lr=0.0123, but its run .* used 0\.\d+. Search again"):
        conducted(asked)
    _edit_value(asked.folder / search.STORAGE, found[0].values["lr"])
    path = tmp_path / found[0].runs[0] / store.RESULT
    result = read_json(path)
    write_json(path, {**result, "metrics": {"val": {"map_at_r": 0.9999}}})
    with pytest.raises(RunError, match=r"trial 1 of .* had the score 0\.\d+, but its runs .* now have 0.9999"):
        conducted(asked)
    path.unlink()
    with pytest.raises(RunError, match=r"result\.json is missing\. Restore the run, or search under another name"):
        conducted(asked)
    (asked.folder / search.STORAGE).write_bytes(b"no database")
    with pytest.raises(RunError, match=r"study.db cannot be read .*Remove it, or choose another name"):
        conducted(asked)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"trials": 0}, "trials: got 0, expected at least 1"),
        ({"runs": ()}, "runs: got 0, expected at least 1"),
        ({"pruner": 5}, "pruner: got 5, expected an object"),
        ({"pruner": {"warmup": 1}}, "pruner: warmup is unknown: did you mean 'warmup_steps'"),
        ({"pruner": {"warmup_steps": -1}}, "pruner: warmup_steps: got -1, expected greater"),
    ],
)
def test_errors_of_searches(tmp_path, wrong, message) -> None:
    with pytest.raises(ConfigError, match=message):
        made(tmp_path, **wrong)


def test_another_space_is_told_before_its_outcomes_are_read(tmp_path, monkeypatch) -> None:
    Runs(monkeypatch)
    asked = made(tmp_path, trials=1)
    search.require_same_settings(asked, None)  # nothing is there
    conducted(asked)
    search.require_same_settings(asked, None)
    with pytest.raises(RunError, match="holds a search with other settings"):
        search.require_same_settings(made(tmp_path, trials=1, space={"lr": {**LR, "high": 1.0}}), None)


def test_the_last_step_of_a_killed_training_is_known_once_it_has_stopped(tmp_path) -> None:
    assert search._last_step(tmp_path) is None
    for reason, expected in (("", None), ("early_stopping", STEPS)):
        save_checkpoint(tmp_path / "last.ckpt", {"progress": {"step": STEPS, "stop_reason": reason}})
        assert search._last_step(tmp_path) == expected
