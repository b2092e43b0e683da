"""A page of a picture that is laid out by hand: axes, texts, frames and lines placed in inches."""

from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle


@dataclass(frozen=True)
class Page:
    """A figure measured in inches from its upper left corner."""

    figure: Figure
    width: float
    height: float

    @classmethod
    def of(cls, width: float, height: float) -> "Page":
        return cls(Figure(figsize=(width, height), facecolor="white"), width, height)

    def axes(self, x: float, y: float, width: float, height: float) -> Axes:
        return self.figure.add_axes((x / self.width, 1 - (y + height) / self.height, width / self.width,
                                     height / self.height))  # fmt: skip

    def text(self, x: float, y: float, text: str, *, size: float = 8.0, color: str = "black",
             weight: str = "normal", align: str = "left") -> None:  # fmt: skip
        """Text whose first line begins at ``y``."""
        self.figure.text(
            x / self.width, 1 - y / self.height, text, fontsize=size, color=color, fontweight=weight, ha=align,
            va="top", linespacing=1.25, zorder=3,
        )  # fmt: skip

    def frame(self, x: float, y: float, width: float, height: float, *, color: str, dashed: bool = False) -> None:
        self.figure.add_artist(
            Rectangle(
                (x / self.width, 1 - (y + height) / self.height), width / self.width, height / self.height, fill=False,
                edgecolor=color, linewidth=1.3, linestyle="--" if dashed else "-",
                transform=self.figure.transFigure, figure=self.figure,
            )
        )  # fmt: skip

    def line(self, start: tuple[float, float], end: tuple[float, float], *, width: float, color: str) -> None:
        xs, ys = [start[0] / self.width, end[0] / self.width], [1 - start[1] / self.height, 1 - end[1] / self.height]
        self.figure.add_artist(
            Line2D(xs, ys, color=color, linewidth=width, alpha=0.7, solid_capstyle="butt",
                   transform=self.figure.transFigure, figure=self.figure)
        )  # fmt: skip
