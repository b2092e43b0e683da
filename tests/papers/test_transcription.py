"""The papers' tables against the papers' own texts, number by number: run where the texts lie beside the checkout."""

import re
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import pytest

from dmlbench.papers import PaperScore, load_table, tables

pytestmark = pytest.mark.data

# How the texts write what stands in the tables, as (what, its plain form), in this order.
PLAIN = [
    (r"γ=[\d.]+γ[\d.]+\\gamma=", "gamma="),
    (
        r"\S+\\underset\{\\scriptsize\{\D*([\d.]+)\D*?\}\}\{(?:\S*\{)?([\d.]+)\}+",
        r"\2 \1",
    ),  # a score over its deviation
    (r"±plus-or-minus\\pm| ± ", " "),
    (r"\\ddagger", ""),
    (r" ?\[\d+\]", ""),
]
FIGURES = {
    "gsp/figure8": r"\(from ([\d.]+) ms to ([\d.]+) ms\)",
    "proxynca_pp/figure1": r"original ProxyNCA by [\d.]+?(\d\d\.\d)pp, .* by [\d.]+?(\d\.\d)pp on average",
    "avsl/figure5b": r"recall@1 score of ([\d.]+)% on the Cars196",
}
CAPTION_BELOW = {"oodml/table1": 2, "oodml/table_s1": 3, "oodml/table_s2": 1}  # lines of the table above its caption
NUMBERS = {"gsp/table7": r"\d\d\.\d\d", "oodml/table_s2": r"\d+"}  # else what has a decimal point
LINES_WITHOUT_THE_LABEL = {"gsp/table1", "gsp/table7", "proxynca_pp/table14", "proxynca_pp/table15", *CAPTION_BELOW}


@dataclass(frozen=True)
class Line:
    """A line of a table: what stands before its first number, and its numbers and dashes."""

    label: str
    numbers: list[str]


@pytest.fixture(scope="session")
def papers_dir(shared_dir: Path) -> Path:
    path = shared_dir / "papers"
    if not path.is_dir():
        pytest.skip(f"needs the texts of the papers: there is no {path}")
    return path


def text_of(papers_dir: Path, name: str) -> list[str]:
    file = papers_dir / f"{name.partition('/')[0]}.txt"
    if not file.is_file():
        pytest.skip(f"needs the text of the paper: there is no {file}")
    return file.read_text(encoding="utf-8").splitlines()


def raw_lines(papers_dir: Path, name: str) -> list[str]:
    lines = text_of(papers_dir, name)
    caption = f"Table {name.partition('/table')[2].removeprefix('_').upper()}:"
    (at,) = [number for number, line in enumerate(lines) if line.startswith(caption)]
    if name in CAPTION_BELOW:
        return lines[at - CAPTION_BELOW[name] : at]
    end = next(
        number for number in range(at + 1, len(lines)) if not lines[number] or lines[number].startswith("Table ")
    )
    return lines[at + 1 : end]


def printed(papers_dir: Path, name: str) -> Iterator[Line]:
    """The lines of a table that have numbers."""
    for text in raw_lines(papers_dir, name):
        plain = unicodedata.normalize("NFKC", text)
        for what, form in PLAIN:
            plain = re.sub(what, form, plain)
        number = re.compile(NUMBERS.get(name, r"\d+\.\d+"))
        words = [word.strip("()") if name == "oodml/table_s2" else word for word in plain.split()]
        found = [word for word in words if word == "-" or number.fullmatch(word)]
        if any(word != "-" for word in found):
            yield Line(" ".join(words[: words.index(found[0])]), found)


def transcribed(score: PaperScore) -> list[str]:
    return [str(value) for value in (score.mean, score.std) if value is not None]


def letters(text: str) -> str:
    return re.sub(r"[^a-z0-9+]", "", text.lower())


WITH_TEXT = [name for name in tables() if all(score.mean is not None for score in load_table(name))]


@pytest.mark.parametrize("name", [name for name in WITH_TEXT if "/table" in name])
def test_the_file_has_the_numbers_of_the_text_in_its_order_and_no_others(papers_dir: Path, name: str) -> None:
    in_text = [number for line in printed(papers_dir, name) for number in line.numbers if number != "-"]
    in_file = [number for score in load_table(name) for number in transcribed(score)]
    assert in_file == in_text


@pytest.mark.parametrize(
    "name", [name for name in WITH_TEXT if "/table" in name and name not in LINES_WITHOUT_THE_LABEL]
)
def test_every_line_stands_under_its_label(papers_dir: Path, name: str) -> None:
    scores = iter(load_table(name))
    for line in printed(papers_dir, name):
        numbers = [number for number in line.numbers if number != "-"]
        while numbers:
            score = next(scores)
            label, own = letters(line.label), letters(re.sub(r" \[\d+\]", "", score.row))
            pooling = {"avg": "GAP", "max": "GMP"}.get(line.label.split()[-1], "") if name.endswith("table11") else ""
            assert label.startswith(own) or own.startswith(label) or own.endswith(label) or score.setting == pooling
            assert numbers[: len(transcribed(score))] == transcribed(score)
            del numbers[: len(transcribed(score))]
    assert not list(scores)


@pytest.mark.parametrize(
    "name", ["gsp/table3", *(f"proxynca_pp/table{k}" for k in (3, 4, 5, 6)), "avsl/table1", "oodml/table_s1"]
)
def test_dashes_stand_where_the_file_has_no_score(papers_dir: Path, name: str) -> None:
    line_of = (lambda s: s.dataset) if name.startswith("oodml") else (lambda s: (s.row, s.backbone, s.embedding_size))
    column_of = (lambda s: s.setting) if name.startswith("oodml") else (lambda s: (s.dataset, s.metric))
    scores = load_table(name)
    columns = list(dict.fromkeys(column_of(score) for score in scores))
    if name == "gsp/table3":
        columns = [
            (dataset, metric) for dataset in ("cub200", "cars196", "sop", "inshop") for metric in ("R@1", "MAP@R")
        ]
    expected = []
    for _, line in groupby(scores, key=line_of):
        numbers = {column_of(score): transcribed(score) for score in line}
        expected.append([text for c in columns for text in numbers.get(c, [] if "MAP@R" in c else ["-"])])
    assert [line.numbers for line in printed(papers_dir, name)] == expected


@pytest.mark.parametrize("name", sorted(FIGURES))
def test_the_numbers_of_a_figure_stand_in_the_text(papers_dir: Path, name: str) -> None:
    found = re.search(FIGURES[name], " ".join(text_of(papers_dir, name)))
    assert found is not None
    assert [number for score in load_table(name) for number in transcribed(score)] == list(found.groups())


@pytest.mark.parametrize("name", sorted(set(tables()) - set(WITH_TEXT)))
def test_a_table_whose_scores_are_missing_has_its_rows_alone_in_the_text(papers_dir: Path, name: str) -> None:
    text = text_of(papers_dir, name)
    labels = {letters(score.row) for score in load_table(name)}
    last_words = {
        letters(re.sub(r"^(R@1|mAP@1000)|\b[25]\b|Zero|Few|Wu et al.*|\w+ et al.*", "", line)) for line in text
    }
    assert labels <= last_words
