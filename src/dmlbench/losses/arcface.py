"""ArcFace and sub-center ArcFace with gradients that stay finite where an embedding meets its class's vector."""

import math
from functools import partial
from typing import Any

import torch
from pytorch_metric_learning.losses import ArcFaceLoss
from torch import Tensor

from dmlbench.losses.initialization import init_class_vectors
from dmlbench.types import check_at_least


class ArcFace(ArcFaceLoss):
    """Softmax over classes of scale * cosine, with a margin added to the angle of the right class.

    The right class's logit is scale * cos(theta + m) where theta <= pi - m, else scale * (cos theta - m sin m); loss =
    mean of the cross entropy. PML's class goes through acos, whose slope is infinite at a cosine of 1 and -1 and gives
    NaN; here cos(theta + m) = cos theta cos m - sin theta sin m, and the slope of sin theta is taken as 0 where
    sin^2 theta < 1e-7. Apart from there value and gradient are PML's.

    With ``clamp_negative``, cosines below 0 count as 0 and have no gradient.

    Source: Deng et al. 2019, "ArcFace", eq. 3; the branch for large angles as in PML and the authors' code;
    ``clamp_negative``: Confusezius/Characterizing_Generalization_in_DeepMetricLearning e8a4171c, criteria/arcface.py.
    """

    def __init__(
        self,
        num_classes: int,
        embedding_size: int,
        *,
        init: str = "normal",
        init_std: float | None = 1.0,
        clamp_negative: bool = False,
        **kwargs: Any,
    ) -> None:
        initialize = partial(init_class_vectors, init=init, init_std=init_std, class_dim=1)  # of W [D, C]
        kwargs["weight_init_func"] = kwargs.get("weight_init_func") or initialize
        super().__init__(num_classes, embedding_size, **kwargs)
        self.clamp_negative = clamp_negative

    def get_cosine(self, embeddings: Tensor) -> Tensor:
        cosine: Tensor = super().get_cosine(embeddings)
        return cosine.clamp(min=0) if self.clamp_negative else cosine

    def modify_cosine_of_target_classes(self, cosine_of_target_classes: Tensor) -> Tensor:
        cosine = cosine_of_target_classes.clamp(-1, 1)
        sine = (1 - cosine.square()).clamp(min=1e-7).sqrt()
        shifted = cosine * math.cos(self.margin) - sine * math.sin(self.margin)
        beyond = cosine - self.margin * math.sin(self.margin)
        return torch.where(cosine >= math.cos(math.pi - self.margin), shifted, beyond)


class SubCenterArcFace(ArcFace):
    """ArcFace with ``sub_centers`` vectors for each class, of which the one nearest to an embedding counts.

    Source: Deng et al. 2020, "Sub-center ArcFace", eq. 4; vectors in the order of PML's SubCenterArcFaceLoss.
    """

    def __init__(self, num_classes: int, embedding_size: int, *, sub_centers: int = 3, **kwargs: Any) -> None:
        check_at_least(1, sub_centers=sub_centers)
        super().__init__(num_classes * sub_centers, embedding_size, **kwargs)
        self.num_classes = num_classes
        self.sub_centers = sub_centers

    def get_cosine(self, embeddings: Tensor) -> Tensor:
        return super().get_cosine(embeddings).unflatten(1, (-1, self.sub_centers)).amax(2)
