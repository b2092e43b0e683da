import os

import pytest

from dmlbench.training.log import History, TensorBoardLogger, WandbLogger, read_history
from dmlbench.types import RunError


def test_history_is_cut_back_to_the_checkpoint_on_a_resume(tmp_path) -> None:
    path = tmp_path / "history.csv"
    history = History(path, resume_step=0)
    for step in (1, 2, 3):
        history.log(step, {"train/loss": step / 3, "lr": 1e-5})
    history.close()
    with path.open("a") as file:
        file.write("4,train/lo")  # a line that a kill cut off
    assert [row[0] for row in read_history(path)] == [1, 1, 2, 2, 3, 3]
    History(path, resume_step=2).close()
    assert read_history(path) == [(1, "train/loss", 1 / 3), (1, "lr", 1e-5), (2, "train/loss", 2 / 3), (2, "lr", 1e-5)]


def test_a_history_that_is_no_text_is_named(tmp_path, monkeypatch) -> None:
    path = tmp_path / "history.csv"
    path.write_bytes(b"step,name,value\n1,\xff\xfe,0.5\n")
    with pytest.raises(RunError, match=r"history\.csv cannot be read \(.*utf-8.*\); remove it, or"):
        History(path, resume_step=2)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(RunError, match=r"history\.csv is a pipe, not a file"):
        read_history(path)
    path.unlink()
    assert read_history(path) == []
    path.mkdir()
    with pytest.raises(RunError, match="is a folder, not a file"):
        read_history(path)


def test_fresh_start_forgets_an_older_history(tmp_path) -> None:
    path = tmp_path / "history.csv"
    first = History(path, resume_step=0)
    first.log(5, {"a": 1.0})
    first.close()
    History(path, resume_step=0).close()
    assert read_history(path) == []


def test_tensorboard_logger_writes_events(tmp_path) -> None:
    pytest.importorskip("tensorboard", reason="extra tensorboard")
    logger = TensorBoardLogger(run_dir=tmp_path)
    logger.log(1, {"train/loss": 0.5})
    logger.close()
    assert list((tmp_path / "tensorboard").glob("events*"))


@pytest.mark.slow
def test_wandb_logger_works_offline(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("WANDB_SILENT", "true")
    logger = WandbLogger(run_dir=tmp_path, mode="offline")
    logger.log(1, {"train/loss": 0.5})
    logger.close()
    assert list(tmp_path.glob("wandb/offline-run*"))
