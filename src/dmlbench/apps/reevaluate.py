"""Scores of a finished run again, from its embeddings or from its checkpoint, and of embeddings from anywhere."""

from pathlib import Path

from omegaconf import DictConfig

from dmlbench import build
from dmlbench.apps.trained import load_run
from dmlbench.evaluation.embed import load_embeddings
from dmlbench.evaluation.evaluate import Evaluation, evaluate
from dmlbench.results.store import EMBEDDINGS, read_result
from dmlbench.run import Scorer
from dmlbench.runtime import set_strict_float32
from dmlbench.types import RunError


def evaluate_file(path: str, cfg: DictConfig) -> Evaluation:
    """Scores of a file with the tensors rows [N, D], labels [N], ids [N] and role [N]."""
    stored = load_embeddings(Path(path))
    return evaluate(stored.queries, stored.gallery, build.component(cfg.evaluation))


def evaluate_run(path: str, cfg: DictConfig) -> tuple[Evaluation, dict[str, float]]:
    """Scores of a run's test set now, and those in its ``result.json``.

    Raises:
        RunError: the run is not complete, or what is asked for was not kept.
    """
    run_dir = Path(path)
    result = read_result(run_dir)
    stored = result["metrics"].get("test")
    if stored is None:
        raise RunError(f"{run_dir} was never tested: protocol '{result['protocol']}' does not look at the test half")
    if not cfg.from_checkpoint:
        return evaluate_file(str(run_dir / EMBEDDINGS), cfg), stored
    set_strict_float32()
    trained = load_run(run_dir, {"num_workers": cfg.num_workers, "evaluation": cfg.evaluation}, device=cfg.device)
    assert trained.data.split.test is not None
    scorer = Scorer(trained.config, trained.data, trained.images, trained.model, trained.device)
    return scorer.score(*scorer.embed(trained.data.split.test)), stored
