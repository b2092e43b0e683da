"""Pickles from elsewhere, read without executing code: containers, numbers, text and numpy arrays, nothing else."""

import io
import pickle
from pathlib import Path
from typing import IO, Any

from dmlbench.types import DataError

# Reading a pickle calls what it names. These build plain values; numpy's modules were renamed between its versions.
_NUMPY_CORE = ("numpy.core.multiarray", "numpy._core.multiarray")
_ALLOWED = {
    *((module, name) for module in _NUMPY_CORE for name in ("_reconstruct", "scalar")),
    *((module, "_frombuffer") for module in ("numpy.core.numeric", "numpy._core.numeric")),
    ("numpy", "ndarray"),
    ("numpy", "dtype"),
    ("_codecs", "encode"),  # how Python 2's byte strings travel in protocol 2
    ("collections", "OrderedDict"),
    *(
        (module, name)
        for module in ("builtins", "__builtin__")
        for name in ("set", "frozenset", "bytes", "bytearray", "complex")
    ),
}
MAX_BYTES = 2**31


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _ALLOWED:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which is not plain data")
        return super().find_class(module, name)

    def persistent_load(self, pid: Any) -> Any:
        raise pickle.UnpicklingError("it refers to objects outside of itself")


def load_pickle(path: str | Path, *, encoding: str = "ASCII") -> Any:
    """The value in a pickle file.

    Args:
        path: the file.
        encoding: of Python 2's byte strings: "latin1" for files with numpy arrays, "bytes" to leave them.

    Raises:
        DataError: the file is missing, truncated, too large, no pickle, or asks for anything but plain values and
            numpy arrays.
    """
    path = Path(path)
    try:
        size = path.stat().st_size
        if size > MAX_BYTES:
            raise DataError(f"'{path}' has {size:,} bytes, more than a pickle may have ({MAX_BYTES:,}); check the file")
        with open(path, "rb") as file:
            return read_pickle(file, name=str(path), encoding=encoding)
    except OSError as error:
        raise DataError(f"'{path}' cannot be read ({error.strerror or error}); put the original file there") from error


def read_pickle(file: IO[bytes] | bytes, *, name: str, encoding: str = "ASCII") -> Any:
    """As ``load_pickle``, from an open file or from bytes; ``name`` is for messages."""
    stream = io.BytesIO(file) if isinstance(file, bytes) else file
    try:
        return _Unpickler(stream, encoding=encoding).load()
    except OSError:
        raise
    # A pickle is a program: damaged, it fails with whatever its instructions run into.
    except Exception as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise DataError(f"'{name}' is no pickle that can be trusted: {reason}; put the original file there") from error
