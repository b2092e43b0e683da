"""Generalized max pooling (GeMax): the vector whose products with all features are nearly 1."""

import torch
from torch import Tensor

from dmlbench.models.pooling.base import Pooled, Pooling
from dmlbench.models.projection import Projection
from dmlbench.types import check_positive


class Gemax(Pooling):
    """project(X'a), a = (X X' + lambda I)^-1 1 for the rows X [H W, C] of a map.

    X'a is argmin_v |X v - 1|^2 + lambda |v|^2: frequent features count no more than rare ones. Solved in float64 by
    Cholesky's decomposition: squared norms of features (1e4 and more) leave float32 few digits of lambda. The public
    code inverts in float32. The weights a may be negative, hence no "weights".

    Source: Murray et al., Interferences in Match Kernels, TPAMI 2017 (generalized max
    pooling, dual form); yetigurbuz/generalized-sum-pooling (tensorflow).
    """

    def __init__(self, *, regression_lambda: float = 1.0) -> None:
        super().__init__()
        check_positive(regression_lambda=regression_lambda)
        self.regression_lambda = regression_lambda

    def forward(self, x: Tensor, project: Projection) -> Pooled:
        with torch.autocast(x.device.type, enabled=False):
            rows = x.flatten(2).double()  # X', [B, C, n]
            gram = torch.bmm(rows.transpose(1, 2), rows)  # [B, n, n]
            gram = gram + self.regression_lambda * torch.eye(gram.shape[1], dtype=gram.dtype, device=gram.device)
            # cholesky_ex does not wait for the device to check definiteness, which the ridge ensures
            factor = torch.linalg.cholesky_ex(gram).L
            ones = rows.new_ones(rows.shape[0], rows.shape[2], 1)
            pooled = torch.bmm(rows, torch.cholesky_solve(ones, factor))[:, :, 0]  # [B, C]
            pooled = pooled.to(torch.promote_types(x.dtype, torch.float32))
        return Pooled(project(pooled))
