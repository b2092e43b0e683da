"""``dmlbench evaluate``: scores of a finished run again, or of embeddings from anywhere."""

from collections.abc import Mapping, Sequence

from omegaconf import DictConfig

from dmlbench.cli.front import run_hydra


def task(cfg: DictConfig) -> None:
    from dmlbench.apps.reevaluate import evaluate_file, evaluate_run
    from dmlbench.types import ConfigError

    if (cfg.run is None) == (cfg.embeddings is None):
        raise ConfigError("give either run=<run directory> or embeddings=<file.safetensors>")
    if cfg.run is None:
        evaluation, stored = evaluate_file(cfg.embeddings, cfg), None
    else:
        evaluation, stored = evaluate_run(cfg.run, cfg)
    print(f"{evaluation.n_query} queries, gallery of {evaluation.n_gallery}, "
          f"{evaluation.n_skipped_queries} queries without a positive left out")  # fmt: skip
    _print(evaluation.scores, stored)


def _print(scores: Mapping[str, float], stored: Mapping[str, float] | None) -> None:
    for name, value in scores.items():
        note = ""
        if stored is not None and name in stored:
            note = "  as in result.json" if stored[name] == value else f"  result.json has {stored[name]:.6f}"
        print(f"{name:<14} {value:.6f}{note}")


def main(arguments: Sequence[str]) -> None:
    run_hydra("evaluate", task, arguments)
