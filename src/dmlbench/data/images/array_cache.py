"""Cache of arrays that are expensive to compute, verified when read."""

import hashlib
import io
import json
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dmlbench.runtime import atomic_write
from dmlbench.types import DataError

_DIGEST_BYTES = 32

logger = logging.getLogger(__name__)


def cached_array(
    cache_dir: str | Path, name: str, *, key: Mapping[str, Any], build: Callable[[], NDArray[np.uint8]]
) -> tuple[NDArray[np.uint8], str]:
    """The array that ``build`` returns, memory-mapped and read-only, and the hexadecimal sha256 of its file's contents.

    The file is a plain ``.npy`` followed by its sha256 (``numpy.load`` ignores the tail); a damaged file is made again.

    Args:
        key: everything that the array depends on, including a version of the code that makes it; JSON values only.
    """
    text = json.dumps(dict(key), sort_keys=True, separators=(",", ":"))
    path = Path(cache_dir) / f"{name}-{hashlib.sha256(text.encode()).hexdigest()[:16]}.npy"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        digest = _verified_digest(path)
        if digest is None:
            buffer = io.BytesIO()
            np.save(buffer, np.ascontiguousarray(build()), allow_pickle=False)
            digest = hashlib.sha256(buffer.getbuffer()).hexdigest()
            buffer.write(bytes.fromhex(digest))
            atomic_write(path, buffer.getvalue())
    except OSError as error:
        raise DataError(
            f"cannot use the cache '{path}' ({error.strerror or error}). Free some space or choose another cache_dir."
        ) from error
    return np.load(path, mmap_mode="r", allow_pickle=False), digest


def _verified_digest(path: Path) -> str | None:
    """The digest at the end of the file; None if the file is missing or damaged."""
    try:
        content = memoryview(path.read_bytes())
    except FileNotFoundError:
        return None
    digest = hashlib.sha256(content[:-_DIGEST_BYTES])
    if content[-_DIGEST_BYTES:] == digest.digest():
        return digest.hexdigest()
    logger.warning("the cached file %s is damaged; building it again", path)
    return None
