"""BN-Inception, the backbone of most published metric learning results."""

import functools
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dmlbench.models.backbones import Backbone, BatchNormFreezing, Stage, select_levels
from dmlbench.models.weights import load_weights
from dmlbench.types import ConfigError

PUBLIC_WEIGHTS = "bn_inception-52deb4733.pth"
_PUBLIC_WEIGHTS_URL = f"http://data.lip6.fr/cadene/pretrainedmodels/{PUBLIC_WEIGHTS}"


class _Widths(NamedTuple):
    """One inception block: output channels of each convolution; no 1x1 and no projection where the map is halved."""

    name: str
    one: int
    three_reduce: int
    three: int
    double_reduce: int
    double: int
    projection: int
    pool: Literal["average", "max", "halve"]

    def out_channels(self, in_channels: int) -> int:
        return self.one + self.three + self.double + (in_channels if self.pool == "halve" else self.projection)


# Ioffe & Szegedy 2015, figure 5, as in the public ImageNet weights file.
_BLOCKS = (
    _Widths("3a", 64, 64, 64, 64, 96, 32, "average"),
    _Widths("3b", 64, 64, 96, 64, 96, 64, "average"),
    _Widths("3c", 0, 128, 160, 64, 96, 0, "halve"),
    _Widths("4a", 224, 64, 96, 96, 128, 128, "average"),
    _Widths("4b", 192, 96, 128, 96, 128, 128, "average"),
    _Widths("4c", 160, 128, 160, 128, 160, 128, "average"),
    _Widths("4d", 96, 128, 192, 160, 192, 128, "average"),
    _Widths("4e", 0, 128, 192, 192, 256, 0, "halve"),
    _Widths("5a", 352, 192, 320, 160, 224, 128, "average"),
    _Widths("5b", 352, 192, 320, 192, 224, 128, "max"),
)
_STEM_CHANNELS = 192
_LEVELS = ("3c", "4e", "5b")
_LEVEL_CHANNELS = (576, 1056, 1024)


def _max_pool(x: Tensor, stride: int) -> Tensor:
    # Windows may hang over the lower right edge (Caffe's rounding), which decides the size of the maps.
    return F.max_pool2d(x, 3, stride=stride, padding=1 if stride == 1 else 0, ceil_mode=True)


class BNInception(Backbone):
    """Inception with batch normalization: 224 x 224 images to [B, 1024, 7, 7].

    Parameters are named as in the public weights file ``bn_inception-52deb4733.pth``, converted from Caffe: images are
    BGR in 0..255 minus (104, 117, 128), and convolutions keep their biases before batch norm.

    Source: Ioffe & Szegedy, Batch Normalization, 2015.
    """

    def __init__(
        self,
        *,
        pretrained: bool,
        weights_file: str | None = None,
        batch_norm: BatchNormFreezing = "none",
        frozen_until: str | None = None,
        out_levels: Sequence[int] = (2,),
    ) -> None:
        if pretrained and weights_file is None:
            raise ConfigError(
                f"bn_inception cannot download its weights. Download {PUBLIC_WEIGHTS} from {_PUBLIC_WEIGHTS_URL} and "
                "set backbone.weights_file=<its path>, or set backbone.pretrained=false."
            )
        levels = select_levels(out_levels, len(_LEVELS))
        channels_of_levels = [_LEVEL_CHANNELS[level] for level in levels]
        super().__init__(channels_of_levels, mean=(104, 117, 128), std=(1, 1, 1), bgr=True, value_range=255.0)
        self._wanted = tuple(_LEVELS[level] for level in levels)
        self._add("conv1_7x7_s2", 3, 64, kernel=7, stride=2)
        self._add("conv2_3x3_reduce", 64, 64)
        self._add("conv2_3x3", 64, _STEM_CHANNELS, kernel=3)
        channels = _STEM_CHANNELS
        for block in _BLOCKS:
            self._add_block(block, channels)
            channels = block.out_channels(channels)
        if weights_file is not None:
            load_weights(self, weights_file, ignore=("last_linear.",))
        self.freeze(batch_norm, frozen_until)

    def _add(self, name: str, in_channels: int, out_channels: int, *, kernel: int = 1, stride: int = 1) -> None:
        self.add_module(name, nn.Conv2d(in_channels, out_channels, kernel, stride=stride, padding=kernel // 2))
        self.add_module(f"{name}_bn", nn.BatchNorm2d(out_channels))

    def _add_block(self, block: _Widths, in_channels: int) -> None:
        name = f"inception_{block.name}_"
        stride = 2 if block.pool == "halve" else 1
        if block.one:
            self._add(f"{name}1x1", in_channels, block.one)
        self._add(f"{name}3x3_reduce", in_channels, block.three_reduce)
        self._add(f"{name}3x3", block.three_reduce, block.three, kernel=3, stride=stride)
        self._add(f"{name}double_3x3_reduce", in_channels, block.double_reduce)
        self._add(f"{name}double_3x3_1", block.double_reduce, block.double, kernel=3)
        self._add(f"{name}double_3x3_2", block.double, block.double, kernel=3, stride=stride)
        if block.projection:
            self._add(f"{name}pool_proj", in_channels, block.projection)

    def _apply_layers(self, x: Tensor, *names: str) -> Tensor:
        for name in names:
            # The public graph feeds a normalization's output onward, and is right only because its ReLU is in place.
            x = F.relu(self.get_submodule(f"{name}_bn")(self.get_submodule(name)(x)), inplace=True)
        return x

    def _apply_block(self, block: _Widths, x: Tensor) -> Tensor:
        name = f"inception_{block.name}_"
        branches = [self._apply_layers(x, f"{name}1x1")] if block.one else []
        branches.append(self._apply_layers(x, f"{name}3x3_reduce", f"{name}3x3"))
        branches.append(self._apply_layers(x, f"{name}double_3x3_reduce", f"{name}double_3x3_1", f"{name}double_3x3_2"))
        if block.pool == "halve":
            branches.append(_max_pool(x, 2))
        else:
            pooled = _max_pool(x, 1) if block.pool == "max" else F.avg_pool2d(x, 3, stride=1, padding=1, ceil_mode=True)
            branches.append(self._apply_layers(pooled, f"{name}pool_proj"))
        return torch.cat(branches, dim=1)

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        x, maps = images, []
        for name, stage in self.named_stages().items():
            x = stage.run(x)
            if name.removeprefix("inception_") in self._wanted:
                maps.append(x)
        return tuple(maps)

    def named_stages(self) -> Mapping[str, Stage]:
        found = {
            "conv1": Stage(lambda x: _max_pool(self._apply_layers(x, "conv1_7x7_s2"), 2), self._layers("conv1_")),
            "conv2": Stage(  # to [B, 192, H/8, W/8]
                lambda x: _max_pool(self._apply_layers(x, "conv2_3x3_reduce", "conv2_3x3"), 2), self._layers("conv2_")
            ),
        }
        for block in _BLOCKS:
            name = f"inception_{block.name}"
            found[name] = Stage(functools.partial(self._apply_block, block), self._layers(f"{name}_"))
            if block.name == self._wanted[-1]:
                break
        return found

    def _layers(self, prefix: str) -> list[nn.Module]:
        return [module for name, module in self.named_children() if name.startswith(prefix)]
