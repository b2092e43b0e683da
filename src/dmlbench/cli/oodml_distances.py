"""``dmlbench oodml distances``: the splits of a file, measured by a network."""

from omegaconf import DictConfig


def task(cfg: DictConfig) -> None:
    from dmlbench.oodml.distances import measure_between, measure_splits

    measured = measure_splits(cfg) if cfg.train is None else measure_between(cfg)
    print("\n".join(measured.lines()))
    if cfg.output is not None:
        measured.write(cfg.output)
        print(f"written: {cfg.output}")
