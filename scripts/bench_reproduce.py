"""Seconds that planning, listing and summing up take of many complete runs, written for this in a folder of their own.

python scripts/bench_reproduce.py [--cells 408] [--classes 4] [--keep FOLDER]

Cells have 4 folds and 3 repeats (408 cells are 4,896 runs), each run a result, the configuration of a real one and tiny
embeddings. Composing is left out: it is done once a cell, and what it found is read from the file of known cells.
"""

import argparse
import itertools
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from pathlib import Path

import torch
from omegaconf import DictConfig, OmegaConf

from dmlbench.apps.plan import CellCache, Plan, make_plan
from dmlbench.apps.reproduce import grid_tables, summarize
from dmlbench.cli import status
from dmlbench.config import compose
from dmlbench.evaluation.embeddings.embed import save_embeddings
from dmlbench.evaluation.spec import EvaluationSpec
from dmlbench.results.store import CONFIG, EMBEDDINGS, hashes_of, write_result
from dmlbench.runtime import derive_seed
from dmlbench.types import EmbeddingSet

DATASETS = ("cub200", "cars196", "sop", "inshop")


@contextmanager
def timed(what: str) -> Iterator[None]:
    clock, processor = time.perf_counter(), time.process_time()
    yield
    spent = time.perf_counter() - clock, time.process_time() - processor
    print(f"{what:<60} {spent[0]:7.2f} s, {spent[1]:7.2f} s of the processor", flush=True)


def composer(config: DictConfig) -> Callable[[Sequence[str]], DictConfig]:
    """Configurations that differ in the name of the data set and in the first margin of the loss."""

    def made(overrides: Sequence[str]) -> DictConfig:
        cfg = config.copy()
        for override in overrides:
            OmegaConf.update(cfg, *override.split("="))
        return cfg

    return made


def write_runs(plan: Plan, made: Callable[[Sequence[str]], DictConfig], classes: int) -> None:
    """Results, configurations and embeddings of all runs of a plan."""
    labels = torch.arange(classes).repeat_interleave(4)
    configs = {cell.sha256: OmegaConf.to_yaml(made(cell.overrides)) for cell in plan.cells}
    for number, run in enumerate(plan.runs):
        run.path.mkdir(parents=True)
        rows = torch.randn(len(labels), 8, generator=torch.Generator().manual_seed(number))
        save_embeddings(run.path / EMBEDDINGS, EmbeddingSet(rows, labels, torch.arange(len(labels))), None, {})
        (run.path / CONFIG).write_text(configs[run.cell.sha256])
        scores = dict.fromkeys(("p_at_1", "map_at_r"), number % 97 / 100)
        zeros = dict.fromkeys(("n_skipped_queries", "steps"), 0)
        write_result(run.path, {
            **zeros, "cell_id": run.cell.name, "cell_sha256": run.cell.sha256, "dataset": run.cell.dataset,
            "dataset_fingerprint": run.cell.dataset, "protocol": "mlrc", "aggregation": "collections", "num_folds": 4,
            "num_repeats": 3, "fold": run.fold, "repeat": run.repeat, "seed": derive_seed(0, run.fold, run.repeat),
            "base_seed": 0, "choices": {"backbone": "resnet20", "pooling": "gap", "loss": run.cell.name},
            "search": "exact", "val_is_test": False, "monitor": "map_at_r", "metrics": {"test": scores}, "wall_s": 1.0,
            "n_query": len(labels), "n_gallery": len(labels), **hashes_of(run.path),
        })  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cells", type=int, default=408)
    parser.add_argument("--classes", type=int, default=4, help="of 4 images each, in the embeddings")
    parser.add_argument("--keep", type=Path, help="write the runs here, or use those that are here")
    given = parser.parse_args()
    folder = given.keep or Path(tempfile.mkdtemp(prefix="bench_reproduce_"))
    folder.mkdir(parents=True, exist_ok=True)
    config = compose("train", ["dataset=glyphs", "backbone=resnet20", "protocol=mlrc"])
    count = -(-given.cells // len(DATASETS))
    pairs = itertools.product(DATASETS, range(count))
    cells = [(f"dataset.name={name}", f"optim.weight_decay={i}e-5") for name, i in pairs][: given.cells]

    def planned() -> Plan:
        cache = CellCache(folder / "plans", "bench", [], composer(config))
        found = [cell for cell in cache.cells(cells).values() if not isinstance(cell, str)]
        return make_plan(found, cache, str(folder / "out"), {})

    fsync, os.fsync = os.fsync, lambda descriptor: None  # making the runs is not what is measured
    plan = planned()
    if not (folder / "out").exists():
        write_runs(plan, composer(config), given.classes)
    os.fsync = fsync
    print(f"{len(plan.cells)} cells, {len(plan.runs)} runs, python {sys.version.split()[0]}")
    with timed("plan, cells known"):
        plan = planned()
    assert {run.state for run in plan.runs} == {"done"}
    with timed("the runs as they are now"):
        plan = plan.refreshed()
    with timed("dmlbench status"), (folder / "status.txt").open("w") as file, redirect_stdout(file):
        status.task(OmegaConf.create({"paths": {"output_dir": str(folder / "out")}, "cells": "**", "state": None}))
    spec = EvaluationSpec(metrics=("p_at_1", "map_at_r"))
    for what in ("summaries", "summaries, nothing new"):
        with timed(what):
            summaries = summarize(plan, spec)
        assert all(summary.found for summary in summaries.values()), next(iter(summaries.values())).problem
    with timed("tables"):
        grid_tables(summaries, spec)
    if not given.keep:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
