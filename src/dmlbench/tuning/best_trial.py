"""The result of a search: a table of its trials, and the best one as a recipe."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import yaml

from dmlbench.identity import NOT_PART_OF_CONFIG_HASH, NOT_PART_OF_RUN_HASH
from dmlbench.recipes import Recipe, options_of
from dmlbench.results.table import Table
from dmlbench.runner import ComposedRun
from dmlbench.tuning.search import Compose, Outcome, Search
from dmlbench.types import counted, is_within, shorten

COVERED = ("dataset", "backbone", "pooling", "head", "loss")
"""Groups whose options the recipe is for."""
ROWS = (*COVERED, "regularizer")
"""Groups whose options tell the searches of a table's rows apart."""
WRITTEN = "# Written by `dmlbench reproduce"
"""Begins the line of a joint recipe that names its command."""
_LEFT = ("protocol", "evaluation", "logger", "paths", "experiment", "recipe", "hydra")
"""Groups that a recipe does not set."""

Choices = Callable[[Sequence[str]], Mapping[str, str | None]]
"""From overrides of ``dmlbench train`` to the option of each group."""


def ranked(outcomes: Sequence[Outcome]) -> list[Outcome]:
    """Complete trials by their scores, the first of equals first, then pruned ones, then the rest."""
    states = ("complete", "pruned", "failed", "running", "waiting")
    return sorted(outcomes, key=lambda o: (states.index(o.state), -(o.score or 0.0), o.number))


def trials_table(search: Search, outcomes: Sequence[Outcome], monitor: str) -> Table:
    """A row for each trial, the best first, in percent; the CSV has fractions and the runs."""
    keys = [dimension.key for dimension in search.space]
    rows, data = [], []
    for o in ranked(outcomes):
        values = [o.values.get(key, "") for key in keys]
        score = "" if o.score is None else f"{100 * o.score:.2f}"
        rows.append([score, *map(str, values), o.steps, "" if o.state == "complete" else o.state])
        data.append([o.number + 1, o.state, o.score, o.steps, *values, " ".join(o.runs), o.note])
    index = pd.Index([line[0] for line in data], name="trial")
    return Table(
        search.name,
        pd.DataFrame(rows, index, [f"{monitor} (validation)", *keys, "steps", ""], dtype=object),
        notes=tuple(notes(search, outcomes)),
        align="r" * (len(keys) + 3) + "l",
        data=pd.DataFrame(data, columns=["trial", "state", "score", "steps", *keys, "runs", "note"], dtype=object),
    )


def spread_table(name: str, outcomes: Mapping[str, Sequence[Outcome]], monitor: str) -> Table:
    """How much tuning matters: a row for each search, in percent; the CSV has every trial, as fractions."""
    rows, lines = [], []
    for search, found in outcomes.items():
        scores = [100 * (o.score or 0.0) for o in ranked(found) if o.state == "complete"]
        numbers = [scores[0], float(np.median(scores)), scores[-1]]
        near = sum(score > scores[0] - 0.5 for score in scores)
        failed = sum(o.state == "failed" for o in found)
        rows.append([*(f"{number:.2f}" for number in numbers), f"{near} of {len(found)}", failed])
        for o in found:
            values = " ".join(f"{key}={value}" for key, value in o.values.items())
            lines.append([search, o.number + 1, o.state, o.score, o.steps, values, o.note])
    heads = [f"best {monitor}", "median", "worst", "within 0.5 of the best", "failed"]
    return Table(
        f"{name}: trials",
        pd.DataFrame(rows, pd.Index(outcomes, name="search"), heads, dtype=object),
        notes=("validation under protocol=hpo, which sees no test image; one run each",),
        align="lrrrrr",
        data=pd.DataFrame(lines, columns=["search", "trial", "state", "score", "steps", "values", "note"]),
    )


def notes(search: Search, outcomes: Sequence[Outcome]) -> list[str]:
    """Notes below the table."""
    complete, pruned = ([o for o in ranked(outcomes) if o.state == state] for state in ("complete", "pruned"))
    found = []
    if complete:
        best = complete[0]
        values = ", ".join(f"{key}={value}" for key, value in best.values.items())
        found.append(f"best: trial {best.number + 1} with {values}")
        if top := [o for o in complete[1:] if o.values != best.values][:4]:
            ahead = [100 * ((best.score or 0.0) - (o.score or 0.0)) for o in top]
            found.append(
                f"its score is {ahead[0]:.2f} points above the next best values, {ahead[-1]:.2f} above those of "
                f"rank {len(top) + 1}. The best of many trials is overestimated: compare it by runs of another protocol"
            )
        for dimension in search.space:
            if dimension.is_at_edge(best.values[dimension.key]):
                found.append(
                    f"{dimension.key} of the best ({best.values[dimension.key]}) is at the edge of "
                    f"[{dimension.low}, {dimension.high}]: search further there under another name"
                )
    if pruned:
        whole, mean = (sum(o.steps for o in own) / max(1, len(own)) for own in (complete, pruned))
        share = f", {100 * mean / whole:.0f} % of a complete one's {whole:.0f}" if whole else ""
        found.append(
            f"{len(pruned)} of {len(outcomes)} trials were pruned: {mean:.0f} steps each on average{share}; their "
            "scores are the best that they had reached, and `dmlbench clean` removes their runs, which are interrupted"
        )
    if failed := [o.note for o in outcomes if o.state == "failed"]:
        found.append(f"{len(failed)} failed: {shorten(list(dict.fromkeys(failed)), most=2)}")
    if running := sum(o.state == "running" for o in outcomes):
        found.append(f"{running} running: by other processes, or interrupted")
    if (missing := search.trials - len(outcomes)) > 0:
        found.append(f"{missing} of {search.trials} trials not begun")
    runs = counted(len(search.runs), "run")
    found.append(f"each trial: {runs} under protocol=hpo, which sees no test image; seed {search.seed}")
    return found


def make_recipe(search: Search, best: Outcome, compose: Compose, choices: Choices) -> tuple[str, list[str]]:
    """Make a recipe of the best trial: the searched values, and every other setting that is not a default.

    Returns the content of the file, and the overrides to use beside ``recipe=<name>``.
    """
    overrides = search.of_run(best.values, 0)
    winner = compose(overrides)
    chosen = {**choices(overrides), **winner.recipe_options}
    protocol = [o for o in overrides if o.partition("=")[0].lstrip("+").startswith("protocol")]
    asked = [*protocol, *(f"{group}={chosen[group]}" for group in COVERED if chosen[group] not in (None, "None"))]
    by_itself = choices(asked)
    others = {
        group: option
        for group, option in chosen.items()
        if "/" not in group and group not in (*COVERED, *_LEFT) and option != by_itself.get(group)
        if option not in (None, "None") and group in by_itself
    }
    plain = settings(compose([*asked, *(f"{group}={option}" for group, option in others.items())]))
    differing = {key: value for key, value in settings(winner).items() if key not in plain or plain[key] != value}
    searched = {key: value for key, value in differing.items() if is_within(key, best.values)}
    held = {key: value for key, value in differing.items() if key not in searched}
    source = f"dmlbench tune, search {search.name}, the best of {search.trials} trials"
    recipe: dict[str, Any] = {}
    if others:
        recipe["defaults"] = [{f"override /{group}": option} for group, option in others.items()]
    recipe["covers"] = [{group: None if chosen[group] == "None" else chosen[group] for group in COVERED}]
    parts = [*([(held, f"{source}; held fixed")] if held else []), (searched, source)]
    recipe["settings"] = [{"when": {}, "set": values, "source": place} for values, place in parts]
    head = (
        f"# No paper: {source}, validation score {100 * (best.score or 0.0):.2f} under protocol=hpo.\n"
        f"# Every trial had: {search.described}\n"
    )
    return head + yaml.safe_dump(recipe, sort_keys=False, allow_unicode=True, width=120), asked


@dataclass(frozen=True)
class Tuned:
    """A search of a joint recipe: options that its entry applies to, options of the rows, best trial, trials."""

    when: Mapping[str, str]
    chosen: Mapping[str, str | None]
    best: Outcome
    trials: int


def joint_recipe(name: str, parts: Sequence[Tuned], known: Recipe) -> str:
    """One recipe of the best trials of several searches; entries of a ``known`` recipe for other options are kept."""
    blocks = {
        (str(block["backbone"]), str(block["pooling"]), str(block["head"])): {
            group: [str(option) for option in options_of(block[group])] for group in ("dataset", "protocol", "loss")
        }
        for block in known.covers
    }
    entries: dict[str, dict[str, Any]] = {
        str(entry.when): entry.model_dump(include={"when", "set", "source"}) for entry in known.settings
    }
    for part in parts:
        when, chosen, best = part.when, part.chosen, part.best
        block = blocks.setdefault((str(chosen["backbone"]), str(chosen["pooling"]), str(chosen["head"])), {})
        for group, options in (("dataset", [chosen["dataset"]]), ("protocol", [chosen["protocol"], "hpo"]),
                               ("loss", [chosen["loss"]])):  # fmt: skip
            block[group] = list(dict.fromkeys([*block.get(group, []), *map(str, options)]))
        source = f"the best of {part.trials} trials, validation score {100 * (best.score or 0.0):.2f}"
        entries[str(dict(when))] = {"when": dict(when), "set": dict(best.values), "source": source}
    covers = [
        {"dataset": block["dataset"], "protocol": block["protocol"], "backbone": backbone, "pooling": pooling,
         "head": head, "loss": block["loss"]}
        for (backbone, pooling, head), block in blocks.items()
    ]  # fmt: skip
    head = (
        "# Tuned hyperparameters: the trial with the best validation score (protocol=hpo) in each search "
        f"with conf/search/{name}.yaml.\n"
        f"{WRITTEN} {name} tune=true`.\n"
    )
    content = {"covers": covers, "settings": list(entries.values())}
    return head + yaml.safe_dump(content, sort_keys=False, allow_unicode=True, width=120, default_flow_style=None)


def settings(run: ComposedRun) -> dict[str, Any]:
    """The unresolved settings of a run that a recipe can hold, by key."""
    left = (*NOT_PART_OF_CONFIG_HASH, *NOT_PART_OF_RUN_HASH, *_LEFT)
    return {key: value for key, value in run.settings.items() if not is_within(key, left)}
