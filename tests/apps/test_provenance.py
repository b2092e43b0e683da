"""Runs tell the weights that they started from and the width of their embeddings, whatever is asked for today."""

from pathlib import Path

import pytest
from omegaconf import OmegaConf

from dmlbench.apps.table_comparison import PUBLISHED, Provenance, are_published, provenance_of

INCEPTION, RESNET = (PUBLISHED[name].ljust(64, "0") for name in ("bn_inception", "resnet50"))


def _provenance(folder: Path, backbone: str, *hashes: str | None, **node: object) -> Provenance:
    size = {"head": {"out_features": 8}, "runtime": {"embedding_size": 24}}
    OmegaConf.save({"backbone": {"weights_file": None, **node}, **size}, folder / "config.yaml")
    return provenance_of(folder / "config.yaml", backbone, hashes)


def test_the_hash_that_a_run_recorded_decides_and_not_the_file_of_today(tmp_path: Path) -> None:
    file = tmp_path / "bn_inception-52deb4733.pth"
    file.write_bytes(b"something else by now")
    node = {"pretrained": True, "weights_file": str(file)}
    assert _provenance(tmp_path, "bn_inception", INCEPTION, **node) == Provenance((), 24)
    assert _provenance(tmp_path, "bn_inception_levels", INCEPTION, "f" * 64, **node).other_weights == (
        f"OTHER WEIGHTS: {file} (SHA-256 ffffffffffff)",
    )
    assert _provenance(tmp_path, "resnet50", INCEPTION, **node).other_weights  # another backbone's
    assert _provenance(tmp_path, "bn_inception", None, **node).other_weights == (f"OTHER WEIGHTS: {file}",)
    file.unlink()
    assert _provenance(tmp_path, "bn_inception", None, **node).other_weights == ()  # by its name


@pytest.mark.parametrize(
    ("backbone", "node", "said"),
    [
        ("resnet50", {"pretrained": True, "name": "resnet50.tv_in1k"}, ()),
        ("resnet50_levels", {"pretrained": True, "name": "resnet50.a1_in1k"}, ("resnet50.a1_in1k of timm",)),
        ("resnet50", {"pretrained": False, "name": "resnet50.tv_in1k"}, ("random ones",)),
        ("bn_inception", {"pretrained": False}, ("random ones",)),
        ("resnet20", {}, ()),  # which no paper has
    ],
)
def test_weights_that_no_file_was_named_for(tmp_path: Path, backbone: str, node: dict, said: tuple[str, ...]) -> None:
    found = _provenance(tmp_path, backbone, None, **node).other_weights
    assert found == tuple(f"OTHER WEIGHTS: {text}" for text in said)


def test_the_embedding_size_of_levels_is_that_of_the_compared_rows(tmp_path: Path) -> None:
    for inference, size in (("rectified", 512), ("concat", 1536)):
        head = {"level_size": 512, "num_levels": 3, "inference": inference}
        OmegaConf.save({"head": head, "runtime": {"embedding_size": 3072}}, tmp_path / "config.yaml")
        assert provenance_of(tmp_path / "config.yaml", "resnet20", []).embedding_size == size


def test_a_file_is_hashed_again_when_it_has_changed(tmp_path: Path) -> None:
    file = tmp_path / "resnet50-0676ba61.pth"
    assert are_published(str(file))
    file.write_bytes(b"1")
    assert not are_published(str(file))
