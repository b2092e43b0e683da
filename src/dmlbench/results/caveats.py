"""Caveats of scores (partial, approximate, not the published data), which every table of them prints."""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from dmlbench.types import counted

PARTIAL = "PARTIAL: "
IMPORTED = "IMPORTED: "
DEGENERATE = "DEGENERATE EMBEDDINGS: "
OTHER_DATA = "NOT THE PUBLISHED DATA: "
MOST_RUNS = 4
"""Names of runs that a message lists."""
UNKNOWN = "unknown"
"""Training and selection of an imported model, if the user did not tell."""
_FORMER_NOTES = (
    (re.compile(r"images re-encoded: colors of .* are subsampled, .*"), "images re-encoded (4:2:0 JPEG)"),
    (re.compile(r", cut or not: boxes of .*"), ""),
)
"""How results of earlier versions describe their data, and what is written now."""


def caveats(scored: Mapping[str, Any]) -> list[str]:
    """Caveats of the scores of a run's result or a config's summary."""
    found = []
    if scored.get("missing"):
        found.append(f"{PARTIAL}{scored['n_runs']} of {scored['n_runs_expected']} runs")
    if told := scored.get("imported"):
        by_order = "; ids: by order, unchecked within a class" if told["ids"] == "by order" else ""
        found.append(
            f"{IMPORTED}embeddings of other code; trained: {told['trained']}; selected: {told['selected']}{by_order}"
        )
    if count := scored.get("n_runs_not_started"):
        found.append(
            f"NOT STARTED: in {counted(count, 'run')} the selected weights are from before the pooling's prototypes or "
            "the loss's memory started"
        )
    notes = data_notes(scored)
    if "n_query_published" in scored:
        notes.append(queries(scored))
    if notes:
        found.append(f"{OTHER_DATA}{'; '.join(notes)}")
    if degenerate := scored.get("degenerate"):
        found.append(f"{DEGENERATE}{'; '.join(degenerate)}")
    if again := scored.get("rerank"):
        found.append(f"RE-RANKED: {again} neighbors by cosine; those behind them keep their order")
    if scored["val_is_test"]:
        found.append("SELECTED ON TEST: the validation set is the test set")
    if scored.get("scored_on") == "validation":
        found.append("scored on the validation classes; the test half was not looked at")
    elif scored["search"] != "exact":
        found.append(f"APPROXIMATE SEARCH: {scored['search']} ranks a shortlist of each query")
    return found


def is_late(result: Mapping[str, Any]) -> bool:
    """Whether the selected weights of a run are from before a part of its model or loss started."""
    return result["steps"] > 0 and not (result.get("pooling_started", True) and result.get("memory_started", True))


def data_notes(scored: Mapping[str, Any]) -> list[str]:
    """How the data of a result or summary differ from the published ones, in this version's words."""
    notes = scored.get("data_notes", ())
    for former, now in _FORMER_NOTES:
        notes = [former.sub(now, note) for note in notes]
    return list(dict.fromkeys(notes))


def incomparable(scored: Mapping[str, Any]) -> list[str]:
    """Those of ``caveats`` that forbid to compare with published scores."""
    done_by_papers = (PARTIAL, IMPORTED, "RE-RANKED", "SELECTED ON TEST", "scored on the validation classes")
    return [caveat for caveat in caveats(scored) if not caveat.startswith(done_by_papers)]


def caveats_of_rows(summaries: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """``caveats`` of the rows of a table, their data set's fingerprint if it differs between rows, and mixed code."""
    data = [str(summary["dataset_fingerprint"])[:12] for summary in summaries]
    differ = len(set(data)) > 1
    mixed = mixed_code(sum((Counter(summary.get("code")) for summary in summaries), Counter()))
    return [
        caveats(summary) + [f"OTHER DATA than other rows: fingerprint {digest}"] * differ + mixed
        for summary, digest in zip(summaries, data, strict=True)
    ]


def mixed_code(code: Mapping[str, int]) -> list[str]:
    """A note on runs by different code; none if there is one commit or version. ``code``: number of runs of each."""
    listed = ", ".join(f"{name[:12]}{'+changes' * ('+' in name)} ({counted(n, 'run')})" for name, n in code.items())
    return [f"MIXED CODE: {listed}"] if len(code) > 1 else []


def queries(scored: Mapping[str, Any]) -> str:
    """Number of queries, and of the published test set's if that differs."""
    of = f" of {scored['n_query_published']:,}" if "n_query_published" in scored else ""
    return f"{scored['n_query']:,}{of} queries"


def by_row(facts: Sequence[Sequence[str]], labels: Sequence[str]) -> list[str]:
    """Facts of rows as lines: those of all rows once, then the others, with the rows that have the same."""
    shared = [fact for fact in facts[0] if all(fact in own for own in facts)]
    others: dict[str, list[str]] = {}
    for label, own in zip(labels, facts, strict=True):
        others.setdefault("; ".join(fact for fact in own if fact not in shared), []).append(label)
    return shared + [f"{', '.join(rows)}: {rest}" for rest, rows in others.items() if rest]


def by_fact(facts: Sequence[Sequence[str]], labels: Sequence[str]) -> list[str]:
    """Facts of rows as lines: each fact once, with the rows that it holds for unless these are all."""
    rows = rows_of_facts(facts, labels)
    everywhere = set(labels)
    return [fact if set(held) == everywhere else f"{fact} ({', '.join(held)})" for fact, held in rows.items()]


def rows_of_facts(facts: Sequence[Sequence[str]], labels: Sequence[str]) -> dict[str, list[str]]:
    """Labels of the rows that a fact holds for, by fact, each once."""
    rows: dict[str, dict[str, None]] = {}
    for own, label in zip(facts, labels, strict=True):
        for fact in own:
            rows.setdefault(fact, {})[label] = None
    return {fact: list(held) for fact, held in rows.items()}
