"""Transforms: sizes, what the seed decides, and equality with torchvision and with slicing."""

import random

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.transforms import v2

from dmlbench.data.batches.transforms import (
    CropTransform,
    _uniforms,
    center_crop,
    identity,
    random_resized_crop,
    random_shift,
)
from dmlbench.data.images.sources import short_side_resized
from dmlbench.runtime import derive_seed
from dmlbench.types import ConfigError

MLRC = {"crop": 227, "resize": 256, "scale": (0.16, 1.0)}
SEEDS = [derive_seed("transforms", i) for i in range(4000)]


def picture(width: int, height: int) -> Image.Image:
    return Image.fromarray(np.random.default_rng(0).integers(0, 255, (height, width, 3), dtype=np.uint8))


def applied(transform: CropTransform, image: Image.Image, seed: int) -> np.ndarray:
    """One image through the whole of a transform, the flip included."""
    small = short_side_resized(image, transform.resize, transform.kernel)
    cut = transform.plan(np.array([small.shape[:2]]), [seed])
    result = transform.cut(small, cut.boxes[0])
    return result[:, ::-1] if cut.flip[0] else result


@pytest.mark.parametrize("size", [(400, 300), (300, 400), (256, 256), (120, 90), (500, 257), (333, 999)])
def test_evaluation_equals_torchvision_on_pil_images(size: tuple[int, int]) -> None:
    image = picture(*size)
    expected = v2.Compose([v2.Resize(256), v2.CenterCrop(227)])(image)
    np.testing.assert_array_equal(applied(center_crop(crop=227, resize=256), image, 0), np.asarray(expected))


@pytest.mark.parametrize("resize", [256, None])
@pytest.mark.parametrize("size", [(400, 300), (90, 140), (700, 200)])
def test_training_crops_equal_torchvision_given_the_box(size: tuple[int, int], resize: int | None) -> None:
    image = picture(*size)
    transform = random_resized_crop(**MLRC | {"resize": resize})
    resized = image if resize is None else v2.functional.resize(image, resize)
    for seed in SEEDS[:6]:
        cut = transform.plan(np.array([resized.size[::-1]]), [seed])
        expected = v2.functional.resized_crop(resized, *cut.boxes[0].tolist(), size=[227, 227])
        if cut.flip[0]:
            expected = v2.functional.hflip(expected)
        np.testing.assert_array_equal(applied(transform, image, seed), np.asarray(expected))


def test_boxes_are_distributed_as_torchvision_s() -> None:
    height, width = 256, 320
    transform = random_resized_crop(**MLRC)
    ours = transform.plan(np.tile([[height, width]], (len(SEEDS), 1)), SEEDS)
    reference = v2.RandomResizedCrop(227, scale=(0.16, 1.0), ratio=(3 / 4, 4 / 3))
    torch.manual_seed(0)
    image = Image.new("RGB", (width, height))
    boxes = [reference.make_params([image]) for _ in range(len(SEEDS))]
    theirs = np.array([[b["top"], b["left"], b["height"], b["width"]] for b in boxes])
    for column in range(4):  # two-sample Kolmogorov-Smirnov; 0.1 % critical value
        a, b = np.sort(ours.boxes[:, column]), np.sort(theirs[:, column])
        at = np.union1d(a, b)
        gap = np.abs(np.searchsorted(a, at, "right") / len(a) - np.searchsorted(b, at, "right") / len(b)).max()
        assert gap < 1.95 * np.sqrt(2 / len(SEEDS)), (column, gap)
    assert abs(ours.flip.mean() - 0.5) < 0.03
    assert (ours.boxes[:, 0] + ours.boxes[:, 2] <= height).all()
    assert (ours.boxes[:, 1] + ours.boxes[:, 3] <= width).all()
    assert (ours.boxes >= [0, 0, 1, 1]).all()


def test_area_place_and_flip_of_a_box_are_independent_and_places_reach_the_border() -> None:
    transform = random_resized_crop(crop=9, resize=None, scale=(0.64, 0.81), ratio=(1, 1))
    cut = transform.plan(np.full((len(SEEDS), 2), 10), SEEDS)
    top, left, height, _ = cut.boxes.T
    assert (height == 8).mean() == pytest.approx((8.5**2 - 64) / 17, abs=0.03)  # sides round to 8 or 9 of 10 pixels
    for side, places in ((8, 3), (9, 2)):
        shares = np.zeros((places, places, 2))
        of_side = height == side
        np.add.at(shares, (top[of_side], left[of_side], cut.flip[of_side].astype(int)), 1 / of_side.sum())
        np.testing.assert_allclose(shares, 1 / shares.size, atol=0.03)


def test_an_image_that_no_box_fits_gives_its_middle_as_torchvision_does() -> None:
    transform = random_resized_crop(crop=16, resize=None, scale=(1, 1), ratio=(3 / 4, 4 / 3))
    for width, height in ((300, 20), (20, 300)):
        reference = v2.RandomResizedCrop(16, scale=(1, 1), ratio=(3 / 4, 4 / 3))
        box = reference.make_params([Image.new("RGB", (width, height))])
        expected = [box["top"], box["left"], box["height"], box["width"]]
        assert transform.plan(np.array([[height, width]]), [5]).boxes[0].tolist() == expected


def test_each_image_s_seed_decides_alone() -> None:
    transform = random_resized_crop(**MLRC)
    sizes = np.array([[256, 300], [280, 256], [256, 256]])
    torch.manual_seed(0)
    before = torch.get_rng_state()
    whole = transform.plan(sizes, SEEDS[:3])
    assert torch.equal(torch.get_rng_state(), before)
    for i in range(3):
        alone = transform.plan(sizes[i : i + 1], SEEDS[i : i + 1])
        assert (alone.boxes[0] == whole.boxes[i]).all()
        assert alone.flip[0] == whole.flip[i]
    assert len(np.unique(transform.plan(np.tile(sizes[:1], (99, 1)), SEEDS[:99]).boxes, axis=0)) == 99


def test_an_own_transform_is_decided_by_each_image_s_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    jitter = v2.ColorJitter(brightness=0.5, hue=0.3)
    transform = random_resized_crop(**MLRC, augment=jitter)
    images = torch.randint(0, 256, (3, 3, 8, 8), dtype=torch.uint8)
    before = torch.get_rng_state()
    whole = transform.augmented(images, SEEDS[:3])
    assert torch.equal(torch.get_rng_state(), before)
    for i in range(3):
        torch.manual_seed(SEEDS[i])
        assert torch.equal(whole[i], jitter(images[i]))

    def dimmed(image: torch.Tensor) -> torch.Tensor:
        return image * random.choice([0, 1]) * np.random.choice([0, 1])  # noqa: NPY002

    either = random_resized_crop(**MLRC, augment=dimmed)
    chosen = either.augmented(images.repeat(8, 1, 1, 1), SEEDS[:24])
    random.seed(5)
    np.random.seed(5)  # noqa: NPY002
    assert torch.equal(either.augmented(images.repeat(8, 1, 1, 1), SEEDS[:24]), chosen)
    assert len(chosen.flatten(1).any(dim=1).unique()) > 1
    assert random.random() == random.Random(5).random()
    monkeypatch.setattr(torch.cuda, "manual_seed_all", lambda seed: pytest.fail("the generator of GPUs was seeded"))
    assert torch.equal(transform.augmented(images, SEEDS[:3]), whole)
    assert random_resized_crop(**MLRC).augmented(images, SEEDS[:3]) is images
    grey = random_resized_crop(**MLRC, augment=v2.Grayscale(1))
    with pytest.raises(ConfigError, match=r"augment: got torch\.uint8 \(1, 8, 8\), expected uint8 \(3, 8, 8\)"):
        grey.augmented(images, SEEDS[:3])
    with pytest.raises(ConfigError, match="augment: got Image, expected uint8"):
        random_resized_crop(**MLRC, augment=v2.ToPILImage()).augmented(images, SEEDS[:3])


def test_the_draws_are_those_of_splitmix64() -> None:
    # First outputs for the seed 1234567, as published with the reference implementation.
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431]
    expected = [(value >> 11) * 2.0**-53 for value in published]
    assert _uniforms([1234567], 4)[0].tolist() == expected
    assert _uniforms([1234567], 2, skip=2)[0].tolist() == expected[2:]


def test_the_torch_kernel_is_at_most_one_grey_level_away() -> None:
    blurred = picture(40, 30).resize((400, 300), Image.Resampling.BICUBIC)
    for image in (blurred, picture(500, 333)):
        by_kernel = {}
        for kernel in ("pillow", "torch"):
            transform = random_resized_crop(**MLRC, kernel=kernel)
            small = short_side_resized(image, 256, "pillow")
            cuts = transform.plan(np.tile([small.shape[:2]], (8, 1)), SEEDS[:8])
            by_kernel[kernel] = np.stack([transform.cut(small, box) for box in cuts.boxes]).astype(int)
        apart = np.abs(by_kernel["pillow"] - by_kernel["torch"])
        assert apart.max() <= 1
        assert (apart > 0).mean() < 0.03  # even on noise


def batch_of(images: torch.Tensor) -> torch.Tensor:
    return torch.arange(len(images))


@pytest.mark.parametrize("mode", ["reflect", "edge", "constant"])
@pytest.mark.parametrize("flip", [0.0, 1.0])
def test_a_shift_is_a_window_of_the_padded_image(mode: str, flip: float) -> None:
    images = torch.randint(1, 255, (40, 9, 12), dtype=torch.uint8)
    seeds = SEEDS[:40]
    shifted = random_shift(padding=2, padding_mode=mode, flip=flip)(images, batch_of(images), seeds)
    assert shifted.shape == (40, 3, 9, 12)
    offsets = set()
    for image, result in zip(images.numpy(), shifted.numpy(), strict=True):
        padded = np.pad(image, 2, mode=mode)
        window = result[0, :, ::-1] if flip else result[0]
        windows = [(i, j) for i in range(5) for j in range(5) if (padded[i : i + 9, j : j + 12] == window).all()]
        assert len(windows) == 1
        offsets.add(windows[0])
    assert len(offsets) > 15


def test_a_shift_of_color_images_moves_all_channels_alike() -> None:
    images = torch.randint(0, 255, (6, 8, 10, 3), dtype=torch.uint8)
    shift = random_shift(padding=3, padding_mode="constant", flip=0.5)
    whole = shift(images, batch_of(images), SEEDS[:6])
    for channel in range(3):
        assert torch.equal(whole[:, channel], shift(images[..., channel], batch_of(images), SEEDS[:6])[:, 0])


def test_a_shift_depends_on_the_image_s_own_seed() -> None:
    images = torch.randint(0, 255, (3, 16, 16), dtype=torch.uint8)
    shift = random_shift(padding=3, flip=0.5)
    seeds = [11 << 40, 12345678901, 7]
    whole = shift(images, batch_of(images), seeds)
    for i in range(3):
        assert torch.equal(shift(images, torch.tensor([i]), seeds[i : i + 1])[0], whole[i])


def test_no_padding_and_identity_change_nothing() -> None:
    images = torch.randint(0, 255, (4, 8, 8, 3), dtype=torch.uint8)
    rows = torch.tensor([2, 0])
    for transform in (random_shift(padding=0), identity()):
        assert torch.equal(transform(images, rows, [1, 2]), images[rows].permute(0, 3, 1, 2))


@pytest.mark.parametrize(
    ("transform", "changes", "message"),
    [
        (center_crop, {"crop": 300, "resize": 256}, "crop: got 300, expected at most 256, the value of resize"),
        (random_resized_crop, MLRC | {"scale": (0.5, 2)}, "scale"),
        (random_resized_crop, MLRC | {"ratio": (0, 1)}, "ratio"),
        (random_resized_crop, MLRC | {"flip": 2}, "flip"),
        (random_resized_crop, MLRC | {"resize": 0}, "resize: got 0, expected at least 1"),
        (random_resized_crop, MLRC | {"kernel": "opencv"}, "kernel 'opencv'"),
        (random_shift, {"padding": -1}, "padding"),
        (random_shift, {"padding": 1, "padding_mode": "wrap"}, "padding_mode 'wrap'"),
    ],
)
def test_values_out_of_range_are_named(transform, changes: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        transform(**changes)
    with pytest.raises(ConfigError, match="padding: got 8, expected less than the image size, 8 x 8"):
        random_shift(padding=8)(torch.zeros(1, 8, 8, dtype=torch.uint8), torch.tensor([0]), [0])
