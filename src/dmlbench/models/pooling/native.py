"""The pooling that the backbone was trained with: class token, attention pooling, or the average."""

from torch import Tensor

from dmlbench.models.pooling.base import Pooled, Pooling
from dmlbench.models.projection import Projection
from dmlbench.types import ConfigError


class Native(Pooling):
    """project(v) of the vector v of the backbone's own pooling (see ``Backbone.native``).

    ViT, DINOv2 and CLIP of timm: the class token after the final norm (SigLIP: its attention pooling); convolutional
    networks: mostly the average, and the layers, if any, between it and the classifier.
    """

    needs = "native"

    def forward(self, x: Tensor, project: Projection) -> Pooled:
        if x.shape[2:] != (1, 1):
            raise ConfigError(f"native pooling: got a map of {tuple(x.shape)}, expected a vector. Use pooling=gap.")
        return Pooled(project(x.flatten(1)))
