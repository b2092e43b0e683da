"""Table of aggregated configs, and the labels of its rows."""

import itertools
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import pandas as pd

from dmlbench.evaluation.metrics.registry import Score, score_named
from dmlbench.results.caveats import MOST_RUNS, PARTIAL, by_fact, by_row, caveats_of_rows, queries
from dmlbench.results.table import Entry, Table
from dmlbench.types import ConfigError, closest, shorten

NO_TRAINING = "(no training)"
"""End of the label of a config that takes no optimizer step."""
NAMING_GROUPS = ("backbone", "pooling", "head", "tuning", "loss", "miner", "optim", "schedule", "regularizer")
"""Groups whose options name a config; the last only if configs differ in it alone."""
IMPORTED = "imported"
"""The only choice of an imported config: its label."""
_OF_TRAINING = ("loss", "miner", "optim", "schedule", "regularizer")
"""Groups that change nothing without training."""
_WITHOUT_EFFECT = (*(f"{group}." for group in (*_OF_TRAINING, "sampler", "fit")), "transform.train.")
"""Beginnings of keys that change nothing without training."""
_MOST_KEYS = 4
"""Differing settings of a group that a note lists."""
_OF_DATA = ("num_classes", "num_channels", "map_size", "embedding_size", "feature_size")
_OF_RERANK = ("rerank.grid_size", "rerank.num_neighbors")
"""Settings of it that a label says in words."""
_GAINS = (
    "over frozen, over whitened: points above the best row without training by validation, of frozen features "
    "(head=identity) and of learned whitening to the same dimension"
)
KINDS = ("separated", "concatenated", "AGS", "best", "mean")


def make_table(
    title: str,
    summaries: Sequence[Mapping[str, Any]],
    labels: Sequence[str],
    metrics: Sequence[str],
    facts: Sequence[str] = (),
    settings: Sequence[Mapping[str, str]] = (),
    shared: str = "",
) -> Table:
    """A row for each summary of ``aggregate_config``.

    Args:
        facts: of the splits, as first columns.
        settings: of each row, the settings that differ between rows and that its label does not say.
        shared: what all rows share, for the caption.
    """
    kinds = shown_kinds(summaries)
    known = {metric for summary in summaries for scores in summary["scores"].values() for metric in scores}
    check_metrics(metrics, known)
    scores = [
        (kind, score)
        for kind in kinds
        for score in map(score_named, metrics)
        if kind == kinds[0] or any(score.name in summary["scores"].get(kind, {}) for summary in summaries)
    ]
    columns = [("", fact) for fact in facts]
    columns += [(kind + size_of(kind, summaries), score.label) for kind, score in scores]
    rows = []
    for fact in facts:
        if not any(fact in (own or {}) for summary in summaries for own in summary.get("facts", {}).values()):
            raise ConfigError(f"facts: got '{fact}', which no split of these results has.")
    for summary in summaries:
        entries = [entry_of(summary["scores"].get(kind, {}), score) for kind, score in scores]
        rows.append([*(_fact(summary, fact) for fact in facts), *entries])
    gains = gains_over_frozen(summaries, metrics)
    for name, values in gains.items():
        columns.append(("", name))
        for row, value in zip(rows, values, strict=True):
            row.append(value)
    caveats = caveats_of_rows(summaries)
    has_clusters = any(score.metric.reads == "clusters" for _, score in scores)
    facts_of_rows = [
        _facts(summary, own, has_clusters=has_clusters) for summary, own in zip(summaries, caveats, strict=True)
    ]
    deviations = [summary.get("deviations", ()) for summary in summaries]
    differing = [f"{text} (values: column settings of the CSV)" for text in differing_settings(settings)]
    notes = by_row(facts_of_rows, labels) + by_fact(deviations, labels) + differing
    if any(not score.metric.percent for _, score in scores):
        notes.insert(0, "class distances as they are, not in percent; none is best")
    if "trained" in gains:
        notes.append("trained: number of trained parameters")
    if any("over" in name for name in gains):
        notes.append(_GAINS)
    return Table(
        title,
        pd.DataFrame(rows, index=list(labels), columns=pd.MultiIndex.from_tuples(columns), dtype=object),
        notes=tuple(notes),
        about=shared,
        align="l" + "c" * len(columns),
        higher_is_better=(False,) * len(facts)
        + tuple(score.metric.better is not None for _, score in scores)
        + (False,) * len(gains),
        competes=competing(summaries),
        caveats=(*by_row(caveats, labels), *differing),
        row_notes=tuple((*own, *deviates) for own, deviates in zip(facts_of_rows, deviations, strict=True)),
        row_settings=tuple("; ".join(f"{key}={value}" for key, value in own.items()) for own in settings),
    )


def shown_kinds(summaries: Sequence[Mapping[str, Any]]) -> list[str]:
    """Kinds of scores of a table: without concatenations of a single model and the best of a single run."""
    kinds = [kind for kind in KINDS if any(kind in summary["scores"] for summary in summaries)]
    dimensions = [summary.get("dimension", {}) for summary in summaries]
    if all(own.get("concatenated") == own.get("separated") for own in dimensions if "concatenated" in own):
        kinds = [kind for kind in kinds if kind != "concatenated"]
    if all(summary["n_runs"] == 1 for summary in summaries):
        kinds = [kind for kind in kinds if kind != "best"]
    return kinds


def differing_settings(settings: Sequence[Mapping[str, str]]) -> list[str]:
    """A sentence with the settings in which rows differ; many of a group are counted. None if there are none."""
    groups: dict[str, list[str]] = {}
    for key in sorted({key for own in settings for key in own}):
        groups.setdefault(key.partition(".")[0], []).append(key)
    listed = [
        ", ".join(keys) if len(keys) <= _MOST_KEYS else f"{len(keys)} settings of {group}"
        for group, keys in groups.items()
    ]
    return [f"Rows also differ in {', '.join(listed)}"] if listed else []


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

    Columns that are empty, or say the same of all rows, are left out.

    The gain is the difference in MAP@R (else the first metric) of separated models to the best untrained pooling *by
    validation*, of the same network, image size and test: of its features themselves (``head=identity``), and whitened
    (``head=learned_whitening``) to the row's dimension.
    """
    training = [summary.get("training") or {} for summary in summaries]
    parts = {"frozen": "frozen_until", "tuning": "tuning"}
    columns = {label: [own.get(key) for own in training] for label, key in parts.items()}
    if not any(map(any, columns.values())):
        return {}
    columns = {label: values for label, values in columns.items() if len(set(values)) > 1}
    metric = "map_at_r" if "map_at_r" in metrics else metrics[0]
    label = score_named(metric).label

    def score(summary: Mapping[str, Any]) -> float | None:
        found = entry_of(next(iter(summary["scores"].values())), score_named(metric))
        return None if found is None else found.mean

    competes = competing(summaries)

    def gains(head: str, same_dimension: bool) -> list[str | None]:
        found: list[str | None] = []
        for summary, own in zip(summaries, training, strict=True):
            rows = [
                other
                for other, of_other, may_win in zip(summaries, training, competes, strict=True)
                if may_win and other["choices"].get("head") == head and of_other.get("trained_parameters") == 0
                if _network(other) == _network(summary) and of_other.get("image_size") == own.get("image_size")
                if not same_dimension or _dimension(other) == _dimension(summary)
                if metric in other.get("validation", {})
            ]
            base = score(max(rows, key=lambda row: row["validation"][metric])) if rows else None
            mean = score(summary)
            found.append(None if mean is None or base is None else f"{mean - base:+z.1f}")
        return found

    columns |= {
        "trained": [f"{own['trained_parameters']:,}" if "trained_parameters" in own else None for own in training],
        "s/run": [
            f"{s['wall_s'] / s['n_runs']:.0f}" if "wall_s" in s and "imported" not in s else None for s in summaries
        ],
        f"{label} over frozen": gains("identity", False),
        "over whitened": gains("learned_whitening", True),
    }
    return {name: values for name, values in columns.items() if any(values)}


def _dimension(summary: Mapping[str, Any]) -> int | None:
    dimension: int | None = summary.get("dimension", {}).get("separated")
    return dimension


def _network(summary: Mapping[str, Any]) -> tuple[str | None, ...]:
    return summary["choices"].get("backbone"), summary.get("weights_sha256")


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


def _facts(summary: Mapping[str, Any], caveats: Sequence[str], *, has_clusters: bool) -> list[str]:
    """Number of runs, spread, caveats, search and, for scores of clusters, k-means of a row."""
    facts = []
    runs = f"{summary['n_runs']} run{'s' * (summary['n_runs'] > 1)}"
    if summary["missing"]:
        missing = shorten(summary["missing"], most=MOST_RUNS)
        runs = f"{PARTIAL}{summary['n_runs']} of {summary['n_runs_expected']} runs, without {missing}"
    if summary["n_collections"]:
        count = summary["n_collections"]
        spread = f"mean ± population std over {count} collections of fold models"
        facts.append(f"{runs}; {spread if count > 1 else 'one collection, hence no std'}")
    else:
        spread = f"; mean ± population std over {summary.get('spread', 'repeats')}"
        has_std = any(one["std"] is not None for scores in summary["scores"].values() for one in scores.values())
        facts.append(runs + (spread if has_std else ", hence no std"))
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
        if has_clusters and "kmeans" in summary:
            facts.append(f"clusters of nmi and ami: k-means of {summary['kmeans']}")
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
) -> tuple[list[str], list[dict[str, str]]]:
    """Shortest different labels of configs, and what else differs between them.

    Args:
        configs: per config the chosen option of each group, and the flattened configuration.
        by_hand: per config, a remark on each setting that differs from its chosen option.

    Returns:
        Labels: the chosen options that differ, then values that differ between configs of the same options. Settings
        of each config that its label does not say: those that differ between trained configs, and those of ``by_hand``
        that not all configs have.
    """
    configs = [({"tuning": "none", **choices}, config) for choices, config in configs]  # older runs have no tuning
    made_here = [choices for choices, _ in configs if IMPORTED not in choices]
    settings = [{key: value for key, value in config.items() if not _says_the_data(key)} for _, config in configs]
    is_untrained = [config.get("fit.max_steps") == 0 for config in settings]
    *usual, last = NAMING_GROUPS
    groups = [g for g in usual if len({choices.get(g) for choices in made_here}) > 1]
    if groups in ([], ["tuning"]):  # whose usual option has no name
        groups.insert(0, "pooling")
    words = [" ".join(_words(choices, groups)) for choices, _ in configs]
    if len({(word, choices.get(last)) for word, (choices, _) in zip(words, configs, strict=True)}) > len(set(words)):
        groups.append(last)
        words = [" ".join(_words(choices, groups)) for choices, _ in configs]
    words = _without_training(words, configs, is_untrained, groups)
    kinds = [(_reranking(config), no) for config, no in zip(settings, is_untrained, strict=True)]
    labels = []
    for name, config, kind in zip(words, settings, kinds, strict=True):
        alike = zip(words, settings, kinds, strict=True)
        rivals = [other for word, other, of_kind in alike if (word, of_kind) == (name, kind)]
        keys = {key for other in rivals for key in other}
        differing = sorted(key for key in keys if len({repr(other.get(key)) for other in rivals}) > 1)
        values = [f"{key}={config[key]}" for key in differing if config.get(key) is not None]
        reranking, untrained = kind
        label = " ".join(filter(None, [name, *values])) + reranking + f" {NO_TRAINING}" * untrained
        labels.append(label.strip())
    found = _unsaid(settings, labels, groups, is_untrained)
    remarks = by_hand or [{}] * len(configs)
    for own, config, label, remarked in zip(found, settings, labels, remarks, strict=True):
        for key, remark in remarked.items():
            shared = all(key in other for other in remarks) and len({str(other.get(key)) for other in settings}) == 1
            if key in config and key.partition(".")[0] in groups and f" {key}=" not in label and not shared:
                own[key] = f"{_text(config[key])} ({remark})"
    return labels, found


def _unsaid(
    settings: Sequence[Mapping[str, Any]], labels: Sequence[str], groups: Sequence[str], is_untrained: Sequence[bool]
) -> list[dict[str, str]]:
    """Settings in which configs differ and that no label says, by config; without those of ``groups``.

    Configs without training are asked only for what changes them.
    """
    found: list[dict[str, str]] = [{} for _ in settings]
    for key in sorted({key for config in settings for key in config}):
        idle = key.startswith(_WITHOUT_EFFECT)  # without training
        holding = [i for i, no in enumerate(is_untrained) if not (no and idle) and _holds(settings[i], key)]
        hidden = any(settings[i].get(key) is not None and f" {key}=" not in labels[i] for i in holding)
        said = key in _OF_RERANK or key.partition(".")[0] in (*groups, IMPORTED)
        if hidden and not said and len({_text(settings[i].get(key)) for i in holding}) > 1:
            for i in holding:
                found[i][key] = _text(settings[i].get(key))
    return found


def _holds(config: Mapping[str, Any], key: str) -> bool:
    """Whether a flattened config has a key, or null in place of a node with it; labels tell of a missing rerank."""
    parents = itertools.accumulate(key.split(".")[:-1], "{}.{}".format)
    return key in config or any(parent in config for parent in parents if parent != "rerank")


def _without_training(
    words: Sequence[str], configs: Sequence[tuple[Mapping[str, str], Mapping[str, Any]]],
    is_untrained: Sequence[bool], groups: Sequence[str],
) -> list[str]:  # fmt: skip
    """Words of configs, those without training without loss and optimizer unless these distinguish them."""
    of_model = [group for group in groups if group not in _OF_TRAINING]
    brief = {
        word: " ".join(_words(choices, of_model))
        for word, (choices, _), no in zip(words, configs, is_untrained, strict=True)
        if no
    }
    if len(set(brief.values())) < len(brief):
        return list(words)
    return [brief[word] if no else word for word, no in zip(words, is_untrained, strict=True)]


def _text(value: Any) -> str:
    return "null" if value is None else str(value)


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
    is_chosen = key == "pooling.feature_size"  # of NetVLAD and OTP
    return group in ("loss", "regularizer", "pooling") and last.rpartition(".")[2] in _OF_DATA and not is_chosen
