"""Submissions: embeddings of a method that somebody else trained, with a description; checked and imported."""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field, field_validator
from torch.nn.functional import normalize

from dmlbench.apps.import_embeddings import Imported, files_of, import_config
from dmlbench.components import component
from dmlbench.evaluation.embeddings.embed import read_embeddings
from dmlbench.external_files import Schema, read
from dmlbench.types import RunError, is_file_name

DESCRIPTION = "submission.yaml"
_COMPARED = 64  # images by whose cosines two files are recognized as one model, whatever its rotation or scale
_SAME = 1e-4  # largest difference of these cosines

Coordinates = tuple[int, int]


class Submission(Schema):
    """``submission.yaml``; the words are printed as they are under every table."""

    method: str
    backbone: str = Field(min_length=1)
    pretraining_data: str = Field(min_length=1)
    trained_parameters: int = Field(ge=0)
    image_size: int = Field(ge=1)
    tuning_budget: str = Field(min_length=1)
    selected: str = Field(min_length=1)
    paper: str | None = None
    code: str | None = None
    dataset: str = Field(pattern=r"^\w+$")
    protocol: str = Field(default="mlrc", pattern=r"^\w+$")
    embeddings: str = "fold{fold}_rep{repeat}.npz"
    gallery: str | None = None

    @field_validator("method")
    @classmethod
    def _names_files(cls, name: str) -> str:
        if not is_file_name(name):
            raise ValueError("letters, digits, '.', '_' and '-'")
        return name

    @property
    def trained(self) -> str:
        """What is told of the training, which nobody has verified."""
        sources = [f"{what} {value}" for what, value in (("paper", self.paper), ("code", self.code)) if value]
        return "; ".join(
            [
                f"TRAINING NOT VERIFIED, {self.backbone}, pretrained on {self.pretraining_data}",
                f"{self.trained_parameters:,} trained parameters, {self.image_size} pixels",
                f"tuning: {self.tuning_budget}",
                *sources,
            ]
        )


@dataclasses.dataclass(frozen=True)
class Checked:
    """An accepted submission, and what looks implausible about its scores."""

    imported: Imported
    flags: tuple[str, ...]


def read_submission(folder: Path) -> Submission:
    return read(folder / DESCRIPTION, Submission, RunError)


def check_submission(args: Any, submission: Submission, folder: Path) -> Checked:
    """Check all files of a submission, score them, and make runs of a config of them.

    Args:
        args: of ``dmlbench import``, with the submission's data set and protocol.

    Raises:
        RunError: a file is missing, is not of the protocol's test images, has labels of other classes or numbers that
            are not finite, or two files come from one model.
    """
    patterns = {"embeddings": submission.embeddings, "gallery": submission.gallery}
    given = {key: None if pattern is None else str(folder / pattern) for key, pattern in patterns.items()}
    protocol = component(args.protocol)
    coordinates = itertools.product(range(protocol.num_folds), range(protocol.num_repeats))
    files = {at: files_of({"embeddings": str(given["embeddings"])}, *at)["embeddings"] for at in coordinates}
    missing = [file for file in files.values() if not file.is_file()]
    problems = _copies([file for file in files.values() if file.is_file()])
    if missing:
        problems.append(
            f"{len(missing)} of the {len(files)} files of protocol '{protocol.name}' are missing: "
            f"{', '.join(file.name for file in missing)}. A submission needs all of them."
        )
    if problems:
        raise RunError("\n  ".join(problems))
    imported = import_config(
        dataclasses.replace(
            args,
            name=submission.method,
            **given,
            trained=submission.trained,
            selected=submission.selected,
            allow_partial=False,
        )
    )
    num_queries = len(read_embeddings(files[0, 0]).queries)
    return Checked(imported, tuple(_implausible(imported.scores, num_queries)))


def _copies(files: Sequence[Path]) -> list[str]:
    """Which files cannot be read or come from the model of another file, a line each."""
    cosines, unreadable = dict[Path, NDArray[np.float64]](), []
    for file in files:
        try:
            cosines[file] = _cosines(file)
        except RunError as error:
            unreadable.append(str(error))
    return unreadable + [
        f"{other.name} is a copy of {one.name}: the cosines of its images are equal within {_SAME:g}. Train one "
        "model for each fold and repeat."
        for one, other in itertools.combinations(cosines, 2)
        if cosines[one].shape == cosines[other].shape and np.abs(cosines[one] - cosines[other]).max() < _SAME
    ]


def _cosines(file: Path) -> NDArray[np.float64]:
    """Cosines among some queries of a file, in the order of their ids."""
    queries = read_embeddings(file).queries
    some = torch.argsort(queries.ids)[:: max(len(queries) // _COMPARED, 1)]
    rows = normalize(queries.rows[some].double())
    return (rows @ rows.T).numpy()


def _implausible(scores: Mapping[Coordinates, Mapping[str, float]], num_queries: int) -> list[str]:
    """What a reader should know before believing the scores."""
    chance = 8 * (0.25 / num_queries) ** 0.5  # the range of 12 shares of so many queries stays below it
    first = np.array([each["p_at_1"] for each in scores.values() if "p_at_1" in each])
    flags = []
    if len(first) and first.max() > 0.99:
        flags.append(
            f"P@1 reaches {100 * first.max():.2f}: do queries find themselves, or did the model see the test half?"
        )
    if len(first) and np.ptp(first) > max(0.2, chance):
        flags.append(f"P@1 ranges from {100 * first.min():.2f} to {100 * first.max():.2f} over folds and repeats")
    return flags
