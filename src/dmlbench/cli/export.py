"""``dmlbench export``: a finished run as a folder that stands alone."""

from omegaconf import DictConfig


def task(cfg: DictConfig) -> None:
    from dmlbench.apps.export import export_run

    formats = None if cfg.formats is None else list(cfg.formats)
    left_out = export_run(cfg.run, cfg.output, formats=formats, license=cfg.license)
    for name, reason in left_out.items():
        print(f"no {name}: {reason}")
    print(f"written: {cfg.output}")
