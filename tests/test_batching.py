"""Which images share a canvas: properties that hold for any shapes, and the cases at the bounds."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from evaluator.engine.batching import Batch, plan_batches

MAX_SIDE = 100
SHAPES = st.lists(st.tuples(st.integers(7, MAX_SIDE), st.integers(7, MAX_SIDE)), max_size=40)
STEPS = st.sampled_from([1, 8, 32])


def windows_of(height: int, width: int) -> tuple[int, int]:
    return (height // 7, width // 7)


def plan(shapes: list[tuple[int, int]], step: int, max_windows: int = 400, max_pixels: int = 20_000) -> list[Batch]:
    return plan_batches(
        shapes, windows_of, canvas_step=step, max_side=MAX_SIDE, max_windows=max_windows, max_pixels=max_pixels
    )


@given(SHAPES, STEPS)
def test_every_image_is_in_exactly_one_batch_and_batches_keep_the_order(
    shapes: list[tuple[int, int]], step: int
) -> None:
    batches = plan(shapes, step)
    assert sorted(index for batch in batches for index in batch.indices) == list(range(len(shapes)))
    assert all(list(batch.indices) == sorted(batch.indices) for batch in batches)
    assert not shapes or batches[0].indices[0] == 0, "whoever came first is served first"


@given(SHAPES, STEPS)
def test_a_canvas_holds_its_images_and_is_rounded_up_by_less_than_a_step(
    shapes: list[tuple[int, int]], step: int
) -> None:
    for batch in plan(shapes, step):
        for index in batch.indices:
            for side, canvas in zip(shapes[index], (batch.height, batch.width), strict=True):
                assert side <= canvas < side + step
                assert canvas % step == 0 or canvas == MAX_SIDE


@given(SHAPES)
def test_with_step_1_only_equal_shapes_share_a_batch(shapes: list[tuple[int, int]]) -> None:
    for batch in plan(shapes, step=1):
        assert {shapes[index] for index in batch.indices} == {(batch.height, batch.width)}


@given(SHAPES, STEPS)
def test_a_batch_of_several_images_keeps_both_bounds(shapes: list[tuple[int, int]], step: int) -> None:
    for batch in plan(shapes, step):
        rows, columns = windows_of(batch.height, batch.width)
        count = len(batch.indices)
        assert count == 1 or (count * rows * columns <= 400 and count * batch.height * batch.width <= 20_000)


@given(SHAPES, STEPS)
def test_batches_of_one_canvas_follow_each_other(shapes: list[tuple[int, int]], step: int) -> None:
    canvases = [(batch.height, batch.width) for batch in plan(shapes, step)]
    changes = sum(before != after for before, after in pairwise(canvases))
    assert changes == max(0, len(set(canvases)) - 1)


def test_an_image_beyond_the_bounds_gets_a_batch_of_its_own() -> None:
    assert plan([(90, 90), (90, 90), (14, 21)], step=1, max_windows=100) == [
        Batch((0,), 90, 90),
        Batch((1,), 90, 90),
        Batch((2,), 14, 21),
    ]


def test_images_share_a_batch_until_the_bound_on_windows_is_reached() -> None:
    assert [batch.indices for batch in plan([(14, 21)] * 5, step=1, max_windows=12)] == [(0, 1), (2, 3), (4,)]


def test_shapes_that_round_to_one_canvas_share_it_and_others_do_not() -> None:
    assert plan([(30, 41), (64, 30), (31, 48)], step=16) == [Batch((0, 2), 32, 48), Batch((1,), 64, 32)]
