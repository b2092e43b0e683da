"""The check for GPUs runs through where there is none, at small sizes."""

import os
import subprocess
from pathlib import Path

import pytest


@pytest.mark.slow
def test_every_part_of_the_check_runs_through(repository: Path, tmp_path: Path) -> None:
    out = tmp_path / "gpu_check.md"
    command = ["bash", "scripts/gpu_check.sh", "--tiny", "--out", str(out)]
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=repository, timeout=590, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, done.stderr
    table = out.read_text(encoding="utf-8")
    assert "NOT DONE" not in table and "DIFFERENT" not in table
    rows = ("tests marked gpu", "P@1 / MAP@R in percent, trained", "ResNet50", "GSP's share", "PML", "81 col", "AVSL")
    assert [row for row in rows if row not in table] == []
    assert table.splitlines()[-1] in done.stdout
