"""``dmlbench import``: test embeddings of other code as a config beside our own."""

from omegaconf import DictConfig


def task(cfg: DictConfig) -> None:
    from dmlbench.apps.imported import import_config
    from dmlbench.evaluation.metrics.table import score_named
    from dmlbench.results.store import run_name

    found = import_config(cfg)
    for coordinates, scores in found.scores.items():
        shown = ", ".join(
            f"{score_named(name).label} {score_named(name).scale * value:.2f}" for name, value in scores.items()
        )
        print(f"{run_name(coordinates)}: {shown}")
    for note in found.notes:
        print(f"  {note}")
    print(f"written: {found.config}; `dmlbench aggregate` and `dmlbench table` take it as any other config")
