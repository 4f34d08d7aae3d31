"""A server's batches on a GPU use only the shape buckets, and each canvas of these runs before it is ready."""

import math
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prelunet.evaluator.engine.batching import BatchPlan, BatchRules, plan_batches
from prelunet.evaluator.engine.classify import classify_images, pack_batch, plan_views, unpack_results
from prelunet.evaluator.engine.shape_buckets import ASPECT_RATIOS, build_shape_buckets
from prelunet.evaluator.imaging.views import make_views
from prelunet.evaluator.protocols import build_protocol
from prelunet.evaluator.serving.models import MAX_BATCH_PIXELS, serving_rules, warm_up
from prelunet.evaluator.serving.scheduling.model import shape_buckets_of
from tests.helpers.fakes import FakeSession, fake_contract

BUCKETS = build_shape_buckets(224, (256, 384, 480), 32, 2048)
RULES = BatchRules(32, 20_000, 2**23, 2_000_000)

SIDES = st.integers(224, 1920)
SHAPES = st.lists(st.tuples(SIDES, SIDES), min_size=1, max_size=30)


def grid(height: int, width: int) -> tuple[int, int]:
    """Return the windows of model A: one for 224 pixels, and one more for each 16."""
    return (height - 224) // 16 + 1, (width - 224) // 16 + 1


def max_rows(height: int, width: int) -> int:
    windows = math.prod(grid(height, width))
    return max(1, min(RULES.max_windows // windows, RULES.max_pixels // (height * width)))


def planned(shapes: Sequence[tuple[int, int]]) -> BatchPlan:
    return plan_batches(shapes, grid, RULES, max_side=2048, shape_buckets=BUCKETS)


WARM_UP_SHAPES = BUCKETS.warm_up_shapes(max_rows)


def is_warmed(shape: tuple[int, ...], shapes: Collection[tuple[int, ...]]) -> bool:
    """Return whether a batch has rows of a bucket, and its canvas has run, with as many rows or more and with one."""
    rows = [other[0] for other in shapes if other[1:] == shape[1:]]
    return shape[0] in BUCKETS.rows and bool(rows) and min(rows) == 1 and max(rows) >= shape[0]


@given(SHAPES)
def test_every_batch_is_warmed_unless_its_image_fits_no_bucket(shapes: list[tuple[int, int]]) -> None:
    for batch in planned(shapes).batches:
        if not is_warmed((batch.rows, batch.height, batch.width), WARM_UP_SHAPES):
            members = [shapes[index] for index in batch.indices]
            assert all(min(shape) > BUCKETS.max_short_side for shape in members)


@given(SHAPES)
def test_each_image_is_in_one_batch_whose_canvas_holds_it_and_the_limits_are_kept(
    shapes: list[tuple[int, int]],
) -> None:
    plan = planned(shapes)
    assert sorted(index for batch in plan.batches for index in batch.indices) == list(range(len(shapes)))
    assert plan.batches[0].indices[0] == 0
    for batch in plan.batches:
        assert all(shapes[i][0] <= batch.height and shapes[i][1] <= batch.width for i in batch.indices)
        assert len(batch.indices) <= batch.rows <= max_rows(batch.height, batch.width)


@given(st.sampled_from([256, 384, 480]), st.floats(1, 4), st.booleans())
def test_every_view_of_the_models_own_scales_has_a_canvas(scale: int, aspect: float, upright: bool) -> None:
    long = min(4 * scale, math.floor(scale * aspect + 0.5))
    height, width = (long, scale) if upright else (scale, long)
    canvas = BUCKETS.canvas(height, width)
    assert canvas is not None
    assert canvas[0] >= height
    assert canvas[1] >= width


@pytest.mark.parametrize("aspect", ASPECT_RATIOS)
@pytest.mark.parametrize("scale", [256, 384, 480])
def test_usual_photos_have_less_padding_than_one_step_of_their_long_side(scale: int, aspect: float) -> None:
    long = round(scale * aspect)
    assert BUCKETS.canvas(scale, long) == (scale, -(-long // 32) * 32)


def test_a_canvas_is_the_smallest_that_holds_the_image() -> None:
    sides = BUCKETS.sides
    for height, width in [(224, 224), (225, 341), (480, 641), (1921, 300), (640, 640), (641, 641), (300, 1000)]:
        fitting = [(h, w) for h in sides for w in sides if h >= height and w >= width and min(h, w) <= 640]
        expected = min(fitting, key=math.prod, default=None)
        assert BUCKETS.canvas(height, width) == expected


def test_rows_are_rounded_up_to_a_bucket_and_never_by_more_than_half() -> None:
    assert BUCKETS.rows == (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
    for rows in range(1, 257):
        above, below = BUCKETS.round_up_rows(rows), BUCKETS.round_down_rows(rows)
        assert above == min(bucket for bucket in BUCKETS.rows if bucket >= rows)
        assert below == max(bucket for bucket in BUCKETS.rows if bucket <= rows)
        assert above < 1.5 * rows


def test_the_batches_of_the_warm_up_come_with_the_most_pixels_first_and_each_once() -> None:
    pixels = [math.prod(shape) for shape in WARM_UP_SHAPES]
    assert pixels == sorted(pixels, reverse=True)
    assert len(WARM_UP_SHAPES) == len(set(WARM_UP_SHAPES)) > 300
    assert all(rows <= max_rows(height, width) for rows, height, width in WARM_UP_SHAPES)


class RecordingSession(FakeSession):
    """A fake on a GPU that computes nothing but zeros: thousands of black canvases would take a minute."""

    def compute(self, staged: Any) -> Any:
        images, _sizes = staged
        self.calls.append(images.shape)
        assert not images.any()


def on_a_gpu(kind: type[FakeSession] = FakeSession, **changes: Any) -> FakeSession:
    session = kind(fake_contract(**changes), provider="CUDAExecutionProvider")
    session.rules = serving_rules(session)  # type: ignore[arg-type]
    return session


def test_warming_up_runs_every_batch_once_and_reports_progress() -> None:
    session = on_a_gpu(RecordingSession)
    session.rules = replace(session.rules, max_pixels=40_000)
    shape_buckets = shape_buckets_of(session)
    assert shape_buckets is not None
    reported = list(warm_up(session, shape_buckets))
    count = len(session.calls)
    assert len(set(session.calls)) == count > 100
    assert reported == [(done, count) for done in range(1, count + 1)]
    assert session.calls[0] == max(session.calls, key=math.prod)


def test_what_a_server_gets_to_compute_was_warmed_before() -> None:
    recorder, session = on_a_gpu(RecordingSession), on_a_gpu()
    shape_buckets = shape_buckets_of(session)
    assert shape_buckets is not None
    list(warm_up(recorder, shape_buckets))
    random = np.random.default_rng(5)
    protocol = build_protocol("multi-scale", session.contract)
    images = [random.integers(0, 256, (*sides, 3), np.uint8) for sides in [(40, 61), (90, 31), (50, 50), (33, 130)]]
    views = [view for image in images for view in make_views(image, protocol)]
    for batch in plan_views(session, views, shape_buckets).batches:
        assert is_warmed((batch.rows, batch.height, batch.width, 3), recorder.calls)


def test_scores_do_not_depend_on_the_shape_buckets() -> None:
    session = on_a_gpu()
    random = np.random.default_rng(6)
    protocol = build_protocol("dense-32", session.contract)
    images = [random.integers(0, 256, (*sides, 3), np.uint8) for sides in [(40, 61), (90, 31), (50, 50)]]
    views = [view for image in images for view in make_views(image, protocol)]
    results: dict[int, Any] = {}
    for batch in plan_views(session, views, shape_buckets_of(session)).batches:
        packed = pack_batch(batch, views)
        results.update(unpack_results(packed.packed_views, session.run(packed.images, packed.sizes)))
    alone = classify_images(session, images, protocol)
    for index, view in enumerate([view for image in alone for view in image.views]):
        np.testing.assert_array_equal(results[index].scores, view.scores)  # the fake computes each image by itself


def test_a_cpu_has_no_shape_buckets() -> None:
    assert shape_buckets_of(FakeSession()) is None
    assert serving_rules(FakeSession()) == FakeSession().rules


def test_the_only_bucket_of_a_file_for_exact_canvases_is_its_crop() -> None:
    session = on_a_gpu(canvas="exact")
    shape_buckets = shape_buckets_of(session)
    assert shape_buckets is not None
    assert (shape_buckets.sides, shape_buckets.canvas(28, 28), shape_buckets.canvas(28, 29)) == ((28,), (28, 28), None)
    batches = plan_batches([(28, 28)] * 5 + [(30, 41)], session.contract.window_grid, session.rules,
                           max_side=1024, shape_buckets=shape_buckets).batches  # fmt: skip
    assert [(batch.rows, batch.height, batch.width) for batch in batches] == [(6, 28, 28), (1, 30, 41)]


def test_batches_of_a_server_are_smaller_on_a_gpu_in_pixels_and_windows_alike() -> None:
    session = FakeSession(provider="CUDAExecutionProvider")
    rules = session.rules
    served = serving_rules(session)
    assert served.max_pixels == MAX_BATCH_PIXELS < rules.max_pixels
    assert served.max_windows == int(rules.max_windows * MAX_BATCH_PIXELS / rules.max_pixels)
    session.rules = served
    assert serving_rules(session) == served
