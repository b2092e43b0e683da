"""Runs with a tuned ViT: exact resume after a kill, trained parameters, export, and the model that is loaded."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from composed import composed
from killed_runs import killed_after
from timm.models import save_for_hf

import dmlbench
from dmlbench.apps.export import export_run, exported_program
from dmlbench.components import component
from dmlbench.config import read_config
from dmlbench.evaluation.embeddings.embed import load_embeddings
from dmlbench.results.store import CONFIG, EMBEDDINGS, read_result
from dmlbench.runner import run
from dmlbench.training.checkpoint import load_checkpoint

SMALL = (
    *("dataset=glyphs", "dataset.table.num_classes=12", "dataset.table.images_per_class=4", "protocol=held_out"),
    *("dataset.table.image_size=32", "transform.train.padding=2", "device=cpu", "fit.keep=both"),
    *("fit.max_steps=4", "fit.validate_every=2", "fit.warmup_steps=1", "optim.lr=0.01", "optim.layer_decay=0.7"),
    *("sampler.classes_per_batch=2", "sampler.images_per_class=2", "pooling=native", "head.out_features=8"),
    *("backbone=timm", "backbone.pretrained=false", "backbone.image_size=32"),
)
TRAINED = {"lora": 6 * 4 * (64 + 192), "prompts": 6 * 5 * 64, "bitfit": 6 * (2 + 3 + 1 + 3 + 1) * 64 + 2 * 64}
METHODS: dict[str, tuple[str, ...]] = {
    "lora": ("tuning=lora", "tuning.rank=4", "tuning.dropout=0.1"),
    "prompts": ("tuning=prompts", "tuning.num_prompts=5"),
    "bitfit": ("tuning=bitfit",),
}


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A network of the hub, whose downloads a folder replaces."""
    torch.manual_seed(3)
    save_for_hf(timm.create_model("test_vit", num_classes=5), tmp_path / "hub", safe_serialization=True)
    monkeypatch.setattr(
        "timm.models._hub.hf_hub_download", lambda repo_id, filename, **options: str(tmp_path / "hub" / filename)
    )
    return "hf_hub:owner/model"


@pytest.mark.slow
@pytest.mark.parametrize("method", [*METHODS, None])
def test_tuned_runs_resume_exactly_and_their_models_are_loaded_and_exported(
    method: str | None, hub: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if method == "lora":
        pytest.importorskip("peft", reason="LoRA: extra peft")
    network = (f"backbone.name={hub}", "backbone.pretrained=true") if method == "lora" else ("backbone.name=test_vit",)
    choices = (*SMALL, *network, *METHODS.get(str(method), ()))

    def cfg(place: str) -> Any:
        paths = (f"paths.{key}={tmp_path / place}" for key in ("output_dir", "data_dir", "cache_dir"))
        return composed(*choices, *paths)

    whole = run(cfg("whole"))
    killed_after(3, monkeypatch, cfg("killed"))
    resumed = run(cfg("killed"))
    weights = [load_checkpoint(run_dir / "last.ckpt")["model"] for run_dir in (whole, resumed)]
    assert weights[0].keys() == weights[1].keys()
    assert all(torch.equal(value, weights[1][name]) for name, value in weights[0].items())

    result = read_result(whole)
    full = sum(p.numel() for p in timm.create_model("test_vit", num_classes=0, img_size=32).parameters())
    assert result["training"]["tuning"] == method
    assert result["training"]["trained_parameters"] == TRAINED.get(str(method), full) + 8 * 64

    kept = load_embeddings(whole / EMBEDDINGS).queries
    images = component(read_config(whole / CONFIG)["dataset"]["table"]).pixels[kept.ids.numpy()]
    assert torch.equal(dmlbench.load(whole, device="cpu").embed(images), kept.rows)
    assert export_run(whole, tmp_path / "folder", formats=[]) == {}
    shutil.rmtree(tmp_path / "hub")  # an exported folder needs no hub
    model = dmlbench.load(tmp_path / "folder", device="cpu")
    assert torch.equal(model.embed(images), kept.rows)
    card = (tmp_path / "folder" / "README.md").read_text()
    assert ("`owner/model` of the Hugging Face hub" in card) == (method == "lora")
    if method is not None:
        exported_program(model)  # compares its rows with the network's
