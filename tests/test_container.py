"""The steps of the Containerfile, without a container engine: what it copies and calls, and whether that is enough."""

import fnmatch
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet

Step = tuple[str, str]


@pytest.fixture(scope="module")
def steps(repository: Path) -> list[Step]:
    """(instruction, what stands behind it) of the Containerfile."""
    lines = (repository / "Containerfile").read_text().replace("\\\n", " ").splitlines()
    return [(line.split()[0], line.split(maxsplit=1)[1]) for line in lines if line.strip() and line[0] != "#"]


def of(steps: list[Step], instruction: str) -> list[str]:
    return [text for name, text in steps if name == instruction]


def copied(steps: list[Step]) -> list[tuple[str, str]]:
    """(source, destination) of every COPY."""
    words = [[word for word in shlex.split(text) if not word.startswith("--")] for text in of(steps, "COPY")]
    return [(source, target) for *sources, target in words for source in sources]


def is_sent(path: Path, repository: Path) -> bool:
    """Whether .dockerignore lets a file of the checkout through: the last pattern for it or a folder of it decides."""
    name, sent = path.relative_to(repository), True
    for line in (repository / ".dockerignore").read_text().splitlines():
        pattern = line.removeprefix("!").removeprefix("**/")
        parts = [str(part) for part in (name, *name.parents)][:-1]
        names = name.parts if "**/" in line else parts
        if line and not line.startswith("#") and any(fnmatch.fnmatchcase(part, pattern) for part in names):
            sent = line.startswith("!")
    return sent


def targets(repository: Path) -> set[str]:
    return set(re.findall(r"^([a-z-]+):", (repository / "Makefile").read_text(), flags=re.MULTILINE))


def test_every_source_exists_and_reaches_the_builder(steps: list[Step], repository: Path) -> None:
    for source, _ in copied(steps):
        path = repository / source
        assert path.exists(), source
        files = [path] if path.is_file() else [file for file in path.rglob("*.*") if file.suffix in (".py", ".yaml")]
        assert files
        assert all(is_sent(file, repository) for file in files), source
    for name in ("outputs/published/README.md", ".venv/bin/python", ".git/HEAD", "src/dmlbench/__pycache__/a.pyc"):
        assert not is_sent(repository / name, repository), name


def test_its_python_is_one_that_the_package_allows(steps: list[Step], repository: Path) -> None:
    (image,) = of(steps, "FROM")
    found = re.fullmatch(r"docker\.io/library/python:(3\.\d+)-slim", image)
    assert found, image
    allowed = tomllib.loads((repository / "pyproject.toml").read_text())["project"]["requires-python"]
    assert f"{found[1]}.99" in SpecifierSet(allowed)


def test_what_it_calls_is_there_and_is_called_without_rights(steps: list[Step], repository: Path) -> None:
    commands = [shlex.split(part) for text in of(steps, "RUN") for part in text.split("&&")]
    (command,) = (json.loads(text) for text in of(steps, "CMD"))
    made = [words[1:] for words in (*commands, command) if words[0] == "make"]
    assert made == [["setup"], ["demo"]]
    assert {target for words in made for target in words} <= targets(repository)
    (installed,) = (words for words in commands if words[:2] == ["apt-get", "install"])
    assert [word for word in installed[2:] if not word.startswith("-")] == ["make"]  # bash is part of the image
    (user,), (folder,), (volume,) = (of(steps, name) for name in ("USER", "WORKDIR", "VOLUME"))
    assert user not in ("root", "0")
    names = [name for name, _ in steps]
    assert names.index("USER") < names.index("COPY")  # and so before what is made of them
    (made_folders,) = (words for words in commands if words[0] == "install")
    assert {f"--owner={user}", folder, volume} <= set(made_folders)
    assert volume == f"{folder}/outputs"  # where paths.output_dir is


@pytest.mark.slow
def test_what_is_copied_is_enough_to_build_the_package_and_to_run_the_demo(
    steps: list[Step], repository: Path, tmp_path: Path
) -> None:
    """The packages are those of this environment, and each run trains two steps."""
    pytest.importorskip("hatchling", reason="extra dev")
    work = tmp_path / "work"
    work.mkdir()
    for source, target in copied(steps):
        path = repository / source
        for file in [path] if path.is_file() else filter(Path.is_file, path.rglob("*")):
            if is_sent(file, repository):
                place = work / target / (file.name if file == path else file.relative_to(path))
                place.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(file, place)
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path / "dist")]
    subprocess.run(build, cwd=work, check=True, capture_output=True)  # as pip does in `make setup`

    installed = tmp_path / "venv"
    installed.mkdir()
    (installed / "bin").symlink_to(Path(sys.executable).parent)
    (installed / ".installed").touch()  # newer than pyproject.toml, as after `make setup`
    length = work / "conf" / "fit" / "demo.yaml"
    text, count = re.subn(r"(?m)^(max_steps|validate_every): \d+", r"\1: 2", length.read_text())
    assert count == 2
    length.write_text(text)
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith(("DMLBENCH_", "MAKE"))},
        "VENV": str(installed),
        "PYTHONPATH": str(work / "src"),
        "HOME": str(tmp_path),
        "OMP_NUM_THREADS": "1",
    }
    (command,) = (json.loads(text) for text in of(steps, "CMD"))
    done = subprocess.run(command, cwd=work, env=environment, capture_output=True, text=True, timeout=580)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert len(list(work.glob("outputs/glyphs_collage/mlrc/*/fold*_rep*/result.json"))) == 36
    assert list(work.glob("outputs/**/*.png"))
