"""Every command of the README runs, on small data made here and with fewer steps."""

import re
import shlex
import zipfile
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from PIL import Image
from small_data_sets import role_of, write_cars196, write_cub200, write_inshop, write_photo, write_sop

from dmlbench import build
from dmlbench.cli.front import compose
from dmlbench.cli.main import main
from dmlbench.data.readers.cifar import CLASSES_100
from dmlbench.models.bninception import BNInception

SMALLER = ("fit.max_steps=2", "fit.validate_every=2", "fit.warmup_steps=0", "fit.patience=null", "device=cpu")
GLYPHS = {
    "glyphs": [f"dataset.table.{a}" for a in ("num_classes=16", "images_per_class=8", "image_size=32")],
    "omniglot": [f"dataset.table.{a}" for a in ("image_size=32", "check_counts=false")],
}
PHOTOS = (
    *("transform.train.resize=40", "transform.train.crop=32"),
    *("transform.eval.resize=40", "transform.eval.crop=32"),
    *("sampler.classes_per_batch=2", "sampler.images_per_class=2"),
)


def commands(text: str) -> list[str]:
    """Lines of the fenced blocks that are marked as bash, without comments."""
    blocks = re.findall(r"```bash\n(.*?)```", text, flags=re.DOTALL)
    return [line for block in blocks for line in block.splitlines() if line.strip()]


def _drawings(file: Path) -> None:
    """Characters in the layout of Omniglot's archives."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(file, "w") as archive:
        for character in range(16):
            for drawing in range(4):
                buffer = BytesIO()
                pixels = np.random.default_rng([character, drawing]).random((105, 105)) < 0.5
                Image.fromarray(pixels).save(buffer, "PNG")
                name = f"{file.stem}/{file.stem}/character{character + 1:02d}/{character:04d}_{drawing + 1:02d}.png"
                archive.writestr(name, buffer.getvalue())


@pytest.fixture
def data(tmp_path) -> Path:
    """Sixteen classes of four images in the published layout of every data set that the README names."""
    root = tmp_path / "data"
    for part in ("background", "evaluation"):
        _drawings(root / "omniglot" / f"images_{part}.zip")
    write_cars196(root / "cars196")
    write_cub200(root / "CUB_200_2011")
    write_sop(root / "Stanford_Online_Products")
    write_inshop(root / "In-shop")
    for label in range(16):
        for i in range(4):
            write_photo(root / "mine" / f"class_{label:02d}" / f"{i}.jpg", label)
            write_photo(root / "shop" / f"{label}_{i}.jpg", label)
    for name, labels in (("to_train.txt", range(8)), ("to_test.txt", range(8, 16))):
        (root / "mine" / name).write_text("".join(f"class_{label:02d}\n" for label in labels))
    lines = [f"{label}_{i}.jpg,{label},{role_of(label, i)}\n" for label in range(16) for i in range(4)]
    (root / "shop" / "list.csv").write_text("path,label,role\n" + "".join(lines))
    for label, name in enumerate(CLASSES_100[::6]):
        for i in range(4):
            write_photo(root / "cifar100" / ("train", "test")[i % 2] / name / f"{i}.png", label, side=32)
    for part in ("train", "test"):  # by these folders the data set is recognized
        (root / "cifar100" / part / CLASSES_100[0]).mkdir(exist_ok=True)

    (tmp_path / "weights").mkdir()
    torch.save(BNInception(pretrained=False).state_dict(), tmp_path / "weights" / "bn_inception-52deb4733.pth")
    return root


def _with_run_directories(line: str, outputs: Path) -> str:
    """``<run directory>`` and ``<another>`` stand for runs with a pooling, ``<AVSL run directory>`` for one of AVSL."""
    runs = sorted(checkpoint.parent for checkpoint in outputs.glob("*/*/*/best.ckpt"))
    of_avsl = [run for run in runs if "-avsl-" in run.parent.name]
    pooled = [run for run in runs if run not in of_avsl]
    for place, run in (*zip(("<run directory>", "<another>"), pooled, strict=False),
                       *zip(("<AVSL run directory>",), of_avsl, strict=False)):  # fmt: skip
        line = line.replace(place, str(run))
    return line


@pytest.mark.slow
@pytest.mark.parametrize("about_avsl", [False, True])
def test_every_command_of_the_readme_runs(repository, data, tmp_path, monkeypatch, capsys, about_avsl) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DMLBENCH_DATA", str(data))
    monkeypatch.setenv("DMLBENCH_OUTPUT", str(tmp_path / "outputs"))
    monkeypatch.setenv("DMLBENCH_CACHE", str(tmp_path / "cache"))
    rows, labels = np.random.default_rng(0).normal(size=(12, 4)), np.arange(12) % 3
    for name in ("x.npz", "query.npz", "gallery.npz"):
        np.savez(tmp_path / name, rows=rows, labels=labels)
    np.save(tmp_path / "x.npy", rows)
    np.save(tmp_path / "y.npy", labels)
    lines = commands((repository / "README.md").read_text(encoding="utf-8"))
    assert len(lines) > 15
    # AVSL's commands use no other ones' runs, so that two processes can share the work.
    for line in (line for line in lines if ("avsl" in line.lower()) == about_avsl):
        # One repeat stands for three, and mostly a small network for ResNet50, whose checkpoints take seconds.
        line = line.replace("repeat=0,1,2", "repeat=0")
        if "cub200" not in line and "pretrained" not in line:
            line = line.replace("backbone=resnet50", "backbone=resnet20_small")
        line = line.replace("$DMLBENCH_DATA", str(data)).replace("$DMLBENCH_WEIGHTS", str(tmp_path / "weights"))
        line = _with_run_directories(line, tmp_path / "outputs" / "glyphs_collage")
        program, command, *arguments = shlex.split(line, comments=True)
        assert program == "dmlbench"
        smaller: list[str] = []  # before the line's own arguments, which overrule them
        if command == "train":
            smaller += SMALLER
            name = next((a.split("=")[1] for a in arguments if re.match("(dataset|experiment)=", a)), "glyphs")
            if name in ("cub200", "cars196", "gsp_fair", "gsp/table2", "sop", "inshop", "folder"):
                smaller += PHOTOS
                if not any("weights_file" in a or "pretrained" in a or "resnet20" in a for a in arguments):
                    smaller += ["backbone.pretrained=false"]
                if name.startswith("gsp"):
                    smaller += ["fold=0", "repeat=0"]
            else:
                smaller += ["sampler.classes_per_batch=4", "sampler.images_per_class=4"]
            if name in ("glyphs", "omniglot"):
                smaller += GLYPHS[name]
            elif name.startswith("avsl/glyphs"):
                smaller += [*GLYPHS["glyphs"], "fold=0", "repeat=0"]
            elif name != "folder" and "dataset" in line:
                smaller += ["dataset.table.check_counts=false"]
        elif command == "data" and arguments[0] == "verify":
            arguments.append("dataset.table.check_counts=false")
        elif command == "data" and arguments[0] == "prepare":
            arguments += ["accept_other_checksum=true", "dataset.table.check_counts=false"]
        elif command == "report":
            smaller += ["queries=2"]
        with pytest.raises(SystemExit) as info:
            flags = [arguments.pop(0)] if arguments[:1] == ["-m"] else []
            main([command, *flags, *smaller, *arguments])
        captured = capsys.readouterr()
        assert info.value.code == 0, f"{line}\n{captured.err[-2000:]}"


def test_readme_names_the_two_commands_and_only_measured_numbers(repository) -> None:
    text = (repository / "README.md").read_text(encoding="utf-8")
    assert "make demo" in text
    assert "make test" in text
    for picture in re.findall(r"!\[[^\]]*\]\(([^)]+)\)", text):
        assert (repository / picture).is_file(), picture


def test_readme_has_a_row_for_every_loss_with_formula_source_and_reduction(repository) -> None:
    text = (repository / "README.md").read_text(encoding="utf-8")
    section = text.split("\n## Losses\n")[1].split("\n## ")[0]
    rows = re.findall(r"^\| `(\w+)` \| ([^|]+) \| ([^|]+) \| ([^|]+) \|$", section, flags=re.MULTILINE)
    assert sorted(row[0] for row in rows[1:]) == sorted(x.stem for x in (repository / "conf" / "loss").glob("*.yaml"))


@pytest.mark.slow
def test_readme_has_a_row_for_every_pooling_with_its_parameters(repository) -> None:
    text = (repository / "README.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| `(\w+)` \| [^|]+ \| ([\d,]+) \| [\d.]+ \|", text, flags=re.MULTILINE))
    options = sorted({file.stem for file in (repository / "conf" / "pooling").glob("*.yaml")} - {"none"})
    assert sorted(rows) == options
    cfg = compose("train", ["head.out_features=128"])
    OmegaConf.update(cfg, "runtime.num_channels", 1024)
    OmegaConf.update(cfg, "runtime.map_size", [7, 7])
    for option in options:
        node = OmegaConf.load(repository / "conf" / "pooling" / f"{option}.yaml")
        if "_target_" not in node:  # it stands on another option; composing takes half a second
            node = compose("train", [f"pooling={option}"]).pooling
        pooling = build.component(
            OmegaConf.merge(OmegaConf.masked_copy(cfg, ["runtime", "head", "fit"]), {"pooling": node}).pooling
        )
        assert sum(p.numel() for p in pooling.parameters() if p.requires_grad) == int(rows[option].replace(",", ""))
