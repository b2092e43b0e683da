"""``dmlbench evaluate``: scores of a finished run again, or of embeddings from anywhere."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from omegaconf import DictConfig

if TYPE_CHECKING:
    from dmlbench.evaluation.evaluate import HardQuery
    from dmlbench.types import ImageTable


def task(cfg: DictConfig) -> None:
    from dmlbench.apps.reevaluate import evaluate_from, hardest

    result = evaluate_from(cfg)
    evaluation = result.evaluation
    print(f"{evaluation.n_query} queries, gallery of {evaluation.n_gallery}, "
          f"{evaluation.n_skipped_queries} queries without a positive left out")  # fmt: skip
    _print(evaluation.scores, result.stored)
    for note in result.notes():
        print(f"  {note}")
    if cfg.hardest is not None:
        _print_hardest(hardest(result, count=cfg.hardest, metric=cfg.hardest_by), cfg.hardest_by, result.table)
    for path in (cfg.output, cfg.per_query, cfg.per_class):
        if path is not None:
            print(f"written: {path}")


def _print(scores: Mapping[str, float], stored: Mapping[str, float] | None) -> None:
    width = max(14, *(len(name) for name in scores))
    for name, value in scores.items():
        note = ""
        if stored is not None and name in stored:
            note = "  as in result.json" if stored[name] == value else f"  result.json has {stored[name]:.6f}"
        print(f"{name:<{width}} {value:.6f}{note}")


def _print_hardest(queries: "Sequence[HardQuery]", metric: str, table: "ImageTable | None") -> None:
    print(f"\nqueries with the lowest {metric}, and what is nearest to them")

    def name(item: int, label: int) -> str:
        return f"id {item} of class {label}" + ("" if table is None else f" ({table.paths[item]})")

    for query in queries:
        print(f"{query.score:.4f}  {name(query.id, query.label)}  <- {query.distance:.4f} ->  "
              f"{name(query.nearest_id, query.nearest_label)}")  # fmt: skip
