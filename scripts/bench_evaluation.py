"""Time and memory of the exact evaluation beside those of its peers, in one run; the values are compared in it as well.

python scripts/bench_evaluation.py [--part evaluate whole collections sample memory] [--dimension 128 512]
    [--threads 1 2] [--rounds 3] [--peers FOLDER] [--out table.md]

Peers: pytorch-metric-learning's AccuracyCalculator (k="max_bin_count"), open-metric-learning's metrics (where FOLDER,
or the environment, has it), faiss for the collections. Contenders take turns; the least of the rounds counts. Seconds
of one thread are processor seconds (those of the wall on an idle machine), of more threads those of the wall.
"""

import argparse
import ctypes
import importlib.util
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytorch_metric_learning
import torch
from numpy.typing import NDArray
from pytorch_metric_learning.utils.accuracy_calculator import AccuracyCalculator
from threadpoolctl import threadpool_limits
from timing_tools import Report, least_seconds, memory_value

from dmlbench.evaluation.evaluate import evaluate
from dmlbench.evaluation.metrics.registry import mean_scores
from dmlbench.evaluation.search.unit_vectors import unit_rows
from dmlbench.results.collections import collections
from dmlbench.types import EmbeddingSet

METRICS = {"precision_at_1": "p_at_1", "r_precision": "r_precision", "mean_average_precision_at_r": "map_at_r"}
SETS = {  # queries, gallery (0: the queries themselves), classes
    "cub": (5924, 0, 100),
    "cars": (8131, 0, 98),
    "sop_like": (12000, 0, 2264),
    "in_shop": (14218, 12612, 3985),
    "sop": (60502, 0, 11316),
    "million": (10000, 1_000_000, 50_000),
    "sop_sample": (1000, 60502, 11316),
}
PARTS = ("evaluate", "whole", "collections", "sample", "memory")


def embedding_sets(name: str, dimension: int, seed: int = 1, *, scale: float = 1.0) -> list[EmbeddingSet]:
    """Rows around class centers, MAP@R as a trained model's, some duplicates; [queries] or [queries, gallery]."""
    queries, gallery, classes = (int(n * scale) or min(n, 1) for n in SETS[name])
    generator = torch.Generator().manual_seed(seed)
    centers = torch.randn(classes, dimension, generator=torch.Generator().manual_seed(0))
    strength = {128: 0.55, 512: 0.37}.get(dimension, 6 / dimension**0.5)
    parts = []
    for start, count in ((0, queries), (queries, gallery)):
        if count:
            labels = torch.arange(count) % classes
            rows = torch.randn(count, dimension, generator=generator).add_(strength * centers[labels])
            rows[count // 2 : count // 2 + 20] = rows[:20]
            parts.append(EmbeddingSet(torch.nn.functional.normalize(rows), labels, torch.arange(start, start + count)))
    return parts


def set_threads(count: int) -> None:
    torch.set_num_threads(count)
    threadpool_limits(count)
    if importlib.util.find_spec("faiss") is not None:
        import faiss

        faiss.omp_set_num_threads(count)


def repeated(action: Callable[[], object], count: int) -> Callable[[], None]:
    """``action`` so many times in a row."""

    def actions() -> None:
        for _ in range(count):
            action()

    return actions


def product_floor(queries: NDArray, gallery: NDArray) -> Callable[[], None]:
    """The matrix product alone, in the tiles that suit the processor's cache, written to one place."""
    step = max(64, min(len(queries), 2**22 // len(gallery)))
    out = np.empty((step, len(gallery)), dtype=np.float32)

    def product() -> None:
        for start in range(0, len(queries), step):
            part = queries[start : start + step]
            np.matmul(part, gallery.T, out=out[: len(part)])

    return product


def pml_call(parts: list[EmbeddingSet]) -> Callable[[], dict[str, float]]:
    calculator = AccuracyCalculator(include=tuple(METRICS), k="max_bin_count", device=torch.device("cpu"))
    query, reference = parts[0], parts[-1]
    if len(parts) == 1:
        return lambda: calculator.get_accuracy(query.rows, query.labels)
    return lambda: calculator.get_accuracy(query.rows, query.labels, reference.rows, reference.labels)


def oml_call(parts: list[EmbeddingSet]) -> Callable[[], object]:
    """CMC@1 and MAP at the largest class count, which is as deep as the others look."""
    from oml.functional.knn import batched_knn_qg
    from oml.functional.metrics import calc_retrieval_metrics

    query, reference = parts[0], parts[-1]
    depth = int(torch.bincount(reference.labels).max())

    def action() -> object:
        _, found, truth = batched_knn_qg(
            query.rows, reference.rows, depth, query.labels, reference.labels, query.ids, reference.ids
        )
        return calc_retrieval_metrics(
            found, truth, cmc_top_k=(1,), precision_top_k=(1,), map_top_k=(depth,), verbose=False
        )

    return action


def exact_difference(parts: list[EmbeddingSet], sample: int = 60) -> float:
    """Largest difference to a sort of float64 inner products, ties by gallery index, on ``sample`` queries."""
    queries, gallery = parts[0], parts[-1]
    x, y = unit_rows(queries.rows), unit_rows(gallery.rows).astype(np.float64)
    found = evaluate(queries, None if len(parts) == 1 else gallery).per_query
    labels, ids = gallery.labels.numpy(), gallery.ids.numpy()
    worst = 0.0
    for q in np.linspace(0, len(queries) - 1, sample).astype(int):
        similarity = np.sum(x[q].astype(np.float64) * y, axis=1)
        order = np.lexsort((np.arange(len(y)), -similarity))
        marks = (labels == int(queries.labels[q]))[order[ids[order] != int(queries.ids[q])]]
        positives = int(marks.sum())
        ranks = np.flatnonzero(marks[:positives]) + 1
        expected = float(np.sum(np.arange(1, len(ranks) + 1) / ranks)) / positives
        worst = max(worst, abs(found["map_at_r"][q] - expected), abs(found["p_at_1"][q] - marks[0]))
    return worst


def bench_evaluate(options: argparse.Namespace, report: Report, names: tuple[str, ...], *, peers: bool = True) -> None:
    report("| set | D | threads | ours s | PML s | ours / PML | OML s | ours / OML | product s | share | difference |")
    report("|---|---|---|---|---|---|---|---|---|---|---|")
    for name in names:
        for dimension in options.dimension if peers else [128]:
            parts = embedding_sets(name, dimension, scale=options.scale)
            gallery = None if len(parts) == 1 else parts[1]
            theirs, ours = pml_call(parts)(), evaluate(parts[0], gallery).scores
            against_peer = max(abs(ours[mine] - theirs[other]) for other, mine in METRICS.items())
            worst = exact_difference(parts)
            for threads in options.threads:
                set_threads(threads)
                contenders = {
                    "ours": lambda parts=parts, gallery=gallery: evaluate(parts[0], gallery),
                    "pml": pml_call(parts),
                    "floor": product_floor(parts[0].rows.numpy(), parts[-1].rows.numpy()),
                }
                if peers and options.has_oml:
                    contenders["oml"] = oml_call(parts)
                s = least_seconds(contenders, options.rounds if peers else 1, threads)
                oml = f"{s['oml']:.3f} | {s['ours'] / s['oml']:.2f}" if "oml" in s else "- | -"
                report(
                    f"| {name} | {dimension} | {threads} | {s['ours']:.3f} | {s['pml']:.3f} "
                    f"| {s['ours'] / s['pml']:.2f} | {oml} "
                    f"| {s['floor']:.3f} | {s['floor'] / s['ours']:.0%} | {worst:.0e}, PML {against_peer:.0e} |"
                )
    report()


def runs_of(name: str, scale: float) -> tuple[list[list[EmbeddingSet]], list[list[EmbeddingSet]] | None]:
    """4 x 3 runs of 128 dimensions that resemble each other as fold models do."""
    base = embedding_sets(name, 128, scale=scale)
    result: list[list[list[EmbeddingSet]]] = []
    for part in base:
        folds: list[list[EmbeddingSet]] = []
        for fold in range(4):
            folds.append([])
            for repeat in range(3):
                generator = torch.Generator().manual_seed(100 + 10 * fold + repeat)
                mixing = torch.randn(128, 128, generator=generator) / 128**0.5
                noise = 0.05 * torch.randn(part.rows.shape, generator=generator)
                rows = torch.nn.functional.normalize(part.rows @ mixing + noise)
                folds[-1].append(EmbeddingSet(rows, part.labels, part.ids))
        result.append(folds)
    return result[0], result[1] if len(result) > 1 else None


def joined(runs: list[list[EmbeddingSet]], choice: tuple[int, ...]) -> EmbeddingSet:
    rows = torch.cat([runs[f][r].rows for f, r in enumerate(choice)], dim=1) / len(choice) ** 0.5
    return EmbeddingSet(rows, runs[0][0].labels, runs[0][0].ids)


def bench_collections(options: argparse.Namespace, report: Report) -> None:
    """81 collections against 81 + 12 calls of PML, of which 9 + 9 are timed and multiplied: seconds, as ours takes, for
    a short contender would profit more from moments in which the machine is fast."""
    runs, _ = runs_of("cub", options.scale)
    one, four = runs[0][0], joined(runs, (0, 0, 0, 0))
    frame = collections(runs)
    theirs = pml_call([four])()
    difference = max(abs(frame.iloc[0][f"concatenated_{mine}"] - theirs[other]) for other, mine in METRICS.items())
    report(
        "| 81 collections | threads | ours s | 81 + 12 PML s | faster | 12 products s | ours / products | difference |"
    )
    report("|---|---|---|---|---|---|---|---|")
    for threads in options.threads:
        set_threads(threads)
        contenders = {
            "ours": lambda: collections(runs),
            "narrow": repeated(pml_call([one]), 9),
            "wide": repeated(pml_call([four]), 9),
            "floor": repeated(product_floor(one.rows.numpy(), one.rows.numpy()), 12),
        }
        s = least_seconds(contenders, options.rounds, threads)
        theirs_s, floor_s = 9 * s["wide"] + 12 / 9 * s["narrow"], s["floor"]
        report(
            f"| cub | {threads} | {s['ours']:.2f} | {theirs_s:.1f} | {theirs_s / s['ours']:.1f} x | {floor_s:.2f} "
            f"| {s['ours'] / floor_s:.1f} | PML {difference:.0e} |"
        )
    report()


def bench_sample(options: argparse.Namespace, report: Report) -> None:
    """81 collections of a query sample: naive faiss searches joined rows; one collection is timed and multiplied."""
    import faiss

    runs, galleries = runs_of("sop_sample", options.scale)
    assert galleries is not None
    query, gallery = (joined(part, (0, 0, 0, 0)) for part in (runs, galleries))
    depth = int(torch.bincount(gallery.labels).max())
    known = [[dict.fromkeys(evaluate(runs[0][0], galleries[0][0]).scores, 0.0)] * 3 for _ in range(4)]
    report("| 81 collections | threads | ours s | 81 faiss s | faster | 12 products s | ours / products |")
    report("|---|---|---|---|---|---|---|")
    for threads in options.threads:
        set_threads(threads)
        contenders = {
            "ours": lambda: collections(runs, galleries, scores=known),
            "faiss": lambda: faiss.knn(
                query.rows.numpy(), gallery.rows.numpy(), depth + 1, metric=faiss.METRIC_INNER_PRODUCT
            ),
            "floor": product_floor(runs[0][0].rows.numpy(), galleries[0][0].rows.numpy()),
        }
        s = least_seconds(contenders, options.rounds, threads)
        report(
            f"| {len(query)} of sop | {threads} | {s['ours']:.2f} | {81 * s['faiss']:.1f} "
            f"| {81 * s['faiss'] / s['ours']:.1f} x | {12 * s['floor']:.2f} | {s['ours'] / (12 * s['floor']):.1f} |"
        )
    report()


def measure_memory(work: str, threads: int, scale: float) -> None:
    """In a child process: seconds, and peak bytes above what the inputs and libraries take."""
    set_threads(threads)
    evaluate(*embedding_sets("cub", 128, scale=0.02))  # libraries are loaded before
    if work == "collections":
        runs, galleries = runs_of("sop_sample", scale)
    else:
        name, dimension = work.split(":")
        parts = embedding_sets(name, int(dimension), scale=scale)
    ctypes.CDLL(None).malloc_trim(0)  # what the inputs' making left free would be used again, unseen
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # the peak so far is forgotten
    before, started = memory_value("VmRSS"), time.perf_counter()
    if work == "collections":
        collections(runs, galleries, scores=[[mean_scores(evaluate(runs[0][0], galleries[0][0]).per_query)] * 3] * 4)
    else:
        evaluate(parts[0], None if len(parts) == 1 else parts[1])
    print(f"{time.perf_counter() - started:.1f} {memory_value('VmHWM') - before}")


def bench_memory(options: argparse.Namespace, report: Report) -> None:
    report("| work | threads | seconds (wall) | extra peak MiB |")
    report("|---|---|---|---|")
    for work in ("sop:128", "sop:512", "million:128", "collections"):
        for threads in options.threads:
            command = [sys.executable, __file__, "--child", work, "--threads", str(threads), "--scale"]
            done = subprocess.run([*command, str(options.scale)], capture_output=True, text=True, check=True)
            seconds, extra = done.stdout.split()
            report(f"| {work} | {threads} | {seconds} | {int(extra) / 2**20:.0f} |")
    report()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--part", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--sets", nargs="+", choices=list(SETS), default=["cub", "cars", "sop_like", "in_shop"])
    parser.add_argument("--dimension", type=int, nargs="+", default=[128, 512])
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--scale", type=float, default=1.0, help="shrinks all sets, for a trial")
    parser.add_argument("--peers", type=Path, help="folder that holds the module oml")
    parser.add_argument("--out", type=Path, help="file for the tables")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        measure_memory(options.child, options.threads[0], options.scale)
        return
    if options.peers:
        sys.path.append(str(options.peers))
    options.has_oml = importlib.util.find_spec("oml") is not None
    report = Report(options.out)
    report(
        f"Python {platform.python_version()}, numpy {np.__version__}, torch {torch.__version__}, "
        f"pytorch-metric-learning {pytorch_metric_learning.__version__}; least of {options.rounds} rounds\n"
    )
    if "evaluate" in options.part:
        bench_evaluate(options, report, tuple(options.sets))
    if "whole" in options.part:
        bench_evaluate(options, report, ("sop",), peers=False)
    if "collections" in options.part:
        bench_collections(options, report)
    if "sample" in options.part:
        bench_sample(options, report)
    if "memory" in options.part:
        bench_memory(options, report)


if __name__ == "__main__":
    main()
