"""Cached arrays: made once, checked when read, whole or not there."""

import logging
from pathlib import Path

import numpy as np
import pytest

from dmlbench.data.images.array_cache import cached_array


class Builder:
    def __init__(self) -> None:
        self.calls = 0

    def __call__(self) -> np.ndarray:
        self.calls += 1
        return np.arange(600, dtype=np.uint8).reshape(20, 30)


def get(folder: Path, build: Builder, **key: int) -> tuple[np.ndarray, str]:
    return cached_array(folder, "numbers", key=key, build=build)


def test_the_second_call_maps_the_file_of_the_first(tmp_path: Path) -> None:
    build = Builder()
    digest, (array, again) = get(tmp_path / "new", build, a=1)[1], get(tmp_path / "new", build, a=1)
    assert build.calls == 1
    assert isinstance(array, np.memmap)
    np.testing.assert_array_equal(array, build())
    assert again == digest
    (file,) = (tmp_path / "new").iterdir()
    np.testing.assert_array_equal(np.load(file), build())  # a plain .npy for everyone else
    with pytest.raises(ValueError, match="read-only"):
        array[0, 0] = 1
    get(tmp_path / "new", build, a=2)
    assert len(list((tmp_path / "new").iterdir())) == 2


@pytest.mark.parametrize("damage", ["truncate", "flip", "empty", "append"])
def test_a_damaged_file_is_made_again(tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture) -> None:
    build = Builder()
    _, digest = get(tmp_path, build)
    (file,) = tmp_path.iterdir()
    content = bytearray(file.read_bytes())
    content[300] ^= damage == "flip"
    file.write_bytes({"truncate": content[:400], "flip": content, "empty": b"", "append": content + b"x"}[damage])
    with caplog.at_level(logging.WARNING):
        _, again = get(tmp_path, build)
    assert build.calls == 2
    assert again == digest
    assert "damaged" in caplog.text
