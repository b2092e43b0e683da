"""A pooling in a module of the user's own, outside of the project: commands and functions find it, or say how to."""

import importlib
import json
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from small_data_sets import write_photo

import dmlbench as db
from dmlbench.apps.export import export_run
from dmlbench.components import component, imported
from dmlbench.config import read_config
from dmlbench.results.rules import rule_named
from dmlbench.results.store import CONFIG, read_result, write_result
from dmlbench.types import ConfigError, RunError, missing_module

MODULE = """
from dmlbench.models.pooling.base import Pooled, WeightedPooling, shares, weighted_sum


class Energy(WeightedPooling):
    def __init__(self, power: float) -> None:
        super().__init__()
        self.power = power

    def forward(self, x, project):
        weights = shares(x.square().mean(dim=1) ** self.power)
        return Pooled(project(weighted_sum(x, weights)), {"weights": weights})
"""
OPTION = "# Places count by their energy.\n_target_: mine.Energy\npower: 1.0\n"
SHORT = (
    *("fit.max_steps=1", "fit.validate_every=1", "fit.warmup_steps=0", "device=cpu", "protocol=held_out"),
    *("sampler.classes_per_batch=2", "sampler.images_per_class=2", "transform.train.padding=2", "head.out_features=8"),
    *(f"dataset.table.{key}" for key in ("num_classes=12", "images_per_class=4", "image_size=32")),
    *("protocol.num_repeats=1", "pooling=energy"),
)


def write_plug_in(root: Path) -> Path:
    """Write ``mine.py`` and beside it the folder of options, which is returned."""
    (root / "my_conf" / "pooling").mkdir(parents=True)
    (root / "mine.py").write_text(MODULE)
    (root / "my_conf" / "pooling" / "energy.yaml").write_text(OPTION)
    return root / "my_conf"


def train(root: Path, config_dir: Path, *more: str) -> Path:
    places = (f"paths.output_dir={root}/out", f"paths.cache_dir={root}/cache")
    return db.run(*SHORT, *places, *more, config_dir=config_dir)


def forget(root: Path) -> None:
    """Make this process one that never saw the module."""
    sys.modules.pop("mine", None)
    sys.path[:] = [place for place in sys.path if not Path(place).is_relative_to(root)]
    imported.cache_clear()
    importlib.invalidate_caches()


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    root = tmp_path_factory.mktemp("plug_in")
    yield train(root, write_plug_in(root))
    forget(root)


@pytest.fixture
def root(run_dir: Path) -> Iterator[Path]:
    """The folder of the module and the options, of which the process knows nothing."""
    root = run_dir.parents[4]
    forget(root)
    yield root
    forget(root)


def test_a_run_remembers_the_folder_of_options_which_is_not_part_of_its_hash(root, run_dir, tmp_path) -> None:
    assert read_config(run_dir / CONFIG)["runtime"]["config_dir"] == str(root / "my_conf")
    shutil.copytree(root / "my_conf", tmp_path / "my_conf")
    shutil.copy(root / "mine.py", tmp_path)
    try:
        assert train(root, tmp_path / "my_conf") == run_dir  # complete
    finally:
        forget(tmp_path)


COMMANDS = {
    "evaluate": ("run={run}", "from_checkpoint=true", "device=cpu", "num_workers=0"),
    "export": ("run={run}", "output={place}/folder", "formats=[]"),
    "explain": ("run={run}", "num_images=1", "device=cpu", "output={place}/x.png"),
    "embed": ("model={run}", "images={place}/images", "output={place}/x.safetensors", "device=cpu"),
}


@pytest.mark.fast_sample(2)  # evaluate and embed
@pytest.mark.parametrize("name", COMMANDS)
def test_commands_find_the_module_or_say_how_to(command, root, run_dir, tmp_path, monkeypatch, name: str) -> None:
    monkeypatch.chdir(root)
    if name == "embed":
        write_photo(tmp_path / "images" / "a" / "0.jpg", 0)
    given = [argument.format(run=run_dir, place=tmp_path) for argument in COMMANDS[name]]
    remedy = "add --config-dir my_conf (in Python config_dir='my_conf') or set PYTHONPATH"
    assert f"Cannot import `mine` (needed by the pooling): {remedy}" in command(name, *given, code=2)
    assert "mine" not in sys.modules and str(root) not in sys.path  # the remembered folder is told, not used
    if name == "evaluate":
        command(name, *given[:1])  # the stored embeddings need no pooling
    command(name, "--config-dir", "my_conf", *given)
    assert "mine" in sys.modules


def test_python_finds_the_module_or_says_how_to(root, run_dir, tmp_path, monkeypatch) -> None:
    table = component(read_config(run_dir / CONFIG)["dataset"]["table"])
    for modules in ((), ("mine",)):
        with pytest.raises(ConfigError, match=r"Cannot import `mine` \(needed by the pooling\): add --config-dir /.*"):
            db.load(run_dir, device="cpu", modules=modules)
    assert "mine" not in sys.modules
    with pytest.raises(ConfigError, match="config_dir: got nowhere, expected a folder of options"):
        db.load(run_dir, config_dir="nowhere")
    rows = db.load(run_dir, device="cpu", config_dir=root / "my_conf").embed(table.pixels[:3])
    forget(root)
    monkeypatch.syspath_prepend(root)
    assert torch.equal(db.load(run_dir, device="cpu").embed(table.pixels[:3]), rows)


def shown_in_report(command, root: Path) -> dict[str, Any]:
    """What a report of all runs shows."""
    command("report", f"paths.output_dir={root}/out", "queries=1", "nearest=1", "device=cpu")
    text = (root / "out/tables/report.html").read_text()
    (data,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', text, flags=re.DOTALL)
    (group,) = json.loads(data)["groups"]
    return group


@pytest.mark.slow
def test_a_run_that_cannot_be_read_is_listed_in_the_report_which_shows_the_others(command, root, run_dir) -> None:
    other = train(root, root / "my_conf", "pooling=gap")
    forget(root)
    command("aggregate", f"paths.output_dir={root}/out")  # compares stored rows, for which no pooling is needed
    group = shown_in_report(command, root)
    assert len(group["leaderboard"]["rows"]) == 2
    (reason,) = group["overlays"]["why"].values()
    assert "Cannot import `mine` (needed by the pooling): add --config-dir" in reason
    sound, config = (other / "result.json").read_bytes(), (other / "config.yaml").read_bytes()
    place = other.relative_to(root / "out")
    result = {key: value for key, value in read_result(other).items() if key not in ("config_file_sha256", "schema")}
    try:
        (other / "result.json").write_bytes(sound[:-30])
        leaderboard = shown_in_report(command, root)["leaderboard"]
        assert [row["label"] for row in leaderboard["rows"]] == ["energy"]
        (note,) = (note for note in leaderboard["notes"] if note.startswith("LEFT OUT"))
        assert note.startswith(f"LEFT OUT: {place.parent}: {place}/result.json is damaged (")
        (other / "config.yaml").write_bytes(config.replace(b"dmlbench.models.projection.Projection", b"mine.Head"))
        write_result(other, result)
        (note,) = (n for n in shown_in_report(command, root)["leaderboard"]["notes"] if n.startswith("LEFT OUT"))
        assert note.startswith(f"LEFT OUT: {place.parent}: Cannot import `mine` (needed by the head): add --config-dir")
        picture = ("report", "--picture", f"paths.output_dir={root}/out", "queries=1", "nearest=1")
        assert "written: " in command(*picture)
        assert "Cannot import `mine` (needed by the head)" in command(*picture, "configs=*gap*", code=1)
    finally:
        (other / "result.json").write_bytes(sound)
        (other / "config.yaml").write_bytes(config)


def test_an_exported_folder_names_no_place_and_needs_trust_and_the_module(root, run_dir, tmp_path) -> None:
    folder = tmp_path / "folder"
    db.load(run_dir, config_dir=root / "my_conf")
    export_run(run_dir, folder, formats=[])
    assert not any(str(root) in path.read_text("utf-8", "replace") for path in folder.iterdir())
    again = tmp_path / "again"
    with pytest.raises(ConfigError, match=r"add modules=\[mine\]"):
        export_run(folder, again, formats=[])
    export_run(folder, again, formats=[], modules=["mine"])
    forget(root)
    with pytest.raises(ConfigError, match=r"add modules=\[mine\]"):
        db.load(again)
    with pytest.raises(ConfigError, match=r"Cannot import `mine` .* --config-dir '?<folder of options beside mine.py>"):
        db.load(again, modules=["mine"])
    model = db.load(again, modules=["mine"], config_dir=root / "my_conf")
    assert type(model.network.pooling).__module__ == "mine"


def test_a_module_that_fails_is_named_with_its_error(root, run_dir, tmp_path, monkeypatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    for source, error in (("x = (", "SyntaxError"), ("import nowhere_at_all", "ModuleNotFoundError: No module named")):
        (tmp_path / "mine.py").write_text(source)
        importlib.invalidate_caches()
        with pytest.raises(ConfigError, match=rf"'mine' cannot be imported: {error}"):
            db.load(run_dir)


def test_a_remembered_folder_is_told_only_where_it_is_one(tmp_path) -> None:
    (folder := tmp_path / "a conf").mkdir()
    assert f"add --config-dir '{folder}' (in Python config_dir='{folder}')" in missing_module(
        "mine", "loss", str(folder)
    )
    for other in (None, str(tmp_path / "gone"), f"{folder}\x1b[2J", 3, ["x"]):
        assert "add --config-dir <folder of options beside mine.py>" in missing_module("mine", "loss", other)


def test_any_part_says_how_its_module_is_found() -> None:
    with pytest.raises(ConfigError, match=r"Cannot import `nowhere` \(needed by the component\)"):
        component({"_target_": "nowhere.at.All"})
    with pytest.raises(RunError, match=r"Cannot import `nowhere` \(needed by the aggregation\)"):
        rule_named("nowhere.rule")
    with pytest.raises(ConfigError, match=r"Cannot import `nowhere` \(needed by the loss\)"):
        db.run("loss._target_=nowhere.Loss")
