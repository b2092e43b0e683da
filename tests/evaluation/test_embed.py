"""Embedding of batches and the file that keeps them."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from dmlbench.evaluation.embeddings.embed import embed, load_embeddings, save_embeddings
from dmlbench.types import Batch, EmbeddingSet, RunError

CPU = torch.device("cpu")


def batches(sizes: tuple[int, ...] = (3, 3, 2)) -> Iterator[Batch]:
    start = 0
    for size in sizes:
        ids = torch.arange(start, start + size)
        yield Batch(ids.float().reshape(-1, 1, 1, 1).expand(-1, 3, 2, 2), ids % 2, ids + 100)
        start += size


def rows_of(images: torch.Tensor) -> torch.Tensor:
    return images[:, :, 0, 0] * 2


def test_embed_keeps_order_labels_and_ids() -> None:
    result = embed(rows_of, batches(), device=CPU, describe="test", count=8)
    assert torch.equal(result.rows, torch.arange(8.0).reshape(-1, 1).expand(-1, 3) * 2)
    assert result.ids.tolist() == list(range(100, 108))
    assert result.labels.tolist() == [0, 1] * 4
    assert result.rows.dtype == torch.float32
    assert not any(x.is_inference() for x in (result.rows, result.labels, result.ids))


@pytest.mark.parametrize(
    ("model", "sizes", "message"),
    [
        (lambda x: rows_of(x) / (rows_of(x) != 8), (3, 3, 2), "row id 104 holds NaN or infinity"),
        (rows_of, (), "got 0 images, expected 8"),
        (rows_of, (3, 3), "got 6 images, expected 8"),
    ],
)
def test_embed_refuses_infinite_rows_and_wrong_counts(model, sizes, message) -> None:
    with pytest.raises(RunError, match=message):
        embed(model, batches(sizes), device=CPU, describe="test", count=8)


def example(start: int, size: int) -> EmbeddingSet:
    ids = torch.arange(start, start + size)
    return EmbeddingSet(torch.randn(size, 4, generator=torch.Generator().manual_seed(start)), ids % 3, ids)


def test_equal_sets_give_equal_files(tmp_path: Path) -> None:
    for k in range(10):
        save_embeddings(tmp_path / str(k), example(0, 6), None, {name: name for name in "abcdef"})
    assert len({path.read_bytes() for path in tmp_path.iterdir()}) == 1


def test_files_of_earlier_versions_keep_what_they_say(tmp_path: Path) -> None:
    save_embeddings(tmp_path / "now", example(0, 6), None, {})
    tensors = load_file(tmp_path / "now")
    save_file(tensors, tmp_path / "then", metadata={"config": "a", "dataset": "b"})
    assert load_embeddings(tmp_path / "then").metadata == {"config": "a", "dataset": "b"}


@pytest.mark.parametrize("with_gallery", [False, True])
def test_a_file_gives_back_what_was_written(tmp_path: Path, with_gallery: bool) -> None:
    path = tmp_path / "embeddings.safetensors"
    queries, gallery = example(0, 6), example(50, 9) if with_gallery else None
    save_embeddings(path, queries, gallery, {"config": "a"})
    stored = load_embeddings(path)
    assert stored.metadata == {"config": "a"}
    assert (stored.gallery is None) is (gallery is None)
    pairs = [(queries, stored.queries)] + ([(gallery, stored.gallery)] if gallery and stored.gallery else [])
    for written, read in pairs:
        assert torch.equal(written.rows, read.rows)
        assert torch.equal(written.labels, read.labels)
        assert torch.equal(written.ids, read.ids)
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


def test_a_truncated_or_foreign_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "embeddings.safetensors"
    with pytest.raises(RunError, match="no embedding file"):
        load_embeddings(path)
    save_embeddings(path, example(0, 6), None, {})
    whole = path.read_bytes()
    for size in (0, 4, 60, len(whole) - 1):
        path.write_bytes(whole[:size])
        with pytest.raises(RunError, match="truncated or damaged"):
            load_embeddings(path)
    fitting = {"rows": torch.zeros(2, 1), "labels": torch.zeros(2).long(), "ids": torch.arange(2)}
    fitting["role"] = torch.zeros(2, dtype=torch.int8)
    for wrong in (
        {"rows": torch.zeros(2, 1).int()},
        {"ids": torch.zeros(1).long()},
        {"role": torch.tensor([0, 1], dtype=torch.int8)},
        {"role": torch.tensor([0, -1], dtype=torch.int8)},
    ):
        save_file(fitting | wrong, path)
        with pytest.raises(RunError, match="is not an embedding file: expected floating-point rows"):
            load_embeddings(path)
    save_file({"rows": torch.zeros(1, 1)}, path)
    with pytest.raises(RunError, match="is not an embedding file"):
        load_embeddings(path)
