"""Few-shot scores of several runs: a table, and a picture like figure 7 of the paper."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.patches import Patch

from dmlbench.apps.pictures import COLORS, plt, save_figure
from dmlbench.components import component
from dmlbench.config import listed
from dmlbench.evaluation.metrics.registry import score_named
from dmlbench.oodml.episodes import read_official
from dmlbench.oodml.few_shot import Compared, FewShotPlan, few_shot_of_run
from dmlbench.oodml.split_runs import SplitRun, grouped_runs, notes_of, write_notes
from dmlbench.results.table import Table
from dmlbench.types import ConfigError

Row = tuple[SplitRun, Mapping[int, Compared]]
"""A run with its scores by number of shots."""


def few_shot(args: Any) -> Iterator[str]:
    """Adapt the chosen runs, and write a table and figures of each group."""
    shots = listed(args.shots)
    if any(type(k) is not int for k in shots):
        raise ConfigError(f"shots: got {args.shots}, expected whole numbers such as shots=2,5,10.")
    official = None
    if args.official is not None:
        official = read_official(Path(args.official), listed(args.merge_order))
    elif args.merge_order is not None:
        raise ConfigError(f"merge_order: got {args.merge_order} without official=<file>. Leave it out.")
    keys = ("steps", "batch_size", "images_per_class", "beta", "margin", "lr_factor", "weight_decay", "memory_bytes")
    own = {key: getattr(args, key) for key in keys}
    plan = FewShotPlan(tuple(shots), args.episodes, component(args.evaluation), official=official, **own)
    scores = plan.spec.score_names
    for title, stem, runs in grouped_runs(args):
        rows = [
            (run, few_shot_of_run(run.path, plan, device=args.device, num_workers=args.num_workers)) for run in runs
        ]
        table = few_shot_table(f"{title}, few-shot adaptation", rows, scores)
        yield table.to_markdown()
        table.write(stem, ["md", "csv"])
        for score in scores:
            draw(title, rows, stem.with_name(f"{stem.name}-{score}.png"), score=score)
        yield f"written: {stem}.md, .csv, and a picture for each of {', '.join(scores)}\n"


def few_shot_table(title: str, rows: Sequence[Row], scores: Sequence[str]) -> Table:
    """Zero-shot, few-shot and relative gain of each score and number of shots, in percent; the CSV has fractions."""
    runs, first = [run for run, _ in rows], rows[0][1]
    columns = [(shots, score) for score in scores for shots in first]
    labels = {score: score_named(score).label for score in scores}
    parts = ("zero-shot", "few-shot", "gain")
    heads = ["split", "repeat", *(f"{labels[score]}, k = {k}: {part}" for k, score in columns for part in parts)]
    cells = [
        [run.split, str(run.place["repeat"])]
        + [_in_percent(values) for k, score in columns for values in _parts(compared[k], score).values()]
        for run, compared in rows
    ]
    episodes = len(next(iter(next(iter(first.values())).few_shot.values())))
    notes = [
        f"percent; mean ± population std over {episodes} episodes" if episodes > 1 else "percent; one episode",
        "split: its fold, with its distance where the protocol measures one; gain: (few-shot - zero-shot) / zero-shot "
        "of the same queries",
        *notes_of(runs),
    ]
    return Table(
        title, pd.DataFrame(cells, [run.label for run in runs], heads), tuple(notes),
        align="ll" + "r" * (len(heads) - 1), data=pd.DataFrame(_fractions(rows, scores)),
    )  # fmt: skip


def _fractions(rows: Sequence[Row], scores: Sequence[str]) -> Iterator[dict[str, object]]:
    """A line for each run, number of shots and score."""
    for run, by_shots in rows:
        for shots, compared in by_shots.items():
            for score in scores:
                line = {**run.place, "distance": run.distance, "shots": shots, "score": score}
                line["episodes"] = len(compared.few_shot[score])
                for part, values in _parts(compared, score).items():
                    name = part.replace("-", "_")
                    line[f"{name}_mean"] = None if values is None else float(np.mean(values))
                    line[f"{name}_std"] = None if values is None else float(np.std(values))
                yield {**line, "notes": "; ".join(notes_of([run]))}


def _parts(compared: Compared, score: str) -> dict[str, Sequence[float] | None]:
    return {"zero-shot": compared.zero_shot[score], "few-shot": compared.few_shot[score], "gain": compared.gains(score)}


def _in_percent(values: Sequence[float] | None) -> str:
    if values is None:
        return "undefined"
    mean = f"{100 * np.mean(values):.2f}"
    return mean if len(values) == 1 else f"{mean} ± {100 * np.std(values):.2f}"


def draw(title: str, rows: Sequence[Row], path: Path, *, score: str) -> None:
    """Draw zero-shot and few-shot bars of each method over the splits, and the mean gain, for each number of shots."""
    shots = list(rows[0][1])
    labels = list(dict.fromkeys(run.label for run, _ in rows))
    figure, axes = plt.subplots(
        1, len(shots), figsize=(max(4.5, 1.6 + 0.2 * len(rows)) * len(shots), 4.6), squeeze=False, layout="constrained"
    )
    figure.suptitle(f"{title}: {score_named(score).label} before and after few-shot adaptation", fontsize=11)
    for axis, k in zip(axes[0], shots, strict=True):
        _panel(axis, rows, labels, k, score)
    named = [Patch(color=COLORS[i % len(COLORS)], label=label) for i, label in enumerate(labels)]
    named += [Patch(color="0.75", label="light: zero-shot"), Patch(color="0.25", label="dark: few-shot")]
    figure.legend(handles=named, loc="outside right upper", fontsize=8, frameon=False)
    write_notes(figure, notes_of([run for run, _ in rows]), 60 * len(shots))
    save_figure(figure, path)


def _panel(axis: Axes, rows: Sequence[Row], labels: Sequence[str], shots: int, score: str) -> None:
    splits = sorted({(run.distance or 0.0, run.fold, run.split) for run, _ in rows})
    width = 0.8 / len(labels)
    gains = []
    for x, (_, fold, _) in enumerate(splits):
        of_methods = []
        for i, label in enumerate(labels):
            found = [compared[shots] for run, compared in rows if (run.fold, run.label) == (fold, label)]
            if not found:
                continue
            place = x - 0.4 + width * (i + 0.5)
            zero, few = (100 * np.concatenate([getattr(one, kind)[score] for one in found])
                         for kind in ("zero_shot", "few_shot"))  # fmt: skip
            color = COLORS[i % len(COLORS)]
            axis.bar(place - width / 4, zero.mean(), width / 2, color=color, alpha=0.4)
            axis.bar(place + width / 4, few.mean(), width / 2, color=color, yerr=few.std(), ecolor="0.3", capsize=2)
            of_methods += [gain for one in found for gain in one.gains(score) or ()]
        gains.append(100 * float(np.mean(of_methods)) if of_methods else np.nan)
    axis.set_xticks(range(len(splits)), [name for _, _, name in splits], fontsize=8, rotation=30, ha="right")
    axis.set_xlabel("split (distance)", fontsize=8)
    axis.set_ylabel(f"{score_named(score).label}, percent", fontsize=8)
    axis.set_title(f"{shots} shots", fontsize=9)
    if not np.isnan(gains).all():
        line = axis.twinx()
        line.plot(range(len(splits)), gains, "k.-", linewidth=1)
        line.set_ylabel("mean relative gain, percent", fontsize=8)
        line.set_ylim(1.2 * np.nanmin([0.0, *gains]), 1.2 * np.nanmax([1.0, *gains]))
