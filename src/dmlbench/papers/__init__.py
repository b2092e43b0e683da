"""What five papers print, as data: every score of their tables, and the few of figures that their texts name.

- ``gsp``: Gürbüz, Şener and Alatan, Generalized Sum Pooling for Metric Learning, ICCV 2023
- ``xml``: Gürbüz and Alatan, Generalizable Embeddings with Cross-batch Metric Learning, ICIP 2023
- ``proxynca_pp``: Teh, DeVries and Taylor, ProxyNCA++, ECCV 2020
- ``avsl``: Zhang, Zheng, Zhou and Lu, Attributable Visual Similarity Learning, CVPR 2022
- ``oodml``: Milbich et al., Characterizing Generalization under Out-of-Distribution Shifts in Deep Metric Learning,
  NeurIPS 2021

``<paper>/<table>.csv`` has a line for each score, in the order of reading; ``tables.csv`` says what each table is. The
numbers are as printed, slips included: what is doubtful or missing says so in its note. ``quoted.csv`` says of every
method whose scores a paper took from elsewhere how it is run here, or what it needs that is not here.
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
    """What a table of a paper is.

    Attributes:
        name: ``<paper>/<table>``, as in "gsp/table2".
        about: what it compares, in our words.
        place: the section that it belongs to.
        unit: of its numbers: "percent", "ms", or "FID" for a Frechet distance, which has none.
        numbers: what its means and deviations are over, as far as the paper says.
        note: what has to be known to read it; empty where nothing has.
    """

    name: str
    about: str
    place: str
    unit: str
    numbers: str
    note: str


@dataclass(frozen=True)
class PaperScore:
    """One score of a table: no two have the same row, column (setting to kind) and metric.

    A string is empty where the paper does not say, or where there is nothing to say.

    ``mean`` and ``std`` are decimals with the printed digits, in the unit of the table: percent, while scores of runs
    are fractions; to add or subtract the two raises.

    Attributes:
        row: the paper's label of the row with its citation, and with that of its group ("C2+" and "GSP" are "C2+GSP").
        setting: what else the column stands for, besides data set and metric.
        dataset: as configurations name it.
        backbone: as configurations name it.
        embedding_size: dimensions of what is ranked; of a concatenation, those of all models together.
        protocol: as configurations name it; "oodml" are the splits of that paper.
        kind: "separated" or "concatenated" models of the folds.
        metric: as tables of results label it.
        mean: the score; None where it is missing from the paper's text.
        std: standard deviation; None where none is printed.
        origin: "own" (the authors ran it), "quoted" (from another paper) or "unknown" (the text does not say).
        note: slips, doubts, and what is missing.
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
    """Names of all tables, paper by paper: "gsp/table1", "gsp/table2", ..."""
    return tuple(_index())


def describe_table(name: str) -> PaperTable:
    """
    Raises:
        DataError: no table has that name.
    """
    if name not in _index():
        raise DataError(f"no table of a paper is called '{name}'; {closest(name, tables())}")
    return _index()[name]


@cache
def load_table(name: str) -> tuple[PaperScore, ...]:
    """The scores of one table, row by row as the paper prints them.

    Raises:
        DataError: no table has that name.
    """
    describe_table(name)
    return tuple(_score(line) for line in _lines(_folder().joinpath(f"{name}.csv")))


@cache
def why_quoted(name: str, row: str, dataset: str) -> str:
    """Why a row that a paper took from elsewhere is not run with it, and how to run its method.

    Args:
        name: of the table.
        row: the paper's label, with or without its citation.
        dataset: of the row, for whose settings a recipe is asked.

    Raises:
        DataError: nothing is known of the method.
    """
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
