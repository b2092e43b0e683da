"""scripts/avsl_figures.py: AVSL's figures from the files of a run."""

import runpy
from pathlib import Path

import numpy as np
import torch
from numpy.testing import assert_allclose
from omegaconf import OmegaConf

from dmlbench import build
from dmlbench.config import compose
from dmlbench.evaluation.embeddings.embed import save_distance, save_embeddings
from dmlbench.training.log import History
from dmlbench.types import EmbeddingSet

SCRIPT = runpy.run_path(str(Path(__file__).parents[1] / "scripts" / "avsl_figures.py"))
PNG = b"\x89PNG\r\n\x1a\n"


def write_run(path: Path, *overrides: str) -> None:
    """Files of a run of two levels of four nodes: alpha 0 and beta 2 above the first."""
    path.mkdir()
    avsl = ("head=avsl", "pooling=none", "loss=layered", "head.num_levels=2", "head.level_size=4", "head.top_k=2")
    cfg = compose("train", [*avsl, *overrides])
    OmegaConf.save(cfg, path / "config.yaml")
    distance = build.build_distance(cfg)
    assert distance is not None
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        distance.alpha.copy_(torch.tensor([[0.0, 0.5, 1.0, 1.5]]))
        distance.beta.fill_(0.2)
        distance.edges.uniform_(generator=generator)
        distance.updates.fill_(3)
    save_distance(path / "distance.safetensors", distance)
    rows = torch.rand(6, 16, generator=generator)
    rows[:, 8:] = torch.tensor([9.0, 9.0, 9.0, 9.0, 0.1, 0.1, 0.1, 0.1])  # certainties
    found = EmbeddingSet(rows, torch.zeros(6, dtype=torch.int64), torch.arange(6))
    save_embeddings(path / "embeddings.safetensors", found, None, {})
    history = History(path / "history.csv", resume_step=0)
    for step in (1, 2, 3):
        history.log(step, {"train/edge_change_mean_1": 0.1 * step, "train/edge_change_max_1": float(step)})
    history.close()


def test_facts_are_those_of_the_files(tmp_path: Path) -> None:
    write_run(tmp_path / "a", "head.momentum=0.9")
    facts = SCRIPT["inference_facts"](tmp_path / "a", num_pairs=5)
    assert (facts.momentum, facts.steps.tolist()) == (0.9, [2, 3])  # the first batch had no edges before it
    assert_allclose(facts.edge_changes, [[[0.2, 2.0]], [[0.3, 3.0]]])
    alpha = np.array([0.0, 0.5, 1.0, 1.5])
    expected = 1 / (1 + np.exp(-10 * (alpha * 0.1 * 0.1 + 0.2)))
    assert facts.reliabilities.shape == (5, 1, 4)
    assert_allclose(facts.reliabilities, np.broadcast_to(expected, (5, 1, 4)), rtol=1e-6)
    assert_allclose(facts.coefficients, alpha[None])


def test_a_picture_is_written_of_several_runs(tmp_path: Path) -> None:
    for momentum in ("0.0", "0.5"):
        write_run(tmp_path / momentum, f"head.momentum={momentum}")
    SCRIPT["draw_avsl_figures"]([tmp_path / "0.0", tmp_path / "0.5"], tmp_path / "new" / "a.png", num_pairs=5)
    assert (tmp_path / "new" / "a.png").read_bytes()[:8] == PNG
