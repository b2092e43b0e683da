"""Models of the Hugging Face hub, whose downloads a folder replaces: names, weights, normalization, safety, errors."""

import json
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError
from safetensors.torch import save_file
from timm.models import save_for_hf
from timm.models.vision_transformer import VisionTransformer

from dmlbench.models.backbones import TimmBackbone
from dmlbench.models.hub import hub_id
from dmlbench.types import ConfigError

ARGUMENTS = {"depth": 2, "img_size": 96}
MEAN, STD = [0.1, 0.2, 0.3], [0.4, 0.5, 0.6]


class Hub:
    """A folder in place of downloads of the hub's client."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self.requests: list[tuple[str, str, str | None]] = []
        self.failure: Exception | None = None
        monkeypatch.setattr("timm.models._hub.hf_hub_download", self.download)

    def download(self, repo_id: str, filename: str, revision: str | None = None, cache_dir: Any = None) -> str:
        self.requests.append((repo_id, filename, revision))
        if self.failure is not None:
            raise self.failure
        if not (self.folder / filename).is_file():
            raise EntryNotFoundError(filename)
        return str(self.folder / filename)

    def change(self, **values: Any) -> None:
        path = self.folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | values))


@pytest.fixture
def published() -> VisionTransformer:
    torch.manual_seed(3)
    model = timm.create_model("test_vit", num_classes=5, **ARGUMENTS)
    model.pretrained_cfg |= {"mean": MEAN, "std": STD}
    return model.eval()


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, published: VisionTransformer) -> Hub:
    save_for_hf(published, tmp_path, model_args=ARGUMENTS, safe_serialization=True)
    return Hub(tmp_path, monkeypatch)


@pytest.mark.parametrize("name", ["hf_hub:owner/model", "hf-hub:owner/model", "hf_hub:owner/model@v1"])
def test_network_weights_and_normalization_are_those_of_the_hub(name: str, hub: Hub, published: Any) -> None:
    backbone = TimmBackbone(name, pretrained=True).eval()
    assert {request[::2] for request in hub.requests} == {("owner/model", "v1" if "@" in name else None)}
    assert [file for _, file, _ in hub.requests] == ["config.json", "model.safetensors"]
    assert backbone.mean.flatten().tolist() == pytest.approx(MEAN)
    assert backbone.std.flatten().tolist() == pytest.approx(STD)
    images = torch.randn(2, 3, 96, 96)
    with torch.no_grad():
        expected = published.forward_head(published.forward_features(images), pre_logits=True)
        torch.testing.assert_close(backbone.native(images), expected)


def test_without_pretrained_only_the_configuration_is_read(hub: Hub, published: Any) -> None:
    backbone = TimmBackbone("hf_hub:owner/model", pretrained=False)
    assert [file for _, file, _ in hub.requests] == ["config.json"]
    assert len(backbone.model.blocks) == 2
    assert not torch.equal(backbone.model.blocks[0].attn.qkv.weight, published.blocks[0].attn.qkv.weight)


def test_network_of_an_export_needs_no_hub(hub: Hub) -> None:
    backbone = TimmBackbone("hf_hub:owner/model", pretrained=True).eval()
    config = json.loads(json.dumps(backbone.hub_config))
    hub.failure = ConnectionError("no network")
    other = TimmBackbone(config["architecture"], pretrained=False, hub_config=config).eval()
    other.load_state_dict(backbone.state_dict())
    images = torch.randint(256, (1, 3, 96, 96), dtype=torch.uint8)
    with torch.no_grad():
        assert torch.equal(other.maps_of(images)[0], backbone.maps_of(images)[0])
    assert other.hub_config == config


def test_state_dict_of_pytorch_is_read(hub: Hub, published: Any) -> None:
    (hub.folder / "model.safetensors").unlink()
    torch.save(published.state_dict(), hub.folder / "pytorch_model.bin")
    backbone = TimmBackbone("hf_hub:owner/model", pretrained=True)
    assert torch.equal(backbone.model.blocks[1].mlp.fc1.weight, published.blocks[1].mlp.fc1.weight)


@pytest.mark.parametrize("change", ["prefix", "missing block"])
def test_weights_that_lack_tensors_of_the_network_are_refused(change: str, hub: Hub, published: Any) -> None:
    state = published.state_dict()
    if change == "prefix":
        state = {f"model.{name}": value for name, value in state.items()}
    else:
        state = {name: value for name, value in state.items() if not name.startswith("blocks.1.")}
    save_file(state, hub.folder / "model.safetensors")
    with pytest.raises(ConfigError, match=r"cannot be loaded \(the file lacks \d+ tensors of the network, such as"):
        TimmBackbone("hf_hub:owner/model", pretrained=True)


class Malicious:
    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.file),)


@pytest.mark.parametrize("named", [False, True])
def test_code_in_weights_is_not_executed(named: bool, hub: Hub) -> None:
    (hub.folder / "model.safetensors").unlink()
    (hub.folder / "pytorch_model.bin").write_bytes(pickle.dumps(Malicious(hub.folder / "executed"), protocol=2))
    if named:  # some versions of timm unpickle a file that the configuration names
        config = json.loads((hub.folder / "config.json").read_text())
        hub.change(pretrained_cfg=config["pretrained_cfg"] | {"hf_hub_filename": "pytorch_model.bin"})
    with pytest.raises(ConfigError, match=r"whose weights cannot be loaded .*never executed"):
        TimmBackbone("hf_hub:owner/model", pretrained=True)
    assert not (hub.folder / "executed").exists()


def test_missing_network_is_one_line_with_a_remedy(hub: Hub) -> None:
    hub.failure = LocalEntryNotFoundError("Cannot find an appropriate cached snapshot folder.\n\nTo enable lookups ...")
    with pytest.raises(ConfigError) as caught:
        TimmBackbone("hf_hub:owner/model", pretrained=True)
    assert str(caught.value) == (
        "backbone.name: got hf_hub:owner/model, whose config.json cannot be loaded (Cannot find an appropriate cached "
        "snapshot folder.). Run once on a connected machine and copy its Hugging Face cache (HF_HOME), or choose "
        "another model."
    )


@pytest.mark.parametrize(
    "change, message",
    [
        ({"architecture": "vit_of_tomorrow"}, "timm .* has no architecture 'vit_of_tomorrow'"),
        ({"model_args": {"checkpoint_path": "/tmp/x.pth"}}, "its model_args set checkpoint_path"),
        ({"model_args": {"depht": 2}}, "whose network cannot be loaded .*depht"),
    ],
)
def test_configuration_that_timm_cannot_build_is_an_error(change: dict[str, Any], message: str, hub: Hub) -> None:
    hub.change(**change)
    with pytest.raises(ConfigError, match=f"backbone.name: got hf_hub:owner/model.*{message}"):
        TimmBackbone("hf_hub:owner/model", pretrained=False)


@pytest.mark.parametrize("name", ["hf_hub:", "hf_hub:model", "hf-hub:a/b/c", "hf_hub:../b/c"])
def test_names_without_owner_and_model_are_errors(name: str) -> None:
    with pytest.raises(ConfigError, match=f"backbone.name: got {name}, expected hf_hub:owner/model"):
        hub_id(name)
    assert hub_id("resnet18.a1_in1k") is None
