"""Why two images are, or are not, alike to AVSL: their distance as a sum over levels and nodes, as numbers."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dmlbench.apps.trained import NamedImage, load_run, read_one
from dmlbench.models.avsl import AvslModel
from dmlbench.runtime import Precision, autocast, set_strict_float32
from dmlbench.types import ConfigError, IntArray

Floats = NDArray[np.float64]


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
        num_nodes: how many of the most similar and of the most dissimilar nodes of a level are picked out.
        reliable: they are picked among so many nodes of greatest reliability; r at most.
    """
    if len(pair) != 2:
        raise ConfigError(f"pair: got {len(pair)} images, expected two, as in pair=[<image>,<another>].")
    set_strict_float32()
    run = load_run(run_dir, {"num_workers": 0, "image_cache": False}, device=device)  # two images need no cache
    if not run.model.explains_pairs:
        raise ConfigError(f"pair explains runs of head=avsl, which {run_dir} is not. Leave it out.")
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
            f"num_nodes: got {num_nodes}, expected 1 to {reliable // 2}, half of the reliable nodes. Raise reliable."
        )
    with autocast(images.device, precision):
        maps = model.maps(images)
    rows = model.head(maps).embedding.double()
    found = distance.attribute(rows[:1], rows[1:])
    nodes, p, rectified, sensitivities = (
        x[0].cpu().numpy() for x in (found.nodes, found.reliabilities, found.rectified, found.sensitivities)
    )
    values = {"delta": nodes, "reliability": p, "rectified": rectified, "sensitivity": sensitivities}
    picked = [_pick(*level, num_nodes, reliable) for level in zip(nodes, p, strict=True)]
    inferences: tuple[Inference, ...] = ()
    if distance.inference == "rectified":
        inferences = _decompose(p, rectified, distance.normalized_edges().cpu().numpy(), 2 * num_nodes)
    return PairExplanation(
        images=names,
        pixels=images.cpu().numpy(),
        maps=tuple(x.float().cpu().numpy() for x in model.head.unit_activations(maps)),
        embeddings=distance.levels(rows)[0].cpu().numpy(),
        values=values | {"contribution": sensitivities * nodes},
        similar=np.stack([similar for similar, _ in picked]),
        dissimilar=np.stack([dissimilar for _, dissimilar in picked]),
        reliable=reliable,
        inferences=inferences,
        settings={"variant": distance.variant, "inference": distance.inference},
    )


def _pick(nodes: Floats, reliabilities: Floats, num_nodes: int, reliable: int) -> tuple[IntArray, IntArray]:
    """The nodes of least and of greatest delta among those at least as reliable as the ``reliable``-th."""
    among = np.flatnonzero(reliabilities >= np.sort(reliabilities)[-reliable])
    order = among[np.argsort(nodes[among], kind="stable")]
    return order[:num_nodes], order[::-1][:num_nodes]


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
