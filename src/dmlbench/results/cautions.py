"""What scores are not (complete, exact, of the published data), in words that go wherever the scores go."""

from collections.abc import Mapping, Sequence
from typing import Any


def cautions(scored: Mapping[str, Any], *, partial: bool = True) -> list[str]:
    """What a reader must know of scores, most of all of what they were not computed on; empty where there is nothing.

    Args:
        scored: a run's result or a cell's summary.
        partial: whether to say that runs of the cell are missing, too.
    """
    found = []
    if partial and scored.get("missing"):
        found.append(f"PARTIAL: {scored['n_runs']} of {scored['n_runs_expected']} runs")
    if count := scored.get("n_runs_not_started"):
        found.append(f"NOT STARTED: in {count} runs the pooling's prototypes never started")
    notes = list(scored.get("data_notes", ()))
    if "n_query_published" in scored:
        notes.append(queries(scored))
    if notes:
        found.append(f"NOT THE PUBLISHED DATA: {'; '.join(notes)}")
    if scored["val_is_test"]:
        found.append("SELECTED ON TEST: the validation set is the test set")
    if scored.get("scored_on") == "validation":
        found.append("scored on the validation classes; the test half was not looked at")
    elif scored["search"] != "exact":
        found.append(f"APPROXIMATE SEARCH: {scored['search']} ranks a shortlist of each query")
    return found


def queries(scored: Mapping[str, Any]) -> str:
    """How many queries there were, and of how many where the published test half has others."""
    of = f" of {scored['n_query_published']:,}" if "n_query_published" in scored else ""
    return f"{scored['n_query']:,}{of} queries"


def by_row(facts: Sequence[Sequence[str]], labels: Sequence[str]) -> list[str]:
    """Facts of rows as lines: those of all rows once, then the others row by row."""
    shared = [fact for fact in facts[0] if all(fact in own for own in facts)]
    others = [[fact for fact in own if fact not in shared] for own in facts]
    return shared + [f"{label}: {'; '.join(rest)}" for label, rest in zip(labels, others, strict=True) if rest]
