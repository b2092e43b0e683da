"""Table of aggregated configs, and the labels of its rows."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import pandas as pd

from dmlbench.evaluation.metrics.registry import Score, score_named
from dmlbench.results.caveats import PARTIAL, by_fact, by_row, caveats_of_rows, queries
from dmlbench.results.table import Entry, Table
from dmlbench.types import ConfigError, closest

NAMING_GROUPS = ("backbone", "pooling", "head", "loss", "miner", "optim", "schedule", "regularizer")
"""Groups whose options name a config; the last only if configs differ in it alone."""
IMPORTED = "imported"
"""The only choice of an imported config: its label."""
_OF_DATA = ("num_classes", "num_channels", "map_size", "embedding_size", "feature_size")
_OF_RERANK = ("rerank.grid_size", "rerank.num_neighbors")
"""Settings of it that a label says in words."""
KINDS = ("separated", "concatenated", "AGS", "best", "mean")


def make_table(
    title: str,
    summaries: Sequence[Mapping[str, Any]],
    labels: Sequence[str],
    metrics: Sequence[str],
    facts: Sequence[str] = (),
    differing: Sequence[str] = (),
) -> Table:
    """A row for each summary of ``aggregate_config``.

    Args:
        facts: of the splits, as first columns.
        differing: notes on settings in which the rows differ beyond their labels.
    """
    kinds = [kind for kind in KINDS if any(kind in summary["scores"] for summary in summaries)]
    known = {metric for summary in summaries for scores in summary["scores"].values() for metric in scores}
    check_metrics(metrics, known)
    scores = [score_named(metric) for metric in metrics]
    columns = [("", fact) for fact in facts]
    for kind in kinds:
        columns += [(kind + size_of(kind, summaries), score.label) for score in scores]
    rows = []
    for fact in facts:
        if not any(fact in (own or {}) for summary in summaries for own in summary.get("facts", {}).values()):
            raise ConfigError(f"no split of these results has the fact '{fact}'")
    for summary in summaries:
        of_kinds = [summary["scores"].get(kind, {}) for kind in kinds]
        entries = [entry_of(found, score) for found in of_kinds for score in scores]
        rows.append([*(_fact(summary, fact) for fact in facts), *entries])
    gains = gains_over_frozen(summaries, metrics)
    for name, values in gains.items():
        columns.append(("", name))
        for row, value in zip(rows, values, strict=True):
            row.append(value)
    caveats = caveats_of_rows(summaries)
    facts_of_rows = [_facts(summary, own) for summary, own in zip(summaries, caveats, strict=True)]
    settings = [f"DIFFERENT SETTINGS: {note}" for note in differing]
    deviations = [summary.get("deviations", ()) for summary in summaries]
    notes = by_row(facts_of_rows, labels) + by_fact(deviations, labels) + settings
    if any(not score.metric.percent for score in scores):
        notes.insert(0, "class distances as they are, not in percent; none is best")
    return Table(
        title,
        pd.DataFrame(rows, index=list(labels), columns=pd.MultiIndex.from_tuples(columns), dtype=object),
        notes=tuple(notes),
        align="l" + "c" * len(columns),
        higher_is_better=(False,) * len(facts)
        + tuple(score.metric.better is not None for score in scores) * len(kinds)
        + (False,) * len(gains),
        competes=competing(summaries),
        caveats=(*by_row(caveats, labels), *settings),
        row_notes=tuple((*own, *deviates, *settings) for own, deviates in zip(facts_of_rows, deviations, strict=True)),
    )


def check_metrics(metrics: Sequence[str], known: Collection[str]) -> None:
    """Raise ConfigError for a metric that results do not have."""
    if absent := [metric for metric in metrics if metric not in known]:
        raise ConfigError(f"metric '{absent[0]}' is not in these results: {closest(absent[0], sorted(known))}")


def size_of(kind: str, summaries: Sequence[Mapping[str, Any]]) -> str:
    """Sizes of the embeddings behind a kind of scores, such as " (128-D)"; may be empty."""
    sizes = sorted({s["dimension"][kind] for s in summaries if kind in s.get("dimension", {})})
    return f" ({'/'.join(map(str, sizes))}-D)" if sizes else ""


def gains_over_frozen(summaries: Sequence[Mapping[str, Any]], metrics: Sequence[str]) -> dict[str, list[str | None]]:
    """Columns of tables with frozen or tuned backbones: trained parameters, seconds per run, gains over no training.

    The gain is the difference in MAP@R (else the first metric) of separated models to the best untrained pooling *by
    validation*: of its features themselves (``head=identity``), and whitened (``head=learned_whitening``) to the row's
    dimension.
    """
    training = [summary.get("training") or {} for summary in summaries]
    parts = {"frozen": "frozen_until", "tuning": "tuning"}
    columns = {label: [own.get(key) for own in training] for label, key in parts.items()}
    columns = {label: values for label, values in columns.items() if any(values)}
    if not columns:
        return {}
    metric = "map_at_r" if "map_at_r" in metrics else metrics[0]
    label = score_named(metric).label

    def score(summary: Mapping[str, Any]) -> float | None:
        found = entry_of(next(iter(summary["scores"].values())), score_named(metric))
        return None if found is None else found.mean

    def best(head: str, dimension: int | None) -> float | None:
        rows = [
            summary
            for summary, own in zip(summaries, training, strict=True)
            if summary["choices"].get("head") == head and own.get("trained_parameters") == 0
            if dimension is None or summary.get("dimension", {}).get("separated") == dimension
            if metric in summary.get("validation", {})
        ]
        return score(max(rows, key=lambda row: row["validation"][metric])) if rows else None

    def gains(head: str, same_dimension: bool) -> list[str | None]:
        found: list[str | None] = []
        for summary in summaries:
            dimension = summary.get("dimension", {}).get("separated") if same_dimension else None
            own, base = score(summary), best(head, dimension)
            found.append(None if own is None or base is None else f"{own - base:+z.1f}")
        return found

    return {
        **columns,
        "trained": [f"{own.get('trained_parameters', 0):,}" for own in training],
        "s/run": [f"{s['wall_s'] / s['n_runs']:.0f}" if "wall_s" in s else None for s in summaries],
        f"{label} over frozen": gains("identity", False),
        "over whitened": gains("learned_whitening", True),
    }


def competing(summaries: Sequence[Mapping[str, Any]]) -> tuple[bool, ...]:
    """Which summaries may be the best: complete ones, scored on the same images as most of them."""
    scored_on = [(s["scored_on"], s["n_query"], s["n_gallery"], s["dataset_fingerprint"]) for s in summaries]
    complete = [on for on, summary in zip(scored_on, summaries, strict=True) if not summary["missing"]]
    usual = max(complete, key=lambda on: (on[0] == "test", complete.count(on)), default=None)
    return tuple(on == usual and not s["missing"] for on, s in zip(scored_on, summaries, strict=True))


def entry_of(scores: Mapping[str, Mapping[str, float | None]], score: Score) -> Entry | None:
    """A score of ``{name: {"mean", "std"}}`` as the table prints it; None where it is absent or undefined."""
    found = scores.get(score.name)
    if found is None or found["mean"] is None:
        return None
    return Entry(score.scale * found["mean"], None if found["std"] is None else score.scale * found["std"])


def _fact(summary: Mapping[str, Any], name: str) -> str | None:
    """The different values of a fact over the runs' splits."""
    own = [facts[name] for facts in summary.get("facts", {}).values() if facts and name in facts]
    texts = dict.fromkeys(f"{value:.4g}" if isinstance(value, float) else str(value) for value in own)
    return ", ".join(texts) or None


def _facts(summary: Mapping[str, Any], caveats: Sequence[str]) -> list[str]:
    """Number of runs, spread, caveats and search of a row."""
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
        spread = f"; mean ± population std over {summary.get('spread', 'repeats')}"
        facts.append(runs + (spread if summary["n_runs"] > 1 else ", hence no std"))
    if training := summary.get("training"):
        views = f", {training['views']} cached views" if training["views"] else ""
        facts.append(f"{' x '.join(map(str, training['image_size']))} pixels{views}")
    facts += [caveat for caveat in caveats if not caveat.startswith(PARTIAL)]
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
    """Shortest different labels of configs, and notes on what else differs between them.

    Args:
        configs: per config the chosen option of each group, and the flattened configuration.
        by_hand: per config, a remark on each setting that differs from its chosen option.

    Returns:
        Labels: the chosen options that differ, then values that differ between configs of the same options. Notes:
        other settings with different values, and those of ``by_hand``.
    """
    made_here = [choices for choices, _ in configs if IMPORTED not in choices]
    *usual, last = NAMING_GROUPS
    groups = [g for g in usual if len({choices.get(g) for choices in made_here}) > 1] or ["pooling"]
    words = [" ".join(_words(choices, groups)) for choices, _ in configs]
    if len({(word, choices.get(last)) for word, (choices, _) in zip(words, configs, strict=True)}) > len(set(words)):
        groups.append(last)
        words = [" ".join(_words(choices, groups)) for choices, _ in configs]
    settings = [{key: value for key, value in config.items() if not _says_the_data(key)} for _, config in configs]
    is_untrained = [config.get("fit.max_steps") == 0 for config in settings]
    kinds = [(_reranking(config), no) for config, no in zip(settings, is_untrained, strict=True)]
    labels = []
    for name, config, kind in zip(words, settings, kinds, strict=True):
        alike = zip(words, settings, kinds, strict=True)
        rivals = [other for word, other, of_kind in alike if (word, of_kind) == (name, kind)]
        keys = {key for other in rivals for key in other}
        differing = sorted(key for key in keys if len({repr(other.get(key)) for other in rivals}) > 1)
        values = [f"{key}={config[key]}" for key in differing if config.get(key) is not None]
        reranking, untrained = kind
        labels.append(" ".join([name, *values]) + reranking + " (untrained)" * untrained)
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


def _reranking(config: Mapping[str, Any]) -> str:
    """The reranking, behind the label."""
    if "rerank._target_" not in config:
        return ""
    name = str(config["rerank._target_"]).rpartition(".")[2].removesuffix("Distance").upper()
    size, count = (config.get(key) for key in _OF_RERANK)
    return f" ({name}, {size} x {size}, first {count})"


def _says_the_data(key: str) -> bool:
    """Whether a value follows from the data or from other settings."""
    group, _, last = key.partition(".")
    return group in ("loss", "regularizer", "pooling") and last.rpartition(".")[2] in _OF_DATA
