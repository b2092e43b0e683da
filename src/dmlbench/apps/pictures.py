"""Pictures as files."""

import io
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure

from dmlbench.runtime import atomic_write
from dmlbench.types import RunError

matplotlib.use("Agg")  # files only; works without a display
from matplotlib import pyplot as plt

DPI = 130
COLORS = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#bbbbbb", "#882255", "#999933", "#332288")


def shortened(name: str, limit: int = 20) -> str:
    """Names begin with what sorts them and end with what tells them apart."""
    return name if len(name) <= limit else f"{name[: limit // 2 - 2]}...{name[-(limit // 2 - 1) :]}"


def save_figure(figure: Figure, path: Path) -> None:
    """Write a figure as PNG, atomically, and close it."""
    image = io.BytesIO()
    try:
        figure.savefig(image, format="png", dpi=DPI)
        atomic_write(path, image.getvalue())
    except OSError as error:
        raise RunError(f"cannot write '{path}' ({error.strerror}). Choose another output.") from error
    finally:
        plt.close(figure)
