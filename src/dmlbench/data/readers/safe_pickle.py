"""Untrusted pickles, read without executing code: containers, numbers, text and numpy arrays, nothing else."""

import io
import pickle
from typing import Any

from dmlbench.types import DataError

# Reading a pickle calls what it names. These build plain values; numpy renamed its modules between versions.
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


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _ALLOWED:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which is not plain data")
        return super().find_class(module, name)

    def persistent_load(self, pid: Any) -> Any:
        raise pickle.UnpicklingError("it refers to objects outside of itself")


def read_pickle(content: bytes, *, name: str, encoding: str = "ASCII") -> Any:
    """The value in a pickle.

    Args:
        content: the pickle.
        name: its file, for messages.
        encoding: of Python 2's byte strings: "latin1" for numpy arrays, "bytes" to leave them.
    """
    try:
        return _Unpickler(io.BytesIO(content), encoding=encoding).load()
    # A pickle is a program: a damaged one may raise any error.
    except Exception as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise DataError(f"'{name}' is no pickle that can be trusted: {reason}; put the original file there") from error
