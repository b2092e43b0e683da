"""Batches: equal numbers for any number of workers, exact resuming, clean ends, and errors that name the file."""

import os
import subprocess
import sys
import textwrap
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from dmlbench.data.batches.loaders import EvalBatches, TrainBatches
from dmlbench.data.batches.samplers import ClassBalancedBatchSampler
from dmlbench.data.batches.transforms import Transform, center_crop, identity, random_resized_crop, random_shift
from dmlbench.data.image_table import Listing, table_of
from dmlbench.data.images.image_cache import cached_images
from dmlbench.data.images.sources import DecodedImages, ImageSource, pixel_tensor
from dmlbench.data.protocols import class_index
from dmlbench.types import Batch, ConfigError, DataError, ImageTable, IntArray

CLASSES, IMAGES = 6, 5
TRAIN = np.arange(10, 30)  # classes 2 to 5


def array_table(*channels: int) -> ImageTable:
    shape = (CLASSES * IMAGES, 12, 10, *channels)
    return tiny_table("", np.random.default_rng(0).integers(0, 255, shape, dtype=np.uint8))


def file_table(root: Path) -> ImageTable:
    random = np.random.default_rng(0)
    for i in range(CLASSES * IMAGES):
        Image.fromarray(random.integers(0, 255, (40, 30 + i % 3, 3), dtype=np.uint8)).save(root / f"{i}.png")
    return tiny_table(str(root), None)


def tiny_table(root: str, pixels: np.ndarray | None) -> ImageTable:
    labels = np.repeat(np.arange(CLASSES), IMAGES)
    paths, role = [f"{i}.png" for i in range(len(labels))], np.where(labels < 2, "test", "train")
    return table_of(Listing(root, paths, labels, "abcdef", role, name="tiny", pixels=pixels, digest="none"))


def batches_of(
    table: ImageTable, transform: Transform, *, rows: IntArray = TRAIN, seed: int = 3, **more
) -> TrainBatches:
    sampler = ClassBalancedBatchSampler(table.labels[rows], classes_per_batch=3, images_per_class=2, seed=1)
    parts = {"images": opened(table, transform), "class_index": class_index(table, rows), "sampler": sampler}
    return TrainBatches(table, rows, **parts, transform=transform, seed=seed, **more)


def opened(table: ImageTable, transform: Transform) -> ImageSource | torch.Tensor:
    if transform.works_on == "batch":
        return pixel_tensor(table, DecodedImages(table, short_side=None), torch.device("cpu"))
    return DecodedImages(table, short_side=transform.resize)


def eval_batches(
    table: ImageTable, rows: IntArray, transform: Transform, *, batch_size: int, num_workers: int = 0
) -> EvalBatches:
    images = opened(table, transform)
    return EvalBatches(table, rows, images=images, transform=transform, batch_size=batch_size, num_workers=num_workers)


def equal(first: list[Batch], second: list[Batch]) -> bool:
    return len(first) == len(second) and all(
        torch.equal(a.images, b.images) and torch.equal(a.labels, b.labels) and torch.equal(a.ids, b.ids)
        for a, b in zip(first, second, strict=True)
    )


def small_crops() -> Transform:
    return random_resized_crop(resize=24, crop=16, scale=(0.16, 1.0))


@pytest.mark.parametrize("channels", [(), (3,)])
def test_a_batch_has_rgb_images_renumbered_labels_and_table_rows(channels: tuple[int, ...]) -> None:
    table = array_table(*channels)
    for batch in islice(batches_of(table, identity()), 20):
        assert batch.images.dtype == torch.uint8
        assert batch.images.shape == (6, 3, 12, 10)
        assert batch.images.is_contiguous()
        assert torch.equal(batch.labels, torch.from_numpy(table.labels)[batch.ids] - 2)
        assert set(batch.ids.tolist()) <= set(TRAIN.tolist())
        assert table.pixels is not None
        pixels = table.pixels[batch.ids].reshape(6, 12, 10, -1)
        np.testing.assert_array_equal(batch.images.permute(0, 2, 3, 1), np.broadcast_to(pixels, (6, 12, 10, 3)))


@pytest.mark.parametrize("kind", ["files", "array"])
def test_the_images_are_the_same_for_any_number_of_workers(kind: str, tmp_path: Path) -> None:
    table = file_table(tmp_path) if kind == "files" else array_table()
    transform = small_crops() if kind == "files" else random_shift(padding=2)
    torch.manual_seed(0)
    before = torch.get_rng_state()
    alone = list(islice(batches_of(table, transform), 9))
    helped = batches_of(table, transform, num_workers=2)
    assert equal(list(islice(helped, 9)), alone)
    helped.close()
    assert torch.equal(torch.get_rng_state(), before)  # else a model's dropout would depend on num_workers


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("kind", ["files", "array"])
def test_second_views_are_other_draws_of_the_same_images_and_change_no_first_one(
    kind: str, num_workers: int, tmp_path: Path
) -> None:
    table = file_table(tmp_path) if kind == "files" else array_table()
    transform = small_crops() if kind == "files" else random_shift(padding=2)
    plain = list(islice(batches_of(table, transform), 6))
    assert all(batch.second_views is None for batch in plain)
    source = batches_of(table, transform, num_workers=num_workers, second_views=True)
    batches = list(islice(source, 3))
    state = source.state_dict()
    batches += islice(source, 3)
    assert equal(batches, plain)
    source.load_state_dict(state)
    again = list(islice(source, 3))
    source.close()
    for batch, repeated in zip(batches[3:], again, strict=True):
        assert torch.equal(batch.second_views, repeated.second_views)
    for batch in batches:
        assert batch.second_views.shape == batch.images.shape
        assert not any(torch.equal(a, b) for a, b in zip(batch.images, batch.second_views, strict=True))
    if kind == "array":  # both views are the image, moved by at most 2 pixels
        for views in (batches[0].images, batches[0].second_views):
            for row, view in zip(batches[0].ids.tolist(), views, strict=True):
                padded = np.pad(table.pixels[row], 2, mode="reflect")
                boxes = [padded[y : y + 12, x : x + 10] for y in range(5) for x in range(5)]
                assert any(np.array_equal(view[0].numpy(), box) for box in boxes)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_parts_of_a_batch_have_its_images_and_all_labels(num_workers: int, tmp_path: Path) -> None:
    table = file_table(tmp_path)
    whole = list(islice(batches_of(table, small_crops(), second_views=True), 4))
    sources = [
        batches_of(table, small_crops(), num_workers=num_workers, second_views=True, part=(i, 3)) for i in range(3)
    ]
    for batch in whole:
        parts = [next(source) for source in sources]
        for name in ("images", "second_views"):
            assert [len(getattr(part, name)) for part in parts] == [2, 2, 2]
            assert torch.equal(torch.cat([getattr(part, name) for part in parts]), getattr(batch, name))
        for part in parts:
            assert torch.equal(part.labels, batch.labels)
            assert torch.equal(part.ids, batch.ids)
    for source in sources:
        source.close()
    with pytest.raises(ConfigError, match=r"batches of 6 images, expected a multiple of 4 processes"):
        next(batches_of(table, small_crops(), part=(0, 4)))


def test_the_same_image_differs_between_epochs_and_seeds(tmp_path: Path) -> None:
    table = file_table(tmp_path)
    one, other = (next(batches_of(table, small_crops(), seed=seed)) for seed in (0, 1))
    assert torch.equal(one.ids, other.ids)
    assert not torch.equal(one.images, other.images)
    seen: dict[int, torch.Tensor] = {}
    for batch in islice(batches_of(table, small_crops()), 12):
        for row, image in zip(batch.ids.tolist(), batch.images, strict=True):
            assert row not in seen or not torch.equal(seen[row], image)
            seen[row] = image


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_resumed_loader_goes_on_after_the_last_batch_that_was_handed_out(num_workers: int) -> None:
    table = array_table()
    whole = list(islice(batches_of(table, random_shift(padding=2)), 12))
    first = batches_of(table, random_shift(padding=2), num_workers=num_workers)
    assert equal(list(islice(first, 5)), whole[:5])
    state = first.state_dict()
    first.close()
    second = batches_of(table, random_shift(padding=2), num_workers=num_workers)
    second.load_state_dict(state)
    assert second.state_dict() == state
    assert equal(list(islice(second, 7)), whole[5:])
    second.load_state_dict(state)  # back again, with batches read ahead to be dropped
    assert equal(list(islice(second, 7)), whole[5:])
    second.close()


@pytest.mark.parametrize("num_workers", [0, 2])
def test_an_unreadable_image_ends_in_one_error_that_names_it(num_workers: int, tmp_path: Path) -> None:
    table = file_table(tmp_path)
    (tmp_path / "17.png").write_bytes(b"broken")
    batches = batches_of(table, small_crops(), num_workers=num_workers)
    with pytest.raises(DataError, match=r"17\.png") as caught:
        list(islice(batches, 20))
    assert "Traceback" not in str(caught.value)
    with pytest.raises(DataError, match=r"17\.png"):
        list(eval_batches(table, TRAIN, center_crop(resize=24, crop=16), batch_size=4, num_workers=num_workers))


def test_files_of_one_size_are_held_as_one_tensor(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    for i in range(CLASSES * IMAGES):
        Image.fromarray(random.integers(0, 255, (14, 11, 3), dtype=np.uint8)).save(tmp_path / f"{i}.png")
    (batch,) = eval_batches(tiny_table(str(tmp_path), None), TRAIN[:4], identity(), batch_size=8)
    assert batch.images.shape == (4, 3, 14, 11)
    expected = np.asarray(Image.open(tmp_path / f"{TRAIN[2]}.png"))
    np.testing.assert_array_equal(batch.images[2].permute(1, 2, 0).numpy(), expected)


@pytest.mark.parametrize("kernel", ["pillow", "torch"])
def test_batches_from_the_cache_are_those_from_the_files_to_the_bit(kernel: str, tmp_path: Path) -> None:
    table = file_table(tmp_path)
    train = random_resized_crop(resize=24, crop=16, scale=(0.16, 1.0), kernel=kernel)
    test = center_crop(resize=24, crop=16, kernel=kernel)
    sources = [
        DecodedImages(table, short_side=24, kernel=kernel),
        cached_images(table, tmp_path / "cache", short_side=24, kernel=kernel),
    ]
    for num_workers in (0, 1):
        runs = []
        for source in sources:
            sampler = ClassBalancedBatchSampler(table.labels[TRAIN], classes_per_batch=3, images_per_class=2, seed=1)
            batches = TrainBatches(
                table, TRAIN, images=source, class_index=class_index(table, TRAIN), sampler=sampler, transform=train,
                seed=3, num_workers=num_workers,
            )  # fmt: skip
            runs.append(list(islice(batches, 5)))
            batches.close()
            runs[-1] += EvalBatches(table, TRAIN, images=source, transform=test, batch_size=8, num_workers=num_workers)
        assert equal(*runs)


def test_a_mirrored_image_is_the_image_mirrored(tmp_path: Path) -> None:
    table = file_table(tmp_path)
    plain, mirrored = (
        next(batches_of(table, random_resized_crop(resize=24, crop=16, scale=(0.16, 1.0), flip=flip)))
        for flip in (0, 1)
    )
    assert torch.equal(mirrored.images, plain.images.flip(-1))


@pytest.mark.parametrize("num_workers", [0, 2])
def test_evaluation_goes_through_the_rows_in_order_again_and_again(num_workers: int) -> None:
    table = array_table()
    rows = np.array([29, 0, 7, 8, 3, 11, 12])
    batches = eval_batches(table, rows, identity(), batch_size=3, num_workers=num_workers)
    assert len(batches) == 3
    for _ in range(2):
        parts = list(batches)
        assert [len(b.ids) for b in parts] == [3, 3, 1]
        assert torch.cat([b.ids for b in parts]).tolist() == rows.tolist()
        assert torch.cat([b.labels for b in parts]).tolist() == table.labels[rows].tolist()
        assert table.pixels is not None
        np.testing.assert_array_equal(torch.cat([b.images for b in parts])[:, 0].numpy(), table.pixels[rows])
    first = next(iter(batches))  # an iteration that is given up ends its workers
    assert first.ids.tolist() == [29, 0, 7]
    assert list(eval_batches(table, rows[:0], identity(), batch_size=3, num_workers=num_workers)) == []


def test_wrong_arguments_are_named() -> None:
    table = array_table()
    sampler = ClassBalancedBatchSampler(table.labels[TRAIN], classes_per_batch=2, images_per_class=1, seed=0)
    parts = {"images": opened(table, identity()), "class_index": class_index(table, TRAIN), "sampler": sampler}
    for rows, message in ((TRAIN[:5], "got 20 labels, expected 5"), (TRAIN - 10, "class_index: got -1")):
        with pytest.raises(ConfigError, match=message):
            TrainBatches(table, rows, **parts, transform=identity(), seed=0)
    with pytest.raises(ConfigError, match=r"num_workers: got -1"):
        batches_of(table, identity(), num_workers=-1)
    with pytest.raises(ConfigError, match="batch_size"):
        eval_batches(table, TRAIN, identity(), batch_size=0)
    with pytest.raises(ConfigError, match=r"transform\.train: got one that is not random"):
        batches_of(table, identity(), second_views=True)
    with pytest.raises(ConfigError, match="evaluation transform is random"):
        eval_batches(table, TRAIN, random_shift(padding=1), batch_size=2)
    with pytest.raises(ConfigError, match="CropTransform: got Tensor, expected an ImageSource of single images"):
        EvalBatches(
            table,
            TRAIN,
            images=torch.zeros(30, 8, 8, dtype=torch.uint8),
            transform=center_crop(resize=24, crop=16),
            batch_size=2,
        )


@pytest.mark.slow
@pytest.mark.parametrize("closes", [True, False])
def test_sigterm_to_the_whole_group_is_the_main_process_s_affair_and_no_worker_stays(closes: bool) -> None:
    script = textwrap.dedent(
        f"""
        import os, signal, sys, time
        sys.path.insert(0, {str(Path(__file__).parent)!r})
        from test_loaders import array_table, batches_of, small_crops
        asked = []
        signal.signal(signal.SIGTERM, lambda *_: asked.append(1))
        batches = batches_of(array_table(), small_crops(), num_workers=2)
        next(batches)
        import multiprocessing
        print(*(p.pid for p in multiprocessing.active_children()), flush=True)
        os.killpg(0, signal.SIGTERM)
        for _ in range(200):
            next(batches)
        assert asked
        if {closes}:
            batches.close()
        sys.exit(85)
        """
    )
    process = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, start_new_session=True
    )
    assert process.returncode == 85, process.stderr
    assert process.stderr == ""
    workers = [int(pid) for pid in process.stdout.split()]
    assert len(workers) == 2
    for pid in workers:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
