"""What is known about the sources of the published data sets."""

import re
from pathlib import Path

import pytest

from dmlbench.data.preparation.catalog import SOURCES
from dmlbench.data.readers.layouts import DataFolder

BENCHMARKS = {  # images, classes
    "cub200": (11_788, 200),
    "cub200_2010": (6_033, 200),
    "cars196": (16_185, 196),
    "sop": (120_053, 22_634),
    "cifar10": (60_000, 10),
    "cifar100": (60_000, 100),
    "tiny_imagenet": (100_000, 200),
    "inshop": (52_712, None),  # query and gallery share their classes
}


def test_every_data_set_with_files_of_its_own_is_known(repository: Path) -> None:
    embedded = {"folder", "hf", "glyphs", "glyphs_collage"}
    of_cifar100 = {"cifar100_collage", "cifar100_collage_distilled", "cifar100_training_classes"}
    configured = {path.stem for path in (repository / "conf" / "dataset").glob("*.yaml")}
    assert set(SOURCES) == configured - embedded - of_cifar100


@pytest.mark.parametrize("source", SOURCES.values(), ids=list(SOURCES))
def test_entries_are_complete_and_well_formed(source: DataFolder) -> None:
    assert all((source.title, source.terms, source.citation, source.by_hand, source.archives))
    assert source.home.startswith("http")
    names = [archive.name for archive in source.archives]
    assert len(set(names)) == len(names)
    for archive in source.archives:
        assert archive.md5 is None or re.fullmatch("[0-9a-f]{32}", archive.md5)
        assert all(url.endswith("/" + archive.name) for url in source.links(archive))
        assert archive.md5 or not source.links(archive)  # nothing is downloaded that cannot be checked
    assert source.by_hand[-1] not in ".;"


@pytest.mark.parametrize("name", BENCHMARKS)
def test_published_counts_add_up(name: str) -> None:
    counts = SOURCES[name].published
    images, classes = BENCHMARKS[name]
    assert sum(count for count, _ in counts.by_role.values()) == images
    assert classes is None or sum(count for _, count in counts.by_role.values()) == classes
