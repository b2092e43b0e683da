"""Transforms: sizes, what the seed decides, and equality with torchvision and with slicing."""

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.transforms import v2

from dmlbench.data.transforms import identity, mlrc_eval, mlrc_train, random_shift
from dmlbench.types import ConfigError


def picture(width: int, height: int) -> Image.Image:
    return Image.fromarray(np.random.default_rng(0).integers(0, 255, (height, width, 3), dtype=np.uint8))


def test_mlrc_eval_is_resize_of_the_short_side_and_center_crop() -> None:
    image = picture(400, 300)
    small = image.resize((341, 256), Image.Resampling.BILINEAR)
    expected = np.asarray(small)[14:241, 57:284]  # torchvision rounds (256 - 227) / 2 = 14.5 to even
    result = mlrc_eval()(image, 0)
    assert result.dtype == torch.uint8
    np.testing.assert_array_equal(result.numpy(), expected.transpose(2, 0, 1))


def test_mlrc_train_equals_torchvision_under_the_same_seed() -> None:
    image = picture(300, 280)
    ours = mlrc_train()(image, 123)
    assert ours.shape == (3, 227, 227)
    torch.manual_seed(123)
    resized = v2.functional.resize(image, 256)
    box = v2.RandomResizedCrop(227, scale=(0.16, 1.0), ratio=(3 / 4, 4 / 3)).make_params([resized])
    cropped = v2.functional.resized_crop(resized, **box, size=[227, 227])
    if torch.rand(1) < 0.5:
        cropped = v2.functional.hflip(cropped)
    np.testing.assert_array_equal(ours.numpy(), np.asarray(cropped).transpose(2, 0, 1))


def test_the_seed_decides_the_crop_and_the_global_generator_is_left_alone() -> None:
    image, transform = picture(300, 280), mlrc_train()
    torch.manual_seed(0)
    before = torch.get_rng_state()
    first, second = transform(image, 1), transform(image, 2)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(99)
    assert torch.equal(transform(image, 1), first)
    assert not torch.equal(first, second)


def test_the_first_resize_can_be_left_out() -> None:
    transform = mlrc_train(resize=None, crop=64, scale=(1, 1), ratio=(1, 1), flip=0)
    image = picture(64, 64)
    np.testing.assert_array_equal(transform(image, 5).numpy(), np.asarray(image).transpose(2, 0, 1))


def test_lists_are_taken_where_tuples_are_meant() -> None:
    assert mlrc_train(crop=32, scale=[0.5, 1.0], ratio=[1.0, 1.0])(picture(64, 64), 0).shape == (3, 32, 32)  # type: ignore[arg-type]


@pytest.mark.parametrize("mode", ["reflect", "edge", "constant"])
def test_a_shift_is_a_window_of_the_padded_image(mode: str) -> None:
    images = torch.randint(0, 255, (40, 1, 9, 12), dtype=torch.uint8)
    seeds = np.random.default_rng(0).integers(0, 2**63, 40).tolist()
    shifted = random_shift(padding=2, padding_mode=mode)(images, seeds)  # type: ignore[arg-type]
    offsets = set()
    for image, result in zip(images.numpy(), shifted.numpy(), strict=True):
        padded = np.pad(image, ((0, 0), (2, 2), (2, 2)), mode=mode)  # type: ignore[call-overload]
        windows = [(i, j) for i in range(5) for j in range(5) if (padded[:, i : i + 9, j : j + 12] == result).all()]
        assert len(windows) == 1
        offsets.add(windows[0])
    assert len(offsets) > 15


def test_a_shift_depends_on_the_image_s_own_seed() -> None:
    images = torch.randint(0, 255, (3, 1, 16, 16), dtype=torch.uint8)
    shift = random_shift(padding=3)
    seeds = [11 << 40, 12345678901, 7]
    whole = shift(images, seeds)
    for i in range(3):
        assert torch.equal(shift(images[i : i + 1], seeds[i : i + 1])[0], whole[i])


def test_no_padding_and_identity_change_nothing() -> None:
    images = torch.randint(0, 255, (2, 3, 8, 8), dtype=torch.uint8)
    assert torch.equal(random_shift(padding=0)(images, [1, 2]), images)
    assert torch.equal(identity()(images, [1, 2]), images)


def test_each_transform_says_what_it_works_on() -> None:
    assert (mlrc_train().works_on, mlrc_train().is_random) == ("image", True)
    assert (mlrc_eval().works_on, mlrc_eval().is_random) == ("image", False)
    assert (random_shift(padding=1).works_on, random_shift(padding=1).is_random) == ("batch", True)
    assert (identity().works_on, identity().is_random) == ("batch", False)


def test_values_out_of_range_are_named() -> None:
    with pytest.raises(ConfigError, match=r"crop \(300\) exceeds resize \(256\)"):
        mlrc_eval(crop=300)
    with pytest.raises(ConfigError, match="scale"):
        mlrc_train(scale=(0.5, 2))
    with pytest.raises(ConfigError, match="ratio"):
        mlrc_train(ratio=(0, 1))
    with pytest.raises(ConfigError, match="flip"):
        mlrc_train(flip=2)
    with pytest.raises(ConfigError, match="resize"):
        mlrc_train(resize=0)
    with pytest.raises(ConfigError, match="padding"):
        random_shift(padding=-1)
    with pytest.raises(ConfigError, match="padding_mode 'wrap'"):
        random_shift(padding=1, padding_mode="wrap")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="smaller than the images"):
        random_shift(padding=8)(torch.zeros(1, 1, 8, 8, dtype=torch.uint8), [0])
