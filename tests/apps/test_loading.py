"""Trained models without their data: the embeddings of the run again, from its folder or an exported one."""

import contextlib
import dataclasses
import json
import socketserver
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from composed import arguments, composed
from huggingface_hub import ModelCard
from omegaconf import OmegaConf
from PIL import Image, ImageOps
from safetensors.torch import load_file
from small_data_sets import write_photo
from torch import nn
from torchvision import transforms

import dmlbench
from dmlbench import build
from dmlbench.apps import export
from dmlbench.apps.embeddings import embed_folder, evaluate_from
from dmlbench.apps.export import NoGraph, export_run, exported_program, of_format
from dmlbench.apps.loading import MANIFEST, PREPROCESSING, WEIGHTS, TrainedModel
from dmlbench.components import component
from dmlbench.config import as_config, read_config
from dmlbench.data.batches.transforms import center_crop, identity
from dmlbench.evaluation.embeddings.embed import load_embeddings, read_embeddings
from dmlbench.models.avsl_distance import AvslDistance
from dmlbench.results.store import CONFIG, EMBEDDINGS
from dmlbench.runner import run
from dmlbench.runtime import read_json, write_json
from dmlbench.types import ConfigError, DataError, RunError

SHORT = (
    *("fit.max_steps=2", "fit.validate_every=2", "fit.warmup_steps=0", "device=cpu", "protocol=held_out"),
    *("sampler.classes_per_batch=2", "sampler.images_per_class=2"),
)
LETTERS = (
    *(f"dataset.table.{key}" for key in ("num_classes=12", "images_per_class=4", "image_size=32")),
    "transform.train.padding=2",
)
AVSL = (
    *("head=avsl", "pooling=none", "backbone=resnet20_levels", "loss=layered_proxy_anchor"),
    *("head.level_size=8", "head.top_k=2"),
)
CONF = Path(__file__).resolve().parents[2] / "conf" / "pooling"
POOLINGS = sorted(path.stem for path in CONF.glob("*.yaml") if path.stem != "none")
WITHOUT_ONNX = ("gemax",)
"""What docs/tutorials/trained_model.md says: poolings that the converter refuses."""
SMALLER = {"num_prototypes": 8, "memory_rows": 32, "start_step": 1}
"""So that prototypes start within a few batches."""


def trained(place: Path, *overrides: str) -> Path:
    paths = (f"paths.output_dir={place}/out", f"paths.cache_dir={place}/cache", f"paths.data_dir={place}")
    return run(composed(*SHORT, *overrides, *paths))


@pytest.fixture(scope="module")
def of_letters(tmp_path_factory) -> Path:
    return trained(tmp_path_factory.mktemp("letters"), *LETTERS)


@pytest.fixture(scope="module")
def of_avsl(tmp_path_factory) -> Path:
    return trained(tmp_path_factory.mktemp("avsl"), *LETTERS, *AVSL)


@pytest.fixture(scope="module")
def of_photos(tmp_path_factory) -> Path:
    """A network of timm, whose images are resized and cut."""
    place = tmp_path_factory.mktemp("photos")
    for label in range(8):
        for i in range(3):
            write_photo(place / "folder" / f"class_{label}" / f"{i}.jpg", label)
    cut = [f"transform.{part}.{key}" for part in ("train", "eval") for key in ("resize=40", "crop=32")]
    network = ("backbone=timm", "backbone.name=test_vit.r160_in1k", "backbone.pretrained=false", "pooling=native")
    return trained(place, "dataset=folder", *network, "backbone.image_size=32", *cut)


def data_and_rows(run_dir: Path):
    """The data of a run, and the embeddings that it kept of its test images."""
    table = component(read_config(run_dir / CONFIG)["dataset"]["table"])
    return table, load_embeddings(run_dir / EMBEDDINGS).queries


@pytest.mark.parametrize(
    "name", ["of_letters", *(pytest.param(name, marks=pytest.mark.slow) for name in ("of_photos", "of_avsl"))]
)
def test_runs_and_exported_folders_give_the_embeddings_of_the_run(name, request, tmp_path) -> None:
    run_dir = request.getfixturevalue(name)
    table, kept = data_and_rows(run_dir)
    if table.pixels is not None:
        images = table.pixels[kept.ids.numpy()]
    else:
        images = [Path(table.root) / str(table.paths[i]) for i in kept.ids]
    assert export_run(run_dir, tmp_path / "folder", formats=[], license="cc-by-4.0") == {}
    for place in (run_dir, tmp_path / "folder"):
        model = dmlbench.load(place, device="cpu")
        rows = model.embed(images)
        assert torch.equal(rows, kept.rows)
        own = build.build_distance(as_config(read_config(run_dir / CONFIG)))
        if name == "of_avsl":
            assert isinstance(own, AvslDistance)
            own.load_state_dict(load_file(run_dir / "distance.safetensors"))
            with torch.no_grad():
                wanted = own(kept.rows[:3], kept.rows)
        else:
            unit = nn.functional.normalize(kept.rows)
            wanted = torch.cdist(unit[:3].double(), unit.double()).float()
        assert torch.allclose(model.distance(rows[:3].numpy(), rows), wanted, atol=2e-3)
        assert model.distance(rows[0], rows[1]).shape == (1, 1)
    text = "".join(path.read_text() for path in (tmp_path / "folder").iterdir() if path.suffix != ".safetensors")
    assert str(run_dir.parents[3]) not in text  # nothing of this machine


@pytest.mark.parametrize("overrides", [("fit.precision=fp16",), AVSL], ids=["fp16", "avsl"])
def test_a_run_with_ema_is_tested_and_loaded_by_its_averaged_weights(tmp_path, overrides: tuple[str, ...]) -> None:
    settings = ("fit.ema=0.5", "fit.keep=both")
    run_dir = trained(tmp_path, *LETTERS, *overrides, *settings)
    table, kept = data_and_rows(run_dir)
    model = dmlbench.load(run_dir, device="cpu")
    assert torch.equal(model.embed(table.pixels[kept.ids.numpy()]), kept.rows)
    last = torch.load(run_dir / "last.ckpt", weights_only=True)
    weights = dict(model.network.named_parameters())
    assert all(torch.equal(value, weights[name]) for name, value in last["averaged_weights"].items())
    assert not all(torch.equal(value, last["model"][name]) for name, value in weights.items())


@pytest.mark.slow
def test_one_image_is_the_same_as_file_picture_array_and_tensor(of_photos) -> None:
    table, kept = data_and_rows(of_photos)
    file = Path(table.root) / str(table.paths[kept.ids[0]])
    model = dmlbench.load(of_photos, device="cpu")
    array = np.asarray(Image.open(file).convert("RGB"))
    tensor = torch.from_numpy(array.copy()).permute(2, 0, 1)
    for given in (file, str(file), Image.open(file), array, array[None], tensor):
        assert torch.allclose(model.embed(given), kept.rows[:1], atol=1e-5)
    grey = array[..., 0]
    assert torch.equal(model.embed(grey), model.embed(np.stack([grey] * 3, axis=2)))


def write_images(folder: Path) -> dict[str, Path]:
    """Files of several sizes and modes; ``turned`` is stored on its side, as EXIF says."""
    pixels = np.random.default_rng(0).integers(0, 256, (90, 120, 3), dtype=np.uint8)
    photo = Image.fromarray(pixels).resize((300, 200))
    exif = Image.Exif()
    exif[274] = 6  # orientation: turn by 90 degrees
    found = {
        "large": (photo, "large.jpg", {}),
        "small": (photo.resize((9, 21)), "small.png", {}),
        "as_is": (photo.crop((0, 0, 32, 32)), "as_is.png", {}),
        "grey": (photo.convert("L"), "grey.png", {}),
        "rgba": (Image.fromarray(np.dstack([np.asarray(photo), np.full((200, 300), 90, np.uint8)])), "rgba.png", {}),
        "palette": (photo.quantize(16), "palette.gif", {}),
        "cmyk": (photo.convert("CMYK"), "cmyk.jpg", {}),
        "turned": (photo, "turned.jpg", {"exif": exif}),
    }
    for image, name, options in found.values():
        image.save(folder / name, **options)
    return {key: folder / name for key, (_, name, _) in found.items()}


TRANSFORMS = {
    "crop": (center_crop(crop=32, resize=40), transforms.Compose([transforms.Resize(40), transforms.CenterCrop(32)])),
    "shift": (identity(), transforms.Compose([transforms.Resize(32), transforms.CenterCrop(32)])),
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_images_of_any_size_and_mode_are_embedded_in_one_call(tmp_path, name: str) -> None:
    transform, prepared = TRANSFORMS[name]
    model = dataclasses.replace(model_of(), transform=transform)
    files = write_images(tmp_path)
    opened = {key: ImageOps.exif_transpose(Image.open(path)).convert("RGB") for key, path in files.items()}
    assert opened["turned"].size == (200, 300) != opened["large"].size
    pixels = torch.stack([torch.from_numpy(np.array(prepared(image))).permute(2, 0, 1) for image in opened.values()])
    with torch.no_grad():
        wanted = model.network(pixels).embedding
    kinds: dict[str, list[Any]] = {
        "files": list(files.values()),
        "texts": [str(path) for path in files.values()],
        "pictures": [Image.open(path) for path in files.values()],
        "arrays": [np.asarray(image) for image in opened.values()],
        "tensors": [torch.from_numpy(np.array(image)).permute(2, 0, 1) for image in opened.values()],
    }
    for given in kinds.values():
        assert torch.allclose(model.embed(given), wanted, atol=1e-5)
    rgba, grey = np.asarray(Image.open(files["rgba"])), np.asarray(Image.open(files["grey"]))
    row = dict(zip(files, wanted, strict=True))
    one_image = {
        "rgba": (rgba, rgba[None], torch.from_numpy(rgba.copy()).permute(2, 0, 1)),
        "grey": (grey, grey[..., None], grey[None], torch.from_numpy(grey.copy()), torch.from_numpy(grey.copy())[None]),
    }
    for key, several in one_image.items():
        for given in several:
            assert torch.allclose(model.embed(given), row[key][None], atol=1e-5)


def test_what_is_no_image_is_named(tmp_path) -> None:
    model = model_of()
    (tmp_path / "x.jpg").write_bytes(b"no image")
    image = Image.new("RGB", (40, 40))
    image.close()
    for given, message in (
        (torch.zeros(3, 32, 32), r"image number 0: got a Tensor of torch.float32 \(3, 32, 32\), expected a path"),
        ([np.zeros((4, 4, 2), np.uint8)], r"image number 0: got a ndarray of uint8 \(4, 4, 2\), expected a path"),
        (["nowhere.jpg"], "image 'nowhere.jpg' is missing"),
        (tmp_path / "x.jpg", r"x.jpg' cannot be read \("),
        (Image.new("F", (40, 40)), "image number 0 has floating-point pixels"),
        (image, r"image number 0 cannot be read \(Operation on closed image"),
    ):
        with pytest.raises(DataError, match=message):
            model.embed(given)


def test_rows_have_unit_length_on_request() -> None:
    model, images = model_of(), np.random.default_rng(0).integers(0, 256, (3, 32, 32), dtype=np.uint8)
    rows, unit = model.embed(images), model.embed(images, normalize=True)
    assert torch.allclose(unit, rows / rows.norm(dim=1, keepdim=True))
    assert not torch.allclose(rows.norm(dim=1), torch.ones(3))
    own = model_of("head=hyperbolic")
    with pytest.raises(ConfigError, match=r"normalize: got True, expected False since .* by PoincareDistance"):
        own.embed(images, normalize=True)


def test_a_printed_model_says_what_it_is(of_letters) -> None:
    model, scores = dmlbench.load(of_letters, device="cpu"), read_json(of_letters / "result.json")["metrics"]["test"]
    lines = str(model).splitlines()
    assert lines[0] == f"dmlbench model of {of_letters} (cpu)"
    assert lines[1:4] == [
        "trained on glyphs_collage, protocol held_out, fold 0, repeat 0: backbone ResNet20, pooling Gap, "
        "head Projection, loss MultiSimilarityLoss",
        "embedding: 128 dimensions, compared by Euclidean distance of unit vectors",
        "input: images of 32 x 32; other sizes are resized (bilinear with antialiasing) to cover 32 x 32 and "
        "center-cropped",
    ]
    assert lines[4].startswith(f"scores: test P@1 {100 * scores['p_at_1']:.2f}, R-precision ") and len(lines) == 5
    model = dataclasses.replace(model, transform=center_crop(crop=32, resize=40))
    assert str(model).splitlines()[3] == "input: images of any size; short side to 40, center crop 32 x 32"


def test_distances_of_near_images_are_right(of_letters) -> None:
    model, rows = dmlbench.load(of_letters, device="cpu"), data_and_rows(of_letters)[1].rows
    rows = rows.repeat(2, 1)  # more than 25, where torch turns to products
    near = rows + 1e-4 * rows.norm(dim=1, keepdim=True) * torch.randn(rows.shape, generator=torch.manual_seed(0))
    unit, other = (nn.functional.normalize(x.double()) for x in (rows, near))
    wanted = (unit[:, None] - other[None]).norm(dim=2)
    assert torch.allclose(model.distance(rows, near).double(), wanted, rtol=1e-4, atol=1e-7)
    assert model.distance(rows, rows).diagonal().max() < 1e-6
    model.network.train()
    with pytest.raises(ValueError, match=r"is in training mode. Call model.network.eval\(\)"):
        model.embed(np.zeros((32, 32), dtype=np.uint8))


@pytest.mark.slow
def test_embeddings_of_a_folder_are_evaluated_by_the_models_distance(of_letters, of_avsl, tmp_path) -> None:
    table, kept = data_and_rows(of_letters)
    for place in ("classed", "flat"):
        for i in kept.ids.tolist():
            folder = tmp_path / place / (str(table.labels[i] + 10) if place == "classed" else "")
            folder.mkdir(parents=True, exist_ok=True)
            Image.fromarray(np.asarray(table.pixels[i])).save(folder / f"{i:03d}.png")
    file = tmp_path / "x.safetensors"
    stored = embed_folder(dmlbench.load(of_letters, device="cpu"), tmp_path / "classed", file)
    names = json.loads(read_embeddings(file).metadata["paths"])
    assert [int(Path(name).stem) for name in names] == kept.ids.tolist()
    assert torch.allclose(stored.queries.rows, kept.rows, atol=1e-5)

    def scores(embeddings: Path, *more: str) -> dict[str, float]:
        return evaluate_from(arguments("evaluate", f"embeddings={embeddings}", *more)).evaluation.scores

    assert scores(file) == pytest.approx(read_json(of_letters / "result.json")["metrics"]["test"])
    embed_folder(dmlbench.load(of_avsl, device="cpu"), tmp_path / "classed", file)
    with pytest.raises(RunError, match=r"compares its embeddings by AvslDistance, not as unit vectors\. Set model="):
        scores(file)
    with pytest.raises(RunError, match="compares its embeddings by AvslDistance"):
        scores(of_avsl / "embeddings.safetensors")
    assert scores(file, f"model={of_avsl}") == pytest.approx(read_json(of_avsl / "result.json")["metrics"]["test"])
    with pytest.raises(RunError, match=r"got embeddings of 48 dimensions, expected 128 as from"):
        scores(file, f"model={of_letters}")
    assert len(set(embed_folder(dmlbench.load(of_letters), tmp_path / "flat", file).queries.labels.tolist())) == len(
        kept
    )
    (tmp_path / "classed" / "lonely.png").write_bytes(b"")
    with pytest.raises(DataError, match=r"lonely.png' is next to class folders"):
        embed_folder(dmlbench.load(of_letters), tmp_path / "classed", file)


@contextlib.contextmanager
def listener() -> Iterator[tuple[str, list[bytes]]]:
    """A server on the loopback address, and what it was sent."""
    received: list[bytes] = []

    class Handler(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            received.append(self.request.recv(1000))

    with socketserver.TCPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}", received
        server.shutdown()


def rewrite(folder: Path, **changes: Any) -> None:
    """Change values of an exported configuration, and its hash in the manifest."""
    config = OmegaConf.load(folder / CONFIG)
    for key, value in changes.items():
        OmegaConf.update(config, key, value, force_add=True)
    OmegaConf.save(config, folder / CONFIG)
    rehash(folder, CONFIG)


def rehash(folder: Path, name: str) -> None:
    manifest = read_json(folder / MANIFEST)
    manifest["files"][name] = export.file_sha256(folder / name)
    write_json(folder / MANIFEST, manifest)


PLACES = ("transform.eval", "transform.eval.extra", "backbone.extra", "head.extra", "pooling.extra")


@pytest.mark.fast_sample(1)
@pytest.mark.parametrize("place", PLACES)
def test_an_exported_folder_opens_no_connection_and_reads_no_variable(of_letters, tmp_path, monkeypatch, place) -> None:
    folder = tmp_path / "folder"
    export_run(of_letters, folder, formats=[])
    sound = (folder / CONFIG).read_bytes()
    monkeypatch.setenv("CANARY", "a-secret")
    with listener() as (url, received):
        call = {"_target_": "dmlbench.models.timm_weights.reachable", "hub_id": None, "url": f"{url}/?s=a-secret"}
        rewrite(folder, **{place: call})
        with pytest.raises(ConfigError, match=rf"{place}._target_: got dmlbench.models.timm_weights"):
            dmlbench.load(folder)
        for resolver in ("oc.env:CANARY", "oc.decode:'{a: 1}'", "paths.data_dir"):
            (folder / CONFIG).write_bytes(sound)
            rewrite(folder, **{place: {"x": f"${{{resolver}}}"}})
            with pytest.raises(ConfigError, match=rf"{place}.x: got an interpolation, expected a value"):
                dmlbench.load(folder)
    assert received == []


def test_an_exported_folder_runs_no_code_that_it_names(of_letters, tmp_path) -> None:
    folder = tmp_path / "folder"
    export_run(of_letters, folder, formats=[])
    for key, target, message in (
        ("pooling._target_", "os.system", r"pooling._target_: got os.system, expected a component .* modules=\[os\]"),
        ("pooling._target_", "dmlbench.results.store.remove_run", "expected a component of dmlbench"),
        ("pooling._target_", ["os.system"], "expected a component of dmlbench"),
        ("backbone.name", "hf_hub:someone/model", "backbone.name: got hf_hub:someone/model, which needs a download"),
    ):
        sound = (folder / CONFIG).read_bytes()
        rewrite(folder, **{key: target})
        with pytest.raises(ConfigError, match=message):
            dmlbench.load(folder)
        (folder / CONFIG).write_bytes(sound)
    with pytest.raises(ConfigError, match="expected a class defined in the package os"):
        rewrite(folder, **{"pooling._target_": "os.path.join"})
        dmlbench.load(folder, modules=["os"])
    (folder / CONFIG).write_bytes(sound)
    for change, message in (({"files": 3}, "files: got 3, expected an object"), ({"result": None}, "result: got None")):
        manifest = read_json(folder / MANIFEST)
        write_json(folder / MANIFEST, manifest | change)
        with pytest.raises(RunError, match=rf"dmlbench.json is damaged \({message}"):
            dmlbench.load(folder)
        write_json(folder / MANIFEST, manifest)
    rewrite(folder)
    dmlbench.load(folder)
    (folder / WEIGHTS).write_bytes((folder / WEIGHTS).read_bytes()[:-4])
    with pytest.raises(RunError, match=r"is missing, or its SHA-256 differs from dmlbench.json"):
        dmlbench.load(folder)
    with pytest.raises(ConfigError, match="exists, expected a new folder"):
        export_run(of_letters, folder)
    with pytest.raises(RunError, match="is neither a run directory nor a folder"):
        dmlbench.load(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]


@pytest.mark.parametrize("name", [WEIGHTS, PREPROCESSING])
def test_a_hashed_file_that_cannot_be_parsed_is_named(of_letters, tmp_path, name: str) -> None:
    folder = tmp_path / "folder"
    export_run(of_letters, folder, formats=[])
    for content in (b"", b"[]", b"{}", b"\xff", b"[" * 100_000):
        (folder / name).write_bytes(content)
        rehash(folder, name)
        with pytest.raises(RunError, match=rf"{name} is damaged"):
            dmlbench.load(folder)


@pytest.mark.slow
def test_the_card_says_scores_selection_data_and_licences(of_letters, of_photos, tmp_path) -> None:
    export_run(of_letters, tmp_path / "a", formats=[])
    result, card = read_json(of_letters / "result.json"), (tmp_path / "a" / "README.md").read_text()
    p_at_1 = [f"{100 * result['metrics'][part]['p_at_1']:.2f}" for part in ("test", "val")]
    assert f"| P@1 | {' | '.join(p_at_1)} |" in card
    assert "Protocol `held_out`" in card and "the best `map_at_r` on validation classes" in card
    assert result["dataset_fingerprint"] in card and "license: unknown" in card and "drawn by dmlbench" in card
    export_run(of_photos, tmp_path / "b", formats=[], license="cc-by-4.0")
    card = (tmp_path / "b" / "README.md").read_text()
    header = ModelCard(card).data.to_dict()  # as the Hugging Face Hub reads it
    assert (header["license"], header["library_name"]) == ("cc-by-4.0", "dmlbench")
    assert header["pipeline_tag"] == "image-feature-extraction"
    assert "short side to 40 pixels (bilinear with antialiasing (Pillow))" in card


def test_graphs_that_compute_something_else_are_refused_by_name(of_letters, monkeypatch) -> None:
    model = dmlbench.load(of_letters, device="cpu")
    network = export.Embedder(model.network)
    export._compare("onnx", model, network, network)
    with pytest.raises(
        export.NoGraph, match=r"onnx of backbone=.* pooling=.*: got a relative error of 1.0e-02, expected at most"
    ):
        export._compare("onnx", model, network, lambda images: 1.01 * network(images))
    with pytest.raises(ConfigError, match="formats 'onxn' is unknown: did you mean 'onnx'"):
        export_run(of_letters, "nowhere", formats=["onxn"])


def model_of(*overrides: str) -> TrainedModel:
    cfg = composed("backbone=resnet20_small", *overrides)
    cfg.runtime.image_size, cfg.runtime.num_classes, cfg.runtime.steps_per_epoch = [32, 32], 4, 10
    for key, value in SMALLER.items():
        if cfg.pooling is not None and key in cfg.pooling:
            cfg.pooling[key] = value
    torch.manual_seed(0)
    network = build.build_model(cfg)
    images = torch.randint(0, 256, (16, 3, 32, 32), dtype=torch.uint8)
    for step in range(1, 10):
        with torch.no_grad():
            network.observe(network(images), step=step)
    assert network.started
    network.eval()
    return TrainedModel("a run", network, identity(), (32, 32), torch.device("cpu"), cfg, {})


@pytest.mark.slow
@pytest.mark.parametrize("pooling", POOLINGS)
def test_graphs_of_a_pooling_compute_what_the_network_does(pooling: str) -> None:
    model = model_of(f"pooling={pooling}")
    program = exported_program(model)  # compares
    assert len(of_format("torch_export", program, model)) > 100_000
    pytest.importorskip("onnxruntime", reason="needs the extra export")
    if pooling in WITHOUT_ONNX:
        with pytest.raises(NoGraph, match=r"onnx of .* failed: "):
            of_format("onnx", program, model)
    else:
        assert len(of_format("onnx", program, model)) > 100_000


@pytest.mark.slow
def test_a_graph_of_torch_export_is_read_back_and_takes_any_batch(tmp_path) -> None:
    model = model_of("pooling=gsp_small")
    (tmp_path / "model.pt2").write_bytes(of_format("torch_export", exported_program(model), model))
    graph = torch.export.load(tmp_path / "model.pt2").module()
    images = torch.randint(0, 256, (5, 3, 32, 32), dtype=torch.uint8)
    with torch.no_grad():
        assert torch.allclose(graph(images), model.network(images).embedding, atol=1e-5)
