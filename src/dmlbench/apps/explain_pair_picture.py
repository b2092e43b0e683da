"""The picture of why two images are, or are not, alike to AVSL, and a file of its numbers."""

from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from dmlbench.apps.explain_pair import Inference, PairExplanation
from dmlbench.apps.pictures import save_figure
from dmlbench.results.cautions import OTHER_DATA
from dmlbench.runtime import write_json

# Inches, which the page counts from its upper left corner. A node is a cell: the pair's two tiles side by side and two
# lines of numbers below.
_TILE, _BETWEEN, _CELL, _NUMBERS = 0.66, 0.04, 1.54, 0.34
_NODE = 2 * _TILE + _BETWEEN
_LEFT, _MARGIN, _FRAME = 1.35, 0.12, 0.07
_HEAD, _CAPTION, _TITLE, _EQUATION_WIDTH, _EDGES = 1.7, 0.72, 0.3, 5.2, 0.75
_LINE = 0.15  # inches, of the caption
_ROW, _ROWS_APART = _TILE + _NUMBERS, 0.18
_SIMILAR, _DISSIMILAR, _INFERRED = "#1a7f37", "#cf222e", "#0550ae"
_COLORS = "RdBu_r"
_INFERRED_TO = "δ {delta}, δ̂ {rectified}"
_SMALL, _NORMAL = 6.5, 8.0
_LEAST = 8.0  # width that the head needs
_PERCENTILE = 98


def write_pair(explanation: PairExplanation, path: Path) -> Path:
    """Write the picture to ``path`` and all numbers to a JSON file next to it, whose path is returned."""
    numbers = path.with_suffix(".json")
    save_figure(draw_pair(explanation), path)
    write_json(numbers, explanation.to_json())
    return numbers


def draw_pair(explanation: PairExplanation) -> Figure:
    """The pair and its distance by levels; each level's most similar and most dissimilar nodes; how one is inferred.

    Source: Zhang et al., Attributable Visual Similarity Learning, 2022, figures 6-8: green frames are round the nodes
    of least delta among the reliable ones, red ones round those of greatest.
    """
    num_levels, columns, steps = len(explanation.nodes), explanation.num_below, explanation.inferences
    levels_height = num_levels * (_ROW + _ROWS_APART)
    steps_height = _TITLE + _ROW + len(steps) * (_EDGES + _ROW) if steps else 0.0
    width = max(_LEFT + columns * _CELL, _LEAST) + 2 * _MARGIN
    height = (
        _HEAD + _TITLE + levels_height + steps_height + _CAPTION + 2 * _MARGIN + _LINE * bool(explanation.data_notes)
    )
    figure = Figure(figsize=(width, height), facecolor="white")
    page = figure.add_axes((0, 0, 1, 1), xlim=(0, width), ylim=(height, 0))
    page.set_axis_off()
    _draw_head(page, explanation)
    y = _MARGIN + _HEAD
    right = _LEFT + columns // 2 * _CELL
    _write(page, _LEFT, y + 0.06, "most similar (least δ)", color=_SIMILAR, weight="bold")
    _write(page, right, y + 0.06, "most dissimilar (greatest δ)", color=_DISSIMILAR, weight="bold")
    y += _TITLE
    for level in reversed(range(num_levels)):
        _draw_level(page, explanation, level, y)
        y += _ROW + _ROWS_APART
    if steps:
        _draw_inferences(page, explanation, y)
    _draw_caption(page, explanation, y + steps_height + 0.12)
    return figure


def _write(page: Axes, x: float, y: float, *lines: str, size: float = _NORMAL, **style: Any) -> None:
    """Lines of text, the first of which begins at ``y``."""
    page.text(x, y, "\n".join(lines), fontsize=size, va="top", linespacing=1.25, **style)


def _show(page: Axes, image: Any, x: float, y: float, width: float, height: float, **style: Any) -> None:
    page.imshow(image, extent=(x, x + width, y + height, y), aspect="auto", **style)


def _draw_head(page: Axes, explanation: PairExplanation) -> None:
    side = _HEAD - 0.6
    for at, (letter, image) in enumerate(zip("AB", explanation.images, strict=True)):
        x = _MARGIN + at * (side + 0.1)
        _show(page, np.moveaxis(explanation.pixels[at], 0, -1), x, _MARGIN, side, side)
        named = [f"{letter}: {_short(image.name, 18)}"]
        if image.class_name is not None:
            named.append(_short(image.class_name, 21))
        _write(page, x, _MARGIN + side + 0.06, *named, size=_SMALL)
    left = _MARGIN + 2 * (side + 0.1) + 0.25
    contributions = explanation.contributions.sum(1)[::-1]  # the top level first
    terms = " + ".join(map(_number, contributions))
    distance = _number(explanation.distance)
    _write(page, left, _MARGIN, f"distance of A and B: d = {distance}", size=10.5, weight="bold")
    _write(page, left, _MARGIN + 0.23, f"sum over the levels, top to bottom: {terms} = {distance}")
    x, num_levels = left + 0.5, len(contributions)
    longest = page.get_xlim()[1] - x - _MARGIN - 1.1
    step = (side - 0.42) / num_levels
    ys = _MARGIN + 0.5 + step * (np.arange(num_levels) + 0.5)
    bars = page.barh(ys, longest * contributions / max(contributions.max(), 1e-12), 0.6 * step, x, color="#57606a")
    levels = range(num_levels - 1, -1, -1)
    page.bar_label(bars, [_contribution(explanation, level) for level in levels], fontsize=_NORMAL, padding=4)
    for bar_y, level in zip(ys, levels, strict=True):
        page.text(x - 0.05, bar_y, f"level {level + 1}", fontsize=_NORMAL, ha="right", va="center")
    page.plot([x, x], [_MARGIN + 0.5, _MARGIN + side + 0.08], color="black", linewidth=0.8)
    y = _MARGIN + side + 0.12
    _show(page, np.linspace(0, 1, 100)[None], left + 0.5, y, 1.2, 0.1, cmap=_COLORS)
    _write(page, left + 0.45, y - 0.02, "below 0", size=_SMALL, ha="right")
    _write(page, left + 1.75, y - 0.02, "above 0: activation maps, one scale for the two of a node", size=_SMALL)


def _draw_level(page: Axes, explanation: PairExplanation, level: int, y: float) -> None:
    nodes, maps, shares = explanation.nodes[level], explanation.maps[level], explanation.shares
    top = " (top)" if level == len(explanation.nodes) - 1 else ""
    lines = [_contribution(explanation, level) if shares is None else f"{100 * shares[level]:.1f} % of d"]
    lines += [f"{len(nodes)} nodes", f"maps of {maps.shape[2]} x {maps.shape[3]}"]
    lines += [f"mean p {explanation.reliabilities[level].mean():.2f}"]
    _draw_margin(page, y, f"level {level + 1}{top}", *lines)
    groups = ((explanation.similar, _SIMILAR, "-"), (explanation.dissimilar, _DISSIMILAR, "--"))
    for group, (picked, color, linestyle) in enumerate(groups):
        x = _LEFT + group * len(picked[level]) * _CELL
        for at, node in enumerate(picked[level].tolist()):
            texts = f"{node}: δ {{delta}}, p {{reliability}}", "λ {sensitivity}, λδ {contribution}"
            _draw_node(page, explanation, level, node, x + at * _CELL, y, *texts)
        _frame(page, x, y, len(picked[level]), color=color, linestyle=linestyle)


def _draw_margin(page: Axes, y: float, title: str, *lines: str) -> None:
    _write(page, _MARGIN, y + 0.03, title, weight="bold")
    _write(page, _MARGIN, y + 0.2, *lines, size=_SMALL + 0.5)


def _frame(page: Axes, x: float, y: float, count: int, **style: Any) -> None:
    """Round so many nodes in a row, of which the first begins at (x, y)."""
    width = (count - 1) * _CELL + _NODE + 2 * _FRAME
    page.add_patch(Rectangle((x - _FRAME, y - _FRAME), width, _ROW + 0.08, fill=False, linewidth=1.3, **style))


def _draw_inferences(page: Axes, explanation: PairExplanation, y: float) -> None:
    """From the top down: a node, lines to the nodes that it is inferred from, one of them again, and so on."""
    title = "an unreliable node, and the nodes that it is inferred from"
    _write(page, _MARGIN, y + 0.06, title, color=_INFERRED, weight="bold")
    y += _TITLE
    x = _LEFT + (explanation.num_below - 1) / 2 * _CELL
    first = explanation.inferences[0]
    _draw_node(page, explanation, first.level, first.node, x, y, f"{first.node}: p {{reliability}}", _INFERRED_TO)
    _draw_margin(page, y, f"level {first.level + 1}")
    shown: list[int] = []
    for step in explanation.inferences:
        if step is not first:
            x = _LEFT + shown.index(step.node) * _CELL
        shown, weights = step.below[: explanation.num_below].tolist(), step.weights[: explanation.num_below]
        _frame(page, x, y, 1, color=_INFERRED)
        y += _ROW
        _draw_equation(page, explanation, step, x + _NODE / 2, y + 0.08)
        strongest = float(np.abs(step.weights).max(initial=1e-12))
        for at, (node, weight) in enumerate(zip(shown, weights.tolist(), strict=True)):
            below = _LEFT + at * _CELL
            xs, ys = [x + _NODE / 2, below + _NODE / 2], [y + 0.32, y + _EDGES - 0.07]
            width = 0.5 + 3.5 * abs(weight) / strongest
            page.plot(xs, ys, color=_INFERRED, linewidth=width, alpha=0.7, solid_capstyle="butt")
            texts = f"{node}: w {_number(weight)}, p {{reliability}}", _INFERRED_TO
            _draw_node(page, explanation, step.level - 1, node, below, y + _EDGES, *texts)
        y += _EDGES
        edges = f"{len(step.weights)} edges, {100 * weights.sum():.0f} %"
        _draw_margin(page, y, f"level {step.level}", f"{len(shown)} strongest of", edges, "of their weight")


def _draw_equation(page: Axes, explanation: PairExplanation, step: Inference, center: float, y: float) -> None:
    values, p = _values(explanation, step.level, step.node), float(explanation.reliabilities[step.level, step.node])
    terms = f"{p:.2f} · {values['delta']} + {1 - p:.2f} · {_number(step.inferred)} = {values['rectified']}"
    text = f"node {step.node} of level {step.level + 1}: δ̂ = p δ + (1 − p) Σ w δ̂ (below) = {terms}"
    half = _EQUATION_WIDTH / 2
    _write(page, min(max(center, _MARGIN + half), page.get_xlim()[1] - half), y, text, ha="center")


def _draw_node(
    page: Axes, explanation: PairExplanation, level: int, node: int, x: float, y: float, *lines: str
) -> None:
    """The node's map over both images, on one scale that is symmetric about 0, and lines that name its values."""
    maps = explanation.maps[level][:, node]
    # The largest value is a peak of few places: cut it off, so that the rest of the map is seen.
    most = max(float(np.percentile(np.abs(maps), _PERCENTILE)), 1e-12)
    for at, left in enumerate((x, x + _TILE + _BETWEEN)):
        grey = 0.35 + 0.65 * explanation.pixels[at].mean(axis=0) / 255
        _show(page, grey, left, y, _TILE, _TILE, cmap="gray", vmin=0, vmax=1)
        scale = {"cmap": _COLORS, "vmin": -most, "vmax": most}
        _show(page, maps[at], left, y, _TILE, _TILE, alpha=0.6, interpolation="bilinear", **scale)
        page.add_patch(Rectangle((left, y), _TILE, _TILE, fill=False, edgecolor="black", linewidth=0.8))
    values = _values(explanation, level, node)
    _write(page, x, y + _TILE + 0.04, *(line.format(**values) for line in lines), size=_SMALL)


def _draw_caption(page: Axes, explanation: PairExplanation, y: float) -> None:
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
    if explanation.data_notes:
        lines.append(f"{OTHER_DATA}{'; '.join(explanation.data_notes)}")
    _write(page, _MARGIN, y, *lines, size=_SMALL + 0.5)


def _values(explanation: PairExplanation, level: int, node: int) -> dict[str, str]:
    return {name: _number(value) for name, value in explanation.of_node(level, node).items()}


def _contribution(explanation: PairExplanation, level: int) -> str:
    text = _number(float(explanation.contributions[level].sum()))
    return text if explanation.shares is None else f"{text} ({100 * explanation.shares[level]:.1f} %)"


def _number(value: float) -> str:
    return f"{value:.3g}".replace("e-0", "e-")


def _short(text: str, limit: int) -> str:
    """Paths end with what tells them apart."""
    return text if len(text) <= limit else f"...{text[-(limit - 3) :]}"
