"""Exact evaluation against pytorch-metric-learning's, side by side in one run; prints seconds, ratios and agreement.

python scripts/bench_evaluation.py [--queries 5924] [--classes 100] [--dimension 128 512] [--repeats 3]
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from pytorch_metric_learning.utils.accuracy_calculator import AccuracyCalculator

from dmlbench.evaluation.evaluate import EvaluationSpec, evaluate
from dmlbench.results.collections import collections
from dmlbench.types import EmbeddingSet

METRICS = {"precision_at_1": "p_at_1", "r_precision": "r_precision", "mean_average_precision_at_r": "map_at_r"}


def embeddings(queries: int, classes: int, dimension: int, seed: int) -> EmbeddingSet:
    """Unit rows around class centers, about as hard as a trained model's on CUB."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(queries) % classes
    centers = torch.randn(classes, dimension, generator=torch.Generator().manual_seed(0))
    rows = 0.55 * centers[labels] + torch.randn(queries, dimension, generator=generator)
    return EmbeddingSet(torch.nn.functional.normalize(rows), labels, torch.arange(queries))


def seconds(action: Callable[[], object], repeats: int) -> float:
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        action()
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--queries", type=int, default=5924, help="images that search among themselves (CUB: 5924)")
    parser.add_argument("--classes", type=int, default=100)
    parser.add_argument("--dimension", type=int, nargs="+", default=[128, 512])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--skip-collections", action="store_true", help="leave out the 81 collections")
    options = parser.parse_args()
    print(f"{options.queries} queries, {options.classes} classes, {torch.get_num_threads()} threads")

    for dimension in options.dimension:
        data = embeddings(options.queries, options.classes, dimension, seed=1)
        peer = AccuracyCalculator(include=tuple(METRICS), k="max_bin_count")
        theirs = peer.get_accuracy(data.rows, data.labels)
        peer_s = seconds(lambda peer=peer, data=data: peer.get_accuracy(data.rows, data.labels), options.repeats)
        floor_s = seconds(lambda rows=data.rows: rows @ rows.T, options.repeats)
        for back_end in ("faiss", "torch"):
            spec = EvaluationSpec(back_end=back_end)
            try:
                ours = evaluate(data, None, spec).scores
            except Exception as error:
                print(f"D={dimension} {back_end}: {error}")
                continue
            ours_s = seconds(lambda data=data, spec=spec: evaluate(data, None, spec), options.repeats)
            worst = max(abs(ours[name] - theirs[peer_name]) for peer_name, name in METRICS.items())
            print(
                f"D={dimension} {back_end:<5}: ours {ours_s:.3f} s, PML {peer_s:.3f} s, ratio {ours_s / peer_s:.2f}; "
                f"matrix product {floor_s:.3f} s, {floor_s / ours_s:.0%} of it; largest difference {worst:.1e}"
            )

    if not options.skip_collections:
        size = (options.queries, options.classes, 128)
        members = [[embeddings(*size, seed=10 * f + r) for r in range(3)] for f in range(4)]
        started = time.perf_counter()
        collections(members)
        ours_s = time.perf_counter() - started
        data = embeddings(options.queries, options.classes, 512, seed=1)
        peer = AccuracyCalculator(include=tuple(METRICS), k="max_bin_count")
        one_s = seconds(lambda: peer.get_accuracy(data.rows, data.labels), options.repeats)
        theirs_s = 81 * one_s
        print(
            f"81 collections of 12 x 128-D: ours {ours_s:.1f} s; 81 x one PML call at 512-D {theirs_s:.1f} s", end="; "
        )
        print(f"ratio {ours_s / theirs_s:.2f}")


if __name__ == "__main__":
    main()
