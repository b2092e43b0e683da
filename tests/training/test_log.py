import io
import json
import logging
import random
import resource
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from composed import composed
from numpy.typing import NDArray
from PIL import Image

from dmlbench.runner import run
from dmlbench.runtime import random_state
from dmlbench.training.log import History, Logger, MlflowLogger, TensorBoardLogger, WandbLogger, read_history
from dmlbench.types import ConfigError, RunError


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
    History(path, resume_step=0).close()
    assert read_history(path) == []


def events(folder: Path) -> Any:
    """What TensorBoard shows of a run directory."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    shown = EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0, "images": 0, "tensors": 0})
    return shown.Reload()


def tensorboard(folder: Path, **given: str) -> TensorBoardLogger:
    pytest.importorskip("tensorboard", reason="extra tensorboard")
    return TensorBoardLogger(run_dir=folder, **{"run_id": "1", "configuration": "a: 1\n"} | given)


def test_tensorboard_shows_curves_pictures_scores_and_configuration(tmp_path) -> None:
    picture = np.random.default_rng(0).integers(0, 256, (20, 30, 3), dtype=np.uint8)
    logger = tensorboard(tmp_path, configuration="pooling: gsp\n")
    logger.start(0)
    for step in (1, 2):
        logger.log(step, {"train/loss": 1 / step, "peak_memory_bytes": 3e9})
    logger.image(2, "val/nearest", picture)
    logger.summary(2, {"test/map_at_r": 0.25})
    logger.close()
    shown = events(tmp_path)
    assert [(e.step, e.value) for e in shown.Scalars("train/loss")] == [(1, 1.0), (2, 0.5)]
    assert [(e.step, e.value) for e in shown.Scalars("final/test/map_at_r")] == [(2, 0.25)]
    (image,) = shown.Images("val/nearest")
    assert np.array_equal(np.asarray(Image.open(io.BytesIO(image.encoded_image_string))), picture)
    (text,) = shown.Tensors("configuration/text_summary")
    assert b"pooling: gsp" in text.tensor_proto.string_val[0]


def test_tensorboard_drops_what_a_killed_process_wrote_after_its_checkpoint(tmp_path, monkeypatch) -> None:
    killed, now = tensorboard(tmp_path), time.time
    killed.start(0)
    for step in range(1, 6):
        killed.log(step, {"train/loss": step / 2})
    # never closed; its checkpoint was that of step 3
    for ahead, first in ((2, 3), (4, 0)):  # resumed, then begun anew
        # TensorBoard reads its files by the second in their names
        monkeypatch.setattr(time, "time", lambda ahead=ahead: now() + ahead)
        again = tensorboard(tmp_path)
        again.start(first)
        again.log(first + 1, {"train/loss": 100.0})
        again.close()
        shown = [(e.step, e.value) for e in events(tmp_path).Scalars("train/loss")]
        assert shown == [*((step, step / 2) for step in range(1, first + 1)), (first + 1, 100.0)]
    killed.close()


def test_a_disk_that_is_full_is_an_error_that_names_the_folder(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(threading, "excepthook", lambda error: None)  # TensorBoard's thread prints it too
    logger = tensorboard(tmp_path)
    logger.start(0)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, limits[1]))  # ends a write as a full disk does
    try:
        with pytest.raises(
            RunError, match=r"tensorboard cannot be written: .*File too large\. Fix the cause or set logger"
        ):
            for step in range(100):
                logger.log(step, {"train/loss": 0.5})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    logger.close()


def wandb_records(file: Path) -> Iterator[Any]:
    """Records of a file of W&B: a header of 7 bytes, then blocks of 32 KiB as in LevelDB's log."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, whole = file.read_bytes(), 7, b""
    assert data[:4] == b":W&B"
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        _, size, kind = struct.unpack("<IHB", data[at : at + 7])
        whole, at = whole + data[at + 7 : at + 7 + size], at + 7 + size
        if kind in (1, 4):  # whole, or the last part
            record = Record()
            record.ParseFromString(whole)
            yield record
            whole = b""


def starts_of_a_killed_run(make_logger: Callable[[], Logger], picture: NDArray[np.uint8]) -> Iterator[bool]:
    """Log a run that is killed after step 4, then resumed from the checkpoint of step 2; yields if it is complete."""
    for first, last in ((0, 4), (2, 5)):
        logger = make_logger()
        logger.start(first)
        for step in range(first + 1, last + 1):
            logger.log(step, {"train/loss": 1 / step})
        if last == 5:
            logger.image(5, "val/nearest", picture)
            logger.summary(5, {"test/map_at_r": 0.25})
        logger.close()
        yield last == 5


@pytest.mark.slow
def test_wandb_keeps_all_offline_under_one_id_without_a_word(tmp_path, monkeypatch, capfd, caplog) -> None:
    caplog.set_level(logging.WARNING, logger="dmlbench")  # other tests let its own messages through
    for name in ("WANDB_MODE", "WANDB_SILENT", "WANDB_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    run_dir = tmp_path / "glyphs" / "mlrc" / "gsp-1234" / "fold2_rep1"
    run_dir.mkdir(parents=True)
    picture = np.random.default_rng(0).integers(0, 256, (20, 30, 3), dtype=np.uint8)
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002 - the global generator is what is looked at
    torch.manual_seed(0)
    before = random_state()
    for is_complete in starts_of_a_killed_run(
        lambda: WandbLogger(
            run_dir=run_dir, run_id="0123abcd", configuration="pooling: {name: gsp}\n", entity="team", tags=["a", "b"],
            init={"notes": "second try", "job_type": "baseline", "settings": {"x_label": "one"}},
        ),
        picture,
    ):  # fmt: skip
        time.sleep(0 if is_complete else 1.1)  # W&B names folders by the second
    assert torch.equal(random_state()["torch"], before["torch"])
    assert str({k: v for k, v in random_state().items() if k != "torch"}) == str(
        {k: v for k, v in before.items() if k != "torch"}
    )
    assert capfd.readouterr() == ("", "")
    points, exits = [], []
    for file in sorted(run_dir.glob("wandb/offline-run-*/run-0123abcd.wandb")):
        for record in wandb_records(file):
            kind = record.WhichOneof("record_type")
            if kind == "run":
                assert (record.run.run_id, record.run.run_group, record.run.project) == (
                    *("0123abcd", "gsp-1234", "dmlbench"),
                )
                assert record.run.display_name == "glyphs/mlrc/gsp-1234/fold2_rep1"
                assert (record.run.entity, list(record.run.tags)) == ("team", ["a", "b"])
                assert (record.run.notes, record.run.job_type) == ("second try", "baseline")
                assert '{"name":"gsp"}' in [item.value_json for item in record.run.config.update]
            elif kind == "history":
                values = {item.nested_key[0]: json.loads(item.value_json) for item in record.history.item
                          if len(item.nested_key) == 1}  # fmt: skip
                if "train/loss" in values:
                    points.append((values["step"], values["train/loss"]))
            elif kind == "summary":
                scores = {item.key: item.value_json for item in record.summary.update}
                if "final/test/map_at_r" in scores:
                    assert scores["final/test/map_at_r"] == "0.25"
                    exits.append("scores")
            elif kind == "exit":
                exits.append(record.exit.exit_code)
    assert points == [(step, 1 / step) for step in (1, 2, 3, 4, 3, 4, 5)]  # what is logged twice is the same
    assert exits == [1, "scores", 0]  # the first was left undone
    (written,) = run_dir.glob("wandb/offline-run-*/files/media/images/val/*.png")
    assert np.array_equal(np.asarray(Image.open(written)), picture)


@pytest.mark.parametrize(("name", "message"), [("note", "did you mean 'notes'"), ("project", "init.project is not")])
def test_an_argument_that_wandb_does_not_take_here_is_an_error(tmp_path, name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        WandbLogger(run_dir=tmp_path, run_id="1", configuration="", init={name: "x"})


@pytest.mark.slow
def test_mlflow_resumes_one_run_in_a_local_database(tmp_path) -> None:
    mlflow = pytest.importorskip("mlflow", reason="extra mlflow")
    run_dir = tmp_path / "out put" / "glyphs" / "mlrc" / "gsp-1234" / "fold2_rep1"
    run_dir.mkdir(parents=True)
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    picture = np.random.default_rng(0).integers(0, 256, (20, 30, 3), dtype=np.uint8)
    before = str(random_state())
    client = mlflow.MlflowClient(uri)
    for is_complete in starts_of_a_killed_run(
        lambda: MlflowLogger(
            run_dir=run_dir, run_id="0123abcd", configuration="pooling: {name: gsp}\n", tracking_uri=uri
        ),
        picture,
    ):
        (run,) = client.search_runs([client.get_experiment_by_name("dmlbench").experiment_id])
        assert run.info.status == ("FINISHED" if is_complete else "FAILED")
    assert str(random_state()) == before
    assert run.info.run_name == "glyphs/mlrc/gsp-1234/fold2_rep1"
    assert run.data.tags["run_id"] == "0123abcd"
    points = [(point.step, point.value) for point in client.get_metric_history(run.info.run_id, "train/loss")]
    assert set(points) == {(step, 1 / step) for step in range(1, 6)}  # what is logged twice is the same
    assert run.data.metrics["final/test/map_at_r"] == 0.25
    (written,) = (tmp_path / "out put" / "mlartifacts").rglob("config.yaml")
    assert written.read_text() == "pooling: {name: gsp}\n"
    (written,) = (tmp_path / "out put" / "mlartifacts").rglob("*.png")
    assert np.array_equal(np.asarray(Image.open(written).convert("RGB")), picture)


@pytest.mark.parametrize("name", ["mlflow", "tensorboard", "wandb"])
def test_a_logger_that_is_not_installed_is_an_error_before_anything_is_written(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    cfg = composed(f"logger={name}")
    cfg.paths.output_dir = str(tmp_path / "out")
    with pytest.raises(ConfigError, match=rf"logger={name}: .* `pip install '\.\[{name}\]'`"):
        run(cfg)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("nothing of the kind\n", "its first line is not step,name,value"),
        ("step,name,value\nx\n1,a,2.0\n", "in line 2"),
        ("step,name,value\n1,a,nan\n1,a,2.0\n", "in line 2"),
    ],
)
def test_a_history_that_is_none_is_refused(tmp_path, content: str, message: str) -> None:
    (tmp_path / "history.csv").write_text(content)
    with pytest.raises(RunError, match=message):
        read_history(tmp_path / "history.csv")
