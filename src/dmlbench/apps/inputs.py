"""Check that the inputs of runs exist: data sets and pretrained weights."""

import json
from collections.abc import Iterable

from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from dmlbench.apps.plan import PlannedConfig
from dmlbench.components import component
from dmlbench.types import DmlbenchError


def missing_inputs(configs: Iterable[PlannedConfig]) -> dict[str, DmlbenchError]:
    """Why the runs of configs cannot begin, by ``sha256``; each data set and file of weights is loaded once."""
    errors: dict[str, DmlbenchError | None] = {}
    found: dict[str, DmlbenchError] = {}
    for config in configs:
        for node in config.inputs:
            if node not in errors:
                errors[node] = _error_of(node)
            if (error := errors[node]) is not None:
                found.setdefault(config.sha256, error)
    return found


def _error_of(node: str) -> DmlbenchError | None:
    try:
        component(OmegaConf.create(json.loads(node)))
    except DmlbenchError as error:
        return error
    except (HydraException, OmegaConfBaseException):  # the run reports it with more context
        return None
    return None
