"""AVSL's compiled steps: against float64 formulas over the whole range, and against the operations they stand for."""

import pytest
import torch
from numpy.testing import assert_allclose

from dmlbench import machine_code
from dmlbench.models.avsl_buffers import Buffers
from dmlbench.models.avsl_distance import AvslDistance
from dmlbench.models.avsl_tiles import AvslTiles
from dmlbench.runtime import single_threaded_torch

pytest.importorskip("numba", reason="extra fast")

from dmlbench.models import compiled_avsl

UNIT = 2.0**-24
SHAPES = {
    "cross": ((3, 1), (1, 5)),
    "one query": ((1, 1), (1, 5)),
    "one item": ((3, 1), (1, 1)),
    "pairs": ((7, 1), (7, 1)),
    "one pair": ((1, 1), (1, 1)),
}


def normal(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_the_sigmoid_is_right_up_to_two_roundings_of_1_at_any_argument() -> None:
    x = torch.cat([torch.linspace(-40, 40, 500_001), torch.tensor([-1e30, -200.0, -1e-30, 0.0, 1e-30, 200.0, 1e30])])
    nodes, one, zero = torch.empty(1, 1, len(x)), torch.ones(1, 1, len(x)), torch.zeros(1, 1, len(x))
    # p ((1 - 0)^2 - 0) is p itself
    compiled_avsl.rectify(nodes, zero, one, zero, zero, zero, x)
    assert_allclose(nodes[0, 0], torch.sigmoid(x.double()), rtol=0, atol=2 * UNIT)
    assert bool((nodes[0, 0].diff()[:500_000] >= -2 * UNIT).all())


@pytest.mark.parametrize("kind", SHAPES)
@pytest.mark.parametrize("width", [1, 16, 37])
def test_steps_are_their_formulas_and_the_operations(kind: str, width: int) -> None:
    (a, _), (_, b) = first, second = SHAPES[kind]
    # a level out of several, as tiles pass them: rows that do not lie one after the other
    e, scaled = (normal(*first, 3, width, seed=s)[..., 1, :] for s in (0, 1))
    f, d = (normal(*second, 3, width, seed=s)[..., 1, :] for s in (2, 3))
    below, beta = normal(a, b, width, seed=4).square(), normal(width, seed=5)
    p = torch.sigmoid(beta.double() + scaled.double() * d.double())
    squares = (e.double() - f.double()).square()
    expected = below.double() + p * (squares - below.double())
    for steps in (compiled_avsl, Buffers(16, width, torch.float32, torch.float32, torch.device("cpu"))):
        nodes = torch.full((a, b, width), torch.nan)
        steps.fill_nodes(nodes, e, f)
        assert_allclose(nodes, squares, rtol=8 * UNIT)
        steps.rectify(nodes, below, e, scaled, f, d, beta)
        assert_allclose(nodes, expected, rtol=1e-6, atol=1e-5)


def test_what_is_not_a_number_stays_so() -> None:
    one, nan = torch.ones(1, 1, 2), torch.tensor([[[1.0, torch.nan]]])
    nodes = torch.empty(1, 1, 2)
    compiled_avsl.rectify(nodes, one, one, nan, one, one, torch.zeros(2))
    assert nodes.isnan().tolist() == [[[False, True]]]


def trained(size: int = 32) -> tuple[AvslDistance, torch.Tensor]:
    """A distance of three levels with edges, and rows [40, 6 size]."""
    distance = AvslDistance(3, size, top_k=8).requires_grad_(False)
    distance.edges.copy_(normal(2, size, size, seed=0).abs())
    distance.alpha.copy_(normal(2, size, seed=3))
    distance.updates.fill_(1)
    embeddings = torch.nn.functional.normalize(normal(40, 3, size, seed=1), dim=-1)
    return distance, distance.pack(embeddings, normal(40, 3, size, seed=2).sigmoid())


def test_tiles_use_compiled_steps_for_float32_of_one_thread_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    distance, rows = trained()
    called, rectify = [], compiled_avsl.rectify
    monkeypatch.setattr(compiled_avsl, "rectify", lambda *given: called.append(1) or rectify(*given))
    tiles = AvslTiles(distance)
    with single_threaded_torch():
        tiles(rows[:1], rows[:1])  # tries the steps out
        called.clear()
        compiled = tiles(rows, rows)
        assert called
        assert bool((compiled.diagonal() == 0).all())
        assert torch.equal(tiles(rows[3:4], rows)[0], compiled[3])
        assert torch.equal(tiles.pairs(rows, rows.flip(0)), compiled.flip(1).diagonal())
        called.clear()
        exact = AvslTiles(distance, dtype=torch.float64)(rows, rows)
        relative, absolute = distance.float32_error(rows, rows)
        assert bool(((compiled - exact).abs() <= relative * exact + absolute).all())
        assert_allclose(compiled, exact, rtol=2e-6, atol=1e-12)
        monkeypatch.setattr(machine_code, "load", lambda module, *, task: None)
        assert_allclose(tiles(rows, rows), compiled, rtol=2e-6)
    monkeypatch.undo()
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    monkeypatch.setattr(compiled_avsl, "rectify", lambda *given: called.append(1))
    assert_allclose(tiles(rows, rows), compiled, rtol=2e-6)
    assert not called
