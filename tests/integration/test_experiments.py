"""Each row of the papers' tables and of our own trains: two steps of its config on small data."""

from pathlib import Path

import pytest
import torch
from commands_of_tables import Command, commands, own_commands
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from small_data_sets import cifar100_of_colors, write_cars196, write_cub200, write_inshop, write_sop

from dmlbench.checks import check
from dmlbench.config import compose
from dmlbench.data.readers import cifar_collage
from dmlbench.results.store import read_result
from dmlbench.runner import run
from dmlbench.training.fit import BEST, HISTORY
from dmlbench.training.log import read_history

COMMANDS = (*commands(), *own_commands())
TABLES = sorted({command.table for command in COMMANDS})
QUICK = ("gsp/table4", "avsl/figure5b")  # the others take some minutes together
# A ResNet20 in place of the networks, and nothing larger than sixteen classes of four images have use for.
AT_MOST = {
    "sampler.classes_per_batch": 4, "sampler.images_per_class": 2, "sampler.batch_size": 8,
    "pooling.num_prototypes": 2, "pooling.memory_rows": 4, "pooling.start_step": 0, "pooling.k": 16,
    "head.out_features": 8, "head.level_size": 8, "head.top_k": 4, "loss.memory_size": 8, "loss.start_step": 0,
    "dataset.table.images_per_class": 4,
    "transform.train.crop": 32, "transform.eval.crop": 32, "transform.eval.resize": 40,
}  # fmt: skip
SHORT = {"max_steps": 2, "validate_every": 2, "patience": None, "warmup_steps": 0, "log_every": 1, "keep": "best"}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("experiments")
    write_cars196(root / "data" / "cars196")
    write_cub200(root / "data" / "CUB_200_2011")
    write_sop(root / "data" / "Stanford_Online_Products")
    write_inshop(root / "data" / "In-shop")
    return root


def made_small(cfg: DictConfig) -> DictConfig:
    """The configuration with less of everything, of the same components but for the network."""
    check(cfg)
    for key, most in AT_MOST.items():
        given = OmegaConf.select(cfg, key)
        if given is not None:
            OmegaConf.update(cfg, key, min(given, most) if isinstance(given, int) else most)
    if "resize" in cfg.transform.train and cfg.transform.train.resize:
        cfg.transform.train.resize = 40
    cfg.fit.update(SHORT)
    levels = {"out_levels": [0, 1, 2]} if "out_levels" in cfg.backbone or "out_indices" in cfg.backbone else {}
    network = {"_target_": "dmlbench.models.resnet_cifar.ResNet20", "stem_stride": 2, "weights_file": None}
    cfg.backbone = OmegaConf.create({**network, "batch_norm": cfg.backbone.batch_norm, **levels})
    if "check_counts" in cfg.dataset.table:
        cfg.dataset.table.check_counts = False
    cfg.feature_cache = None  # the network above trains
    if cfg.head.get("init") == "lda":
        cfg.head.out_features = 4  # of six training classes
    return cfg


def train(command: Command, root: Path, *overrides: str) -> Path:
    paths = [f"paths.{name}_dir={root / name}" for name in ("output", "data", "cache")]
    overrides = (f"experiment={command.table}", *command.overrides, *overrides, "device=cpu", "num_workers=0", *paths)
    return run(made_small(compose("train", list(overrides))))


def first_of_each_row(table: str) -> list[Command]:
    found: dict[str, Command] = {}
    for command in COMMANDS:
        if command.table == table:
            found.setdefault(command.score.row, command)
    return list(found.values())


@pytest.mark.parametrize("table", [pytest.param(t, marks=() if t in QUICK else pytest.mark.slow) for t in TABLES])
def test_every_row_trains_and_all_of_its_parts_are_at_work(
    table: str, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cifar_collage, "cifar100", lambda *_, **__: cifar100_of_colors(4))
    for i, command in enumerate(first_of_each_row(table)):
        overrides = list(command.overrides)
        if "protocol.stage=2" in overrides:  # needs the plan of stage 1, which has all of the row
            run_dir = train(command, root, "protocol.stage=1")
            if i == 0:
                assert (train(command, root) / "result.json").exists()
        else:
            run_dir = train(command, root)
        result = read_result(run_dir)
        assert result["pooling_started"], command
        values = {(step, name): value for step, name, value in read_history(run_dir / HISTORY)}
        assert {step for step, name in values if name == "train/loss"} == {1, 2}, command
        row = command.score.row
        has_zsr = ("GSP" in row and "without ZSR" not in row) or "m=" in row or "mu=" in row
        if table.startswith(("frozen_features", "last_blocks", "reality_check")):  # whose rows name it
            has_zsr = "ZSR" in row
        regularizer = "xml" if "XML" in row else "zsr" if has_zsr else None
        assert {name.removeprefix("train/") for step, name in values if step == 2} >= {regularizer or "loss"}, command
        saved = torch.load(run_dir / BEST, weights_only=True)
        if regularizer == "zsr":
            assert saved["model"]["pooling.prototypes_started"], command
        if "XBM" in row:
            assert saved["objective"]["loss.filled"] == 8, command


@pytest.mark.parametrize(("backbone", "width"), [("bn_inception", 1024), ("resnet50", 2048)])
def test_rows_without_training_suit_backbones_of_other_widths(backbone: str, width: int) -> None:
    for command in first_of_each_row("frozen_features"):
        if "fit=untrained" in command.overrides and command.score.row.endswith("+GAP"):
            cfg = compose("train", ["experiment=frozen_features", *command.overrides, f"backbone={backbone}"])
            check(cfg)
            head = instantiate(cfg.head, in_features=width)
            assert head.out_features <= width, command.score.row
            assert head.out_features == width or "full width" not in command.score.row
