"""Run directories: their names, their state, the result that makes a run complete, and locks.

Locks use ``flock`` plus a heartbeat, for file systems that do not share locks between machines.
"""

import contextlib
import errno
import fcntl
import logging
import os
import re
import shutil
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import IO, Any, Literal

from dmlbench.runtime import derive_seed, file_sha256, is_open_at, read_json, remove_leftovers, write_json
from dmlbench.types import RunError, RunInUse, check_choice, check_output_dir, require_file

log = logging.getLogger(__name__)
RESULT, ERROR, CONFIG, EMBEDDINGS = "result.json", "error.txt", "config.yaml", "embeddings.safetensors"
DISTANCE = "distance.safetensors"  # state of a distance that has one
PER_QUERY = "per_query.csv"  # test scores of each query
PLAN = "plan.json"  # of stage 1 of the two-stage protocol
RESULT_SCHEMA = 1

Coordinates = tuple[int, int]
"""Fold and repeat of a run."""
State = Literal["done", "running", "failed", "interrupted"]
STATES = ("done", "running", "failed", "interrupted")
LOCK = "run.lock"
BEAT_S, SILENT_S = 15.0, 90.0
"""Seconds between heartbeats, and until another machine's lock is stale; clocks may differ by what is between."""
_WITHOUT_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


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
        raise _not_writable(path, error) from error


def _not_writable(path: Path, error: OSError) -> RunError:
    return RunError(
        f"cannot write to the run directory {path}: {error.strerror}. Choose a writable folder with "
        "paths.output_dir=..."
    )


def write_result(run_dir: Path, result: dict[str, Any]) -> None:
    """Write ``result.json``, the last file of a run, bound to ``config.yaml``; with it the run is complete."""
    bound = {"schema": RESULT_SCHEMA, "config_file_sha256": file_sha256(run_dir / CONFIG)}
    write_json(run_dir / RESULT, {**bound, **result})


def code_of(result: Mapping[str, Any]) -> str:
    """The commit that made a result, else the version."""
    return str(result.get("git_commit") or (result.get("versions") or {}).get("dmlbench", "unknown"))


def kept_of(path: Path, bound: Mapping[str, str], key: str, *, schema: int) -> dict[str, Any]:
    """The part ``key`` of a file beside a run, bound to hashes; empty if it is missing, damaged or of others."""
    try:
        held = read_json(path)
        if held["schema"] == schema and {name: held.get(name) for name in bound} == dict(bound):
            return dict(held[key])
        log.info("%s belongs to other weights or embeddings; computing again", path)
    except FileNotFoundError:
        pass
    except (OSError, ValueError, KeyError, TypeError) as error:
        log.warning("%s is damaged (%s); computing again", path, error)
    return {}


def read_result(run_dir: Path) -> dict[str, Any]:
    """The result of a complete run; raises RunError if there is none, or a damaged one."""
    path, remedy = run_dir / RESULT, "Delete it and start the run again."
    try:
        result = read_json(path)
    except FileNotFoundError:
        raise RunError(f"{run_dir} holds no complete run: {RESULT} is missing.") from None
    except ValueError as error:
        if isinstance(error.__cause__, PermissionError):
            raise RunError(f"{path} cannot be read ({error}). Make it readable.") from error
        raise RunError(f"{path} is damaged ({error}). {remedy}") from error
    if result.get("schema") != RESULT_SCHEMA:
        raise RunError(f"{path}: got schema {result.get('schema')}, expected {RESULT_SCHEMA}. Run it again.")
    return result


def hashes_of(run_dir: Path, files: Sequence[str] = (EMBEDDINGS, DISTANCE)) -> dict[str, str]:
    """SHA-256 of those of the files that a run has."""
    hashes = {}
    for name in files:
        if not (run_dir / name).exists():
            continue
        try:
            hashes[f"{Path(name).stem}_sha256"] = file_sha256(run_dir / name)
        except OSError as error:
            raise RunError(f"{run_dir / name} cannot be read ({error.strerror}). Make it readable.") from error
    return hashes


def require_own_place(run_dir: Path, result: Mapping[str, Any]) -> None:
    """Raise RunError unless a result lies in the folder of its coordinates and has their seed."""
    coordinates = run_name((result["fold"], result["repeat"]))
    if run_dir.name != coordinates:
        raise RunError(f"{run_dir} holds the result of {coordinates}: it was copied or renamed. Move it back.")
    seed = derive_seed(result["base_seed"], result["fold"], result["repeat"])
    if result["seed"] != seed:
        raise RunError(
            f"{run_dir / RESULT}: got seed {result['seed']}, expected {seed} for {coordinates} with base_seed "
            f"{result['base_seed']}. It is the result of another run. Run this one again."
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
                f"{run_dir / name}: got SHA-256 {found[:12]}, expected {result[key][:12]} as in {RESULT}. Restore the "
                "file, or run it again."
            )
    return hashes


def require_tested(run_dir: Path, result: Mapping[str, Any]) -> None:
    """Raise RunError for a run that has no test scores."""
    if not result["metrics"].get("test"):
        raise RunError(f"{run_dir} has no test scores: protocol '{result['protocol']}' does not use the test half.")


def run_state(run_dir: Path) -> State:
    """done: has a result; running: a living process holds it; failed: left an error; interrupted: none of these."""
    if (run_dir / RESULT).exists():
        return "done"
    if is_locked(run_dir):
        return "running"
    return "failed" if (run_dir / ERROR).exists() else "interrupted"


def last_error(run_dir: Path) -> str:
    """The last line of what a failed run left; empty where it cannot be read."""
    with contextlib.suppress(OSError, RunError):
        require_file(run_dir / ERROR)
        lines = (run_dir / ERROR).read_text(encoding="utf-8", errors="replace").strip().splitlines()
        return " ".join(lines[-1:]).removeprefix("dmlbench.types.")
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
    check_output_dir(output_dir)
    root = Path(output_dir)
    whole, folder = (Path(os.path.abspath(path)) for path in (pattern, root))
    is_inside = Path.cwd().is_relative_to(folder)  # there, relative patterns are below output_dir, too
    if whole.is_relative_to(folder) and (os.path.isabs(pattern) or not is_inside):
        pattern = "**" if whole == folder else str(whole.relative_to(folder))
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
        raise RunError(f"{path} is running. Stop it first.")
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
        raise RunError(f"cannot remove {path} ({error.strerror}). Make it writable, or remove it by hand.") from error


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


def without_trials(configs: dict[Path, list[RunInfo]], pattern: str, *, warn: bool = True) -> dict[Path, list[RunInfo]]:
    """Configs without the trials of searches (protocol=hpo), unless the pattern that selected them names hpo."""
    kept = {path: runs for path, runs in configs.items() if "hpo" in pattern or path.parent.name != "hpo"}
    if warn and kept and (count := len(configs) - len(kept)):
        log.warning("leaving out %d configs of protocol=hpo, which are trials (configs=*/hpo/* selects them)", count)
    return kept or configs


@contextlib.contextmanager
def locked(run_dir: Path) -> Iterator[None]:
    """Hold the run directory for this process.

    Raises:
        RunInUse: another process holds it.
    """
    require_file(run_dir / LOCK)
    try:
        file = (run_dir / LOCK).open("a+")
    except OSError as error:
        raise _not_writable(run_dir, error) from error
    with file, _closed_in_forks(file.fileno()):
        try:
            _lock(file.fileno())
        except BlockingIOError as error:
            file.seek(0)
            raise RunInUse(
                f"{run_dir} is in use by process {file.read().strip() or 'unknown'}. Wait for it, stop it, or choose "
                "another paths.output_dir."
            ) from error
        except OSError as error:
            if error.errno not in _WITHOUT_LOCKS:
                raise
            raise RunError(
                f"the file system of {run_dir} has no locks ({error.strerror}). Choose another paths.output_dir."
            ) from error
        if not is_open_at(run_dir / LOCK, file.fileno()):
            raise RunInUse(f"{run_dir} was released by another process just now. Start the command again.")
        if (elsewhere := _living_elsewhere(file)) and not _is_silent(file):
            raise RunInUse(
                f"{run_dir} is in use by process {elsewhere}, which was active a moment ago. If it was killed, try "
                f"again after {SILENT_S:.0f} seconds."
            )
        file.truncate(0)
        file.write(f"{os.getpid()} on {os.uname().nodename}")
        file.flush()
        remove_leftovers(run_dir)
        try:
            with _beating(file.fileno()):
                yield
        finally:
            (run_dir / LOCK).unlink(missing_ok=True)


def _living_elsewhere(file: IO[str]) -> str:
    """Process and machine that a lock names, if another machine's heartbeat is recent; else ""."""
    file.seek(0)
    holder = file.read().strip()
    machine = holder.partition(" on ")[2]
    silent = time.time() - os.fstat(file.fileno()).st_mtime
    return holder if machine and machine != os.uname().nodename and silent < SILENT_S else ""


def _is_silent(file: IO[str]) -> bool:
    """Whether a lock whose time lies in the future, by a clock that is ahead, misses two heartbeats."""
    before = os.fstat(file.fileno()).st_mtime
    if before < time.time() + SILENT_S:
        return False
    time.sleep(2 * BEAT_S)
    return os.fstat(file.fileno()).st_mtime == before


@contextlib.contextmanager
def _beating(descriptor: int) -> Iterator[None]:
    ended = threading.Event()

    def beat() -> None:
        while not ended.wait(BEAT_S):
            with contextlib.suppress(OSError):
                os.utime(descriptor)

    thread = threading.Thread(target=beat, name="lock", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


_held: set[int] = set()


@contextlib.contextmanager
def _closed_in_forks(descriptor: int) -> Iterator[None]:
    """Close the lock in forked workers, which may outlive this process."""
    _held.add(descriptor)
    try:
        yield
    finally:
        _held.discard(descriptor)


def _close_held() -> None:
    for descriptor in _held:
        os.close(descriptor)
    _held.clear()


os.register_at_fork(after_in_child=_close_held)


def _lock(descriptor: int) -> None:
    """Take the lock; once more after a moment, because `dmlbench status` touches it to see whether it is held."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        time.sleep(0.2)
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


def is_locked(run_dir: Path) -> bool:
    """Whether a living process holds the run directory."""
    require_file(run_dir / LOCK)
    try:
        with (run_dir / LOCK).open("r") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return bool(_living_elsewhere(file))
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
