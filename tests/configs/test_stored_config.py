"""The configuration that a run has stored: read back, or one clear message."""

import pytest
from omegaconf import OmegaConf

from dmlbench.config import load_config
from dmlbench.types import RunError


def test_what_was_stored_is_read_back(tmp_path) -> None:
    OmegaConf.save({"fit": {"max_steps": 3}}, tmp_path / "config.yaml")
    assert load_config(tmp_path / "config.yaml").fit.max_steps == 3


def test_a_missing_one_is_named_with_a_remedy(tmp_path) -> None:
    with pytest.raises(RunError, match=r"config\.yaml is missing.*dmlbench clean.*run it again"):
        load_config(tmp_path / "config.yaml")


@pytest.mark.parametrize("content", [b"fit: [1", b"- 1\n", b"\xff\xfe\x00fit", b"3"])
def test_a_damaged_one_is_named_with_a_remedy(tmp_path, content) -> None:
    (tmp_path / "config.yaml").write_bytes(content)
    with pytest.raises(RunError, match=r"config\.yaml is damaged .*dmlbench clean"):
        load_config(tmp_path / "config.yaml")
