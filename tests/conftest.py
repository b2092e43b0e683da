"""Fixtures that every test may use."""

import os
from pathlib import Path

import pytest
import torch

REPOSITORY = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="session", autouse=True)
def _few_threads() -> None:
    """Workers of a parallel test run must not fight for the cores."""
    torch.set_num_threads(1 if os.environ.get("PYTEST_XDIST_WORKER") else 2)


@pytest.fixture(scope="session")
def repository() -> Path:
    return REPOSITORY


@pytest.fixture(scope="session")
def shared_dir() -> Path:
    """Folder with reference numbers and real data that lies beside a developer's checkout; absent in a plain clone."""
    path = Path(os.environ.get("DMLBENCH_SHARED", REPOSITORY.parent / "shared"))
    if not path.is_dir():
        pytest.skip(f"needs the developers' reference folder {path} (set DMLBENCH_SHARED)")
    return path
