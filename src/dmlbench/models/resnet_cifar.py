"""ResNet20 for small images (CIFAR): three stages of 16, 32 and 64 channels, shortcuts without parameters."""

from collections.abc import Mapping, Sequence

import torch.nn.functional as F
from torch import Tensor, nn

from dmlbench.models.backbones import Backbone, BatchNormFreezing, Stage, select_levels
from dmlbench.models.weights import load_weights
from dmlbench.types import ConfigError

# Published means and standard deviations of CIFAR-10's training images.
CIFAR_MEAN = (0.4914, 0.4822, 0.4465)
CIFAR_STD = (0.2470, 0.2435, 0.2616)

_WIDTHS = (16, 32, 64)
_BLOCKS_PER_STAGE = 3


class _Block(nn.Module):
    """Two 3x3 convolutions and a shortcut that drops pixels and appends zero channels (He et al.'s option A)."""

    def __init__(self, in_channels: int, channels: int) -> None:
        super().__init__()
        self.stride = 1 if in_channels == channels else 2
        self.conv1 = nn.Conv2d(in_channels, channels, 3, stride=self.stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.bn1(self.conv1(x)), inplace=True)
        out = self.bn2(self.conv2(out))
        if self.stride == 1:
            return F.relu(out + x, inplace=True)
        added = (out.shape[1] - x.shape[1]) // 2
        return F.relu(out + F.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, added, added)), inplace=True)


class ResNet20(Backbone):
    """ResNet20 of He et al. 2016, section 4.2: 32 x 32 images to [B, 64, 8, 8].

    Parameters are named as in akamaster/pytorch_resnet_cifar10, whose classifier ``linear`` is ignored. Its checkpoints
    need ImageNet's ``mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225)``.

    Source: He et al., Deep Residual Learning for Image Recognition, 2016.
    """

    def __init__(
        self,
        *,
        stem_stride: int = 1,
        weights_file: str | None = None,
        batch_norm: BatchNormFreezing = "none",
        frozen_until: str | None = None,
        out_levels: Sequence[int] = (2,),
        mean: Sequence[float] = CIFAR_MEAN,
        std: Sequence[float] = CIFAR_STD,
    ) -> None:
        if stem_stride not in (1, 2):
            raise ConfigError(f"stem_stride: got {stem_stride}, expected 1 or 2.")
        levels = select_levels(out_levels, len(_WIDTHS))
        super().__init__([_WIDTHS[level] for level in levels], mean=mean, std=std)
        self._levels = levels
        self.conv1 = nn.Conv2d(3, _WIDTHS[0], 3, stride=stem_stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(_WIDTHS[0])
        in_channels = _WIDTHS[0]
        for number, width in enumerate(_WIDTHS, start=1):
            blocks = [_Block(in_channels if block == 0 else width, width) for block in range(_BLOCKS_PER_STAGE)]
            self.add_module(f"layer{number}", nn.Sequential(*blocks))
            in_channels = width
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight)
        if weights_file is not None:
            load_weights(self, weights_file, ignore=("linear.",))
        self.freeze(batch_norm, frozen_until)

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        x, maps = images, []
        for stage in self.named_stages().values():
            x = stage.run(x)
            maps.append(x)
        return tuple(maps[level + 1] for level in self._levels)

    def named_stages(self) -> Mapping[str, Stage]:
        found = {"conv1": Stage(lambda x: F.relu(self.bn1(self.conv1(x)), inplace=True), [self.conv1, self.bn1])}
        for level in range(self._levels[-1] + 1):
            layer = self.get_submodule(name := f"layer{level + 1}")
            found[name] = Stage(layer, [layer])
        return found
