"""README and docs/: their commands and their Python run, their links hold, the site is built without a warning."""

import csv
import os
import re
import shlex
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from html.parser import HTMLParser
from importlib.util import module_from_spec, spec_from_file_location
from io import BytesIO
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
import yaml
from fenced_blocks import blocks
from omegaconf import OmegaConf
from PIL import Image
from small_data_sets import role_of, write_cars196, write_cub200, write_inshop, write_photo, write_sop

import dmlbench
from dmlbench.cli.main import main
from dmlbench.components import component
from dmlbench.config import compose
from dmlbench.data.readers.cifar import CLASSES_100
from dmlbench.evaluation.metrics.registry import METRICS
from dmlbench.models.bninception import BNInception

SMALLER = ("fit.max_steps=2", "fit.validate_every=2", "fit.warmup_steps=0", "fit.patience=null", "device=cpu")
GLYPHS = {
    "glyphs": [f"dataset.table.{a}" for a in ("num_classes=16", "images_per_class=8", "image_size=32")],
    "omniglot": [f"dataset.table.{a}" for a in ("image_size=32", "check_counts=false")],
}
BATCHES = ("sampler.classes_per_batch=4", "sampler.images_per_class=4")
PHOTOS = (
    *("transform.train.resize=40", "transform.train.crop=32"),
    *("transform.eval.resize=40", "transform.eval.crop=32"),
    *("sampler.classes_per_batch=2", "sampler.images_per_class=2"),
)


def pages(repository: Path) -> list[Path]:
    return [repository / "README.md", *sorted((repository / "docs").glob("*.md"))]


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
    """Sixteen classes of four images in the published layout of every data set that the pages name."""
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
@pytest.mark.parametrize("group", range(3))
def test_every_command_and_all_python_of_readme_and_docs_runs(
    repository, data, tmp_path, monkeypatch, capsys, group
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DMLBENCH_DATA", str(data))
    monkeypatch.setenv("DMLBENCH_OUTPUT", str(tmp_path / "outputs"))
    monkeypatch.setenv("DMLBENCH_CACHE", str(tmp_path / "cache"))
    train = dmlbench.run
    smaller = lambda words: _smaller(shlex.join(["dmlbench", "train", *words]), tmp_path, data)[1:]  # noqa: E731
    monkeypatch.setattr(dmlbench, "run", lambda *overrides: train(*smaller(overrides)))
    rows, labels = np.random.default_rng(0).normal(size=(12, 4)), np.arange(12) % 3
    for name in ("x.npz", "query.npz", "gallery.npz"):
        np.savez(tmp_path / name, rows=rows, labels=labels)
    np.save(tmp_path / "x.npy", rows)
    np.save(tmp_path / "y.npy", labels)
    for name in ("a.jpg", "b.jpg"):
        write_photo(tmp_path / name, 0, side=32)
    glyphs, trained, count = tmp_path / "outputs" / "glyphs_collage", set(), 0
    # These pages use no other ones' runs, so that processes can share the work.
    apart = {"avsl": 1, "data": 2, "reproducing": 2}
    for page in (page for page in pages(repository) if apart.get(page.stem, 0) == group):
        names: dict[str, Any] = {}
        for block in blocks(page):
            if block.title:
                (tmp_path / block.title).parent.mkdir(parents=True, exist_ok=True)
                (tmp_path / block.title).write_text(block.text)
            elif block.language == "python":
                exec(_with_run_directories(block.text, glyphs), names)
                count += 1
            elif block.language == "bash":
                for line in filter(str.strip, block.text.splitlines()):
                    if line.startswith("dmlbench train") and tuple(shlex.split(line, comments=True)) in trained:
                        continue  # several pages begin with the same run
                    trained.add(tuple(shlex.split(line, comments=True)))
                    arguments = _smaller(line, tmp_path, data)
                    with pytest.raises(SystemExit) as info:
                        main(arguments)
                    captured = capsys.readouterr()
                    assert info.value.code == 0, f"{page.name}: {line}\n{captured.err[-2000:]}"
                    count += 1
            else:
                assert block.language in ("", "yaml"), f"{page.name}: a block of {block.language} that nothing runs"
    assert count >= (25, 4, 20)[group]


def _smaller(line: str, tmp_path: Path, data: Path) -> list[str]:
    """Arguments of a line of a page, for small data and with fewer steps."""
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
        smaller += [each for each in SMALLER if "max_steps" not in each or "fit=untrained" not in arguments]
        name = next((a.split("=")[1] for a in arguments if re.match("(dataset|experiment)=", a)), "glyphs")
        if name in ("cub200", "cars196", "gsp_fair", "gsp/table2", "sop", "inshop", "folder", "frozen_features"):
            smaller += PHOTOS
            if not any("weights_file" in a or "pretrained" in a or "resnet20" in a for a in arguments):
                smaller += ["backbone.pretrained=false"]
            if name.startswith(("gsp", "frozen")):
                smaller += ["fold=0", "repeat=0"]
        else:
            smaller += BATCHES
        if name in ("glyphs", "demo"):
            smaller += GLYPHS["glyphs"]
        elif name == "omniglot":
            smaller += GLYPHS["omniglot"]
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
    flags = [arguments.pop(0)] if arguments[:1] == ["-m"] else []
    return [command, *flags, *smaller, *arguments]


@pytest.fixture(scope="module")
def tables(repository) -> ModuleType:
    spec = spec_from_file_location("docs_tables", repository / "scripts" / "docs_tables.py")
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Page(HTMLParser):
    """What a page of the site links to, what can be linked to in it, and the code in its tables."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.anchors: set[str] = set()
        self.first_configs: set[str] = set()
        self._row: list[str] | None = None
        self.feed(file.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self.links += [value for key in ("href", "src") if (value := values.get(key))]
        self.anchors |= {value for key in ("id", "name") if (value := values.get(key))}
        if tag == "tr":
            self._row = []

    def handle_data(self, text: str) -> None:
        if self._row is not None and text.strip():
            self._row.append(text)
            self.first_configs.add(self._row[0])


def test_the_site_is_built_without_a_warning_and_all_its_links_hold(repository, tmp_path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "-d", str(tmp_path)], cwd=repository, text=True,
        capture_output=True, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
    )  # fmt: skip
    assert done.returncode == 0 and "WARNING" not in done.stderr, done.stderr[-3000:]
    site = {file: Page(file) for file in tmp_path.rglob("*.html")}
    for file, page in site.items():
        for link in page.links:
            place, _, anchor = link.partition("#")
            if re.match("https?:|data:|mailto:", place):
                continue
            target = (file.parent / place).resolve() if place else file
            if file.name == "404.html" and place.startswith("/"):
                continue  # this page alone does not know where it lies
            assert target.exists(), f"{file.relative_to(tmp_path)}: {link}"
            if anchor and target.suffix == ".html" and anchor != "__skip":
                assert anchor in site[target].anchors, f"{file.relative_to(tmp_path)}: {link}"
        parts = r'<(?:script|img|link rel="stylesheet")[^>]*(?:src|href)="(https?:[^"]+)"'
        loaded = re.findall(parts, file.read_text(encoding="utf-8"))
        assert not loaded, f"{file.name} loads {loaded} from elsewhere"
    tables = {"loss": "losses", "pooling": "poolings", "regularizer": "losses", "protocol": "protocols"}
    for group, name in tables.items():
        options = {file.stem for file in (repository / "conf" / group).glob("*.yaml")}
        assert options <= site[tmp_path / f"{name}.html"].first_configs, group
    assert set(METRICS) <= site[tmp_path / "evaluation.html"].first_configs
    assert "glyphs_collage" in site[tmp_path / "all_scores.html"].first_configs
    assert {"dmlbenchrun", "dmlbenchevaluationevaluateevaluate_arrays"} <= site[tmp_path / "python.html"].anchors


def _links(page: Path) -> Iterator[tuple[str, str]]:
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if not link.startswith(("http:", "https:")):
            place, _, anchor = link.partition("#")
            yield place, anchor


def test_pages_keep_their_limits_of_words(repository) -> None:
    nav = (repository / "mkdocs.yml").read_text(encoding="utf-8").split("\nnav:")[1].split("\n\n")[0]
    reference = re.findall(r"\S+\.md", nav.split("- Reference:")[1].split("- Results:")[0])
    pages = {page: 900 for page in (repository / "docs").rglob("*.md") if page.name not in reference}
    pages |= {repository / "README.md": 700, repository / "CONTRIBUTING.md": 2000}
    assert len(pages) > 20
    too_long = {page.name: (words, limit) for page, limit in pages.items()
                if (words := len(page.read_text(encoding="utf-8").split())) > limit}  # fmt: skip
    assert not too_long


def test_a_published_folder_has_a_small_readme(repository) -> None:
    """Command, commit, hardware and time, in at most five notes; the rest is in findings.md."""
    readmes = list((repository / "outputs/published").glob("*/README.md"))
    assert len(readmes) > 15
    for readme in readmes:
        text = readme.read_text(encoding="utf-8")
        assert len(re.findall("^- ", text, flags=re.MULTILINE)) <= 5, readme
        assert len(text.split()) <= 400, readme


def test_published_files_name_no_folder_of_the_machine_that_made_them(repository) -> None:
    files = [path for path in (repository / "outputs/published").rglob("*") if path.suffix in (".md", ".tex", ".csv")]
    assert len(files) > 100
    for path in files:
        assert not re.search(r"(?<![\w.])/(tmp|root|home|work|Users)/", path.read_text(encoding="utf-8")), path


def test_links_of_readme_and_docs_hold_in_the_repository(repository) -> None:
    for page in [*pages(repository), *(repository / "docs" / "tutorials").glob("*.md")]:
        for place, anchor in _links(page):
            target = page.parent / place if place else page
            assert target.is_file(), f"{page.name}: {place}"
            if anchor:
                titles = re.findall("^#+ (.+)$", target.read_text(encoding="utf-8"), flags=re.MULTILINE)
                assert anchor in {re.sub(r"[^\w\- ]", "", title).lower().replace(" ", "-") for title in titles}, anchor


FROZEN_ROWS = {
    "GAP": "GAP", "GMP": "GMP", "GAP + GMP": "GAP+GMP", "GeM": "GeM", "GSP": "GSP", "GSP + ZSR": "GSP+ZSR",
    "DeLF": "DeLF", "NetVLAD": "NetVLAD", "attention pooling": "AttentionPool", "SimPool": "SimPool",
}  # fmt: skip


def test_the_table_of_frozen_backbones_has_the_published_numbers(repository) -> None:
    published = {}
    for name in ("netvlad", "gem_start", "frozen_features"):  # whose GAP rows count
        with (repository / f"outputs/published/frozen_features/{name}.csv").open(encoding="utf-8") as file:
            for row in csv.DictReader(file):
                published[row["row"]] = {
                    key.split(") ")[1]: value for key, value in row.items() if key.startswith("separated")
                }
    text = (repository / "docs/frozen.md").read_text(encoding="utf-8")
    table = text.split("## Poolings and heads on a frozen backbone")[1].split("\n## ")[0]
    _, _, *rows = [line.strip("| ").split(" | ") for line in table.splitlines() if line.startswith("|")]
    assert [row[0] for row in rows] == list(FROZEN_ROWS)
    for label, *cells in rows:
        for head, cell in zip(("Frozen", "Lw", "Lw full width", "C2", "PAnchor"), cells, strict=True):
            row = published.get(f"{head}+{FROZEN_ROWS[label]}")
            scores = row and " / ".join(f"{float(row[f'{metric} mean']):.1f}" for metric in ("P@1", "MAP@R"))
            assert cell.strip("*") == (scores or "–"), (label, head)


NO_LOSS = ("Frozen features", "PCA", "LDA", "Learned whitening", "Learned whitening (1280-D)")


def test_the_pages_count_the_losses_of_the_reality_check_as_published(repository) -> None:
    def ahead(dataset: str, metric: str, reference: str) -> dict[str, float]:
        """Points of the losses that are significantly ahead, greatest first."""
        file = repository / f"outputs/published/reality_check/reality_check-{dataset}-{metric}-differences.csv"
        frame = pd.read_csv(file).query("reference == @reference and difference > 0 and p_holm < 0.05")
        frame = frame[~frame["row"].isin(NO_LOSS)].sort_values("difference", ascending=False)
        return dict(zip(frame["row"], (100 * frame["difference"]).round(2), strict=True))

    cub, cars = ({"metric": "map_at_r", "dataset": dataset} for dataset in ("cub200", "cars196"))
    assert not ahead(**cub, reference="Contrastive")
    assert not ahead("cub200", "p_at_1", "Learned whitening")
    better = ahead(**cars, reference="Contrastive")
    assert list(better) == ["SNR contrastive", "Multi-similarity", "Circle"]
    (xbm,) = ahead("cars196", "p_at_1", "Learned whitening").items()
    assert xbm[0] == "XBM + contrastive"
    above = [len(ahead(**of, reference="Learned whitening")) for of in (cub, cars)]
    snr, similarity, circle = better.values()
    expected = {
        "README.md": (
            "On Cars196, only SNR, multi-similarity and Circle do.",
            f"{above[0]} of 23 losses significantly beat learned whitening on CUB-200-2011, and {above[1]} of 23",
        ),
        "docs/measured.md": (
            "On Cars196, only SNR, multi-similarity and Circle do.",
            f"XBM significantly beats learned whitening (128-D), and only on Cars196 (+{xbm[1]:.2f} points)",
        ),
        "docs/reality_check.md": (
            f"|0|SNR +{snr:.2f}, multi-similarity +{similarity:.2f}, Circle +{circle:.2f}|",
            f"|{above[0]} of 23|{above[1]} of 23|",
            f"in P@1: +{xbm[1]:.2f} (p",
        ),
    }
    for page, sentences in expected.items():
        text = " ".join((repository / page).read_text(encoding="utf-8").split())
        for sentence in sentences:
            assert sentence in text, page


def test_tables_and_api_of_the_pages_are_as_make_docs_writes_them(repository, tables) -> None:
    for page in (repository / "docs").rglob("*.md"):
        text = page.read_text(encoding="utf-8")
        assert tables.with_tables(text) == text, f"{page.name} is out of date: run make docs"
        assert (
            len(re.findall("<!-- (table|api):", text)) == text.count("<!-- end -->") == len(tables.MARKED.findall(text))
        ), page.name


LEFT_OUT = {"_target_", "distance", "reducer"}


def _keys(node: dict[str, Any], prefix: str) -> Iterator[str]:
    for key, value in node.items():
        if key in LEFT_OUT or key == "defaults" or re.match(r"\$\{(runtime|head|pooling)\.", str(value)):
            continue
        if isinstance(value, dict) and "_target_" in value:
            yield from _keys(value, f"{prefix}{key}.")
        elif key != "_partial_":
            yield f"{prefix}{key}"


@pytest.mark.parametrize("group", ["loss", "pooling", "miner", "regularizer", "schedule"])
def test_the_table_of_a_folder_has_all_keys_of_all_its_options(repository, tables, group) -> None:
    expected = []
    for file in sorted((repository / "conf" / group).glob("*.yaml")):
        if file.stem != "none":
            node = yaml.safe_load(file.read_text(encoding="utf-8"))
            expected += [(f"`{file.stem}`", f"`{key}`") for key in _keys(node, f"{group}.")]
    header, _, *rows = [re.split(r" (?<!\\)\| ", line.strip("| ")) for line in tables.keys_table(group).splitlines()]
    assert header == [f"`{group}=`", "key", "default", "meaning"]
    assert [(option, key) for option, key, _, _ in rows] == expected


def test_a_key_without_a_meaning_is_an_error_but_for_fixed_ones(tables, tmp_path, monkeypatch) -> None:
    (tmp_path / "conf/loss").mkdir(parents=True)
    file = tmp_path / "conf/loss/mine.yaml"
    monkeypatch.setattr(tables, "ROOT", tmp_path)
    file.write_text("distance: {p: 2}\nnum_classes: ${runtime.num_classes}\nmargin: 0.2  # gap of distances\n")
    assert tables.keys_table("loss").splitlines()[2:] == ["| `mine` | `loss.margin` | `0.2` | gap of distances |"]
    file.write_text("margin: 0.2\n")
    with pytest.raises(ValueError, match=r"conf/loss/mine\.yaml: margin has no comment"):
        tables.keys_table("loss")


@pytest.mark.slow
def test_heads_of_poolings_tell_their_parameters(repository, tables) -> None:
    heads = tables.options("pooling")
    cfg = compose("train", ["head.out_features=128"])
    OmegaConf.update(cfg, "runtime.num_channels", 1024)
    OmegaConf.update(cfg, "runtime.map_size", [7, 7])
    for option in sorted(set(heads) - {"none"}):
        node = OmegaConf.load(repository / "conf" / "pooling" / f"{option}.yaml")
        if "_target_" not in node:  # it stands on another option; composing takes half a second
            node = compose("train", [f"pooling={option}"]).pooling
        pooling = component(
            OmegaConf.merge(OmegaConf.masked_copy(cfg, ["runtime", "head", "fit"]), {"pooling": node}).pooling
        )
        count = sum(p.numel() for p in pooling.parameters() if p.requires_grad)
        assert heads[option]["Parameters"] == f"{count:,}", option
