"""What every command says when it is stopped, or when the disk refuses."""

import errno
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import matplotlib
import pytest

from dmlbench.apps.pictures import save_figure
from dmlbench.cli.errors import guarded
from dmlbench.cli.main import main
from dmlbench.results.store import remove_run
from dmlbench.types import RunError

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
        (OSError(errno.ENOSPC, "No space left on device"), 1, "cannot write: No space left on device; make room"),
        (PermissionError(errno.EACCES, "Permission denied", "/x/table.md"), 1, "cannot write /x/table.md: Permission"),
    ],
)
def test_what_a_machine_refuses_is_one_line(capsys, error, code, message) -> None:
    assert guarded(raising(error)) == code
    assert message in capsys.readouterr().err


def test_a_reader_who_has_seen_enough_is_no_failure() -> None:
    read, write = os.pipe()
    os.close(read)
    code = "from dmlbench.cli.errors import guarded; exit(guarded(lambda: print('x' * 10**6, flush=True)))"
    done = subprocess.run([sys.executable, "-c", code], stdout=write, stderr=subprocess.PIPE, check=False)
    os.close(write)
    assert (done.returncode, done.stderr) == (141, b"")


def test_what_cannot_be_read_is_told_from_what_cannot_be_written(tmp_path: Path, capsys, monkeypatch) -> None:
    def message(error: OSError) -> str:
        assert guarded(raising(error)) == 1
        return capsys.readouterr().err

    (tmp_path / "list.txt").touch()
    denied = (errno.EACCES, "Permission denied")
    assert f"cannot read {tmp_path}/list.txt: Permission denied; make it" in message(
        PermissionError(*denied, f"{tmp_path}/list.txt")
    )
    assert f"cannot read {tmp_path}: Is a directory" in message(
        IsADirectoryError(errno.EISDIR, "Is a directory", str(tmp_path))
    )
    assert "cannot write" in message(PermissionError(*denied, f"{tmp_path}/.list.txt.1.tmp"))
    assert "cannot write" in message(OSError(errno.EROFS, "Read-only file system", f"{tmp_path}/list.txt"))
    assert "cannot write" in message(
        IsADirectoryError(errno.EISDIR, "Is a directory", f"{tmp_path}/.x.1.tmp", None, f"{tmp_path}/x")
    )
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    assert f"cannot read {tmp_path}/loop" in message(OSError(errno.ELOOP, "Too many levels", f"{tmp_path}/loop"))
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # as a folder that is closed to this user
    assert "cannot read" in message(PermissionError(*denied, f"{tmp_path}/unseen"))


def test_other_faults_keep_their_traceback() -> None:
    for error in (OSError(errno.ECONNRESET, "reset"), ValueError("a defect"), FileNotFoundError(errno.ENOENT, "no")):
        with pytest.raises(type(error)):
            guarded(raising(error))


def test_sigterm_outside_of_training_is_one_line_and_asks_to_come_back(tmp_path: Path) -> None:
    code = """
import time
import dmlbench.cli.status as status
from dmlbench.cli.main import main
def wait(cfg):
    print("ready", flush=True)
    time.sleep(60)
status.task = wait
main(["status"])
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                          cwd=tmp_path) as process:  # fmt: skip
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        _, error = process.communicate(timeout=30)
    assert process.returncode == 75
    assert error == "dmlbench: stopped; start the same command again to continue\n"


@pytest.mark.parametrize("name", ["../../evil", "a/b", "", "a b"])
def test_a_table_s_name_stays_in_its_folder(tmp_path: Path, capsys, monkeypatch, name: str) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as info:
        main(["table", f"name='{name}'"])
    assert info.value.code == 2
    assert "names files" in capsys.readouterr().err


def test_a_link_is_removed_and_what_it_leads_to_stays(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    kept.mkdir()
    (kept / "result.json").touch()
    run = tmp_path / "glyphs/mlrc/cell/fold0_rep0"
    run.parent.mkdir(parents=True)
    run.symlink_to(kept)
    remove_run(run)
    assert not run.parent.exists()
    assert (kept / "result.json").exists()


def test_clean_looks_at_no_link_and_stumbles_over_none(tmp_path: Path, capsys, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    protocol = tmp_path / "outputs/glyphs/mlrc"
    for run in (tmp_path / "elsewhere/fold0_rep0", protocol / "cell/fold0_rep0"):
        run.mkdir(parents=True)
        (run / "result.json").touch()
    (protocol / "linked").symlink_to(tmp_path / "elsewhere")
    (protocol / "loop").symlink_to(protocol / "loop")
    (protocol / "cell/fold0_rep1").symlink_to(tmp_path / "nowhere")
    (protocol / "cell/fold0_rep2").symlink_to(protocol / "cell/fold0_rep2")
    with pytest.raises(SystemExit) as info:
        main(["clean", "*", "ask=false"])
    assert info.value.code == 0
    out = capsys.readouterr().out
    assert "left alone, behind a link: outputs/glyphs/mlrc/linked/fold0_rep0" in out
    assert "removed 1 runs" in out
    assert (tmp_path / "elsewhere/fold0_rep0/result.json").exists()
    assert not (protocol / "cell/fold0_rep0").exists()


@pytest.mark.parametrize(
    "command",
    [["status", "paths.output_dir="], ["clean", "*", "paths.output_dir="], ["table", "paths.output_dir=''"],
     ["aggregate", "paths.output_dir="], ["report", "paths.output_dir=' '"]],
)  # fmt: skip
def test_an_empty_output_folder_is_not_the_current_one(tmp_path: Path, capsys, monkeypatch, command: list[str]) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "glyphs/mlrc/cell/fold0_rep0").mkdir(parents=True)
    with pytest.raises(SystemExit) as info:
        main(command)
    assert info.value.code == 2
    assert "is empty; name" in capsys.readouterr().err


@pytest.mark.parametrize("pair", [[], ["pair=[0,1]"]])
def test_explain_makes_no_folder_and_says_so_before_the_work(tmp_path: Path, capsys, pair: list[str]) -> None:
    with pytest.raises(SystemExit) as info:
        main(["explain", f"run={tmp_path}/no_run", f"output={tmp_path}/nope/x.png", *pair])
    assert info.value.code == 1
    assert f"there is no folder {tmp_path}/nope; choose another output" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("command", ["table", "report"])
def test_what_a_killed_command_left_is_removed_at_its_next_start(tmp_path: Path, capsys, command: str) -> None:
    left = tmp_path / "tables" / ".glyphs-mlrc.md.0badcafe.tmp"
    left.parent.mkdir()
    left.touch()
    with pytest.raises(SystemExit) as info:
        main([command, f"paths.output_dir={tmp_path}"])
    assert info.value.code == 1
    assert "no run under" in capsys.readouterr().err
    assert not left.exists()


def test_a_picture_s_own_leftover_is_removed(tmp_path: Path) -> None:
    for name in (".x.png.0badcafe.tmp", ".y.png.0badcafe.tmp"):
        (tmp_path / name).touch()
    save_figure(plt.figure(), tmp_path / "x.png")
    assert sorted(path.name for path in tmp_path.iterdir()) == [".y.png.0badcafe.tmp", "x.png"]


def test_pictures_are_written_whole_or_not_at_all(tmp_path: Path, monkeypatch) -> None:
    with pytest.raises(RunError, match="choose another output"):
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
