"""Numbers that papers print for the choices of a config, beside the config's own."""

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from dmlbench import papers
from dmlbench.apps.provenance import provenance_of
from dmlbench.apps.report.retrievals import first_run
from dmlbench.apps.table_comparison import differences_to_paper
from dmlbench.apps.table_rows import Row, experiments, reproduce_of, rows_of_paper
from dmlbench.apps.tables import ConfigSummary
from dmlbench.config import compose, config_folder, load_config
from dmlbench.identity import NOT_PART_OF_CONFIG_HASH, differences
from dmlbench.results.cautions import incomparable
from dmlbench.results.store import CONFIG, read_result
from dmlbench.results.verdicts import NEEDS, compare

_GROUPS = ("recipe", "pooling", "head", "loss", "miner", "regularizer", "rerank")
"""Options by which a row of a paper is known."""
_TOLD_OTHERWISE = (*NOT_PART_OF_CONFIG_HASH, "dataset", "backbone", "evaluation", "protocol.num_repeats")
"""Settings of which data notes, the origin of the weights and the number of runs tell more."""
_MOST_SETTINGS = 6


def paper_scores(configs: Sequence[ConfigSummary]) -> list[dict[str, Any]]:
    """Every printed score of the rows whose recipe, pooling, head, loss, miner, regularizer and rerank a config has.

    What else differs (backbone, size, weights, values that the recipe did not set, data that are not as published) is
    said with each; a score of which anything differs has no verdict but "not comparable".
    """
    with_recipe = [
        config for config in configs if config.summary["choices"].get("recipe", "none") not in ("none", "small")
    ]
    if not with_recipe:
        return []
    known = experiments([config_folder()])
    found = []
    for name in [table for table in papers.tables() if table in known]:
        for row in rows_of_paper(name, reproduce_of(known[name]), {}):
            for config in with_recipe:
                if row.overrides and _may_be(row, config) and _is(cfg := _composed(row.overrides), config):
                    found.append(_beside(name, row, cfg, config, configs.index(config)))
    return [one for one in found if one["verdict"] != NEEDS]


@functools.cache
def _composed(overrides: tuple[str, ...]) -> DictConfig:
    return compose("train", overrides, with_hydra=True)


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


def _is(cfg: DictConfig, config: ConfigSummary) -> bool:
    """Whether a configuration chooses the config's options."""
    theirs = {**cfg.hydra.runtime.choices, **cfg.runtime.recipe.get("chosen", {})}
    return all(_option(theirs, group) == _option(config.summary["choices"], group) for group in _GROUPS)


def _option(choices: Mapping[str, Any], group: str) -> str:
    return str(choices.get(group, "None")).replace("none", "None")


def _beside(name: str, row: Row, cfg: DictConfig, config: ConfigSummary, index: int) -> dict[str, Any]:
    run, score = first_run(config), row.score
    assert score is not None
    result = read_result(run)
    provenance = provenance_of(run / CONFIG, str(result["choices"].get("backbone", "")), [result.get("weights_sha256")])
    reasons = [
        *differences_to_paper(score, config.summary, provenance),
        *_other_settings(cfg, run),
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


def _other_settings(cfg: DictConfig, run: Path) -> list[str]:
    """What else the experiment of the paper's table has otherwise than a run."""
    plain = cfg.copy()
    OmegaConf.set_struct(plain, False)
    del plain["hydra"]
    found = [
        f"{key} {ours} instead of {theirs}"
        for key, (ours, theirs) in differences(plain, load_config(run / CONFIG)).items()
        if not f"{key}.".startswith(tuple(f"{left}." for left in _TOLD_OTHERWISE))
    ]
    more = f" and {len(found) - _MOST_SETTINGS} more" if len(found) > _MOST_SETTINGS else ""
    return [f"other settings: {', '.join(found[:_MOST_SETTINGS])}{more}"] if found else []
