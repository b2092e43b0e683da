"""What several processes of one run spend on communication, beside one process: with gloo on a CPU, with NCCL on GPUs.

python scripts/bench_ranks.py [--processes 2] [--steps 20] [train's overrides, such as backbone=resnet50 device=cuda]
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from dmlbench import ranks as ranks_module
from dmlbench.build import make_experiment
from dmlbench.config import compose
from dmlbench.training.fit import fit
from dmlbench.types import num_launched

SMALL = ("experiment=demo", "backbone=resnet20", "sampler.classes_per_batch=16", "dataset.table.image_size=64")


def worker(steps: int, overrides: list[str], out: Path) -> None:
    """Train on this process's rank and write seconds per step, and those in collectives."""
    spent = 0.0
    plain = ranks_module._peers

    @contextmanager
    def timed() -> Iterator[None]:
        nonlocal spent
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # else the wait for the own network would count
        started = time.perf_counter()
        with plain():
            yield
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        spent += time.perf_counter() - started

    ranks_module._peers = timed
    processes = num_launched()
    fixed = ["hydra.mode=RUN", "fold=0", "repeat=0", "num_workers=0", f"fit.processes={processes}"]
    cfg = compose(
        "train", [*SMALL, *overrides, *fixed, f"fit.max_steps={steps + 2}", f"fit.validate_every={steps + 2}"]
    )
    with ranks_module.joined_ranks(processes, cfg.device) as (ranks, device):
        torch.set_num_threads(1)
        experiment = make_experiment(cfg, out.parent, device, ranks=ranks)
        starts: list[tuple[float, float]] = []

        class Timed:
            def __next__(self) -> object:
                starts.append((time.perf_counter(), spent))
                return next(experiment.batches)

            state_dict, load_state_dict = experiment.batches.state_dict, experiment.batches.load_state_dict

        fit(
            experiment.setup.model, experiment.objective, Timed(), None, experiment.optimizer,
            experiment.setup.settings, out.parent, device=device, ranks=ranks,
        )  # fmt: skip
        experiment.batches.close()
        (first, spent_first), (last, spent_last) = starts[1], starts[-1]
        if ranks.is_first:
            found = {"step": (last - first) / (len(starts) - 2), "wait": (spent_last - spent_first) / (len(starts) - 2)}
            out.write_text(json.dumps(found))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    args, overrides = parser.parse_known_args()
    if args.worker:
        worker(args.steps, overrides, args.worker)
        return
    print(f"{'processes':>9} {'ms per step':>12} {'in collectives':>15} {'times faster':>13}")
    times = {}
    for processes in (1, args.processes):
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "found.json"
            launcher = [sys.executable, "-m", "torch.distributed.run", f"--nproc_per_node={processes}", __file__]
            command = [*launcher, f"--steps={args.steps}", f"--worker={out}", f"paths.output_dir={folder}", *overrides]
            subprocess.run(command, check=True, stderr=subprocess.DEVNULL)
            found = json.loads(out.read_text())
        times[processes] = found["step"]
        share, ratio = found["wait"] / found["step"], times[1] / found["step"]
        print(f"{processes:>9} {1000 * found['step']:>12.1f} {share:>15.1%} {ratio:>13.2f}")


if __name__ == "__main__":
    main()
