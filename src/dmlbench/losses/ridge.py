"""Ridge regression inside a batch, differentiable in everything that goes into it."""

import torch
from torch import Tensor


def ridge_predict(inputs: Tensor, targets: Tensor, queries: Tensor, *, ridge: float) -> Tensor:
    """Fit a linear map to (inputs [N, m], targets [N, D]) and apply it to the queries [M, m], for [M, D].

    With rows as columns, Z = inputs', Y = targets' and Q = queries':

        A = argmin_A |A Z - Y|^2 + ridge |A|^2,    A Q = Y (Z'Z + ridge I)^-1 Z' Q = Y Z' (Z Z' + ridge I)^-1 Q

    The smaller of the two Gram matrices is factored.

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
    """
    regularized = gram + ridge * torch.eye(len(gram), dtype=gram.dtype, device=gram.device)
    # The variant that raises would wait for a GPU, and would hide a NaN of the network behind an error about matrices.
    factor, failure = torch.linalg.cholesky_ex(regularized)
    solution = torch.cholesky_solve(right, factor)
    return torch.where(failure > 0, torch.nan, solution)
