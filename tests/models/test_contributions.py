"""How much each location counts in an embedding, against naive loops; what `dmlbench explain` draws."""

import pytest
import torch

from dmlbench.models.pooling.gap_histogram import GapHistogram
from dmlbench.models.pooling.gem import Gem
from dmlbench.models.pooling.global_pooling import GapGmp, share_of_largest
from dmlbench.models.pooling.gsp import Gsp
from dmlbench.models.pooling.netvlad import NetVlad
from dmlbench.models.pooling.otp import Otp
from dmlbench.models.projection import Projection
from dmlbench.models.transport import clip_norm


@pytest.mark.parametrize("k", [1, 2, 12])
def test_share_of_largest_counts_the_channels_that_chose_a_place(k: int) -> None:
    x = torch.randn(2, 5, 3, 4, generator=torch.Generator().manual_seed(0))
    expected = torch.zeros(2, 3, 4)
    for b in range(2):
        for channel in x[b]:
            threshold = sorted(channel.flatten().tolist(), reverse=True)[k - 1]
            expected[b] += (channel >= threshold).float() / (5 * k)
    torch.testing.assert_close(share_of_largest(x, k), expected)


def test_gem_counts_powers() -> None:
    x = torch.tensor([[[[1.0, 2.0]], [[3.0, 0.0]]]])
    shares = Gem(power=2.0).contributions(x, Projection(2, 2))
    torch.testing.assert_close(shares, torch.tensor([[[(1 / 5 + 1) / 2, (4 / 5 + 0) / 2]]]))


def test_gap_gmp_counts_half_the_average_and_half_the_maximum() -> None:
    x = torch.tensor([[[[1.0, 2.0], [5.0, 0.0]], [[9.0, 0.0], [4.0, 0.0]]]])  # largest at (1, 0) and at (0, 0)
    shares = GapGmp().contributions(x, Projection(2, 2))
    torch.testing.assert_close(shares, torch.tensor([[[3 / 8, 1 / 8], [3 / 8, 1 / 8]]]))


def test_prototypes_of_codebooks_are_those_of_the_largest_share() -> None:
    torch.manual_seed(0)
    x, project = torch.randn(2, 5, 3, 4), Projection(5, 6)
    histogram = GapHistogram(6, 4)
    found = histogram.nearest_prototypes(x, project)
    one_pixel = histogram(x[:, :, 1:2, 2:3], project).side["histogram"]  # of a map of one pixel: its own shares
    assert found[:, 1, 2].tolist() == one_pixel.argmax(dim=1).tolist()
    vlad = NetVlad(num_centers=3, feature_size=6)
    rows = project(x)[0, :, 1, 2].detach()
    scores = [float((w @ rows + b).detach()) for w, b in zip(vlad.assignment_weight, vlad.assignment_bias, strict=True)]
    assert vlad.nearest_prototypes(x, project)[0, 1, 2] == scores.index(max(scores))
    otp = Otp(num_prototypes=3, feature_size=6, memory_rows=6)
    assert otp.nearest_prototypes(x, project) is None
    otp.observe(otp(torch.randn(6, 5, 3, 4), project), step=1)
    nearest = otp.nearest_prototypes(x, project)
    assert nearest is not None
    assert nearest.shape == (2, 3, 4)


def test_nearest_prototypes_by_a_loop_once_they_have_started() -> None:
    torch.manual_seed(0)
    pooling, project = Gsp(6, 4, memory_rows=8), Projection(5, 6)
    x = torch.randn(2, 5, 3, 4)
    assert pooling.nearest_prototypes(x, project) is None
    pooling.observe(pooling(torch.randn(8, 5, 3, 4), project), step=1)
    found = pooling.nearest_prototypes(x, project)
    assert found is not None
    features, prototypes = project(x), clip_norm(pooling.prototypes)
    for b in range(2):
        for i in range(3):
            for j in range(4):
                distances = (prototypes - clip_norm(features[b, :, i, j])).norm(dim=1)
                assert found[b, i, j] == distances.argmin()
