"""Configs are identified by content: weights, images and user code, never by paths; stored ones are read back."""

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from composed import composed, with_values
from omegaconf import OmegaConf
from PIL import Image

from dmlbench.cli.python_api import run, table
from dmlbench.config import compose, config_folder, read_config
from dmlbench.identity import changed_code, config_id, config_settings, contents, is_complete
from dmlbench.models.resnet_cifar import ResNet20
from dmlbench.results.store import read_result
from dmlbench.types import RunError

SMALL = (
    *("transform=shift", "sampler.classes_per_batch=2", "sampler.images_per_class=2", "fit.max_steps=1"),
    *("num_workers=0", "device=cpu", "fit.log_every=1", "protocol=conventional", "head.out_features=4"),
)


@pytest.fixture
def user_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with a module ``own_loss`` that imports ``own_helper``; imported anew after ``forget``."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "own_helper.py").write_text("SCALE = 1.0\n")
    (tmp_path / "own_loss.py").write_text(
        "from pytorch_metric_learning.losses import ContrastiveLoss\n"
        "from own_helper import SCALE\n"
        "class Scaled(ContrastiveLoss):\n"
        "    def forward(self, *args):\n"
        "        return super().forward(*args)\n"
    )
    yield tmp_path
    forget()


def forget() -> None:
    for name in ("own_loss", "own_helper"):
        sys.modules.pop(name, None)


def images(root: Path) -> Path:
    for label in range(4):
        for i in range(4):
            path = root / f"class{label}" / f"{i}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (32, 32), (60 * label, 60 * i, 0)).save(path)
    return root


def test_weights_count_by_content_not_by_path(tmp_path: Path) -> None:
    first, copy, other = (tmp_path / name for name in ("a.pth", "b.pth", "c.pth"))
    first.write_bytes(b"one")
    copy.write_bytes(b"one")
    other.write_bytes(b"two")
    cfg, ids = composed(), []
    for path in (first, copy, other):
        cfg.backbone.weights_file = str(path)
        ids.append(config_id(cfg))
    assert ids[0] == ids[1] != ids[2]
    cfg.backbone.weights_file = f"{tmp_path}/elsewhere/a.pth"
    assert contents(cfg) == {"backbone.weights_file": "a.pth"}


def test_data_roots_do_not_count_but_options_do(tmp_path: Path) -> None:
    def of(*overrides: str) -> str:
        return config_id(with_values(*overrides, base=("dataset=folder",)))

    assert of() == of(f"dataset.table.root={tmp_path}") == of(f"paths.data_dir={tmp_path}")
    assert of(f"dataset.table.csv={tmp_path}/list.csv") == of("dataset.table.csv=/elsewhere/list.csv") != of()
    assert of("dataset.name=mine") != of()


@pytest.mark.slow
def test_a_second_machine_completes_the_table(tmp_path: Path) -> None:
    """Runs of one config under another root and with another path of the same weights share their folder."""
    weights = tmp_path / "weights.pth"
    torch.save(ResNet20().state_dict(), weights)
    machines = []
    for name in ("one", "two"):
        images(tmp_path / name / "folder")
        shutil.copy(weights, tmp_path / name / f"{name}.pth")
        machines.append((f"paths.data_dir={tmp_path / name}", f"backbone.weights_file={tmp_path / name / name}.pth"))
    output = f"paths.output_dir={tmp_path / 'out'}"
    shared = ("dataset=folder", *SMALL, "protocol.num_repeats=2", output)
    first = run(*shared, *machines[0])
    second = run(*shared, *machines[1], "repeat=1")
    assert first.parent == second.parent
    assert run(*shared, *machines[1]) == first  # complete
    (row,) = table(output_dir=tmp_path / "out").to_dict("records")
    assert "PARTIAL" not in str(row["notes"])


def test_changed_user_code_is_another_config(user_code: Path) -> None:
    cfg = composed("loss=contrastive")
    default = config_id(cfg)
    cfg.loss._target_ = "own_loss.Scaled"
    before = config_id(cfg)
    assert config_id(cfg) == before != default
    source = (user_code / "own_loss.py").read_text()
    (user_code / "own_loss.py").write_text(source.replace("return super", "return 0.0 * super"))
    changed = config_id(cfg)
    (user_code / "own_loss.py").write_text(source)
    (user_code / "own_helper.py").write_text("SCALE = 2.0\n")
    assert len({before, changed, config_id(cfg)}) == 3


def test_a_process_keeps_the_code_that_it_imported(user_code: Path) -> None:
    cfg = compose("train", ["loss=contrastive", "loss._target_=own_loss.Scaled"])
    __import__("own_loss")
    before = contents(cfg)
    assert before.keys() == {"code.own_helper.py", "code.own_loss.py"}
    (user_code / "own_loss.py").write_text("Scaled = None\n")
    assert contents(cfg) == before
    forget()
    assert contents(cfg) != before


def test_runs_of_a_changed_loss_are_rows_of_their_own(user_code: Path) -> None:
    images(user_code / "data" / "folder")
    given = (
        *("dataset=folder", "loss=contrastive", "loss._target_=own_loss.Scaled", *SMALL, "protocol.num_repeats=1"),
        *(f"paths.data_dir={user_code}/data", f"paths.output_dir={user_code}/out"),
    )
    old = run(*given)
    forget()
    module = user_code / "own_loss.py"
    module.write_text(module.read_text().replace("return super", "return 0.0 * super"))
    new = run(*given)
    assert new.parent != old.parent
    with pytest.raises(RunError, match="holds the result of another configuration"):
        is_complete(compose("train", given), old)
    codes = [read_result(path)["code_sha256"] for path in (old, new)]
    assert codes[0]["own_loss.py"] != codes[1]["own_loss.py"] and codes[0]["own_helper.py"] == codes[1]["own_helper.py"]
    assert config_settings(read_config(new / "config.yaml"))["code.own_loss.py"] == codes[1]["own_loss.py"]
    rows = table(output_dir=user_code / "out")["row"]
    assert len(set(rows)) == 2


def test_a_run_of_other_images_is_not_complete(tmp_path: Path) -> None:
    images(tmp_path / "data" / "folder")
    given = (*("dataset=folder", *SMALL, f"paths.data_dir={tmp_path}/data", f"paths.output_dir={tmp_path}/out"),)
    run(*given)
    other = images(tmp_path / "other" / "folder")
    Image.new("RGB", (32, 32), "white").save(other / "class0" / "5.png")
    with pytest.raises(RunError, match="holds the result of other data"):
        run(*given, f"paths.data_dir={tmp_path}/other")
    run(*given)
    Image.new("RGB", (32, 32), "white").save(tmp_path / "data" / "folder" / "class0" / "5.png")
    with pytest.raises(RunError, match="holds the result of other data"):  # although this process has read them before
        run(*given)


def test_changed_code_of_a_model_is_noticed_when_it_is_loaded(user_code: Path) -> None:
    of_loss = compose("train", ["loss=contrastive", "loss._target_=own_loss.Scaled"])
    of_model = compose("train", ["pooling._target_=own_loss.Scaled"])
    for code, changed in (({"own_loss.py": "of then"}, ["own_loss.py"]), ({}, [])):
        assert changed_code(of_model, {"code_sha256": code}) == changed
    assert changed_code(of_loss, {"code_sha256": {"own_loss.py": "of then"}}) == []


@pytest.mark.parametrize("content", [b"fit: [1", b"- 1\n", b"\xff\xfe\x00fit", b"3"])
def test_a_damaged_one_is_named_with_a_remedy(tmp_path, content) -> None:
    (tmp_path / "config.yaml").write_bytes(content)
    with pytest.raises(RunError, match=r"config\.yaml is damaged .*dmlbench clean"):
        read_config(tmp_path / "config.yaml")
    (tmp_path / "config.yaml").unlink()
    with pytest.raises(RunError, match=r"config\.yaml is missing\..*dmlbench clean.*run it again"):
        read_config(tmp_path / "config.yaml")


def test_a_stored_configuration_is_read_as_omegaconf_reads_it(tmp_path) -> None:
    values = "1e-4, 1.e3, -.inf, .5, 1_000, 0x1f, 2020-01-01, yes, 'no', null, ~, '${b.c}', 1e5, 08"
    text = f"a: [{values}]\nb:\n  c: é\n  1: ''\n  d: ???\n  e: 1:30\n"
    (tmp_path / "config.yaml").write_text(text, encoding="utf-8")
    shipped = [*config_folder().glob("loss/*.yaml"), config_folder() / "recipe" / "gsp.yaml"]
    assert len(shipped) > 20
    for path in (tmp_path / "config.yaml", *shipped):
        assert read_config(path) == OmegaConf.to_container(OmegaConf.load(path), resolve=False), path
    (tmp_path / "config.yaml").write_text("fit: {max_steps: 3, max_steps: 4}\n")
    with pytest.raises(RunError, match=r"damaged .*'max_steps' occurs twice"):
        read_config(tmp_path / "config.yaml")
