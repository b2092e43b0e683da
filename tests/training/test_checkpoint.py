import os
import pickle

import pytest
import torch

from dmlbench.models.weights import load_weights
from dmlbench.training.checkpoint import load_checkpoint, save_checkpoint
from dmlbench.types import ConfigError, RunError


@pytest.mark.parametrize("share", [0.0, 0.3, 0.99])
def test_truncated_checkpoint_is_refused_with_a_remedy(tmp_path, share: float) -> None:
    path = tmp_path / "last.ckpt"
    save_checkpoint(path, {"w": torch.randn(1000)})
    content = path.read_bytes()
    path.write_bytes(content[: int(share * len(content))])
    with pytest.raises(RunError, match=r"last\.ckpt.*cannot be read.*Delete the checkpoints"):
        load_checkpoint(path)


def _same(one: object, other: object) -> bool:
    if isinstance(one, dict):
        return isinstance(other, dict) and one.keys() == other.keys() and all(_same(one[k], other[k]) for k in one)
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


def test_a_flipped_bit_anywhere_is_refused_or_means_nothing(tmp_path) -> None:
    path = tmp_path / "best.ckpt"
    state = {"model": {"w": torch.arange(20.0)}, "step": 7}
    save_checkpoint(path, state)
    whole = path.read_bytes()
    refused = set()
    tensor = whole.index(state["model"]["w"].numpy().tobytes())
    for place in {*range(0, len(whole), 11), *range(tensor, tensor + 80)}:
        content = bytearray(whole)
        content[place] ^= 1 << place % 8
        path.write_bytes(content)
        try:
            loaded = load_checkpoint(path)
        except RunError as error:
            assert f"the checkpoint {path}" in str(error) and "Delete the checkpoints" in str(error)
            refused.add(place)
        else:
            assert _same(loaded, state), place  # padding, times
    assert refused >= set(range(tensor, tensor + 80))


def test_checkpoint_that_would_execute_code_is_refused(tmp_path) -> None:
    class Harmful:
        def __reduce__(self):
            return os.system, (f"touch {tmp_path / 'executed'}",)

    torch.save({"model": Harmful()}, tmp_path / "last.ckpt", pickle_module=pickle)
    with pytest.raises(RunError, match="cannot be read: it holds Python objects") as refused:
        load_checkpoint(tmp_path / "last.ckpt")
    assert not (tmp_path / "executed").exists()
    with pytest.raises(ConfigError, match="it holds Python objects") as refused_as_weights:
        load_weights(torch.nn.Linear(1, 1), tmp_path / "last.ckpt")
    for error in (refused, refused_as_weights):  # torch's advice is how to execute them all the same
        assert "weights_only" not in str(error.value) and "can still be loaded" not in str(error.value)


def test_full_disk_keeps_the_checkpoint_before(tmp_path, monkeypatch) -> None:
    path = tmp_path / "last.ckpt"
    save_checkpoint(path, {"step": 1})

    def full_disk(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(RunError, match=r"No space left on device\. The previous checkpoint is intact"):
        save_checkpoint(path, {"step": 2})
    monkeypatch.undo()
    assert load_checkpoint(path)["step"] == 1 and list(tmp_path.iterdir()) == [path]
