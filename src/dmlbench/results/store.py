"""Run directories: their names, their state, and the result that makes a run complete."""

import contextlib
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, Literal

from dmlbench.results.locks import LOCK as LOCK
from dmlbench.results.locks import is_locked as is_locked
from dmlbench.results.locks import locked as locked
from dmlbench.runtime import derive_seed, file_sha256, read_json, write_json
from dmlbench.types import ConfigError, RunError, check_choice, require_file

RESULT, ERROR, CONFIG, EMBEDDINGS, DISTANCE, PLAN = (
    "result.json",
    "error.txt",
    "config.yaml",
    "embeddings.safetensors",
    "distance.safetensors",  # state of a distance that has one
    "plan.json",  # of stage 1 of the two-stage protocol
)
RESULT_SCHEMA = 1

Coordinates = tuple[int, int]
"""Fold and repeat of a run."""
State = Literal["done", "running", "failed", "stale"]
STATES = ("done", "running", "failed", "stale")


def run_name(coordinates: Coordinates) -> str:
    return f"fold{coordinates[0]}_rep{coordinates[1]}"


def coordinates_of(run_name: str) -> Coordinates | None:
    """Fold and repeat in the name of a run directory; None for another directory."""
    match = re.fullmatch(r"fold(\d+)_rep(\d+)", run_name)
    return (int(match[1]), int(match[2])) if match else None


def make_directory(path: Path) -> None:
    """Create a run directory that can be written to."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        if not os.access(path, os.W_OK | os.X_OK):
            raise PermissionError(13, "Permission denied")
    except OSError as error:
        raise RunError(
            f"cannot write to the run directory {path}: {error.strerror}; choose a writable folder with "
            "paths.output_dir=..."
        ) from error


def write_result(run_dir: Path, result: dict[str, Any]) -> None:
    """Write ``result.json``, the last file of a run, bound to ``config.yaml``; with it the run is complete."""
    bound = {"schema": RESULT_SCHEMA, "config_file_sha256": file_sha256(run_dir / CONFIG)}
    write_json(run_dir / RESULT, {**bound, **result})


def code_of(result: Mapping[str, Any]) -> str:
    """The commit that made a result, else the version."""
    return str(result.get("git_commit") or (result.get("versions") or {}).get("dmlbench", "unknown"))


def read_result(run_dir: Path) -> dict[str, Any]:
    """The result of a complete run; raises RunError if there is none, or a damaged one."""
    path, remedy = run_dir / RESULT, "delete it and start the run again"
    try:
        result = read_json(path)
    except FileNotFoundError:
        raise RunError(f"{run_dir} holds no complete run: {RESULT} is missing") from None
    except ValueError as error:
        if isinstance(error.__cause__, PermissionError):
            raise RunError(f"{path} cannot be read ({error}); make it readable") from error
        raise RunError(f"{path} is damaged ({error}); {remedy}") from error
    if result.get("schema") != RESULT_SCHEMA:
        raise RunError(f"{path} has schema {result.get('schema')}, this version reads {RESULT_SCHEMA}; run it again")
    return result


def hashes_of(run_dir: Path, files: Sequence[str] = (EMBEDDINGS, DISTANCE)) -> dict[str, str]:
    """SHA-256 of those of the files that a run has."""
    files = [name for name in files if (run_dir / name).exists()]
    hashes = {}
    for name in files:
        try:
            hashes[f"{Path(name).stem}_sha256"] = file_sha256(run_dir / name)
        except OSError as error:
            raise RunError(f"{run_dir / name} cannot be read ({error.strerror}); make it readable") from error
    return hashes


def require_own_place(run_dir: Path, result: Mapping[str, Any]) -> None:
    """Raise RunError unless a result lies in the folder of its coordinates and has their seed."""
    coordinates = run_name((result["fold"], result["repeat"]))
    if run_dir.name != coordinates:
        raise RunError(
            f"{run_dir} holds the result of {coordinates}: it was copied or renamed; move it back, or run it"
        )
    seed = derive_seed(result["base_seed"], result["fold"], result["repeat"])
    if result["seed"] != seed:
        raise RunError(
            f"{run_dir / RESULT} names the seed {result['seed']}, but {coordinates} with base_seed "
            f"{result['base_seed']} has {seed}; it is the result of another run: run this one again"
        )


def require_own_files(
    run_dir: Path, result: Mapping[str, Any], files: Sequence[str] = (EMBEDDINGS, DISTANCE)
) -> dict[str, str]:
    """``hashes_of`` a run; raise RunError if the result or one of the files is not of this run, or is damaged."""
    require_own_place(run_dir, result)
    hashes = hashes_of(run_dir, files)
    for key, found in hashes.items():
        if result.get(key, found) != found:
            name = next(name for name in files if key == f"{Path(name).stem}_sha256")
            raise RunError(
                f"{run_dir / name} (SHA-256 {found[:12]}) is not the one that {RESULT} names ({result[key][:12]}); "
                "bring the file back, or run it again"
            )
    return hashes


def require_tested(run_dir: Path, result: Mapping[str, Any]) -> None:
    """Raise RunError for a run that has no test scores."""
    if not result["metrics"].get("test"):
        raise RunError(f"{run_dir} was never tested: protocol '{result['protocol']}' does not look at the test half")


def run_state(run_dir: Path) -> State:
    """done: has a result; running: a living process holds it; failed: left an error; stale: begun, then interrupted."""
    if (run_dir / RESULT).exists():
        return "done"
    if is_locked(run_dir):
        return "running"
    return "failed" if (run_dir / ERROR).exists() else "stale"


def last_error(run_dir: Path) -> str:
    """The last line of what a failed run left; empty where it cannot be read."""
    with contextlib.suppress(OSError, RunError):
        require_file(run_dir / ERROR)
        return " ".join((run_dir / ERROR).read_text(encoding="utf-8", errors="replace").strip().splitlines()[-1:])
    return ""


def states_of(asked: str | Sequence[str] | None, known: Sequence[str]) -> tuple[str, ...]:
    """The requested states: one, several, or all known ones."""
    states = [asked] if isinstance(asked, str) else list(known if asked is None else asked)
    for state in states:
        check_choice("state", state, known)
    return tuple(states)


@dataclass(frozen=True)
class RunInfo:
    """A run directory and the coordinates in its name."""

    path: Path
    dataset: str
    protocol: str
    config: str
    fold: int
    repeat: int

    @property
    def state(self) -> State:
        return run_state(self.path)


def find_runs(output_dir: str | os.PathLike[str], pattern: str = "**") -> list[RunInfo]:
    """Every run directory under ``output_dir`` whose ``<dataset>/<protocol>/<config>/fold<f>_rep<r>`` matches.

    Args:
        output_dir: root of the run directories.
        pattern: shell pattern of that relative path or of its first parts: ``glyphs``, ``*/mlrc/*gsp*``,
            ``*gsp*/fold0_rep?``; ``*`` matches slashes, too; ``output_dir`` may stand before it.
    """
    if not str(output_dir).strip():
        raise ConfigError("the output folder is empty; name one, such as outputs")
    root = Path(output_dir)
    pattern = pattern.removeprefix(f"{root}/") if pattern.rstrip("/") != str(root) else "**"
    patterns = [pattern, f"{pattern.rstrip('/')}/*"]
    runs = (run for config_dir in sorted(root.glob("*/*/*")) for run in runs_in(config_dir))
    return [run for run in runs if any(fnmatch(str(run.path.relative_to(root)), each) for each in patterns)]


def runs_in(config_dir: Path) -> list[RunInfo]:
    """Every run directory of a config."""
    dataset, protocol, config = config_dir.parts[-3:]
    return [
        RunInfo(path, dataset, protocol, config, *coordinates)
        for path in sorted(config_dir.glob("fold*_rep*"))
        if (coordinates := coordinates_of(path.name)) and path.is_dir()
    ]


def remove_run(path: Path) -> None:
    """Delete a run directory that is not running, and its config's folder after the last run."""
    if is_locked(path):
        raise RunError(f"{path} is running; stop it first")
    config_dir = path.parent
    try:
        is_last = all(other == path for other in config_dir.glob("fold*_rep*"))
        for entry in [*config_dir.iterdir()] if is_last else []:  # first, while the run is there to be asked for again
            if entry != path:
                _remove(entry)
        _remove(path)
        if is_last:
            config_dir.rmdir()
    except OSError as error:
        raise RunError(f"cannot remove {path} ({error.strerror}); make it writable, or remove it by hand") from error


def _remove(folder: Path) -> None:
    if folder.is_symlink() or not folder.is_dir():
        folder.unlink()  # what a link leads to belongs elsewhere
    else:
        shutil.rmtree(folder)


def runs_by_config(runs: list[RunInfo]) -> dict[Path, list[RunInfo]]:
    """Runs by the folder of their config."""
    configs: dict[Path, list[RunInfo]] = {}
    for run in runs:
        configs.setdefault(run.path.parent, []).append(run)
    return configs
