"""What tests of readers share."""

import numpy as np
import pytest


@pytest.fixture
def without_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lists only: every image counts as there."""
    monkeypatch.setattr(
        "dmlbench.data.image_table.file_contents", lambda root, paths, *, name: np.ones(len(paths), np.int64)
    )
