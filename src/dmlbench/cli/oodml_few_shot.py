"""``dmlbench oodml few_shot``: finished runs adapted to a few images of each test class."""

from pathlib import Path

from omegaconf import DictConfig, ListConfig


def task(cfg: DictConfig) -> None:
    from dmlbench.components import component
    from dmlbench.oodml.episodes import read_official
    from dmlbench.oodml.few_shot import FewShotPlan, few_shot_of_run
    from dmlbench.oodml.few_shot_table import FewShotRow, draw, to_csv, to_markdown
    from dmlbench.oodml.split_runs import chosen_runs, named_runs
    from dmlbench.runtime import atomic_write, set_strict_float32
    from dmlbench.types import ConfigError, is_file_name

    if not is_file_name(cfg.name):
        raise ConfigError(f"name ({cfg.name!r}) names files: use letters, digits, '.', '_' and '-'")
    shots = _listed(cfg.shots)
    if any(isinstance(k, bool) or not isinstance(k, int) for k in shots):
        raise ConfigError(f"shots ({cfg.shots}) must be whole numbers, such as shots=2,5,10")
    official = None
    if cfg.official is not None:
        official = read_official(Path(cfg.official), None if cfg.merge_order is None else _listed(cfg.merge_order))
    elif cfg.merge_order is not None:
        raise ConfigError("merge_order belongs to official=<file>; own episodes are drawn from the images themselves")
    plan = FewShotPlan(
        tuple(shots), cfg.episodes, component(cfg.evaluation), steps=cfg.steps, batch_size=cfg.batch_size,
        images_per_class=cfg.images_per_class, beta=cfg.beta, margin=cfg.margin, lr_factor=cfg.lr_factor,
        weight_decay=cfg.weight_decay, official=official, memory_bytes=cfg.memory_bytes,
    )  # fmt: skip
    set_strict_float32()
    grouped = named_runs(chosen_runs(_listed(cfg.run), cfg.configs, cfg.paths.output_dir))
    folder = Path(cfg.paths.output_dir) / "tables"
    for (dataset, protocol), runs in grouped.items():
        rows = [
            FewShotRow(run, few_shot_of_run(run.path, plan, device=cfg.device, num_workers=cfg.num_workers))
            for run in runs
        ]
        scores, title = plan.spec.score_names, f"{dataset} under {protocol}"
        text = to_markdown(f"{title}, few-shot adaptation", rows, scores)
        print(text)
        folder.mkdir(parents=True, exist_ok=True)
        stem = folder / f"{cfg.name}-{dataset}-{protocol}"
        atomic_write(stem.with_name(f"{stem.name}.md"), text.encode())
        atomic_write(stem.with_name(f"{stem.name}.csv"), to_csv(rows, scores).encode())
        for score in scores:
            draw(title, rows, stem.with_name(f"{stem.name}-{score}.png"), score=score)
        print(f"written: {stem}.md, .csv, and a picture for each of {', '.join(scores)}\n")


def _listed(value: object) -> list:
    if value is None:
        return []
    return list(value) if isinstance(value, ListConfig) else [value]
