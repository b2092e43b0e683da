"""Why two images are, or are not, alike to AVSL: their distance as a sum over levels and nodes, and its picture."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure, SubFigure
from matplotlib.patches import ConnectionPatch
from numpy.typing import NDArray
from torch import Tensor

from dmlbench.apps.loading import NamedImage, load_run, read_one
from dmlbench.apps.pictures import save_figure, shortened
from dmlbench.models.avsl import AvslModel
from dmlbench.results.caveats import OTHER_DATA
from dmlbench.runtime import Precision, autocast, set_strict_float32, write_json
from dmlbench.types import ConfigError, IntArray

Floats = NDArray[np.float64]
_NODE = (1.55, 1.3)  # width and height of a node's cell in inches
_SIMILAR, _DISSIMILAR, _INFERRED = ("#1a7f37", "-"), ("#cf222e", "--"), ("#0550ae", "-")
"""Color and style of frames."""
_SMALL, _NORMAL = 6.5, 8.0
_GAP = 0.06  # between the two tiles of a node, of a tile's width


@dataclass(frozen=True)
class Inference:
    """A node and what it is inferred from."""

    level: int  # of the node, 0 being the lowest
    node: int
    inferred: float  # (W~ delta-hat)_i, which replaces the node's own value with weight 1 - p
    below: IntArray  # nodes of the level below that it has edges to, strongest first
    weights: Floats  # w~ of these edges


@dataclass(frozen=True)
class PairExplanation:
    """The distance of two images and all that it is made of; L levels, low to high, of r nodes."""

    images: tuple[NamedImage, NamedImage]
    pixels: NDArray[np.uint8]  # [2, 3, H, W], as the network saw them
    maps: tuple[NDArray[np.float32], ...]  # [2, r, h, w] of each level, in the scale of the unit embeddings
    embeddings: Floats  # [2, L, r], of unit length
    values: dict[str, Floats]  # [L, r]: delta, reliability p, rectified delta-hat, sensitivity lambda, contribution
    similar: IntArray  # [L, n] the nodes of least delta among the reliable ones
    dissimilar: IntArray  # [L, n] those of greatest, from the greatest
    reliable: int  # how many of a level's nodes count as reliable
    inferences: tuple[Inference, ...]  # from the top, an inferred node and, among those shown below it, the next
    settings: dict[str, str]  # variant and inference of the distance
    data_notes: tuple[str, ...] = ()  # how the data that the run learned from differ from the published ones

    @property
    def contributions(self) -> Floats:
        """Of the levels [L]; their sum is the distance."""
        return self.values["contribution"].sum(1)

    @property
    def distance(self) -> float:
        return float(self.values["contribution"].sum())

    @property
    def shares(self) -> list[float | None]:
        """Of the levels in the distance; None where the distance is 0."""
        return [float(one) / self.distance if self.distance > 0 else None for one in self.contributions]

    @property
    def num_below(self) -> int:
        """How many of the nodes that another is inferred from are shown."""
        return 2 * self.similar.shape[1]

    def to_json(self) -> dict[str, Any]:
        """All numbers, the top level first; levels count from 1 and nodes from 0."""
        levels = [
            {"level": level + 1, "contribution": float(self.contributions[level]), "share": self.shares[level],
             "nodes": {name: values[level].tolist() for name, values in self.values.items()},
             "most_similar": [self._node_json(level, node) for node in self.similar[level].tolist()],
             "most_dissimilar": [self._node_json(level, node) for node in self.dissimilar[level].tolist()]}
            for level in reversed(range(len(self.maps)))
        ]  # fmt: skip
        decomposition = [
            {"level": one.level + 1, **self._node_json(one.level, one.node), "inferred": one.inferred,
             "inferred_from": [
                 {"weight": weight, **self._node_json(one.level - 1, node)}
                 for node, weight in zip(one.below.tolist(), one.weights.tolist(), strict=True)
             ]}
            for one in self.inferences
        ]  # fmt: skip
        return {
            "images": [vars(image) for image in self.images],
            "distance": self.distance,
            **self.settings,
            **({"data_notes": list(self.data_notes)} if self.data_notes else {}),
            "reliable": self.reliable,
            "levels": levels,
            "decomposition": decomposition,
        }

    def of_node(self, level: int, node: int) -> dict[str, float]:
        """The values of one node."""
        return {name: float(values[level, node]) for name, values in self.values.items()}

    def _node_json(self, level: int, node: int) -> dict[str, Any]:
        return {"node": node, "embeddings": self.embeddings[:, level, node].tolist(), **self.of_node(level, node)}


def explain_pair(
    run_dir: Path, *, pair: Sequence[int | str], num_nodes: int, reliable: int, device: str
) -> PairExplanation:
    """Explain AVSL's distance between two images by the model of a run.

    Args:
        pair: rows of the data set's table, paths of images in it, or files, which the run's transform prepares.
        num_nodes: most similar, and most dissimilar, nodes of a level to show, of the ``reliable`` most reliable ones.
    """
    if len(pair) != 2:
        raise ConfigError(f"pair: got {len(pair)} images, expected two, as in pair=[<image>,<another>].")
    set_strict_float32()
    run = load_run(run_dir, {"num_workers": 0, "image_cache": False}, device=device)  # two images need no cache
    if not run.model.explains_pairs:
        raise ConfigError(f"pair: got the run {run_dir}, expected a run of head=avsl. Leave pair out.")
    (first, x), (second, y) = (read_one(run, image) for image in pair)
    explanation = explain_images(
        cast(AvslModel, run.model), torch.cat([x, y]), (first, second),
        num_nodes=num_nodes, reliable=reliable, precision=run.settings.precision,
    )  # fmt: skip
    return replace(explanation, data_notes=run.data.table.notes)


@torch.no_grad()
def explain_images(
    model: AvslModel,
    images: Tensor,
    names: tuple[NamedImage, NamedImage],
    *,
    num_nodes: int = 3,
    reliable: int = 128,
    precision: Precision = "float32",
) -> PairExplanation:
    """Explain the distance of two images [2, 3, H, W] by a model in evaluation mode; arguments as of ``explain_pair``.

    Nodes are compared in float64, so that the contributions sum to the distance. At the lowest level all are reliable.
    """
    distance = copy.deepcopy(model.distance).double()
    reliable = min(reliable, distance.level_size)
    if not 1 <= num_nodes <= reliable // 2:
        raise ConfigError(
            f"num_nodes: got {num_nodes}, expected 1 to {reliable // 2}, half of reliable. Lower num_nodes or raise "
            "reliable."
        )
    with autocast(images.device, precision):
        maps = model.maps(images)
    rows = model.head(maps).embedding.double()
    found = distance.attribute(rows[:1], rows[1:])
    nodes, p, rectified, sensitivities = (
        x[0].cpu().numpy() for x in (found.nodes, found.reliabilities, found.rectified, found.sensitivities)
    )
    values = {"delta": nodes, "reliability": p, "rectified": rectified, "sensitivity": sensitivities}
    orders = []  # of the nodes that are at least as reliable as the reliable-th, by delta
    for delta, own in zip(nodes, p, strict=True):
        among = np.flatnonzero(own >= np.sort(own)[-reliable])
        orders.append(among[np.argsort(delta[among], kind="stable")])
    inferences: tuple[Inference, ...] = ()
    if distance.inference == "rectified":
        inferences = _decompose(p, rectified, distance.normalized_edges().cpu().numpy(), 2 * num_nodes)
    return PairExplanation(
        images=names,
        pixels=images.cpu().numpy(),
        maps=tuple(x.float().cpu().numpy() for x in model.head.unit_activations(maps)),
        embeddings=distance.levels(rows)[0].cpu().numpy(),
        values=values | {"contribution": sensitivities * nodes},
        similar=np.stack([order[:num_nodes] for order in orders]),
        dissimilar=np.stack([order[::-1][:num_nodes] for order in orders]),
        reliable=reliable,
        inferences=inferences,
        settings={"variant": distance.variant, "inference": distance.inference},
    )


def _decompose(reliabilities: Floats, rectified: Floats, edges: Floats, num_below: int) -> tuple[Inference, ...]:
    """From the top level to the second: a node and the nodes that it is inferred from.

    At the top it is the node that inference gives most, of greatest (1 - p) (W~ delta-hat)_i and, among equals, of
    least p; below, among the ``num_below`` strongest edges of the node above, the same with the edge as a factor.
    """
    result: list[Inference] = []
    among, factor = np.arange(reliabilities.shape[1]), np.ones(reliabilities.shape[1])
    for level in range(len(reliabilities) - 1, 0, -1):
        inferred = edges[level - 1] @ rectified[level - 1]
        p = reliabilities[level, among]
        node = int(among[np.lexsort((p, -factor * (1 - p) * inferred[among]))[0]])
        weights = edges[level - 1, node]
        below = np.argsort(-weights, kind="stable")
        below = below[weights[below] != 0]
        result.append(Inference(level, node, float(inferred[node]), below, weights[below]))
        if not len(below):
            break
        among, factor = below[:num_below], weights[below[:num_below]]
    return tuple(result)


def write_pair(explanation: PairExplanation, path: Path) -> Path:
    """Write the picture, and all numbers to a JSON file next to it, whose path is returned."""
    numbers = path.with_suffix(".json")
    save_figure(draw_pair(explanation), path)
    write_json(numbers, explanation.to_json())
    return numbers


def draw_pair(explanation: PairExplanation) -> Figure:
    """The pair and its distance by levels; each level's most similar and most dissimilar nodes; how one is inferred.

    Source: Zhang et al., Attributable Visual Similarity Learning, 2022, figures 6-8: green frames are round the nodes
    of least delta among the reliable ones, red ones round those of greatest.
    """
    rows = [1, len(explanation.maps), *([len(explanation.inferences) + 1] if explanation.inferences else [])]
    width, height = _NODE
    size = (max(8.0, 1.4 + explanation.num_below * width), 1.2 + sum(rows) * height)
    figure = Figure(figsize=size, facecolor="white", layout="constrained")
    parts: Any = figure.subfigures(len(rows), 1, height_ratios=rows)
    head, levels, *inferences = parts
    _draw_head(head, explanation)
    _draw_levels(levels, explanation)
    for part in inferences:
        _draw_inferences(part, explanation)
    figure.supxlabel(_caption(explanation), x=0.02, ha="left", fontsize=_NORMAL - 1)
    return figure


def _draw_head(part: SubFigure, explanation: PairExplanation) -> None:
    *tiles, bars = part.subplots(1, 3, width_ratios=(1, 1, 4))
    for axis, letter, image, pixels in zip(tiles, "AB", explanation.images, explanation.pixels, strict=True):
        axis.imshow(np.moveaxis(pixels, 0, -1))
        axis.set(xticks=[], yticks=[])
        names = f"{letter}: {shortened(image.name)}\n{shortened(image.class_name or '')}"
        axis.set_xlabel(names, fontsize=_SMALL)
    contributions = explanation.contributions
    terms = " + ".join(map(_number, contributions[::-1]))  # the top level first
    bars.set_title(f"distance of A and B: d = {terms} = {_number(explanation.distance)}", fontsize=_NORMAL + 2)
    drawn = bars.barh([f"level {i + 1}" for i in range(len(contributions))], contributions, 0.6, color="#57606a")
    bars.bar_label(drawn, [_contribution(explanation, i) for i in range(len(contributions))], fontsize=_NORMAL)
    bars.margins(x=0.25)
    bars.set_xticks([])
    bars.spines[["top", "right", "bottom"]].set_visible(False)


def _draw_levels(part: SubFigure, explanation: PairExplanation) -> None:
    axes = part.subplots(len(explanation.maps), explanation.num_below, squeeze=False)
    half = explanation.num_below // 2
    axes[0, 0].set_title("most similar (least δ)", fontsize=_NORMAL, color=_SIMILAR[0], loc="left")
    axes[0, half].set_title("most dissimilar (greatest δ)", fontsize=_NORMAL, color=_DISSIMILAR[0], loc="left")
    for row, level in zip(axes, reversed(range(len(axes))), strict=True):
        _label_row(
            row[0], f"level {level + 1}", _contribution(explanation, level),
            f"{explanation.maps[level].shape[1]} nodes", "maps of {} x {}".format(*explanation.maps[level].shape[2:]),
            f"mean p {explanation.values['reliability'][level].mean():.2f}",
        )  # fmt: skip
        picked = [*explanation.similar[level].tolist(), *explanation.dissimilar[level].tolist()]
        for at, (axis, node) in enumerate(zip(row, picked, strict=True)):
            text = f"{node}: δ {{delta}}, p {{reliability}}\nλ {{sensitivity}}, λδ {{contribution}}"
            _draw_node(axis, explanation, level, node, text, _SIMILAR if at < half else _DISSIMILAR)


def _draw_inferences(part: SubFigure, explanation: PairExplanation) -> None:
    """From the top down: a node, lines to the nodes that it is inferred from, one of them again, and so on."""
    columns = explanation.num_below
    axes = part.subplots(len(explanation.inferences) + 1, columns, squeeze=False)
    part.suptitle("an unreliable node, and the nodes that it is inferred from", fontsize=_NORMAL, color=_INFERRED[0])
    for axis in axes.flat:
        axis.set_axis_off()
    above = axes[0, columns // 2]
    first = explanation.inferences[0]
    text = "{node}: p {{reliability}}{weight}\nδ {{delta}}, δ̂ {{rectified}}"
    _draw_node(above, explanation, first.level, first.node, text.format(node=first.node, weight=""), _INFERRED)
    for row, step in zip(axes[1:], explanation.inferences, strict=True):
        p = float(explanation.values["reliability"][step.level, step.node])
        equation = f"\n= {p:.2f} δ + {1 - p:.2f} · {_number(step.inferred)}"
        above.set_xlabel(above.get_xlabel() + equation, fontsize=_SMALL)
        above.spines[:].set(color=_INFERRED[0], linewidth=2)
        weights = step.weights[:columns]
        shown = step.below[:columns].tolist()
        edges = f"{len(step.weights)} edges, {100 * weights.sum():.0f} %"
        row[0].set_axis_on()
        _label_row(row[0], f"level {step.level}", f"{len(shown)} strongest of", edges, "of their weight")
        strongest = float(np.abs(step.weights).max(initial=1e-12))
        for axis, node, weight in zip(row, shown, weights.tolist(), strict=False):
            label = text.format(node=node, weight=f", w {_number(weight)}")
            _draw_node(axis, explanation, step.level - 1, node, label, ("#000000", "-"))
            edge = ConnectionPatch(
                (0.5, -0.55), (0.5, 1.0), "axes fraction", "axes fraction", axesA=above, axesB=axis,
                color=_INFERRED[0], linewidth=0.5 + 3.5 * abs(weight) / strongest, alpha=0.5,
            )  # fmt: skip
            part.add_artist(edge)
        following = [one.node for one in explanation.inferences if one.level == step.level - 1]
        above = row[shown.index(following[0])] if following else above


def _draw_node(
    axis: Axes, explanation: PairExplanation, level: int, node: int, text: str, frame: tuple[str, str]
) -> None:
    """The node's map over both images, on one scale that is symmetric about 0, and a text that names its values."""
    maps = explanation.maps[level][:, node]
    # A percentile: the largest value is a peak of few places, beside which the rest of the map would not be seen.
    most = max(float(np.percentile(np.abs(maps), 98)), 1e-12)
    for at, pixels in enumerate(explanation.pixels):
        left = at * (1 + _GAP)
        place = (left, left + 1.0, 0.0, 1.0)
        axis.imshow(0.35 + 0.65 * pixels.mean(axis=0) / 255, cmap="gray", vmin=0, vmax=1, extent=place)
        axis.imshow(maps[at], cmap="RdBu_r", vmin=-most, vmax=most, alpha=0.6, interpolation="bilinear", extent=place)
    axis.set_axis_on()
    axis.set(xlim=(0, 2 + _GAP), ylim=(0, 1), xticks=[], yticks=[])
    values = {name: _number(value) for name, value in explanation.of_node(level, node).items()}
    axis.set_xlabel(text.format(**values), fontsize=_SMALL)
    color, linestyle = frame
    axis.spines[:].set(color=color, linestyle=linestyle, linewidth=1.3)


def _label_row(axis: Axes, *lines: str) -> None:
    axis.set_ylabel("\n".join(lines), fontsize=_SMALL + 0.5, rotation=0, ha="right", va="center")


def _caption(explanation: PairExplanation) -> str:
    bias = "" if explanation.settings["variant"] == "official" else " (but for a bias)"
    lines = [
        f"A node (number first) averages its activation map{bias} over A (left) and B (right). δ: squared difference;",
        "p: reliability; λ: how much of the node enters the distance; λδ: its contribution; d = Σ λδ over all nodes.",
        f"Shown: nodes among the {explanation.reliable} most reliable of each level; at the lowest all have p = 1. "
        "Maps: red above 0, blue below, one scale a node.",
    ]
    if explanation.inferences:
        lines.append("Inference along edges of weight w (thickness of the lines): δ̂ = p δ + (1 − p) Σ w δ̂ (below).")
    if explanation.data_notes:
        lines.append(f"{OTHER_DATA}{'; '.join(explanation.data_notes)}")
    return "\n".join(lines)


def _contribution(explanation: PairExplanation, level: int) -> str:
    text, share = _number(float(explanation.contributions[level])), explanation.shares[level]
    return text if share is None else f"{text} ({100 * share:.1f} %)"


def _number(value: float) -> str:
    return f"{value:.3g}".replace("e-0", "e-")
