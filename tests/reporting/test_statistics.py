import math
import random
import statistics
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from statsmodels.stats.proportion import proportion_confint

from prelunet.evaluator.reporting.statistics import (
    BINS,
    HISTOGRAM_BINS,
    calibration,
    error_percent,
    macro_error,
    macro_interval,
    rank_summary,
    risk_coverage,
    wilson_interval,
)

ROUNDING = 5.1e-5  # half a unit of the fourth decimal, to which every percentage is rounded

COUNTS = st.integers(1, 60_000).flatmap(lambda total: st.tuples(st.integers(0, total), st.just(total)))


@given(COUNTS)
def test_wilson_interval_equals_that_of_statsmodels_and_holds_the_error(counts: tuple[int, int]) -> None:
    errors, total = counts
    low, high = wilson_interval(errors, total)
    expected = proportion_confint(errors, total, alpha=0.05, method="wilson")
    assert [low, high] == pytest.approx([100 * bound for bound in expected], abs=ROUNDING)
    assert 0 <= low <= error_percent(errors, total) <= high <= 100


@pytest.mark.parametrize(
    ("errors", "total", "low", "high"),
    [  # the paper's numbers, a class of 50 images, the human of the paper's Table 7
        (2_855, 50_000, 5.51, 5.92),
        (10_795, 50_000, 21.23, 21.95),
        (4_940, 100_000, 4.81, 5.08),
        (76, 1_500, 4.07, 6.30),
        (5, 50, 4.3, 21.4),
        (0, 50, 0.0, 7.1),
        (25, 50, 36.6, 63.4),
    ],
)
def test_wilson_interval_of_known_error_rates(errors: int, total: int, low: float, high: float) -> None:
    decimals = 2 if total > 50 else 1
    assert tuple(round(bound, decimals) for bound in wilson_interval(errors, total)) == (low, high)


def test_without_images_nothing_is_known() -> None:
    assert wilson_interval(0, 0) is None
    assert error_percent(0, 0) is None
    assert macro_error([], []) is None
    assert macro_error([0, 0], [0, 0]) is None
    assert macro_interval([], [], []) is None
    assert macro_interval([0, 0], [0, 0], [0, 0]) is None
    assert calibration([], []) is None
    assert risk_coverage([], []) is None


def test_an_error_is_percent_with_four_decimals() -> None:
    assert error_percent(1, 3) == 33.3333
    assert error_percent(0, 7) == 0.0


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)).map(sorted), max_size=12))
def test_macro_error_is_the_mean_over_the_classes_that_have_images(tables: list[list[int]]) -> None:
    wrong, totals = [errors for errors, _ in tables], [total for _, total in tables]
    errors = [Fraction(errors, total) for errors, total in tables if total]
    expected = 100 * sum(errors) / len(errors) if errors else None
    assert macro_error(wrong, totals) == (None if expected is None else pytest.approx(float(expected), abs=ROUNDING))


# plus, minus, total of each class: different sizes, one with two images, one with none, two equal.
TABLE = [(3, 1, 12), (0, 0, 0), (1, 0, 2), (2, 5, 9), (3, 1, 12), (0, 0, 7), (20, 4, 35)]


def outcomes(plus: int, minus: int, total: int) -> list[int]:
    """Return the value of each image of a class."""
    return [1] * plus + [-1] * minus + [0] * (total - plus - minus)


@pytest.mark.parametrize("with_minus", [True, False])
def test_macro_interval_equals_resampling_images_one_by_one(with_minus: bool) -> None:
    table = [(plus, minus if with_minus else 0, total) for plus, minus, total in TABLE]
    classes = [outcomes(*counts) for counts in table if counts[2]]
    draw = random.Random(5)
    means = sorted(
        100 * statistics.fmean(statistics.fmean(draw.choices(images, k=len(images))) for images in classes)
        for _ in range(8_000)
    )
    expected = [means[200], means[-201]]
    # 6 %: five standard errors of the difference of two bounds, each 0.01 of the width from some 10,000 draws.
    width = expected[1] - expected[0]
    assert macro_interval(*zip(*table, strict=True)) == pytest.approx(expected, abs=0.06 * width)
    assert width > 5


@pytest.mark.parametrize("seed", [0, 1])
def test_macro_interval_equals_the_percentile_bootstrap_of_scipy(seed: int) -> None:
    draw = np.random.default_rng(seed)
    totals = draw.integers(2, 30, size=8)
    counts = [draw.multinomial(total, [0.3, 0.2, 0.5]) for total in totals]
    table = [(int(plus), int(minus), int(total)) for (plus, minus, _), total in zip(counts, totals, strict=True)]

    def macro(*classes: np.ndarray, axis: int) -> np.ndarray:
        return 100 * np.mean([images.mean(axis=axis) for images in classes], axis=0)

    result = stats.bootstrap(
        [np.array(outcomes(*each)) for each in table], macro, method="percentile", n_resamples=10_000, rng=draw
    )
    low, high = result.confidence_interval
    # 6 % of the width: as above.
    assert macro_interval(*zip(*table, strict=True)) == pytest.approx([low, high], abs=0.06 * (high - low))


def test_macro_interval_does_not_depend_on_the_order_of_classes_or_on_classes_without_images() -> None:
    shuffled = [TABLE[place] for place in (6, 2, 5, 0, 3, 4)]
    expected = macro_interval(*zip(*TABLE, strict=True))
    assert macro_interval(*zip(*shuffled, strict=True)) == expected


def test_macro_interval_of_the_other_difference_is_mirrored() -> None:
    plus, minus, totals = zip(*TABLE, strict=True)
    low, high = macro_interval(plus, minus, totals)
    assert macro_interval(minus, plus, totals) == pytest.approx([-high, -low], abs=0.06 * (high - low))


@pytest.mark.parametrize(("wrong", "bound"), [(0, 0.0), (1, 100.0)])
def test_where_every_class_is_all_right_or_all_wrong_the_bootstrap_has_no_width(wrong: int, bound: float) -> None:
    totals = [2, 50, 7]
    assert macro_interval([wrong * total for total in totals], [0, 0, 0], totals) == [bound, bound]


@pytest.mark.parametrize("totals", [[1, 1, 1, 1], [1, 50, 7, 9], [1, 0, 0, 0], [1]])
def test_where_a_class_has_one_image_the_mean_over_classes_has_no_interval(totals: list[int]) -> None:
    assert macro_interval([1] * len(totals), [0] * len(totals), totals) is None


def test_the_interval_over_a_thousand_classes_equals_the_normal_approximation() -> None:
    """50 images per class, 10 wrong: the normal approximation, 1.96·sqrt(p(1-p)/n), is accurate there."""
    half = 100 * 1.959964 * math.sqrt(0.2 * 0.8 / 50_000)
    low, high = macro_interval([10] * 1000, [0] * 1000, [50] * 1000)
    assert (low, high) == pytest.approx((20 - half, 20 + half), abs=0.06 * half)


def ece_by_fractions(scores: list[str], right: list[bool]) -> tuple[Fraction, list[list[tuple[Fraction, bool]]]]:
    """Guo et al. 2017, Eq. 3, image by image: the error in percent, and the images of each bin (m/15, (m+1)/15]."""
    bins: list[list[tuple[Fraction, bool]]] = [[] for _ in range(15)]
    for score, hit in zip(map(Fraction, scores), right, strict=True):
        place = next(m for m in range(15) if score <= Fraction(m + 1, 15))
        bins[place].append((score, hit))
    error = Fraction(0)
    for images in filter(None, bins):
        confidence = sum((score for score, _ in images), Fraction(0)) / len(images)
        accuracy = Fraction(sum(hit for _, hit in images), len(images))
        error += Fraction(len(images), len(scores)) * abs(accuracy - confidence)
    return 100 * error, bins


# Decimals with ties, both ends and the edges between bins that a decimal can hit: 0.2, 0.4, 0.6, 0.8.
SCORES = st.one_of(
    st.sampled_from(["0", "0.2", "0.4", "0.6", "0.8", "1"]), st.integers(0, 10**6).map(lambda n: f"{n}e-6")
)


@given(st.lists(st.tuples(SCORES, st.booleans()), min_size=1, max_size=60))
def test_calibration_equals_a_plain_loop_in_fractions(images: list[tuple[str, bool]]) -> None:
    scores, right = [score for score, _ in images], [hit for _, hit in images]
    found = calibration([float(score) for score in scores], right)
    expected, bins = ece_by_fractions(scores, right)
    assert found is not None
    assert found.expected_error == pytest.approx(float(expected), abs=ROUNDING)
    assert found.confidence == pytest.approx(float(100 * sum(map(Fraction, scores)) / len(scores)), abs=ROUNDING)
    assert [each.images for each in found.bins] == [len(of_bin) for of_bin in bins]
    for place, (each, of_bin) in enumerate(zip(found.bins, bins, strict=True)):
        assert (each.low, each.high) == (place / BINS, (place + 1) / BINS)
        if not of_bin:
            assert (each.confidence, each.accuracy) == (None, None)
            continue
        confidence = 100 * sum(score for score, _ in of_bin) / len(of_bin)
        assert each.confidence == pytest.approx(float(confidence), abs=ROUNDING)
        assert each.accuracy == pytest.approx(100 * sum(hit for _, hit in of_bin) / len(of_bin), abs=ROUNDING)


def test_a_score_on_an_edge_belongs_to_the_bin_below_it() -> None:
    found = calibration([0.0, 0.2, 0.2000001, 1.0], [False, True, True, True])
    assert found is not None
    assert [place for place, each in enumerate(found.bins) if each.images] == [0, 2, 3, 14]


def test_a_score_that_half_precision_lifts_above_one_counts_as_one() -> None:
    found = calibration([1.0005, 1.0], [True, False])
    assert found is not None
    assert (found.confidence, found.expected_error) == (100.0, 50.0)
    assert (found.bins[-1].images, found.bins[-1].confidence) == (2, 100.0)


@given(st.integers(1, 1200).flatmap(lambda k: st.tuples(st.just(k), st.lists(st.integers(1, k), max_size=30))))
def test_ranks_are_summarized_by_mean_median_and_steps_that_end_at_the_number_of_classes(
    drawn: tuple[int, list[int]],
) -> None:
    classes, ranks = drawn
    found = rank_summary(ranks, classes)
    ends = [2, 3, 6, 11, 21, 51, 101, 1201]
    steps = [(low, min(end - 1, classes)) for low, end in zip([1, *ends], ends, strict=False) if low <= classes]
    assert [(step.first, step.last) for step in found.counts] == steps
    assert [step.images for step in found.counts] == [sum(low <= rank <= last for rank in ranks) for low, last in steps]
    if not ranks:
        assert (found.median, found.mean, found.mean_reciprocal) == (None, None, None)
        return
    assert found.median == statistics.median(ranks)
    assert found.mean == pytest.approx(statistics.fmean(ranks), abs=ROUNDING)
    assert found.mean_reciprocal == pytest.approx(statistics.fmean(1 / rank for rank in ranks), abs=ROUNDING)


ANSWERS = st.lists(st.tuples(st.integers(0, 40), st.booleans()), min_size=1, max_size=300)


@settings(max_examples=50)
@given(ANSWERS)
def test_the_histogram_counts_right_and_wrong_answers_by_score(images: list[tuple[int, bool]]) -> None:
    found = calibration([step / 40 for step, _ in images], [right for _, right in images])
    assert found is not None
    assert len(found.histogram) == HISTOGRAM_BINS
    for place, entry in enumerate(found.histogram):
        own = [right for step, right in images if place < Fraction(step, 2) <= place + 1 or step == place == 0]
        assert (entry.right, entry.wrong) == (own.count(True), own.count(False))
        assert (entry.low, entry.high) == (place / 20, (place + 1) / 20)


@settings(max_examples=50)
@given(ANSWERS)
def test_risk_against_coverage_equals_a_plain_loop_with_equal_scores_kept_together(
    images: list[tuple[int, bool]],
) -> None:
    scored = [(step / 40, right) for step, right in images]
    found = risk_coverage([score for score, _ in scored], [right for _, right in scored])
    assert found is not None

    def kept(threshold: float) -> list[bool]:
        return [right for score, right in scored if score >= threshold]

    risks = [Fraction(kept(score).count(False), len(kept(score))) for score, _ in scored]
    assert found.area == pytest.approx(float(100 * sum(risks) / len(risks)), abs=ROUNDING)
    expected = []
    for percent in range(1, 101):
        enough = [score for score, _ in scored if 100 * len(kept(score)) >= percent * len(scored)]
        if not expected or expected[-1] != max(enough):
            expected.append(max(enough))
    assert [point.threshold for point in found.points] == expected
    for point in found.points:
        own = kept(point.threshold)
        assert (point.images, point.top1_wrong) == (len(own), own.count(False))
        assert point.coverage == pytest.approx(100 * len(own) / len(scored), abs=ROUNDING)
        assert point.top1_error == error_percent(own.count(False), len(own))
        assert point.top1_interval == list(wilson_interval(own.count(False), len(own)))
    assert found.points[-1].images == len(scored)


def test_the_area_is_the_error_where_all_scores_are_equal_and_less_where_scores_tell_wrong_answers() -> None:
    right = [True, True, False, True]
    alike, sorted_out = risk_coverage([0.3] * 4, right), risk_coverage([0.9, 0.8, 0.1, 0.7], right)
    assert alike is not None
    assert sorted_out is not None
    assert (alike.area, [point.coverage for point in alike.points]) == (25, [100])
    assert sorted_out.area == 6.25  # wrong only among all four: (0 + 0 + 0 + 1/4) / 4


def test_a_score_that_half_precision_lifts_above_one_is_kept_at_a_threshold_of_one() -> None:
    found = risk_coverage([1.0005, 1.0, 0.5], [True, False, True])
    assert found is not None
    assert [(point.threshold, point.images) for point in found.points] == [(1.0, 2), (0.5, 3)]
