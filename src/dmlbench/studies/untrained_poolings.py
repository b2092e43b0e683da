"""Poolings of a pretrained network's map without training (ProxyNCA++, table 11, first rows).

Source: E. W. Teh, T. DeVries, G. W. Taylor, "ProxyNCA++", ECCV 2020, section 4.3: on CUB, R@1 45.0 with average and
    53.1 with maximum pooling of a ResNet50's 2,048 channels.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import nn

from dmlbench import build
from dmlbench.apps.pictures import plt
from dmlbench.components import component
from dmlbench.evaluation.evaluate import evaluate
from dmlbench.evaluation.spec import EvaluationSpec
from dmlbench.identity import read_table
from dmlbench.papers import load_table
from dmlbench.results.caveats import OTHER_DATA
from dmlbench.runtime import seed_everything
from dmlbench.studies.record import Claim, Findings, Parts
from dmlbench.types import ConfigError, EmbeddingSet, ImageTable

_SPEC = EvaluationSpec(metrics=("recall_at_k", "map_at_r"), recall_at=(1, 2, 4, 8))


def pooled_by(poolings: Mapping[str, nn.Module], maps: torch.Tensor) -> torch.Tensor:
    """Pool maps [B, C, H, W] in every way without a projection and concatenate the results: [B, poolings C]."""
    keep: Any = nn.Identity()
    return torch.cat([pooling(maps, keep).embedding for pooling in poolings.values()], dim=1)


def conduct(args: Any, parts: Parts) -> Findings:
    """Pool the maps of the test half in every way, and score the results."""
    names = [str(name) for name in args.poolings]
    if len(names) < 2 or not set(names) <= set(args.known):
        raise ConfigError(f"poolings: got {', '.join(names)}, expected two or more of {', '.join(args.known)}.")
    table = read_table(args.dataset["table"])
    parts.bind(data=table.fingerprint)

    def compute(_: str) -> dict[str, Any]:
        seed_everything(args.seed)  # of weights that are random
        device = parts.device
        backbone = component(args.backbone).to(device).eval()
        poolings = {name: component(args.known[name]).to(device).eval() for name in names}
        rows = np.flatnonzero(np.isin(table.role, ("test", "query", "gallery"))).astype(np.int64)

        def of(images: torch.Tensor) -> torch.Tensor:
            return pooled_by(poolings, backbone(backbone.preprocess(images))[-1])

        found = build.embedded(args, table, rows, of, device, transform=args.transform["eval"], describe="images")
        channels = found.rows.shape[1] // len(names)
        return {
            "channels": channels,
            "images": len(rows),
            "scores": {
                name: _scores(found, slice(i * channels, (i + 1) * channels), table) for i, name in enumerate(names)
            },
        }

    (found,) = parts.get(["test half"], compute, describe="features").values()
    scores = found["scores"]
    columns = ("recall_at_1", "recall_at_2", "recall_at_4", "recall_at_8", "map_at_r")
    rows = tuple((name, *(f"{100 * one[column]:.2f}" for column in columns)) for name, one in scores.items())
    of_paper = [score for score in load_table("proxynca_pp/table11") if score.row == "WithoutTraining"]
    printed = {score.setting: float(score.mean) for score in of_paper if score.mean is not None}
    claims = []
    if {"gap", "gmp"} <= scores.keys():
        ours = {name: 100 * scores[name]["recall_at_1"] for name in ("gap", "gmp")}
        claims.append(
            Claim("4.3, table 11", f"untrained, on CUB: R@1 {printed['GAP']} with GAP, {printed['GMP']} with GMP",
                  f"{ours['gap']:.1f} and {ours['gmp']:.1f} on {args.dataset['name']} by {args.network}",
                  ours["gmp"] > ours["gap"])
        )  # fmt: skip
    crop = args.transform["eval"].get("crop")
    weights = "pretrained weights" if args.backbone.get("pretrained") else "weights as configured (not pretrained)"
    notes = (
        f"{found['images']:,} test images of {args.dataset['name']}{f' at {crop} pixels' if crop else ''}, "
        f"{found['channels']:,} channels of the last map of {args.network} with {weights}, no projection, unit vectors",
        *(f"{OTHER_DATA}{note}" for note in table.notes),
        "it comes out if the maximum is ahead of the average; the numbers compare for ResNet50 and CUB-200-2011 alone",
    )
    title = f"Poolings of an untrained map: {args.dataset['name']} by {args.network}"
    heads = ("pooling", "R@1, %", "R@2, %", "R@4, %", "R@8, %", "MAP@R, %")
    return Findings(title, heads, rows, tuple(claims), notes, _figure(scores, printed, title))


def _scores(found: EmbeddingSet, columns: slice, table: ImageTable) -> dict[str, float]:
    roles = table.role[found.ids.numpy()]
    rows = found.rows[:, columns].contiguous()

    def part(which: Any) -> EmbeddingSet:
        at = torch.from_numpy(np.flatnonzero(which))
        return EmbeddingSet(rows[at], found.labels[at], found.ids[at])

    gallery = part(roles == "gallery") if (roles == "gallery").any() else None
    return evaluate(part(roles != "gallery"), gallery, _SPEC).scores


def _figure(scores: Mapping[str, Mapping[str, float]], printed: Mapping[str, float], title: str) -> Figure:
    figure, axes = plt.subplots(figsize=(1.5 + 1.1 * len(scores), 3.4), layout="constrained")
    values = [100 * one["recall_at_1"] for one in scores.values()]
    axes.bar(range(len(values)), values, color="tab:blue", label="here")
    for i, (name, value) in enumerate(zip(scores, values, strict=True)):
        axes.annotate(f"{value:.1f}", (i, value), ha="center", va="bottom", fontsize=8)
        if name.upper() in printed:
            label = "the paper (ResNet50, CUB)" if name == "gap" else "_nolegend_"
            axes.hlines(printed[name.upper()], i - 0.4, i + 0.4, color="black", linestyle=":", label=label)
    axes.set_xticks(range(len(values)), list(scores))
    axes.set_ylabel("R@1, %")
    axes.set_ylim(0, 1.15 * max(*values, *printed.values()))
    axes.legend(fontsize=7)
    axes.set_title(title, fontsize=9)
    return figure
