"""``dmlbench oodml scores``: scores of configs over the distance of their splits."""

from omegaconf import DictConfig


def task(cfg: DictConfig) -> None:
    from dmlbench.oodml.scores import scores_over_distance

    tables, written = scores_over_distance(cfg)
    for table in tables:
        print(table.to_text())
    for path in written:
        print(f"written: {path}")
