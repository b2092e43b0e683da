"""Episodes of few-shot adaptation: which images of each class are the support; all others are the queries."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from dmlbench.data.readers.safe_pickle import read_pickle
from dmlbench.runtime import generator
from dmlbench.types import ConfigError, DataError, ImageTable, IntArray, not_a_file

_SECOND = "_2"
"""What ends the name of an image that found its name taken when the second folder was merged into the first."""


def drawn_support(labels: IntArray, *, shots: int, seed: int, episode: int) -> IntArray:
    """Positions of ``shots`` images of each class, drawn without replacement; sorted.

    Args:
        labels: [N] classes of the test images.
        shots: k, below the size of every class (``check_shots``).
        seed: of the run.
        episode: number of the episode.
    """
    random = generator(seed, "few_shot", shots, episode)
    chosen = [random.choice(np.flatnonzero(labels == label), shots, replace=False) for label in np.unique(labels)]
    return np.sort(np.concatenate(chosen)).astype(np.int64)


def check_shots(labels: IntArray, shots: Sequence[int], class_names: Sequence[str]) -> None:
    """
    Raises:
        ConfigError: a number of shots is below 2, or leaves fewer than two images of a class.
    """
    names, counts = np.unique(labels, return_counts=True)
    smallest = int(counts.argmin())
    for k in shots:
        if k < 2:
            raise ConfigError(f"shots ({k}) must be at least 2: the margin loss needs two images of a class")
        if k > counts[smallest] - 2:
            raise ConfigError(
                f"shots ({k}) must leave two images of every test class, so that queries have something to find; class "
                f"'{class_names[names[smallest]]}' has {counts[smallest]}: lower shots"
            )


@dataclass(frozen=True)
class OfficialEpisodes:
    """The published episodes of a data set: files of the support, by number of shots, episode and class.

    The published names are those of one folder a class into which two folders with the same numbering were merged.
    Most names exist in one of the two only, but some classes had a name twice; then the file of the folder that was
    merged second was renamed. Which that was is not published, and the file names do not say it.

    Attributes:
        splits: by the split's own key: its test classes and ``episodes[k][episode][class] -> names``.
        merge_order: the two folders, first the one whose files kept their names.
        source: file that they were read from.
        sha256: of that file.
    """

    splits: Mapping[Any, tuple[frozenset[str], Mapping[int, Mapping[int, Mapping[str, Sequence[str]]]]]]
    merge_order: tuple[str, str]
    source: str
    sha256: str

    def support(self, table: ImageTable, rows: IntArray, *, shots: int, episode: int) -> IntArray:
        """Sorted positions in ``rows`` of the episode's support.

        Args:
            table: the data set, with the two folders unmerged.
            rows: [N] of the test images, of the classes of exactly one of the published splits.

        Raises:
            ConfigError: there is no such number of shots, or no such episode.
            DataError: the classes are those of no published split, or a name cannot be resolved with certainty.
        """
        labels = table.labels[rows]
        name_of = {int(label): _plain(table.class_names[label]) for label in np.unique(labels)}
        matching = [episodes for names, episodes in self.splits.values() if names == set(name_of.values())]
        if len(matching) != 1:
            raise DataError(
                f"the {len(name_of)} test classes of {table.name} are those of {len(matching)} splits in "
                f"'{self.source}' instead of one; leave official out, and own episodes are drawn"
            )
        if shots not in matching[0]:
            raise ConfigError(f"shots ({shots}) is not in '{self.source}'; it has {', '.join(map(str, matching[0]))}")
        if episode not in matching[0][shots]:
            raise ConfigError(f"'{self.source}' has {len(matching[0][shots])} episodes; lower episodes")
        chosen = {_plain(name): files for name, files in matching[0][shots][episode].items()}
        if chosen.keys() != set(name_of.values()):
            raise DataError(f"'{self.source}' has an episode of other classes than its split; leave official out")
        position = {
            (name_of[int(label)], folder.parent.name, folder.name): index
            for index, (label, folder) in enumerate(
                zip(labels, map(PurePosixPath, table.paths[rows].tolist()), strict=True)
            )
        }
        found = [self._resolve(position, name, file) for name, files in chosen.items() for file in files]
        if len(set(found)) != shots * len(chosen):
            raise DataError(
                f"'{self.source}': an episode of {shots} shots names {len(set(found))} images; leave it out"
            )
        return np.sort(np.array(found, dtype=np.int64))

    def _resolve(self, position: Mapping[tuple[str, str, str], int], class_name: str, file: str) -> int:
        path = PurePosixPath(file)
        renamed = path.stem.endswith(_SECOND)
        name = path.stem.removesuffix(_SECOND) + path.suffix
        at = [position[key] for folder in self.merge_order if (key := (class_name, folder, name)) in position]
        if not at or (renamed and len(at) < 2):
            wanted = "both" if renamed else "any"
            raise DataError(
                f"'{file}' of class '{class_name}' in '{self.source}' is not in {wanted} of the folders "
                f"{' and '.join(self.merge_order)} of this data set; it needs the images in their two original "
                "folders: leave official out, and own episodes are drawn"
            )
        return at[1] if renamed else at[0]


def read_official(path: Path, merge_order: Sequence[str] | None) -> OfficialEpisodes:
    """The published episodes of a file of splits, by the restricted unpickler.

    Raises:
        ConfigError: ``merge_order`` does not name two folders.
        DataError: the file is missing, or holds no episodes.
    """
    if merge_order is None or len(set(merge_order)) != 2 or len(merge_order) != 2:
        raise ConfigError(
            "official needs merge_order=[<folder>,<folder>]: its file names are those of two folders merged into one, "
            "where some names exist in both, and only the order of merging tells whose file was renamed; if you do not "
            "know it, leave official out, and own episodes are drawn"
        )
    if what := not_a_file(path):
        raise DataError(f"'{path}' is {what}, not a file")
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DataError(f"'{path}' cannot be read ({error.strerror})") from error
    held = read_pickle(content, name=path.name)
    try:
        splits = {
            key: (frozenset(_plain(str(name)) for name in split["test"]), split["test_episodes"])
            for key, split in held.items()
        }
    except (AttributeError, KeyError, TypeError) as error:
        raise DataError(f"'{path}' holds no splits with test_episodes ({error!r})") from error
    first, second = merge_order
    return OfficialEpisodes(splits, (first, second), path.name, hashlib.sha256(content).hexdigest())


def _plain(name: str) -> str:
    """A class as a folder can be named, without the slash of ``Ram C/V``."""
    return str(name).replace("/", "-")
