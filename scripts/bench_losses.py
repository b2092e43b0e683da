"""Losses, forward and backward, timed in turns in one process on one thread; prints medians and smallest values.

python scripts/bench_losses.py [--part objective memory proxies] [--rounds 21]

Times are seconds of the thread on a CPU, not of the clock, so that other work on the machine adds its pressure on the
caches, but not its turns.
  objective  every option of conf/loss through the objective against the plain call of the same loss, 100 classes
  memory     the memory's part of cross-batch memory with 44,800 rows (SOP's 1,400 x 32) against its products
  proxies    losses with 11,318 proxies (SOP's classes) against their products and a softmax; the floor takes x p^T as
             written, ours (p x^T)^T, which a CPU does up to a third quicker, so that they may undercut it
"""

import argparse
import platform
import random
import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
from omegaconf import OmegaConf
from pytorch_metric_learning import __version__ as pml_version
from pytorch_metric_learning.losses import ProxyAnchorLoss, ProxyNCALoss
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, normalize

from dmlbench.components import component
from dmlbench.config import compose, config_folder
from dmlbench.losses.contrastive_c1 import ContrastiveC1
from dmlbench.losses.objective import Objective
from dmlbench.losses.xbm import CrossBatchMemory
from dmlbench.runtime import device_name
from dmlbench.types import ModelOutput

PARTS = ["objective", "memory", "proxies"]
CLASSES, PER_CLASS = 100, 4
MEMORY, PROXIES = 1400 * 32, 11318
SPAN = 3e-3  # seconds that a quick action is repeated for
Action = Callable[[], object]


def in_turns(actions: dict[str, Action], rounds: int) -> dict[str, tuple[float, float]]:
    """Median and smallest milliseconds of each action; a round runs each of them, in an order of its own."""
    times: dict[str, list[float]] = {name: [] for name in actions}
    order, shuffle = list(actions.items()), random.Random(0).shuffle
    started = time.thread_time()
    for _, action in order:
        action()
    repeats = max(1, round(SPAN * len(order) / (time.thread_time() - started)))
    for turn in range(rounds + 1):
        shuffle(order)
        for name, action in order:
            started = time.thread_time()
            for _ in range(repeats):
                action()
            if turn > 0:  # the first warms up
                times[name].append(1000 * (time.thread_time() - started) / repeats)
    return {name: (statistics.median(values), min(values)) for name, values in times.items()}


def ratio(times: dict[str, tuple[float, float]], name: str, base: str) -> str:
    """Ratio of the medians (of the smallest values)."""
    return f"{times[name][0] / times[base][0]:.3f} ({times[name][1] / times[base][1]:.3f})"


def build_loss(option: str, size: int, num_classes: int) -> nn.Module:
    cfg = compose(
        "train", [f"loss={option}", "recipe=small", *(["loss.start_step=0"] if option.startswith("xbm") else [])]
    )
    OmegaConf.update(cfg, "runtime.num_classes", num_classes)
    OmegaConf.update(cfg, "runtime.embedding_size", size)
    torch.manual_seed(0)
    loss: nn.Module = component(cfg.loss)
    return loss


def step_of(value: Callable[[], Tensor], inputs: list[Tensor]) -> Action:
    return lambda: torch.autograd.grad(value(), inputs)


# Through the objective -----------------------------------------------------------------------------------------------


def bench_objective(rounds: int, options: list[str], batches: list[int], sizes: list[int]) -> None:
    print("\nmicroseconds of the plain call, and objective / plain call as ratio of medians (of smallest values)\n")
    print("| loss | " + " | ".join(f"B = {b}, D = {d}" for b in batches for d in sizes) + " |")
    print("|---|" + "---|" * (len(batches) * len(sizes)))
    for option in options:
        cells = []
        for batch in batches:
            for size in sizes:
                if option == "margin_oodml" and batch > 112:  # all triplets times D: gigabytes; it has a miner for that
                    cells.append("-")
                    continue
                times = objective_times(option, batch, size, rounds)
                cells.append(f"{1000 * times['plain'][0]:.0f}: {ratio(times, 'objective', 'plain')}")
        print(f"| {option} | " + " | ".join(cells) + " |", flush=True)


def objective_times(option: str, batch: int, size: int, rounds: int) -> dict[str, tuple[float, float]]:
    loss = build_loss(option, size, CLASSES)
    objective = Objective(loss)
    x = torch.randn(batch, size).requires_grad_()
    labels = torch.arange(batch) // PER_CLASS % CLASSES
    output, inputs = ModelOutput(x), [x, *(p for p in loss.parameters() if p.requires_grad)]

    def plain() -> Tensor:
        if isinstance(loss, CrossBatchMemory):
            loss.observe(x, labels, step=1)
        value: Tensor = loss(x, labels)
        return value

    return in_turns(
        {
            "plain": step_of(plain, inputs),
            "objective": step_of(lambda: objective(output, labels, step=1)["loss"], inputs),
        },
        rounds,
    )


# Cross-batch memory --------------------------------------------------------------------------------------------------


def bench_memory(rounds: int, sizes: list[int], batch: int = 32) -> None:
    print(f"\nmemory of {MEMORY} rows, B = {batch}: milliseconds, median (smallest); ratios of the same\n")
    print("| D | memory's part | x m^T | x m^T and g m | part / x m^T | part / both products |")
    print("|---|---|---|---|---|---|")
    for size in sizes:
        generator = torch.Generator().manual_seed(0)
        rows, weights = torch.randn(batch, size, generator=generator), torch.randn(batch, MEMORY, generator=generator)
        memory = CrossBatchMemory(ContrastiveC1(), size, MEMORY, start_step=0)
        for _ in range(MEMORY // batch):
            labels = torch.randint(0, PROXIES, (batch,), generator=generator)
            memory.observe(torch.randn(batch, size, generator=generator), labels, step=1)
        labels = torch.arange(batch) // PER_CLASS
        memory.observe(rows, labels, step=1)
        x, unit, stored = rows.clone().requires_grad_(), normalize(rows), memory.rows
        times = in_turns(
            {
                "part": step_of(lambda m=memory, x=x, y=labels: m.memory_part(x, y), [x]),  # type: ignore[misc]
                "one": lambda a=unit, m=stored: a @ m.T,  # type: ignore[misc]
                "both": lambda a=unit, m=stored, g=weights: (a @ m.T, g @ m),  # type: ignore[misc]
            },
            rounds,
        )
        shown = " | ".join(f"{median:.2f} ({least:.2f})" for median, least in times.values())
        print(f"| {size} | {shown} | {ratio(times, 'part', 'one')} | {ratio(times, 'part', 'both')} |", flush=True)
    estimate_share(batch, max(sizes))


def estimate_share(batch: int, size: int) -> None:
    """SOP's memory against a training step, from operations."""
    products = 2 * 2 * batch * MEMORY * size
    network = 3 * 2 * 4.1e9 * batch
    traffic = 4 * (2 * MEMORY * size + 20 * batch * MEMORY)
    print(
        f"\noperations of both products: 2 x 2 x {batch} x {MEMORY} x {size} = {products / 1e9:.2f} GFLOP; of a "
        f"ResNet50 step (224 x 224): 3 x 2 x 4.1 GMAC x {batch} = {network / 1e9:.0f} GFLOP; "
        f"share {100 * products / network:.2f} %"
    )
    print(
        f"bytes, if the memory is read twice and [B, memory] passes 20 times: {traffic / 1e9:.2f} GB, "
        f"{1e3 * traffic / 1e12:.2f} ms at 1 TB/s; the step at 50 TFLOP/s: {1e3 * network / 50e12:.1f} ms; "
        f"share {100 * (traffic / 1e12) / (network / 50e12):.2f} %"
    )


# Many proxies --------------------------------------------------------------------------------------------------------

WITH_PROXIES: dict[str, Callable[[int], nn.Module]] = {
    "proxy_nca": partial(build_loss, "proxy_nca", num_classes=PROXIES),
    "proxy_nca_pp": partial(build_loss, "proxy_nca_pp", num_classes=PROXIES),
    "PML ProxyNCALoss": partial(ProxyNCALoss, PROXIES, softmax_scale=9),
    "norm_softmax (PML)": partial(build_loss, "norm_softmax", num_classes=PROXIES),
    "proxy_anchor": partial(build_loss, "proxy_anchor", num_classes=PROXIES),
    "PML ProxyAnchorLoss": partial(ProxyAnchorLoss, PROXIES),
}


def bench_proxies(rounds: int, sizes: list[int], batches: list[int]) -> None:
    print(f"\n{PROXIES} proxies: milliseconds, median (smallest), and ratio to the floor: x p^T, g p, g^T x, softmax\n")
    print("| B | D | floor | " + " | ".join(WITH_PROXIES) + " |")
    print("|---|---|---|" + "---|" * len(WITH_PROXIES))
    for batch in batches:
        for size in sizes:
            times = proxy_times(batch, size, rounds)
            median, least = times["floor"]
            cells = " | ".join(f"{times[name][0]:.1f}: {ratio(times, name, 'floor')}" for name in WITH_PROXIES)
            print(f"| {batch} | {size} | {median:.1f} ({least:.1f}) | {cells} |", flush=True)


def proxy_times(batch: int, size: int, rounds: int) -> dict[str, tuple[float, float]]:
    x = torch.randn(batch, size).requires_grad_()
    labels = torch.randint(0, PROXIES, (batch,))
    rows, proxies, weights = torch.randn(batch, size), torch.randn(PROXIES, size), torch.randn(batch, PROXIES)
    logits = torch.randn(batch, PROXIES).requires_grad_()

    def floor() -> object:
        softmax = torch.autograd.grad(cross_entropy(logits, labels), [logits])
        return rows @ proxies.T, weights @ proxies, weights.T @ rows, softmax

    actions: dict[str, Action] = {"floor": floor}
    for name, make in WITH_PROXIES.items():
        loss = make(size)
        actions[name] = step_of(lambda loss=loss: loss(x, labels), [x, *loss.parameters()])  # type: ignore[misc]
    return in_turns(actions, rounds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--part", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--losses", nargs="+", help="names of conf/loss; default: all")
    parser.add_argument("--sizes", type=int, nargs="+", default=[128, 512])
    parser.add_argument("--batches", type=int, nargs="+", default=[32, 112, 512])
    options = parser.parse_args()
    torch.set_num_threads(1)
    # glibc keeps freed memory up to twice the largest block freed so far, at most 32 MiB; a training process has freed
    # such a one long ago, and without it the pages of every [B, C] tensor would be fetched again from the system.
    torch.ones(30 * 2**18)
    print(
        f"{device_name(torch.device('cpu'))}, {torch.get_num_threads()} thread, Python {platform.python_version()}, "
        f"torch {torch.__version__}, pytorch-metric-learning {pml_version}, CPU time of the thread"
    )
    if "memory" in options.part:
        bench_memory(options.rounds, options.sizes)
    if "proxies" in options.part:
        bench_proxies(options.rounds, options.sizes, [32, 192])
    if "objective" in options.part:
        every = sorted(path.stem for path in (config_folder() / "loss").glob("*.yaml"))
        names = options.losses or [name for name in every if not name.startswith("layered")]  # which need AVSL
        bench_objective(options.rounds, names, options.batches, options.sizes)


if __name__ == "__main__":
    main()
