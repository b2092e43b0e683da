"""Where training scalars go: ``history.csv`` always, TensorBoard or Weights & Biases when asked for."""

import csv
from collections.abc import Mapping
from pathlib import Path
from typing import Literal, Protocol

from dmlbench.runtime import atomic_write
from dmlbench.types import ConfigError, RunError, not_a_file


class Logger(Protocol):
    """Anything that takes named scalars at a training step."""

    def log(self, step: int, scalars: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class History:
    """``history.csv``: one line per logged scalar (step, name, value), cut back to the checkpoint on a resume."""

    def __init__(self, path: Path, *, resume_step: int) -> None:
        """Keep the lines up to ``resume_step``; what a killed process wrote after its last checkpoint is dropped."""
        self.path = path
        kept = [row for row in read_history(path) if row[0] <= resume_step] if resume_step else []
        lines = ["step,name,value\n", *(f"{step},{name},{value!r}\n" for step, name, value in kept)]
        atomic_write(path, "".join(lines).encode())
        self._file = path.open("a", encoding="utf-8")

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        self._file.writelines(f"{step},{name},{value!r}\n" for name, value in scalars.items())
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def read_history(path: Path) -> list[tuple[int, str, float]]:
    """Lines of a ``history.csv``; a last line that was cut off by a kill is left out.

    Raises:
        RunError: it is no text, or cannot be read.
    """
    remedy = "remove it, or the run's checkpoints to start the run again"
    if what := not_a_file(path):
        raise RunError(f"{path} is {what}, not a file; {remedy}")
    if not path.exists():
        return []
    try:
        with path.open(encoding="utf-8", newline="") as file:
            lines = list(csv.reader(file))[1:]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise RunError(f"{path} cannot be read ({error}); {remedy}") from error
    rows: list[tuple[int, str, float]] = []
    for row in lines:
        try:
            step, name, value = row
            rows.append((int(step), name, float(value)))
        except ValueError:
            break
    return rows


class TensorBoardLogger:
    """Scalars as TensorBoard events in the run directory (extra ``tensorboard``)."""

    def __init__(self, *, run_dir: Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ConfigError("logger=tensorboard needs TensorBoard; install dmlbench[tensorboard]") from error
        self._writer = SummaryWriter(str(run_dir / "tensorboard"))

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        for name, value in scalars.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class WandbLogger:
    """Scalars to Weights & Biases.

    Args:
        run_dir: run directory; its path names the run.
        mode: "offline" writes into the run directory and needs no account or network, "online" sends.
        project: project name.
    """

    def __init__(
        self, *, run_dir: Path, mode: Literal["offline", "online"] = "offline", project: str = "dmlbench"
    ) -> None:
        import wandb

        name = "/".join(run_dir.resolve().parts[-4:])
        self._run = wandb.init(project=project, name=name, dir=str(run_dir), mode=mode, resume="allow")

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        self._run.log(dict(scalars), step=step)

    def close(self) -> None:
        self._run.finish()
