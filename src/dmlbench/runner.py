"""Run a config at one fold and repeat: train, test, write the result."""

import contextlib
import copy
import datetime
import functools
import logging
import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from omegaconf import DictConfig, OmegaConf
from pytorch_metric_learning.distances import BaseDistance

from dmlbench import runtime
from dmlbench.build import make_experiment
from dmlbench.checks import check
from dmlbench.components import component
from dmlbench.config import read_config
from dmlbench.data.images.feature_cache import FeatureView
from dmlbench.evaluation.embeddings.embed import OWN_DISTANCE, save_distance, save_embeddings
from dmlbench.evaluation.evaluate import Evaluation, per_query_table, to_csv
from dmlbench.evaluation.search.pairwise import ranks_like_unit_vectors
from dmlbench.experiment import Experiment
from dmlbench.identity import directory_of, is_complete, run_sha256
from dmlbench.ranks import PeerEnded, Ranks, joined_ranks
from dmlbench.results import store
from dmlbench.training.checkpoint import load_checkpoint
from dmlbench.training.fit import BEST, HISTORY, LAST, FitResult, OnValidation, fit
from dmlbench.training.log import read_history
from dmlbench.training.signals import StopSignal
from dmlbench.training.stage_plan import Plan, load_plan, plan_of, save_plan
from dmlbench.types import EmbeddingSet, ImageTable, Pruned, RunError, RunInUse, Split, counted, flatten

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ComposedRun:
    """A run to train, for searches, which do not look into its configuration."""

    cfg: DictConfig

    @property
    def directory(self) -> Path:
        return directory_of(self.cfg)

    @property
    def sha256(self) -> str:
        return run_sha256(self.cfg)

    @property
    def protocol(self) -> str:
        return str(component(self.cfg.protocol).name)

    @property
    def monitor(self) -> str:
        return str(self.cfg.fit.monitor)

    @property
    def settings(self) -> dict[str, Any]:
        """Unresolved settings by key."""
        return flatten(OmegaConf.to_container(self.cfg, resolve=False))

    @property
    def recipe_options(self) -> Mapping[str, str]:
        return dict(self.cfg.runtime.recipe.get("chosen", {}))

    def check(self) -> None:
        check(self.cfg)

    def train(self, on_validation: OnValidation | None = None) -> Path:
        return run(self.cfg, on_validation)


def run(cfg: DictConfig, on_validation: OnValidation | None = None) -> Path:
    """Train and test a composed configuration; returns the run directory.

    A complete run is skipped; an interrupted one resumes from its checkpoint. A run with a ``rerank`` takes the
    weights of the complete run without it, if there is one. ``on_validation`` may end the training (see ``fit``).

    Raises:
        DmlbenchError: what a user can fix; also in ``error.txt`` of the run directory.
        Preempted: stopped by a signal; the same command resumes.
    """
    check(cfg)
    run_dir = directory_of(cfg)
    with joined_ranks(cfg.fit.processes, cfg.device) as (ranks, device):
        store.make_directory(run_dir)
        if ranks.is_first:
            _run_unless_complete(cfg, run_dir, device, ranks, on_validation)
        elif ranks.same(False):
            with StopSignal().installed() as stop:
                _train_and_test(cfg, run_dir, device, ranks, stop, None)
    return run_dir


def _run_unless_complete(
    cfg: DictConfig, run_dir: Path, device: torch.device, ranks: Ranks, on_validation: OnValidation | None
) -> None:
    if _is_complete(cfg, run_dir):
        ranks.same(False)
        log.info("%s is complete: nothing to do", run_dir)
        stored = read_config(run_dir / store.CONFIG)
        if late := (cfg.logger or {}).keys() - (stored.get("logger") or {}).keys():
            log.warning(
                "logger=%s logs nothing, because this run was trained without it. Its losses and scores are in %s. "
                "To log them, remove the run with `dmlbench clean` and train it again.",
                ",".join(sorted(late)), run_dir / HISTORY,
            )  # fmt: skip
        # The process may have been killed after it wrote the result.
        _tidy(run_dir, stored["fit"]["keep"])
        if not store.is_locked(run_dir):
            (run_dir / store.LOCK).unlink(missing_ok=True)
        return
    with store.locked(run_dir), StopSignal().installed() as stop:
        # Another process may have finished it while this one started.
        if ranks.same(not _is_complete(cfg, run_dir)):
            (run_dir / store.ERROR).unlink(missing_ok=True)
            _train_and_test(cfg, run_dir, device, ranks, stop, on_validation)


def _train_and_test(
    cfg: DictConfig, run_dir: Path, device: torch.device, ranks: Ranks, stop: StopSignal,
    on_validation: OnValidation | None,
) -> None:  # fmt: skip
    """Train and test on this rank, and write the error that ends it."""
    try:
        runtime.set_strict_float32()
        plan = _plan_for(cfg, run_dir)
        experiment = make_experiment(cfg, run_dir, device, plan=plan, check=stop.check, ranks=ranks)
        with contextlib.ExitStack() as opened:
            for logger in experiment.loggers:
                opened.callback(logger.close)
            _run(experiment, run_dir, stop, on_validation, _run_without_rerank(cfg, run_dir))
    except (RunInUse, Pruned, PeerEnded):
        raise
    except Exception as error:
        with contextlib.suppress(OSError):  # the disk may be full: the error itself matters more
            if ranks.is_first or not (run_dir / store.ERROR).exists():
                (run_dir / store.ERROR).write_text(traceback.format_exc(), "utf-8", "backslashreplace")
        if isinstance(error, OSError):
            raise RunError(f"run {run_dir}: {error}. Fix this and start the same command again to resume.") from error
        raise


def _plan_for(cfg: DictConfig, run_dir: Path) -> Plan | None:
    """The plan that stage 1 of this config and repeat wrote, copied next to the run; None of other protocols."""
    planned_by = component(cfg.protocol).planned_by
    if planned_by is None:
        return None
    first = OmegaConf.merge(cfg, {"protocol": planned_by})
    assert isinstance(first, DictConfig)
    found, kept = directory_of(first) / store.PLAN, run_dir / store.PLAN
    if kept.exists() and not found.exists():
        return load_plan(kept)
    if not found.exists() and store.is_locked(found.parent):
        raise RunInUse(f"{run_dir} needs the plan of {found.parent}, which is still running. Wait for it.")
    plan = load_plan(found)
    if not is_complete(first, found.parent):  # raises for another base seed or other data
        raise RunError(f"{found.parent} is not complete. Run stage 1 of this config and repeat first.")
    if not kept.exists():
        save_plan(kept, plan)
    elif load_plan(kept) != plan:
        raise RunError(f"{run_dir} uses a plan that stage 1 has since replaced. Delete this run and start it again.")
    return plan


def _is_complete(cfg: DictConfig, run_dir: Path) -> bool:
    if not is_complete(cfg, run_dir):
        return False
    _plan_for(cfg, run_dir)
    return True


def _run_without_rerank(cfg: DictConfig, run_dir: Path) -> Path | None:
    """The complete run of the same settings without ``rerank``, if this one has not begun to train."""
    if cfg.rerank is None or (run_dir / LAST).exists():
        return None
    plain = copy.deepcopy(cfg)
    plain.rerank = None
    found = directory_of(plain)
    return found if _is_complete(plain, found) and (found / BEST).exists() else None


def _copy_training(trained: Path, run_dir: Path, experiment: Experiment) -> FitResult:
    """Copy weights and history of a complete run; the result has no training time of its own."""
    result = store.read_result(trained)
    store.require_own_files(trained, result, (BEST,))
    for path in filter(Path.exists, (trained / HISTORY, trained / BEST)):
        if experiment.setup.ranks.is_first:
            runtime.atomic_write(run_dir / path.name, path.read_bytes())
    best = load_checkpoint(trained / BEST)
    experiment.setup.model.load_state_dict(best["model"])
    experiment.objective.load_state_dict(best["objective"])
    log.info("%s uses the weights of %s, which differs only in reranking", run_dir, trained)
    return FitResult(step=result["steps"], best_step=result["best_step"], stop_reason=result["stop_reason"], wall_s=0.0)


@functools.cache
def _warn_of_data(name: str, notes: str) -> None:
    """Once a process: a sweep would repeat it for each run."""
    log.warning("%s differs from the published data set: %s. Scores may not be comparable with papers.", name, notes)


def _run(
    experiment: Experiment, run_dir: Path, stop: StopSignal, on_validation: OnValidation | None, trained: Path | None
) -> None:
    setup, plan = experiment.setup, experiment.plan
    data, model, device, settings = setup.data, setup.model, setup.device, setup.settings
    if plan is not None:
        found = "stage 1 found %.1f epochs (here %d steps) and %d changes of the learning rate"
        log.info(found, plan.epochs, settings.max_steps, len(plan.changes))
    rates = (group["lr"] for group in experiment.optimizer.param_groups)
    first_rate = next((rate for rate in rates if rate > 0), 0.0)
    if setup.ranks.is_first:
        runtime.atomic_write(run_dir / store.CONFIG, experiment.configuration.encode())
    images, classes = len(data.split.train), int(data.class_index.max()) + 1
    counts = f"{counted(images, 'training image')} of {counted(classes, 'class')}"
    backbone = OmegaConf.create(experiment.configuration).backbone
    random = "weights_file" in backbone and backbone.weights_file is None and not backbone.get("pretrained")
    start = "; the backbone has random initial weights" if random else ""
    log.info("%s on %s: %s%s", run_dir, device, counts, start)
    val = data.split.val
    if val is not None and settings.max_steps and len(np.unique(data.table.labels[val.rows])) == 1:
        log.warning(
            "validation: got 1 class, expected 2 or more, because every score of 1 class is 1. Add classes, or set a "
            "protocol with fewer parts, such as held_out."
        )
    if data.table.notes:
        _warn_of_data(data.table.name, "; ".join(data.table.notes))
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.cuda.reset_peak_memory_stats(device)
    drawn: list[NDArray[np.uint8]] = []

    def validate() -> dict[str, float]:
        if not experiment.loggers:
            return setup.validate()
        return setup.validate(lambda queries, gallery: drawn.append(setup.nearest_picture(queries, gallery)))

    try:
        if trained is not None:
            progress = _copy_training(trained, run_dir, experiment)
            for logger in experiment.loggers:
                logger.start(progress.step)
        else:
            if not (run_dir / LAST).exists():
                setup.fit_head()
            progress = fit(
                model, experiment.objective, experiment.batches, validate if data.split.val else None,
                experiment.optimizer, settings, run_dir, device=device, schedule=experiment.schedule,
                loggers=experiment.loggers, picture=drawn.pop, stop=stop, data_fingerprint=data.table.fingerprint,
                on_validation=on_validation, ranks=setup.ranks,
            )  # fmt: skip
    finally:
        experiment.batches.close()

    late = "the selected weights (step %d) are from before the %s started. Lower %s, or train longer."
    if progress.step and not model.started:
        log.warning(late, progress.best_step, "pooling's prototypes", "pooling.memory_rows or pooling.start_step")
    if progress.step and not experiment.objective.started:
        log.warning(late, progress.best_step, "loss's memory", "loss.start_step or loss.memory_size")

    is_test = data.split.test is not None and data.split.val_is_test and setup.rerank is None
    if not setup.ranks.is_first:  # which embed their part of what rank 0 scores
        if data.split.test is not None:
            setup.embed_test(data.split.test)
        if data.split.val is not None and not is_test:
            setup.validate()
        return
    started = time.monotonic()
    scores: dict[str, Any] = {}
    test = None
    if data.split.test is not None:
        queries, gallery, test = setup.test(data.split.test)
        scores["test"] = test.scores
        warn_at_chance(test, steps=progress.step, random=random)
        save_test(run_dir, data.table, queries, gallery, test, distance=setup.rerank or model.distance)
        if model.distance.state_dict():
            save_distance(run_dir / store.DISTANCE, model.distance)
    if data.split.val is not None:
        scores["val"] = test.scores if test is not None and is_test else setup.validate()
    if experiment.protocol.leaves_plan:
        plan = plan_of(
            read_history(run_dir / HISTORY), first_rate=first_rate, best_step=progress.best_step,
            steps_per_epoch=experiment.steps_per_epoch,
        )  # fmt: skip
        save_plan(run_dir / store.PLAN, plan)
    progress.wall_s += time.monotonic() - started
    kept = (BEST,) if settings.keep in ("best", "both") else ()
    hashes = store.hashes_of(run_dir, (store.EMBEDDINGS, store.DISTANCE, store.PER_QUERY, HISTORY, *kept))
    result = _result(experiment, run_dir.parent.name, progress, scores, test, hashes)
    if trained is not None:
        made = store.read_result(trained)
        result |= {"weights_of": trained.parent.name, "weights_code": store.code_of(made)}
        if "weights_sha256" in made:
            result["weights_sha256"] = made["weights_sha256"]
    for logger in experiment.loggers:  # before the result: who has it needs no training any more
        final = {f"{part}/{name}": value for part, values in scores.items() for name, value in values.items()}
        logger.summary(progress.step, final)
    store.write_result(run_dir, result)
    _tidy(run_dir, settings.keep)
    summary = ", ".join(f"{name} {value:.4f}" for name, value in scores["test" if test else "val"].items())
    log.info("%s: finished after %s (%s), %s: %s", run_dir.name, counted(progress.step, "step"), progress.stop_reason,
             "test" if test else "validation", summary)  # fmt: skip


def warn_at_chance(test: Evaluation, *, steps: int, random: bool) -> None:
    """Warn of a test P@1 within two standard deviations of random rankings, or below, after ``steps`` of training.

    Without training, no warning is given for ``random`` initial weights, which a run announces.
    """
    if random and not steps:
        return
    mean, std = test.p_at_1_by_chance
    score = test.scores.get("p_at_1")
    if score is not None and score <= mean + 2 * std:
        remedy = "Check the backbone's weights and the images."
        if steps:
            remedy = "Look for a setting (optim.lr, fit.max_steps) whose validation score rises."
        log.warning(
            "test P@1 is within two standard deviations of chance: got %.2f %%, random rankings have %.2f %%. %s",
            100 * score, 100 * mean, remedy,
        )  # fmt: skip


def _result(
    experiment: Experiment, config: str, progress: FitResult, scores: dict[str, Any], test: Evaluation | None,
    hashes: dict[str, str],
) -> dict[str, Any]:  # fmt: skip
    setup = experiment.setup
    table, split = setup.data.table, setup.data.split
    groups = experiment.optimizer.param_groups if setup.settings.max_steps else []
    published = None
    if split.test is not None and len(split.test.query) != table.published_queries:
        is_test_half = np.array_equal(split.test.query, np.flatnonzero(np.isin(table.role, ("test", "query"))))
        published = table.published_queries if is_test_half else None
    rerank = setup.rerank.description if test and setup.rerank is not None else None
    return {
        "config_id": config,
        **tested_result(table, experiment.protocol, split, test),
        **experiment.provenance,
        "choices": setup.choices,
        "git_commit": runtime.git_commit(),
        "device": runtime.device_name(setup.device),
        "training": {
            "frozen_until": setup.model.backbone.frozen_until,
            "tuning": setup.model.backbone.tuning,
            "trained_parameters": sum(p.numel() for group in groups for p in group["params"]),
            "image_size": list(experiment.image_size),
            "views": setup.images.cache.settings.views if isinstance(setup.images, FeatureView) else None,
        },
        "best_step": progress.best_step,
        "steps": progress.step,
        "stop_reason": progress.stop_reason,
        "monitor": setup.settings.monitor,
        "search": test.search if test else setup.spec.search,
        "metrics": scores,
        **({"rerank": rerank} if rerank else {}),
        **({"n_query_published": published} if published else {}),
        "pooling_started": setup.model.started,
        "memory_started": experiment.objective.started,
        **hashes,
        "wall_s": round(progress.wall_s, 3),
        "peak_memory_bytes": runtime.peak_memory_bytes(setup.device),
    }


def save_test(
    run_dir: Path, table: ImageTable, queries: EmbeddingSet, gallery: EmbeddingSet | None, test: Evaluation,
    *, distance: BaseDistance | None = None,
) -> None:  # fmt: skip
    """Write the test rows of a run and the scores of its queries; ``distance`` compares the rows."""
    about = {"dataset": table.name, "fingerprint": table.fingerprint, "config_id": run_dir.parent.name}
    if distance is not None and not ranks_like_unit_vectors(distance):
        about[OWN_DISTANCE] = type(distance).__name__
    save_embeddings(run_dir / store.EMBEDDINGS, queries, gallery, about)
    runtime.atomic_write(run_dir / store.PER_QUERY, to_csv(per_query_table(queries, test)))


def tested_result(table: ImageTable, protocol: Any, split: Split, test: Evaluation | None) -> dict[str, Any]:
    """What the result of any run says of its data, protocol and test, with versions and time."""
    return {
        "dataset": table.name,
        "dataset_fingerprint": table.fingerprint,
        **({"data_notes": list(table.notes)} if table.notes else {}),
        "protocol": protocol.name,
        **{key: getattr(protocol, key) for key in ("aggregation", "num_folds", "num_repeats")},
        "val_is_test": split.val_is_test,
        **({"facts": dict(split.facts)} if split.facts else {}),
        **{key: getattr(test, key) if test else 0 for key in ("n_query", "n_gallery", "n_skipped_queries")},
        **({"kmeans": test.kmeans} if test and test.kmeans else {}),
        **({"degenerate": list(test.degenerate)} if test and test.degenerate else {}),
        "versions": runtime.package_versions(),
        "finished": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def _tidy(run_dir: Path, keep: str) -> None:
    """Remove the checkpoints that ``fit.keep`` does not keep."""
    for name, kept in ((BEST, ("best", "both")), (LAST, ("last", "both"))):
        if keep not in kept:
            (run_dir / name).unlink(missing_ok=True)
