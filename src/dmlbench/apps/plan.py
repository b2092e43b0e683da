"""Which runs make a table: cells, where their runs lie, what became of these, and what is left to do.

Composing a configuration takes a third of a second, so that a cell is composed once for all of its coordinates, and
what is needed of it is kept in a file that is bound to everything that it follows from.
"""

import contextlib
import functools
import hashlib
import json
import logging
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from tqdm import tqdm

from dmlbench import __version__
from dmlbench.build import component
from dmlbench.config import cell_id, cell_sha256, config_folder
from dmlbench.one_run import folders_of_cell, stored_identity
from dmlbench.results.store import (
    EMBEDDINGS,
    ERROR,
    code_of,
    folder_of_run,
    read_result,
    require_own_place,
    run_directory,
    run_state,
)
from dmlbench.runtime import read_json, write_json
from dmlbench.types import ConfigError, DmlbenchError, RunError

log = logging.getLogger(__name__)

Compose = Callable[[Sequence[str]], DictConfig]
"""A run's configuration from overrides, as ``dmlbench train`` makes it."""


_KEPT_EVERY = 50
"""Cells after which those composed so far are written, so that an interrupted plan goes on from there."""


@dataclass(frozen=True)
class Cell:
    """What planning needs to know of a cell.

    Attributes:
        overrides: of ``dmlbench train``, without coordinates.
        dataset, protocol, name, sha256: which say where its runs lie and whose they are.
        num_folds, num_repeats: of its protocol.
        base_seed: what the seeds of its runs derive from.
        ingredients: a hash of its data and backbone, which cells that begin with the same share.
        planned_by: overrides of the cell whose runs must come first; None where there is none.
    """

    overrides: tuple[str, ...]
    dataset: str
    protocol: str
    name: str
    sha256: str
    num_folds: int
    num_repeats: int
    base_seed: int
    ingredients: str
    planned_by: tuple[str, ...] | None


@dataclass(frozen=True)
class Run:
    """A run of a cell and what became of it.

    Attributes:
        cell, fold, repeat, path: which it is, and where it lies or is to lie.
        state: done, running, failed, stale, missing, or unusable (a result that cannot be read or is of another run).
        problem: why it failed or cannot be used; of a done run what it has lost. Empty where there is nothing.
        wall_s: of a done run, else None.
        code: the code that made a done run, else None.
        fingerprint: of the data of a done run, else None.
        weights: SHA-256 of the file of weights that a done run started from; None where it names none.
        weights_code: the code that trained what a done run took from another, else None.
    """

    cell: Cell
    fold: int
    repeat: int
    path: Path
    state: str
    problem: str = ""
    wall_s: float | None = None
    code: str | None = None
    fingerprint: str | None = None
    weights: str | None = None
    weights_code: str | None = None

    @property
    def overrides(self) -> tuple[str, ...]:
        return (*self.cell.overrides, f"fold={self.fold}", f"repeat={self.repeat}")

    @property
    def is_to_do(self) -> bool:
        return self.state not in ("done", "unusable")


@dataclass
class CellCache:
    """Cells by their overrides, those composed before read from a file in ``folder``.

    The file's name is a hash of the version, of the package and of the configuration folders, by sizes and times of
    their files: whatever changes there, cells are composed again.
    """

    folder: Path
    name: str
    config_folders: Sequence[Path]
    compose: Compose
    known: dict[str, dict[str, Any]] = field(default_factory=dict)
    path: Path = field(init=False)

    def __post_init__(self) -> None:
        # once: what is composed from now on follows from the code that this process has
        self.path = self.folder / f"{self.name.replace('/', '-')}-{_fingerprint(self.config_folders)}.json"
        with contextlib.suppress(FileNotFoundError, ValueError):  # a damaged one is made again
            self.known = read_json(self.path)  # which compares the checksum

    def cells(self, wanted: Iterable[tuple[str, ...]]) -> dict[tuple[str, ...], Cell | str]:
        """A cell for each of the overrides, or why they cannot be composed."""
        wanted = list(dict.fromkeys(wanted))
        missing = [overrides for overrides in wanted if _key(overrides) not in self.known]
        failures: dict[tuple[str, ...], str] = {}
        bar = tqdm(missing, "composing cells", unit="cell", disable=not sys.stderr.isatty() or len(missing) < 3)
        for number, overrides in enumerate(bar, start=1):
            try:
                self.known[_key(overrides)] = _facts(self.compose(overrides))
            except DmlbenchError as error:
                failures[overrides] = str(error)
            if number % _KEPT_EVERY == 0 or number == len(missing):
                self._write()
        return {
            overrides: failures[overrides] if overrides in failures else _cell(overrides, self.known[_key(overrides)])
            for overrides in wanted
        }

    def _write(self) -> None:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            for former in self.folder.glob(f"{self.name.replace('/', '-')}-{'?' * 16}.json"):
                if former != self.path:
                    former.unlink(missing_ok=True)
            write_json(self.path, self.known)
        except OSError as error:
            log.warning("%s cannot be written (%s): the next plan composes again", self.path, error.strerror)


def _key(overrides: Sequence[str]) -> str:
    return "\n".join(overrides)


def _fingerprint(folders: Sequence[Path]) -> str:
    package = Path(__file__).resolve().parents[1]
    files = [*package.rglob("*.py")]
    for folder in folders:
        files += [*folder.rglob("*.yaml"), *(_modules_beside(folder) if folder != config_folder() else ())]
    digest = hashlib.sha256(__version__.encode())
    for path in sorted(files):
        status = path.stat()
        digest.update(f"{path}\n{status.st_size}\n{status.st_mtime_ns}\n".encode())
    return digest.hexdigest()[:16]


def _modules_beside(folder: Path) -> list[Path]:
    """Modules and packages next to a user's folder, which configurations can name: its parent is searched for them."""
    beside = folder.absolute().parent  # not resolved, as for the search
    packages = [path for path in beside.iterdir() if path.name.isidentifier() and path.is_dir()]
    return [
        *beside.glob("*.py"),
        # folders of data and of results, whose listing takes long, have none in their first levels
        *(
            file
            for path in packages
            if any(path.glob("*.py")) or any(path.glob("*/*.py"))
            for file in path.rglob("*.py")
        ),
    ]


def _facts(cfg: DictConfig) -> dict[str, Any]:
    protocol = component(cfg.protocol)
    first = protocol.planned_by
    container: Any = OmegaConf.to_container(cfg, resolve=False)
    begins_with = [container["dataset"].get("table"), container.get("backbone")]
    return {
        "dataset": cfg.dataset.name,
        "protocol": protocol.name,
        "name": cell_id(cfg),
        "sha256": cell_sha256(cfg),
        "num_folds": protocol.num_folds,
        "num_repeats": protocol.num_repeats,
        "base_seed": cfg.base_seed,
        "ingredients": hashlib.sha256(json.dumps(begins_with, sort_keys=True).encode()).hexdigest()[:16],
        "planned_by": None if first is None else [f"protocol.{key}={value}" for key, value in first.items()],
    }


def _cell(overrides: tuple[str, ...], facts: Mapping[str, Any]) -> Cell:
    first = facts["planned_by"]
    keys = {override.partition("=")[0] for override in first or ()}
    kept = tuple(override for override in overrides if override.partition("=")[0] not in keys)
    return Cell(overrides, **{**facts, "planned_by": None if first is None else (*kept, *first)})


@dataclass(frozen=True)
class Plan:
    """The runs of a table.

    Attributes:
        cells: those that are rows of it, in their order.
        first: by a cell's overrides, the cell whose runs must come before, where there is one.
        runs: of the cells, the first repeat of all of them before the next.
        preparing: runs of the cells of ``first``, in the same order.
        output_dir: root of the run directories.
    """

    cells: tuple[Cell, ...]
    first: Mapping[tuple[str, ...], Cell]
    runs: tuple[Run, ...]
    preparing: tuple[Run, ...]
    output_dir: str

    def of_cell(self, cell: Cell) -> list[Run]:
        return [run for run in self.runs if run.cell.sha256 == cell.sha256]

    def has_all(self) -> bool:
        """Whether no coordinates of the cells' protocols were left out."""
        found = {(run.cell.sha256, run.fold, run.repeat) for run in self.runs}
        return all(
            (cell.sha256, fold, repeat) in found
            for cell in self.cells
            for fold in range(cell.num_folds)
            for repeat in range(cell.num_repeats)
        )

    def all_runs(self, other: "Plan", *, preparing: bool = True) -> tuple[Run, ...]:
        """The runs of both plans, each once."""
        runs = [*self.runs, *other.runs, *((*self.preparing, *other.preparing) if preparing else ())]
        return tuple({run.path: run for run in runs}.values())

    def refreshed(self) -> "Plan":
        """The same runs as they are now."""
        return Plan(
            self.cells, self.first, tuple(map(_looked_at, self.runs)), tuple(map(_looked_at, self.preparing)),
            self.output_dir,
        )  # fmt: skip

    def waves(self, shard: tuple[int, int] = (1, 1)) -> list[list[Run]]:
        """What is left to do, as groups that must follow each other: what plans others, then all else.

        Args:
            shard: (i, n) for the i-th of n parts; runs that need each other are in one part, and which part that is
                does not depend on what is done.
        """
        number, count = shard
        mine = [run for i, run in enumerate(self.runs) if i % count == number - 1 and run.is_to_do]
        wanted = {
            (self.first[run.cell.overrides].sha256, run.fold, run.repeat)
            for run in mine
            if run.cell.overrides in self.first
        }
        before = [run for run in self.preparing if run.is_to_do and (run.cell.sha256, run.fold, run.repeat) in wanted]
        return [wave for wave in (before, mine) if wave]


def make_plan(
    cells: Sequence[Cell], cache: CellCache, output_dir: str, coordinates: Mapping[str, Sequence[int]]
) -> Plan:
    """The runs of cells at all coordinates of their protocols, or at those that are named.

    Raises:
        ConfigError: no cell has one of the folds, or the cell that has to come first cannot be composed.
    """
    folds = max((cell.num_folds for cell in cells), default=0)
    if cells and (beyond := [fold for fold in coordinates.get("fold", ()) if fold >= folds]):
        raise ConfigError(f"fold ({beyond[0]}) is outside of the table's protocol, which has 0 to {folds - 1}")
    found = cache.cells(cell.planned_by for cell in cells if cell.planned_by is not None)
    first: dict[tuple[str, ...], Cell] = {}
    for cell in cells:
        before = None if cell.planned_by is None else found[cell.planned_by]
        if isinstance(before, str):
            raise RunError(before)
        if before is not None:
            first[cell.overrides] = before
    hidden = {cell.sha256 for cell in first.values()}  # a grid may name both stages; the first one is no row
    rows = {cell.sha256: cell for cell in cells if cell.sha256 not in hidden}
    preparing = {cell.sha256: cell for cell in first.values()}
    return Plan(
        tuple(rows.values()), first,
        _runs(list(rows.values()), cache.compose, output_dir, coordinates),
        _runs(list(preparing.values()), cache.compose, output_dir, coordinates),
        output_dir,
    )  # fmt: skip


def _runs(
    cells: Sequence[Cell], compose: Compose, output_dir: str, coordinates: Mapping[str, Sequence[int]]
) -> tuple[Run, ...]:
    placed = []
    bar = tqdm(cells, "looking at runs", unit="cell", disable=not sys.stderr.isatty() or len(cells) < 20)
    stored = functools.cache(stored_identity)  # cells whose names differ in the hash alone are looked at by each other
    for i, cell in enumerate(bar):
        folders = _folders(cell, compose, output_dir, stored)
        for fold in coordinates.get("fold", range(cell.num_folds)):
            for repeat in coordinates.get("repeat", range(cell.num_repeats)):
                if fold < cell.num_folds:  # more repeats than usual are welcome
                    path = folder_of_run(folders, f"fold{fold}_rep{repeat}") / f"fold{fold}_rep{repeat}"
                    placed.append((repeat, fold, i, _looked_at(Run(cell, fold, repeat, path, "missing"))))
    return tuple(run for *_, run in sorted(placed, key=lambda entry: entry[:3]))


def _folders(cell: Cell, compose: Compose, output_dir: str, stored: Callable[[Path], str | None]) -> list[Path]:
    named = run_directory(output_dir, cell.dataset, cell.protocol, cell.name, 0, 0).parent
    if not named.parent.is_dir():
        return [named]
    return folders_of_cell(named, lambda: cell.sha256, lambda: compose(cell.overrides), stored)


def _looked_at(run: Run) -> Run:
    """A run as it is now."""
    fixed = (run.cell, run.fold, run.repeat, run.path)
    if not run.path.is_dir():
        return Run(*fixed, "missing")
    try:
        state = run_state(run.path)
        if state != "done":
            return Run(*fixed, state, _last_line(run.path / ERROR) if state == "failed" else "")
        result = read_result(run.path)
        require_own_place(run.path, result)
        if result.get("cell_sha256", run.cell.sha256) != run.cell.sha256:
            raise RunError(
                f"{run.path} holds the result of another configuration; bring back the one that belongs there, or "
                "remove it with `dmlbench clean`"
            )
        if result["base_seed"] != run.cell.base_seed:
            raise RunError(
                f"{run.path} was made with base_seed={result['base_seed']}, not {run.cell.base_seed}; choose another "
                "paths.output_dir"
            )
    except RunError as error:
        return Run(*fixed, "unusable", str(error))
    lost = "embeddings_sha256" in result and not (run.path / EMBEDDINGS).exists()
    return Run(
        *fixed,
        "done",
        f"{run.path} has lost its {EMBEDDINGS}: its scores stay, others need another run" if lost else "",
        float(result["wall_s"]),
        code_of(result),
        result["dataset_fingerprint"],
        result.get("weights_sha256"),
        result.get("weights_code"),
    )


def _last_line(path: Path) -> str:
    with contextlib.suppress(OSError, UnicodeError):
        return " ".join(path.read_text(encoding="utf-8").strip().splitlines()[-1:])
    return ""
