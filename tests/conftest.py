"""Fixtures that every test may use."""

import json
import os
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

# As in every command: threads that spin while they wait take the cores of other processes.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
from numpy.typing import NDArray
from omegaconf import DictConfig

from dmlbench.cli.main import main

REPOSITORY = Path(__file__).resolve().parents[1]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of a test with ``fast_sample(n)``, mark all but n evenly spaced cases slow; cases that are slow do not count."""
    cases: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if item.get_closest_marker("fast_sample") and not item.get_closest_marker("slow"):
            cases[item.nodeid.partition("[")[0]].append(item)
    for group in cases.values():
        marker = group[0].get_closest_marker("fast_sample")
        assert marker is not None
        fast = set(np.linspace(0, len(group) - 1, marker.args[0]).round().astype(int))
        for index, item in enumerate(group):
            if index not in fast:
                item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="session", autouse=True)
def _few_threads() -> None:
    """Workers of a parallel test run must not fight for the cores."""
    torch.set_num_threads(1 if os.environ.get("PYTEST_XDIST_WORKER") else 2)


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Run ``dmlbench`` in this process; returns what it prints, or its error message if ``code`` is not 0."""

    def run(*arguments: str, code: int = 0) -> str:
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        out, error = capsys.readouterr()
        assert ended.value.code == code, error
        return error if code else out

    return run


@pytest.fixture
def train_configs(
    command: Callable[..., str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Callable[..., list[DictConfig]]:
    """Configurations that ``dmlbench train`` would run in ``tmp_path``."""
    monkeypatch.chdir(tmp_path)

    def composed(*arguments: str) -> list[DictConfig]:
        found: list[DictConfig] = []
        monkeypatch.setattr("dmlbench.runner.run", lambda cfg: found.append(cfg.copy()))
        command("train", *arguments)
        return found

    return composed


@pytest.fixture
def _float64_objective(monkeypatch: pytest.MonkeyPatch) -> None:
    """The objective works in float32 by contract, whose rounding would hide errors of the size looked for."""
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)


@pytest.fixture
def limit_memory(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[int]]:
    """Let a function run out of memory where ``size_of`` its arguments exceeds ``limit``; returns the sizes so far."""

    def limited(owner: Any, name: str, size_of: Callable[..., int], limit: int) -> list[int]:
        function, sizes = getattr(owner, name), []

        def run(*arguments: Any, **options: Any) -> Any:
            sizes.append(size_of(*arguments))
            if sizes[-1] > limit:
                raise torch.OutOfMemoryError("faked")
            return function(*arguments, **options)

        monkeypatch.setattr(owner, name, run)
        return sizes

    return limited


@pytest.fixture(scope="session")
def repository() -> Path:
    return REPOSITORY


@pytest.fixture(scope="session")
def golden_dir() -> Path:
    """Folder with what public implementations computed; its README names sources, conventions and tolerances."""
    return REPOSITORY / "tests" / "fixtures" / "golden"


@pytest.fixture(scope="session")
def golden(golden_dir: Path) -> Callable[..., dict[str, NDArray[Any]]]:
    """Arrays of ``<name>.npz`` whose names begin with a prefix, which is removed from the names."""

    def arrays(name: str, prefix: str = "") -> dict[str, NDArray[Any]]:
        with np.load(golden_dir / f"{name}.npz", allow_pickle=False) as file:
            return {key.removeprefix(prefix): file[key] for key in file.files if key.startswith(prefix)}

    return arrays


@pytest.fixture(scope="session")
def golden_tensors(golden: Callable[..., dict[str, NDArray[Any]]]) -> Callable[..., dict[str, torch.Tensor]]:
    """The same as tensors, without the description "meta"."""

    def tensors(name: str, prefix: str = "") -> dict[str, torch.Tensor]:
        return {key: torch.from_numpy(value) for key, value in golden(name, prefix).items() if key != "meta"}

    return tensors


@pytest.fixture(scope="session")
def golden_meta(golden: Callable[..., dict[str, NDArray[Any]]]) -> Callable[[str], dict[str, Any]]:
    """The description "meta" of ``<name>.npz``."""
    return lambda name: json.loads(str(golden(name, "meta")[""]))


@pytest.fixture(scope="session")
def shared_dir() -> Path:
    """Folder with real images, lists and weights that lies beside a developer's checkout; absent in a plain clone."""
    path = Path(os.environ.get("DMLBENCH_SHARED", REPOSITORY.parent / "shared"))
    if not path.is_dir():
        pytest.skip(f"needs real images, lists or weights: there is no {path} (set DMLBENCH_SHARED to their folder)")
    return path
