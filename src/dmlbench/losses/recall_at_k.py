"""A differentiable stand-in for recall at k."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import normalize

from dmlbench.device_copies import to_device
from dmlbench.losses.base import WholeBatchLoss
from dmlbench.types import ConfigError, check_at_least, check_positive


class RecallAtKSurrogate(WholeBatchLoss):
    """One minus recall at k with both of its steps replaced by sigmoids, averaged over several k and all queries.

    Every row of the batch is a query q; P are the other rows of its class. With cosines s:
    rank(q, x) = 1 + sum over z != x of sigmoid((s_qz - s_qx) / rank_temperature)            for x in P
    recall_k(q) = min(k, sum over P of sigmoid((k - rank(q, x)) / T_k)) / min(k, |P|)
    loss = mean over q of (1 - mean over k of recall_k(q)).

    In the public code z may be the query itself (``count_query``), which lifts every rank by about one; in the paper it
    is not. A k above the batch counts as the batch. Queries without positives are left out; without any other the loss
    is 0.

    With ``simix``, each pair (x, x') of one class adds the virtual image a x + (1 - a) x' to its class, a uniform in
    [0, 1], whose similarities are the mixtures of theirs. Virtual images are queries and items as all others. The
    paper's batches of 4,000 are embedded in parts: ``fit.forward_batch``.

    Source: Patel, Tolias and Matas 2022, "Recall@k surrogate loss with large batches and similarity mixup"; code
    yash0307/RecallatK_surrogate ed052029, src/losses.py and src/mixup.py.
    """

    labels_on_host = True  # how many pairs there are decides shapes

    def __init__(
        self,
        k: Sequence[int] = (1, 2, 4, 8, 16),
        k_temperatures: Sequence[float] = (1, 2, 4, 8, 16),
        *,
        rank_temperature: float = 0.01,
        count_query: bool = True,
        simix: bool = False,
    ) -> None:
        super().__init__()
        check_at_least(1, k=min(k, default=0))
        check_positive(rank_temperature=rank_temperature, k_temperatures=min(k_temperatures, default=0))
        if len(k_temperatures) != len(k):
            raise ConfigError(
                f"k_temperatures: got {list(k_temperatures)}, expected one for each of the {len(k)} values of k."
            )
        self.k = tuple(k)
        self.k_temperatures = tuple(k_temperatures)
        self.rank_temperature = rank_temperature
        self.count_query = count_query
        self.simix = simix

    def of_batch(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        batch = len(labels)
        rows = normalize(embeddings)
        labels = labels.cpu()
        if self.simix:
            first, second = torch.where((labels[:, None] == labels).triu(1))
            rows = torch.cat([rows, _mixed(rows, first, second)])
            labels = torch.cat([labels, labels[first]])
        s = rows @ rows.T  # [N, N], N = B without virtual images
        same = (labels[:, None] == labels).fill_diagonal_(False)
        query, positive = (to_device(x, s.device) for x in torch.where(same))  # [P] each
        at = torch.arange(len(query), device=s.device)
        above = torch.sigmoid((s[query] - s[query, positive, None]) / self.rank_temperature)  # [P, N]
        counts = torch.ones_like(above)
        counts[at, positive] = 0
        if not self.count_query:
            counts[at, query] = 0
        rank = 1 + (above * counts).sum(1)  # [P]

        k, temperature = (
            to_device(torch.tensor(x, dtype=s.dtype), s.device)
            for x in ([min(k, batch) for k in self.k], self.k_temperatures)
        )
        soft = torch.sigmoid((k - rank[:, None]) / temperature)  # [P, K]
        found = torch.zeros(len(rows), len(k), device=s.device, dtype=s.dtype).index_add(0, query, soft)  # [N, K]
        num_positive = to_device(same.sum(1, keepdim=True), s.device)
        recall = torch.minimum(found, k) / torch.minimum(num_positive.clamp(min=1), k)
        counted = (num_positive[:, 0] > 0).to(s.dtype)
        return (counted * (1 - recall.mean(1))).sum() / counted.sum().clamp(min=1)


def _mixed(rows: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """Random mixtures [M, D] of pairs of rows [B, D]."""
    first, second = to_device(first, rows.device), to_device(second, rows.device)
    share = torch.rand(len(first), 1, dtype=rows.dtype, device=rows.device)
    return share * rows[first] + (1 - share) * rows[second]
