"""Arrays of a chunk of pairs in AVSL's tiles, written again and again, and the steps from one level to the next.

Letters: P pairs, a x b of them, r nodes of a level.
"""

import threading

import torch
from torch import Tensor

MULTIPLE = 16  # pairs of a matrix product: odd ends would be summed in another order by the product's special cases


class Buffers(threading.local):
    """Arrays [P, r] of the thread that asks; they are made when it first does."""

    def __init__(
        self, pairs: int, width: int, dtype: torch.dtype, product_dtype: torch.dtype, device: torch.device
    ) -> None:
        self._sizes = dict.fromkeys(("nodes", "product", "p"), (pairs, width, dtype))
        if product_dtype != dtype:
            self._sizes |= dict.fromkeys(("rounded nodes", "rounded product"), (pairs, width, product_dtype))
        self._device = device
        self._held: dict[str, Tensor] = {}

    @property
    def bytes(self) -> int:
        return sum(pairs * width * dtype.itemsize for pairs, width, dtype in self._sizes.values())

    def _get(self, name: str) -> Tensor:
        if name not in self._held:
            *shape, dtype = self._sizes[name]
            with torch.inference_mode(False):  # else they could not be written outside of it
                # zeros, as pairs that fill up a chunk are multiplied without having been written
                self._held[name] = torch.zeros(shape, dtype=dtype, device=self._device)
        return self._held[name]

    def of_pairs(self, name: str, shape: torch.Size) -> Tensor:
        """The array's beginning as [a, b, r]."""
        return self._get(name)[: shape.numel()].unflatten(0, shape)

    def multiply(self, edges: Tensor, count: int) -> None:
        """product = nodes W~^T of the first ``count`` pairs, filled up."""
        padded = -(-count // MULTIPLE) * MULTIPLE
        nodes, product = self._get("nodes")[:padded], self._get("product")[:padded]
        if edges.dtype == nodes.dtype:
            torch.mm(nodes, edges, out=product)
            return
        rounded = self._get("rounded nodes")[:padded].copy_(nodes)
        product.copy_(torch.mm(rounded, edges, out=self._get("rounded product")[:padded]))

    def fill_nodes(self, nodes: Tensor, e: Tensor, f: Tensor) -> None:
        """``nodes`` [a, b, r] = (e - f)^2 of what broadcasts to it."""
        torch.sub(e, f, out=nodes).square_()

    def rectify(
        self, nodes: Tensor, below: Tensor, e: Tensor, scaled: Tensor, f: Tensor, d: Tensor, beta: Tensor
    ) -> None:
        """``nodes`` [a, b, r] = b + p ((e - f)^2 - b) with b = ``below`` and p = sigmoid(beta + scaled d)."""
        reliability = self.of_pairs("p", nodes.shape[:-1])
        torch.addcmul(beta, scaled, d, out=reliability).sigmoid_()
        self.fill_nodes(nodes, e, f)
        torch.lerp(below, nodes, reliability, out=nodes)
