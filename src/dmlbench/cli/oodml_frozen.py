"""``dmlbench oodml frozen``: features of a network as they are, scored over the splits of a file."""

from omegaconf import DictConfig


def task(cfg: DictConfig) -> None:
    from pathlib import Path

    from dmlbench.apps.tables import asked_columns
    from dmlbench.components import component
    from dmlbench.evaluation.metrics.table import score_named
    from dmlbench.oodml.transfer import frozen_scores
    from dmlbench.runtime import write_json

    found = frozen_scores(cfg)
    scores = [score_named(name) for name in asked_columns(component(cfg.evaluation))]
    print(f"{found['dataset']}: {found['network']}, as it is")
    print(f"{'split':>7}  {'distance':>10}" + "".join(f"{score.label:>12}" for score in scores))
    for split in found["by_split"]:
        values = "".join(f"{score.scale * split['scores'][score.name]:12.2f}" for score in scores)
        print(f"{split['split']:>7}  {split['distance']:10.4f}{values}")
    if found["AGS"]:
        print(f"{'AGS':>19}" + "".join(f"{score.scale * found['AGS'][score.name]:12.2f}" for score in scores))
    for note in found["notes"]:
        print(f"note: NOT THE PUBLISHED DATA: {note}")
    if cfg.output is not None:
        write_json(Path(cfg.output), found)
        print(f"written: {cfg.output}")
