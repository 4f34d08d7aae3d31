"""Averaging of views to an image's scores, against loops that average one number at a time."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prelunet.evaluator.engine.scores import (
    average_views,
    best_ranks,
    check_finite,
    nine_places,
    nine_windows,
    ranks_of,
    restrict,
    shortest_decimal,
    softmax,
    top_k,
    view_weights,
)
from prelunet.evaluator.errors import ContractError
from prelunet.evaluator.protocols import View

VIEWS = [View(30, False), View(30, True), View(44, False), View(44, True), View(60, False)]  # one scale without mirror
WINDOWS = [(1, 2), (1, 2), (3, 5), (3, 5), (4, 7)]
RNG = np.random.default_rng(3)
LOGITS = RNG.normal(0, 3, (5, 4)).astype(np.float32)
SCORES = (np.exp(LOGITS) / np.exp(LOGITS).sum(axis=1, keepdims=True)).astype(np.float32)


def test_scale_weights_average_mirror_pairs_then_scales() -> None:
    expected = []
    for index in range(4):
        scales = []
        for scale in (30, 44, 60):
            pair = [float(SCORES[v, index]) for v, view in enumerate(VIEWS) if view.scale == scale]
            scales.append(sum(pair) / len(pair))
        expected.append(sum(scales) / 3)
    scores = average_views(SCORES, LOGITS, view_weights(VIEWS, WINDOWS, "scale"), "softmax")
    assert scores.dtype == np.float32
    np.testing.assert_allclose(scores, expected, rtol=1e-7)  # one rounding to float32


def test_view_weights_count_every_window_of_every_view_alike() -> None:
    expected = []
    for index in range(4):
        windows = [float(SCORES[v, index]) for v, (rows, columns) in enumerate(WINDOWS) for _ in range(rows * columns)]
        expected.append(sum(windows) / len(windows))
    scores = average_views(SCORES, LOGITS, view_weights(VIEWS, WINDOWS, "view"), "softmax")
    np.testing.assert_allclose(scores, expected, rtol=1e-7)  # one rounding to float32


def test_logit_averaging_takes_the_softmax_of_the_mean_logits() -> None:
    weights = view_weights(VIEWS, WINDOWS, "scale")
    means = [sum(float(weights[v]) * float(LOGITS[v, index]) for v in range(5)) for index in range(4)]
    total = sum(math.exp(mean) for mean in means)
    scores = average_views(SCORES, LOGITS, weights, "logit")
    np.testing.assert_allclose(scores, [math.exp(mean) / total for mean in means], rtol=1e-6)  # float32
    assert not np.allclose(scores, average_views(SCORES, LOGITS, weights, "softmax"), rtol=1e-2)


@pytest.mark.parametrize(
    ("count", "places"), [(1, [0]), (2, [0, 1]), (3, [0, 1, 2]), (4, [0, 1, 3]), (5, [0, 2, 4]), (16, [0, 7, 15])]
)
def test_the_nine_are_the_first_the_earlier_middle_and_the_last_of_each_axis(count: int, places: list[int]) -> None:
    assert nine_places(count) == places


@pytest.mark.parametrize(
    ("grid", "chosen"),
    [
        ((1, 1), [(0, 0)]),
        ((1, 5), [(0, 0), (0, 2), (0, 4)]),
        ((6, 1), [(0, 0), (2, 0), (5, 0)]),
        ((2, 3), [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]),
        ((4, 7), [(0, 0), (0, 3), (0, 6), (1, 0), (1, 3), (1, 6), (3, 0), (3, 3), (3, 6)]),
    ],
)
def test_nine_windows_average_the_corners_the_sides_middles_and_the_center(
    grid: tuple[int, int], chosen: list[tuple[int, int]]
) -> None:
    logits = np.random.default_rng(1).normal(0, 5, (*grid, 4))
    window_scores = softmax(logits).astype(np.float32)
    (rows, columns), scores, of_log = nine_windows(window_scores)
    assert rows * columns == len(chosen)
    assert scores.dtype == of_log.dtype == np.float32
    np.testing.assert_allclose(scores, sum(softmax(logits[place]) for place in chosen) / len(chosen), rtol=1e-6)
    # The logits come back but for one number, which is why only differences between classes are compared.
    mean = sum(logits[place] for place in chosen) / len(chosen)
    np.testing.assert_allclose(of_log - of_log[0], mean - mean[0], atol=1e-5)  # float32 of numbers up to 20


def test_a_window_score_of_zero_leaves_finite_logits_and_the_class_last() -> None:
    window_scores = np.array([[[0.25, 0.75, 0.0]], [[0.5, 0.5, 0.0]], [[0.5, 0.5, 0.0]]], np.float32)
    _, _, logits = nine_windows(window_scores)
    assert np.isfinite(logits).all()
    assert logits.argmin() == 2
    assert logits[2] == pytest.approx(math.log(1.1754944e-38))


def test_softmax_of_large_logits_does_not_overflow() -> None:
    np.testing.assert_allclose(softmax([[1000.0, 1000.0, -1000.0]]), [[0.5, 0.5, 0.0]])


def test_ties_go_to_the_lower_class_index() -> None:
    scores = np.array([0.1, 0.3, 0.2, 0.3, 0.1], np.float32)
    assert [index for index, _ in top_k(scores, 5)] == [1, 3, 2, 0, 4]
    assert ranks_of(scores[None].repeat(5, axis=0), np.arange(5)).tolist() == [4, 1, 3, 2, 5]


@given(st.lists(st.sampled_from([0.0, 0.125, 0.25, 0.5, 1.0]), min_size=1, max_size=12))
def test_the_rank_of_a_class_is_its_place_in_the_top_k(values: list[float]) -> None:
    scores = np.array(values, np.float32)
    best = top_k(scores, len(values))
    rows = scores[None].repeat(len(values), axis=0)
    assert ranks_of(rows, np.array([index for index, _ in best])).tolist() == list(range(1, len(values) + 1))
    assert [score for _, score in best] == sorted(values, reverse=True)


def test_top_k_of_fewer_classes_gives_all_of_them() -> None:
    assert top_k(np.array([0.25, 0.75], np.float32), 5) == [(1, 0.75), (0, 0.25)]


@given(st.floats(0, 1, width=32))
def test_the_shortest_decimal_reads_back_as_the_same_float32(score: float) -> None:
    assert np.float32(shortest_decimal(float(score))) == np.float32(score)


def test_the_shortest_decimal_of_a_tenth_is_a_tenth() -> None:
    assert shortest_decimal(float(np.float32(0.1))) == 0.1


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_score_that_is_no_number_is_the_models_fault_and_never_a_prediction(bad: float) -> None:
    with pytest.raises(ContractError, match=r"not finite \(NaN\) for this image.*prelunet verify"):
        check_finite(np.array([0.5, bad], np.float32), "this image")


def test_the_ranks_of_many_rows_are_the_places_of_their_classes_in_the_sorted_row() -> None:
    rng = np.random.default_rng(2)
    scores = rng.integers(0, 5, (200, 7)).astype(np.float32) / 4  # many ties
    labels = rng.integers(0, 7, 200)
    expected = [
        sorted(range(7), key=lambda index, row=row: (-row[index], index)).index(label) + 1
        for row, label in zip(scores.tolist(), labels.tolist(), strict=True)
    ]
    assert ranks_of(scores, labels).tolist() == expected
    pairs = zip(scores, labels, strict=True)
    assert [ranks_of(row[None], label[None]).tolist() for row, label in pairs] == [[rank] for rank in expected]


def test_the_best_rank_of_several_classes_is_the_place_of_the_first_of_them_in_the_sorted_row() -> None:
    rng = np.random.default_rng(8)
    scores = rng.integers(0, 5, (300, 7)).astype(np.float32)  # many ties
    truths = [tuple(rng.permutation(7)[: rng.integers(1, 5)].tolist()) for _ in scores]
    orders = [sorted(range(7), key=lambda index, row=row: (-row[index], index)) for row in scores]  # type: ignore[misc]
    expected = [1 + min(map(order.index, truth)) for order, truth in zip(orders, truths, strict=True)]
    assert best_ranks(scores, truths).tolist() == expected


def test_restricted_scores_sum_to_1_and_other_classes_are_out() -> None:
    scores = np.random.default_rng(0).dirichlet(np.ones(9), size=4).astype(np.float32)
    found = restrict(scores, (1, 4, 5))
    assert found.dtype == np.float32
    np.testing.assert_allclose(found[:, [1, 4, 5]].sum(axis=1), 1, rtol=1e-6)  # float32
    assert np.isneginf(found[:, [0, 2, 3, 6, 7, 8]]).all()
    assert restrict(scores, None) is scores
    assert [len(top_k(row, 5)) for row in found] == [3] * 4
    np.testing.assert_array_equal(restrict(scores[2:3], (1, 4, 5)), found[2:3])  # also in the last bit


def test_ties_go_to_the_lower_index_and_classes_that_all_score_0_are_alike() -> None:
    scores = np.array([[0.5, 0.1, 0.2, 0.2], [1, 0, 0, 0]], np.float32)
    found = restrict(scores, (1, 2, 3))
    assert [index for index, _ in top_k(found[0], 3)] == [2, 3, 1]
    assert top_k(found[1], 2) == [(1, pytest.approx(1 / 3)), (2, pytest.approx(1 / 3))]


def test_refused_images_keep_rows_that_are_no_numbers() -> None:
    rows = np.full((1, 4), np.nan, np.float32)
    assert np.isnan(restrict(rows, (0, 2))[:, [0, 2]]).all()
