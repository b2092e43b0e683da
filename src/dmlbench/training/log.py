"""``history.csv``, and loggers for TensorBoard, Weights & Biases and MLflow."""

import csv
import inspect
import logging
import math
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol

import numpy as np
import yaml
from numpy.typing import NDArray

from dmlbench.runtime import atomic_write
from dmlbench.types import ConfigError, RunError, closest, require_file

log = logging.getLogger(__name__)

_FINAL = "final/"
"""Prefix of the finished run's scores, whose names validation curves share."""
_HEADER = ["step", "name", "value"]
_WANDB_SET = ("entity", "project", "tags", "mode", "id", "dir", "config")
"""Arguments of ``wandb.init`` that the logger or its own options set."""


class Logger(Protocol):
    """Receive a training's numbers.

    Nothing is opened or written before ``start``, which continues from a step (0: a new training) and voids later ones.
    Pictures are [H, W, 3]; ``summary`` gets the scores of the finished run; ``close`` may come at any time. The package
    that a class imports is in its optional ``extra``, which has the same name.
    """

    def start(self, step: int) -> None: ...

    def log(self, step: int, scalars: Mapping[str, float]) -> None: ...

    def image(self, step: int, name: str, picture: NDArray[np.uint8]) -> None: ...

    def summary(self, step: int, scores: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class History:
    """``history.csv``: one line per logged scalar (step, name, value), without times and memory."""

    def __init__(self, path: Path, *, resume_step: int) -> None:
        """Keep the lines up to ``resume_step``."""
        self.path = path
        kept = [row for row in read_history(path) if row[0] <= resume_step] if resume_step else []
        lines = [f"{','.join(_HEADER)}\n", *(f"{step},{name},{value!r}\n" for step, name, value in kept)]
        atomic_write(path, "".join(lines).encode())
        self._file = path.open("a", encoding="utf-8")

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        self._file.writelines(f"{step},{name},{value!r}\n" for name, value in scalars.items())
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def read_history(path: Path) -> list[tuple[int, str, float]]:
    """Read a ``history.csv``, without a last line that a kill cut off."""
    remedy = "Delete it, or delete the run's checkpoints to restart the run."
    if not path.exists():
        return []
    require_file(path)
    try:
        with path.open(encoding="utf-8", newline="") as file:
            header, *lines = list(csv.reader(file)) or [_HEADER]
        if header != _HEADER:
            raise csv.Error(f"its first line is not {','.join(_HEADER)}")
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise RunError(f"{path} cannot be read ({error}). {remedy}") from error
    rows: list[tuple[int, str, float]] = []
    for i, row in enumerate(lines):
        try:
            step, name, text = row
            if not math.isfinite(value := float(text)):  # training stops before it logs another
                raise ValueError(text)
            rows.append((int(step), name, value))
        except ValueError:
            if i < len(lines) - 1:
                raise RunError(f"{path} is damaged in line {i + 2}. {remedy}") from None
    return rows


class TensorBoardLogger:
    """Curves, pictures and scores as TensorBoard events in the run directory."""

    extra: ClassVar[str] = "tensorboard"

    def __init__(self, *, run_dir: Path, run_id: str, configuration: str) -> None:
        self._folder, self._configuration = run_dir / "tensorboard", configuration
        self._writer: Any = None

    def start(self, step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        with self._written():
            self._writer = SummaryWriter(str(self._folder), purge_step=step + 1)
            self._writer.add_text("configuration", f"```yaml\n{self._configuration}```", step)

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        with self._written():
            for name, value in scalars.items():
                self._writer.add_scalar(name, value, step)

    def image(self, step: int, name: str, picture: NDArray[np.uint8]) -> None:
        with self._written():
            self._writer.add_image(name, picture, step, dataformats="HWC")

    def summary(self, step: int, scores: Mapping[str, float]) -> None:
        self.log(step, {_FINAL + name: value for name, value in scores.items()})

    def close(self) -> None:
        if self._writer is not None:
            with self._written():
                self._writer.close()

    @contextmanager
    def _written(self) -> Iterator[None]:
        """Flush what the block adds, so that an error is raised where it comes from."""
        try:
            yield
            self._writer.flush()
        except OSError as error:
            self._writer = None  # closing it would try to write again
            raise RunError(
                f"{self._folder} cannot be written: {error}. Fix the cause or set logger=null, then start the same "
                "command again to resume."
            ) from error


class WandbLogger:
    """Curves, pictures and scores to Weights & Biases; the run's group is its config.

    Every start of an interrupted run has the same id, and the axis of the curves is ``step``: what is logged again
    falls on the same points. Offline, ``wandb sync`` joins the folders ``wandb/offline-run-<time>-<id>`` of all starts.

    Args:
        init: further arguments of ``wandb.init``, above the logger's own ``name``, ``group`` and ``resume``.
    """

    extra: ClassVar[str] = "wandb"

    def __init__(
        self, *, run_dir: Path, run_id: str, configuration: str,
        mode: Literal["offline", "online", "disabled"] = "offline", project: str = "dmlbench",
        entity: str | None = None, tags: Sequence[str] = (), init: Mapping[str, Any] | None = None,
    ) -> None:  # fmt: skip
        self._run_dir, self._run_id, self._configuration = run_dir.resolve(), run_id, configuration
        self._mode, self._project, self._entity, self._tags = mode, project, entity, list(tags)
        self._init = dict(init or {})
        self._run: Any = None
        self._is_complete = False
        if self._init:
            import wandb

            known = [name for name in inspect.signature(wandb.init).parameters if name not in _WANDB_SET]
            for name in self._init.keys() - set(known):
                raise ConfigError(
                    f"logger.wandb.init.{name} is not an argument of wandb.init, or dmlbench sets it: "
                    f"{closest(name, known)}"
                )

    def start(self, step: int) -> None:
        import wandb

        own = {
            "name": "/".join(self._run_dir.parts[-4:]),
            "group": self._run_dir.parent.name,
            "resume": "allow" if self._mode == "online" else None,  # offline nobody knows of earlier starts
        }
        settings = {"silent": True, "console": "off"} | self._init.get("settings", {})
        with self._written():
            self._run = wandb.init(
                project=self._project, entity=self._entity, tags=self._tags, id=self._run_id, dir=str(self._run_dir),
                mode=self._mode, config=yaml.safe_load(self._configuration),
                **(own | self._init | {"settings": wandb.Settings(**settings)}),
            )  # fmt: skip
            self._run.define_metric("step", hidden=True)
            self._run.define_metric("*", step_metric="step")

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        with self._written():
            self._run.log({**scalars, "step": step})

    def image(self, step: int, name: str, picture: NDArray[np.uint8]) -> None:
        import wandb

        with self._written():
            self._run.log({name: wandb.Image(picture), "step": step})

    def summary(self, step: int, scores: Mapping[str, float]) -> None:
        with self._written():
            self._run.summary.update({_FINAL + name: value for name, value in scores.items()})
        self._is_complete = True

    def close(self) -> None:
        if self._run is not None:
            with self._written():
                self._run.finish(exit_code=0 if self._is_complete else 1)  # what is left undone is no finished run
            if self._mode == "offline" and self._run is not None:
                log.info("upload this run to Weights & Biases: wandb sync %s", Path(self._run.dir).parent)

    @contextmanager
    def _written(self) -> Iterator[None]:
        import wandb

        try:
            yield
        except (OSError, wandb.errors.Error) as error:
            failed, self._run = self._run, None
            with suppress(OSError, wandb.errors.Error):
                if failed is not None:
                    failed.finish(exit_code=1)
            raise RunError(
                f"Weights & Biases failed in {self._run_dir / 'wandb'}: {error}. Fix the cause or set "
                "logger.wandb.mode=offline or logger=null, then start the same command again to resume."
            ) from error


class MlflowLogger:
    """Curves, pictures and scores to MLflow; every start of a run finds it by its tag ``run_id``.

    Args:
        tracking_uri: a database or a server. Files of a local database go to ``<output_dir>/mlartifacts``.
    """

    extra: ClassVar[str] = "mlflow"

    def __init__(
        self, *, run_dir: Path, run_id: str, configuration: str, tracking_uri: str, experiment: str = "dmlbench"
    ) -> None:
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # which importing it starts
        self._run_dir, self._run_id, self._configuration = run_dir.resolve(), run_id, configuration
        self._uri, self._experiment = tracking_uri, experiment
        self._client: Any = None
        self._run, self._status = "", "FAILED"  # until the scores are there

    def start(self, step: int) -> None:
        from mlflow import MlflowClient, MlflowException

        artifacts = (self._run_dir.parents[3] / "mlartifacts").as_uri() if self._uri.startswith("sqlite:") else None
        with self._written():
            self._client = MlflowClient(self._uri)
            with suppress(MlflowException):  # it exists, or another process has just created it
                self._client.create_experiment(self._experiment, artifacts)
            experiment = self._client.get_experiment_by_name(self._experiment).experiment_id
            if found := self._client.search_runs([experiment], f"tags.run_id = '{self._run_id}'"):
                self._run = found[0].info.run_id
                self._client.update_run(self._run, status="RUNNING")
                return
            name, tags = "/".join(self._run_dir.parts[-4:]), {"run_id": self._run_id}
            self._run = self._client.create_run(experiment, run_name=name, tags=tags).info.run_id
            self._client.log_text(self._run, self._configuration, "config.yaml")

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        with self._written():
            self._client.log_batch(self._run, [Metric(name, value, now, step) for name, value in scalars.items()])

    def image(self, step: int, name: str, picture: NDArray[np.uint8]) -> None:
        with self._written():
            self._client.log_image(self._run, picture, key=name, step=step)

    def summary(self, step: int, scores: Mapping[str, float]) -> None:
        self.log(step, {_FINAL + name: value for name, value in scores.items()})
        self._status = "FINISHED"

    def close(self) -> None:
        if self._run:
            with self._written():
                self._client.set_terminated(self._run, self._status)

    @contextmanager
    def _written(self) -> Iterator[None]:
        from mlflow import MlflowException

        try:
            yield
        except (OSError, MlflowException) as error:
            self._run = ""  # closing it would fail again
            raise RunError(
                f"MLflow failed at {self._uri}: {error}. Fix the cause or set logger=null, then start the same "
                "command again to resume."
            ) from error
