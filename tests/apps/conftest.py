"""A small data set for imported embeddings, and the arguments that import them."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from composed import arguments

from dmlbench.components import component
from dmlbench.types import ImageTable


@pytest.fixture(scope="session")
def _arguments(tmp_path_factory: pytest.TempPathFactory) -> Any:
    sizes = [f"dataset.table.{key}" for key in ("num_classes=12", "images_per_class=4", "image_size=32")]
    return arguments("import", *sizes, f"paths.cache_dir={tmp_path_factory.mktemp('cache')}")


@pytest.fixture(scope="session")
def table(_arguments: Any) -> ImageTable:
    made: ImageTable = component(_arguments.dataset["table"])
    return made


@pytest.fixture
def import_arguments(_arguments: Any, tmp_path: Path) -> Any:
    """Arguments of ``dmlbench import`` into ``tmp_path / "out"``."""
    return dataclasses.replace(_arguments, paths=dataclasses.replace(_arguments.paths, output_dir=f"{tmp_path}/out"))
