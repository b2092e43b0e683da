"""The configuration that a run has stored: read back, or one clear message."""

import pytest
from omegaconf import OmegaConf

from dmlbench.config import config_folder, load_config, read_config
from dmlbench.types import RunError


@pytest.mark.parametrize("content", [b"fit: [1", b"- 1\n", b"\xff\xfe\x00fit", b"3"])
def test_a_damaged_one_is_named_with_a_remedy(tmp_path, content) -> None:
    (tmp_path / "config.yaml").write_bytes(content)
    with pytest.raises(RunError, match=r"config\.yaml is damaged .*dmlbench clean"):
        load_config(tmp_path / "config.yaml")
    (tmp_path / "config.yaml").unlink()
    with pytest.raises(RunError, match=r"config\.yaml is missing.*dmlbench clean.*run it again"):
        load_config(tmp_path / "config.yaml")


def test_a_stored_configuration_is_read_as_omegaconf_reads_it(tmp_path) -> None:
    values = "1e-4, 1.e3, -.inf, .5, 1_000, 0x1f, 2020-01-01, yes, 'no', null, ~, '${b.c}', 1e5, 08"
    text = f"a: [{values}]\nb:\n  c: é\n  1: ''\n  d: ???\n  e: 1:30\n"
    (tmp_path / "config.yaml").write_text(text, encoding="utf-8")
    paths = [
        tmp_path / "config.yaml",
        *(config_folder() / "loss").glob("*.yaml"),
        config_folder() / "recipe" / "gsp.yaml",
    ]
    assert len(paths) > 20
    for path in paths:
        assert read_config(path) == OmegaConf.to_container(OmegaConf.load(path), resolve=False), path
    (tmp_path / "config.yaml").write_text("fit: {max_steps: 3, max_steps: 4}\n")
    with pytest.raises(RunError, match=r"damaged .*'max_steps' stands twice"):
        load_config(tmp_path / "config.yaml")
