"""Cross-batch memory (XBM): compare a batch not only with itself but with the batches before it."""

import inspect
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from dmlbench.losses.base import BatchLabels, Counters
from dmlbench.types import ConfigError, check_at_least, check_positive


class CrossBatchMemory(Counters):
    """Add to a loss of pairs or triplets the same loss between the batch and a memory of embeddings.

    total = loss(batch, batch) + weight * loss(batch, memory). The memory is detached and holds the batch, normalized or
    not; an image is not paired with its own row. ``observe`` fills the memory from step ``start_step + 1`` on, before
    the loss. In evaluation mode, and until the memory takes part, the value is that of the wrapped loss.

    The wrapped loss takes ``ref_emb`` and ``ref_labels``, as PML's losses of pairs and triplets do. ``memory_miner``, a
    PML miner, chooses from the memory's part; losses of triplets want one where the memory is large.

    variant, when the memory takes part (s the step, from 1):
        paper: from s = start_step + 1 on, with what has been stored by then.
        gsp: as soon as it is full, hence from s = start_step + memory_size / B on.
    placement, where a batch is stored:
        ring: over the oldest rows, wrapping around the end (PML, GSP; the queue that the paper describes).
        official: as the paper's code; a batch that no longer fits behind the last one overwrites the last B rows and
            the next one begins at row 0. One slot is written twice a round, and its first batch is lost early.

    Source: Wang et al. 2020, algorithm 1; msight-tech/research-xbm 223ecdc2, modeling/xbm.py and engine/trainer.py;
    GSP supplement 1.6.7 and yetigurbuz/generalized-sum-pooling b765b889, tensorflow/framework/losses/xbm.py.
    """

    labels_on_host = True  # as the loss may want them
    rows: Tensor
    labels: Tensor

    def __init__(
        self,
        loss: nn.Module,
        embedding_size: int,
        memory_size: int,
        *,
        weight: float = 1.0,
        start_step: int = 1000,
        variant: Literal["paper", "gsp"] = "paper",
        placement: Literal["official", "ring"] = "official",
        normalize_rows: bool = True,
        memory_miner: nn.Module | None = None,
    ) -> None:
        super().__init__()
        check_at_least(1, memory_size=memory_size)
        check_at_least(0, start_step=start_step)
        check_positive(weight=weight)
        _require_references(loss, embedding_size)
        if memory_miner is not None:
            try:
                inspect.signature(memory_miner.forward).bind(*range(4))
            except TypeError:
                raise ConfigError(
                    f"memory_miner: got {type(memory_miner).__name__}, which chooses within a batch. Use a PML miner."
                ) from None
        self.loss = loss
        self.memory_miner = memory_miner
        self.memory_size = memory_size
        self.weight = weight
        self.start_step = start_step
        self.variant = variant
        self.placement = placement
        self.normalize_rows = normalize_rows
        self.register_buffer("rows", torch.zeros(memory_size, embedding_size))
        self.register_buffer("labels", torch.zeros(memory_size, dtype=torch.long))
        self.register_count("pointer")
        self.register_count("filled")
        self._own: Tensor | None = None  # [B] slots of the batch that was observed last
        self.register_load_state_dict_post_hook(_forget_batch)

    @property
    def is_active(self) -> bool:
        """Whether the memory takes part."""
        return self.count_of("filled") >= (self.memory_size if self.variant == "gsp" else 1)

    @torch.no_grad()
    def observe(self, embeddings: Tensor, labels: Tensor, *, step: int) -> None:
        """Store a batch; ``step`` counts from 1."""
        batch = len(embeddings)
        if batch > self.memory_size:
            raise ConfigError(f"memory_size: got {self.memory_size}, expected at least the batch size ({batch}).")
        if step <= self.start_step:
            return
        start, filled = self.count_of("pointer"), self.count_of("filled")
        end = start + batch
        if self.placement == "official" and end > self.memory_size:
            start, end = self.memory_size - batch, 0
            filled = self.memory_size
        else:
            filled = max(filled, min(end, self.memory_size))
            if self.placement == "ring":
                end %= self.memory_size
        self._own = (start + torch.arange(batch, device=embeddings.device)) % self.memory_size
        self.rows[self._own] = (normalize(embeddings) if self.normalize_rows else embeddings).to(self.rows.dtype)
        self.labels[self._own] = labels
        self.set_count("pointer", end)
        self.set_count("filled", filled)

    def forward(self, embeddings: Tensor, labels: Tensor, indices_tuple: tuple[Tensor, ...] | None = None) -> Tensor:
        wanted = BatchLabels.of(labels, embeddings.device).wanted_by(self.loss)
        value: Tensor = self.loss(embeddings, wanted, indices_tuple)
        if not self.training or not self.is_active:
            return value
        return value + self.weight * self.memory_part(embeddings, labels)

    def memory_part(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        """The loss between the batch that was observed last and the memory, without its weight."""
        own = self._own
        if own is None or len(own) != len(embeddings):
            raise ValueError("cross-batch memory: call observe() for a batch before computing its loss.")
        batch_labels = BatchLabels.of(labels, own.device)
        filled = self.count_of("filled")
        rows, memory_labels = self.rows[:filled], self.labels[:filled]  # [F, D], [F]
        if self.memory_miner is not None:
            mined = self.memory_miner(embeddings, batch_labels.wanted_by(self.memory_miner), rows, memory_labels)
            pairs = _without_own(mined, own)
        else:
            positive = torch.empty(len(own), len(rows), dtype=torch.int8, device=own.device)  # [B, F]
            # Of 32 bits into bytes: on a CPU several times faster than of 64 bits into booleans.
            torch.eq(batch_labels.on_device[:, None].int(), memory_labels[None, :].int(), out=positive)
            positive = positive.view(torch.bool)
            negative = ~positive
            positive[torch.arange(len(own), device=own.device), own] = False
            if self.normalize_rows and (of_masks := getattr(self.loss, "of_masks", None)):  # without lists of pairs
                return of_masks(normalize(embeddings), rows, positive, negative)
            pairs = (*torch.where(positive), *torch.where(negative))
        return self.loss(embeddings, batch_labels.wanted_by(self.loss), pairs, ref_emb=rows, ref_labels=memory_labels)


def _forget_batch(module: CrossBatchMemory, _: object) -> None:
    module._own = None


def _without_own(indices: tuple[Tensor, ...], own: Tensor) -> tuple[Tensor, ...]:
    """Drop the pairs and triplets whose positive is the anchor's own row."""
    anchor, positive, *rest = indices
    keep = positive != own[anchor]
    return anchor[keep], positive[keep], *([rest[0][keep]] if len(rest) == 1 else rest)


def _require_references(loss: nn.Module, embedding_size: int) -> None:
    """Try the loss on references once: PML's losses all have the argument, and those with proxies refuse it."""
    rows = torch.eye(4, embedding_size)
    labels = torch.tensor([0, 0, 1, 1])
    pairs = (torch.tensor([0]), torch.tensor([1]), torch.tensor([0]), torch.tensor([2]))
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            loss(rows, labels, pairs, ref_emb=rows.clone(), ref_labels=labels.clone())
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"{type(loss).__name__} cannot compare a batch with a memory ({error}). Wrap a loss of pairs or triplets, "
            "such as contrastive_c1."
        ) from error
