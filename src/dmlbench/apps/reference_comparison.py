"""All rows of a table against reference rows: paired differences, p-values after Holm, a bootstrap over classes."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from numpy.typing import NDArray

from dmlbench.apps.compare_configs import ConfigSummary
from dmlbench.apps.pictures import COLORS, plt
from dmlbench.data.preparation.catalog import title_of
from dmlbench.evaluation.metrics.registry import Score, score_named
from dmlbench.results.class_bootstrap import class_bootstrap
from dmlbench.results.collections import PairedDifference, confidence_interval, holm, p_value_text, paired_difference
from dmlbench.results.store import PER_QUERY, Coordinates, RunInfo
from dmlbench.results.table import Table
from dmlbench.types import ConfigError, closest, shorten

log = logging.getLogger(__name__)

_LEVEL = 0.05
_MOST_RANKED = 10


@dataclass(frozen=True)
class Difference:
    """A row minus the reference row, as fractions."""

    label: str
    paired: PairedDifference
    p_value: float | None  # after Holm, over the rows compared with this reference; None where t is undefined
    classes: tuple[float, float]  # 95 % interval by the bootstrap over test classes

    @property
    def is_significant(self) -> bool:
        """By the p-value; by the bootstrap over classes where no seed changes either row; not from one pair of runs."""
        if self.p_value is not None:
            return self.p_value < _LEVEL
        low, high = self.classes
        return self.paired.n_pairs > 1 and low * high > 0

    @property
    def is_ahead(self) -> bool:
        return self.is_significant and self.paired.difference > 0


Differences = Mapping[str, Sequence[Difference]]
"""By the label of the reference."""


def compared_metrics(configs: Sequence[ConfigSummary], metrics: Sequence[str]) -> list[str]:
    """Those of the metrics that all runs have for each query."""
    runs = [run.path for config in configs for run in _summarized(config)]
    columns = [set(pd.read_csv(run / PER_QUERY, nrows=0)) for run in runs]
    return [metric for metric in metrics if all(metric in own for own in columns)]


def differences_of(
    configs: Sequence[ConfigSummary], references: Sequence[str], metrics: Sequence[str]
) -> dict[str, Differences]:
    """Every config against each reference, by metric.

    Args:
        references: labels of some of the configs.
    """
    every = [{run.path.name for run in _summarized(config)} for config in configs]
    if left_out := sorted(set.union(*every) - (shared := set.intersection(*every))):
        log.warning("differences leave out %s, which not all rows have", shorten(left_out))
        configs = [
            replace(config, runs=tuple(run for run in config.runs if run.path.name in shared)) for config in configs
        ]
    by_label = {config.label: config for config in configs}
    if unknown := [label for label in references if label not in by_label]:
        nearest = closest(unknown[0], list(by_label))
        raise ConfigError(f"reproduce.references: got '{unknown[0]}', expected a row: {nearest}")
    scores, labels = _query_scores(configs, metrics)
    found: dict[str, Differences] = {}
    for metric in metrics:
        found[metric] = {
            reference: _to(by_label[reference], configs, metric, scores, labels) for reference in references
        }
    return found


def _to(
    base: ConfigSummary, configs: Sequence[ConfigSummary], metric: str, scores: Mapping[str, pd.DataFrame],
    labels: NDArray[np.int64],
) -> list[Difference]:  # fmt: skip
    others = [config for config in configs if config is not base]
    paired = [paired_difference(_by_run(base, metric), _by_run(other, metric)) for other in others]
    differences = []
    for config, pair, p_value in zip(others, paired, holm([pair.p_value for pair in paired]), strict=True):
        of_queries = (scores[config.label][metric] - scores[base.label][metric]).to_numpy()
        known = np.isfinite(of_queries)
        interval = class_bootstrap(of_queries[known], labels[known])
        differences.append(Difference(config.label, pair, p_value, interval))
    return differences


def _query_scores(
    configs: Sequence[ConfigSummary], metrics: Sequence[str]
) -> tuple[dict[str, pd.DataFrame], NDArray[np.int64]]:
    """Scores of each config's queries, averaged over runs, by label; and the queries' classes [Q]."""
    found: dict[str, pd.DataFrame] = {}
    queries: pd.DataFrame | None = None
    for config in configs:
        frames = [pd.read_csv(run.path / PER_QUERY) for run in _summarized(config)]
        found[config.label] = pd.concat([frame[list(metrics)] for frame in frames]).groupby(level=0).mean()
        queries = frames[0][["id", "label"]] if queries is None else queries
        if not all(frame[["id", "label"]].equals(queries) for frame in frames):
            raise ConfigError("reproduce.references: got runs of different queries, expected one test set. Remove it.")
    assert queries is not None
    return found, queries["label"].to_numpy()


def _by_run(config: ConfigSummary, metric: str) -> dict[Coordinates, float]:
    return {(run.fold, run.repeat): config.summary["raw"][run.path.name][metric] for run in _summarized(config)}


def _summarized(config: ConfigSummary) -> list[RunInfo]:
    return [run for run in config.runs if run.path.name in config.summary["raw"]]


def reference_table(title: str, configs: Sequence[ConfigSummary], found: Differences, metric: str) -> Table:
    """A row for each config, with its differences from the references."""
    score = score_named(metric)
    columns: dict[str, list[str]] = {score.label: [_mean(config, score) for config in configs]}
    for reference, differences in found.items():
        by_label = {one.label: one for one in differences}
        own = [by_label.get(config.label) for config in configs]
        columns[f"− {reference}"] = ["" if one is None else _interval(one, score) for one in own]
        columns[f"p, {reference}"] = [
            "" if one is None or one.p_value is None else p_value_text(one.p_value) for one in own
        ]
        columns[f"classes, {reference}"] = ["" if one is None else _bounds(one.classes, score) for one in own]
    pairs = min((one.paired.n_pairs for own in found.values() for one in own), default=0)
    some_left_out = any(len(_summarized(config)) > pairs for config in configs)
    of_pairs = (f"differences: {pairs} runs of each row, which all rows have; {score.label}: all runs of a row",)
    return Table(
        title,
        pd.DataFrame(columns, index=pd.Index([config.label for config in configs], name="row"), dtype=object),
        notes=(
            *(of_pairs if some_left_out else ()),
            "points, with 95 % t intervals over pairs of runs with the same fold, repeat and seed",
            "p: two-sided, after Holm's correction over the rows of a column; none for one pair of runs, or where no "
            "seed changes either row",
            "classes: 95 % intervals of the bootstrap over test classes, of scores averaged over runs; not corrected",
        ),
        align="l" + "r" * len(columns),
        data=pd.DataFrame(_lines(found, metric)),
    )


def _lines(found: Differences, metric: str) -> list[dict[str, object]]:
    return [
        {
            "row": one.label, "reference": reference, "metric": metric, "difference": one.paired.difference,
            "low": (one.paired.interval or (None, None))[0], "high": (one.paired.interval or (None, None))[1],
            "p_value": one.paired.p_value, "p_holm": one.p_value, "classes_low": one.classes[0],
            "classes_high": one.classes[1], "pairs": one.paired.n_pairs, "over": one.paired.over,
        }
        for reference, differences in found.items() for one in differences
    ]  # fmt: skip


def _mean(config: ConfigSummary, score: Score) -> str:
    return f"{score.scale * np.mean(list(_by_run(config, score.name).values())):.2f}"


def _interval(one: Difference, score: Score) -> str:
    text = f"{score.scale * one.paired.difference:+z.2f}"
    return f"{text} {_bounds(one.paired.interval, score)}" if one.paired.interval else text


def _bounds(interval: tuple[float, float], score: Score) -> str:
    low, high = (score.scale * bound for bound in interval)
    return f"[{low:+z.2f}, {high:+z.2f}]"


def conclusions(found: Differences, metric: str) -> list[str]:
    """Sentences: which rows do not differ significantly from the first reference, which do not beat the others."""
    label = score_named(metric).label
    (first, of_first), *others = found.items()
    if all(one.paired.n_pairs == 1 for one in of_first):
        return [f"{label}: not tested, as each difference is from one pair of runs"]
    alike = [one.label for one in of_first if not one.is_significant]
    sentences = [f"{label}: no significant difference from {first}: {', '.join(alike) or 'no row'}"]
    for reference, differences in others:
        behind = [one.label for one in differences if not one.is_ahead]
        sentences.append(f"{label}: not ahead of {reference}: {', '.join(behind) or 'no row'}")
    return sentences


def score_figure(tables: Mapping[str, Sequence[ConfigSummary]], references: Sequence[str], metric: str) -> Figure:
    """A panel for each data set: every row's mean score, best first, with its interval over seeds."""
    score = score_named(metric)
    height = 0.9 + 0.2 * max(map(len, tables.values()))
    figure, axes = plt.subplots(
        1, len(tables), figsize=(4.8 * len(tables), height), layout="constrained", squeeze=False
    )
    for axis, (name, configs) in zip(axes[0], tables.items(), strict=True):
        means = {config.label: score.scale * np.mean(list(_by_run(config, metric).values())) for config in configs}
        ordered = sorted(configs, key=lambda config: means[config.label])
        for place, config in enumerate(ordered):
            trained = bool((config.summary.get("training") or {}).get("trained_parameters"))
            color = COLORS[0] if trained else COLORS[1]
            folds: dict[int, list[float]] = {}
            for (fold, _), value in _by_run(config, metric).items():
                folds.setdefault(fold, []).append(score.scale * value)
            interval = confidence_interval(list(folds.values())) or (means[config.label],) * 2
            axis.plot(interval, [place, place], color=color, linewidth=2)
            axis.plot(means[config.label], place, "o" if trained else "s", color=color, markersize=4)
        for reference, style in zip(references, ("-", "--", ":"), strict=False):
            axis.axvline(means[reference], color="#999999", linestyle=style, linewidth=0.8, zorder=0)
        axis.set_yticks(range(len(ordered)), [config.label for config in ordered], fontsize=7)
        axis.set_title(title_of(name), fontsize=9)
        axis.set_xlabel(f"{score.label} (%)", fontsize=8)
        axis.tick_params(axis="x", labelsize=7)
        axis.margins(y=0.02)
        axis.spines[["top", "right"]].set_visible(False)
    return figure


def rank_figure(tables: Mapping[str, Sequence[ConfigSummary]], metric: str) -> Figure:
    """Mean ranks of at most ten rows that all tables have, over pairs of data set and run. Descriptive only."""
    shared = [label for label in _labels(tables) if all(label in _labels({"": own}) for own in tables.values())]
    blocks = []
    for configs in tables.values():
        runs = [_by_run(config, metric) for label in shared for config in configs if config.label == label]
        blocks += [[-own[at] for own in runs] for at in sorted(set.intersection(*(set(own) for own in runs)))]
    ranks = pd.DataFrame(blocks).rank(axis=1).mean().to_numpy()
    best = np.argsort(ranks, kind="stable")[:_MOST_RANKED]
    figure, axis = plt.subplots(figsize=(6.5, 0.7 + 0.24 * len(best)), layout="constrained")
    for place, index in enumerate(best[::-1]):
        axis.plot([1, ranks[index]], [place, place], color="#dddddd", linewidth=1, zorder=0)
        axis.plot(ranks[index], place, "o", color=COLORS[0], markersize=5)
        axis.annotate(f"{ranks[index]:.1f}", (ranks[index], place), (6, -3), textcoords="offset points", fontsize=7)
    axis.set_yticks(range(len(best)), [shared[index] for index in best[::-1]], fontsize=8)
    axis.set_xlabel(
        f"mean rank by {score_named(metric).label} among {len(shared)} rows, {len(blocks)} runs", fontsize=8
    )
    axis.spines[["top", "right"]].set_visible(False)
    return figure


def _labels(tables: Mapping[str, Sequence[ConfigSummary]]) -> list[str]:
    return list(dict.fromkeys(config.label for configs in tables.values() for config in configs))


def complete_rows(configs: Sequence[ConfigSummary]) -> list[ConfigSummary]:
    """Configs of which all runs are complete."""
    return [config for config in configs if not config.summary["missing"]]
