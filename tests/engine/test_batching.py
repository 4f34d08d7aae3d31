"""Which images share a canvas: properties for any shapes, edge cases, and the cheapest plan."""

import random
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prelunet.evaluator.engine.batching import Batch, BatchPlan, BatchRules, plan_batches

MAX_SIDE = 100
Shape = tuple[int, int]
SHAPES = st.lists(st.tuples(st.integers(7, MAX_SIDE), st.integers(7, MAX_SIDE)), max_size=40)
STEPS = st.sampled_from([1, 8, 32])
SWITCHES = st.sampled_from([0, 1, 900, 5_000, 100_000])
WINDOWS, PIXELS = 400, 20_000


def window_grid(height: int, width: int) -> tuple[int, int]:
    return (height // 7, width // 7)


def plan(
    shapes: Sequence[Shape], step: int, switch: int = 0, max_windows: int = WINDOWS, max_pixels: int = PIXELS
) -> BatchPlan:
    return plan_batches(shapes, window_grid, BatchRules(step, max_windows, max_pixels, switch), max_side=MAX_SIDE)


def rounded(shape: Shape, step: int) -> Shape:
    height, width = (min(-(-side // step) * step, MAX_SIDE) for side in shape)
    return height, width


def cost(planned: BatchPlan, switch: int) -> int:
    return planned.canvas_pixels + switch * planned.canvas_changes


# Every plan, whatever the rules.


@given(SHAPES, STEPS, SWITCHES)
def test_every_image_is_in_exactly_one_batch_and_a_canvas_keeps_the_order(
    shapes: list[Shape], step: int, switch: int
) -> None:
    batches = plan(shapes, step, switch).batches
    assert sorted(index for batch in batches for index in batch.indices) == list(range(len(shapes)))
    assert not shapes or batches[0].indices[0] == 0, "whoever came first is served first"
    by_canvas: dict[Shape, list[int]] = {}
    for batch in batches:
        by_canvas.setdefault((batch.height, batch.width), []).extend(batch.indices)
    assert all(indices == sorted(indices) for indices in by_canvas.values())
    assert [indices[0] for indices in by_canvas.values()] == sorted(indices[0] for indices in by_canvas.values())


@given(SHAPES, STEPS, SWITCHES)
def test_every_image_fits_its_canvas_which_no_smaller_one_would_hold(
    shapes: list[Shape], step: int, switch: int
) -> None:
    by_canvas: dict[Shape, list[Shape]] = {}
    for batch in plan(shapes, step, switch).batches:
        assert len(batch.indices) <= batch.rows
        by_canvas.setdefault((batch.height, batch.width), []).extend(shapes[index] for index in batch.indices)
    for (height, width), members in by_canvas.items():
        assert (height, width) == rounded((max(h for h, _ in members), max(w for _, w in members)), step)


@given(SHAPES, STEPS, SWITCHES)
def test_a_batch_keeps_both_bounds_unless_its_only_image_exceeds_them(
    shapes: list[Shape], step: int, switch: int
) -> None:
    for batch in plan(shapes, step, switch).batches:
        rows, columns = window_grid(batch.height, batch.width)
        kept = batch.rows * rows * columns <= WINDOWS and batch.rows * batch.height * batch.width <= PIXELS
        own_canvas = rounded(shapes[batch.indices[0]], step) == (batch.height, batch.width)
        assert kept or (batch.rows == 1 and own_canvas)


@given(SHAPES, STEPS, SWITCHES)
def test_batches_of_one_canvas_follow_each_other_with_the_smallest_at_the_end(
    shapes: list[Shape], step: int, switch: int
) -> None:
    planned = plan(shapes, step, switch)
    canvases = [(batch.height, batch.width) for batch in planned.batches]
    assert sum(before != after for before, after in pairwise(canvases)) == max(0, len(set(canvases)) - 1)
    for before, after in pairwise(planned.batches):
        if (before.height, before.width) == (after.height, after.width):
            assert before.rows == len(before.indices) >= len(after.indices)


@given(SHAPES, STEPS, SWITCHES, st.randoms(use_true_random=False))
def test_the_order_of_the_images_changes_neither_canvases_nor_cost(
    shapes: list[Shape], step: int, switch: int, shuffled: random.Random
) -> None:
    def sizes(of: BatchPlan) -> Counter[tuple[int, int, int]]:
        return Counter((batch.rows, batch.height, batch.width) for batch in of.batches)

    other = shuffled.sample(shapes, len(shapes))
    assert sizes(plan(shapes, step, switch)) == sizes(plan(other, step, switch))
    assert plan(shapes, step, switch) == plan(shapes, step, switch)


@given(SHAPES, STEPS, SWITCHES)
def test_a_plan_counts_its_pixels_and_its_changes_of_shape(shapes: list[Shape], step: int, switch: int) -> None:
    planned = plan(shapes, step, switch)
    calls = [(batch.rows, batch.height, batch.width) for batch in planned.batches]
    assert planned.images_pixels == sum(height * width for height, width in shapes)
    assert planned.canvas_pixels == sum(rows * height * width for rows, height, width in calls)
    assert planned.canvas_changes == sum(call != before for before, call in zip([None, *calls], calls, strict=False))
    assert 0 <= planned.padding < 1
    if shapes:
        assert planned.padding == pytest.approx(1 - planned.images_pixels / planned.canvas_pixels)


def test_no_images_make_an_empty_plan() -> None:
    planned = plan([], 32, 5_000)
    assert (planned.batches, planned.canvas_pixels, planned.padding, planned.canvas_changes) == ((), 0, 0.0, 0)


# A CPU: exact shapes, and a change of shape costs nothing.


def one_shape_after_the_other(shapes: list[Shape]) -> list[Batch]:
    """Cut the images of each shape into batches that are as full as the bounds allow."""
    batches = []
    for height, width in dict.fromkeys(shapes):
        members = [index for index, shape in enumerate(shapes) if shape == (height, width)]
        rows, columns = window_grid(height, width)
        count = max(1, min(WINDOWS // (rows * columns), PIXELS // (height * width)))
        for start in range(0, len(members), count):
            part = tuple(members[start : start + count])
            batches.append(Batch(part, height, width, len(part)))
    return batches


@given(st.lists(st.sampled_from([(30, 41), (41, 30), (7, 7), (90, 90), (14, 100)]), max_size=60), SHAPES)
def test_with_step_1_each_shape_has_full_batches_and_no_blank_canvas(
    repeated: list[Shape], various: list[Shape]
) -> None:
    shapes = repeated + various
    assert list(plan(shapes, step=1).batches) == one_shape_after_the_other(shapes)
    assert plan(shapes, step=1).padding == 0


def test_with_step_1_all_batches_of_a_shape_but_the_last_are_full() -> None:
    planned = plan([(30, 40)] * 9, step=1, max_pixels=8 * 30 * 40)
    assert [len(batch.indices) for batch in planned.batches] == [8, 1]


def test_with_step_1_shapes_stay_apart_whatever_a_change_costs() -> None:
    assert [batch.indices for batch in plan([(30, 40), (31, 40), (30, 40)], 1, 10**9).batches] == [(0, 2), (1,)]


def test_an_image_beyond_the_bounds_gets_a_batch_of_its_own() -> None:
    assert plan([(90, 90), (90, 90), (14, 21)], step=1, max_windows=100).batches == (
        Batch((0,), 90, 90, 1),
        Batch((1,), 90, 90, 1),
        Batch((2,), 14, 21, 1),
    )


def test_images_share_a_batch_until_the_bound_on_windows_is_reached() -> None:
    assert [batch.indices for batch in plan([(14, 21)] * 5, step=1, max_windows=12).batches] == [(0, 1), (2, 3), (4,)]


# A GPU: rounded sides, shared canvases.


def test_shapes_that_round_to_one_canvas_share_it_and_others_do_not() -> None:
    assert plan([(30, 41), (64, 30), (31, 48)], step=16).batches == (Batch((0, 2), 32, 48, 2), Batch((1,), 64, 32, 1))


@given(SHAPES, st.sampled_from([8, 32]))
def test_where_a_change_costs_nothing_sides_grow_by_less_than_a_step(shapes: list[Shape], step: int) -> None:
    planned = plan(shapes, step)
    for batch in planned.batches:
        assert batch.rows == len(batch.indices)
        for index in batch.indices:
            for side, canvas in zip(shapes[index], (batch.height, batch.width), strict=True):
                assert side <= canvas < side + step
                assert canvas % step == 0 or canvas == MAX_SIDE
    shortest = min((side for shape in shapes for side in shape), default=1)
    assert planned.padding < 1 - (shortest / (shortest + step)) ** 2


def test_shapes_share_a_canvas_as_soon_as_that_costs_less_than_a_change() -> None:
    shapes = [(32, 64), (32, 64), (32, 96)]
    padding = 2 * 32 * (96 - 64)
    apart, shared = plan(shapes, 32, padding), plan(shapes, 32, padding + 1)
    assert [batch.indices for batch in apart.batches] == [(0, 1), (2,)]
    assert shared.batches == (Batch((0, 1, 2), 32, 96, 3),)
    assert shared.padding == pytest.approx(padding / (3 * 32 * 96))


def test_the_last_batch_has_blank_canvases_where_these_cost_less_than_a_change() -> None:
    shapes, three = [(32, 32)] * 7, 3 * 32 * 32
    dear = plan(shapes, 32, 2 * 32 * 32 + 1, max_pixels=three)
    assert [(len(batch.indices), batch.rows) for batch in dear.batches] == [(3, 3), (3, 3), (1, 3)]
    cheap = plan(shapes, 32, 2 * 32 * 32, max_pixels=three)
    assert [(len(batch.indices), batch.rows) for batch in cheap.batches] == [(3, 3), (3, 3), (1, 1)]
    assert (dear.canvas_changes, cheap.canvas_changes) == (1, 2)


def test_batches_of_equal_rows_are_evened_out() -> None:
    planned = plan([(32, 32)] * 9, 32, 5_000, max_pixels=8 * 32 * 32)
    assert [(len(batch.indices), batch.rows) for batch in planned.batches] == [(5, 5), (4, 5)]


def test_images_that_keep_the_bounds_alone_share_no_canvas_beyond_them() -> None:
    planned = plan([(32, 96), (96, 32)], 32, 10**9, max_pixels=96 * 95)
    assert [(batch.height, batch.width) for batch in planned.batches] == [(32, 96), (96, 32)]


def test_images_share_a_canvas_that_reaches_a_bound_and_does_not_pass_it() -> None:
    shapes, together = [(32, 96), (64, 32)], 13 * 9  # windows of 64x96
    assert len(plan(shapes, 32, 10**9, max_pixels=64 * 96).batches) == 2, "on one canvas, one after the other"
    assert plan(shapes, 32, 10**9, max_pixels=64 * 96).canvas_changes == 1
    assert plan(shapes, 32, 10**9, max_pixels=64 * 96 - 1).canvas_changes == 2
    assert plan(shapes, 32, 10**9, max_windows=together).canvas_changes == 1
    assert plan(shapes, 32, 10**9, max_windows=together - 1).canvas_changes == 2


def test_canvas_never_grows_beyond_the_largest_side_of_the_model() -> None:
    planned = plan([(97, 33), (100, 20)], 32, 10**6)
    assert planned.batches == (Batch((0, 1), 100, 64, 2),)


@given(SHAPES, st.sampled_from([8, 32]), SWITCHES)
def test_a_plan_never_costs_more_than_one_canvas_for_each_rounded_shape(
    shapes: list[Shape], step: int, switch: int
) -> None:
    apart = sum(
        cost(plan([shape] * count, step, switch), switch)
        for shape, count in Counter(rounded(shape, step) for shape in shapes).items()
    )
    assert cost(plan(shapes, step, switch), switch) <= apart


# Against every partition there is.


def partitions(items: Sequence[Shape]) -> Iterator[list[list[Shape]]]:
    if not items:
        yield []
        return
    first, *rest = items
    for smaller in partitions(rest):
        yield [[first], *smaller]
        for index, group in enumerate(smaller):
            yield [*smaller[:index], [first, *group], *smaller[index + 1 :]]


def intervals(items: Sequence[Shape]) -> Iterator[list[list[Shape]]]:
    if not items:
        yield []
    for length in range(1, len(items) + 1):
        for rest in intervals(items[length:]):
            yield [list(items[:length]), *rest]


def group_cost(group: Sequence[Shape], images: Counter[Shape], switch: int, windows: int, pixels: int) -> float:
    """Count one canvas's calls: as few as possible, with equal rows, or full ones and a smaller one at the end."""
    height, width = max(h for h, _ in group), max(w for _, w in group)
    rows, columns = window_grid(height, width)
    most = min(windows // (rows * columns), pixels // (height * width))
    if most == 0 and len(group) > 1:
        return float("inf")
    count, most = sum(images[shape] for shape in group), max(1, most)
    batches = -(-count // most)
    ways = [(-(-count // batches) * batches, 1), (count, 1 if count % most in {0, count} else 2)]
    return min(computed * height * width + switch * changes for computed, changes in ways)


def least(ways: Iterator[list[list[Shape]]], images: Counter[Shape], switch: int, windows: int, pixels: int) -> float:
    return min(sum(group_cost(group, images, switch, windows, pixels) for group in way) for way in ways)


LINE = st.dictionaries(st.integers(1, 12), st.integers(1, 9), max_size=7)


@given(LINE, st.booleans(), SWITCHES)
def test_on_a_line_no_plan_costs_less_where_each_canvas_needs_one_batch(
    line: dict[int, int], upright: bool, switch: int
) -> None:
    images = Counter({((8 * k, 24) if upright else (24, 8 * k)): count for k, count in line.items()})
    planned = plan(list(images.elements()), 8, switch, 10**6, 10**6)
    assert cost(planned, switch) == least(partitions(list(images)), images, switch, 10**6, 10**6)


@given(LINE, st.booleans(), SWITCHES)
def test_on_a_line_no_plan_of_neighboring_lengths_costs_less(line: dict[int, int], upright: bool, switch: int) -> None:
    images = Counter({((8 * k, 24) if upright else (24, 8 * k)): count for k, count in line.items()})
    planned = plan(list(images.elements()), 8, switch, 60, 9_000)
    assert cost(planned, switch) <= least(intervals(sorted(images)), images, switch, 60, 9_000)


def test_plans_of_any_seven_shapes_cost_at_most_a_tenth_more_than_the_least() -> None:
    rng = random.Random(7)
    ratios = []
    for _ in range(60):
        images = Counter({(8 * rng.randint(1, 12), 8 * rng.randint(1, 12)): rng.randint(1, 9) for _ in range(7)})
        switch = rng.choice([500, 2_000, 8_000, 30_000])
        found = cost(plan(list(images.elements()), 8, switch), switch)
        best = least(partitions(list(images)), images, switch, WINDOWS, PIXELS)
        assert best <= found <= 1.1 * best
        ratios.append(found / best)
    assert sum(ratios) / len(ratios) < 1.01, "and hardly anything more on average"


@pytest.mark.parametrize(
    ("images", "switch"),
    [
        ({(8, 8): 1, (32, 16): 1, (16, 24): 5, (64, 72): 5}, 8_000),  # neighbors by height
        ({(16, 40): 7, (32, 96): 4, (56, 80): 2, (72, 24): 7, (72, 64): 7}, 30_000),  # neighbors by width
        ({(64, 96): 4, (80, 32): 7, (8, 72): 1, (8, 40): 5, (64, 40): 1}, 8_000),  # neighbors of one orientation
        ({(24, 24): 1, (64, 88): 5, (48, 72): 9, (32, 40): 1}, 8_000),  # a shape that left its neighbors
        ({(56, 64): 2, (8, 80): 6, (80, 32): 7, (88, 80): 8, (8, 8): 5}, 30_000),  # one that went to a new canvas
    ],
)
def test_shapes_of_several_lines_find_the_cheapest_plan(images: dict[Shape, int], switch: int) -> None:
    found = cost(plan(list(Counter(images).elements()), 8, switch), switch)
    assert found == least(partitions(list(images)), Counter(images), switch, WINDOWS, PIXELS)


# The rules.


def test_rules_that_were_written_are_read() -> None:
    rules = BatchRules(canvas_step=32, max_windows=77, max_pixels=12345, switch_pixels=6789)
    assert rules.to_json() == {"canvas_step": 32, "max_windows": 77, "max_pixels": 12345, "switch_pixels": 6789}
    assert BatchRules.from_json(rules.to_json()) == rules


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"canvas_step": 0}, "Expected `int` >= 1 - at `$.canvas_step`"),
        ({"max_windows": True}, "Expected `int`, got `bool` - at `$.max_windows`"),
        ({"max_pixels": 1.5}, "Expected `int`, got `float` - at `$.max_pixels`"),
        ({"switch_pixels": -1}, "Expected `int` >= 0 - at `$.switch_pixels`"),
        ({"max_pixels": 2**40 + 1}, "Expected `int` <= 1099511627776 - at `$.max_pixels`"),
        ({"rows": 3}, "unknown key 'rows'"),
    ],
)
def test_rules_that_are_nonsense_are_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        BatchRules.from_json({**BatchRules().to_json(), **change})


def test_rules_that_lack_one_are_refused() -> None:
    with pytest.raises(ValueError, match="no key 'switch_pixels'"):
        BatchRules.from_json({"canvas_step": 1, "max_windows": 1, "max_pixels": 1})
