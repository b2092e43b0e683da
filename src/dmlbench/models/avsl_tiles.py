"""AVSL's distances of many pairs without a graph, in chunks of pairs whose arrays stay in the cache.

Letters: L levels, r nodes of each, Q and N images, a x b images of a chunk's two sides, P pairs.
"""

import copy
import logging
import threading
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from dmlbench.types import RunError

if TYPE_CHECKING:
    from dmlbench.models.avsl_distance import AvslDistance

_logger = logging.getLogger(__name__)

# bytes of each array of a chunk: 512 pairs of 512 nodes on a CPU (fastest when measured), enough to fill a GPU
_BUFFER_BYTES = {"cpu": 2**20, "cuda": 2**28}
_MULTIPLE = 16  # pairs of a matrix product: odd ends would be summed in another order by the product's special cases


class AvslTiles:
    """Distances of one state of an ``AvslDistance``, which later training does not change.

    A chunk of a x b pairs takes three arrays [P, r] per thread, which are reused. From below,

        b = delta-hat^(l-1) W~^T,  p^l = sigmoid((gain alpha^l c^l) c'^l + gain beta^l),
        delta-hat^l = b + p^l (delta^l - b).

    ``top`` and ``concat`` are one matrix product, in which equal images are some 1e-7 apart in float32; otherwise they
    are exactly 0 apart. A pair's distance depends on the rest of the call, and on the order of the pair, by float32
    rounding alone; ``dtype=torch.float64`` decides near ties.
    """

    _can_compile: ClassVar[bool] = True  # until it failed in this process

    def __init__(
        self,
        distance: "AvslDistance",
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        buffer_bytes: int | None = None,
        compiled: bool | None = None,
    ) -> None:
        distance.require_edges()
        dtype = dtype or distance.alpha.dtype
        with torch.inference_mode(False), torch.no_grad():
            own = copy.deepcopy(distance).to(device=device, dtype=dtype)
            self._distance = own
            self._alpha, self._beta = own.gain * own.alpha, own.gain * own.beta  # [L - 1, r]
            edges = own.normalized_edges() if own.inference == "rectified" else own.edges[:0]
            self._edges = edges.mT.contiguous()  # [L - 1, r below, r]
        self.dtype, self.device = own.alpha.dtype, own.alpha.device
        size = buffer_bytes or _BUFFER_BYTES.get(self.device.type, _BUFFER_BYTES["cpu"])
        pairs = size // (own.level_size * self.dtype.itemsize)
        self._pairs = max(_MULTIPLE, pairs // _MULTIPLE * _MULTIPLE)
        self._buffers = threading.local()
        self._compiles = (self.device.type == "cuda" if compiled is None else compiled) and own.inference == "rectified"

    @property
    def working_bytes(self) -> int:
        """Bytes of a thread's arrays, without edges and result."""
        return 3 * self._pairs * self._distance.level_size * self.dtype.itemsize

    @torch.no_grad()
    def __call__(self, queries: Tensor, gallery: Tensor) -> Tensor:
        """Distances [Q, N] of rows [Q, 2 L r] and [N, 2 L r]."""
        (e, c), (f, d) = self._levels(queries), self._levels(gallery)
        result = torch.empty(len(queries), len(gallery), dtype=self.dtype, device=self.device)
        if result.numel() == 0:
            return result
        if self._distance.inference == "top":
            return _squared_distances(e[:, -1], f[:, -1], out=result)
        if self._distance.inference == "concat":
            return _squared_distances(e.flatten(1), f.flatten(1), out=result)
        for part, place in _chunks(*result.shape, pairs=self._pairs):
            scaled = (self._alpha * c[part, 1:])[:, None]
            self._chunk(e[part, None], scaled, f[None, place], d[None, place], out=result[part, place])
        return result

    @torch.no_grad()
    def pairs(self, first: Tensor, second: Tensor) -> Tensor:
        """Distances [P] of rows [P, 2 L r], pair by pair."""
        (e, c), (f, d) = self._levels(first), self._levels(second)
        if len(e) != len(f):
            raise RunError(f"AVSL pairs: got {len(e)} and {len(f)} embeddings, expected equal numbers.")
        result = torch.empty(len(e), 1, dtype=self.dtype, device=self.device)
        for start in range(0, len(e), self._pairs):
            part = slice(start, start + self._pairs)
            x, y, certainty = (rows[part, None] for rows in (e, f, d))
            if self._distance.infers:
                self._chunk(x, (self._alpha * c[part, 1:])[:, None], y, certainty, out=result[part])
            else:
                lowest = -1 if self._distance.inference == "top" else 0
                torch.sum((x - y)[..., lowest:, :].square_(), (-2, -1), out=result[part])
        return result[:, 0]

    def _levels(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        if rows.device != self.device:
            raise RunError(f"AVSL embeddings: got device {rows.device}, expected {self.device}. Use tiles(device=...).")
        return self._distance.levels(rows.to(self.dtype))

    def _chunk(self, e: Tensor, scaled: Tensor, f: Tensor, d: Tensor, *, out: Tensor) -> None:
        """Distances ``out`` [a, b] of embeddings e and f, ``scaled`` = gain alpha c, and the second certainties d."""
        if self._compiles and AvslTiles._can_compile:
            try:
                out.copy_(_compiled()(e, scaled, f, d, self._beta, self._edges))
                return
            except torch.OutOfMemoryError:
                raise
            except Exception as error:  # any stage of the compiler raises its own; wrong rows fail below as well
                _logger.warning("torch.compile failed for AVSL distances, using slower eager mode: %s", error)
                AvslTiles._can_compile = False
        if self._distance.inference == "reliable":
            self._fill_reliable(e, scaled, f, d, out)
        else:
            self._fill_rectified(e, scaled, f, d, out)

    def _buffer(self, name: str) -> Tensor:
        if not hasattr(self._buffers, name):
            with torch.inference_mode(False):  # else it could not be written outside of it
                # zeros, as pairs that fill up a chunk are multiplied without having been written
                shape = (self._pairs, self._distance.level_size)
                setattr(self._buffers, name, torch.zeros(shape, dtype=self.dtype, device=self.device))
        return getattr(self._buffers, name)

    def _fill_rectified(self, e: Tensor, scaled: Tensor, f: Tensor, d: Tensor, out: Tensor) -> None:
        count = out.numel()
        padded = -(-count // _MULTIPLE) * _MULTIPLE
        all_nodes, product = self._buffer("nodes")[:padded], self._buffer("product")[:padded]
        nodes, below, p = (x[:count].unflatten(0, out.shape) for x in (all_nodes, product, self._buffer("p")))
        torch.sub(e[..., 0, :], f[..., 0, :], out=nodes).square_()
        for level, edges in enumerate(self._edges, start=1):
            torch.mm(all_nodes, edges, out=product)
            torch.addcmul(self._beta[level - 1], scaled[..., level - 1, :], d[..., level, :], out=p).sigmoid_()
            torch.sub(e[..., level, :], f[..., level, :], out=nodes).square_()
            torch.lerp(below, nodes, p, out=nodes)
        torch.sum(nodes, -1, out=out)

    def _fill_reliable(self, e: Tensor, scaled: Tensor, f: Tensor, d: Tensor, out: Tensor) -> None:
        nodes, p = (self._buffer(name)[: out.numel()].unflatten(0, out.shape) for name in ("nodes", "p"))
        torch.sub(e[..., -1, :], f[..., -1, :], out=nodes).square_()
        torch.addcmul(self._beta[-1], scaled[..., -1, :], d[..., -1, :], out=p).sigmoid_()
        torch.sum(nodes.mul_(p), -1, out=out)


def _chunks(queries: int, gallery: int, *, pairs: int) -> Iterator[tuple[slice, slice]]:
    """Nearly square chunks of at most ``pairs`` pairs that cover [Q, N]."""
    rows = min(queries, 2 ** ((pairs.bit_length() - 1) // 2))
    columns = min(gallery, pairs // rows)
    rows = min(queries, pairs // columns)
    for left in range(0, gallery, columns):
        for top in range(0, queries, rows):
            yield slice(top, top + rows), slice(left, left + columns)


def _rectified(e: Tensor, scaled: Tensor, f: Tensor, d: Tensor, beta: Tensor, edges: Tensor) -> Tensor:
    """``_fill_rectified`` as a function that torch.compile can fuse."""
    rectified = (e[..., 0, :] - f[..., 0, :]).square()
    for level in range(1, e.shape[-2]):
        below = rectified @ edges[level - 1]
        reliability = torch.sigmoid(beta[level - 1] + scaled[..., level - 1, :] * d[..., level, :])
        rectified = torch.lerp(below, (e[..., level, :] - f[..., level, :]).square(), reliability)
    return rectified.sum(-1)


@lru_cache(maxsize=1)
def _compiled() -> Callable[..., Tensor]:
    return torch.compile(_rectified, dynamic=True)  # one function for chunks of all sizes


def _squared_distances(x: Tensor, y: Tensor, *, out: Tensor) -> Tensor:
    torch.mm(x, y.mT, out=out)
    # vector_norm takes no array [N, D], unlike a sum of squares
    xx, yy = (torch.linalg.vector_norm(rows, dim=1).square_() for rows in (x, y))
    return out.mul_(-2).add_(xx[:, None]).add_(yy).clamp_(min=0)
