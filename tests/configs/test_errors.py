"""What every command says when it is stopped, or when the disk refuses."""

import errno
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import FunctionType

import matplotlib
import pytest

from dmlbench.apps.pictures import save_figure
from dmlbench.cli.errors import guarded
from dmlbench.types import RunError, closest

matplotlib.use("Agg")
from matplotlib import pyplot as plt


def raising(error: BaseException):
    def action() -> None:
        raise error

    return action


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (KeyboardInterrupt(), 130, "interrupted"),
        (OSError(errno.ENOSPC, "No space left on device"), 1, "error: No space left on device. Make room"),
        (PermissionError(errno.EACCES, "Permission denied", "/x/y"), 1, "/x/y: Permission denied. Choose"),
        (IsADirectoryError(errno.EISDIR, "Is a directory", "/x/.t.tmp", None, "/x/t"), 1, "/x/t: Is a directory"),
        (OSError(errno.EMFILE, "Too many open files"), 1, "Too many open files. Raise the limit of open files"),
        (MemoryError(), 1, "out of memory (). Lower a batch"),
        (ImportError("libtorch.so: failed to map segment from shared object"), 1, "out of memory (libtorch.so: failed"),
        (SystemError("<method 'x'> returned NULL without setting an exception"), 1, "out of memory (<method"),
    ],
)
def test_what_a_machine_refuses_is_one_line(capsys, error, code, message) -> None:
    assert guarded(raising(error)) == code
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"a,b\n\xff,1\n", "history.csv cannot be read: 'utf-8' codec can't decode"),
        (None, "history.csv: Is a directory"),
    ],
)
def test_a_file_that_cannot_be_read_is_named(capsys, tmp_path: Path, content: bytes | None, message: str) -> None:
    path = tmp_path / "history.csv"
    path.mkdir() if content is None else path.write_bytes(content)

    def read(path: Path) -> None:
        path.read_text("utf-8")

    of_ours = FunctionType(read.__code__, {"__name__": "dmlbench.example"})
    assert guarded(lambda: of_ours(path)) == 1
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"5", "mine.yaml: got 5, expected keys and values"),
        (b"\xff", "mine.yaml: byte 0 is not UTF-8"),
        (b"a: &a [*a]", "mine.yaml: the alias *a is inside or before its anchor &a"),
        (b"power: 3", "pooling: got keys ['power'], expected pooling._target_ with a class."),
    ],
)
def test_an_option_that_is_none_is_one_line(command, tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "pooling").mkdir()
    (tmp_path / "pooling" / "mine.yaml").write_bytes(content)
    given = ("--config-dir", str(tmp_path), "pooling=mine", f"paths.output_dir={tmp_path}")
    assert message in command("train", *given, code=2)


def test_an_experiment_that_includes_itself_is_one_line(command, tmp_path: Path) -> None:
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text("defaults:\n  - /experiment: mine\n")
    error = command("train", "--config-dir", str(tmp_path), "experiment=mine", code=2)
    assert "the configuration includes itself" in error


def test_a_reader_who_has_seen_enough_is_no_failure() -> None:
    read, write = os.pipe()
    os.close(read)
    code = "from dmlbench.cli.errors import guarded; exit(guarded(lambda: print('x' * 10**6, flush=True)))"
    done = subprocess.run([sys.executable, "-c", code], stdout=write, stderr=subprocess.PIPE, check=False)
    os.close(write)
    assert (done.returncode, done.stderr) == (141, b"")


def test_other_faults_keep_their_traceback() -> None:
    for error in (OSError(errno.ECONNRESET, "reset"), ValueError("a defect")):
        with pytest.raises(type(error)):
            guarded(raising(error))


def test_sigterm_outside_of_training_is_one_line_and_asks_to_come_back(tmp_path: Path) -> None:
    code = """
import time
from dmlbench.cli import simple_commands
from dmlbench.cli.main import main
def wait(cfg):
    print("ready", flush=True)
    time.sleep(60)
simple_commands.status = wait
main(["status"])
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                          cwd=tmp_path) as process:  # fmt: skip
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        _, error = process.communicate(timeout=30)
    assert process.returncode == 75
    assert error == "dmlbench: stopped. Start the same command again to resume.\n"


def test_clean_looks_at_no_link_and_stumbles_over_none(tmp_path: Path, command, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    protocol = tmp_path / "outputs/glyphs/mlrc"
    for run in (tmp_path / "elsewhere/fold0_rep0", protocol / "config/fold0_rep0"):
        run.mkdir(parents=True)
        (run / "result.json").touch()
    (protocol / "linked").symlink_to(tmp_path / "elsewhere")
    (protocol / "loop").symlink_to(protocol / "loop")
    (protocol / "config/fold0_rep1").symlink_to(tmp_path / "nowhere")
    (protocol / "config/fold0_rep2").symlink_to(protocol / "config/fold0_rep2")
    out = command("clean", "*", "ask=false")
    assert "skipped, behind a symbolic link: outputs/glyphs/mlrc/linked/fold0_rep0" in out
    assert "removed 1 run" in out
    assert (tmp_path / "elsewhere/fold0_rep0/result.json").exists()
    assert not (protocol / "config/fold0_rep0").exists()


def test_clean_leaves_a_run_that_ended_while_the_question_waited(tmp_path: Path, command, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    run = tmp_path / "outputs/glyphs/mlrc/config/fold0_rep0"
    run.mkdir(parents=True)

    def answer(_: str) -> str:
        (run / "result.json").touch()
        return "y"

    monkeypatch.setattr("builtins.input", answer)
    monkeypatch.setattr("sys.stdin.isatty", lambda: True)
    out = command("clean", "**", "state=interrupted")
    assert "skipped, done by now: outputs/glyphs/mlrc/config/fold0_rep0" in out
    assert "removed 0 runs" in out
    assert run.exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["status", "paths.output_dir="], "got '', expected a folder"),
        (["report", "paths.output_dir=' '"], "got '', expected a folder"),
        (["table", "name=../../evil"], "expected a file name"),
    ],
)
def test_commands_write_nowhere_else(tmp_path: Path, command, monkeypatch, words, message) -> None:
    monkeypatch.chdir(tmp_path)
    assert message in command(*words, code=2)
    assert not list(tmp_path.iterdir())


def test_pictures_are_written_whole_or_not_at_all(tmp_path: Path, monkeypatch) -> None:
    with pytest.raises(RunError, match="Choose another output"):
        save_figure(plt.figure(), tmp_path / "missing" / "x.png")
    assert not (tmp_path / "missing").exists()
    (tmp_path / "x.png").write_bytes(b"before")

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(RunError, match="No space left"):
        save_figure(plt.figure(), tmp_path / "x.png")
    assert [path.name for path in tmp_path.iterdir()] == ["x.png"]
    assert (tmp_path / "x.png").read_bytes() == b"before"


def test_only_likely_names_are_suggested() -> None:
    assert closest("foo", []) == "there are none."
    assert closest("foo", ["oodml", "train"]) == "choose one of oodml, train."
    assert closest("trian", ["oodml", "train"]).startswith("did you mean 'train'?")
