"""What a search leaves: a table of its trials, and the best one as a recipe."""

import csv
import io
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf

from dmlbench.identity import NOT_PART_OF_CONFIG_HASH, NOT_PART_OF_RUN_HASH
from dmlbench.runtime import atomic_write
from dmlbench.tuning.search import Compose, Outcome, Search
from dmlbench.tuning.space import Value
from dmlbench.types import flatten

COVERED = ("dataset", "backbone", "pooling", "head", "loss")
"""Groups for whose options the winner's values were chosen: of others the recipe has nothing."""
_LEFT = ("protocol", "evaluation", "logger", "paths", "experiment", "recipe", "hydra")
"""Groups that a recipe leaves as they are."""

Choices = Callable[[Sequence[str]], Mapping[str, str | None]]
"""From overrides of ``dmlbench train`` to the option of each group."""


def ranked(outcomes: Sequence[Outcome]) -> list[Outcome]:
    """Complete trials by their scores, the first of equals first, then pruned ones, then the rest."""
    states = ("complete", "pruned", "failed", "running", "waiting")
    return sorted(outcomes, key=lambda o: (states.index(o.state), -(o.score or 0.0), o.number))


def to_csv(search: Search, outcomes: Sequence[Outcome]) -> str:
    """A line for each trial, the best first; scores are fractions."""
    keys = [dimension.key for dimension in search.space]
    text = io.StringIO()
    lines = csv.writer(text, lineterminator="\n")
    lines.writerow(["trial", "state", "score", "steps", *keys, "runs", "note"])
    for outcome in ranked(outcomes):
        values = [outcome.values.get(key, "") for key in keys]
        score = "" if outcome.score is None else outcome.score
        lines.writerow(
            [outcome.number + 1, outcome.state, score, outcome.steps, *values, " ".join(outcome.runs), outcome.note]
        )
    return text.getvalue()


def to_markdown(search: Search, outcomes: Sequence[Outcome], monitor: str) -> str:
    """The same for people, in percent, with what the best is worth and what pruning has cost."""
    keys = [dimension.key for dimension in search.space]
    heads = ["trial", f"{monitor} (validation)", *keys, "steps", ""]
    lines = [f"### {search.name}", "", f"| {' | '.join(heads)} |", "|" + "---:|" * (len(heads) - 1) + "---|"]
    for o in ranked(outcomes):
        score = "" if o.score is None else f"{100 * o.score:.2f}"
        values = [str(o.values.get(key, "")) for key in keys]
        state = "" if o.state == "complete" else o.state
        lines.append(f"| {' | '.join([str(o.number + 1), score, *values, str(o.steps), state])} |")
    return "\n".join([*lines, "", *(f"- {note}" for note in notes(search, outcomes)), ""])


def notes(search: Search, outcomes: Sequence[Outcome]) -> list[str]:
    """What the table does not say by itself."""
    complete = [o for o in ranked(outcomes) if o.state == "complete"]
    pruned = [o for o in outcomes if o.state == "pruned"]
    found = []
    if complete:
        best = complete[0]
        values = ", ".join(f"{key}={value}" for key, value in best.values.items())
        found.append(f"best: trial {best.number + 1} with {values}")
        others = [o for o in complete[1:] if o.values != best.values]
        if others:
            top = others[: min(4, len(others))]
            ahead = [100 * ((best.score or 0.0) - (o.score or 0.0)) for o in top]
            found.append(
                f"{ahead[0]:.2f} points ahead of the next values, {ahead[-1]:.2f} of number {len(top) + 1}: the best "
                "of many is flattered by the validation set, so compare it by runs of another protocol"
            )
        for dimension in search.space:
            if dimension.is_at_edge(best.values[dimension.key]):
                found.append(
                    f"{dimension.key} of the best ({best.values[dimension.key]}) is at the edge of "
                    f"[{dimension.low}, {dimension.high}]: search further there under another name"
                )
    if pruned:
        whole = sum(o.steps for o in complete) / len(complete) if complete else 0
        mean = sum(o.steps for o in pruned) / len(pruned)
        share = f", {100 * mean / whole:.0f} % of a complete one's {whole:.0f}" if whole else ""
        found.append(
            f"{len(pruned)} of {len(outcomes)} trials were pruned: {mean:.0f} steps each on average{share}; their "
            "scores are the best that they had reached, and `dmlbench clean` removes their runs, which are stale"
        )
    for state, means in (("failed", "their training diverged"), ("running", "by other processes, or interrupted")):
        if count := sum(o.state == state for o in outcomes):
            found.append(f"{count} {state}: {means}")
    if (missing := search.trials - len(outcomes)) > 0:
        found.append(f"{missing} of {search.trials} trials not begun")
    found.append(
        f"each trial: {len(search.runs)} run(s) under protocol=hpo, which sees no test image; seed {search.seed}"
    )
    return found


def write_table(search: Search, outcomes: Sequence[Outcome], monitor: str) -> list[Path]:
    """``trials.csv`` and ``trials.md`` of the search's folder."""
    written = [search.folder / "trials.csv", search.folder / "trials.md"]
    atomic_write(written[0], to_csv(search, outcomes).encode())
    atomic_write(written[1], to_markdown(search, outcomes, monitor).encode())
    return written


def make_recipe(search: Search, best: Outcome, compose: Compose, choices: Choices) -> tuple[str, list[str]]:
    """A recipe of the best trial: what was searched, and all else that its options do not have by themselves.

    Returns:
        The content of its file, and the overrides with which ``recipe=<its name>`` makes the winner's settings.
    """
    overrides = search.of_run(best.values, 0)
    winner = compose(overrides)
    chosen = {**choices(overrides), **winner.runtime.recipe.get("chosen", {})}
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
    searched = {key: value for key, value in differing.items() if _is_of(key, best.values)}
    held = {key: value for key, value in differing.items() if key not in searched}
    source = f"dmlbench tune, search {search.name}, the best of {search.trials} trials"
    recipe: dict[str, Any] = {}
    if others:
        recipe["defaults"] = [{f"override /{group}": option} for group, option in others.items()]
    recipe["covers"] = [{group: _option(chosen[group]) for group in COVERED}]
    recipe["settings"] = []
    if held:
        recipe["settings"].append({"when": {}, "set": held, "source": f"{source}; held fixed"})
    recipe["settings"].append({"when": {}, "set": searched, "source": source})
    head = (
        f"# No paper: {source}, validation score {100 * (best.score or 0.0):.2f} under protocol=hpo.\n"
        f"# Every trial had: {search.described}\n"
    )
    return head + yaml.safe_dump(recipe, sort_keys=False, allow_unicode=True, width=120), asked


def settings(cfg: DictConfig) -> dict[str, Any]:
    """What a recipe can hold of a run's configuration, by key and not resolved."""
    left = (*NOT_PART_OF_CONFIG_HASH, *NOT_PART_OF_RUN_HASH, *_LEFT)
    content = flatten(OmegaConf.to_container(cfg, resolve=False))
    return {key: value for key, value in content.items() if not _is_of(key, left)}


def _is_of(key: str, names: Sequence[str] | Mapping[str, Value]) -> bool:
    return any(f"{key}.".startswith(f"{name}.") for name in names)


def _option(name: str | None) -> str | None:
    return None if name == "None" else name
