"""Scores of a finished run again, from its embeddings or from its checkpoint, and of embeddings from anywhere."""

from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from dmlbench import build
from dmlbench.evaluation.embed import load_embeddings
from dmlbench.evaluation.evaluate import Evaluation, evaluate
from dmlbench.results.store import CONFIG, EMBEDDINGS, read_result
from dmlbench.run import Scorer
from dmlbench.runtime import select_device, set_strict_float32
from dmlbench.training.checkpoint import load_checkpoint
from dmlbench.training.fit import BEST
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
    if not (run_dir / BEST).exists():
        raise RunError(
            f"{run_dir} has no {BEST}; it was run with fit.keep={_config(run_dir).fit.keep} or never trained"
        )
    set_strict_float32()
    config = OmegaConf.merge(_config(run_dir), {"num_workers": cfg.num_workers, "evaluation": cfg.evaluation})
    assert isinstance(config, DictConfig)
    device = select_device(cfg.device)
    data = build.build_data(config)
    if data.table.fingerprint != result["dataset_fingerprint"]:
        raise RunError(
            f"{data.table.name} is not the data of the run: fingerprint {data.table.fingerprint[:12]} now, "
            f"{result['dataset_fingerprint'][:12]} then"
        )
    assert data.split.test is not None
    model = build.build_model(config)
    model.load_state_dict(load_checkpoint(run_dir / BEST)["model"])
    build.move(model, model, device, channels_last=config.fit.channels_last)
    images = build.image_opener(config, data.table, device)(config.transform.eval)
    scorer = Scorer(config, data, images, model, device)
    return scorer.score(*scorer.embed(data.split.test)), stored


def _config(run_dir: Path) -> DictConfig:
    config = OmegaConf.load(run_dir / CONFIG)
    assert isinstance(config, DictConfig)
    # What pretrained weights a run began with does not matter to one that loads its own.
    if "pretrained" in config.backbone:
        config.backbone.pretrained = False
        config.backbone.weights_file = None
    return config
