"""Seeds, devices, precision, atomic files and the facts about this machine that go into a result."""

import contextlib
import fcntl
import functools
import glob
import hashlib
import json
import os
import pickle
import platform
import random
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from importlib import metadata
from pathlib import Path
from typing import IO, Any, Literal

import numpy as np
import torch

from dmlbench.external_files import load_json
from dmlbench.types import ConfigError, RunError, counted, require_file

Precision = Literal["float32", "bf16", "fp16"]

_REPORTED_PACKAGES = (
    *("torch", "torchvision", "timm", "pytorch-metric-learning", "numpy", "scikit-learn", "faiss-cpu", "faiss-gpu"),
)
_CHECKSUM = "checksum"
"""Key of the SHA-256 of the other values."""


_shown: ContextVar[bool | None] = ContextVar("shown", default=None)


def shows_progress() -> bool:
    """Whether to draw progress bars: where stderr is a terminal or a notebook, or as ``progress_bars`` says."""
    shown = _shown.get()
    is_notebook = type(sys.stderr).__module__.startswith("ipykernel.")
    return sys.stderr.isatty() or is_notebook if shown is None else shown


@contextlib.contextmanager
def progress_bars(shown: bool | None) -> Iterator[None]:
    """Draw progress bars or not; None: where stderr is a terminal or a notebook."""
    token = _shown.set(shown)
    try:
        yield
    finally:
        _shown.reset(token)


def derive_seed(*parts: int | str) -> int:
    """A seed in [0, 2^63) that depends on the parts alone."""
    digest = hashlib.sha256("/".join(str(part) for part in parts).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def generator(*parts: int | str) -> np.random.Generator:
    """A numpy generator seeded by ``derive_seed(*parts)``."""
    return np.random.default_rng(derive_seed(*parts))


def seed_everything(seed: int) -> None:
    """Seed the global generators of Python, numpy and torch (CPU and CUDA)."""
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002 - libraries that we call still draw from the global generator
    torch.manual_seed(seed)


def random_state() -> dict[str, Any]:
    """The state of the global generators (of CUDA: the current device's), readable with ``weights_only=True``."""
    name, keys, position, has_gauss, gauss = np.random.get_state()  # noqa: NPY002 - as in seed_everything
    version, internal, gauss_next = random.getstate()
    return {
        "torch": torch.get_rng_state(),
        "cuda": [torch.cuda.get_rng_state()] if torch.cuda.is_initialized() else [],
        "numpy": [name, torch.from_numpy(np.asarray(keys, np.int64)), int(position), int(has_gauss), float(gauss)],
        "python": [version, torch.tensor(internal, dtype=torch.int64), gauss_next],
    }


def restore_random_state(state: dict[str, Any]) -> None:
    """Undo what happened since ``random_state()`` to the global generators."""
    torch.set_rng_state(state["torch"].cpu())
    if state["cuda"] and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"][0].cpu())
    name, keys, position, has_gauss, gauss = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), position, has_gauss, gauss))  # noqa: NPY002 - as above
    version, internal, gauss_next = state["python"]
    random.setstate((version, tuple(internal.tolist()), gauss_next))


def check_device(name: str) -> None:
    """Raise ConfigError unless ``select_device`` knows the name, whether or not there is such a device."""
    if not re.fullmatch(r"auto|free|cpu|cuda(:(0|[1-9][0-9]*))?", name):
        raise ConfigError(f"device: got '{name}', expected auto, free, cpu or cuda[:N].")


def select_device(name: str) -> torch.device:
    """``auto`` is the first CUDA device where there is one, else the CPU; ``free`` one that no process has.

    A CUDA device always has its index: torch takes no other in ``torch.cuda.set_device``.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "free":
        return _free_gpu()[0]
    check_device(name)
    device = torch.device(name)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(
            f"device: got '{name}', but torch sees {torch.cuda.device_count()} CUDA devices. Set device=auto or cpu."
        )
    return torch.device("cuda", device.index or 0) if device.type == "cuda" else device


@functools.cache
def _free_gpu() -> tuple[torch.device, IO[bytes]]:
    """The first GPU without the lock of another process, and our lock on it, which lasts until this process ends."""
    for number in range(torch.cuda.device_count()):
        uuid_of_gpu = getattr(torch.cuda.get_device_properties(number), "uuid", number)
        path = Path(tempfile.gettempdir(), f"dmlbench-{os.getuid()}-gpu-{uuid_of_gpu}.lock")
        lock = path.open("ab")  # stays open while the process has the GPU
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return torch.device("cuda", number), lock
        lock.close()
    count = torch.cuda.device_count()
    raise ConfigError(
        f"device: got free, but other processes have all {count} GPUs. Start at most {count} at once."
        if count else "device: got free, but torch sees no CUDA device. Use device=cpu."
    )  # fmt: skip


def available_cores() -> int:
    """Processor cores that this process may use, which a scheduler may have limited."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def set_strict_float32() -> None:
    """Products of float32 numbers are float32 products (no TF32), so that CPU and GPU scores mean the same."""
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False


@contextlib.contextmanager
def single_threaded_torch() -> Iterator[None]:
    """torch's operations use the calling thread alone inside, also those of threads that are started inside."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def autocast(device: torch.device, precision: Precision) -> torch.autocast:
    """Half-precision autocast for the backbone; parts that need float32 (distances, transport) leave it themselves."""
    dtype = torch.float16 if precision == "fp16" else torch.bfloat16
    return torch.autocast(device.type, dtype=dtype, enabled=precision != "float32")


def network_pass(
    network: Callable[[torch.Tensor], Any], device: torch.device, precision: Precision, *, channels_last: bool
) -> Callable[[torch.Tensor], Any]:
    """A network's pass over a batch of images in a precision and memory format."""
    memory_format = torch.channels_last if channels_last else torch.contiguous_format

    def forward(images: torch.Tensor) -> Any:
        with autocast(device, precision):
            return network(images.contiguous(memory_format=memory_format))

    return forward


def atomic_write(path: str | os.PathLike[str], data: bytes | memoryview) -> None:
    """Write a file whole or not at all; on an error an older file of that name is untouched."""
    with whole_file(path) as file:
        file.write(data)


@contextlib.contextmanager
def whole_file(path: str | os.PathLike[str]) -> Iterator[IO[bytes]]:
    """A file to write, which gets the name ``path`` at the end of the block; an error in the block removes it.

    Until then it has a hidden name and a lock that tells it from leftovers of killed processes, which are removed.
    """
    path = Path(path)
    remove_leftovers(path.parent, path.name)
    temporary, file = _locked_temporary(path)
    try:
        with file:
            yield file
            file.flush()
            os.fsync(file.fileno())
            os.replace(temporary, path)  # while it is locked: until then its name is that of a leftover
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _locked_temporary(path: Path) -> tuple[Path, IO[bytes]]:
    while True:
        temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.tmp")
        file = temporary.open("xb")
        with contextlib.suppress(OSError):  # a file system without locks, on which nothing is taken for a leftover
            fcntl.flock(file.fileno(), fcntl.LOCK_EX)
        if is_open_at(temporary, file.fileno()):
            return temporary, file
        file.close()  # it was taken for a leftover before it had its lock


@contextlib.contextmanager
def whole_folder(path: Path) -> Iterator[Path]:
    """A folder to fill, which gets the name ``path`` at the end of the block; an error in the block removes it.

    Folders that killed processes were filling are removed first.
    """
    for leftover in path.parent.glob(f".{glob.escape(path.name)}.*.tmp"):
        with contextlib.suppress(OSError), _locked_folder(leftover):
            shutil.rmtree(leftover)
    with (
        tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp") as temporary,
        _locked_folder(Path(temporary)),
    ):
        (folder := Path(temporary) / path.name).mkdir()
        yield folder
        os.replace(folder, path)


@contextlib.contextmanager
def _locked_folder(path: Path) -> Iterator[None]:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)


def remove_leftovers(folder: str | os.PathLike[str], name: str | None = None) -> None:
    """Remove files that killed processes were writing in ``folder``, of one name or any; locked ones stay."""
    with contextlib.suppress(OSError):
        for leftover in Path(folder).glob(f".{'*' if name is None else glob.escape(name)}.*.tmp"):
            with contextlib.suppress(OSError), leftover.open("r+b") as file:
                fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
                leftover.unlink(missing_ok=True)


def file_sha256(path: str | os.PathLike[str]) -> str:
    """SHA-256 of a file's content, in hexadecimal digits."""
    require_file(path)
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def cached_sha256(path: str | os.PathLike[str]) -> str:
    """``file_sha256``, computed once per process while size and modification time stay the same."""
    status = os.stat(path)
    return _hashed_once(os.path.realpath(path), status.st_size, status.st_mtime_ns)


@functools.cache
def _hashed_once(path: str, size: int, changed: int) -> str:
    return file_sha256(path)


def write_json(path: str | os.PathLike[str], content: Mapping[str, Any]) -> None:
    """Write a JSON object atomically, with a checksum of its values."""
    try:
        written = json.loads(json.dumps(content, allow_nan=False))  # keys as text
    except ValueError as error:
        raise RunError(
            f"{path}: got NaN or infinity, expected finite numbers. Look at the embeddings, which may have collapsed."
        ) from error
    text = json.dumps({**written, _CHECKSUM: _checksum(written)}, indent=1)
    atomic_write(path, f"{text}\n".encode())


def read_json(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read what ``write_json`` wrote; raises ValueError if it cannot be read or has other values."""
    content = load_json(Path(path))
    if not isinstance(content, dict):
        raise ValueError(f"it holds a {type(content).__name__} instead of names and values")
    if content.pop(_CHECKSUM, None) != _checksum(content):
        raise ValueError("its checksum is missing or does not match: the file was changed")
    return content


def _checksum(content: Mapping[str, Any]) -> str:
    text = json.dumps(content, sort_keys=True, allow_nan=False, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def reason_of(error: Exception) -> str:
    """The first line of a file reader's error, without torch's advice to disable ``weights_only``."""
    if isinstance(error, pickle.UnpicklingError) or "weights_only" in str(error):
        return "it holds Python objects, which are never executed, or it is damaged"
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def is_open_at(path: str | os.PathLike[str], descriptor: int) -> bool:
    """Whether an open file is still the one at ``path``."""
    try:
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def package_versions() -> dict[str, str]:
    """Versions of what numbers depend on, for ``result.json``."""
    from dmlbench import __version__

    versions = {"dmlbench": __version__, "python": platform.python_version()}
    for name in _REPORTED_PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return versions


def git_commit() -> str | None:
    """Commit of the source tree, with "+changes" when tracked files differ from it; None outside a checkout."""
    folder = Path(__file__).resolve().parent

    def git(*arguments: str) -> str:
        return subprocess.check_output(
            ["git", *arguments], cwd=folder, stderr=subprocess.DEVNULL, text=True, timeout=10
        ).strip()

    try:
        if Path(git("rev-parse", "--show-toplevel")) not in folder.parents:
            return None
        git("ls-files", "--error-unmatch", str(Path(__file__).resolve()))
        return git("rev-parse", "HEAD") + ("+changes" if git("status", "--porcelain", "-uno") else "")
    except (OSError, subprocess.SubprocessError):
        return None


def device_name(device: torch.device) -> str:
    """Name of the processor that ran the model; of a CPU with PyTorch's instruction set and number of threads."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    used = f"{torch.backends.cpu.get_cpu_capability()}, {counted(torch.get_num_threads(), 'thread')}"
    with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="utf-8") as file:
        for line in file:
            if line.startswith("model name"):
                return f"{line.split(':', 1)[1].strip()}, {used}"
    return f"{platform.processor() or platform.machine()}, {used}"


def peak_memory_bytes(device: torch.device) -> int:
    """Largest memory held so far: of the CUDA allocator on a GPU, of the process on a CPU."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
