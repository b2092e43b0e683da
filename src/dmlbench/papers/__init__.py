"""Scores that nine papers print.

Of five papers every table, and the few scores of figures that their texts name:

- ``gsp``: Gürbüz, Şener and Alatan, Generalized Sum Pooling for Metric Learning, ICCV 2023
- ``xml``: Gürbüz and Alatan, Generalizable Embeddings with Cross-batch Metric Learning, ICIP 2023
- ``proxynca_pp``: Teh, DeVries and Taylor, ProxyNCA++, ECCV 2020
- ``avsl``: Zhang, Zheng, Zhou and Lu, Attributable Visual Similarity Learning, CVPR 2022
- ``oodml``: Milbich et al., Characterizing Generalization under Out-of-Distribution Shifts in Deep Metric Learning,
  NeurIPS 2021

Of four papers rows of their main tables, read elsewhere, as ``tables.csv`` says:

- ``hyp_vit``: Ermolov et al., Hyperbolic Vision Transformers: Combining Improvements in Metric Learning, CVPR 2022
- ``hist``: Lim et al., Hypergraph-Induced Semantic Tuplet Loss for Deep Metric Learning, CVPR 2022
- ``recall_at_k``: Patel, Tolias and Matas, Recall@k Surrogate Loss with Large Batches and Similarity Mixup, CVPR 2022
- ``hier``: Kim, Jeong and Kwak, HIER: Metric Learning Beyond Class Labels via Hierarchical Regularization, CVPR 2023

``<paper>/<table>.csv`` has a line for each score, in reading order; ``tables.csv`` describes the tables. Numbers are as
printed, slips included; notes name what is doubtful or missing. ``quoted.csv`` says of every method that a paper quotes
how to run it here, or what is missing.
"""

import csv
import re
from dataclasses import dataclass
from decimal import Decimal
from functools import cache
from importlib import resources
from importlib.resources.abc import Traversable

from dmlbench.types import DataError, closest


@dataclass(frozen=True)
class PaperTable:
    """Description of a table or figure of a paper.

    Attributes:
        name: name of the table, such as "gsp/table2".
        about: what the table compares.
        place: the section of the paper that contains the table, or the source of its numbers.
        unit: unit of the scores: "percent", "ms", or "FID".
        numbers: how each score was computed from the runs, according to the paper, such as "the best of 3 runs".
        note: remarks, such as which numbers are doubtful or missing. May be empty.
    """

    name: str
    about: str
    place: str
    unit: str
    numbers: str
    note: str


@dataclass(frozen=True)
class PaperScore:
    """One score of a paper's table.

    ``row``, ``metric`` and the table's column locate the score. The column is described by ``setting``,
    ``dataset``, ``backbone``, ``embedding_size``, ``protocol`` and ``kind`` together. Text that the paper does not
    state is an empty string; numbers that it does not state are None.

    Attributes:
        row: the label of the row in the paper, including any citation. If the paper groups rows, the label of the group
            comes first: row "GSP" of group "C2+" is "C2+GSP".
        setting: further text that identifies the column, such as "split 3".
        dataset: the data set, as named in ``dataset=``.
        backbone: the backbone, as named in ``backbone=``.
        embedding_size: number of embedding dimensions. For concatenated embeddings, this is the sum over all models.
        protocol: the protocol, as named in ``protocol=``. "oodml" stands for the splits of the ooDML paper.
        kind: "separated" (mean score of the models of all folds) or "concatenated" (score of their concatenated
            embeddings).
        metric: name of the metric in printed form, such as "MAP@R".
        mean: the score with the digits that the paper prints, in the table's unit.
        std: the printed standard deviation; None if the paper prints none.
        origin: who produced the score: "own" (the authors of the paper), "quoted" (copied from another paper) or
            "unknown".
        note: remarks on the score, such as a misprint, a doubt or missing information.
    """

    row: str
    setting: str
    dataset: str
    backbone: str
    embedding_size: int | None
    protocol: str
    kind: str
    metric: str
    mean: Decimal | None
    std: Decimal | None
    origin: str
    note: str


def tables() -> tuple[str, ...]:
    """Return the names of all paper tables that dmlbench contains, grouped by paper: "gsp/table1", "gsp/table2", ..."""
    return tuple(_index())


def describe_table(name: str) -> PaperTable:
    """Return the description of the table ``name``, such as "gsp/table2"."""
    if name not in _index():
        raise DataError(f"no table of a paper is called '{name}': {closest(name, tables())}")
    return _index()[name]


@cache
def load_table(name: str) -> tuple[PaperScore, ...]:
    """Return the scores of the table ``name``, in the order in which the paper prints them."""
    describe_table(name)
    return tuple(_score(line) for line in _lines(_folder().joinpath(f"{name}.csv")))


@cache
def why_quoted(name: str, row: str, dataset: str) -> str:
    """Why a quoted row is not run with its table, and how to run its method."""
    method = _STATE_OF_THE_ART.get(name, re.sub(r" \[\d+\]$", "", row))
    known = {line["method"]: line for line in _lines(_folder().joinpath("quoted.csv"))}
    if method not in known:
        raise DataError(f"quoted.csv does not know '{method}' of {name}: {closest(method, tuple(known))}")
    line = known[method]
    here = (
        f"the method is `{line['run'].format(dataset=dataset)}`"
        if line["run"]
        else f"the method is not in dmlbench, which lacks {line['lacks']}"
    )
    return f"from a study with settings of its own; {here}"


_STATE_OF_THE_ART = {"proxynca_pp/table14": "HORDE", "proxynca_pp/table15": "MS"}
"""What these tables call SOTA."""


@cache
def _index() -> dict[str, PaperTable]:
    return {line["name"]: PaperTable(**line) for line in _lines(_folder().joinpath("tables.csv"))}


def _score(line: dict[str, str]) -> PaperScore:
    size, mean, std = (line.pop(column) for column in ("embedding_size", "mean", "std"))
    return PaperScore(
        embedding_size=int(size) if size else None,
        mean=Decimal(mean) if mean else None,
        std=Decimal(std) if std else None,
        **line,
    )


def _folder() -> Traversable:
    return resources.files(__name__)


def _lines(file: Traversable) -> list[dict[str, str]]:
    return list(csv.DictReader(file.read_text(encoding="utf-8").splitlines()))
