"""``dmlbench oodml transfer``: trained models on the test half of another data set."""

from omegaconf import DictConfig


def task(cfg: DictConfig) -> None:
    from dmlbench.apps.tables import asked_columns
    from dmlbench.components import component
    from dmlbench.oodml.transfer import transfer

    found = transfer(cfg)
    print("\n".join(found.lines(asked_columns(component(cfg.evaluation)))))
    if cfg.output is not None:
        found.write(cfg.output)
        print(f"written: {cfg.output}")
