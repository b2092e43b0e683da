"""The model card of an exported run: what it is, what it scored and how that was selected, and how to use it."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig

from dmlbench.apps.loaded import PREPROCESSING, TrainedModel, preprocessing
from dmlbench.components import imported
from dmlbench.data.getting.catalog import SOURCES
from dmlbench.evaluation.metrics.table import score_named
from dmlbench.models.backbones import Backbone, TimmBackbone
from dmlbench.results.cautions import cautions
from dmlbench.results.table import markdown_lines

_CHOICES = ("backbone", "pooling", "head", "loss", "miner", "regularizer", "optim", "schedule", "recipe")


def model_card(
    model: TrainedModel, *, license: str | None, graphs: Mapping[str, str], left_out: Mapping[str, str],
    modules: Sequence[str],
) -> str:  # fmt: skip
    """Markdown with the header that hubs read.

    Args:
        graphs: files by format.
        left_out: reasons by format.
        modules: packages of somebody else that the model needs.
    """
    result, config = model.result, model.config
    origin, base = _origin(config, result)
    head = {
        "license": license or "unknown",
        "library_name": "dmlbench",
        "pipeline_tag": "image-feature-extraction",
        "tags": ["metric-learning", "image-retrieval", *(["onnx"] if "onnx" in graphs else [])],
        **({"base_model": base} if base else {}),
    }
    chosen = {k: v for k, v in result["choices"].items() if k in _CHOICES and v.lower() != "none"}
    compared = "the Euclidean distance of unit vectors"
    if model.has_own_distance:
        compared = f"a distance of their own ({type(model.network.distance).__name__}), not as unit vectors"
    lines = [
        "---", yaml.safe_dump(head, sort_keys=False).strip(), "---",
        f"# {result['config_id']}, fold {result['fold']}, repeat {result['repeat']}", "",
        f"Images to embeddings of {model.embedding_size} numbers, compared by {compared}. Trained and tested "
        f"with dmlbench {result['versions'].get('dmlbench', '')}: "
        + ", ".join(f"{group} `{option}`" for group, option in chosen.items()) + ".",
        "", "## Use", *_use(model, graphs, left_out, modules),
        "", "## Scores", *_scores(result),
        "", "## Data and training", *_training(model, origin),
        "", f"Licence of these weights: {license or 'not stated by who exported them'}.", "",
    ]  # fmt: skip
    return "\n".join(lines)


def _use(
    model: TrainedModel, graphs: Mapping[str, str], left_out: Mapping[str, str], modules: Sequence[str]
) -> list[str]:
    trusted = f", modules={list(modules)}" if modules else ""
    steps = preprocessing(model)["before_the_network"]
    before = (
        f"short side to {steps['resize_short_side']} pixels ({steps['resampling']}), the middle "
        f"{steps['center_crop']} x {steps['center_crop']}"
        if "center_crop" in steps
        else f"none: images have {model.image_size[0]} x {model.image_size[1]} pixels"
    )
    lines = [
        "```python", "import dmlbench", f'model = dmlbench.load("<this folder>"{trusted})',
        "rows = model.embed(paths)  # [N, D] of files, Pillow images or arrays", "model.distance(rows, rows)  # [N, N]",
        "```",
        f"Preprocessing ([{PREPROCESSING}]({PREPROCESSING})): {before}. Normalization is part of the network, which "
        "takes uint8 RGB images [B, 3, H, W].",
    ]  # fmt: skip
    if modules:
        lines.append(f"Its classes are in {', '.join(modules)}, which must be importable.")
    for name, file in graphs.items():
        reader = {"torch_export": "torch.export.load", "onnx": "ONNX Runtime"}[name]
        own = "; the distance is not in it" if model.has_own_distance else ""
        lines.append(
            f"- [{file}]({file}) for {reader}: the same from images of {model.image_size[0]} x {model.image_size[1]} "
            f"pixels on, in float32, batches of any size{own}"
        )
    return lines + [f"- no {name}: {reason}" for name, reason in left_out.items()]


def _scores(result: Mapping[str, Any]) -> list[str]:
    metrics = result["metrics"]
    fold = f"fold {result['fold']} of {result['num_folds']}, " if result["num_folds"] > 1 else ""
    selected = "the test set itself" if result["val_is_test"] else "validation classes"
    steps = f"{result.get('best_step')} of {result['steps']}"
    how = (
        f"the weights of step {steps}, the best `{result['monitor']}` on {selected}"
        if "val" in metrics
        else f"the last weights, of step {result['steps']}; nothing was selected"
    )
    lines = [
        f"Protocol `{result['protocol']}`, {fold}repeat {result['repeat']}, seed {result['seed']}. Selection: {how}."
    ]
    heads = {"test": f"test ({result['n_query']:,} queries in {result['n_gallery']:,})", "val": "validation"}
    parts = {head: metrics[part] for part, head in heads.items() if part in metrics}
    rows = []
    for score in map(score_named, next(iter(parts.values()))):
        values = (scores.get(score.name) for scores in parts.values())
        rows.append([score.label, *("–" if value is None else f"{score.scale * value:.2f}" for value in values)])
    lines += ["", *markdown_lines(["percent", *parts], rows, "lrr"[: len(parts) + 1]), ""]
    lines.append(f"Search: {result['search']}. One run; compare configs by all runs of a protocol.")
    if result.get("n_skipped_queries"):
        lines.append(f"{result['n_skipped_queries']} queries without a positive are left out.")
    not_started = int(not result.get("pooling_started", True) and result["steps"] > 0)
    return lines + [f"- {caution}" for caution in cautions({**result, "n_runs_not_started": not_started})]


def _training(model: TrainedModel, origin: str) -> list[str]:
    result = model.result
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    source = SOURCES.get(result["dataset"])
    is_drawn = ".glyphs." in model.config.dataset.table._target_
    terms = source.terms if source else "drawn by dmlbench" if is_drawn else "unknown; ask who made them"
    return [
        f"- data: `{result['dataset']}`, fingerprint `{result['dataset_fingerprint']}`; terms: {terms}",
        f"- trained on {model.config.runtime.num_classes} classes, for {result['steps']:,} steps; configuration in "
        "[config.yaml](config.yaml)",
        f"- began from {origin}",
        f"- on {result.get('device', 'an unknown device')}; {versions}"
        + (f"; commit {result['git_commit']}" if result.get("git_commit") else ""),
    ]


def _origin(config: DictConfig, result: Mapping[str, Any]) -> tuple[str, str | None]:
    """What the weights began from, with its licence as far as it is known, and the hub's name of it."""
    node = config.backbone
    if (file := node.get("weights_file")) is not None:
        digest = f" (SHA-256 `{result['weights_sha256']}`)" if "weights_sha256" in result else ""
        return f"the file `{Path(file).name}`{digest}, whose licence is unknown", None
    if not node.get("pretrained"):
        return "random weights", None
    kind: type[Backbone] = imported(node._target_, "backbone")
    if issubclass(kind, TimmBackbone) and "name" in node:
        import timm

        known: Any = timm.get_pretrained_cfg(node.name)
        return f"timm's `{node.name}`, licence {known.license or 'unknown'}", known.hf_hub_id
    name = config.runtime.choices.get("backbone")
    return f"the published weights of `{name}`, licence {kind.weights_license}", None
