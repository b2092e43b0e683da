"""The import directions of the design, and that the project speaks of itself alone."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest


def test_import_directions_hold(repository: Path) -> None:
    lint_imports = Path(sys.executable).parent / "lint-imports"
    if not lint_imports.exists():
        pytest.skip("import-linter is not installed (extra dev)")
    done = subprocess.run([lint_imports, "--no-cache"], cwd=repository, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout


def test_tracked_files_name_no_machine_and_no_package_index(repository: Path) -> None:
    if not shutil.which("git") or not (repository / ".git").exists():
        pytest.skip("not a git checkout")
    files = subprocess.run(
        ["git", "ls-files"], cwd=repository, capture_output=True, text=True, check=True
    ).stdout.split()
    index_option = "-".join(["", "", "index", "url"])
    forbidden = re.compile(r"(^|[^a-zA-Z])/(?:home|root)/|" + index_option)
    for name in files:
        path = repository / name
        if path.suffix in (".py", ".yaml", ".toml", ".md", ".txt", ".cff", ".sh", "") and path.is_file():
            assert not forbidden.search(path.read_text(encoding="utf-8", errors="ignore")), name


def test_no_package_but_the_command_line_sees_a_configuration_of_hydra(repository: Path) -> None:
    packages = [path.parent for path in (repository / "src" / "dmlbench").glob("*/__init__.py")]
    assert len(packages) > 10
    for package in packages:
        for path in package.rglob("*.py") if package.name != "cli" else ():
            text = path.read_text(encoding="utf-8")
            assert not re.search(r"DictConfig|omegaconf|(from|import) hydra", text), path
