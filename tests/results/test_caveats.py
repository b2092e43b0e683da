"""Caveats under tables."""

import pytest

from dmlbench.results.caveats import data_notes


@pytest.mark.parametrize(
    ("former", "now"),
    [
        (
            "images re-encoded: colors of 64 of 64 are subsampled, of few published ones are",
            "images re-encoded (4:2:0 JPEG)",
        ),
        (
            "images rescaled to 224 x 224 pixels, cut or not: boxes of cars_annos.mat lie outside of 63 of 64",
            "images rescaled to 224 x 224 pixels",
        ),
    ],
)
def test_notes_of_earlier_versions_are_printed_in_the_words_of_now(former: str, now: str) -> None:
    assert data_notes({"data_notes": ["a subset: 1 of 2 images", former, now]}) == ["a subset: 1 of 2 images", now]
    assert data_notes({}) == []
