"""``dmlbench oodml splits``: train-test splits of growing distance, as a file for ``protocol=oodml``."""

from omegaconf import DictConfig


def task(cfg: DictConfig) -> None:
    from dmlbench.oodml.splits import make_splits

    made = make_splits(cfg)
    print(f"{made.dataset}: squared Fréchet distance between the halves, measured by {made.measured_by}")
    for line in made.lines():
        print(f"  {line}")
    for path in made.written:
        print(f"written: {path}")
