"""Every command that reads a run's embeddings, distance or weights refuses those of another run, and damaged ones."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from written_runs import write_run

from dmlbench.apps.loaded import load_run
from dmlbench.apps.report.page import draw_report
from dmlbench.apps.tables import ConfigSummary, compare_configs
from dmlbench.cli import commands
from dmlbench.config import compose
from dmlbench.evaluation.embeddings.embed import save_embeddings
from dmlbench.evaluation.spec import EvaluationSpec
from dmlbench.results.aggregate import aggregate_config
from dmlbench.results.store import DISTANCE, EMBEDDINGS, find_runs, hashes_of, read_result, write_result
from dmlbench.runtime import derive_seed
from dmlbench.training.checkpoint import save_checkpoint
from dmlbench.training.fit import BEST
from dmlbench.types import EmbeddingSet, RunError


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Two configs of one run each."""
    labels = torch.arange(4).repeat_interleave(3)
    for number, config in enumerate(("net-gap-1", "net-gsp-2")):
        path = tmp_path / "glyphs/mlrc" / config / "fold0_rep0"
        path.mkdir(parents=True)
        rows = torch.randn(12, 4, generator=torch.Generator().manual_seed(number))
        save_embeddings(path / EMBEDDINGS, EmbeddingSet(rows, labels, torch.arange(12)), None, {})
        (path / DISTANCE).write_bytes(b"state %d" % number)
        save_checkpoint(path / BEST, {"model": {"w": rows}})
        own = {"num_folds": 1, "num_repeats": 1, "choices": {"pooling": config}}
        write_run(path, "backbone: {}\nfit: {keep: best}\n", **own, **hashes_of(path, (EMBEDDINGS, DISTANCE, BEST)))
    return tmp_path


def _run(root: Path, config: str = "net-gap-1") -> Path:
    return root / "glyphs/mlrc" / config / "fold0_rep0"


def _aggregate(root: Path) -> object:
    return aggregate_config(find_runs(root, "*gap*"), progress=False)


def _compare(root: Path) -> object:
    return compare_configs(str(root), ["*gap*", "*gsp*"], EvaluationSpec(metrics=("ndcg_at_10",)))


def _report(root: Path) -> object:
    summary = {"scores": {"separated": {"p_at_1": {"mean": 0.5, "std": None}}}}
    config = ConfigSummary(_run(root).parent, tuple(find_runs(root, "*gap*")), summary, "gap")
    return draw_report([config], root / "x.png", title="x", metrics=["p_at_1"], num_queries=5, num_nearest=5)


def _evaluate(root: Path) -> object:
    return commands.evaluate(compose("evaluate", [f"run={_run(root)}"]))


def _load(root: Path) -> object:
    return load_run(_run(root), {}, device="cpu")


READERS = [
    *((reader, name) for reader in (_aggregate, _compare, _report, _evaluate) for name in (EMBEDDINGS, DISTANCE)),
    (_load, BEST),
]


def _flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-3] ^= 8
    path.write_bytes(content)


def _swap(path: Path) -> None:
    shutil.copy(_run(path.parents[4], "net-gsp-2") / path.name, path)


@pytest.mark.parametrize("damage", [_flip, _swap])
@pytest.mark.parametrize(("reader", "name"), READERS)
def test_files_that_a_result_was_not_computed_from_are_refused(
    root: Path, name: str, reader: Callable[[Path], object], damage: Callable[[Path], None]
) -> None:
    damage(_run(root) / name)
    with pytest.raises(RunError, match=rf"gap-1/fold0_rep0/{name} \(SHA-256 .* is not the one that result.json names"):
        reader(root)


def test_a_result_that_was_copied_into_another_run_is_not_compared(root: Path) -> None:
    result = read_result(_run(root))
    write_result(_run(root), result | {"fold": 1, "seed": derive_seed(0, 1, 0)})
    with pytest.raises(RunError, match="fold0_rep0 holds the result of fold1_rep0"):
        compare_configs(str(root), ["*gap*", "*gsp*"], EvaluationSpec(metrics=("p_at_1",)))
