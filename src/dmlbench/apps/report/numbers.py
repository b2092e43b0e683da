"""What a page says of configs in numbers: scores, paired differences, curves, classes, settings, where they come from.

Everything is made of what JSON knows; scores are percent (class distances as they are).
"""

import logging
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from dmlbench.apps.report.retrievals import first_run, is_trained
from dmlbench.apps.tables import ConfigSummary
from dmlbench.config import read_config
from dmlbench.evaluation.metrics.table import METRICS, score_named
from dmlbench.identity import config_settings
from dmlbench.results.collections import paired_difference
from dmlbench.results.store import CONFIG, coordinates_of, read_result
from dmlbench.results.table import Entry, Table
from dmlbench.training.fit import HISTORY
from dmlbench.training.log import read_history
from dmlbench.types import RunError

log = logging.getLogger(__name__)

PER_QUERY = "per_query.csv"
_LEVEL = 0.95
_MOST_STEPS = 250  # points of a curve
_SAME = ("dataset_fingerprint", "base_seed", "n_query", "n_gallery", "search", "scored_on")
"""In what two configs must agree for their runs to be pairs."""


def leaderboard(table: Table, configs: Sequence[ConfigSummary]) -> dict[str, Any]:
    """The table of the configs; what holds for one row alone stands with it."""
    rows = []
    for config, (label, *entries), competes, notes in zip(
        configs, table.frame.itertuples(name=None), table.competes, table.row_notes, strict=True
    ):
        best = table.best() if competes else [None] * len(entries)
        rows.append({
            "label": label + " PARTIAL" * bool(config.summary["missing"]),
            "competes": competes,
            "scores": [_entry(entry, top) for entry, top in zip(entries, best, strict=True)],
            "notes": [note for note in notes if note not in table.notes],
        })  # fmt: skip
    of_rows = tuple(f"{label}: " for label in table.frame.index)
    return {
        "columns": [{"kind": kind, "metric": metric} for kind, metric in table.columns],
        "rows": rows,
        "notes": [note for note in table.notes if not note.startswith(of_rows)],
    }


def _entry(entry: Entry | str | None, best: float | None) -> Any:
    if not isinstance(entry, Entry):
        return entry
    std = None if entry.std is None else _short(entry.std)
    # the text is that of the table, for a browser rounds otherwise
    return {"text": str(entry), "mean": _short(entry.mean), "std": std, "best": round(entry.mean, 2) == best}


def metrics_of_runs(configs: Sequence[ConfigSummary], asked: Sequence[str]) -> list[dict[str, Any]]:
    """Those of the asked scores that single runs have."""
    known = {name for config in configs for scores in config.summary["raw"].values() for name in scores}
    return [{"name": name, "label": score_named(name).label} for name in asked if name in known]


def differences(configs: Sequence[ConfigSummary], metrics: Iterable[str]) -> list[dict[str, Any]]:
    """Of each two configs a < b and each metric the difference b - a over the runs that both have.

    ``interval`` is that of one pair at 95 %; ``joint`` is wider: all comparisons of one config hold together with 95 %
    (Bonferroni). ``why`` says why there is none.
    """
    found = []
    together = 1 - (1 - _LEVEL) / max(1, len(configs) - 1)
    for b, second in enumerate(configs):
        for a, first in enumerate(configs[:b]):
            one: dict[str, Any] = {"a": a, "b": b}
            if differing := [key for key in _SAME if first.summary[key] != second.summary[key]]:
                found.append({**one, "why": f"they differ in {', '.join(differing)}, so that runs are no pairs"})
                continue
            common = sorted(set(first.summary["raw"]) & set(second.summary["raw"]))
            if not common:
                found.append({**one, "why": "they have no run in common"})
                continue
            total = len(set(first.summary["raw"]) | set(second.summary["raw"]))
            for name in metrics:
                pairs = [
                    {key: config.summary["raw"][run][name] for run in common
                     if (key := coordinates_of(run)) and name in config.summary["raw"][run]}
                    for config in (first, second)
                ]  # fmt: skip
                if pairs[0].keys() != pairs[1].keys() or not pairs[0]:
                    continue
                scale = score_named(name).scale
                at = [paired_difference(*pairs, level=level) for level in (_LEVEL, together)]
                intervals = [None if d.interval is None else [_short(scale * x) for x in d.interval] for d in at]
                found.append({
                    **one, "metric": name, "difference": _short(scale * at[0].difference), "over": at[0].over,
                    "interval": intervals[0], "joint": intervals[1], "pairs": len(common), "of": total,
                })  # fmt: skip
    return found


def curves(configs: Sequence[ConfigSummary]) -> dict[str, list[Any]]:
    """By the name of what was logged: of each config steps, and mean, least and greatest value over its complete runs.

    A step counts that every run has logged; longer curves are thinned out evenly.
    """
    of_configs = [_curves(config) for config in configs]
    names = dict.fromkeys(name for own in of_configs for name in own)
    order = sorted(names, key=lambda name: (name != "train/loss", not name.startswith("val/"), name))
    return {name: [own.get(name) for own in of_configs] for name in order}


def _curves(config: ConfigSummary) -> dict[str, Any]:
    paths = _complete(config)
    for path in paths:
        if is_trained(path) and not (path / HISTORY).exists():
            log.warning("%s is missing: the curves are without this run", path / HISTORY)
    logged = [entry for path in paths for entry in read_history(path / HISTORY)]
    found = {}
    for name, rows in pd.DataFrame(logged, columns=["step", "name", "value"]).groupby("name"):
        by_step = rows.groupby("step")["value"].agg(["mean", "min", "max", "size"])
        most = by_step["size"].max()
        kept = by_step[by_step["size"] == most]
        if len(kept) > _MOST_STEPS:
            kept = kept.iloc[np.unique(np.linspace(0, len(kept) - 1, _MOST_STEPS).round().astype(int))]
        scale = score_named(_metric_of(str(name))).scale if _metric_of(str(name)) else 1.0
        values = {part: [_short(scale * value) for value in kept[part]] for part in ("mean", "min", "max")}
        found[str(name)] = {"steps": kept.index.tolist(), "runs": int(most), **values}
    return found


def _metric_of(name: str) -> str:
    """The score that is logged as ``val/<score>``; empty for anything else."""
    what, _, score = name.partition("/")
    return score if what == "val" and (score in METRICS or score.rpartition("_")[0] + "_k" in METRICS) else ""


def classes(
    configs: Sequence[ConfigSummary], metrics: Sequence[str], names: Sequence[str] | None, most: int
) -> dict[str, Any]:  # fmt: skip
    """Scores by class of the queries, a config's being means over its complete runs.

    Args:
        metrics: scores to show; what belongs to whole sets has no classes.
        names: by label, or None where they are not known.
        most: classes to keep, those of the lowest first score, averaged over the configs.
    """
    table = pd.concat({i: _by_class(config) for i, config in enumerate(configs)}, names=["config"])
    shown = [name for name in metrics if name in table]
    if not shown:
        return {"metrics": [], "rows": [], "of": 0}
    hardness = table[shown[0]].groupby("label").mean()
    queries = table["queries"].groupby("label").max()
    kept = hardness.sort_values(kind="stable").index[:most].sort_values()
    scores = {name: table[name].unstack("config").reindex(columns=range(len(configs))) for name in shown}
    return {
        "metrics": [{"name": name, "label": score_named(name).label} for name in shown],
        "of": len(hardness),
        "rows": [
            {"name": names[label] if names is not None and label < len(names) else str(label),
             "queries": int(queries[label]),
             "scores": [
                 [None if np.isnan(x) else _short(score_named(name).scale * x) for x in scores[name].loc[label]]
                 for name in shown
             ]}
            for label in kept.tolist()
        ],
    }  # fmt: skip


def _by_class(config: ConfigSummary) -> pd.DataFrame:
    """Means by label over the queries of a run, then over runs; empty where no run has kept its queries' scores."""
    found = []
    for path in filter(Path.exists, (run / PER_QUERY for run in _complete(config))):
        try:
            grouped = pd.read_csv(path).drop(columns="id").groupby("label")
        except (OSError, ValueError, KeyError) as error:
            raise RunError(
                f"{path} is damaged ({error}). Remove the run with `dmlbench clean` and run it again."
            ) from error
        found.append(grouped.mean().assign(queries=grouped.size()))
    return pd.concat(found).groupby("label").mean() if found else pd.DataFrame(index=pd.Index([], name="label"))


def settings(config: ConfigSummary) -> dict[str, str]:
    """What the config is made of, by key."""
    stored = read_config(first_run(config) / CONFIG)
    return {key: "null" if value is None else str(value) for key, value in config_settings(stored).items()}


def provenance(config: ConfigSummary) -> list[tuple[str, str]]:
    """Where a config's numbers come from, as names and values; what differs between its runs is listed."""
    runs = [read_result(path) for path in _complete(config)]
    first, summary = runs[0], config.summary
    told = summary.get("imported")
    selected = "on the test set" if summary["val_is_test"] else "on validation classes"
    finished = [str(run.get("finished", "")) for run in runs]
    # fmt: off
    found: list[tuple[str, str]] = [
        ("folder", "/".join(config.path.parts[-3:])),
        ("runs", f"{summary['n_runs']} of {summary['n_runs_expected']}, base seed {first['base_seed']}"),
        ("selected by", f"{told['selected']} (imported)" if told else f"{first['monitor']}, {selected}"),
        ("data", f"{summary['dataset']}, fingerprint {summary['dataset_fingerprint'][:16]}"),
        ("recipe", _listed(_recipe(run) for run in runs)),
        ("initial weights (SHA-256)", _listed(str(run.get("weights_sha256", ""))[:16] for run in runs)),
        ("steps", _listed(str(run["steps"]) for run in runs)),
        ("best step", _listed(str(run.get("best_step", "")) for run in runs)),
        ("code", _listed(str(run.get("git_commit") or "")[:12] for run in runs)),
        ("hardware", _listed(str(run.get("device", "")) for run in runs)),
        ("versions", _listed(", ".join(f"{k} {v}" for k, v in run.get("versions", {}).items()) for run in runs)),
        ("hours, all runs", f"{sum(run['wall_s'] for run in runs) / 3600:.2f}"),
        ("memory, at most", f"{max(run.get('peak_memory_bytes', 0) for run in runs) / 2**30:.1f} GiB"),
        ("finished", " to ".join(dict.fromkeys([min(finished), max(finished)]))),
    ]
    # fmt: on
    return [(name, value) for name, value in found if value]


def _recipe(run: dict[str, Any]) -> str:
    recipe = run.get("recipe")
    if not recipe:
        return ""
    other = f"; other values: {', '.join(map(str, recipe['overridden']))}" if recipe.get("overridden") else ""
    return f"{recipe['name']} ({recipe['side']}){other}"


def _listed(values: Iterable[str]) -> str:
    return "; ".join(dict.fromkeys(value for value in values if value))


def _complete(config: ConfigSummary) -> list[Path]:
    return [run.path for run in config.runs if run.state == "done"]


def _short(value: float) -> float:
    """Six digits, which is more than a page shows."""
    return float(f"{value:.6g}")
