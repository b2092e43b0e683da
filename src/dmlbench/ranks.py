"""One run over the processes (ranks) of torchrun: each embeds a part of the batch, all take the loss of the whole."""

import contextlib
import datetime
import logging
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dmlbench.runtime import derive_seed, select_device
from dmlbench.types import ConfigError, EmbeddingSet, RunError, num_launched

_T = TypeVar("_T")
_LONGEST_WAIT = datetime.timedelta(hours=6)
"""For rank 0 to score a validation. The end of a process breaks its connections, for which nothing waits this long."""


@dataclass(frozen=True)
class Ranks:
    """The processes of a run. With one process nothing is copied and every method returns its argument.

    Random states, losses, memories and optimizers are the same on all ranks; images and the graph of the network are
    each rank's part. Rank 0 alone writes files and scores.
    """

    rank: int = 0
    size: int = 1

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def same(self, value: _T) -> _T:
        """Rank 0's value of a Python object."""
        if self.size == 1:
            return value
        values = [value]
        with _peers():
            dist.broadcast_object_list(values, src=0, device=torch.device("cpu"))
        return values[0]

    def largest(self, number: int) -> int:
        """The largest of the ranks' numbers; no rank waits for its device."""
        if self.size == 1:
            return number
        found = torch.tensor(number)
        with _peers():
            dist.all_reduce(found, dist.ReduceOp.MAX)
        return int(found)

    def gathered(self, part: Tensor) -> Tensor:
        """Rows [size * P, ...] of all ranks, from P rows each, without a graph."""
        if self.size == 1:
            return part
        part = part.detach().contiguous()
        parts = [torch.empty_like(part) for _ in range(self.size)]
        with _peers():
            dist.all_gather(parts, part)
        return torch.cat(parts)

    def own(self, whole: Tensor) -> Tensor:
        """This rank's rows of ``gathered``."""
        return whole.tensor_split(self.size)[self.rank]

    def copy_from_first(self, tensors: Iterable[Tensor]) -> None:
        """Overwrite tensors by rank 0's."""
        if self.size > 1:
            with _peers(), torch.no_grad():
                for tensor in tensors:
                    dist.broadcast(tensor, src=0)

    def sum_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        """Add up the gradients of all ranks, which have gradients of the same parameters."""
        if self.size == 1:
            return
        gradients = [p.grad for p in parameters if p.grad is not None]
        for dtype in sorted({gradient.dtype for gradient in gradients}, key=str):
            alike = [gradient for gradient in gradients if gradient.dtype == dtype]
            flat = torch.cat([gradient.flatten() for gradient in alike])
            with _peers():
                dist.all_reduce(flat)
            for gradient, summed in zip(alike, flat.split([gradient.numel() for gradient in alike]), strict=True):
                gradient.copy_(summed.view_as(gradient))

    @contextlib.contextmanager
    def first_only(self, parameters: Sequence[nn.Parameter]) -> Iterator[None]:
        """Gradients of the block, which are the same on all ranks, count once: other ranks have zeros."""
        before = [p.grad for p in parameters]
        if not self.is_first:
            for p in parameters:
                p.grad = None
        yield
        if not self.is_first:
            for p, gradient in zip(parameters, before, strict=True):
                p.grad = gradient if gradient is not None or p.grad is None else torch.zeros_like(p)

    @contextlib.contextmanager
    def own_draws(self, number: int, device: torch.device) -> Iterator[None]:
        """Random numbers of the block differ between ranks; afterwards all ranks are in the same state again."""
        if self.size == 1:
            yield
            return
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            torch.manual_seed(derive_seed("rank", self.rank, number, torch.initial_seed()))
            yield

    def rows_of_batches(self, count: int, batch_size: int) -> slice:
        """This rank's rows of an evaluation: whole batches, so that embeddings have the bits of one process."""
        batches = -(-count // batch_size)
        if batches < self.size:
            return slice(0, count)  # every rank embeds all
        return slice(*(min(count, batches * r // self.size * batch_size) for r in (self.rank, self.rank + 1)))

    def all_embeddings(self, own: EmbeddingSet, count: int, batch_size: int) -> EmbeddingSet:
        """The embeddings of ``rows_of_batches`` of all ranks, in order."""
        if self.size == 1 or len(own) == count:
            return own
        found = []
        for part in (own.rows, own.labels, own.ids):
            whole = torch.empty(count, *part.shape[1:], dtype=part.dtype)
            for rank in range(self.size):
                rows = whole[Ranks(rank, self.size).rows_of_batches(count, batch_size)]
                if rank == self.rank:
                    rows.copy_(part)
                with _peers():
                    dist.broadcast(rows, src=rank)
            found.append(whole)
        return EmbeddingSet(*found)


ONE = Ranks()


class PeerEnded(RunError):
    """Another process of the run ended, and says why."""


@contextlib.contextmanager
def _peers() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        if any(word in str(error).lower() for word in ("gloo/transport", "connection", "ncclremoteerror")):
            raise PeerEnded(
                "Another process of this run stopped; its output says why. Start the same torchrun command again to "
                "resume."
            ) from error
        raise


@contextlib.contextmanager
def joined_ranks(processes: int, name: str) -> Iterator[tuple[Ranks, torch.device]]:
    """Join the processes of torchrun; yields them and this rank's device, of the one that ``device=<name>`` selects.

    Raises:
        ConfigError: unless torchrun started ``processes``.
    """
    if (launched := num_launched()) != processes:
        raise ConfigError(
            f"fit.processes: got {processes}, expected {launched}, the number of processes that run. Start them with "
            f"torchrun --nproc_per_node={processes}."
        )
    device = select_device(name)
    if processes == 1:
        yield Ranks(), device
        return
    backend = "gloo"
    if device.type == "cuda":
        here, count = int(os.environ["LOCAL_WORLD_SIZE"]), torch.cuda.device_count()
        if here > count or name not in ("auto", "cuda"):
            raise ConfigError(
                f"torchrun: got {here} processes on {name}, expected at most {count}, one per GPU. Set device=cuda."
            )
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        backend = "cpu:gloo,cuda:nccl"
    store, rank, size = next(dist.rendezvous("env://"))
    arrived = f"arrived/{os.environ['TORCHELASTIC_RESTART_COUNT']}"
    store.add(arrived, 1)
    while store.add(arrived, 0) < size:  # here a signal ends the wait, not in PyTorch's own
        time.sleep(0.1)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=_LONGEST_WAIT)
    ranks = Ranks(rank, size)
    if not ranks.is_first:
        logging.getLogger("dmlbench").setLevel(logging.ERROR)
    yield ranks, device
    dist.destroy_process_group()  # after an error the process ends, which others notice
