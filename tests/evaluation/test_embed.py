"""Embeddings of batches and their files; arrays, tensors and files of other code; what is wrong is named."""

import pickle
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file

from dmlbench.evaluation import EvaluationSpec, evaluate_arrays
from dmlbench.evaluation.embeddings.embed import embed, load_embeddings, read_embeddings, save_embeddings
from dmlbench.evaluation.evaluate import evaluate
from dmlbench.types import Batch, Diverged, EmbeddingSet, RunError

N = 30
ROWS: NDArray[np.float32] = np.random.default_rng(0).normal(size=(N, 4)).astype(np.float16).astype(np.float32)
LABELS = np.random.default_rng(1).integers(0, 5, N)
SET = EmbeddingSet(torch.from_numpy(ROWS), torch.from_numpy(LABELS), torch.arange(N))
EXPECTED = evaluate(SET).scores


def npy(path: Path) -> list[Path]:
    np.save(path / "x.npy", ROWS)
    np.save(path / "y.npy", LABELS.astype(np.uint8))
    return [path / "x.npy", path / "y.npy"]


def npz(path: Path) -> list[Path]:
    np.savez_compressed(path / "x.npz", embeddings=ROWS.astype(">f2"), targets=LABELS.astype(">i4"))
    return [path / "x.npz"]


def pt(path: Path) -> list[Path]:
    torch.save({"rows": SET.rows.half(), "labels": SET.labels, "ids": SET.ids + 7, "epoch": 3}, path / "x.pt")
    return [path / "x.pt"]


def tensors(path: Path) -> list[Path]:
    save_file({"rows": SET.rows.half(), "labels": SET.labels.int()}, path / "x.safetensors")
    return [path / "x.safetensors"]


def own(path: Path) -> list[Path]:
    save_embeddings(path / "x.safetensors", SET, None, {})
    return [path / "x.safetensors"]


@pytest.mark.parametrize("write", [npy, npz, pt, tensors, own])
def test_every_kind_of_file_gives_the_scores_of_its_rows(write: Callable[[Path], list[Path]], tmp_path: Path) -> None:
    stored = read_embeddings(*write(tmp_path))
    assert evaluate(stored.queries, stored.gallery).scores == EXPECTED


@pytest.mark.parametrize("dtype", ["<f2", ">f2", ">f4", "<f8", ">f8", "longdouble"])
def test_every_floating_point_type_and_byte_order_is_accepted(dtype: str) -> None:
    assert evaluate_arrays(ROWS.astype(dtype), LABELS.astype(">u8")).scores == EXPECTED


def test_tensors_and_views_are_accepted() -> None:
    wide = torch.from_numpy(np.concatenate([ROWS, ROWS], axis=1))
    assert evaluate_arrays(wide[:, :4].requires_grad_(), SET.labels.short()).scores == EXPECTED
    assert evaluate_arrays(np.flip(ROWS[::-1].copy(), 0), LABELS).scores == EXPECTED
    assert evaluate_arrays(torch.from_numpy(ROWS).to_sparse(), LABELS).scores == EXPECTED


def test_a_gallery_without_ids_holds_none_of_the_queries_and_with_ids_those_it_names() -> None:
    apart = evaluate_arrays(ROWS, LABELS, gallery_rows=ROWS, gallery_labels=LABELS)
    assert apart.scores["p_at_1"] == 1.0  # every query finds its copy
    ids = np.arange(N) * 3
    same = evaluate_arrays(ROWS, LABELS, ids=ids, gallery_rows=ROWS, gallery_labels=LABELS, gallery_ids=ids)
    assert same.scores == EXPECTED


def test_gallery_files_are_numbered_on_from_the_queries(tmp_path: Path) -> None:
    np.savez(tmp_path / "q.npz", rows=ROWS[:10], labels=LABELS[:10])
    np.save(tmp_path / "g.npy", ROWS[10:])
    np.save(tmp_path / "gy.npy", LABELS[10:])
    stored = read_embeddings(tmp_path / "q.npz", gallery=tmp_path / "g.npy", gallery_labels=tmp_path / "gy.npy")
    assert stored.gallery is not None
    assert stored.gallery.ids.tolist() == list(range(10, N))
    expected = evaluate_arrays(ROWS[:10], LABELS[:10], gallery_rows=ROWS[10:], gallery_labels=LABELS[10:])
    assert evaluate(stored.queries, stored.gallery).scores == expected.scores


def broken_rows() -> NDArray[np.float32]:
    rows = ROWS.copy()
    rows[[3, 17], 0] = [np.nan, np.inf]
    return rows


@pytest.mark.parametrize(
    ("rows", "labels", "ids", "message"),
    [
        (ROWS[:, :0], LABELS, None, r"query rows: got shape \(30, 0\), expected \[N, D\]"),
        (broken_rows(), LABELS, None, r"row id 3 holds NaN or infinity \(2 of 30"),
        (ROWS.astype(np.float64) * 1e300, LABELS, None, r"row id 0 holds NaN or infinity \(30 of 30"),
        (ROWS.astype(np.int32), LABELS, None, "query rows: got int32, expected floating-point numbers"),
        (ROWS.astype(object), LABELS, None, "query rows: got object, expected numbers"),
        (np.ma.masked_array(ROWS, ROWS > 1), LABELS, None, "query rows: got a masked array"),
        (ROWS[:, 0], LABELS, None, r"query rows: got shape \(30,\)"),
        (ROWS, LABELS[:-1], None, r"query labels: got shape \(29,\), expected \(30,\)"),
        (ROWS, LABELS.astype(float), None, "query labels: got float64, expected whole numbers"),
        (ROWS, torch.from_numpy(LABELS > 1), None, r"query labels: got torch\.bool, expected whole numbers"),
        (ROWS, LABELS, np.arange(N) // 2, "ids: got 0 more than once"),
        (ROWS, np.arange(N), None, "none of the 30 queries has another item of its class"),
    ],
)
def test_arrays_that_cannot_be_evaluated_are_refused(rows, labels, ids, message: str) -> None:
    with pytest.raises(RunError, match=message):
        evaluate_arrays(rows, labels, ids=ids)


def test_galleries_that_do_not_fit_are_refused() -> None:
    for options, message in (
        ({"gallery_rows": ROWS}, "a gallery needs rows and labels"),
        ({"gallery_labels": LABELS}, "Give both gallery_rows and gallery_labels"),
        ({"gallery_rows": ROWS, "gallery_labels": LABELS, "ids": np.arange(N)}, "for only one of queries and gallery"),
        ({"gallery_rows": ROWS[:, :3], "gallery_labels": LABELS}, "4 dimensions and a gallery with 3"),
    ):
        with pytest.raises(RunError, match=message):
            evaluate_arrays(ROWS, LABELS, **options)


def test_k_beyond_the_gallery_is_the_whole_gallery_and_lonely_queries_are_counted() -> None:
    labels = LABELS.copy()
    labels[:2] = [70, 71]
    result = evaluate_arrays(ROWS, labels, spec=EvaluationSpec(recall_at=(1, 500)))
    assert (result.scores["recall_at_500"], result.n_skipped_queries) == (1.0, 2)


@pytest.mark.parametrize("write", [npy, npz, pt, tensors, own])
def test_truncated_files_are_refused(write: Callable[[Path], list[Path]], tmp_path: Path) -> None:
    path, *labels = write(tmp_path)
    whole = path.read_bytes()
    for size in (0, 10, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:size])
        with pytest.raises(RunError, match="truncated or damaged"):
            read_embeddings(path, *labels)


class Trap:
    """Fails the test when it is unpickled."""

    def __reduce__(self) -> tuple[Callable[[str], object], tuple[str]]:
        return pytest.fail, ("a file ran code",)


def test_objects_are_never_unpickled(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.array([Trap()], dtype=object))
    np.savez(tmp_path / "x.npz", rows=np.array([Trap()], dtype=object), labels=LABELS)
    torch.save({"rows": Trap(), "labels": SET.labels}, tmp_path / "x.pt")
    (tmp_path / "y.npy").write_bytes(pickle.dumps(Trap()))
    for name in ("x.npy", "x.npz", "x.pt", "y.npy"):
        with pytest.raises(RunError, match=r"Python objects|pickle"):
            read_embeddings(tmp_path / name)


def test_files_that_lack_or_repeat_a_part_are_refused(tmp_path: Path) -> None:
    x, y = npy(tmp_path)
    np.savez(tmp_path / "both.npz", rows=ROWS, labels=LABELS)
    np.savez(tmp_path / "other.npz", vectors=ROWS, labels=LABELS)
    np.savez(tmp_path / "twice.npz", rows=ROWS, embeddings=ROWS, labels=LABELS)
    np.savez(tmp_path / "role.npz", role=LABELS)
    torch.save([SET.rows], tmp_path / "list.pt")
    torch.save({"rows": SET.rows, "labels": SET.labels, "ids": SET.ids.tolist()}, tmp_path / "ids.pt")
    own(tmp_path)
    for arguments, options, message in (
        ([x], {}, "holds no labels. Add them as 'labels', or set labels=<file>"),
        ([tmp_path / "both.npz", y], {}, "Leave one of them out"),
        ([tmp_path / "other.npz"], {}, r"got \['vectors', 'labels'\], expected 'rows' or"),
        ([tmp_path / "twice.npz"], {}, "got 'rows' and 'embeddings', expected one of them"),
        ([tmp_path / "list.pt"], {}, "got list, expected a tensor"),
        ([tmp_path / "ids.pt"], {}, "'ids' is of type list, expected a tensor"),
        ([x, tmp_path / "other.csv"], {}, "unknown file type, expected one of .safetensors"),
        ([tmp_path / "none.npy"], {}, r"none\.npy is missing"),
        ([x, y], {"gallery": x}, "set gallery_labels=<file>"),
        ([x, y], {"gallery_labels": y}, "Set gallery=<file>, too"),
        ([tmp_path / "role.npz"], {"gallery": x}, r"got \['role'\], expected 'rows' or"),
        ([tmp_path / "x.safetensors", y], {}, "already holds labels and roles"),
    ):
        with pytest.raises(RunError, match=message):
            read_embeddings(*arguments, **options)


def batches(sizes: tuple[int, ...] = (3, 3, 2)) -> Iterator[Batch]:
    start = 0
    for size in sizes:
        ids = torch.arange(start, start + size)
        yield Batch(ids.float().reshape(-1, 1, 1, 1).expand(-1, 3, 2, 2), ids % 2, ids + 100)
        start += size


def rows_of(images: torch.Tensor) -> torch.Tensor:
    return images[:, :, 0, 0] * 2


def test_embed_keeps_order_labels_and_ids() -> None:
    result = embed(rows_of, batches(), device=torch.device("cpu"), describe="test", count=8)
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
    with pytest.raises(Diverged if "NaN" in message else RunError, match=message):  # a search goes on after Diverged
        embed(model, batches(sizes), device=torch.device("cpu"), describe="test", count=8)


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
    with pytest.raises(RunError, match=r"embeddings\.safetensors is missing"):
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
