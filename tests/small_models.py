"""Random numbers, and models and poolings that are small enough for float64 and loops."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from dmlbench.models.avsl_distance import AvslDistance
from dmlbench.models.pooling.attention import Cbam, Delf
from dmlbench.models.pooling.attention_pool import AttentionPool
from dmlbench.models.pooling.base import Pooled, Pooling
from dmlbench.models.pooling.gap_histogram import GapHistogram
from dmlbench.models.pooling.gem import Gem
from dmlbench.models.pooling.gemax import Gemax
from dmlbench.models.pooling.global_pooling import Gap, GapGmp, Gmp
from dmlbench.models.pooling.gsp import Gsp, PrototypePooling
from dmlbench.models.pooling.k_max import KMax
from dmlbench.models.pooling.netvlad import NetVlad
from dmlbench.models.pooling.otp import Otp
from dmlbench.models.pooling.reweighting import Crow, Tsmk
from dmlbench.models.pooling.second_order import Gsop, Solar
from dmlbench.models.pooling.simpool import SimPool
from dmlbench.models.pooling.sliced_wasserstein import SlicedWasserstein
from dmlbench.models.pooling.transformer import Transformer
from dmlbench.models.pooling.weldon import Weldon
from dmlbench.models.projection import Projection
from dmlbench.types import ModelOutput

CHANNELS, SIZE = 8, 6
PoolingType = TypeVar("PoolingType", bound=Pooling)

# by the height and width of the map
POOLINGS: dict[str, Callable[[tuple[int, int]], Pooling]] = {
    "gap": lambda size: Gap(),
    "gmp": lambda size: Gmp(),
    "gap_gmp": lambda size: GapGmp(),
    "gem": lambda size: Gem(),
    "gem_per_channel": lambda size: Gem(num_channels=CHANNELS, per_channel=True),
    "k_max": lambda size: KMax(1),
    "delf": lambda size: Delf(CHANNELS, num_filters=5),
    "delf_paper_window": lambda size: Delf(CHANNELS, num_filters=5, conv_size=3, variant="paper"),
    "cbam": lambda size: Cbam(CHANNELS),
    "crow": lambda size: Crow(),
    "crow_paper": lambda size: Crow(variant="paper"),
    "tsmk": lambda size: Tsmk(SIZE),
    "tsmk_paper": lambda size: Tsmk(SIZE, variant="paper"),
    "weldon": lambda size: Weldon(k_max=1, k_min=1),
    "weldon_paper": lambda size: Weldon(k_max=1, k_min=1, variant="paper"),
    "gemax": lambda size: Gemax(),
    "gsop": lambda size: Gsop(SIZE, size, attention_dim=6),
    "gsop_paper": lambda size: Gsop(SIZE, size, attention_dim=6, variant="paper"),
    "solar": lambda size: Solar(CHANNELS),
    "solar_paper": lambda size: Solar(CHANNELS, channel_reduction=2, variant="paper"),
    "gsp": lambda size: Gsp(SIZE, 5, memory_rows=10),
    "gsp_residual": lambda size: Gsp(SIZE, 5, memory_rows=10, weighting="residual"),
    "gsp_gmp": lambda size: Gsp(SIZE, 5, memory_rows=10, combine="gmp"),
    "gsp_gem": lambda size: Gsp(SIZE, 5, memory_rows=10, combine="gem"),
    "gsp_weighted_gmp": lambda size: Gsp(SIZE, 5, memory_rows=10, combine="weighted_gmp"),
    "gap_histogram": lambda size: GapHistogram(SIZE, 5),
    "gap_histogram_paper": lambda size: GapHistogram(SIZE, 5, variant="paper"),
    "netvlad": lambda size: NetVlad(num_centers=3, feature_size=2),
    "netvlad_paper": lambda size: NetVlad(num_centers=3, feature_size=2, variant="paper"),
    "otp": lambda size: Otp(num_prototypes=3, feature_size=2, memory_rows=6),
    "sliced_wasserstein": lambda size: SlicedWasserstein(SIZE, num_references=3, num_slices=4),
    "attention_pool": lambda size: AttentionPool(CHANNELS, num_heads=2),
    "attention_pool_concatenate": lambda size: AttentionPool(CHANNELS, num_queries=2, num_heads=2, merge="concatenate"),
    "simpool": lambda size: SimPool(CHANNELS),
    "simpool_official": lambda size: SimPool(CHANNELS, variant="official"),
    "simpool_plain": lambda size: SimPool(CHANNELS, power=None),
    "transformer": lambda size: Transformer(SIZE),
    "transformer_sine": lambda size: Transformer(SIZE, num_layers=8, width=12, position="sine"),
}


def make_pooling(name: str, size: tuple[int, int]) -> tuple[Pooling, Projection]:
    """Prototypes start from a batch of random rows that fills the memory."""
    torch.manual_seed(0)
    pooling = POOLINGS[name](size).eval()
    if isinstance(pooling, PrototypePooling):
        pooling.observe(Pooled(randn(*pooling.memory.shape, seed=7, dtype=torch.float32)), step=1)
        assert pooling.started
    return pooling, Projection(CHANNELS, pooling.input_width(SIZE))


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))


class CountedBatches:
    """What a sampler's state is for: the number of the last batch."""

    step = 0

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step = state["step"]


def drawn(pooling: PoolingType) -> PoolingType:
    """In float64, every parameter and running statistic drawn anew, biases too."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, tensor in pooling.double().state_dict().items():
            if tensor.is_floating_point():
                tensor.copy_(torch.randn(tensor.shape, generator=generator) * 0.5)
                if name.endswith(("running_var", "power")):
                    tensor.abs_().add_(0.5)
    return pooling


def shaken(pooling: PoolingType) -> PoolingType:
    """In float64, with no weight left at 0 or 1."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in pooling.double().parameters():
            parameter += 0.3 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    return pooling


def avsl_distance(
    num_levels: int = 3, level_size: int = 24, *, top_k: int | None = None, seed: int = 0, **options: Any
) -> AvslDistance:
    """A distance in float64 with edges of both signs and reliabilities all over (0, 1)."""
    generator = torch.Generator().manual_seed(seed)
    distance = AvslDistance(num_levels, level_size, top_k=top_k or max(1, level_size // 4), **options).double()
    with torch.no_grad():
        distance.edges.copy_(torch.rand(distance.edges.shape, generator=generator) - 0.1)
        distance.alpha.copy_(torch.randn(distance.alpha.shape, generator=generator))
        distance.beta.copy_(torch.randn(distance.beta.shape, generator=generator) / 3)
        distance.updates.fill_(1)
    return distance


def avsl_rows(distance: AvslDistance, count: int, *, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    size = (count, distance.num_levels, distance.level_size)
    e = normalize(torch.randn(size, generator=generator, dtype=torch.float64), dim=-1)
    return distance.pack(e, torch.rand(size, generator=generator, dtype=torch.float64))


class SmallModel(nn.Module):
    """A convolution, given layers, a pooling and a projection; images [B, 3, 6, 6] to embeddings [B, 4] in any type."""

    def __init__(self, pooling: nn.Module, *layers: nn.Module) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Conv2d(3, 6, 3), nn.Tanh(), *layers)
        self.pooling = pooling
        self.projection = Projection(6, 4)

    def forward(self, images: Tensor) -> ModelOutput:
        pooled = self.pooling(self.backbone(images), self.projection)
        return ModelOutput(pooled.embedding, pooled.side)

    @property
    def observer(self) -> nn.Module:
        return self.pooling

    def observe(self, output: ModelOutput, *, step: int) -> None:
        self.pooling.observe(Pooled(output.embedding, output.side), step=step)
