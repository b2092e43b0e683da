"""Trains METHODS for 20 steps in float64, on one process or those of torchrun: python ranks_worker.py <folder>."""

import sys
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from composed import composed
from small_models import randn

from dmlbench.build import make_experiment
from dmlbench.models.pooling.base import Pooled
from dmlbench.models.pooling.gsp import Gsp
from dmlbench.ranks import Ranks, joined_ranks
from dmlbench.training.fit import fit
from dmlbench.types import num_launched

COMMON = (
    *("experiment=demo", "hydra.mode=RUN", "fold=0", "repeat=0", "backbone.batch_norm=all", "schedule=none"),
    *("optim=sgd", "optim.lr=0.01", "fit.max_steps=20", "fit.log_every=1", "dataset.table.images_per_class=12"),
)
METHODS = {
    "contrastive": ("loss=contrastive",),
    "proxy_anchor": ("loss=proxy_anchor",),
    "xbm": ("loss=xbm_contrastive", "loss.memory_size=100", "loss.start_step=2"),
    "gsp_zsr": ("pooling=gsp_small", "regularizer=zsr"),
    "avsl": ("backbone=resnet20_levels", "head=avsl", "pooling=gap", "loss=layered_proxy_anchor"),
    "momentum_encoder": ("regularizer=diva", "transform.train.padding=3"),
}


def train(method: str, folder: Path, ranks: Ranks, device: torch.device) -> dict[str, torch.Tensor]:
    """Weights and buffers after the training."""
    cfg = composed(*COMMON, *METHODS[method], f"fit.processes={num_launched()}", f"paths.output_dir={folder}")
    run_dir = folder / method
    run_dir.mkdir(parents=True, exist_ok=True)
    experiment = make_experiment(cfg, run_dir, device, ranks=ranks)
    setup = experiment.setup
    setup.model.double()
    if isinstance(pooling := setup.model.pooling, Gsp):
        pooling.observe(Pooled(randn(*pooling.memory.shape)), step=1)
        pooling.prototypes.data *= 0.9  # they start with norm 1, at the kink of clip_norm, where rounding decides
    objective = experiment.objective.double()
    compute = objective.forward

    def in_float64(*args: Any, **kwargs: Any) -> Any:  # the objective works in float32 by contract
        with mock.patch.object(torch.Tensor, "float", torch.Tensor.double):
            return compute(*args, **kwargs)

    objective.forward = in_float64
    fit(
        setup.model, experiment.objective, experiment.batches, None, experiment.optimizer, setup.settings,
        run_dir, device=device, ranks=ranks,
    )  # fmt: skip
    state = {f"model.{key}": value for key, value in setup.model.state_dict().items()}
    state |= {f"objective.{key}": value for key, value in experiment.objective.state_dict().items()}
    return state


if __name__ == "__main__":
    torch.set_num_threads(1)
    with joined_ranks(num_launched(), "cpu") as (ranks, device):
        for name in sys.argv[2:] or METHODS:
            weights = train(name, Path(sys.argv[1]), ranks, device)
            torch.save(weights, Path(sys.argv[1]) / name / f"weights_{ranks.rank}.pt")
