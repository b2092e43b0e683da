"""ArcFace with a gradient that stays finite where an embedding meets its class's vector."""

import math

import torch
from pytorch_metric_learning.losses import ArcFaceLoss
from torch import Tensor


class ArcFace(ArcFaceLoss):
    """Softmax over classes of scale * cosine, with a margin added to the angle of the right class.

    The right class's logit is scale * cos(theta + m) where theta <= pi - m, else scale * (cos theta - m sin m); loss =
    mean of the cross entropy. PML's class goes through acos, whose slope is infinite at a cosine of 1 and -1 and gives
    NaN; here cos(theta + m) = cos theta cos m - sin theta sin m, and the slope of sin theta is taken as 0 where
    sin^2 theta < 1e-7. Apart from there value and gradient are PML's.

    Source: Deng et al. 2019, "ArcFace", eq. 3; the branch for large angles as in PML and the authors' code.
    """

    def modify_cosine_of_target_classes(self, cosine_of_target_classes: Tensor) -> Tensor:
        cosine = cosine_of_target_classes.clamp(-1, 1)
        sine = (1 - cosine.square()).clamp(min=1e-7).sqrt()
        shifted = cosine * math.cos(self.margin) - sine * math.sin(self.margin)
        beyond = cosine - self.margin * math.sin(self.margin)
        return torch.where(cosine >= math.cos(math.pi - self.margin), shifted, beyond)
