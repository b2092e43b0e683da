"""Episodes of few-shot adaptation: the images of each class that are the support."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from dmlbench.data.readers.files import read_pickle
from dmlbench.runtime import generator
from dmlbench.types import ConfigError, DataError, ImageTable, IntArray, require_file

_SECOND = "_2"
"""Suffix of an image of the second folder whose name the first folder has, too."""


def drawn_support(labels: IntArray, *, shots: int, seed: int, episode: int) -> IntArray:
    """Draw ``shots`` images of each class without replacement; return their sorted positions in ``labels`` [N]."""
    random = generator(seed, "few_shot", shots, episode)
    chosen = [random.choice(np.flatnonzero(labels == label), shots, replace=False) for label in np.unique(labels)]
    return np.sort(np.concatenate(chosen)).astype(np.int64)


def check_shots(labels: IntArray, shots: Sequence[int], class_names: Sequence[str]) -> None:
    """Require two support images and two queries of every class."""
    names, counts = np.unique(labels, return_counts=True)
    smallest = int(counts.argmin())
    for k in shots:
        if k < 2:
            raise ConfigError(f"shots: got {k}, expected at least 2. The margin loss needs two images of a class.")
        if k > counts[smallest] - 2:
            raise ConfigError(
                f"shots: got {k}, expected at most {counts[smallest] - 2}. Two images of every test class must remain, "
                f"and class '{class_names[names[smallest]]}' has {counts[smallest]}."
            )


@dataclass(frozen=True)
class OfficialEpisodes:
    """The published episodes of a data set.

    Their file names come from two folders merged into one. Where both had a name, the file of the folder merged second
    was renamed. Which folder that was is not published. ``merge_order`` has first the one whose files kept their names.
    """

    # by the split's own key: its test classes and ``episodes[k][episode][class] -> names``
    splits: Mapping[Any, tuple[frozenset[str], Mapping[int, Mapping[int, Mapping[str, Sequence[str]]]]]]
    merge_order: tuple[str, str]
    source: str
    sha256: str

    def support(self, table: ImageTable, rows: IntArray, *, shots: int, episode: int) -> IntArray:
        """Sorted positions of an episode's support in ``rows``, the test images [N] of one of the published splits."""
        labels = table.labels[rows]
        name_of = {int(label): _plain(table.class_names[label]) for label in np.unique(labels)}
        matching = [episodes for names, episodes in self.splits.values() if names == set(name_of.values())]
        if len(matching) != 1:
            raise DataError(
                f"'{self.source}': got {len(matching)} splits with the {len(name_of)} test classes of {table.name}, "
                "expected one. Leave official out to draw episodes at random."
            )
        if shots not in matching[0]:
            raise ConfigError(
                f"shots: got {shots}, expected one of {', '.join(map(str, matching[0]))} in '{self.source}'."
            )
        if episode not in matching[0][shots]:
            raise ConfigError(f"episodes: expected at most {len(matching[0][shots])}, as in '{self.source}'.")
        chosen = {_plain(name): files for name, files in matching[0][shots][episode].items()}
        if chosen.keys() != set(name_of.values()):
            raise DataError(f"'{self.source}' has an episode with other classes than its split. Leave official out.")
        position = {
            (name_of[int(label)], folder.parent.name, folder.name): index
            for index, (label, folder) in enumerate(
                zip(labels, map(PurePosixPath, table.paths[rows].tolist()), strict=True)
            )
        }
        found = [self._resolve(position, name, file) for name, files in chosen.items() for file in files]
        if len(set(found)) != shots * len(chosen):
            raise DataError(
                f"'{self.source}': got {len(set(found))} images in an episode of {shots} shots, expected "
                f"{shots * len(chosen)}."
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
                f"{' and '.join(self.merge_order)}. Restore the original folders, or leave official out to draw "
                "episodes at random."
            )
        return at[1] if renamed else at[0]


def read_official(path: Path, merge_order: Sequence[str]) -> OfficialEpisodes:
    """Read the published episodes of a file of splits, by the restricted unpickler."""
    if len(merge_order) != 2 or merge_order[0] == merge_order[1]:
        raise ConfigError(
            f"merge_order: got {list(merge_order)}, expected [<folder>,<folder>], the order in which the two folders "
            "of images were merged. If you do not know it, leave official out to draw episodes at random."
        )
    require_file(path)
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DataError(f"'{path}' cannot be read ({error.strerror}). Make it readable.") from error
    held = read_pickle(content, name=path.name)
    try:
        splits = {
            key: (frozenset(_plain(str(name)) for name in split["test"]), split["test_episodes"])
            for key, split in held.items()
        }
    except (AttributeError, KeyError, TypeError) as error:
        raise DataError(f"'{path}' holds no splits with test_episodes ({error!r}).") from error
    first, second = merge_order
    return OfficialEpisodes(splits, (first, second), path.name, hashlib.sha256(content).hexdigest())


def _plain(name: str) -> str:
    """A class name without the slash of ``Ram C/V``, as in folder names."""
    return str(name).replace("/", "-")
