"""Scores of configs over the distance of their splits: tables (S3 to S6) and pictures (figures 2, 3 and S4)."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from dmlbench.apps.compare_configs import ConfigSummary, asked_columns, build_tables, find_configs
from dmlbench.apps.pictures import plt, save_figure
from dmlbench.components import component
from dmlbench.config import listed
from dmlbench.evaluation.metrics.registry import Score, score_named
from dmlbench.evaluation.spec import EvaluationSpec
from dmlbench.oodml.split_runs import write_notes
from dmlbench.results.config_table import entry_of
from dmlbench.results.table import Entry, Table
from dmlbench.runtime import read_json
from dmlbench.types import RunError, check_file_name

Splits = tuple[tuple[str, float], ...]
"""Names of splits with the distances between their halves, ascending."""

AGS = "AGS"


def scores_over_distance(args: Any) -> Iterator[str]:
    """Write a table and figures of the chosen configs for each data set and sequence of splits."""
    spec: EvaluationSpec = component(args.evaluation)
    frozen = {str(name): _read_frozen(Path(str(name))) for name in listed(args.frozen)}
    unused = set(frozen)
    scores = [score_named(name) for name in asked_columns(spec)]
    tables: list[Table] = []
    written: list[Path] = []
    found = find_configs(args.paths.output_dir, args.configs, spec, allow_partial=args.allow_partial)
    for (dataset, protocol), configs in found.items():
        by_splits: dict[Splits, list[ConfigSummary]] = {}
        for config in configs:
            if "by_split" in config.summary:
                by_splits.setdefault(_splits(config.summary["by_split"]), []).append(config)
        for i, (splits, alike) in enumerate(by_splits.items()):
            fit = [n for n, one in frozen.items() if one["dataset"] == dataset and _splits(one["by_split"]) == splits]
            unused -= set(fit)
            as_they_are = [frozen[name] for name in fit]
            table = _with_frozen(_table(dataset, protocol, alike, splits, scores, spec), as_they_are, scores)
            tables.append(table)
            stem = f"{dataset}-{protocol}-over-distance{f'-{i + 1}' if i else ''}"
            if args.name is not None:
                check_file_name(args.name)
                stem = f"{args.name}{f'-{len(tables)}' if len(tables) > 1 else ''}"
            folder = Path(args.paths.output_dir) / "tables"
            written += table.write(folder / stem)
            for score in scores:
                path = folder / f"{stem}-{score.name}.png"
                draw_over_distance(
                    alike, splits, score, path, title=table.title, frozen=as_they_are, notes=table.caveats
                )
                written.append(path)
            written.append(folder / f"{stem}-areas.png")
            draw_areas(alike, scores, written[-1], title=table.title, notes=table.caveats)
    if not tables:
        raise RunError(f"no config that matches '{args.configs}' has runs under protocol=oodml. Run one first.")
    if unused:
        raise RunError(f"frozen: got {', '.join(sorted(unused))}, whose splits differ from all configs. Leave it out.")
    yield from (table.to_text() for table in tables)
    yield from (f"written: {path}" for path in written)


def _read_frozen(path: Path) -> dict[str, Any]:
    remedy = "Name files that `dmlbench oodml frozen output=...` wrote."
    try:
        found = dict(read_json(path))
        [(one["split"], float(one["distance"]), one["scores"]) for one in found["by_split"]]
        found["dataset"], found["network"], found["notes"], found[AGS]
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise RunError(f"'{path}' has no scores of frozen features ({error!r}). {remedy}") from error
    return found


def _splits(by_split: Sequence[Mapping[str, Any]]) -> Splits:
    return tuple((str(own["split"]), float(own["distance"])) for own in by_split)


def _table(
    dataset: str, protocol: str, configs: Sequence[ConfigSummary], splits: Splits, scores: Sequence[Score],
    spec: EvaluationSpec,
) -> Table:  # fmt: skip
    """A row for each config; for each score a column for each split, then the area."""
    (base,) = build_tables({(dataset, protocol): configs}, spec).values()
    columns = [
        (score.label, head) for score in scores for head in (*(f"{name} ({at:.1f})" for name, at in splits), AGS)
    ]
    rows = []
    for config in configs:
        by_split: Sequence[Mapping[str, Any]] = config.summary["by_split"]
        rows.append([
            entry_of(own, score)
            for score in scores
            for own in (*(split["scores"] for split in by_split), config.summary["scores"][AGS])
        ])  # fmt: skip
    by = sorted({str(split["distance_by"]) for config in configs for split in config.summary["by_split"]})
    notes = (
        f"columns are splits, in brackets the squared Frechet distance between their halves, by {'; '.join(by)}",
        "AGS: area under the score over these distances, brought to [0, 1]",
    )
    better = tuple(score.metric.better is not None for score in scores for _ in range(len(splits) + 1))
    frame = pd.DataFrame(rows, base.frame.index, pd.MultiIndex.from_tuples(columns), dtype=object)
    return dataclasses.replace(
        base, title=f"{dataset} under {protocol}, over the distance of the splits", frame=frame,
        align="l" + "c" * len(columns), higher_is_better=better, notes=(*notes, *base.notes),
    )  # fmt: skip


def _with_frozen(table: Table, frozen: Sequence[Mapping[str, Any]], scores: Sequence[Score]) -> Table:
    """Add rows of frozen features, which do not compete."""
    rows = []
    for one in frozen:
        given = [*(split["scores"] for split in one["by_split"]), one[AGS]]
        rows.append([
            None if (value := own.get(score.name)) is None else Entry(score.scale * value, None)
            for score in scores
            for own in given
        ])  # fmt: skip
    labels = [f"as it is: {one['network']}" for one in frozen]
    added = pd.DataFrame(rows, labels, table.frame.columns, dtype=object)
    return dataclasses.replace(
        table, frame=pd.concat([table.frame, added]), competes=(*table.competes, *(False for _ in rows)),
        row_notes=(*table.row_notes, *(tuple(one["notes"]) for one in frozen)),
    )  # fmt: skip


def draw_over_distance(
    configs: Sequence[ConfigSummary], splits: Splits, score: Score, path: Path, *, title: str,
    frozen: Sequence[Mapping[str, Any]] = (), notes: Sequence[str] = (),
) -> None:  # fmt: skip
    """Draw scores over the distance, and their differences from the mean of all configs (figure 2).

    Documents of ``dmlbench oodml frozen`` are dashed and not part of the mean.
    """
    at = [distance for _, distance in splits]
    curves = {}
    for config in configs:
        entries = [entry_of(split["scores"], score) for split in config.summary["by_split"]]
        curves[config.label] = (
            np.array([np.nan if entry is None else entry.mean for entry in entries]),
            np.array([0.0 if entry is None or entry.std is None else entry.std for entry in entries]),
        )
    average = np.mean([means for means, _ in curves.values()], axis=0)
    figure, (top, bottom) = plt.subplots(2, 1, figsize=(6, 7), sharex=True, constrained_layout=True)
    for label, (means, deviations) in curves.items():
        for axes, values in ((top, means), (bottom, means - average)):
            (line,) = axes.plot(at, values, marker="o", markersize=3, label=label)
            axes.fill_between(at, values - deviations, values + deviations, color=line.get_color(), alpha=0.15)
    for one in frozen:
        values = score.scale * np.array([split["scores"].get(score.name, np.nan) for split in one["by_split"]])
        (line,) = top.plot(at, values, linestyle="--", label=f"as it is: {one['network']}")
        bottom.plot(at, values - average, linestyle="--", color=line.get_color())
    bottom.axhline(0, color="0.6", linewidth=0.8)
    unit = " in percent" if score.metric.percent else ""
    top.set_ylabel(f"{score.label}{unit}")
    bottom.set_ylabel("difference from the mean of all")
    bottom.set_xlabel("squared Fréchet distance between train and test half")
    figure.legend(*top.get_legend_handles_labels(), loc="outside upper center", fontsize=7)
    top.set_title(title, fontsize=9)
    write_notes(figure, notes, 100, fontsize=6)
    save_figure(figure, path)


def draw_areas(
    configs: Sequence[ConfigSummary], scores: Sequence[Score], path: Path, *, title: str, notes: Sequence[str] = ()
) -> None:
    """Draw the areas under each score as bars with stds (figures 3 and S4)."""
    figure, panels = plt.subplots(
        1, len(scores), figsize=(1.2 + 2.6 * len(scores), 3.4), constrained_layout=True, squeeze=False
    )
    for axes, score in zip(panels[0], scores, strict=True):
        entries = [entry_of(config.summary["scores"][AGS], score) for config in configs]
        means = [np.nan if entry is None else entry.mean for entry in entries]
        deviations = [np.nan if entry is None or entry.std is None else entry.std for entry in entries]
        axes.bar(range(len(configs)), means, yerr=deviations, capsize=3, color="tab:blue")
        for i, mean in enumerate(means):
            axes.annotate(f"{mean:.1f}", (i, mean), ha="center", va="bottom", fontsize=7, xytext=(8, 2),
                          textcoords="offset points")  # fmt: skip
        axes.set_xticks(range(len(configs)), [config.label for config in configs], rotation=30, ha="right", fontsize=7)
        axes.set_title(f"AGS of {score.label}", fontsize=8)
    figure.suptitle(title, fontsize=8)
    write_notes(figure, notes, 50 * len(scores), fontsize=6)
    save_figure(figure, path)
