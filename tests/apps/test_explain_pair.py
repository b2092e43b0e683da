"""Why two images are alike to AVSL: the numbers against naive sums, the picture, the command and what it refuses."""

import dataclasses
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose
from PIL import Image
from torch import nn

from dmlbench.apps.explain_pair import explain_images, write_pair
from dmlbench.apps.loading import NamedImage, load_run, read_one
from dmlbench.cli.main import main
from dmlbench.data.batches.transforms import center_crop
from dmlbench.data.images.sources import DecodedImages
from dmlbench.data.readers.folder import folder
from dmlbench.models.avsl import AvslHead, AvslModel
from dmlbench.models.backbones import Backbone
from dmlbench.runtime import read_json

LEVELS, SIZE, KEPT = 3, 16, 5
NAMES = (NamedImage("birds/a.jpg", 3, "wren"), NamedImage("b.jpg"))


class Shrinking(Backbone):
    """Maps of 8, 4 and 2 pixels of images of 16, by random 1 x 1 convolutions."""

    def __init__(self) -> None:
        super().__init__([4 + level for level in range(LEVELS)], mean=(0, 0, 0), std=(1, 1, 1))
        self.layers = nn.ModuleList(nn.Conv2d(3, 4 + level, 1) for level in range(LEVELS))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(
            layer(nn.functional.avg_pool2d(x, 2 ** (level + 1))).relu() for level, layer in enumerate(self.layers)
        )


def model_of(**options) -> AvslModel:
    torch.manual_seed(0)
    head = AvslHead([4, 5, 6], num_levels=LEVELS, level_size=SIZE, top_k=KEPT, **options)
    model = AvslModel(Shrinking(), head)
    with torch.no_grad():
        for bias in head.biases:
            bias.normal_()
        model.distance.edges.uniform_()
        model.distance.alpha.normal_().mul_(2)
        model.distance.beta.normal_().mul_(0.1)
        model.distance.updates.fill_(1)
    return model.eval()


def images() -> torch.Tensor:
    return torch.randint(0, 256, (2, 3, 16, 16), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))


def explained(model: AvslModel, pictures: torch.Tensor | None = None, **options):
    return explain_images(model, images() if pictures is None else pictures, NAMES, **options)


@pytest.mark.parametrize("inference", ["rectified", "reliable", "top", "concat"])
def test_contributions_of_all_nodes_sum_to_the_distance_of_the_rows(inference) -> None:
    model = model_of(inference=inference)
    found = explained(model).to_json()
    with torch.no_grad():
        rows = model(images()).embedding
        expected = float(model.distance.pairwise_distance(rows[:1], rows[1:]))
        attributed = model.distance.attribute(rows[:1], rows[1:])
    assert found["distance"] == pytest.approx(expected, rel=1e-5)
    total = 0.0
    for level in found["levels"]:
        nodes, at = level["nodes"], level["level"] - 1
        assert_allclose(nodes["delta"], attributed.nodes[0, at], rtol=1e-4, atol=1e-9)
        assert_allclose(nodes["reliability"], attributed.reliabilities[0, at], rtol=1e-4, atol=1e-9)
        assert_allclose(nodes["rectified"], attributed.rectified[0, at], rtol=1e-4, atol=1e-9)
        assert_allclose(nodes["sensitivity"], attributed.sensitivities[0, at], rtol=1e-4, atol=1e-7)
        total += sum(x * y for x, y in zip(nodes["sensitivity"], nodes["delta"], strict=True))
        assert level["contribution"] == pytest.approx(sum(nodes["contribution"]), rel=1e-12)
        assert level["share"] == pytest.approx(level["contribution"] / found["distance"], rel=1e-12)
    assert [level["level"] for level in found["levels"]] == [3, 2, 1]
    assert total == pytest.approx(found["distance"], rel=1e-12)
    assert bool(found["decomposition"]) == (inference == "rectified")


def test_similar_and_dissimilar_nodes_are_those_of_a_naive_search() -> None:
    found = explained(model_of(), num_nodes=2, reliable=6).to_json()
    assert found["reliable"] == 6
    for level in found["levels"]:
        p, delta = level["nodes"]["reliability"], level["nodes"]["delta"]
        by_p = sorted(range(SIZE), key=lambda i, p=p: -p[i])
        among = by_p[:6] if level["level"] > 1 else by_p  # at the lowest level all are equally reliable
        order = sorted(among, key=lambda i, delta=delta: delta[i])
        assert [one["node"] for one in level["most_similar"]] == order[:2]
        assert [one["node"] for one in level["most_dissimilar"]] == order[::-1][:2]
        for one in (*level["most_similar"], *level["most_dissimilar"]):
            a, b = one["embeddings"]
            assert one["delta"] == pytest.approx((a - b) ** 2, rel=1e-9)
            assert one["delta"] == delta[one["node"]]


def test_decomposition_leads_from_the_top_to_the_lowest_level() -> None:
    model = model_of()
    found = explained(model).to_json()
    values = {level["level"]: level["nodes"] for level in found["levels"]}
    first, second = found["decomposition"]
    assert (first["level"], second["level"]) == (3, 2)

    def inferred(level: int, node: int) -> float:
        edges = model.distance.edges[level - 2, node].tolist()
        kept = sorted(range(SIZE), key=lambda j: -edges[j])[:KEPT]
        total = sum(edges[j] for j in kept)
        return sum(edges[j] / total * values[level - 1]["rectified"][j] for j in kept)

    for step in (first, second):
        assert step["inferred"] == pytest.approx(inferred(step["level"], step["node"]), rel=1e-6)
        p = step["reliability"]
        assert step["rectified"] == pytest.approx(p * step["delta"] + (1 - p) * step["inferred"], rel=1e-9)
        weights = [one["weight"] for one in step["inferred_from"]]
        assert len(weights) == KEPT
        assert weights == sorted(weights, reverse=True)
        assert sum(weights) == pytest.approx(1, abs=1e-6)
        below = values[step["level"] - 1]["rectified"]
        assert [one["rectified"] for one in step["inferred_from"]] == [below[o["node"]] for o in step["inferred_from"]]
    gains = [(1 - values[3]["reliability"][i]) * inferred(3, i) for i in range(SIZE)]
    assert first["node"] == max(range(SIZE), key=gains.__getitem__)
    shares = {
        one["node"]: one["weight"] * (1 - one["reliability"]) * inferred(2, one["node"])
        for one in first["inferred_from"]
    }
    assert second["node"] == max(shares, key=shares.__getitem__)


@pytest.mark.parametrize("variant", ["official", "paper"])
def test_averages_of_the_maps_differ_by_what_the_node_says(variant) -> None:
    model = model_of(variant=variant)
    if variant == "paper":  # its maps leave the bias out
        for bias in model.head.biases:
            nn.init.zeros_(bias)
    found = explained(model)
    for level, maps in enumerate(found.maps):
        assert maps.shape == (2, SIZE, 8 >> level, 8 >> level)
        means = maps.astype(np.float64).mean((2, 3))
        assert_allclose(means, found.embeddings[:, level], atol=1e-6)
        assert_allclose((means[0] - means[1]) ** 2, found.values["delta"][level], atol=1e-6)


def test_equal_images_are_at_distance_zero_of_which_there_are_no_shares(tmp_path) -> None:
    same = images()[:1].expand(2, -1, -1, -1).contiguous()
    explanation = explained(model_of(), same, num_nodes=1)
    found = explanation.to_json()
    assert found["distance"] == 0
    assert [level["share"] for level in found["levels"]] == [None, None, None]
    # nothing is inferred to any node more than to another: the least reliable one is shown
    assert found["decomposition"][0]["node"] == int(explanation.values["reliability"][-1].argmin())
    write_pair(explanation, tmp_path / "same.png")
    assert "null" in (tmp_path / "same.json").read_text()


@pytest.mark.slow
def test_picture_shows_maps_and_frames_and_the_json_the_numbers(tmp_path) -> None:
    explanation = explained(model_of())
    path = tmp_path / "pair.png"
    assert write_pair(explanation, path) == path.with_suffix(".json")
    assert read_json(path.with_suffix(".json")) == explanation.to_json()
    with Image.open(path) as image:
        pixels = np.asarray(image.convert("RGB")).astype(int)
    assert len(np.unique(pixels.reshape(-1, 3), axis=0)) > 1000  # images and maps, not empty axes
    for red, green, blue in ((0x1A, 0x7F, 0x37), (0xCF, 0x22, 0x2E), (0x05, 0x50, 0xAE)):
        assert (np.abs(pixels - [red, green, blue]).sum(2) < 12).sum() > 300


TINY = (
    "dataset.table.num_classes=16", "dataset.table.images_per_class=4", "dataset.table.image_size=32",
    "sampler.classes_per_batch=4", "sampler.images_per_class=4", "fit.max_steps=1", "fit.validate_every=1",
    "device=cpu", "fit.warmup_steps=0",
)  # fmt: skip
AVSL = (
    "head=avsl", "pooling=null", "backbone=resnet20_levels", "loss=layered_proxy_anchor", "head.level_size=16",
    "head.top_k=4",
)  # fmt: skip


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory) -> Path:
    """A run of one step of AVSL."""
    root = tmp_path_factory.mktemp("run")
    with pytest.raises(SystemExit) as info:
        main(["train", *TINY, *AVSL, f"paths.output_dir={root}/outputs", f"paths.cache_dir={root}/cache"])
    assert info.value.code == 0
    (checkpoint,) = root.glob("outputs/*/*/*/*/best.ckpt")
    return checkpoint.parent


def explain(*arguments: str) -> int:
    with pytest.raises(SystemExit) as info:
        main(["explain", "device=cpu", *arguments])
    return int(info.value.code)


@pytest.mark.slow
def test_command_takes_rows_paths_and_files_to_the_same_numbers(run_dir, tmp_path, monkeypatch, capsys) -> None:
    table = load_run(run_dir, {}, device="cpu").data.table
    assert explain(f"run={run_dir}", "pair=3,17") == 0
    assert f"written: {run_dir}/explain_3_17.png, {run_dir}/explain_3_17.json" in capsys.readouterr().out
    by_row = json.loads((run_dir / "explain_3_17.json").read_text())
    assert by_row["images"][1]["class_name"] == table.class_names[table.labels[17]]
    assert by_row["distance"] > 0
    assert math.isclose(sum(level["contribution"] for level in by_row["levels"]), by_row["distance"], rel_tol=1e-12)

    monkeypatch.chdir(tmp_path)
    Image.fromarray(np.asarray(table.pixels[17])).save("it is one.png")
    assert explain(f"run={run_dir}", f"pair=[{table.paths[3]},17]", "output=paths.png", "num_nodes=1") == 0
    assert explain(f"run={run_dir}", f"pair={table.paths[3]},it is one.png", "output=files.png", "num_nodes=1") == 0
    for name in ("paths", "files"):
        found = json.loads((tmp_path / f"{name}.json").read_text())
        assert found["levels"][0]["nodes"] == by_row["levels"][0]["nodes"]
    assert found["images"][1] == {"name": "it is one.png", "row": None, "class_name": None}


@pytest.mark.parametrize(("arguments", "message"), [
    (["pair=3,900"], "image: got 900, expected a row from 0 to 63 of glyphs_collage."),
    (["pair=3,none.jpg"], "image: got 'none.jpg', expected a path in glyphs_collage"),
    (["pair=3,4", "num_nodes=9"], "num_nodes: got 9, expected 1 to 8"),
    ([], "Give one run and pair=<image>,<another>."),
])  # fmt: skip
@pytest.mark.fast_sample(4)
def test_what_cannot_be_explained_is_refused(run_dir, tmp_path, monkeypatch, capsys, arguments, message) -> None:
    monkeypatch.chdir(tmp_path)
    assert explain(f"run={run_dir}", *arguments) == 2
    assert message in capsys.readouterr().err


def test_a_file_of_any_size_goes_through_the_transform_of_the_run(run_dir, tmp_path) -> None:
    """The same photograph, named as one of the data set and as a file, is the same to the network."""
    for name, size in (("a/0.png", (50, 70)), ("b/0.png", (90, 40)), ("c/0.png", (36, 36)), ("d/0.png", (40, 40))):
        (tmp_path / name).parent.mkdir()
        pixels = np.random.default_rng(0).integers(0, 256, (*size, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(tmp_path / name)
    table = folder(tmp_path)
    run = load_run(run_dir, {}, device="cpu")
    photographs = dataclasses.replace(
        run,
        data=dataclasses.replace(run.data, table=table),
        images=DecodedImages(table, short_side=36),
        transform=center_crop(crop=32, resize=36, kernel="pillow"),
    )
    for row, path in enumerate(table.paths):
        named, expected = read_one(photographs, str(path))
        other, found = read_one(photographs, str(tmp_path / path))
        assert (named.row, other.row) == (row, None)
        assert found.shape == (1, 3, 32, 32)
        assert torch.equal(found, expected)
