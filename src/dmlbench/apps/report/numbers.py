"""What a page says of configs in numbers: scores, differences, curves, classes, settings, provenance, papers' scores.

Everything is made of what JSON knows; scores are percent (class distances as they are).
"""

import functools
import logging
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from dmlbench import identity, papers
from dmlbench.apps.compare_configs import ConfigSummary
from dmlbench.apps.experiment_rows import Row, experiments, reproduce_of, rows_of_paper
from dmlbench.apps.paper_comparison import differences_to_paper, provenance_of
from dmlbench.config import compose_run, config_folder, read_config
from dmlbench.evaluation.metrics.registry import METRICS, score_named
from dmlbench.identity import NOT_PART_OF_CONFIG_HASH, config_settings
from dmlbench.results.caveats import incomparable
from dmlbench.results.collections import paired_difference
from dmlbench.results.store import CONFIG, PER_QUERY, coordinates_of, read_result, require_own_files
from dmlbench.results.table import Entry, Table
from dmlbench.results.verdicts import NEEDS, compare
from dmlbench.training.fit import HISTORY
from dmlbench.training.log import read_history
from dmlbench.types import RunError

log = logging.getLogger(__name__)

MAIN_SCORE = "map_at_r"
FIRST_CURVE = f"val/{MAIN_SCORE}"
_CURVES = {
    "train/loss": "training loss",
    "train/dml": "training loss of the metric-learning objective (without regularizers)",
    "train/skipped_steps": "skipped training steps",
    "lr": "learning rate",
}
_LEVEL = 0.95
_MOST_STEPS = 250  # points of a curve
_TESTED_ON = ("dataset_fingerprint", "n_query", "n_gallery")
_SAME = ("dataset_fingerprint", "base_seed", "n_query", "n_gallery", "search", "scored_on")
"""In what two configs must agree for their runs to be pairs."""
_GROUPS = ("recipe", "pooling", "head", "loss", "miner", "regularizer", "rerank")
"""Options by which a row of a paper is known."""
_TOLD_OTHERWISE = (*NOT_PART_OF_CONFIG_HASH, "dataset", "backbone", "evaluation", "protocol.num_repeats")
"""Settings of which data notes, the origin of the weights and the number of runs tell more."""
_MOST_SETTINGS = 6


def is_trained(run_dir: Path) -> bool:
    """Whether a run took optimizer steps here, so that it has a history and weights."""
    return bool(read_result(run_dir).get("steps"))


def leaderboard(table: Table, configs: Sequence[ConfigSummary]) -> dict[str, Any]:
    """The table of the configs, with the notes of single rows in them.

    ``main`` is the column of the headline: MAP@R, else the first with a direction; None without any.
    """
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
    directed = [i for i, has_direction in enumerate(table.higher_is_better) if has_direction]
    main = [i for i in directed if table.columns[i][-1] == score_named(MAIN_SCORE).label] or directed
    of_rows = tuple(f"{label}{end}" for label in table.frame.index for end in (": ", ", "))
    return {
        "columns": [{"kind": kind, "metric": metric} for kind, metric in table.columns],
        "rows": rows,
        "main": main[0] if main else None,
        "notes": [note for note in table.notes if not note.startswith(of_rows)],
    }


def _entry(entry: Entry | str | None, best: float | None) -> Any:
    if not isinstance(entry, Entry):
        return entry
    std = None if entry.std is None else _short(entry.std)
    # the text is that of the table, for a browser rounds otherwise
    return {"text": str(entry), "mean": _short(entry.mean), "std": std, "best": round(entry.mean, 2) == best}


def headline(board: Mapping[str, Any], metrics: Sequence[Mapping[str, str]], pairs: Sequence[Mapping[str, Any]]) -> str:
    """Name the config with the highest main score, its lead, and the joint interval of the paired difference.

    Args:
        board: a ``leaderboard``.
        metrics: of ``metrics_of_runs``.
        pairs: ``differences`` of the same configs.
    """
    if (main := board["main"]) is None:
        return ""
    kind, metric = board["columns"][main]["kind"].partition(" (")[0], board["columns"][main]["metric"]
    labels = [row["label"] for row in board["rows"]]
    scores = {i: row["scores"][main] for i, row in enumerate(board["rows"]) if row["competes"] and row["scores"][main]}
    ranked = sorted(scores, key=lambda i: float(scores[i]["mean"]), reverse=True)
    if not ranked:
        return f"No config is ranked by {metric}: see the notes below the scores."
    best, *others = ranked
    top = f"Highest {metric}: {labels[best]}, {scores[best]['text'].partition(' ')[0]} % ({kind})"
    if not others:
        return f"{top}; no other config is ranked."
    lead = scores[best]["mean"] - scores[others[0]]["mean"]
    top += f"; {lead:.2f} points above {labels[others[0]]}, the next config."
    if kind not in ("separated", "mean"):
        return f"{top} No interval of the paired difference: pairs of runs are compared by their mean, not by {kind}."
    name = next((one["name"] for one in metrics if one["label"] == metric), None)
    a, b = sorted((best, others[0]))
    pair = next((one for one in pairs if (one["a"], one["b"]) == (a, b) and one.get("metric", name) == name), None)
    if pair is None or pair.get("joint") is None:
        why = pair.get("why", "too few different pairs of runs") if pair else "single runs do not have this score"
        return f"{top} No interval of the paired difference: {why}."
    low, high = pair["joint"] if b == best else [-x for x in reversed(pair["joint"])]
    zero = "includes" if low <= 0 <= high else "excludes"
    corrected = f" (Bonferroni, {len(labels) - 1} comparisons)" if len(labels) > 2 else ""
    interval = f"The 95 % interval of the paired difference{corrected}, [{low:+z.2f}, {high:+z.2f}], {zero} 0."
    return f"{top} {interval}"


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
    order = sorted(
        names, key=lambda name: (name != FIRST_CURVE, not name.startswith("val/"), name != "train/loss", name)
    )
    return {name: [own.get(name) for own in of_configs] for name in order}


def _curves(config: ConfigSummary) -> dict[str, Any]:
    paths = config.complete
    for path in paths:
        if is_trained(path) and not (path / HISTORY).exists():
            log.warning("%s is missing: the curves do not include this run", path / HISTORY)
        require_own_files(path, read_result(path), (HISTORY,))
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


def curve_label(name: str) -> str:
    """What a curve shows, in words."""
    metric = _metric_of(name)
    if metric:
        return f"validation {score_named(metric).label}"
    what, _, part = name.partition("/")
    return _CURVES.get(name) or (f"training: {part.replace('_', ' ')}" if what == "train" else name)


def _metric_of(name: str) -> str:
    """The score that is logged as ``val/<score>``; empty for anything else."""
    what, _, score = name.partition("/")
    return score if what == "val" and (score in METRICS or score.rpartition("_")[0] + "_k" in METRICS) else ""


def has_test_images_of(first: ConfigSummary, config: ConfigSummary) -> bool:
    """Whether two configs were tested on the same images."""
    return all(config.summary[key] == first.summary[key] for key in _TESTED_ON)


def classes(
    configs: Sequence[ConfigSummary], metrics: Sequence[str], names: Sequence[str] | None, most: int
) -> dict[str, Any]:  # fmt: skip
    """Scores by class of the queries, a config's being means over its complete runs.

    ``names`` are by label, if known. The ``most`` classes of the lowest first score, averaged over the configs, stay.
    Configs tested on other images than the first have no scores here.
    """
    alike = {i: _by_class(config) for i, config in enumerate(configs) if has_test_images_of(configs[0], config)}
    table = pd.concat(alike, names=["config"])
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
    for path in filter(Path.exists, (run / PER_QUERY for run in config.complete)):
        try:
            grouped = pd.read_csv(path).drop(columns="id").groupby("label")
            found.append(grouped.mean().assign(queries=grouped.size()))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise RunError(f"{path} is damaged ({error}). Remove (`dmlbench clean`) and repeat the run.") from error
    return pd.concat(found).groupby("label").mean() if found else pd.DataFrame(index=pd.Index([], name="label"))


def settings(config: ConfigSummary) -> dict[str, str]:
    """What the config is made of, by key."""
    stored = read_config(config.complete[0] / CONFIG)
    return {key: "null" if value is None else str(value) for key, value in config_settings(stored).items()}


def provenance(config: ConfigSummary) -> list[tuple[str, str]]:
    """Where a config's numbers come from, as names and values; what differs between its runs is listed."""
    runs = [read_result(path) for path in config.complete]
    first, summary = runs[0], config.summary
    told = summary.get("imported")
    if told:
        selected = f"{told['selected']} (imported)"
    elif "val" not in first["metrics"] or not first["steps"]:
        selected = "nothing: the last weights"
    else:
        selected = f"{first['monitor']}, on {'the test set' if summary['val_is_test'] else 'validation classes'}"
    finished = [str(run.get("finished", "")) for run in runs]
    # fmt: off
    found: list[tuple[str, str]] = [
        ("folder", "/".join(config.path.parts[-3:])),
        ("runs", f"{summary['n_runs']} of {summary['n_runs_expected']}, base seed {first['base_seed']}"),
        ("selected by", selected),
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


def _short(value: float) -> float:
    """Six digits, which is more than a page shows."""
    return float(f"{value:.6g}")


def paper_scores(configs: Sequence[ConfigSummary]) -> list[dict[str, Any]]:
    """Every printed score of the rows whose recipe, pooling, head, loss, miner, regularizer and rerank a config has.

    What else differs (backbone, size, weights, values that the recipe did not set, data that are not as published) is
    said with each; a score of which anything differs has no verdict but "not comparable".
    """
    without = (None, "none", "small")
    with_recipe = [config for config in configs if config.summary["choices"].get("recipe") not in without]
    if not with_recipe:
        return []
    known = experiments([config_folder()])
    found = []
    for name in [table for table in papers.tables() if table in known]:
        for row in rows_of_paper(name, reproduce_of(known[name]), {}):
            for config in with_recipe:
                if row.overrides and _may_be(row, config) and _is(row.overrides, config):
                    found.append(_beside(name, row, config, configs.index(config)))
    return [one for one in found if one["verdict"] != NEEDS]


_composed = functools.cache(compose_run)


def _may_be(row: Row, config: ConfigSummary) -> bool:
    """Whether what the row says by itself is as in the config."""
    summary, score = config.summary, row.score
    assert score is not None
    given = dict(override.partition("=")[::2] for override in row.overrides)
    here = [(summary["dataset"], score.dataset), (summary["protocol"], score.protocol)]
    choices = summary["choices"]
    return all(not paper or ours == paper for ours, paper in here) and all(
        given[group] == choices.get(group) for group in _GROUPS if group in given
    )


def _is(overrides: tuple[str, ...], config: ConfigSummary) -> bool:
    """Whether overrides choose the config's options."""
    _, theirs = _composed(overrides)
    return all(_option(theirs, group) == _option(config.summary["choices"], group) for group in _GROUPS)


def _option(choices: Mapping[str, Any], group: str) -> str:
    return str(choices.get(group, "None")).replace("none", "None")


def _beside(name: str, row: Row, config: ConfigSummary, index: int) -> dict[str, Any]:
    run, score = config.complete[0], row.score
    assert score is not None
    result = read_result(run)
    provenance = provenance_of(run / CONFIG, str(result["choices"].get("backbone", "")), [result.get("weights_sha256")])
    reasons = [
        *differences_to_paper(score, config.summary, provenance),
        *_other_settings(row.overrides, run),
        *incomparable(config.summary),
    ]
    made = compare(score, config.summary, reasons, label=row.metric)
    size = f"{score.embedding_size}-D" if score.embedding_size else ""
    column = ", ".join(word for word in (score.setting, score.backbone, score.kind, size) if word)
    return {
        "config": index, "table": name, "row": score.row, "column": column, "metric": score.metric,
        "paper": None if score.mean is None else str(score.mean), "std": None if score.std is None else str(score.std),
        "ours": made.mean, "ours_std": made.std, "difference": made.difference, "verdict": made.verdict,
        "note": made.note,
    }  # fmt: skip


def _other_settings(overrides: tuple[str, ...], run: Path) -> list[str]:
    """What else the experiment of the paper's table has otherwise than a run."""
    composed, _ = _composed(overrides)
    found = [
        f"{key} {ours} instead of {theirs}"
        for key, (ours, theirs) in identity.differences(composed, read_config(run / CONFIG)).items()
        if not f"{key}.".startswith(tuple(f"{left}." for left in _TOLD_OTHERWISE))
    ]
    more = f" and {len(found) - _MOST_SETTINGS} more" if len(found) > _MOST_SETTINGS else ""
    return [f"other settings: {', '.join(found[:_MOST_SETTINGS])}{more}"] if found else []
