"""Transformer, SimPool and attention pooling by learned queries against loops, PyTorch's layers and timm's."""

import math
from collections.abc import Callable, Sequence
from functools import partial

import pytest
import torch
from small_models import CHANNELS, SIZE, randn, shaken
from timm.layers.attention_pool import AttentionPoolLatent
from timm.layers.other_pool import SimPool2d
from torch import Tensor, nn

from dmlbench.models.pooling.attention_pool import AttentionPool, mean_weights
from dmlbench.models.pooling.base import Pooling
from dmlbench.models.pooling.simpool import SimPool
from dmlbench.models.pooling.transformer import EncoderLayer, Transformer
from dmlbench.models.projection import Projection


def projection_for(pooling: Pooling) -> Projection:
    torch.manual_seed(1)
    return Projection(CHANNELS, pooling.input_width(SIZE)).double()


# --- the oracle: one image, one token, one head, one number after the other


def norm(token: Tensor, layer: nn.LayerNorm) -> Tensor:
    mean = sum(token) / len(token)
    variance = sum((value - mean) ** 2 for value in token) / len(token)
    return (token - mean) / (variance + 1e-6) ** 0.5 * layer.weight + layer.bias


def linear(token: Tensor, layer: nn.Linear | Projection) -> Tensor:
    rows = [sum(w * value for w, value in zip(row, token, strict=True)) for row in layer.weight]
    return torch.stack(rows) if layer.bias is None else torch.stack(rows) + layer.bias


def attention(query: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor], heads: int) -> tuple[Tensor, Tensor]:
    """What one query gets, and its attention averaged over heads, [N]."""
    pooled, shares = [], []
    size, value_size = len(query) // heads, len(values[0]) // heads
    for head in range(heads):
        part = slice(head * size, (head + 1) * size)
        logits = [sum(query[part] * key[part]) / math.sqrt(size) for key in keys]
        powers = [logit.exp() for logit in logits]
        share = torch.stack([power / sum(powers) for power in powers])
        part = slice(head * value_size, (head + 1) * value_size)
        pooled.append(sum(a * value[part] for a, value in zip(share, values, strict=True)))
        shares.append(share)
    return torch.cat(pooled), sum(shares) / heads


def pixels_of(image: Tensor) -> list[Tensor]:
    return [image[:, i, j] for i in range(image.shape[1]) for j in range(image.shape[2])]


def naive_attention_pool(pooling: AttentionPool, x: Tensor, project: Projection) -> tuple[Tensor, Tensor]:
    embeddings, weights = [], []
    for image in x:
        pixels = [norm(pixel, pooling.norm) for pixel in pixels_of(image)]
        keys, values = [linear(p, pooling.key) for p in pixels], [linear(p, pooling.value) for p in pixels]
        got = [attention(query, keys, values, pooling.num_heads) for query in pooling.queries]
        weights.append(sum(share for _, share in got) / len(got))
        if pooling.merge == "mean":
            embeddings.append(linear(sum(part for part, _ in got) / len(got), project))
        else:
            embeddings.append(torch.cat([linear(part, project) for part, _ in got]))
    return torch.stack(embeddings), torch.stack(weights)


def naive_simpool(pooling: SimPool, x: Tensor, project: Projection) -> tuple[Tensor, Tensor]:
    normed = [[norm(pixel, pooling.norm) for pixel in pixels_of(image)] for image in x]
    embeddings, weights = [], []
    for image, values in zip(x, normed, strict=True):
        pixels = pixels_of(image)
        query = linear(sum(pixels) / len(pixels), pooling.query)
        keys = [linear(value, pooling.key) for value in values]
        if pooling.power is None:
            pooled, share = attention(query, keys, values, 1)
        else:
            seen = values if pooling.variant == "paper" else [value for others in normed for value in others]
            smallest = min(number for value in seen for number in value)
            powers = [(value - smallest + pooling.epsilon) ** pooling.power for value in values]
            pooled, share = attention(query, keys, powers, 1)
            pooled = pooled ** (1 / pooling.power)
        embeddings.append(linear(pooled, project))
        weights.append(share)
    return torch.stack(embeddings), torch.stack(weights)


def naive_layer(layer: EncoderLayer, tokens: list[Tensor]) -> tuple[list[Tensor], Tensor]:
    """All tokens renewed, and the attention of the first one."""
    normed = [norm(token, layer.norm_attention) for token in tokens]
    keys, values = [linear(t, layer.key) for t in normed], [linear(t, layer.value) for t in normed]
    renewed, first = [], None
    for token, own in zip(tokens, normed, strict=True):
        got, share = attention(linear(own, layer.query), keys, values, layer.num_heads)
        first = share if first is None else first
        token = token + linear(got, layer.out)
        hidden = linear(norm(token, layer.norm_mlp), layer.expand)
        hidden = hidden * 0.5 * (1 + torch.erf(hidden / math.sqrt(2)))
        renewed.append(token + linear(hidden, layer.contract))
    assert first is not None
    return renewed, first


def naive_transformer(pooling: Transformer, x: Tensor, project: Projection) -> tuple[Tensor, Tensor]:
    embeddings, weights = [], []
    for image in x:
        pixels = [linear(pixel, project) for pixel in pixels_of(image)]
        if pooling.position == "sine":
            places = [(i, j) for i in range(image.shape[1]) for j in range(image.shape[2])]
            pixels = [pixel + naive_sine(i, j, len(pixel)) for pixel, (i, j) in zip(pixels, places, strict=True)]
        tokens = [pooling.class_token, *pixels]
        for layer in pooling.layers:
            assert isinstance(layer, EncoderLayer)
            tokens, share = naive_layer(layer, tokens)
        pooled = norm(tokens[0], pooling.norm)
        embeddings.append(pooled if pooling.head is None else linear(pooled, pooling.head))
        weights.append(share[1:] / sum(share[1:]))
    return torch.stack(embeddings), torch.stack(weights)


def naive_sine(row: int, column: int, features: int) -> Tensor:
    quarter = features // 4
    angles = [10_000 ** (-k / quarter) for k in range(quarter)]
    numbers = [wave(place * angle) for place in (row, column) for wave in (math.sin, math.cos) for angle in angles]
    return torch.tensor(numbers, dtype=torch.float64)


CASES: list[tuple[Callable[[], Pooling], Callable[..., tuple[Tensor, Tensor]]]] = [
    (lambda: AttentionPool(CHANNELS, num_queries=1, num_heads=2), naive_attention_pool),
    (lambda: AttentionPool(CHANNELS, num_queries=3, num_heads=4), naive_attention_pool),
    (lambda: AttentionPool(CHANNELS, num_queries=3, num_heads=2, merge="concatenate"), naive_attention_pool),
    (lambda: SimPool(CHANNELS), naive_simpool),
    (lambda: SimPool(CHANNELS, power=1.25), naive_simpool),
    (lambda: SimPool(CHANNELS, power=None), naive_simpool),
    (lambda: SimPool(CHANNELS, variant="official"), naive_simpool),
    (lambda: Transformer(SIZE, num_heads=2), naive_transformer),
    (lambda: Transformer(SIZE, num_layers=2, num_heads=3, mlp_ratio=1.5), naive_transformer),
    (lambda: Transformer(SIZE, num_heads=2, width=4, position="sine"), naive_transformer),
]


@pytest.mark.parametrize(("build", "naive"), CASES)
def test_value_weights_and_all_gradients_equal_naive_loops(
    build: Callable[[], Pooling], naive: Callable[..., tuple[Tensor, Tensor]]
) -> None:
    torch.manual_seed(0)
    pooling = shaken(build())
    project = projection_for(pooling)
    x = randn(2, CHANNELS, 2, 3).requires_grad_()
    leaves = [x, project.weight, *pooling.parameters()]
    pooled = pooling(x, project)
    embedding, weights = naive(pooling, x, project)
    torch.testing.assert_close(pooled.embedding, embedding, atol=1e-10, rtol=1e-9)
    torch.testing.assert_close(pooled.side["weights"], weights.view(2, 2, 3), atol=1e-10, rtol=1e-9)
    cotangents = randn(*embedding.shape, seed=2), randn(2, 6, seed=3)
    grads = torch.autograd.grad((embedding * cotangents[0]).sum() + (weights * cotangents[1]).sum(), leaves)
    loss = (pooled.embedding * cotangents[0]).sum() + (pooled.side["weights"].flatten(1) * cotangents[1]).sum()
    for own, expected in zip(torch.autograd.grad(loss, leaves), grads, strict=True):
        torch.testing.assert_close(own, expected, atol=1e-8, rtol=1e-7)


# --- other people's layers


@pytest.mark.parametrize("queries", [1, 3])
def test_attention_pool_equals_the_layer_of_timm_without_its_output_layers(queries: int) -> None:
    pooling = shaken(AttentionPool(CHANNELS, num_queries=queries, num_heads=2))
    theirs = AttentionPoolLatent(
        CHANNELS, out_features=0, num_heads=2, q_proj=False, latent_len=queries, pool_type="avg"
    ).double()
    with torch.no_grad():
        theirs.latent.copy_(pooling.queries[None])
        theirs.kv.weight.copy_(torch.cat([pooling.key.weight, pooling.value.weight]))
        key_bias = torch.randn(CHANNELS)  # changes nothing
        theirs.kv.bias.copy_(torch.cat([key_bias, pooling.value.bias]))
        x = randn(3, CHANNELS, 2, 4)
        expected = theirs(pooling.norm(x.flatten(2).transpose(1, 2)))
        project = projection_for(pooling)
        torch.testing.assert_close(pooling(x, project).embedding, project(expected))


def test_simpool_without_a_power_equals_the_layer_of_timm() -> None:
    pooling = shaken(SimPool(CHANNELS, power=None))
    theirs = SimPool2d(CHANNELS, norm_layer=partial(nn.LayerNorm, eps=1e-6)).double()
    state = pooling.state_dict()
    names = {"q.weight": "query.weight", "k.weight": "key.weight"}
    theirs.load_state_dict({name: state[names.get(name, name)] for name in theirs.state_dict()})
    x, project = randn(3, CHANNELS, 2, 4), projection_for(pooling)
    torch.testing.assert_close(pooling(x, project).embedding, project(theirs(x)))


@pytest.mark.parametrize("num_layers", [1, 4])
def test_transformer_equals_the_encoder_of_pytorch(num_layers: int) -> None:
    torch.manual_seed(0)
    pooling = shaken(Transformer(SIZE, num_layers=num_layers, num_heads=3))
    project = projection_for(pooling)
    x = randn(3, CHANNELS, 2, 4)
    tokens = torch.cat([pooling.class_token.expand(3, 1, -1), project(x).flatten(2).transpose(1, 2)], dim=1)
    for own in pooling.layers:
        assert isinstance(own, EncoderLayer)
        layer = nn.TransformerEncoderLayer(
            SIZE, 3, 4 * SIZE, 0.0, "gelu", 1e-6, batch_first=True, norm_first=True, dtype=torch.float64
        )
        named = {"self_attn.out_proj": own.out, "linear1": own.expand, "linear2": own.contract}
        named |= {"norm1": own.norm_attention, "norm2": own.norm_mlp}
        for kind in ("weight", "bias"):
            joined = torch.cat([getattr(part, kind) for part in (own.query, own.key, own.value)])
            layer.get_parameter(f"self_attn.in_proj_{kind}").data.copy_(joined)
            for name, part in named.items():
                layer.get_parameter(f"{name}.{kind}").data.copy_(getattr(part, kind))
        tokens = layer(tokens)
    torch.testing.assert_close(pooling(x, project).embedding, pooling.norm(tokens[:, 0]), atol=1e-9, rtol=1e-9)


# --- what the methods claim


def test_transformer_is_blind_to_the_order_of_pixels_unless_it_has_positions() -> None:
    x = randn(2, CHANNELS, 3, 4)
    mirrored = x.flip(3)
    for position, blind in (("none", True), ("sine", False)):
        pooling = shaken(Transformer(8, position=position))
        torch.manual_seed(1)
        project = Projection(CHANNELS, 8).double()
        same = torch.allclose(pooling(x, project).embedding, pooling(mirrored, project).embedding, atol=1e-9)
        assert same is blind


def test_only_the_official_simpool_depends_on_the_other_images_of_a_batch() -> None:
    x, other = randn(1, CHANNELS, 3, 4), torch.zeros(1, CHANNELS, 3, 4, dtype=torch.float64)
    other[:, 0] = -1.0  # one channel against all others is the least that a layer norm can return
    for variant, alone in (("paper", True), ("official", False)):
        pooling = SimPool(CHANNELS, variant=variant).double()
        project = projection_for(pooling)
        together = pooling(torch.cat([x, other]), project).embedding[:1]
        assert torch.allclose(together, pooling(x, project).embedding, atol=1e-9) is alone


def test_weights_stay_finite_when_all_attention_goes_to_the_class_token() -> None:
    logits = torch.tensor([0.0, -1000.0, -1001.0]).view(1, 1, 1, 3)
    weights = mean_weights(logits, height=1, width=2)
    torch.testing.assert_close(weights[0, 0], torch.tensor([0.0, -1.0]).softmax(dim=0))
