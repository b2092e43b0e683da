"""Every command of the README runs, on small data made here and with fewer steps."""

import re
import shlex
import zipfile
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from scipy.io import savemat

from dmlbench.cli.main import main
from dmlbench.models.bninception import BNInception

SMALLER = ("fit.max_steps=2", "fit.validate_every=2", "fit.patience=null", "device=cpu")
GLYPHS = (
    *("dataset.table.num_classes=16", "dataset.table.images_per_class=8", "dataset.table.image_size=32"),
    *("sampler.classes_per_batch=4", "sampler.images_per_class=4"),
)
PHOTOS = (
    *("dataset.train_transform.resize=40", "dataset.train_transform.crop=32"),
    *("dataset.eval_transform.resize=40", "dataset.eval_transform.crop=32"),
    *("sampler.classes_per_batch=2", "sampler.images_per_class=2"),
)


def commands(text: str) -> list[str]:
    """Lines of the fenced blocks that are marked as bash, without comments."""
    blocks = re.findall(r"```bash\n(.*?)```", text, flags=re.DOTALL)
    return [line for block in blocks for line in block.splitlines() if line.strip()]


def _photo(path: Path, color: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(color).integers(0, 256, (48, 56, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(path)


@pytest.fixture
def data(tmp_path) -> Path:
    """Sixteen classes of four images in the published layout of every data set that the README names."""
    root = tmp_path / "data"
    (root / "omniglot").mkdir(parents=True)
    with zipfile.ZipFile(root / "omniglot" / "images_background.zip", "w") as archive:
        for character in range(16):
            for drawing in range(4):
                buffer = BytesIO()
                pixels = np.random.default_rng([character, drawing]).random((105, 105)) < 0.5
                Image.fromarray(pixels).save(buffer, "PNG")
                name = f"images_background/Greek/character{character + 1:02d}/{character:04d}_{drawing + 1:02d}.png"
                archive.writestr(name, buffer.getvalue())

    classes = [*range(1, 9), *range(99, 107)]
    rows = [(f"car_ims/{label:03d}{i}.jpg", label) for label in classes for i in range(4)]
    for name, label in rows:
        _photo(root / "cars196" / name, label)
    fields = [("relative_im_path", object), ("class", object)]
    annotations = np.array([(name, label) for name, label in rows], dtype=fields)
    names = np.array([f"car {i}" for i in range(1, 197)], dtype=object)
    savemat(root / "cars196" / "cars_annos.mat", {"annotations": annotations, "class_names": names})

    for label in range(16):
        for i in range(4):
            _photo(root / "CUB_200_2011" / "images" / f"{label + 1:03d}.Bird" / f"{i}.jpg", label)
    for folder, csv, tests in (
        ("Stanford_Online_Products", "sop.csv", ("test",) * 4),
        ("In-shop", "inshop.csv", ("query",) * 2 + ("gallery",) * 2),
    ):
        lines = ["path,label,role"]
        for label in range(16):
            for i in range(4):
                _photo(root / folder / f"{label}_{i}.jpg", label)
                lines.append(f"{label}_{i}.jpg,{label + 1},{'train' if label < 8 else tests[i]}")
        (root / folder / csv).write_text("\n".join(lines) + "\n")

    (tmp_path / "weights").mkdir()
    torch.save(BNInception(pretrained=False).state_dict(), tmp_path / "weights" / "bn_inception-52deb4733.pth")
    return root


def test_every_command_of_the_readme_runs(repository, data, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DMLBENCH_OUTPUT", str(tmp_path / "outputs"))
    monkeypatch.setenv("DMLBENCH_CACHE", str(tmp_path / "cache"))
    lines = commands((repository / "README.md").read_text(encoding="utf-8"))
    assert len(lines) > 15
    for line in lines:
        line = line.replace("$DATA", str(data)).replace("$WEIGHTS", str(tmp_path / "weights"))
        program, command, *arguments = shlex.split(line, comments=True)
        assert program == "dmlbench"
        smaller: list[str] = []  # before the line's own arguments, which overrule them
        if command == "train":
            smaller += SMALLER
            if any(a in ("dataset=cars196", "dataset=folder", "experiment=cars196_fair") for a in arguments):
                smaller += PHOTOS
                if not any("weights_file" in a or "pretrained" in a for a in arguments):
                    smaller += ["backbone.pretrained=false"]
                if "experiment=cars196_fair" in arguments:
                    smaller += ["fold=0", "repeat=0", "dataset.table.check_counts=false"]
            elif "experiment=omniglot" in arguments:
                smaller += ["sampler.classes_per_batch=4", "dataset.table.image_size=32"]
            else:
                smaller += GLYPHS
        elif command == "report":
            smaller += ["--queries", "2"]
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
