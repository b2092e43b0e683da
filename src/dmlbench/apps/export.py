"""A finished run as a folder that stands alone: weights, configuration, preprocessing, graphs, model card."""

import contextlib
import importlib.util
import io
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors.torch import save
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from dmlbench.apps import loading
from dmlbench.apps.loading import TrainedModel, load
from dmlbench.components import imported
from dmlbench.config import to_yaml
from dmlbench.data.preparation.catalog import SOURCES
from dmlbench.evaluation.metrics.registry import score_named
from dmlbench.models.backbones import Backbone, TimmBackbone
from dmlbench.models.hub import hub_id
from dmlbench.results.caveats import caveats, is_late
from dmlbench.results.store import CONFIG
from dmlbench.results.table import markdown_lines
from dmlbench.runtime import atomic_write, file_sha256, package_versions, whole_folder, write_json
from dmlbench.types import ConfigError, RunError, check_choice, how_to_install

GRAPHS = {"torch_export": "model.pt2", "onnx": "model.onnx"}
"""Files by the names of their formats."""

_TOLERANCE = 1e-4
"""Largest difference of a graph's row from the network's own, relative to the longest row."""
_EXPORTED_BATCH, _CHECKED_BATCHES = 11, (1, 3)
"""A size that no other dimension is likely to have, which tracing would take for the same."""
_ONNX_PACKAGES = ("onnx", "onnxscript", "onnxruntime")
_CHOICES = ("backbone", "tuning", "pooling", "head", "loss", "miner", "regularizer", "optim", "schedule", "recipe")


class NoGraph(RunError):
    """A format that a model cannot have, with the reason."""


class Embedder(nn.Module):
    """uint8 RGB images [B, 3, H, W] to rows [B, D], in float32."""

    def __init__(self, network: Any) -> None:
        super().__init__()
        self.network = network

    def forward(self, images: Tensor) -> Tensor:
        rows: Tensor = self.network(images).embedding
        return rows


def export_run(
    run_dir: str | Path, output: str | Path, *, formats: Sequence[str] | None = None, license: str | None = None,
    modules: Sequence[str] = (),
) -> dict[str, str]:  # fmt: skip
    """Write a folder that ``dmlbench.load`` reads without the run, the data or a network connection.

    Graphs are compared with the network on noise, in batches of 1 and 3. ``dmlbench.json`` has every file's SHA-256.

    Args:
        run_dir: a complete run with its weights; or an exported folder.
        formats: graphs to write, of ``GRAPHS``; None: each that is possible here.
        license: of the weights, as hubs call it (``cc-by-4.0``); None: not stated.
        modules: packages of your own whose classes ``run_dir`` may name, if it is an exported folder.

    Returns:
        For every format that was left out the reason.
    """
    for name in formats or ():
        check_choice("formats", name, list(GRAPHS))
    output = Path(output).expanduser().absolute()
    if output.exists():
        raise ConfigError(f"output: {output} exists, expected a new folder.")
    model = load(run_dir, device="cpu", modules=modules)
    try:
        with whole_folder(output) as folder:
            left_out = _fill(folder, model, formats, license)
    except OSError as error:
        raise RunError(f"cannot write {output}: {error.strerror or error}. Choose another folder.") from error
    return left_out


def _fill(folder: Path, model: TrainedModel, formats: Sequence[str] | None, license: str | None) -> dict[str, str]:
    state = {name: x.detach().cpu().contiguous().clone() for name, x in model.network.state_dict().items()}
    atomic_write(folder / loading.WEIGHTS, save(state))
    atomic_write(folder / CONFIG, to_yaml(_without_places(_without_hub(model))).encode())
    write_json(folder / loading.PREPROCESSING, loading.preprocessing(model))
    left_out: dict[str, str] = {}
    program: ExportedProgram | None = None
    for name in GRAPHS if formats is None else formats:
        try:
            program = program or exported_program(model)
            atomic_write(folder / GRAPHS[name], of_format(name, program, model))
        except NoGraph as error:
            if formats is not None:
                raise
            left_out[name] = str(error)
    written = {name: file for name, file in GRAPHS.items() if (folder / file).exists()}
    modules = loading.foreign_modules(model.config)
    card = model_card(model, license=license, graphs=written, left_out=left_out, modules=modules)
    atomic_write(folder / loading.CARD, card.encode())
    hashed = [path for path in sorted(folder.iterdir()) if path.name != loading.CARD]  # cards are edited
    manifest = {
        "schema": loading.EXPORT_SCHEMA, "files": {path.name: file_sha256(path) for path in hashed}, "modules": modules,
        "embedding_size": model.embedding_size, "left_out": left_out, "versions": package_versions(),
        "result": dict(model.result),
    }  # fmt: skip
    write_json(folder / loading.MANIFEST, manifest)
    images = noise(_EXPORTED_BATCH, model.image_size)
    with torch.no_grad():
        rows = [Embedder(m.network)(images) for m in (model, load(folder, device="cpu", modules=modules))]
    if not torch.equal(*rows):
        raise RunError(
            f"{model.name}: the exported model computes different embeddings. Save all of the network's state in its "
            "state_dict()."
        )
    return left_out


def exported_program(model: TrainedModel) -> ExportedProgram:
    """The network as torch.export has it, for batches of any size, compared with the network itself."""
    network = Embedder(model.network).eval()
    images = noise(_EXPORTED_BATCH, model.image_size)
    with _quiet(), torch.no_grad(), _as_no_graph("torch_export", model):
        program = torch.export.export(network, (images,), dynamic_shapes={"images": {0: Dim("batch", min=1)}})
    run = program.module()
    with torch.no_grad():
        _compare("torch_export", model, network, lambda images: run(images))
    return program


def of_format(name: str, program: ExportedProgram, model: TrainedModel) -> bytes:
    """The content of a graph's file; of ONNX read back and compared with the network, as the program was."""
    network = Embedder(model.network).eval()
    if name == "torch_export":
        buffer = io.BytesIO()
        with _quiet():
            torch.export.save(program, buffer)
        return buffer.getvalue()
    if missing := [package for package in _ONNX_PACKAGES if importlib.util.find_spec(package) is None]:
        raise NoGraph(f"onnx needs {' and '.join(missing)}. {how_to_install('export')}")
    import onnxruntime

    with _quiet(), _as_no_graph(name, model):
        converted = torch.onnx.export(program, dynamo=True, verbose=False, output_names=["embedding"])
        assert converted is not None
        data: bytes = converted.model_proto.SerializeToString()
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3
        session = onnxruntime.InferenceSession(data, options, providers=["CPUExecutionProvider"])
        key = session.get_inputs()[0].name
        _compare(name, model, network, lambda x: torch.from_numpy(session.run(None, {key: x.numpy()})[0]))
    return data


def noise(count: int, size: Sequence[int]) -> Tensor:
    """Images [count, 3, H, W] of uint8 that graphs are compared on."""
    return torch.randint(0, 256, (count, 3, *size), generator=torch.Generator().manual_seed(count), dtype=torch.uint8)


def _compare(
    name: str, model: TrainedModel, network: Callable[[Tensor], Tensor], graph: Callable[[Tensor], Tensor]
) -> None:
    for count in _CHECKED_BATCHES:
        images = noise(count, model.image_size)
        with torch.no_grad():
            wanted, found = network(images), graph(images)
        off = float((found - wanted).norm(dim=1).max() / wanted.norm(dim=1).max())
        if not off <= _TOLERANCE:
            raise NoGraph(
                f"{_called(name, model)}: got a relative error of {off:.1e}, expected at most {_TOLERANCE:.0e}."
            )


def _called(name: str, model: TrainedModel) -> str:
    choices = model.config["runtime"]["choices"]
    return f"{name} of backbone={choices.get('backbone')} pooling={choices.get('pooling')} head={choices.get('head')}"


@contextlib.contextmanager
def _as_no_graph(name: str, model: TrainedModel) -> Iterator[None]:
    """Tracers and converters raise dozens of unrelated types."""
    try:
        yield
    except NoGraph:
        raise
    except Exception as error:
        cause: BaseException = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        reason = " ".join(str(cause).split())
        raise NoGraph(f"{_called(name, model)} failed: {type(cause).__name__}: {reason[:200]}") from error


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Tracers and converters print and warn of their own steps."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(action="ignore"), contextlib.redirect_stdout(io.StringIO()):
            yield
    finally:
        logging.disable(before)


def _without_hub(model: TrainedModel) -> dict[str, Any]:
    """The configuration with what a hub says of the network in place of the network's name on it."""
    hub = getattr(getattr(model.network, "backbone", None), "hub_config", None)
    if hub is None:
        return dict(model.config)
    backbone = {**model.config["backbone"], "name": hub["architecture"], "hub_config": hub}
    return {**model.config, "backbone": backbone}


def _without_places(config: Mapping[str, Any]) -> Any:
    """The configuration without what names places or people of this machine."""
    container = {key: value for key, value in config.items() if key not in ("paths", "logger", "num_workers", "device")}
    private = ("given", "config_dir")
    container["runtime"] = {key: value for key, value in config["runtime"].items() if key not in private}

    def shortened(node: Any) -> Any:
        if isinstance(node, Mapping):
            return {key: shortened(value) for key, value in node.items()}
        if isinstance(node, list):
            return [shortened(value) for value in node]
        return Path(node).name if isinstance(node, str) and node.startswith(("/", "~")) else node

    return shortened(container)


def model_card(
    model: TrainedModel, *, license: str | None, graphs: Mapping[str, str], left_out: Mapping[str, str],
    modules: Sequence[str],
) -> str:  # fmt: skip
    """Markdown with the header that hubs read; ``graphs`` are files, ``left_out`` reasons, both by format."""
    result, config = model.result, model.config
    origin, base = _origin(config, result)
    head = {
        "license": license or "unknown",
        "library_name": "dmlbench",
        "pipeline_tag": "image-feature-extraction",
        "tags": ["metric-learning", "image-retrieval", *(["onnx"] if "onnx" in graphs else [])],
        **({"base_model": base} if base else {}),
    }
    chosen = {k: v for k, v in result["choices"].items() if k in _CHOICES and v.lower() != "none"}
    compared = "the Euclidean distance of unit vectors"
    if model.has_own_distance:
        compared = f"a distance of their own ({type(model.network.distance).__name__}), not as unit vectors"
    lines = [
        "---", yaml.safe_dump(head, sort_keys=False).strip(), "---",
        f"# {result['config_id']}, fold {result['fold']}, repeat {result['repeat']}", "",
        f"Images to embeddings of {model.embedding_size} numbers, compared by {compared}. Trained and tested "
        f"with dmlbench {result['versions'].get('dmlbench', '')}: "
        + ", ".join(f"{group} `{option}`" for group, option in chosen.items()) + ".",
        "", "## Use", *_use(model, graphs, left_out, modules),
        "", "## Scores", *_scores(result),
        "", "## Data and training", *_training(model, origin),
        "", f"Licence of these weights: {license or 'not stated by who exported them'}.", "",
    ]  # fmt: skip
    return "\n".join(lines)


def _use(
    model: TrainedModel, graphs: Mapping[str, str], left_out: Mapping[str, str], modules: Sequence[str]
) -> list[str]:
    trusted = f", modules={list(modules)}" if modules else ""
    steps = loading.preprocessing(model)["before_the_network"]
    before = (
        f"short side to {steps['resize_short_side']} pixels ({steps['resampling']}), the middle "
        f"{steps['center_crop']} x {steps['center_crop']}"
        if "center_crop" in steps
        else f"none at {model.image_size[0]} x {model.image_size[1]} pixels; other sizes are {steps['other_sizes']}"
    )
    lines = [
        "```python", "import dmlbench", f'model = dmlbench.load("<this folder>"{trusted})',
        "rows = model.embed(paths)  # [N, D] of files, Pillow images or arrays", "model.distance(rows, rows)  # [N, N]",
        "```",
        f"Preprocessing ([{loading.PREPROCESSING}]({loading.PREPROCESSING})): {before}. Normalization is part of the "
        "network, which takes uint8 RGB images [B, 3, H, W].",
    ]  # fmt: skip
    if modules:
        lines.append(
            f"Its classes are in {', '.join(modules)}, which must be importable: set PYTHONPATH, or load it with "
            "config_dir=<folder of options beside the module>."
        )
    for name, file in graphs.items():
        reader = {"torch_export": "torch.export.load", "onnx": "ONNX Runtime"}[name]
        own = "; the distance is not in it" if model.has_own_distance else ""
        lines.append(
            f"- [{file}]({file}) for {reader}: the same from images of {model.image_size[0]} x {model.image_size[1]} "
            f"pixels on, in float32, batches of any size{own}"
        )
    return lines + [f"- no {name}: {reason}" for name, reason in left_out.items()]


def _scores(result: Mapping[str, Any]) -> list[str]:
    metrics = result["metrics"]
    fold = f"fold {result['fold']} of {result['num_folds']}, " if result["num_folds"] > 1 else ""
    selected = "the test set itself" if result["val_is_test"] else "validation classes"
    steps = f"{result.get('best_step')} of {result['steps']}"
    how = (
        f"the weights of step {steps}, the best `{result['monitor']}` on {selected}"
        if "val" in metrics
        else f"the last weights, of step {result['steps']}; nothing was selected"
    )
    lines = [
        f"Protocol `{result['protocol']}`, {fold}repeat {result['repeat']}, seed {result['seed']}. Selection: {how}."
    ]
    heads = {"test": f"test ({result['n_query']:,} queries in {result['n_gallery']:,})", "val": "validation"}
    parts = {head: metrics[part] for part, head in heads.items() if part in metrics}
    rows = []
    for score in map(score_named, next(iter(parts.values()))):
        values = (scores.get(score.name) for scores in parts.values())
        rows.append([score.label, *("–" if value is None else f"{score.scale * value:.2f}" for value in values)])
    lines += ["", *markdown_lines(["percent", *parts], rows, "lrr"[: len(parts) + 1]), ""]
    lines.append(f"Search: {result['search']}. One run; compare configs by all runs of a protocol.")
    if result.get("n_skipped_queries"):
        lines.append(f"{result['n_skipped_queries']} queries without a positive are left out.")
    return lines + [f"- {caveat}" for caveat in caveats({**result, "n_runs_not_started": int(is_late(result))})]


def _training(model: TrainedModel, origin: str) -> list[str]:
    result = model.result
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    source = SOURCES.get(result["dataset"])
    is_drawn = ".glyphs." in model.config["dataset"]["table"]["_target_"]
    terms = source.terms if source else "drawn by dmlbench" if is_drawn else "unknown; ask who made them"
    return [
        f"- data: `{result['dataset']}`, fingerprint `{result['dataset_fingerprint']}`; terms: {terms}",
        f"- trained on {model.config['runtime']['num_classes']} classes, for {result['steps']:,} steps; configuration "
        "in [config.yaml](config.yaml)",
        f"- began from {origin}",
        f"- on {result.get('device', 'an unknown device')}; {versions}"
        + (f"; commit {result['git_commit']}" if result.get("git_commit") else ""),
    ]


def _origin(config: Mapping[str, Any], result: Mapping[str, Any]) -> tuple[str, str | None]:
    """What the weights began from, with its licence as far as it is known, and the hub's name of it."""
    node = config["backbone"]
    if (file := node.get("weights_file")) is not None:
        digest = f" (SHA-256 `{result['weights_sha256']}`)" if "weights_sha256" in result else ""
        return f"the file `{Path(file).name}`{digest}, whose licence is unknown", None
    if not node.get("pretrained"):
        return "random weights", None
    kind: type[Backbone] = imported(node["_target_"], "backbone")
    if issubclass(kind, TimmBackbone) and "name" in node:
        hub = (node.get("hub_config") or {}).get("hub_id") or hub_id(node["name"])
        if hub is not None:
            return f"`{hub}` of the Hugging Face hub, whose page states the licence", hub.partition("@")[0]
        import timm

        known: Any = timm.get_pretrained_cfg(node["name"])
        return f"timm's `{node['name']}`, licence {known.license or 'unknown'}", known.hf_hub_id
    name = config["runtime"]["choices"].get("backbone")
    return f"the published weights of `{name}`, licence {kind.weights_license}", None
