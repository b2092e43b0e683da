"""Aggregated configs side by side: text, Markdown, CSV and LaTeX with percentages, deviations and the best in bold."""

import csv
import io
import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dmlbench.evaluation.metrics.table import score_named
from dmlbench.results.cautions import PARTIAL, by_fact, by_row, cautions_of_rows, queries
from dmlbench.types import ConfigError, escape_latex

NAMING_GROUPS = ("backbone", "pooling", "head", "loss", "miner", "optim", "schedule", "regularizer")
"""Groups whose chosen options name a config; the last only where the others do not tell it apart."""
IMPORTED = "imported"
"""The one choice of an imported config: what its row is called."""
_OF_DATA = ("num_classes", "num_channels", "map_size", "embedding_size", "feature_size")
_OF_RERANK = ("rerank.grid_size", "rerank.num_neighbors")
"""Settings of it that a label says in words."""
KINDS = ("separated", "concatenated", "AGS", "best", "mean")


@dataclass(frozen=True)
class Entry:
    """A score in percent (a class distance as it is); ``std`` is None where there is nothing to deviate."""

    mean: float
    std: float | None

    def __str__(self) -> str:
        return f"{self.mean:.2f}" if self.std is None else f"{self.mean:.2f} ± {self.std:.2f}"


@dataclass(frozen=True)
class Table:
    """Rows of entries under two-line column heads, with the notes that belong under the numbers.

    ``cautions`` are those of the notes that no caption may leave out, ``row_notes`` are all notes by row.
    """

    title: str
    columns: tuple[tuple[str, str], ...]  # (kind, metric) as printed; facts of the splits have no kind
    higher_is_better: tuple[bool, ...]  # of each column
    rows: tuple[tuple[str, tuple[Entry | str | None, ...]], ...]
    notes: tuple[str, ...]
    competes: tuple[bool, ...]  # of each row: whether it may be the best
    cautions: tuple[str, ...]
    row_notes: tuple[tuple[str, ...], ...]

    def best(self) -> list[float | None]:
        """Highest printed mean of each column among the rows that compete; None where there is nothing to compare, or
        more is not better."""
        rows = [entries for (_, entries), competes in zip(self.rows, self.competes, strict=True) if competes]
        result: list[float | None] = []
        for i, higher_is_better in enumerate(self.higher_is_better):
            means = [round(entry.mean, 2) for entries in rows if isinstance(entry := entries[i], Entry)]
            result.append(max(means) if higher_is_better and len(means) > 1 else None)
        return result


def make_table(
    title: str,
    summaries: Sequence[Mapping[str, Any]],
    labels: Sequence[str],
    metrics: Sequence[str],
    facts: Sequence[str] = (),
    differing: Sequence[str] = (),
) -> Table:
    """A table of summaries that ``aggregate_config`` made, one row each; ``facts`` of the splits are its first columns.

    ``differing`` are notes on settings in which the rows differ and which their labels do not say.

    Raises:
        ConfigError: a metric or a fact is in none of the summaries.
    """
    kinds = [kind for kind in KINDS if any(kind in summary["scores"] for summary in summaries)]
    known = sorted({metric for summary in summaries for scores in summary["scores"].values() for metric in scores})
    for metric in metrics:
        if metric not in known:
            raise ConfigError(f"metric '{metric}' is not in these results; known: {', '.join(known)}")
    scores = [score_named(metric) for metric in metrics]
    columns = [("", fact) for fact in facts]
    for kind in kinds:
        dimensions = sorted({s["dimension"][kind] for s in summaries if kind in s.get("dimension", {})})
        size = f" ({'/'.join(map(str, dimensions))}-D)" if dimensions else ""
        columns += [(kind + size, score.label) for score in scores]
    rows = []
    for fact in facts:
        if not any(fact in (own or {}) for summary in summaries for own in summary.get("facts", {}).values()):
            raise ConfigError(f"no split of these results has the fact '{fact}'")
    for summary, label in zip(summaries, labels, strict=True):
        entries: list[Entry | str | None] = [_fact(summary, fact) for fact in facts]
        of_kinds = [summary["scores"].get(kind, {}) for kind in kinds]
        entries += [_entry(found.get(score.name), score.scale) for found in of_kinds for score in scores]
        rows.append((label, tuple(entries)))
    cautions = cautions_of_rows(summaries)
    facts_of_rows = [_facts(summary, own) for summary, own in zip(summaries, cautions, strict=True)]
    settings = [f"DIFFERENT SETTINGS: {note}" for note in differing]
    warned = by_row(cautions, labels) + settings
    deviations = [summary.get("deviations", ()) for summary in summaries]
    notes = by_row(facts_of_rows, labels) + by_fact(deviations, labels) + settings
    if any(not score.metric.percent for score in scores):
        notes.insert(0, "class distances as they are, not in percent; none is best")
    better = (False,) * len(facts) + tuple(score.metric.better is not None for score in scores) * len(kinds)
    return Table(
        title, tuple(columns), better, tuple(rows), tuple(notes), competing(summaries), tuple(warned),
        tuple((*own, *deviates, *settings) for own, deviates in zip(facts_of_rows, deviations, strict=True)),
    )  # fmt: skip


def competing(summaries: Sequence[Mapping[str, Any]]) -> tuple[bool, ...]:
    """Which summaries may be the best: complete ones, scored on the same images as the most of these."""
    scored_on = [(s["scored_on"], s["n_query"], s["n_gallery"], s["dataset_fingerprint"]) for s in summaries]
    complete = [on for on, summary in zip(scored_on, summaries, strict=True) if not summary["missing"]]
    usual = max(complete, key=lambda on: (on[0] == "test", complete.count(on)), default=None)
    return tuple(on == usual and not s["missing"] for on, s in zip(scored_on, summaries, strict=True))


def _entry(score: Mapping[str, float | None] | None, scale: float) -> Entry | None:
    if score is None:
        return None
    mean, std = score["mean"], score["std"]
    assert mean is not None
    return Entry(scale * mean, None if std is None else scale * std)


def _fact(summary: Mapping[str, Any], name: str) -> str | None:
    """The values of a fact over the runs' splits: one, or each of them once."""
    own = [facts[name] for facts in summary.get("facts", {}).values() if facts and name in facts]
    texts = dict.fromkeys(f"{value:.4g}" if isinstance(value, float) else str(value) for value in own)
    return ", ".join(texts) or None


def _facts(summary: Mapping[str, Any], cautions: Sequence[str]) -> list[str]:
    """What a reader must know to trust the numbers of a row, ``cautions`` among it."""
    facts = []
    runs = f"{summary['n_runs']} runs"
    if summary["missing"]:
        missing = ", ".join(summary["missing"])
        runs = f"{PARTIAL}{summary['n_runs']} of {summary['n_runs_expected']} runs, without {missing}"
    if summary["n_collections"]:
        count = summary["n_collections"]
        spread = f"mean ± population std over {count} collections" if count > 1 else "one collection, hence no std"
        facts.append(f"{runs}; {spread} of fold models")
    else:
        spread = summary.get("spread", "repeats")
        facts.append(
            f"{runs}; mean ± population std over {spread}" if summary["n_runs"] > 1 else f"{runs}, hence no std"
        )
    facts += [caution for caution in cautions if not caution.startswith(PARTIAL)]
    searched = queries(summary)
    if summary["n_gallery"] != summary["n_query"]:
        searched += f" in a gallery of {summary['n_gallery']:,}"
    if summary["scored_on"] == "test":
        skipped = summary["n_skipped_queries"]
        how = f"{summary['search']} search"
        if "concatenated_search" in summary:
            how += f" (concatenated: {summary['concatenated_search']})"
        facts.append(f"{how}, {searched}" + (f", {skipped} without a positive left out" if skipped else ""))
    return facts


def _marked(table: Table, bold: str, escape: Callable[[str], str] = str) -> list[list[str]]:
    """Labels and entries as text, the best of each column put into the template ``bold``."""
    best = table.best()
    lines = []
    for (label, entries), competes in zip(table.rows, table.competes, strict=True):
        cells = [escape(label)]
        for entry, top in zip(entries, best, strict=True):
            text = escape("–" if entry is None else str(entry))
            is_best = competes and isinstance(entry, Entry) and top == round(entry.mean, 2)
            cells.append(bold.format(text) if is_best else text)
        lines.append(cells)
    return lines


def to_text(table: Table) -> str:
    """For the terminal: aligned columns, a star at the best."""
    heads = ["", *(metric for _, metric in table.columns)]
    lines = _marked(table, "{}*")
    lines = [[cells[0], *(cell if cell.endswith("*") else cell + " " for cell in cells[1:])] for cells in lines]
    groups = _groups(table)
    widths = [max(len(row[i]) for row in [heads, *lines]) for i in range(len(heads))]
    top = " " * widths[0]
    for name, start, stop in groups:
        room = sum(widths[start + 1 : stop + 1]) + 2 * (stop - start - 1)
        widths[stop] += max(0, len(name) - room)
        top += "  " + name.center(max(len(name), room))
    body = [
        "  ".join([row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True))])
        for row in [heads, *lines]
    ]
    rule = "-" * max(len(line) for line in [top, *body])
    notes = [f"  {note}" for note in ("percent; * best of the column", *table.notes)]
    return "\n".join(
        [table.title, rule, top.rstrip(), body[0].rstrip(), rule, *(line.rstrip() for line in body[1:]), rule, *notes]
    )


def _groups(table: Table) -> list[tuple[str, int, int]]:
    """Runs of columns with the same first head: (name, first, one past the last)."""
    runs = itertools.groupby(range(len(table.columns)), key=lambda i: table.columns[i][0])
    members = [(kind, list(run)) for kind, run in runs]
    return [(kind, run[0], run[-1] + 1) for kind, run in members]


def to_markdown(table: Table) -> str:
    heads = ["", *(f"{kind} {metric}" for kind, metric in table.columns)]
    lines = ["| " + " | ".join(heads) + " |", "|---" + "|---:" * len(table.columns) + "|"]
    lines += ["| " + " | ".join(cells) + " |" for cells in _marked(table, "**{}**")]
    notes = [f"- {note}" for note in ("percent; best of each column in bold", *table.notes)]
    return "\n".join([f"### {table.title}", "", *lines, "", *notes, ""])


def to_csv(table: Table) -> str:
    """Means and deviations in columns of their own, in percent with full precision, and what is noted of each row."""
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    parts = (f"{kind} {metric} {part}" for kind, metric in table.columns for part in ("mean", "std"))
    writer.writerow(["row", *parts, "notes"])
    for (label, entries), notes in zip(table.rows, table.row_notes, strict=True):
        cells: list[object] = [label]
        for entry in entries:
            if isinstance(entry, Entry):
                cells += [entry.mean, "" if entry.std is None else entry.std]
            else:
                cells += [entry or "", ""]
        writer.writerow([*cells, "; ".join(notes)])
    return buffer.getvalue()


def to_latex(table: Table) -> str:
    """A floating ``table`` with caption and label, for the package booktabs; the caption has the cautions."""
    escape = escape_latex
    top = " & ".join(
        ["", *(rf"\multicolumn{{{stop - start}}}{{c}}{{{escape(name)}}}" for name, start, stop in _groups(table))]
    )
    heads = " & ".join(["", *(escape(metric) for _, metric in table.columns)])
    rows = [" & ".join(cells) + r" \\" for cells in _marked(table, r"\textbf{{{}}}", escape)]
    notes = [r"% needs \usepackage{booktabs}", *(f"% {note}" for note in table.notes)]
    columns = "l" + "c" * len(table.columns)
    label = re.sub("[^a-z0-9]+", "-", table.title.lower())
    head = [
        *(r"\begin{table}", r"\centering"),
        rf"\caption{{{escape('. '.join([f'{table.title}, percent; best of each column in bold', *table.cautions]))}.}}",
        *(rf"\label{{tab:{label}}}", rf"\begin{{tabular}}{{{columns}}}"),
        *(r"\toprule", top + r" \\", heads + r" \\", r"\midrule"),
    ]
    return "\n".join([*notes, *head, *rows, r"\bottomrule", r"\end{tabular}", r"\end{table}", ""])


def _words(choices: Mapping[str, str], groups: Sequence[str]) -> list[str]:
    """The chosen options; a head that pools by itself stands for the pooling."""
    if IMPORTED in choices:
        return [f"{choices[IMPORTED]} (imported)"]
    pools = choices.get("pooling") != "none"
    chosen = [str(choices.get(group if pools or group != "pooling" else "head", "-")) for group in groups]
    chosen = [word for word in chosen if word.lower() != "none"] or chosen  # nothing was chosen of such a group
    return list(dict.fromkeys(chosen)) if not pools else chosen


def config_labels(
    configs: Sequence[tuple[Mapping[str, str], Mapping[str, Any]]], by_hand: Sequence[Mapping[str, str]] = ()
) -> tuple[list[str], list[str]]:
    """Shortest names that tell configs apart, and what else differs between them.

    Args:
        configs: per config the chosen option of each group, and the flattened configuration.
        by_hand: per config, what is to be said of each setting that is not as its chosen option has it.

    Returns:
        Of each config the chosen options that differ, then single values that differ between configs of the same
        options; and notes on other settings that two configs have with different values.
    """
    made_here = [choices for choices, _ in configs if IMPORTED not in choices]
    *usual, last = NAMING_GROUPS
    groups = [g for g in usual if len({choices.get(g) for choices in made_here}) > 1] or ["pooling"]
    words = [" ".join(_words(choices, groups)) for choices, _ in configs]
    options = {
        word: {c.get(last) for name, (c, _) in zip(words, configs, strict=True) if name == word} for word in words
    }
    if any(len(several) > 1 for several in options.values()):
        groups.append(last)
        words = [" ".join(_words(choices, groups)) for choices, _ in configs]
    settings = [{key: value for key, value in config.items() if not _says_the_data(key)} for _, config in configs]
    is_untrained = [config.get("fit.max_steps") == 0 for config in settings]
    kinds = [(_matched(config), no) for config, no in zip(settings, is_untrained, strict=True)]
    labels = []
    for name, config, kind in zip(words, settings, kinds, strict=True):
        alike = zip(words, settings, kinds, strict=True)
        rivals = [other for word, other, of_kind in alike if (word, of_kind) == (name, kind)]
        differing = sorted({key for other in rivals for key in other if _differs(key, rivals)})
        values = [f"{key}={config[key]}" for key in differing if config.get(key) is not None]
        matched, untrained = kind
        labels.append(" ".join([name, *values]) + matched + " (untrained)" * untrained)
    trained = [(label, config) for label, config, no in zip(labels, settings, is_untrained, strict=True) if not no]
    notes = []
    for key in sorted({key for _, config in trained for key in config}):
        held: dict[str, list[str]] = {}
        for label, config in trained:
            if key in config:
                held.setdefault("null" if config[key] is None else str(config[key]), []).append(label)
        hidden = [label for label, config in trained if config.get(key) is not None and f" {key}=" not in label]
        said = key in _OF_RERANK or key.partition(".")[0] in (*groups, IMPORTED)
        if len(held) > 1 and hidden and not said:
            listed = (f"{value} ({', '.join(some)})" for value, some in held.items())
            notes.append(f"{key}: {'; '.join(listed)}")
    rows_of: dict[tuple[str, str, str], list[str]] = {}
    for label, config, own in zip(labels, settings, by_hand or [{}] * len(settings), strict=True):
        for key, said_of_it in own.items():
            if key in config and key.partition(".")[0] in groups and f" {key}=" not in label:
                rows_of.setdefault((key, str(config[key]), said_of_it), []).append(label)
    notes += [f"{key}: {value} ({', '.join(rows)}), {said_of_it}" for (key, value, said_of_it), rows in rows_of.items()]
    return labels, notes


def _matched(config: Mapping[str, Any]) -> str:
    """How the first neighbors of the test are ranked again, behind the name of a row."""
    if "rerank._target_" not in config:
        return ""
    name = str(config["rerank._target_"]).rpartition(".")[2].removesuffix("Distance").upper()
    size, count = (config.get(key) for key in _OF_RERANK)
    return f" ({name}, {size} x {size}, first {count})"


def _differs(key: str, configs: Sequence[Mapping[str, Any]]) -> bool:
    return len({repr(config.get(key)) for config in configs}) > 1


def _says_the_data(key: str) -> bool:
    """Whether a value follows from the data or from other settings."""
    group, _, last = key.partition(".")
    return group in ("loss", "regularizer", "pooling") and last.rpartition(".")[2] in _OF_DATA
