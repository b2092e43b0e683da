"""docs/tutorials: files, commands and Python of each page work in an empty folder, and print what the page shows."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from fenced_blocks import blocks

DOCS = Path(__file__).resolve().parents[2] / "docs"
AS_IN_THE_DOCS = {
    "ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_ENABLE_INSTRUCTIONS": "AVX2",
    "OMP_NUM_THREADS": "1",
}  # fmt: skip
"""What training rounds by, as docs/collections.md says."""


@pytest.mark.slow
@pytest.mark.timeout(1800)  # up to two minutes each on an idle core
@pytest.mark.parametrize("page", sorted((DOCS / "tutorials").glob("*.md")), ids=lambda page: page.stem)
def test_every_step_of_a_tutorial_works(page, tmp_path, monkeypatch, capfd) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)  # as for Python that is started here
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    for name, value in AS_IN_THE_DOCS.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("DMLBENCH_CACHE", str(tmp_path / "cache"))
    for name in ("DMLBENCH_DATA", "DMLBENCH_OUTPUT"):
        monkeypatch.delenv(name, raising=False)
    names: dict[str, Any] = {}
    count = 0
    differences = []
    printed: str | None = ""  # by the last block that ran
    for block in blocks(page):
        if block.title:
            Path(block.title).parent.mkdir(parents=True, exist_ok=True)
            Path(block.title).write_text(block.text, encoding="utf-8")
        elif block.language == "python":
            exec(compile(block.text, str(page), "exec"), names)
            printed = "".join(capfd.readouterr())
            count += 1
        elif block.language == "bash":
            subprocess.run(["bash", "-euo", "pipefail", "-c", block.text], check=True)
            printed = "".join(capfd.readouterr())
            count += 1
        else:
            assert not block.language, f"{page.name}: a block of {block.language} that nothing runs"
            if block.text.startswith(("dmlbench ", "hf ")):  # commands that need data, weights or a network
                printed = None
            elif printed is not None and not re.search(pattern(block.text), comparable(printed)):
                differences.append(f"{block.text}\nis not in\n{printed}")
    assert count >= 2
    assert not differences, "\n\n".join(differences)


def comparable(text: str) -> str:
    """Without what differs between machines: numbers, signs and the widths of columns."""
    text = re.sub(r"[-+]?\d[\d,.]*(e-?\d+)?\*?", "0", text)
    return "".join(" ".join(re.sub("-{3,}", "", line).split()) + "\n" for line in text.splitlines())


def pattern(shown: str) -> str:
    """Regular expression of the output that a page shows. "..." stands for lines, or for the rest of a line, as "…"."""
    lines = [re.escape(line) for line in comparable(shown).replace("…", "...").splitlines() if line]
    left_out = re.escape("...")
    return "".join("(.*\n)*?" if line == left_out else line.replace(left_out, ".*") + "\n+" for line in lines)


def test_the_loop_of_the_tutorial_is_the_file_in_docs() -> None:
    (loop,) = (block for block in blocks(DOCS / "tutorials" / "other_embeddings.md") if block.title == "pml_loop.py")
    assert loop.text == (DOCS / "pml_loop.py").read_text(encoding="utf-8")
