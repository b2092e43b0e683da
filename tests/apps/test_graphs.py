"""Which networks torch.export and ONNX can hold, by trying: of every pooling, compared with the network itself."""

from pathlib import Path

import pytest
import torch
from composed import composed

from dmlbench import build
from dmlbench.apps.export import NoGraph, exported_program, of_format
from dmlbench.apps.loaded import TrainedModel
from dmlbench.data.batches.transforms import identity

CONF = Path(__file__).resolve().parents[2] / "conf" / "pooling"
POOLINGS = sorted(path.stem for path in CONF.glob("*.yaml") if path.stem != "none")
WITHOUT_ONNX = ("gemax",)
"""What docs/models.md says: poolings that the converter refuses."""
SMALLER = {"num_prototypes": 8, "memory_rows": 32, "start_step": 1}
"""So that prototypes start within a few batches."""


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
        with pytest.raises(NoGraph, match=r"onnx of .* is not possible"):
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
