"""``dmlbench export``: a finished run as a folder that stands alone."""

from omegaconf import DictConfig


def task(cfg: DictConfig) -> None:
    run, output = cfg.run, cfg.output  # if missing, before torch is imported
    from dmlbench.apps.export import export_run

    formats = None if cfg.formats is None else list(cfg.formats)
    left_out = export_run(run, output, formats=formats, license=cfg.license)
    for name, reason in left_out.items():
        print(f"no {name}: {reason}")
    print(f"written: {cfg.output}")
