"""Seconds (clock, processor) that planning, listing and summing up take of many complete runs, written for this.

python scripts/bench_reproduce.py [FOLDER] [--configs 408]

FOLDER gets the runs, or has them; by default, it is a temporary one. Configs have 4 folds and 3 repeats (408 are
4,896 runs), each run a result, the configuration of a real one and tiny embeddings. Composing by Hydra (0.2 s a
config) is left out.
"""

import argparse
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from pathlib import Path

import torch
from omegaconf import DictConfig, OmegaConf

from dmlbench.apps.compare_configs import build_tables
from dmlbench.apps.paper_comparison import configs_of_grid, summarize
from dmlbench.apps.plan import Plan, compose_configs, make_plan
from dmlbench.cli.simple_commands import status
from dmlbench.config import arguments_of, compose
from dmlbench.evaluation.embeddings.embed import save_embeddings
from dmlbench.evaluation.spec import EvaluationSpec
from dmlbench.identity import planned_config
from dmlbench.results.store import CONFIG, EMBEDDINGS, hashes_of, write_result
from dmlbench.runtime import derive_seed
from dmlbench.types import EmbeddingSet

DATASETS = ("cub200", "cars196", "sop", "inshop")


@contextmanager
def timed(what: str) -> Iterator[None]:
    clock, processor = time.perf_counter(), time.process_time()
    yield
    print(f"{what:<30} {time.perf_counter() - clock:7.2f} {time.process_time() - processor:7.2f}", flush=True)


def made(overrides: Sequence[str], base: DictConfig) -> DictConfig:
    cfg = base.copy()
    for override in overrides:
        OmegaConf.update(cfg, *override.split("="))
    return cfg


def write_runs(plan: Plan, base: DictConfig) -> None:
    """Results, configurations and embeddings of all runs of a plan."""
    labels = torch.arange(4).repeat_interleave(4)
    configs = {config.sha256: OmegaConf.to_yaml(made(config.overrides, base)) for config in plan.configs}
    for number, run in enumerate(plan.runs):
        run.path.mkdir(parents=True)
        rows = torch.randn(16, 8, generator=torch.Generator().manual_seed(number))
        save_embeddings(run.path / EMBEDDINGS, EmbeddingSet(rows, labels, torch.arange(16)), None, {})
        (run.path / CONFIG).write_text(configs[run.config.sha256])
        write_result(run.path, {
            "config_id": run.config.name, "config_sha256": run.config.sha256, "dataset": run.config.dataset,
            "dataset_fingerprint": run.config.dataset, "protocol": "mlrc", "aggregation": "collections", "num_folds": 4,
            "num_repeats": 3, "fold": run.fold, "repeat": run.repeat, "seed": derive_seed(0, run.fold, run.repeat),
            "base_seed": 0, "choices": {"backbone": "resnet20", "pooling": "gap", "loss": run.config.name},
            "search": "exact", "val_is_test": False, "monitor": "map_at_r", "wall_s": 1.0, "n_query": 16,
            "metrics": {"test": {"p_at_1": 0.5, "map_at_r": 0.25}}, "n_gallery": 16, "n_skipped_queries": 0,
            "steps": 0, **hashes_of(run.path),
        })  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?")
    parser.add_argument("--configs", type=int, default=408)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        measure(given.folder or Path(temporary), given.configs)


def measure(folder: Path, num_configs: int) -> None:
    base = compose("train", ["dataset=glyphs", "backbone=resnet20", "protocol=mlrc"])
    configs = [(f"dataset.name={DATASETS[i % 4]}", f"optim.weight_decay={i}e-5") for i in range(num_configs)]

    def planned() -> Plan:
        composed = compose_configs(configs, lambda given: planned_config(given, made(given, base))).values()
        known = [config for config in composed if not isinstance(config, str)]
        return make_plan(known, lambda given: planned_config(given, base), str(folder / "out"), {})

    plan = planned()
    if not (folder / "out").exists():
        fsync, os.fsync = os.fsync, lambda descriptor: None  # making the runs is not what is measured
        write_runs(plan, base)
        os.fsync = fsync
    spec = EvaluationSpec(metrics=("p_at_1", "map_at_r"))
    with timed("plan"):
        plan = planned()
    assert {run.state for run in plan.runs} == {"done"}
    with timed(f"status of {len(plan.runs)} runs"), open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):
        status(arguments_of(compose("status", [f"paths.output_dir={folder}/out"])))
    for what in ("summaries", "summaries, nothing new"):
        with timed(what):
            summaries = summarize(plan, {config.sha256: spec for config in plan.configs})
        assert all(summary.found for summary in summaries.values())
    with timed("tables of a grid"):
        build_tables(configs_of_grid(summaries, {}), spec)


if __name__ == "__main__":
    main()
