"""Ridge regression inside a batch, differentiable in everything that goes into it."""

import torch
from torch import Tensor

from dmlbench.types import ConfigError


def check_ridge(ridge: float) -> None:
    if not ridge > 0:
        raise ConfigError(f"ridge ({ridge}) must be above 0, a batch alone determines no fit; the papers use 0.05")


def ridge_predict(inputs: Tensor, targets: Tensor, queries: Tensor, *, ridge: float) -> Tensor:
    """Fit a linear map to (inputs, targets) and apply it to the queries.

    With the rows of a half as columns, Z = inputs' [m, N], Y = targets' [D, N] and Q = queries' [m, M]:

        A = argmin_A |A Z - Y|^2 + ridge |A|^2,    A Q = Y (Z'Z + ridge I)^-1 Z' Q = Y Z' (Z Z' + ridge I)^-1 Q

    The smaller of the two Gram matrices is factored.

    Args:
        inputs: [N, m], N > 0.
        targets: [N, D].
        queries: [M, m].

    Returns:
        [M, D] in the type of ``targets``.

    Source: GSP (Gürbüz & Alatan, ICCV 2023) problem P3 and its solution; XML (the same authors), section 2.3.
    """
    z, y, q = (rows.to(torch.float64) for rows in (inputs, targets, queries))
    if len(z) <= z.shape[1]:
        predicted = (q @ z.T) @ solve_gram(z @ z.T, y, ridge=ridge)
    else:
        predicted = q @ solve_gram(z.T @ z, z.T @ y, ridge=ridge)
    return predicted.to(targets.dtype)


def solve_gram(gram: Tensor, right: Tensor, *, ridge: float) -> Tensor:
    """(gram + ridge I)^-1 right by Cholesky; NaN where the sum is not positive definite in the given precision.

    Give float64: a Gram matrix squares the condition of its rows, and the ridge has to count next to its largest entry.

    Args:
        gram: [n, n], symmetric and positive semidefinite.
        right: [n, k].
    """
    regularized = gram + ridge * torch.eye(len(gram), dtype=gram.dtype, device=gram.device)
    # The variant that raises would wait for a GPU, and would hide a NaN of the network behind an error about matrices.
    factor, failure = torch.linalg.cholesky_ex(regularized)
    solution = torch.cholesky_solve(right, factor)
    return torch.where(failure > 0, torch.nan, solution)
