"""dmlbench compares deep metric learning methods under the protocols of the papers.

``import dmlbench as db`` is quick; ``db.load`` and the other names import what they need when they are first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dmlbench.apps.loading import load
    from dmlbench.cli.python_api import evaluate, run, table, tune
    from dmlbench.types import ConfigError, DataError, DmlbenchError, RunError

    __version__: str

_PLACES = {
    "load": "apps.loading",
    **dict.fromkeys(("evaluate", "run", "table", "tune"), "cli.python_api"),
    **dict.fromkeys(("ConfigError", "DataError", "DmlbenchError", "RunError"), "types"),
}
"""Modules by the names that come from them."""
__all__ = [
    "ConfigError",
    "DataError",
    "DmlbenchError",
    "RunError",
    "__version__",
    "evaluate",
    "load",
    "run",
    "table",
    "tune",
]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import PackageNotFoundError, version
        from pathlib import Path

        try:
            found = version("dmlbench")
        except PackageNotFoundError:
            return "not installed"  # a source tree on PYTHONPATH; results record its commit, too
        # An editable install keeps the version of its installation, whose commit may be an earlier one.
        return found.partition("+")[0] if (Path(__file__).parents[2] / ".git").exists() else found
    if name not in _PLACES:
        raise AttributeError(f"module 'dmlbench' has no attribute '{name}'")
    value = globals()[name] = getattr(import_module(f"dmlbench.{_PLACES[name]}"), name)
    return value


def __dir__() -> list[str]:
    return __all__
