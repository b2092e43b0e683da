"""One run from beginning to end: data, training, test, result; skipped when complete, continued when interrupted."""

import contextlib
import dataclasses
import datetime
import logging
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf

from dmlbench import build
from dmlbench.build import Data
from dmlbench.config import NOT_PART_OF_A_RUN, cell_id, config_sha256, flatten, load_config
from dmlbench.data.images.sources import ImageSource
from dmlbench.evaluation.analysis import per_query_table, to_csv
from dmlbench.evaluation.embeddings.embed import embed, save_distance, save_embeddings
from dmlbench.evaluation.evaluate import Evaluation, evaluate
from dmlbench.evaluation.task import EvaluationSpec
from dmlbench.models.head import MetricModel
from dmlbench.results import store
from dmlbench.runtime import (
    atomic_write,
    autocast,
    derive_seed,
    device_name,
    git_commit,
    package_versions,
    peak_memory_bytes,
    seed_everything,
    select_device,
    set_strict_float32,
)
from dmlbench.training.fit import BEST, HISTORY, LAST, FitResult, fit
from dmlbench.training.log import read_history
from dmlbench.training.replay import Plan, load_plan, plan_of, save_plan
from dmlbench.training.signals import StopSignal
from dmlbench.types import EmbeddingSet, RetrievalSet, RunError

log = logging.getLogger(__name__)


def run(cfg: DictConfig) -> Path:
    """Train and test the cell ``cfg`` at its coordinates; returns the run directory.

    A complete run of the same configuration is left as it is; an interrupted one continues from its checkpoint.

    Raises:
        DmlbenchError: what a user can mend; ``error.txt`` in the run directory says it too.
        Preempted: asked to stop; start the same command again to continue.
    """
    build.check(cfg)
    device = select_device(cfg.device)
    run_dir = directory_of(cfg)
    store.make_directory(run_dir)
    if _is_complete(cfg, run_dir):
        log.info("%s is complete: nothing to do", run_dir)
        # A kill may have come between the result and the removal of what was not to be kept.
        _tidy(run_dir, load_config(run_dir / store.CONFIG).fit.keep)
        return run_dir
    with store.locked(run_dir), _stop_signal() as stop:
        if _is_complete(cfg, run_dir):  # another process may have finished it while this one started
            return run_dir
        (run_dir / store.ERROR).unlink(missing_ok=True)
        try:
            _run(cfg, run_dir, device, stop)
        except Exception as error:
            log.error("%s failed: %s", run_dir, error)  # at once: a sweep goes on and reports at its end
            with contextlib.suppress(OSError):  # the disk may be full: the error itself matters more
                (run_dir / store.ERROR).write_text(traceback.format_exc(), encoding="utf-8")
            if isinstance(error, OSError):
                raise RunError(
                    f"run {run_dir}: {error}; mend it and start the same command again to continue"
                ) from error
            raise
    return run_dir


def directory_of(cfg: DictConfig) -> Path:
    """The run directory of a configuration."""
    protocol = build.component(cfg.protocol).name
    name = cfg.dataset.name
    return store.run_directory(cfg.paths.output_dir, name, protocol, cell_id(cfg), cfg.fold, cfg.repeat)


def _plan_of_stage_1(cfg: DictConfig, run_dir: Path) -> Plan | None:
    """What stage 1 of this cell and repeat found, where this is stage 2; kept beside the run.

    Raises:
        RunError: stage 1 is missing, or has found something else since this run began.
    """
    if cfg.protocol.get("stage") != 2:
        return None
    first = OmegaConf.merge(cfg, {"protocol": {"stage": 1}})
    assert isinstance(first, DictConfig)
    found, kept = directory_of(first) / store.PLAN, run_dir / store.PLAN
    if kept.exists() and not found.exists():
        return load_plan(kept)
    plan = load_plan(found)
    if kept.exists() and load_plan(kept) != plan:
        raise RunError(f"{run_dir} follows a plan that stage 1 no longer has; delete this run to start it anew")
    save_plan(kept, plan)
    return plan


def run_seed(cfg: DictConfig) -> int:
    """Depends on base seed and coordinates, not on the cell, so that cells are compared pair by pair."""
    return derive_seed(cfg.base_seed, cfg.fold, cfg.repeat)


@contextlib.contextmanager
def _stop_signal() -> Any:
    stop = StopSignal().install()
    try:
        yield stop
    finally:
        stop.uninstall()


def _is_complete(cfg: DictConfig, run_dir: Path) -> bool:
    if not (run_dir / store.RESULT).exists():
        return False
    result = store.read_result(run_dir)
    stored = load_config(run_dir / store.CONFIG)
    if cfg.protocol.get("stage") == 2:
        _plan_of_stage_1(cfg, run_dir)
    if result["config_sha256"] != config_sha256(cfg):
        known = OmegaConf.merge(cfg, {"runtime": stored.runtime})
        old, new = (flatten(OmegaConf.to_container(c, resolve=True)) for c in (stored, known))
        keys = [key for key in sorted(old.keys() | new.keys()) if not key.startswith(NOT_PART_OF_A_RUN)]
        listing = ", ".join(f"{key}: {old.get(key)} -> {new.get(key)}" for key in keys if old.get(key) != new.get(key))
        raise RunError(
            f"{run_dir} holds the result of another configuration ({listing}); choose another paths.output_dir, or "
            "remove it with `dmlbench clean`"
        )
    # The same configuration may point at other files, for instance through paths.data_dir: then the data decide.
    if OmegaConf.to_container(stored.dataset.table) != OmegaConf.to_container(cfg.dataset.table, resolve=True):
        fingerprint = build.component(cfg.dataset.table).fingerprint
        if fingerprint != result["dataset_fingerprint"]:
            raise RunError(
                f"{run_dir} holds the result of other data (fingerprint {result['dataset_fingerprint'][:12]}, now "
                f"{fingerprint[:12]}); choose another paths.output_dir or dataset.name"
            )
    return True


def _run(cfg: DictConfig, run_dir: Path, device: torch.device, stop: StopSignal) -> None:
    set_strict_float32()
    seed = run_seed(cfg)
    data = build.build_data(cfg)
    open_images = build.image_opener(cfg, data.table, device, check=stop.check)
    train_images, eval_images = open_images(cfg.transform.train), open_images(cfg.transform.eval)
    seed_everything(seed)  # after the data: a cache that has to be filled must not move the initial weights
    model = build.build_model(cfg)
    objective = build.build_objective(cfg, model)
    plan = _plan_of_stage_1(cfg, run_dir)
    settings = build.build_fit_settings(cfg, plan)
    if plan is not None:
        log.info(
            "stage 1 found %.1f epochs, here %d steps, and %d rate changes",
            plan.epochs, settings.max_steps, len(plan.changes),
        )  # fmt: skip
    build.move(model, objective, device, channels_last=settings.channels_last)
    optimizer, schedule = build.build_optimizer(cfg, model, objective, plan)
    first_rate = next((group["lr"] for group in optimizer.param_groups if group["lr"] > 0), 0.0)
    atomic_write(run_dir / store.CONFIG, OmegaConf.to_yaml(cfg, resolve=True).encode())
    log.info(
        "%s on %s: %d training images of %d classes", run_dir, device, len(data.split.train), cfg.runtime.num_classes
    )

    scorer = Scorer(cfg, data, eval_images, model, device)
    batches = build.build_train_batches(cfg, data, train_images, seed=seed, device=device)
    loggers = build.build_loggers(cfg, run_dir)
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.cuda.reset_peak_memory_stats(device)
    try:
        progress = fit(
            model, objective, batches, scorer.validate if data.split.val else None, optimizer, settings, run_dir,
            device=device, schedule=schedule, loggers=loggers, stop=stop,
            data_fingerprint=data.table.fingerprint,
        )  # fmt: skip
    finally:
        batches.close()
        for logger in loggers:
            logger.close()

    if progress.step and not model.started:
        log.warning("the pooling's prototypes never started: lower pooling.memory_rows or start_step, or train longer")

    started = time.monotonic()
    scores: dict[str, Any] = {}
    test = None
    if data.split.test is not None:
        queries, gallery = scorer.embed(data.split.test)
        test = scorer.score(queries, gallery, partial=run_dir / store.PARTIAL)
        scores["test"] = test.scores
        save_embeddings(
            run_dir / store.EMBEDDINGS, queries, gallery,
            {"dataset": data.table.name, "fingerprint": data.table.fingerprint, "cell_id": cell_id(cfg)},
        )  # fmt: skip
        if model.distance.state_dict():
            save_distance(run_dir / store.DISTANCE, model.distance)
        atomic_write(run_dir / "per_query.csv", to_csv(per_query_table(queries, test)))
    if data.split.val is not None:
        scores["val"] = test.scores if test is not None and data.split.val_is_test else scorer.validate()
    if cfg.protocol.get("stage") == 1:
        plan = plan_of(
            read_history(run_dir / HISTORY), first_rate=first_rate, best_step=progress.best_step,
            steps_per_epoch=cfg.runtime.steps_per_epoch,
        )  # fmt: skip
        save_plan(run_dir / store.PLAN, plan)
    progress.wall_s += time.monotonic() - started
    store.write_result(run_dir, _result(cfg, data, progress, scores, test, device) | {"pooling_started": model.started})
    _tidy(run_dir, settings.keep)
    summary = ", ".join(f"{name} {value:.4f}" for name, value in scores["test" if test else "val"].items())
    log.info("%s: %s after %d steps, %s: %s", run_dir.name, progress.stop_reason, progress.step,
             "test" if test else "validation", summary)  # fmt: skip


class Scorer:
    """Embeds and scores retrieval sets with a model: what validation and test share."""

    def __init__(
        self,
        cfg: DictConfig,
        data: Data,
        images: ImageSource | torch.Tensor,
        model: MetricModel,
        device: torch.device,
    ) -> None:
        self.data = data
        self.model = model
        self.device = device
        self.spec: EvaluationSpec = build.component(cfg.evaluation)
        # Clustering costs more than a ranking: validations do without unless the run is selected by it.
        kept = [s.name for s in self.spec.scores if s.metric.is_of_queries or s.name == cfg.fit.monitor]
        self.validation_spec = dataclasses.replace(self.spec, metrics=tuple(kept))
        self.precision = cfg.fit.precision
        self.memory_format = torch.channels_last if cfg.fit.channels_last else torch.contiguous_format
        self.batches = build.build_eval_batches(cfg, data, images, device=device)

    def validate(self) -> dict[str, float]:
        """Scores of the current weights on the validation set."""
        assert self.data.split.val is not None
        return self._evaluate(self.validation_spec, *self.embed(self.data.split.val)).scores

    def embed(self, part: RetrievalSet) -> tuple[EmbeddingSet, EmbeddingSet | None]:
        """Queries and, where it is a set of its own, the gallery."""
        queries = self._embed_rows(part.query, "queries")
        return queries, None if part.gallery is None else self._embed_rows(part.gallery, "gallery")

    def score(self, queries: EmbeddingSet, gallery: EmbeddingSet | None, *, partial: Path | None = None) -> Evaluation:
        """Scores of a test set; ``partial`` is the file by which an interrupted search by distance goes on."""
        return self._evaluate(self.spec, queries, gallery, partial=partial)

    def _evaluate(
        self,
        spec: EvaluationSpec,
        queries: EmbeddingSet,
        gallery: EmbeddingSet | None,
        *,
        partial: Path | None = None,
    ) -> Evaluation:
        distance = self.model.distance
        return evaluate(queries, gallery, spec, distance=distance, partial=partial, progress=sys.stderr.isatty())

    def _embed_rows(self, rows: Any, describe: str) -> EmbeddingSet:
        self.model.eval()

        def rows_of(images: torch.Tensor) -> torch.Tensor:
            with autocast(self.device, self.precision):
                return self.model(images.contiguous(memory_format=self.memory_format)).embedding

        return embed(
            rows_of,
            self.batches(rows),
            device=self.device,
            progress=sys.stderr.isatty(),
            count=len(rows),
            describe=describe,
        )


def _result(
    cfg: DictConfig,
    data: Data,
    progress: FitResult,
    scores: dict[str, Any],
    test: Evaluation | None,
    device: torch.device,
) -> dict[str, Any]:
    protocol = build.component(cfg.protocol)
    return {
        "cell_id": cell_id(cfg),
        "dataset": data.table.name,
        "dataset_fingerprint": data.table.fingerprint,
        "protocol": protocol.name,
        "aggregation": protocol.aggregation,
        "num_folds": protocol.num_folds,
        "num_repeats": protocol.num_repeats,
        "fold": cfg.fold,
        "repeat": cfg.repeat,
        "seed": run_seed(cfg),
        "base_seed": cfg.base_seed,
        "config_sha256": config_sha256(cfg),
        "choices": OmegaConf.to_container(cfg.runtime.choices),
        "git_commit": git_commit(),
        "versions": package_versions(),
        "device": device_name(device),
        "best_step": progress.best_step,
        "steps": progress.step,
        "stop_reason": progress.stop_reason,
        "monitor": cfg.fit.monitor,
        "val_is_test": data.split.val_is_test,
        "search": test.search if test else build.component(cfg.evaluation).search,
        "metrics": scores,
        "n_query": test.n_query if test else 0,
        "n_gallery": test.n_gallery if test else 0,
        "n_skipped_queries": test.n_skipped_queries if test else 0,
        **({"kmeans": test.kmeans} if test and test.kmeans else {}),
        "wall_s": round(progress.wall_s, 3),
        "peak_memory_bytes": peak_memory_bytes(device),
        "finished": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def _tidy(run_dir: Path, keep: str) -> None:
    """Remove what a complete run needs no more."""
    (run_dir / store.PARTIAL).unlink(missing_ok=True)
    for name, kept in ((BEST, ("best", "both")), (LAST, ("last", "both"))):
        if keep not in kept:
            (run_dir / name).unlink(missing_ok=True)
