"""docs/tutorials: the files, commands and Python of each page work in order, in an empty folder."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from fenced_blocks import blocks

DOCS = Path(__file__).resolve().parents[2] / "docs"


@pytest.mark.slow
@pytest.mark.timeout(1800)  # up to two minutes each on an idle core
@pytest.mark.parametrize("page", sorted((DOCS / "tutorials").glob("*.md")), ids=lambda page: page.stem)
def test_every_step_of_a_tutorial_works(page, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)  # as for Python that is started here
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("DMLBENCH_CACHE", str(tmp_path / "cache"))
    for name in ("DMLBENCH_DATA", "DMLBENCH_OUTPUT"):
        monkeypatch.delenv(name, raising=False)
    names: dict[str, Any] = {}
    count = 0
    for block in blocks(page):
        if block.title:
            Path(block.title).parent.mkdir(parents=True, exist_ok=True)
            Path(block.title).write_text(block.text, encoding="utf-8")
        elif block.language == "python":
            exec(compile(block.text, str(page), "exec"), names)
            count += 1
        elif block.language == "bash":
            subprocess.run(["bash", "-euo", "pipefail", "-c", block.text], check=True)
            count += 1
        else:
            assert not block.language, f"{page.name}: a block of {block.language} that nothing runs"
    assert count >= 2


def test_the_loop_of_the_tutorial_is_the_file_in_docs() -> None:
    (loop,) = (block for block in blocks(DOCS / "tutorials" / "other_embeddings.md") if block.title == "pml_loop.py")
    assert loop.text == (DOCS / "pml_loop.py").read_text(encoding="utf-8")
