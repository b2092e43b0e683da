"""What ``conf/experiment`` says of the papers' tables, read by itself: which of their scores is which command.

An independent reading of the format that CONTRIBUTING.md describes ("Add a table of a paper").
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import yaml

from dmlbench.config import config_folder
from dmlbench.papers import PaperScore, load_table, tables

CONF = config_folder() / "experiment"


@dataclass(frozen=True)
class Command:
    """Overrides of a config that scores of a table belong to, and the first of them."""

    table: str
    score: PaperScore
    overrides: tuple[str, ...]

    def __str__(self) -> str:
        return " ".join((f"experiment={self.table}", *self.overrides))


@cache
def reproduce_of(name: str) -> dict[str, Any]:
    return yaml.safe_load((CONF / f"{name}.yaml").read_text(encoding="utf-8"))["reproduce"]


def command_of(name: str, score: PaperScore) -> tuple[str, ...] | str:
    """The overrides of a score, or what is missing for it."""
    node = reproduce_of(name)
    if "needs" in node or "commands" in node:
        return str(node.get("needs") or node["commands"])
    chosen: dict[str, str] = {
        key: f"{key}={value}" for key, value in
        (("dataset", score.dataset), ("protocol", score.protocol), ("backbone", score.backbone)) if value
    }  # fmt: skip
    forms = [node.get("datasets", {}).get(score.dataset), node["rows"][score.row],
             node.get("settings", {}).get(score.setting)]  # fmt: skip
    if score.kind != "concatenated":
        forms.append(node.get("embedding_sizes", {}).get(score.embedding_size))
    for form in forms:
        if isinstance(form, Mapping) and "needs" in form:
            return str(form["needs"])
        form = form["overrides"] if isinstance(form, Mapping) else form
        for override in form.split() if isinstance(form, str) else form or ():
            chosen[override.partition("=")[0]] = override
    return tuple(chosen.values())


@cache
def commands() -> tuple[Command, ...]:
    """Every config of every table that has scores, once for each row, data set, network, setting and size."""
    return (*_of_tables(), *_without_numbers("*/figure*.yaml"))


def _of_tables() -> Iterator[Command]:
    for name in tables():
        seen = set()
        for score in load_table(name):
            if score.origin != "own" and score.row not in reproduce_of(name).get("rows", {}):
                continue
            overrides = command_of(name, score) if score.origin != "quoted" else ""
            if isinstance(overrides, tuple) and overrides not in seen:
                seen.add(overrides)
                yield Command(name, score, overrides)


@cache
def own_commands() -> tuple[Command, ...]:
    """Every config of this project's own tables that have rows."""
    return tuple(_without_numbers("*.yaml"))


def _without_numbers(pattern: str) -> Iterator[Command]:
    for path in sorted(CONF.glob(pattern)):
        name = str(path.relative_to(CONF).with_suffix(""))
        node = yaml.safe_load(path.read_text(encoding="utf-8")).get("reproduce") or {}
        if name in tables() or "rows" not in node:
            continue
        for dataset in node.get("datasets") or [""]:
            for setting in node.get("settings") or [""]:
                for row in node["rows"]:
                    score = PaperScore(row, setting, dataset, "", None, "", "", "", None, None, "own", "")
                    overrides = command_of(name, score)
                    assert isinstance(overrides, tuple)
                    yield Command(name, score, overrides)
