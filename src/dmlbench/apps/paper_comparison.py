"""Our runs of a table vs. a paper's scores, and what the runs started from."""

import logging
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tqdm import tqdm

from dmlbench import __version__
from dmlbench.apps.compare_configs import ConfigSummary, Found, named_configs, summary_of
from dmlbench.apps.experiment_rows import NARROWING, Row
from dmlbench.apps.plan import Overrides, Plan, PlannedConfig, Run
from dmlbench.config import key_of, read_config
from dmlbench.evaluation.metrics.registry import score_labeled
from dmlbench.evaluation.spec import EvaluationSpec
from dmlbench.identity import NOT_PART_OF_CONFIG_HASH, NOT_PART_OF_RUN_HASH
from dmlbench.papers import PaperScore
from dmlbench.results.caveats import by_fact, incomparable, mixed_code
from dmlbench.results.store import CONFIG, code_of, runs_in
from dmlbench.results.verdicts import NOT_RUN, Comparison, compare, kind_of
from dmlbench.runtime import cached_sha256, git_commit, shows_progress
from dmlbench.types import DmlbenchError, counted

log = logging.getLogger(__name__)

_MOVES_NOTHING = (
    *(*NOT_PART_OF_CONFIG_HASH, *NOT_PART_OF_RUN_HASH, "hydra"),
    *(f"evaluation.{key}" for key in ("metrics", "recall_at", "back_end", "device", "tile_bytes")),
)
_WEIGHTS = "backbone.weights_file"
PUBLISHED = {"bn_inception": "52deb4733", "googlenet": "1378be20", "resnet50": "0676ba61"}
"""First digits of the SHA-256 of the papers' pretrained weights, by backbone."""
_OF_TIMM = {"resnet50": "resnet50.tv_in1k"}
"""The same weights in timm."""


@dataclass(frozen=True)
class Provenance:
    """Where runs come from."""

    other_weights: tuple[str, ...] = ()  # how their pretrained weights differ from the papers'
    embedding_size: int | None = None  # D of the compared embeddings; None if the runs do not say


def provenance_of(config_file: Path, backbone: str, hashes: Iterable[str | None]) -> Provenance:
    """The provenance of a config's runs, by the configuration of one and the SHA-256 of all runs' weights files."""
    config = read_config(config_file)
    return _provenance(config, backbone, hashes, (config.get("runtime") or {}).get("embedding_size"))


def _provenance(config: Mapping[str, Any], backbone: str, hashes: Iterable[str | None], size: int | None) -> Provenance:
    head = config.get("head") or {}
    if "level_size" in head:  # what is compared is a level, or all of them one after the other
        size = head["level_size"] * (head["num_levels"] if head.get("inference") == "concat" else 1)
    family = next((name for name in PUBLISHED if backbone.startswith(name)), None)
    return Provenance(tuple(_other_weights(config.get("backbone") or {}, family, set(hashes))), size)


def _other_weights(node: Mapping[str, Any], family: str | None, hashes: set[str | None]) -> list[str]:
    file = node.get("weights_file")
    if file is not None:
        others = [
            f" (SHA-256 {digest[:12]})" if digest else ""
            for digest in sorted(hashes, key=str)
            if not (are_published(file, family) if digest is None else digest.startswith(_known(family)))
        ]
        return [f"OTHER WEIGHTS: {file}{other}" for other in others]
    if family is not None and not node.get("pretrained"):
        return ["OTHER WEIGHTS: random ones"]
    if family in _OF_TIMM and node.get("name") != _OF_TIMM[family]:
        return [f"OTHER WEIGHTS: {node.get('name')} of timm"]
    return []


def are_published(weights_file: str, family: str | None = None) -> bool:
    """Whether a weights file is one of the papers'; a file that is gone is known by its name."""
    path = Path(weights_file).expanduser()
    if not path.is_file():
        return path.stem.endswith(_known(family))
    return cached_sha256(path).startswith(_known(family))


def _known(family: str | None) -> tuple[str, ...]:
    return (PUBLISHED[family],) if family else tuple(PUBLISHED.values())


@dataclass(frozen=True)
class Summary:
    """A summary of a config's runs."""

    found: Found | None  # None if no run is complete or the runs cannot be summarized
    problem: str = ""  # why they cannot
    provenance: Provenance = field(default_factory=Provenance)


def summarize(plan: Plan, specs: Mapping[str, EvaluationSpec]) -> dict[str, Summary]:
    """Summarize all complete runs of each config, by ``sha256``, as are the ``specs``."""
    bar = tqdm(plan.configs, "summarizing", unit="config", disable=not shows_progress() or len(plan.configs) < 3)
    return {
        config.sha256: _summary([r for r in plan.runs if r.config == config], specs[config.sha256]) for config in bar
    }


def _summary(runs: Sequence[Run], spec: EvaluationSpec) -> Summary:
    done = [run for run in runs if run.state == "done"]
    if not done:
        return Summary(None)
    folder = done[0].path.parent
    unusable = {run.path for run in runs if run.state == "unusable"}
    found = [run for run in runs_in(folder) if run.path not in unusable]
    try:
        made = summary_of(folder, found, spec, allow_partial=True)
    except DmlbenchError as error:
        return Summary(None, str(error))
    hashes = [run.result.get("weights_sha256") for run in done]
    backbone = str(made["choices"].get("backbone", ""))
    return Summary((folder, found, made), provenance=provenance_of(done[0].path / CONFIG, backbone, hashes))


def compare_rows(
    rows: Sequence[Row], plan: Plan, configs: Mapping[Overrides, PlannedConfig | str],
    blocked: Mapping[str, DmlbenchError], reasons: Sequence[str],
) -> tuple[list[Comparison], list[str]]:  # fmt: skip
    """Compare every score of a paper with ours; also returns notes on our rows' deviations.

    Args:
        configs: by the rows' overrides, or why these cannot be composed.
        blocked: why runs could not begin, by ``sha256``.
        reasons: why no row is comparable with the paper.
    """
    of_rows = {key: config for key, config in configs.items() if not isinstance(config, str)}
    labels: dict[str, list[str]] = {}
    for row in rows:
        if row.overrides in of_rows:
            labels.setdefault(of_rows[row.overrides].sha256, []).append(row.metric)
    specs = {}
    for sha256, of_config in labels.items():
        names = dict.fromkeys(score.name for label in of_config if (score := score_labeled(label)))
        specs[sha256] = EvaluationSpec(metrics=tuple(names) or ("p_at_1",))
    summaries = summarize(plan, specs)
    comparisons, deviations = [], {}
    for row in rows:
        assert row.score is not None
        known = of_rows.get(row.overrides)
        if row.blocker:
            comparisons.append(Comparison(row.score, row.blocker.partition(" ")[0], note=row.blocker))
        elif known is None:
            comparisons.append(Comparison(row.score, NOT_RUN, note=str(configs[row.overrides])))
        elif (own := summaries[known.sha256]).found is None:
            comparisons.append(Comparison(row.score, NOT_RUN, note=str(blocked.get(known.sha256, own.problem))))
        else:
            _, _, summary = own.found
            why = [row.doubt, *reasons, *differences_to_paper(row.score, summary, own.provenance)]
            why = [reason for reason in (*why, *incomparable(summary)) if reason]
            comparisons.append(compare(row.score, summary, why, label=row.metric))
            deviations[row.label] = summary.get("deviations", ())
    return comparisons, by_fact(list(deviations.values()), list(deviations))


def differences_to_paper(score: PaperScore, summary: Mapping[str, Any], provenance: Provenance) -> list[str]:
    """Differences to the runs of the paper's score: data set, protocol, backbone, embedding size, weights."""
    choices = summary["choices"]
    size = summary.get("dimension", {}).get(kind_of(score, summary), provenance.embedding_size)
    pairs = [("data set", summary["dataset"], score.dataset), ("protocol", summary["protocol"], score.protocol)]
    found = [f"{what} {ours} instead of {paper}" for what, ours, paper in pairs if paper and ours != paper]
    if score.backbone and not str(choices.get("backbone", "")).startswith(score.backbone):
        found.append(f"backbone {choices.get('backbone')} instead of {score.backbone}")
    if size and score.embedding_size and size != score.embedding_size:
        found.append(f"{size} dimensions instead of {score.embedding_size}")
    return [*found, *provenance.other_weights]


def expected_differences(
    row: Row, config: PlannedConfig, settings: Mapping[str, Any], notes: Sequence[str]
) -> list[str]:
    """Why a row will not be comparable with the paper, as far as its configuration and data set tell.

    Args:
        settings: the composed configuration.
        notes: how the data set differs from the published one.
    """
    assert row.score is not None
    head, choices = settings["head"], settings["runtime"]["choices"]
    size = None if "num_levels" in head else head.get("out_features")
    provenance = _provenance(settings, str(choices.get("backbone", "")), [None], size)
    sizes = {"separated": provenance.embedding_size}
    if size and config.num_folds > 1:
        sizes["concatenated"] = size * config.num_folds
    summary = {
        "dataset": config.dataset, "protocol": config.protocol, "choices": choices, "dimension": sizes,
        "scores": sizes, "val_is_test": False, "data_notes": notes,
        "search": EvaluationSpec(shortlist=settings["evaluation"]["shortlist"]).search,
    }  # fmt: skip
    found = [row.doubt, *differences_to_paper(row.score, summary, provenance), *incomparable(summary)]
    return [reason for reason in found if reason]


def given_by_hand(overrides: Sequence[str]) -> list[str]:
    """Notes on overrides that make other runs than the paper's; runs tell their weights themselves."""
    return [f"given by hand: {override}" for override in moving(overrides) if key_of(override) != _WEIGHTS]


def moving(overrides: Sequence[str], *, choosing: Sequence[str] = NARROWING) -> list[str]:
    """Overrides that make other configs than the experiment's; ``choosing`` are keys that choose among these."""
    return [
        override
        for override in overrides
        if (key := key_of(override)) not in choosing
        and not f"{key}.".startswith(tuple(f"{free}." for free in _MOVES_NOTHING))
        and not (key == _WEIGHTS and are_published(override.partition("=")[2].strip("'\"")))
    ]


def mixtures(runs: Sequence[Run], *, to_do: bool) -> list[str]:
    """Notes on complete runs of one table by different code, to which ``to_do`` adds the installed one, or data."""
    code: Counter[str] = Counter()
    data: dict[str, Counter[str]] = {}
    for run in runs:
        if run.state == "done":
            code.update(dict.fromkeys([code_of(run.result), run.result.get("weights_code") or code_of(run.result)], 1))
            data.setdefault(run.config.dataset, Counter())[run.result["dataset_fingerprint"][:12]] += 1
    if to_do and code:
        code[git_commit() or __version__] += 0
    found = mixed_code(code)
    for dataset, prints in data.items():
        if len(prints) > 1:
            listed = ", ".join(f"{name} ({counted(count, 'run')})" for name, count in prints.items())
            found.append(f"MIXED DATA: {dataset} with the fingerprints {listed}")
    return found


def configs_of_grid(
    summaries: Mapping[str, Summary], labels: Mapping[str, str]
) -> dict[tuple[str, str], list[ConfigSummary]]:
    """The configs of a grid, or of rows with ``labels`` by ``sha256``, by (data set, protocol)."""
    grouped: dict[tuple[str, str], list[Found]] = {}
    by_folder = {}
    for sha256, summary in summaries.items():
        if summary.found is not None:
            run = summary.found[1][0]
            grouped.setdefault((run.dataset, run.protocol), []).append(summary.found)
            by_folder[summary.found[0]] = labels.get(sha256, "")
    return named_configs(grouped, by_folder if all(by_folder.values()) else None)
