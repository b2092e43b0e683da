"""The picture of a validation: which images it shows, and how right and wrong ones differ without their color."""

import numpy as np
import pytest
import torch
from pytorch_metric_learning.distances import LpDistance

from dmlbench.training.nearest_images import _DASH, _FRAME, _GAP, _RIGHT, _SIDE, _WRONG, draw_nearest, nearest_images
from dmlbench.types import EmbeddingSet


def made(count: int, *, seed: int, first_id: int = 100) -> EmbeddingSet:
    draw = torch.Generator().manual_seed(seed)
    rows, labels = torch.randn(count, 4, generator=draw), torch.randint(3, (count,), generator=draw)
    return EmbeddingSet(rows, labels, first_id + torch.randperm(count, generator=draw))


@pytest.mark.parametrize("with_gallery", [False, True])
@pytest.mark.parametrize("of_unit_vectors", [True, False])
def test_neighbors_are_those_of_a_naive_search_without_the_query_itself(with_gallery, of_unit_vectors) -> None:
    queries, gallery = made(30, seed=0), made(12, seed=1, first_id=500) if with_gallery else None
    distance = None if of_unit_vectors else LpDistance(normalize_embeddings=False)
    query, nearest, is_right = nearest_images(queries, gallery, distance=distance)
    assert query.shape == (5,)
    assert nearest.shape == is_right.shape == (5, 5)
    searched = gallery or queries
    for row, found, right in zip(query, nearest, is_right, strict=True):
        place = queries.ids.tolist().index(row)
        far = []
        for i in range(len(searched)):
            pair = [queries.rows[place].double(), searched.rows[i].double()]
            if of_unit_vectors:
                pair = [x / x.norm() for x in pair]
            if searched.ids[i] != row:
                far.append((float((pair[0] - pair[1]).norm()), i))
        expected = [i for _, i in sorted(far)[:5]]
        assert found.tolist() == searched.ids[expected].tolist()
        assert right.tolist() == (searched.labels[expected] == queries.labels[place]).tolist()


def test_each_image_is_in_its_place_and_wrong_ones_have_a_frame_with_gaps() -> None:
    query, nearest = np.array([1, 2]), np.array([[3, 4], [5, 6]])
    is_right = np.array([[True, False], [False, True]])

    def images(rows):
        return np.stack([np.full((32, 16, 3), 10 * row, np.uint8) for row in rows])  # higher than wide

    page = draw_nearest(query, nearest, is_right, images)
    height, width = _SIDE + 2 * _FRAME, _SIDE // 2 + 2 * _FRAME
    for line in range(2):
        for column in range(3):
            top, left = _GAP + line * (height + _GAP), _GAP + column * (width + _GAP) + 2 * _GAP * (column > 0)
            tile = page[top : top + height, left : left + width]
            row = query[line] if column == 0 else nearest[line, column - 1]
            assert (tile[_FRAME:-_FRAME, _FRAME:-_FRAME] == 10 * row).all()
            upper = tile[0]  # pixels of the frame's upper side
            if column:
                color, other = (_RIGHT, _WRONG) if is_right[line, column - 1] else (_WRONG, _RIGHT)
                share = (upper == color).all(axis=1).mean()
                assert share == 1 if is_right[line, column - 1] else 0.3 < share < 0.7
                assert not (tile == other).all(axis=2).any()
    assert height > 4 * _DASH  # there are several gaps
