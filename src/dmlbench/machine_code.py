"""Machine code of numeric loops, by numba (the extra ``fast``); what uses it has a slower way without."""

import importlib
import importlib.util
import logging
from collections.abc import Callable
from functools import cache
from types import ModuleType
from typing import TypeVar, cast

Function = TypeVar("Function", bound=Callable[..., object])

logger = logging.getLogger(__name__)


@cache
def load(module: str, *, task: str) -> ModuleType | None:
    """The module ``module`` of compiled functions, or None where numba is missing; the log says of ``task`` which."""
    if importlib.util.find_spec("numba") is None:
        logger.info("%s without compiled code, in more time; the extra 'fast' (numba) brings it", task)
        return None
    try:
        loaded = importlib.import_module(module)
        if hasattr(loaded, "try_out"):  # compiles, which can fail as well
            loaded.try_out()
    except Exception as error:  # numba's own errors, of its cache's folder, of a version that does not fit
        logger.warning("%s without compiled code, in more time, because numba cannot be used: %s", task, error)
        return None
    logger.info("%s by compiled code; compiling it takes up to some ten seconds once, then it is kept", task)
    return loaded


def compiled(function: Function) -> Function:
    """Machine code of ``function``, whose operations it keeps in order and rounding; kept next to the source or in the
    user's cache where either can be written to. It runs without Python's lock.

    Raises:
        ImportError: numba is missing or does not fit the other libraries.
    """
    import numba

    try:
        return cast(Function, numba.njit(cache=True, nogil=True)(function))
    except RuntimeError:  # numba finds no folder that can be written to
        return cast(Function, numba.njit(nogil=True)(function))
