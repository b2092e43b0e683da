"""GoogLeNet (Inception v1) as torchvision has it."""

from collections import OrderedDict
from collections.abc import Mapping
from pickle import UnpicklingError

from torch import Tensor, nn
from torchvision.models import GoogLeNet_Weights, googlenet

from dmlbench.models.backbones import Backbone, BatchNormFreezing, Stage
from dmlbench.models.weights import load_weights
from dmlbench.runtime import reason_of
from dmlbench.types import ConfigError


class GoogLeNet(Backbone):
    """GoogLeNet with batch normalization: 224 x 224 images to [B, 1024, 7, 7].

    Source: Szegedy et al., Going Deeper with Convolutions, 2015; torchvision, whose weights come from TensorFlow, hence
    the mean and standard deviation of 0.5.
    """

    def __init__(
        self,
        *,
        pretrained: bool,
        weights_file: str | None = None,
        batch_norm: BatchNormFreezing = "none",
        frozen_until: str | None = None,
    ) -> None:
        super().__init__((1024,), mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5))
        weights = GoogLeNet_Weights.IMAGENET1K_V1
        if pretrained and weights_file is None:
            network = googlenet(transform_input=False, init_weights=False)
            try:
                network.load_state_dict(weights.get_state_dict(progress=True, check_hash=True, weights_only=True))
            except (OSError, RuntimeError, UnpicklingError) as error:
                raise ConfigError(
                    f"googlenet: cannot load {weights.url} ({reason_of(error):.200}). Place the file anywhere and set "
                    "backbone.weights_file=<its path>."
                ) from error
        else:
            network = googlenet(transform_input=False, aux_logits=False, init_weights=weights_file is None)
        layers = OrderedDict(network.named_children())
        classifiers = ("aux1", "aux2", "avgpool", "dropout", "fc")
        self.layers = nn.Sequential(OrderedDict((name, x) for name, x in layers.items() if name not in classifiers))
        if weights_file is not None:
            load_weights(self.layers, weights_file, ignore=("aux1.", "aux2.", "fc."))
        self.freeze(batch_norm, frozen_until)

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        return (self.layers(images),)

    def named_stages(self) -> Mapping[str, Stage]:
        return {name: Stage(layer, [layer]) for name, layer in self.layers.named_children()}
