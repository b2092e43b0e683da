"""A finished run as a folder that stands alone: weights, configuration, preprocessing, model card, graphs."""

import contextlib
import importlib.util
import io
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf
from safetensors.torch import save
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from dmlbench.apps.loaded import (
    CARD,
    EXPORT_SCHEMA,
    MANIFEST,
    PREPROCESSING,
    WEIGHTS,
    TrainedModel,
    foreign_modules,
    load,
    preprocessing,
)
from dmlbench.apps.model_card import model_card
from dmlbench.results.store import CONFIG
from dmlbench.runtime import atomic_write, file_sha256, package_versions, whole_folder, write_json
from dmlbench.types import ConfigError, RunError, check_choice

GRAPHS = {"torch_export": "model.pt2", "onnx": "model.onnx"}
"""Files by the names of their formats."""

_TOLERANCE = 1e-4
"""Largest difference of a graph's row from the network's own, relative to the longest row."""
_EXPORTED_BATCH, _CHECKED_BATCHES = 11, (1, 3)
"""A size that no other dimension is likely to have, which tracing would take for the same."""
_ONNX_PACKAGES = ("onnx", "onnxscript", "onnxruntime")

log = logging.getLogger(__name__)


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
    run_dir: str | Path, output: str | Path, *, formats: Sequence[str] | None = None, license: str | None = None
) -> dict[str, str]:
    """Write a folder that ``dmlbench.load`` reads without the run, the data or a network connection.

    Graphs are compared with the network on noise, in batches of 1 and 3. ``dmlbench.json`` has every file's SHA-256.

    Args:
        run_dir: a complete run with its weights; or an exported folder.
        output: a folder that does not exist yet.
        formats: graphs to write, of ``GRAPHS``; None: each that is possible here.
        license: of the weights, as hubs call it (``cc-by-4.0``); None: not stated.

    Returns:
        For every format that was left out the reason.
    """
    for name in formats or ():
        check_choice("formats", name, list(GRAPHS))
    output = Path(output).expanduser().absolute()
    if output.exists():
        raise ConfigError(f"output: {output} exists, expected a new folder.")
    model = load(run_dir, device="cpu")
    try:
        with whole_folder(output) as folder:
            left_out = _fill(folder, model, formats, license)
    except OSError as error:
        raise RunError(f"cannot write {output}: {error.strerror or error}. Choose another folder.") from error
    return left_out


def _fill(folder: Path, model: TrainedModel, formats: Sequence[str] | None, license: str | None) -> dict[str, str]:
    state = {name: x.detach().cpu().contiguous().clone() for name, x in model.network.state_dict().items()}
    atomic_write(folder / WEIGHTS, save(state))
    atomic_write(folder / CONFIG, OmegaConf.to_yaml(_without_places(model.config)).encode())
    write_json(folder / PREPROCESSING, preprocessing(model))
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
    modules = foreign_modules(model.config)
    card = model_card(model, license=license, graphs=written, left_out=left_out, modules=modules)
    atomic_write(folder / CARD, card.encode())
    files = {path.name: file_sha256(path) for path in sorted(folder.iterdir()) if path.name != CARD}  # cards are edited
    write_json(
        folder / MANIFEST,
        {
            "schema": EXPORT_SCHEMA, "files": files, "embedding_size": model.embedding_size, "modules": modules,
            "left_out": left_out, "versions": package_versions(), "result": dict(model.result),
        },
    )  # fmt: skip
    images = noise(_EXPORTED_BATCH, model.image_size)
    with torch.no_grad():
        rows = [Embedder(m.network)(images) for m in (model, load(folder, device="cpu", modules=modules))]
    if not torch.equal(*rows):
        raise RunError(f"{model.name} gives other embeddings once it is exported; its state is not all in its weights")
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
        raise NoGraph(f"onnx needs {' and '.join(missing)}: pip install 'dmlbench[export]'")
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
            raise NoGraph(f"{_called(name, model)} is off by {off:.1e} of a row's length, more than {_TOLERANCE:.0e}")


def _called(name: str, model: TrainedModel) -> str:
    choices = model.config.runtime.choices
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
        raise NoGraph(f"{_called(name, model)} is not possible: {type(cause).__name__}: {reason[:200]}") from error


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


def _without_places(config: DictConfig) -> DictConfig:
    """The configuration without what names places or people of this machine."""
    container: Any = OmegaConf.to_container(config, resolve=True)
    for key in ("paths", "logger", "num_workers", "device"):
        container.pop(key, None)
    (container.get("runtime") or {}).pop("given", None)

    def shortened(node: Any) -> Any:
        if isinstance(node, Mapping):
            return {key: shortened(value) for key, value in node.items()}
        if isinstance(node, list):
            return [shortened(value) for value in node]
        return Path(node).name if isinstance(node, str) and node.startswith(("/", "~")) else node

    found = OmegaConf.create(shortened(container))
    assert isinstance(found, DictConfig)
    return found
