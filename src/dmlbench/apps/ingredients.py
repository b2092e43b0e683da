"""Whether what runs begin with is there: data and pretrained weights, each looked for once and not by every run."""

import json
from collections.abc import Iterable
from typing import Any

from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from dmlbench.apps.plan import Cell, Compose
from dmlbench.build import component
from dmlbench.types import DmlbenchError


def what_is_missing(cells: Iterable[Cell], compose: Compose) -> dict[str, DmlbenchError]:
    """Why runs of cells cannot begin, by ``sha256``; those that can are absent.

    Args:
        cells: whose runs are to be begun.
        compose: makes a configuration of overrides; it is asked once for each data set and backbone of the cells.
    """
    of_nodes: dict[str, DmlbenchError | None] = {}
    of_cells: dict[str, DmlbenchError | None] = {}
    found = {}
    for cell in cells:
        if cell.ingredients not in of_cells:
            of_cells[cell.ingredients] = _first_missing(compose(cell.overrides), of_nodes)
        if (error := of_cells[cell.ingredients]) is not None:
            found[cell.sha256] = error
    return found


def _first_missing(cfg: DictConfig, known: dict[str, DmlbenchError | None]) -> DmlbenchError | None:
    """The error of the data or of the weights; ``known`` are errors by resolved nodes."""
    has_weights = any(cfg.backbone.get(key) for key in ("pretrained", "weights_file"))
    for node in (cfg.dataset.table, *([cfg.backbone] if has_weights else [])):
        key = json.dumps(OmegaConf.to_container(node, resolve=True), sort_keys=True)
        if key not in known:
            known[key] = _error_of(node)
        if known[key] is not None:
            return known[key]
    return None


def _error_of(node: Any) -> DmlbenchError | None:
    try:
        component(node)
    except DmlbenchError as error:
        return error
    except (HydraException, OmegaConfBaseException):  # what else may be wrong, a run says with its whole story
        return None
    return None
