"""The hyperbolic head: embeddings in the Poincare ball, compared by their geodesic distance."""

from pytorch_metric_learning.distances import BaseDistance
from torch import Tensor

from dmlbench.hyperbolic import PoincareDistance, riemannian, to_ball
from dmlbench.models.projection import Init, Projection
from dmlbench.types import check_positive


class HyperbolicHead(Projection):
    """A linear head whose output is mapped to the Poincare ball (``to_ball``), with its geodesic distance.

    Losses and miners of distances get ``PoincareDistance``. Losses of cosines take the directions of the points.

    Source: Ermolov et al., Hyperbolic Vision Transformers, CVPR 2022, section 3.1 to 3.3; htdt/hyp_metric c89de049,
    model.py. ``riemannian_gradient``: Kim et al., HIER, CVPR 2023; tjddus9597/HIER-CVPR23 3986a744, models/model.py.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        curvature: float = 0.1,
        clip_radius: float | None = 2.3,
        riemannian_gradient: bool = False,
        bias: bool = True,
        layer_norm: bool = False,
        init: Init = "orthogonal",
    ) -> None:
        """
        Args:
            curvature: c > 0; the ball's radius is 1 / sqrt(c).
            clip_radius: length that vectors are cut to before they are mapped; None: not at all.
            riemannian_gradient: scale gradients by the inverse of the ball's metric.
            bias, layer_norm, init: as of ``Projection``.
        """
        super().__init__(in_features, out_features, bias=bias, layer_norm=layer_norm, init=init)
        check_positive(curvature=curvature)
        if clip_radius is not None:
            check_positive(clip_radius=clip_radius)
        self.curvature = curvature
        self.clip_radius = clip_radius
        self.riemannian_gradient = riemannian_gradient

    def finished(self, embedding: Tensor) -> Tensor:
        point = to_ball(embedding, curvature=self.curvature, clip_radius=self.clip_radius)
        return riemannian(point, self.curvature) if self.riemannian_gradient else point

    def make_distance(self) -> BaseDistance:
        return PoincareDistance(self.curvature)
