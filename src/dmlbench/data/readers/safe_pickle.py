"""Untrusted pickles, read without executing code: containers, numbers, text and numpy arrays, nothing else."""

import io
import pickle
from collections.abc import Callable
from typing import Any

from dmlbench.external import check_bounds
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


_MAX_TUPLES = 10_000
"""A tuple of tuples of tuples is hashed by recursion, which can overflow the stack."""


def _counted(build: Callable[[Any], None]) -> Callable[[Any], None]:
    def load(self: Any) -> None:
        self.tuples += 1
        if self.tuples > _MAX_TUPLES:
            raise pickle.UnpicklingError(f"it has more than {_MAX_TUPLES:,} tuples")
        build(self)

    return load


class _Unpickler(pickle._Unpickler):  # the one in Python, whose operations can be counted
    tuples = 0
    dispatch = dict(pickle._Unpickler.dispatch)  # noqa: RUF012
    for _code in (pickle.TUPLE, pickle.TUPLE1, pickle.TUPLE2, pickle.TUPLE3, pickle.FROZENSET):
        dispatch[_code[0]] = _counted(dispatch[_code[0]])

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _ALLOWED:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which is not plain data")
        return super().find_class(module, name)

    def persistent_load(self, pid: Any) -> Any:
        raise pickle.UnpicklingError("it refers to objects outside of itself")


def read_pickle(content: bytes, *, name: str, encoding: str = "ASCII") -> Any:
    """The value in a pickle of the file ``name``; Python 2's numpy arrays need the encoding "latin1"."""
    try:
        value = _Unpickler(io.BytesIO(content), encoding=encoding).load()
        check_bounds(value)
        return value
    # A pickle is a program: a damaged one may raise any error.
    except Exception as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise DataError(f"'{name}' is no pickle that can be trusted: {reason}; put the original file there") from error
