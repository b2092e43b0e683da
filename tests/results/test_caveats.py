"""Caveats under tables."""

import pytest

from dmlbench.results.caveats import data_notes, mixed_code


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


def test_runs_by_different_code_are_named_with_their_number() -> None:
    assert mixed_code({"0.1": 3}) == mixed_code({}) == []
    assert mixed_code({"0123456789abcdef+changes": 3, "0.1": 1}) == [
        "MIXED CODE: 0123456789ab+changes (3 runs), 0.1 (1 run)"
    ]
