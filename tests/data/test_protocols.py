"""Protocols against the class-id lists of the papers' code, and the invariants of every split."""

import dataclasses

import numpy as np
import pytest

from dmlbench.data.protocols import Conventional, HeldOut, Hpo, Mlrc, MlrcMusgrave, TwoStage, check_split, class_index
from dmlbench.types import ConfigError, DataError, ImageTable, IntArray, RetrievalSet

CUB, CARS, SOP = (200, 100), (196, 98), (22_634, 11_318)


def table_of(num_classes: int, num_train: int, *, images: int = 2) -> ImageTable:
    labels = np.repeat(np.arange(num_classes), images)
    return ImageTable(
        name="synthetic",
        root="",
        paths=np.array([str(i) for i in range(len(labels))]),
        labels=labels,
        class_names=tuple(str(c) for c in range(num_classes)),
        role=np.where(labels < num_train, "train", "test"),
    )


def in_shop_like(num_train: int, num_test: int) -> ImageTable:
    table = table_of(num_train + num_test, num_train)
    role = table.role.astype("<U7").copy()
    test = np.flatnonzero(role == "test")
    role[test[0::2]], role[test[1::2]] = "query", "gallery"
    return dataclasses.replace(table, role=role)


def classes(table: ImageTable, rows: IntArray) -> list[int]:
    return np.unique(table.labels[rows]).tolist()


def span(first: int, last: int) -> list[int]:
    return list(range(first, last + 1))


VALIDATION = {  # protocol and size -> validation classes of each fold
    (Mlrc, *CUB): [(75, 99), (50, 74), (25, 49), (0, 24)],
    (Mlrc, *CARS): [(73, 97), (49, 72), (24, 48), (0, 23)],
    (Mlrc, *SOP): [(8488, 11_317), (5659, 8487), (2829, 5658), (0, 2828)],
    (MlrcMusgrave, *CUB): [(75, 99), (0, 24), (25, 49), (50, 74)],
    (MlrcMusgrave, *CARS): [(74, 97), (0, 23), (25, 48), (49, 72)],
    (MlrcMusgrave, *SOP): [(8488, 11_316), (0, 2828), (2829, 5657), (5658, 8486)],
}


@pytest.mark.parametrize(("kind", "num_classes", "num_train"), VALIDATION)
@pytest.mark.parametrize("fold", range(4))
def test_folds_of_mlrc_are_those_of_the_papers_code(kind, num_classes: int, num_train: int, fold: int) -> None:
    table = table_of(num_classes, num_train)
    split = kind().split(table, fold=fold)
    # Musgrave: 11,317 of SOP's 22,634, although its published train half has 11,318
    half = num_train if kind is Mlrc else num_classes // 2
    validation = span(*VALIDATION[kind, num_classes, num_train][fold])
    assert classes(table, split.val.query) == validation
    assert classes(table, split.train) == sorted(set(range(half)) - set(validation))
    assert split.test is not None
    assert classes(table, split.test.query) == span(half, num_classes - 1)
    assert (split.val.gallery, split.test.gallery, split.val_is_test, split.fold) == (None, None, False, fold)


@pytest.mark.parametrize(("size", "never"), [(CUB, []), (CARS, [24, 73]), (SOP, [8487])])
def test_musgrave_never_validates_on_a_few_classes(size: tuple[int, int], never: list[int]) -> None:
    table = table_of(*size)
    seen = np.concatenate([table.labels[MlrcMusgrave().split(table, fold=k).val.query] for k in range(4)])
    assert sorted(set(range(size[0] // 2)) - set(seen.tolist())) == never


def test_in_shop_validates_within_the_fold_and_tests_against_the_gallery() -> None:
    table = in_shop_like(3997, 3985)
    for fold, (first, last) in enumerate([(2997, 3996), (1998, 2996), (999, 1997), (0, 998)]):
        split = Mlrc().split(table, fold=fold)
        assert classes(table, split.val.query) == span(first, last)
        assert split.val.gallery is None
        assert split.test is not None
        assert split.test.gallery is not None
        assert set(table.role[split.test.query]) == {"query"}
        assert set(table.role[split.test.gallery]) == {"gallery"}
    with pytest.raises(ConfigError, match="Use protocol=mlrc"):
        MlrcMusgrave().split(table, fold=0)
    assert Conventional().split(table, fold=0).val.gallery is not None
    assert Hpo().split(table, fold=0).val.gallery is None


def test_conventional_selects_on_the_test_half_and_says_so() -> None:
    table = table_of(*CARS)
    split = Conventional().split(table, fold=0)
    assert split.val_is_test
    assert split.val is split.test
    assert classes(table, split.train) == span(0, 97)


@pytest.mark.parametrize("part", range(5))
def test_hpo_holds_out_one_of_five_parts_and_never_sees_the_test_half(part: int) -> None:
    table = table_of(*CARS)
    edges = [0, 19, 39, 58, 78, 98]
    split = Hpo(held_out_part=part).split(table, fold=0)
    assert split.test is None
    assert classes(table, split.val.query) == span(edges[part], edges[part + 1] - 1)
    assert len(classes(table, split.train)) + len(classes(table, split.val.query)) == 98
    assert Hpo().held_out_part == 4


def test_held_out_classes_select_and_the_test_half_is_tested() -> None:
    table = table_of(*CARS)
    split = HeldOut().split(table, fold=0)
    assert classes(table, split.train) == span(0, 48)
    assert split.val is not None and classes(table, split.val.query) == span(49, 97)
    assert split.test is not None and classes(table, split.test.query) == span(98, 195)
    assert not split.val_is_test
    assert classes(table, HeldOut(num_parts=5).split(table, fold=0).val.query) == span(78, 97)


def test_two_stages_train_on_half_and_on_all_train_classes() -> None:
    table = table_of(*CUB)
    first, second = (TwoStage(stage=stage).split(table, fold=0) for stage in (1, 2))
    assert classes(table, first.train) == span(0, 49)
    assert first.val is not None
    assert classes(table, first.val.query) == span(50, 99)
    assert first.test is None
    assert classes(table, second.train) == span(0, 99)
    assert second.val is None
    assert second.test is not None
    assert not second.val_is_test
    assert classes(table, second.test.query) == span(100, 199)
    assert (TwoStage(stage=1).aggregation, TwoStage(stage=2).aggregation) == ("mean", "mean_of_test")


@pytest.mark.parametrize(
    ("kind", "setting", "message"),
    [
        (TwoStage, {"stage": 3}, "stage of protocol 'two_stage': got 3, expected 1 or 2"),
        (Mlrc, {"num_folds": 1}, "num_folds of protocol 'mlrc': got 1, expected 2 to 1000"),
        (Mlrc, {"num_folds": 10**7}, "num_folds of protocol 'mlrc': got 10000000, expected 2 to 1000"),
        (Conventional, {"num_repeats": 0}, "num_repeats"),
        (Hpo, {"held_out_part": 5}, "held_out_part: got 5, expected 0 to 4"),
        (HeldOut, {"num_parts": 1}, r"num_parts of protocol .* got 1, expected 2 to 1000"),
    ],
)
def test_settings_out_of_range_are_named(kind, setting: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        kind(**setting)


def test_a_class_of_one_image_is_legal_unless_no_query_has_a_positive() -> None:
    labels = np.array([0, 0, 1, 1, 2, 2, 3, 4, 4, 5])
    table = dataclasses.replace(
        table_of(6, 4), labels=labels, role=np.where(labels < 4, "train", "test"), paths=np.arange(10).astype(str)
    )
    assert Mlrc().split(table, fold=1).test is not None
    with pytest.raises(DataError, match="no query in the validation set"):
        Mlrc().split(table, fold=0)  # class 3 alone, with one image


def test_check_split_finds_what_overlaps() -> None:
    table = table_of(8, 4)
    good = Mlrc().split(table, fold=0)
    assert good.test is not None
    assert check_split(good, table) is good
    for change, message in [
        ({"train": np.append(good.train, good.val.query[0])}, "training and validation sets .* share 1 classes"),
        ({"train": np.append(good.train, good.test.query[0])}, "training and test sets .* share 1 classes"),
        ({"val": good.test}, "validation and test sets .* share"),
        ({"train": np.zeros(0, dtype=np.int64)}, "training set .* is empty"),
        ({"val": RetrievalSet(np.zeros(0, dtype=np.int64))}, "validation set .* is empty"),
        ({"train": np.append(good.train, good.train[0])}, "has a row twice"),
        ({"val": RetrievalSet(good.val.query, good.val.query)}, "has a row twice"),
    ]:
        with pytest.raises(DataError, match=message):
            check_split(dataclasses.replace(good, **change), table)


def test_class_index_renumbers_training_labels() -> None:
    table = table_of(8, 4)
    assert class_index(table, MlrcMusgrave().split(table, fold=1).train).tolist() == [-1, 0, 1, 2, -1, -1, -1, -1]


def test_a_data_set_without_test_rows_is_refused_except_by_hpo() -> None:
    table = table_of(10, 10)
    for protocol in (Mlrc(), Conventional()):
        with pytest.raises(DataError, match=r"(test|validation) set of .* is empty"):
            protocol.split(table, fold=0)
    assert Hpo().split(table, fold=0).test is None
