"""AVSL's exact distances: time and memory of the tiles beside those of plain operations and of the products alone.

python scripts/bench_avsl.py [--part time memory ranking] [--queries 256] [--gallery 2000] [--size 512] [--levels 3]
    [--threads 1 2] [--rounds 3] [--ranking-rows 1200] [--out tiles.md]

  plain        as public code evaluates: a slice of queries against the whole gallery, every step a new [slice, N, r]
  tiles        AvslTiles, torch's threads within a chunk
  tiles, own   AvslTiles, parts of the queries shared out to as many threads, one torch thread each
  products     the L - 1 products [P, r] x [r, r] of all pairs alone, on arrays that stay in the cache, best of some P

Contenders take turns, the least of the rounds counts. Seconds of one thread are processor seconds (those of the wall on
an idle machine), of more threads those of the wall.
"""

import argparse
import ctypes
import platform
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import torch
from timing_tools import Report, least_seconds, memory_value
from torch import Tensor

from dmlbench.models.avsl_distance import AvslDistance
from dmlbench.runtime import single_threaded_torch

SETS = {"CUB": 5924, "Cars": 8131, "SOP": 60502}  # test images
PARTS = ("time", "memory", "ranking")
PRODUCT_PAIRS = (256, 512)
MEMORY_QUERIES, MEMORY_GALLERY = 16, 2048  # 32k pairs
Action = Callable[[], object]


def make_distance(options: argparse.Namespace) -> AvslDistance:
    """Edges as of maps without sign, alpha and beta as at the start."""
    distance = AvslDistance(options.levels, options.size, top_k=max(1, options.size // 4)).requires_grad_(False)
    distance.edges.copy_(torch.rand(distance.edges.shape, generator=torch.Generator().manual_seed(0)))
    distance.updates.fill_(1)
    return distance


def make_rows(distance: AvslDistance, count: int, *, classes: int = 100, seed: int = 1) -> tuple[Tensor, Tensor]:
    """Rows around class centers of every level, the higher the nearer; certainties of some 0.3. And labels."""
    generator = torch.Generator().manual_seed(seed)
    shape = (distance.num_levels, distance.level_size)
    labels = torch.arange(count) % classes
    centers = torch.randn(classes, *shape, generator=torch.Generator().manual_seed(0))
    strength = torch.linspace(0.15, 0.35, distance.num_levels)[:, None]
    embeddings = torch.randn(count, *shape, generator=generator) + strength * centers[labels]
    certainties = (0.3 + 0.1 * torch.randn(count, *shape, generator=generator)).abs()
    return distance.pack(torch.nn.functional.normalize(embeddings, dim=-1), certainties), labels


def plain(distance: AvslDistance, queries: Tensor, gallery: Tensor, *, rows: int) -> Tensor:
    """Distances [Q, N] as their formula reads, ``rows`` queries at a time."""
    edges = distance.normalized_edges()
    e, c = distance.levels(queries)
    f, d = distance.levels(gallery)
    parts = []
    for part in torch.arange(len(queries)).split(rows):
        inferred = (e[part, None, 0] - f[None, :, 0]) ** 2  # [slice, N, r]
        for level in range(1, distance.num_levels):
            node = (e[part, None, level] - f[None, :, level]) ** 2
            product = c[part, None, level] * d[None, :, level]
            p = torch.sigmoid(distance.gain * (distance.alpha[level - 1] * product + distance.beta[level - 1]))
            inferred = p * node + (1 - p) * (inferred @ edges[level - 1].T)
        parts.append(inferred.sum(-1))
    return torch.cat(parts)


def products(distance: AvslDistance, *, pairs: int, total: int) -> Action:
    edges = distance.normalized_edges().mT.contiguous()
    arrays = torch.rand(2, pairs, distance.level_size)

    def action() -> None:
        for _ in range(-(-total // pairs)):
            for level in range(len(edges)):
                torch.mm(arrays[level % 2], edges[level], out=arrays[(level + 1) % 2])

    return action


def at_once(actions: list[Action], threads: int) -> Action:
    """The actions, taken by ``threads`` threads that each leave torch one."""

    def action() -> None:
        with single_threaded_torch(), ThreadPoolExecutor(threads) as pool:
            list(pool.map(lambda one: one(), actions))

    return action


def bench_time(options: argparse.Namespace, report: Report) -> None:
    distance = make_distance(options)
    queries, gallery = (make_rows(distance, n, seed=n)[0] for n in (options.queries, options.gallery))
    total = len(queries) * len(gallery)
    tiles = distance.tiles()
    exact = distance.tiles(dtype=torch.float64)(queries[:8], gallery)
    off = {
        "plain": plain(distance, queries[:8], gallery, rows=8),
        "tiles": tiles(queries[:8], gallery),
    }
    report(f"{len(queries)} x {len(gallery)} pairs, {distance.num_levels} levels of {distance.level_size} nodes:\n")
    report("| threads | contender | seconds | microseconds per pair | ratio to plain | products' share | error |")
    report("|---|---|---|---|---|---|---|")
    estimates = []
    for threads in options.threads:
        torch.set_num_threads(threads)
        contenders: dict[str, Action] = {
            f"plain, slices of {n}": partial(plain, distance, queries, gallery, rows=n) for n in options.slices
        }
        contenders["tiles"] = partial(tiles, queries, gallery)
        contenders |= {f"products {n}": products(distance, pairs=n, total=total) for n in PRODUCT_PAIRS}
        if threads > 1:
            parts = queries.split(-(-len(queries) // (4 * threads)))
            contenders["tiles, own"] = at_once([partial(tiles, part, gallery) for part in parts], threads)
            own = [products(distance, pairs=256, total=total // threads) for _ in range(threads)]
            contenders["products, own"] = at_once(own, threads)
        s = least_seconds(contenders, options.rounds, threads)
        floor = min(value for name, value in s.items() if name.startswith("products"))
        reference = min(value for name, value in s.items() if name.startswith("plain"))
        s = {name: value for name, value in s.items() if not name.startswith("products")} | {"products": floor}
        for name, value in s.items():
            error = off.get(name.split(",")[0])
            shown = "-" if error is None else f"{(error.double() / exact - 1).abs().max():.0e}"
            report(
                f"| {threads} | {name} | {value:.2f} | {1e6 * value / total:.2f} | {value / reference:.2f} "
                f"| {floor / value:.0%} | {shown} |"
            )
        best = min(value for name, value in s.items() if name.startswith("tiles")) / total
        estimates += [
            f"{name} {threads} thread{'s' * (threads > 1)} {best * n * n / 2:.0f} s" for name, n in SETS.items()
        ]
    report("\n*Error* is the largest relative one to float64 (8 queries).")
    report("Estimates for half of all pairs of a test set (time per pair, not run): " + ", ".join(estimates) + ".\n")


def measure_memory(work: str, options: argparse.Namespace) -> None:
    """In a child process: peak bytes above what the rows, the edges and the libraries take, for 32k pairs."""
    torch.set_num_threads(1)
    distance = make_distance(options)
    queries, gallery = (make_rows(distance, n)[0] for n in (MEMORY_QUERIES, MEMORY_GALLERY))
    tiles = distance.tiles()
    distance.tiles()(queries[:2], gallery[:300])  # the libraries' own memory is there before
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # the peak so far is forgotten
    before = memory_value("VmRSS")
    if work == "plain":
        plain(distance, queries, gallery, rows=MEMORY_QUERIES)
    else:
        tiles(queries, gallery)
    print(memory_value("VmHWM") - before, tiles.working_bytes)


def bench_memory(options: argparse.Namespace, report: Report) -> None:
    report("| 32k pairs, one thread | extra peak MiB | arrays MiB |")
    report("|---|---|---|")
    for work in ("plain", "tiles"):
        command = [sys.executable, __file__, "--child", work, "--size", str(options.size), "--levels"]
        done = subprocess.run([*command, str(options.levels)], capture_output=True, text=True, check=True)
        extra, arrays = (int(value) / 2**20 for value in done.stdout.split())
        report(f"| {work} | {extra:.1f} | {'-' if work == 'plain' else f'{arrays:.1f}'} |")
    report()


def ranking_scores(distances: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """P@1 and MAP@R of every row [N] of a set's distances to itself, ties by place."""
    order = distances.clone().fill_diagonal_(torch.inf).argsort(dim=1, stable=True)
    hits = (labels[order] == labels[:, None]).double()
    positives = torch.bincount(labels)[labels] - 1
    place = torch.arange(1, len(labels) + 1)
    counted = hits * (place <= positives[:, None])
    return hits[:, 0], (counted.cumsum(1) / place * counted).sum(1) / positives


def bench_ranking(options: argparse.Namespace, report: Report) -> None:
    distance = make_distance(options)
    rows, labels = make_rows(distance, options.ranking_rows)
    torch.set_num_threads(1)
    exact = ranking_scores(distance.tiles(dtype=torch.float64)(rows, rows), labels)
    classes = len(labels.unique())
    report(f"Rankings of {len(rows)} rows of {classes} classes, against float64 tiles:\n")
    report("| tiles | P@1 | MAP@R | queries whose P@1 differs | queries whose MAP@R differs | MAP@R, mean change |")
    report("|---|---|---|---|---|---|")
    found = ranking_scores(distance.tiles()(rows, rows), labels)
    changed = [float((a != b).double().mean()) for a, b in zip(found, exact, strict=True)]
    report(
        f"| float32 | {100 * float(found[0].mean()):.2f} | {100 * float(found[1].mean()):.3f} | {changed[0]:.2%} "
        f"| {changed[1]:.1%} | {100 * float((found[1] - exact[1]).mean()):+.4f} |"
    )
    report()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--part", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--queries", type=int, default=256)
    parser.add_argument("--gallery", type=int, default=2000)
    parser.add_argument("--size", type=int, default=512, help="nodes of a level")
    parser.add_argument("--levels", type=int, default=3)
    parser.add_argument("--slices", type=int, nargs="+", default=[1, 16], help="queries of a slice of the plain way")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ranking-rows", type=int, default=1200)
    parser.add_argument("--out", type=Path, help="file for the tables")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_grad_enabled(False)
    if options.child:
        measure_memory(options.child, options)
        return
    report = Report(options.out)
    report(f"Python {platform.python_version()}, torch {torch.__version__}; least of {options.rounds} rounds\n")
    for part, bench in (("time", bench_time), ("memory", bench_memory), ("ranking", bench_ranking)):
        if part in options.part:
            bench(options, report)


if __name__ == "__main__":
    main()
