"""A search in a folder that processes share: claim, resume, run and prune trials.

A trial belongs to the process that holds the lock of its folder. The next process resumes a running trial without a
lock, with its number and values. Optuna's ``study.optimize`` would fail it on Ctrl-C or SIGTERM, and its heartbeat
would retry it after a while under another number, from which other values would follow.
"""

import contextlib
import json
import logging
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from filelock import FileLock
from pydantic import Field

from dmlbench.config import read_config
from dmlbench.external_files import Schema, validated
from dmlbench.results.store import CONFIG, RESULT, locked, make_directory, read_result, require_own_place
from dmlbench.runner import ComposedRun
from dmlbench.runtime import derive_seed
from dmlbench.training.checkpoint import load_checkpoint
from dmlbench.training.fit import HISTORY, LAST
from dmlbench.training.log import read_history
from dmlbench.tuning.space import Dimension, Value, corners, grid, override
from dmlbench.types import (
    ConfigError,
    Diverged,
    Pruned,
    RunError,
    RunInUse,
    check_at_least,
    check_choice,
    flatten,
    how_to_install,
)

if TYPE_CHECKING:
    from optuna import Study
    from optuna.trial import FrozenTrial, Trial

log = logging.getLogger(__name__)

STORAGE = "study.db"
_TRIALS, _CLAIM, _REPORT = "trials", "claim.lock", "report.lock"
METHODS = ("tpe", "grid")
_WAIT_S = 2.0
_NEXT_RUN = 10**9
"""Added to the steps of a trial's next run, so that the pruner compares validations of the same run."""
_ABOVE = 1000.0
"""Added to what a trial's next run reports: Optuna's pruner takes a trial's largest report, which must be its last."""

Compose = Callable[[Sequence[str]], ComposedRun]


class Pruner(Schema):
    """Settings of the median rule."""

    startup_trials: int = Field(5, ge=0)
    warmup_steps: int = Field(0, ge=0)


@dataclass(frozen=True)
class Search:
    """Settings of a search."""

    name: str
    folder: Path  # of the storage
    output_dir: Path
    space: tuple[Dimension, ...]
    overrides: tuple[str, ...]  # of every run, above ``protocol=hpo``
    runs: tuple[tuple[str, ...], ...]  # overrides of each run of a trial, whose score is the mean over them
    trials: int  # including pruned and failed ones
    seed: int
    startup_trials: int  # drawn at random before TPE begins
    pruner: Mapping[str, int] | None  # of the median rule; None prunes nothing
    method: str = "tpe"  # or "grid": trial n has the n-th combination of choices

    def __post_init__(self) -> None:
        check_choice("method", self.method, METHODS)
        check_at_least(1, trials=self.trials, startup_trials=self.startup_trials, runs=len(self.runs))
        try:
            _pruner_of(self)
        except ValueError as error:
            raise ConfigError(f"pruner: {error}.") from None

    def of_run(self, values: Mapping[str, Value], which: int) -> list[str]:
        """Overrides of one run of a trial."""
        own = [override(key, value) for key, value in values.items()]
        return ["protocol=hpo", "fit.keep=none", *self.overrides, *own, *self.runs[which]]

    @property
    def described(self) -> str:
        """The overrides of all trials, for messages."""
        return " ".join(o for o in self.overrides if not o.startswith("paths.")) or "no overrides"

    def values(self, drawn: Mapping[str, Value]) -> dict[str, Value]:
        """The values of a trial's runs, rounded from the drawn ones."""
        return {dimension.key: dimension.value(drawn[dimension.key]) for dimension in self.space}


@dataclass(frozen=True)
class Outcome:
    """The result of a trial."""

    number: int  # from 0
    state: str  # "complete", "pruned", "failed" or "running"
    values: Mapping[str, Value]
    score: float | None  # mean validation score of its runs; of a pruned trial the best so far
    steps: int
    runs: tuple[str, ...]  # run directories, relative to the output folder
    note: str  # why it failed


def conduct(search: Search, compose: Compose) -> list[Outcome]:
    """Run the missing trials, perhaps beside other processes; return the outcomes of all."""
    identity = checked(search, compose)
    make_directory(search.folder)
    study = _open(search, identity)
    outcomes(search, study)  # raises if results are gone
    while True:
        with _claimed(search, study) as trial:
            if trial is None:
                break
            _perform(search, study, trial, compose)
    return outcomes(search, study)


def checked(search: Search, compose: Compose) -> dict[str, str]:
    """Check the runs at the corners of the space; return what identifies the search, as text by name."""
    first, *others = corners(search.space)
    bases = [compose(search.of_run(search.values(first), i)) for i in range(len(search.runs))]
    for run in (*bases, *(compose(search.of_run(search.values(point), 0)) for point in others)):
        if run.protocol != "hpo":
            raise ConfigError(
                f"protocol: got {run.protocol}, expected hpo, because tuning must not see the data of reported scores. "
                "Leave protocol out."
            )
        run.check()
    sampling = [search.seed, search.startup_trials] if search.method == "tpe" else [search.method]
    return {
        "space": json.dumps([asdict(dimension) for dimension in search.space]),
        "seed, startup_trials, pruner": json.dumps([*sampling, _pruner_of(search)]),
        "runs": json.dumps([run.sha256 for run in bases]),
    }


def _pruner_of(search: Search) -> dict[str, int] | None:
    return None if search.pruner is None else validated(search.pruner, Pruner).model_dump()


def _open(search: Search, identity: Mapping[str, str]) -> "Study":
    """Open the study in the folder, or make it."""
    try:
        import optuna
    except ImportError as error:
        raise ConfigError(f"dmlbench tune needs Optuna. {how_to_install('tune')}") from error
    from sqlalchemy import URL

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    path = search.folder / STORAGE
    url = URL.create("sqlite", database=str(path.absolute())).render_as_string(hide_password=False)
    pruner: optuna.pruners.BasePruner = optuna.pruners.NopPruner()
    if (settings := _pruner_of(search)) is not None:
        pruner = optuna.pruners.MedianPruner(settings["startup_trials"], settings["warmup_steps"])
    with _readable(search), FileLock(search.folder / _CLAIM):
        storage = optuna.storages.RDBStorage(url, engine_kwargs={"connect_args": {"timeout": 60}})
        study = optuna.create_study(
            storage=storage, study_name=search.name, direction="maximize", load_if_exists=True, pruner=pruner
        )
        held = {"overrides": search.described, **identity, **study.user_attrs}
        for key in held.keys() - study.user_attrs.keys():  # all, or what a killed process had no time to write
            study.set_user_attr(key, held[key])
    if differing := [key for key, value in identity.items() if held.get(key) != value]:
        was = f", begun with {held['overrides']}" if "runs" in differing else ""
        raise RunError(
            f"{search.folder} holds a search with other settings ({'; '.join(differing)}){was}. Choose another name, "
            "or remove that folder: its runs stay and are not trained again."
        )
    return study


@contextlib.contextmanager
def _claimed(search: Search, study: "Study") -> Iterator["Trial | None"]:
    """Hold a trial for this process: one without a process, or a new one, or None."""
    from optuna.trial import TrialState

    with contextlib.ExitStack() as held:
        found = None
        with FileLock(search.folder / _CLAIM):
            frozen = study.get_trials(deepcopy=False)
            for left in (trial for trial in frozen if trial.state == TrialState.RUNNING):
                with contextlib.suppress(RunInUse):  # by a living process
                    held.enter_context(_lock_of(search, left.number))
                    log.info("trial %d resumes", left.number + 1)
                    found = left._trial_id
                    break
            number = len(frozen) if found is None else left.number
            if found is None and len(frozen) < search.trials:
                held.enter_context(_lock_of(search, number))
                found = study.ask()._trial_id
            trial = None if found is None else _drawn(search, study, found, number)
        yield trial
        with FileLock(search.folder / _CLAIM):  # or a process that has just read "running" would resume it
            held.close()
            for folder in (search.folder / _TRIALS).glob("*"):  # those of killed processes, too
                with contextlib.suppress(RunInUse, OSError):
                    with locked(folder):
                        pass
                    folder.rmdir()


def _drawn(search: Search, study: "Study", trial_id: int, number: int) -> "Trial":
    """A trial with all of its values, the missing ones drawn."""
    import optuna

    # a sampler for each trial, so that draws do not depend on where the process began
    study.sampler = optuna.samplers.TPESampler(
        n_startup_trials=search.startup_trials,
        seed=derive_seed(search.seed, "trial", number) % 2**32,
        constant_liar=True,
    )
    if search.method == "grid":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            study.sampler = optuna.samplers.PartialFixedSampler(grid(search.space)[number], study.sampler)
    trial = optuna.trial.Trial(study, trial_id)
    for dimension in search.space:
        dimension.draw(trial)
    return trial


def _lock_of(search: Search, number: int) -> contextlib.AbstractContextManager[None]:
    folder = search.folder / _TRIALS / str(number)
    folder.mkdir(parents=True, exist_ok=True)
    return locked(folder)


def _perform(search: Search, study: "Study", trial: "Trial", compose: Compose) -> None:
    """Do the runs of a trial, and tell the study the result."""
    from optuna.trial import TrialState

    values = search.values(trial.params)
    log.info("trial %d of %d: %s", trial.number + 1, search.trials, ", ".join(f"{k}={v}" for k, v in values.items()))
    scores: list[float] = []
    folders: list[str] = []
    steps = 0
    try:
        for i in range(len(search.runs)):
            run = compose(search.of_run(values, i))
            folders.append(str(run.directory.relative_to(search.output_dir)))
            trial.set_user_attr("runs", folders)
            result = _result_of(trial, run, scores, i)
            scores.append(result["metrics"]["val"][result["monitor"]])
            steps += result["steps"]
    except Pruned as stopped:
        steps += stopped.step
        log.info("trial %d is pruned at step %d: below the median", trial.number + 1, stopped.step)
    except (Diverged, ConfigError, torch.OutOfMemoryError) as error:  # of these values, not of the search
        trial.set_user_attr("note", str(error).splitlines()[0])
        log.warning("trial %d failed: %s", trial.number + 1, error)
    trial.set_user_attr("steps", steps)
    if len(scores) < len(search.runs):  # a failed one, too: from FAIL the sampler learns nothing and draws there again
        study.tell(trial.number, state=TrialState.PRUNED)
        return
    score = sum(scores) / len(scores)
    study.tell(trial.number, score)
    log.info("trial %d: %s %.4f", trial.number + 1, run.monitor, score)


def _result_of(trial: "Trial", run: ComposedRun, scores: Sequence[float], which: int) -> dict[str, Any]:
    """The result of a trial's run, done if it is missing; raises ``Pruned``.

    Validations before an interruption, or of an existing run, are reported again: a trial with the values of a pruned
    one is pruned at the same step.
    """
    told = trial.study.get_trials(deepcopy=False)[trial.number].intermediate_values

    def follow(step: int, best: float) -> bool:
        if (place := which * _NEXT_RUN + step) not in told:
            trial.report(which * _ABOVE + (sum(scores) + best) / (len(scores) + 1), place)
        return not trial.should_prune()

    run_dir = run.directory
    is_complete = (run_dir / RESULT).exists()
    last = read_result(run_dir)["steps"] if is_complete else _last_step(run_dir)
    best = float("-inf")
    known = {step: value for step, name, value in read_history(run_dir / HISTORY) if name == f"val/{run.monitor}"}
    for step, score in known.items():
        best = max(best, score)
        if step != last and not follow(step, best) and not is_complete:
            raise Pruned(f"{run_dir} was stopped at step {step}", step)
    while True:
        try:
            return read_result(run.train(follow))
        except RunInUse as error:  # another trial of these values has it
            log.info("waiting: %s", error)
            time.sleep(_WAIT_S)


def _reported(trial: "FrozenTrial") -> float | None:
    """The last score that a trial reported to the pruner; None if none."""
    if (place := trial.last_step) is None:
        return None
    return trial.intermediate_values[place] - place // _NEXT_RUN * _ABOVE


def _last_step(run_dir: Path) -> int | None:
    """The last step of a training that has ended without a result, whose validation is not reported; else None."""
    if not (run_dir / LAST).exists():
        return None
    progress: dict[str, Any] = load_checkpoint(run_dir / LAST)["progress"]
    return progress["step"] if progress["stop_reason"] else None


def require_same_settings(search: Search, compose: Compose) -> None:
    """Raise RunError if the folder of a search holds one with other settings."""
    if (search.folder / STORAGE).is_file():
        _open(search, checked(search, compose))


def ended(search: Search) -> list[Outcome] | None:
    """The outcomes of a search whose trials have all ended, else None."""
    if not (search.folder / STORAGE).is_file():
        return None
    with reporting(search) as found:
        is_done = len(found) >= search.trials and all(outcome.state != "running" for outcome in found)
        return found if is_done else None


@contextlib.contextmanager
def reporting(search: Search) -> Iterator[list[Outcome]]:
    """The outcomes by now, while this process alone may write them."""
    with FileLock(search.folder / _REPORT):
        yield outcomes(search, _open(search, {}))


def outcomes(search: Search, study: "Study") -> list[Outcome]:
    """The outcome of every trial by number, with scores from the results of its runs."""
    found: list[Outcome] = []
    data: dict[str, str] = {}
    with _readable(search):
        trials = [(trial, validated(trial.user_attrs, _Attributes)) for trial in study.get_trials(deepcopy=False)]
    for trial, own in trials:
        state = "failed" if own.note else trial.state.name.lower()
        values = search.values(trial.params) if len(trial.params) == len(search.space) else {}
        score = _reported(trial) if state == "pruned" else None
        if state == "complete":
            score = _stored_score(search, trial, values, own.runs, data)
        found.append(Outcome(trial.number, state, values, score, own.steps, own.runs, own.note))
    if len(data) > 1:
        raise RunError(
            f"trials of {search.folder} used different data ({' and '.join(data.values())}). Search again under "
            "another name."
        )
    return found


class _Attributes(Schema):
    """What a search writes about a trial."""

    runs: tuple[str, ...] = ()
    steps: int = 0
    note: str = ""


@contextlib.contextmanager
def _readable(search: Search) -> Iterator[None]:
    """Name the storage in errors of what is damaged in it."""
    import optuna
    from sqlalchemy.exc import SQLAlchemyError

    try:
        yield
    except (SQLAlchemyError, optuna.exceptions.StorageInternalError, ValueError, KeyError, AssertionError) as error:
        path, reason = search.folder / STORAGE, " ".join(str(error).split())
        raise RunError(f"{path} cannot be read ({reason:.200}). Remove it, or choose another name.") from error


def _stored_score(
    search: Search, trial: "FrozenTrial", values: Mapping[str, Value], runs: Sequence[str], data: dict[str, str]
) -> float:
    """The score of a trial's runs, which must be there, have its values, and have the score that the storage has."""
    what = f"trial {trial.number + 1} of {search.folder}"
    scores = []
    for name in runs:
        run_dir = search.output_dir / name
        try:
            result = read_result(run_dir)
        except RunError as error:
            raise RunError(f"{what}: {error} Restore the run, or search under another name.") from error
        require_own_place(run_dir, result)
        used = flatten(read_config(run_dir / CONFIG)) | result["choices"]
        for key, value in values.items():
            is_none = value is None and str(used.get(key)).lower() == "none"  # of a group, the option none
            if key in used and str(used[key]) != str(value) and not is_none:
                other = f"but its run {run_dir} used {used[key]}"
                raise RunError(f"{what} has {key}={value}, {other}. Search again under another name.")
        data.setdefault(result["dataset_fingerprint"], name)
        scores.append(result["metrics"]["val"][result["monitor"]])
    score = float(sum(scores) / len(scores))
    if score != trial.value:
        raise RunError(
            f"{what} had the score {trial.value}, but its runs ({', '.join(runs)}) now have {score}. Search again "
            "under another name."
        )
    return score
