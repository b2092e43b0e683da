"""Compiled code that is missing or fails is done without, and the log says so."""

import logging

import pytest

from dmlbench import machine_code
from dmlbench.models import avsl_tiles  # a module that needs no compiler


@pytest.fixture(autouse=True)
def _forgotten():
    machine_code.load.cache_clear()
    yield
    machine_code.load.cache_clear()


def test_without_numba_nothing_is_loaded_and_the_log_names_the_extra(monkeypatch, caplog) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with caplog.at_level(logging.INFO):
        assert machine_code.load("dmlbench.models.avsl_tiles", task="things are done") is None
    assert "things are done without compiled code, in more time; the extra 'fast' (numba) brings it" in caplog.text


@pytest.mark.parametrize("error", [OSError("disk full"), ImportError("numba needs another numpy")])
def test_what_fails_when_tried_out_is_done_without_and_said_once(monkeypatch, caplog, error) -> None:
    def broken() -> None:
        raise error

    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    monkeypatch.setattr(avsl_tiles, "try_out", broken, raising=False)
    for _ in range(2):
        assert machine_code.load("dmlbench.models.avsl_tiles", task="things are done") is None
    assert caplog.text.count(f"because numba cannot be used: {error}") == 1


def test_a_module_is_tried_out_once_and_given(monkeypatch) -> None:
    calls = []
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    monkeypatch.setattr(avsl_tiles, "try_out", lambda: calls.append(1), raising=False)
    for _ in range(2):
        assert machine_code.load("dmlbench.models.avsl_tiles", task="things are done") is avsl_tiles
    assert calls == [1]
