"""The picture of why two images are, or are not, alike to AVSL, and its numbers beside it."""

import io
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from dmlbench.apps.explain_pair import Inference, PairExplanation
from dmlbench.apps.page import Page
from dmlbench.runtime import atomic_write
from dmlbench.types import ConfigError, IntArray, RunError

# Inches. A node is a cell: the pair's two tiles side by side and two lines of numbers below.
_TILE, _BETWEEN, _CELL, _NUMBERS = 0.66, 0.04, 1.54, 0.34
_NODE = 2 * _TILE + _BETWEEN
_LEFT, _MARGIN, _FRAME = 1.35, 0.12, 0.07
_HEAD, _CAPTION, _TITLE, _EQUATION_WIDTH, _EDGES = 1.7, 0.72, 0.3, 5.2, 0.75
_ROW, _ROWS_APART = _TILE + _NUMBERS, 0.18
_SIMILAR, _DISSIMILAR, _INFERRED = "#1a7f37", "#cf222e", "#0550ae"
_COLORS = "RdBu_r"
_SMALL, _NORMAL = 6.5, 8.0
_LEAST = 8.0  # width that the head needs
_DPI = 130
_PERCENTILE = 98


def write_pair(explanation: PairExplanation, path: Path) -> Path:
    """Write the picture to ``path`` and all numbers to a JSON file beside it, whose path is returned.

    Raises:
        ConfigError: ``path`` does not end in .png.
        RunError: a file cannot be written.
    """
    check_output(path)
    numbers = path.with_suffix(".json")
    image = io.BytesIO()
    draw_pair(explanation).savefig(image, format="png", dpi=_DPI)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        atomic_write(path, image.getvalue())
        atomic_write(numbers, (json.dumps(explanation.to_json(), indent=1, allow_nan=False) + "\n").encode())
    except OSError as error:
        raise RunError(f"cannot write '{path}' ({error.strerror}); choose another output") from error
    return numbers


def check_output(path: Path) -> None:
    """
    Raises:
        ConfigError: ``path`` does not end in .png.
    """
    if path.suffix != ".png":
        raise ConfigError(f"output ({path}) must end in .png; the numbers go into a .json beside it")


def draw_pair(explanation: PairExplanation) -> Figure:
    """The pair and its distance by levels; each level's most similar and most dissimilar nodes; how one is inferred.

    Source: Zhang et al., Attributable Visual Similarity Learning, 2022, figures 6-8: green frames are round the nodes
    of least delta among the reliable ones, red ones round those of greatest.
    """
    num_levels, columns = len(explanation.nodes), explanation.num_below
    levels_height = num_levels * (_ROW + _ROWS_APART)
    steps = explanation.inferences
    steps_height = (_TITLE + _ROW + sum(_EDGES + _ROW for _ in steps)) if steps else 0.0
    page = Page.of(
        max(_LEFT + columns * _CELL, _LEAST) + 2 * _MARGIN,
        _HEAD + _TITLE + levels_height + steps_height + _CAPTION + 2 * _MARGIN,
    )
    _draw_head(page, explanation)
    y = _MARGIN + _HEAD
    half = columns // 2
    for at, text, color in (
        (0, "most similar (least δ)", _SIMILAR),
        (half, "most dissimilar (greatest δ)", _DISSIMILAR),
    ):
        page.text(_LEFT + at * _CELL, y + 0.06, text, color=color, weight="bold")
    y += _TITLE
    for level in range(num_levels - 1, -1, -1):
        _draw_level(page, explanation, level, y)
        y += _ROW + _ROWS_APART
    if steps:
        _draw_inferences(page, explanation, y)
        y += steps_height
    _draw_caption(page, explanation, y + 0.12)
    return page.figure


def _draw_head(page: Page, explanation: PairExplanation) -> None:
    side = _HEAD - 0.6
    for at, (letter, image) in enumerate(zip("AB", explanation.images, strict=True)):
        x = _MARGIN + at * (side + 0.1)
        axes = page.axes(x, _MARGIN, side, side)
        axes.imshow(np.moveaxis(explanation.pixels[at], 0, -1))
        axes.set_axis_off()
        named = [f"{letter}: {_short(image.name, 18)}"]
        if image.class_name is not None:
            named.append(_short(image.class_name, 21))
        page.text(x, _MARGIN + side + 0.06, "\n".join(named), size=_SMALL)
    left = _MARGIN + 2 * (side + 0.1) + 0.25
    width = page.width - left - _MARGIN
    contributions = explanation.contributions.sum(1)[::-1]  # the top level first
    terms = " + ".join(_number(x) for x in contributions)
    page.text(left, _MARGIN, f"distance of A and B: d = {_number(explanation.distance)}", size=10.5, weight="bold")
    page.text(left, _MARGIN + 0.23, f"sum over the levels, top to bottom: {terms} = {_number(explanation.distance)}")
    axes = page.axes(left + 0.5, _MARGIN + 0.5, width - 1.6, side - 0.42)
    names = [f"level {level}" for level in range(len(contributions), 0, -1)]
    bars = axes.barh(names, contributions, color="#57606a", height=0.6)
    axes.invert_yaxis()
    axes.set_xlim(0, max(float(contributions.max()), 1e-12))
    axes.bar_label(bars, [_contribution(explanation, level) for level in range(len(names) - 1, -1, -1)],
                   fontsize=_NORMAL, padding=4)  # fmt: skip
    axes.tick_params(labelsize=_NORMAL, length=0)
    axes.set_xticks([])
    for side_of in ("top", "right", "bottom"):
        axes.spines[side_of].set_visible(False)
    _draw_scale(page, left, _MARGIN + side + 0.12)


def _draw_scale(page: Page, x: float, y: float) -> None:
    axes = page.axes(x + 0.5, y, 1.2, 0.1)
    axes.imshow(np.linspace(0, 1, 100)[None], cmap=_COLORS, aspect="auto")
    axes.set_axis_off()
    page.text(x + 0.45, y - 0.02, "below 0", size=_SMALL, align="right")
    page.text(x + 1.75, y - 0.02, "above 0: activation maps, one scale for the two of a node", size=_SMALL)


def _draw_level(page: Page, explanation: PairExplanation, level: int, y: float) -> None:
    nodes, maps = explanation.nodes[level], explanation.maps[level]
    top = " (top)" if level == len(explanation.nodes) - 1 else ""
    shares = explanation.shares
    lines = [f"{_contribution(explanation, level)}" if shares is None else f"{100 * shares[level]:.1f} % of d"]
    lines += [f"{len(nodes)} nodes", f"maps of {maps.shape[2]} x {maps.shape[3]}"]
    lines += [f"mean p {explanation.reliabilities[level].mean():.2f}"]
    page.text(_MARGIN, y + 0.03, f"level {level + 1}{top}", weight="bold")
    page.text(_MARGIN, y + 0.2, "\n".join(lines), size=_SMALL + 0.5)
    _draw_group(page, explanation, level, explanation.similar[level], 0, y, color=_SIMILAR)
    half = explanation.num_below // 2
    _draw_group(page, explanation, level, explanation.dissimilar[level], half, y, color=_DISSIMILAR, dashed=True)


def _draw_group(
    page: Page, explanation: PairExplanation, level: int, nodes: IntArray, column: int, y: float, *, color: str,
    dashed: bool = False,
) -> None:  # fmt: skip
    for at, node in enumerate(nodes):
        delta, p, sensitivity, contribution = (
            _number(float(x[level, node]))
            for x in (explanation.nodes, explanation.reliabilities, explanation.sensitivities,
                      explanation.contributions)
        )  # fmt: skip
        lines = f"{node}: δ {delta}, p {p}", f"λ {sensitivity}, λδ {contribution}"
        _draw_node(page, explanation, level, int(node), lines, _LEFT + (column + at) * _CELL, y)
    _frame(page, _LEFT + column * _CELL, y, len(nodes), color=color, dashed=dashed)


def _frame(page: Page, x: float, y: float, count: int, *, color: str, dashed: bool = False) -> None:
    """Round so many nodes in a row, of which the first begins at (x, y)."""
    width = (count - 1) * _CELL + _NODE + 2 * _FRAME
    page.frame(x - _FRAME, y - _FRAME, width, _ROW + 0.08, color=color, dashed=dashed)


def _draw_inferences(page: Page, explanation: PairExplanation, y: float) -> None:
    """From the top down: a node, lines to the nodes that it is inferred from, one of them again, and so on."""
    first = explanation.inferences[0]
    page.text(_MARGIN, y + 0.06, "an unreliable node, and the nodes that it is inferred from", color=_INFERRED,
              weight="bold")  # fmt: skip
    y += _TITLE
    x = _LEFT + (explanation.num_below - 1) / 2 * _CELL
    _draw_inferred(page, explanation, first.level, first.node, f"p {_number(_p(explanation, first))}", x, y)
    page.text(_MARGIN, y + 0.03, f"level {first.level + 1}", weight="bold")
    _frame(page, x, y, 1, color=_INFERRED)
    for depth, step in enumerate(explanation.inferences):
        y += _ROW
        _draw_equation(page, explanation, step, x + _NODE / 2, y + 0.08)
        below = step.below[: explanation.num_below]
        _draw_below(page, explanation, step, y + _EDGES)
        strongest = float(np.abs(step.weights).max(initial=1e-12))
        for at, weight in enumerate(step.weights[: len(below)]):
            center = _LEFT + at * _CELL + _TILE + _BETWEEN / 2
            page.line((x + _TILE + _BETWEEN / 2, y + 0.32), (center, y + _EDGES - 0.07),
                      width=0.5 + 3.5 * abs(float(weight)) / strongest, color=_INFERRED)  # fmt: skip
        y += _EDGES
        if depth + 1 < len(explanation.inferences):
            x = _LEFT + int(np.flatnonzero(below == explanation.inferences[depth + 1].node)[0]) * _CELL
            _frame(page, x, y, 1, color=_INFERRED)


def _draw_below(page: Page, explanation: PairExplanation, step: Inference, y: float) -> None:
    shown = step.weights[: explanation.num_below]
    lines = [f"{len(shown)} strongest of", f"{len(step.weights)} edges, {100 * shown.sum():.0f} %", "of their weight"]
    page.text(_MARGIN, y + 0.03, f"level {step.level}", weight="bold")
    page.text(_MARGIN, y + 0.2, "\n".join(lines), size=_SMALL + 0.5)
    for at, (node, weight) in enumerate(zip(step.below, shown, strict=False)):
        text = f"w {_number(float(weight))}, p {_number(float(explanation.reliabilities[step.level - 1, node]))}"
        _draw_inferred(page, explanation, step.level - 1, int(node), text, _LEFT + at * _CELL, y)


def _draw_inferred(
    page: Page, explanation: PairExplanation, level: int, node: int, text: str, x: float, y: float
) -> None:
    delta, rectified = (_number(float(a[level, node])) for a in (explanation.nodes, explanation.rectified))
    _draw_node(page, explanation, level, node, (f"{node}: {text}", f"δ {delta}, δ̂ {rectified}"), x, y)


def _draw_equation(page: Page, explanation: PairExplanation, step: Inference, center: float, y: float) -> None:
    p, delta = _p(explanation, step), float(explanation.nodes[step.level, step.node])
    terms = f"{p:.2f} · {_number(delta)} + {1 - p:.2f} · {_number(step.inferred)}"
    rectified = _number(float(explanation.rectified[step.level, step.node]))
    text = f"node {step.node} of level {step.level + 1}: δ̂ = p δ + (1 − p) Σ w δ̂ (below) = {terms} = {rectified}"
    left = min(max(center - _EQUATION_WIDTH / 2, _MARGIN), page.width - _EQUATION_WIDTH)
    page.text(left + _EQUATION_WIDTH / 2, y, text, align="center")


def _draw_node(
    page: Page, explanation: PairExplanation, level: int, node: int, lines: Sequence[str], x: float, y: float
) -> None:
    """The node's map over both images, on one scale that is symmetric about 0."""
    maps = explanation.maps[level][:, node]
    # The largest value is a peak of few places: cut it off, so that the rest of the map is seen.
    most = max(float(np.percentile(np.abs(maps), _PERCENTILE)), 1e-12)
    axes = page.axes(x, y, _NODE, _TILE)  # one for both tiles: axes are what takes the time
    axes.set_axis_off()
    for at in range(2):
        left = at * (_TILE + _BETWEEN)
        extent = (left, left + _TILE, 0.0, _TILE)
        grey = explanation.pixels[at].mean(axis=0) / 255
        axes.imshow(0.35 + 0.65 * grey, cmap="gray", vmin=0, vmax=1, extent=extent)
        axes.imshow(maps[at], cmap=_COLORS, vmin=-most, vmax=most, alpha=0.6, interpolation="bilinear", extent=extent)
        axes.add_patch(Rectangle((left, 0), _TILE, _TILE, fill=False, edgecolor="black", linewidth=0.8, clip_on=False))
    axes.set_xlim(0, _NODE)
    axes.set_ylim(0, _TILE)
    page.text(x, y + _TILE + 0.04, "\n".join(lines), size=_SMALL)


def _draw_caption(page: Page, explanation: PairExplanation, y: float) -> None:
    bias = "" if explanation.settings["variant"] == "official" else " (but for a bias)"
    lines = [
        f"A node (its number first) compares what its activation map averages to{bias} over A (left) and over B "
        "(right): δ is the squared difference,",
        "p how reliable the node is, λ how much of it enters the distance, λδ what it contributes; d = Σ λδ over all "
        "nodes of all levels.",
        f"Shown are nodes among the {explanation.reliable} most reliable of each level; at the lowest all have p = 1.",
    ]
    if explanation.inferences:
        lines.append(
            "What a node lacks in reliability comes from the level below, along edges of weight w (thickness of the "
            "lines); δ̂ is the value after that."
        )
    page.text(_MARGIN, y, "\n".join(lines), size=_SMALL + 0.5)


def _p(explanation: PairExplanation, step: Inference) -> float:
    return float(explanation.reliabilities[step.level, step.node])


def _contribution(explanation: PairExplanation, level: int) -> str:
    text = _number(float(explanation.contributions[level].sum()))
    return text if explanation.shares is None else f"{text} ({100 * explanation.shares[level]:.1f} %)"


def _number(value: float) -> str:
    return f"{value:.3g}".replace("e-0", "e-")


def _short(text: str, limit: int) -> str:
    """Paths end with what tells them apart."""
    return text if len(text) <= limit else f"...{text[-(limit - 3) :]}"
