"""Batches of one model side by side, each in a lane of its session."""

import asyncio
from typing import Any

import numpy as np

from prelunet.evaluator.architectures import OpaqueNet
from prelunet.evaluator.engine.batching import BatchRules
from prelunet.evaluator.engine.classify import classify_images
from prelunet.evaluator.errors import OutOfMemory
from prelunet.evaluator.imaging.decode import decode_rgb
from prelunet.evaluator.serving.models import Models
from tests.helpers.fakes import FakeSession, fake_contract
from tests.serving.event_loop import async_test, until
from tests.serving.scheduling.scheduler_harness import (
    SteppedSession,
    build_model,
    build_request,
    dense_protocol,
    metric_value,
    occupy_device,
    ready_view_count,
    serve_models,
    start_classify,
)
from tests.serving.serving_harness import png

LANES = 3
PROTOCOL = dense_protocol(64)  # two of its views are too large to be computed one after the other in one lane


def with_lanes(**options) -> SteppedSession:
    """Return a session with lanes whose batches are never known to be short."""
    session = SteppedSession(fake_contract(architecture=OpaqueNet("opaque", "unknown")), **options)
    session.lanes = LANES
    return session


async def views_behind_a_batch(models: Models, session: SteppedSession, count: int) -> list[asyncio.Task[Any]]:
    """Occupy the device, and let this many images of one view wait for it."""
    await occupy_device(models, session)
    tasks = [start_classify(models, png(64, 72, seed), PROTOCOL) for seed in range(count)]
    await until(lambda: ready_view_count(models) == count)
    return tasks


@async_test
async def test_waiting_views_are_divided_among_the_lanes_and_get_the_answers_they_get_alone() -> None:
    session, images = with_lanes(), [png(64, 72, seed) for seed in range(7)]
    with serve_models(fake=session) as models:
        first = await occupy_device(models, session)
        tasks = [start_classify(models, image, PROTOCOL) for image in images]
        await until(lambda: ready_view_count(models) == 7)
        session.release_batches()
        await until(lambda: session.entered == 1 + LANES)
        session.release_all()
        for image, task in zip(images, tasks, strict=True):
            (alone,) = classify_images(FakeSession(), [decode_rgb(image)], PROTOCOL)
            np.testing.assert_array_equal((await task).scores, alone.scores)
        await first
    assert session.runs[0] == (False, 1), "a view alone has all threads"
    assert sorted(session.runs[1:4]) == [(True, 1), (True, 1), (True, 2)], "2 of 7, 1 of 5, 1 of 4"
    assert len(set(session.computing[1:4])) == LANES


@async_test
async def test_too_few_views_for_half_of_the_lanes_are_computed_on_all_threads() -> None:
    session = with_lanes()
    session.lanes = 4  # of which the two views of a mirrored image are half
    with serve_models(fake=session) as models:
        session.release_all()
        await start_classify(models, png(64, 72), dense_protocol(64, mirror=True))
    assert session.runs == [(False, 2)]


@async_test
async def test_a_view_of_so_few_operations_that_threads_would_wait_for_each_other_has_a_lane_even_alone() -> None:
    session = FakeSession()  # the demo net: 18 million multiply-adds a crop of 28 pixels
    session.lanes = 4
    with serve_models(fake=session) as models:
        for side in (28, 64):
            await start_classify(models, png(side, side), dense_protocol(side))
    assert session.runs == [(True, 1), (False, 1)]


@async_test
async def test_a_model_without_lanes_never_runs_beside_another_and_keeps_its_turn() -> None:
    small, large = with_lanes(), SteppedSession(seed=1)
    with serve_models(small=small, large=large) as models:
        await occupy_device(models, small, "small")
        tasks = [start_classify(models, png(64, 72, seed), PROTOCOL, model="small") for seed in range(3)]
        await until(lambda: ready_view_count(models) == 3)
        small.release_batches()
        await until(lambda: small.entered == 4)  # in all three lanes
        tasks.append(start_classify(models, png(64, 72), PROTOCOL, model="large"))
        small.release_batches(2)
        await until(lambda: ready_view_count(models) == 1)  # decoded by a thread that has left its lane
        tasks += [start_classify(models, png(64, 72, seed), PROTOCOL, model="small") for seed in range(3)]
        await until(lambda: ready_view_count(models) == 4)
        assert (small.entered, large.entered) == (4, 0), "two lanes are empty, but it is the other model's turn"
        small.release_batches()
        await until(lambda: large.entered == 1)
        assert small.entered == 4
        large.release_all()
        small.release_all()
        for task in tasks:
            await task
    assert large.runs == [(False, 1)]


@async_test
async def test_large_views_use_as_many_lanes_as_the_memory_of_one_batch_allows() -> None:
    session = with_lanes(rules=BatchRules(max_pixels=LANES * 64 * 72 - 1))
    with serve_models(fake=session) as models:
        tasks = await views_behind_a_batch(models, session, 2)
        session.release_batches()
        await until(lambda: session.entered == 3)
        tasks.append(start_classify(models, png(60, 70), dense_protocol(60)))
        await until(lambda: ready_view_count(models) == 1)
        assert session.entered == 3, "the third lane has no memory left beside these two"
        session.release_batches()
        await until(lambda: session.entered == 4)
        tasks += [start_classify(models, png(60, 70, seed), dense_protocol(60)) for seed in (1, 2)]
        await until(lambda: ready_view_count(models) == 2)
        session.release_batches()  # the other large view
        await until(lambda: session.entered == 6)  # in all three lanes, although one view still runs
        session.release_all()
        for task in tasks:
            await task
    assert session.runs == [(False, 1), *5 * [(True, 1)]]


@async_test
async def test_views_too_large_for_half_of_the_lanes_each_have_all_threads() -> None:
    session = with_lanes(rules=BatchRules(max_pixels=2 * 64 * 72 - 1))
    with serve_models(fake=session) as models:
        tasks = await views_behind_a_batch(models, session, 4)
        session.release_batches()
        await until(lambda: session.entered == 2)
        session.release_all()
        for task in tasks:
            await task
    assert session.runs == 5 * [(False, 1)]


@async_test
async def test_a_failed_batch_is_run_again_in_halves_and_leaves_its_lane() -> None:
    def fail(images: np.ndarray) -> None:
        if len(images) > 1:
            raise OutOfMemory("planted")

    session = with_lanes(fail=fail)
    with serve_models(fake=session) as models:
        tasks = await views_behind_a_batch(models, session, 9)
        session.release_all()
        for task in tasks:
            await task
        assert metric_value(models, "batch_failures_total", "fake", reason="memory") > 0
        assert (True, 3) in session.runs


@async_test
async def test_an_image_whose_views_are_in_several_lanes_is_answered_once_all_are_computed() -> None:
    session, image = with_lanes(), png(64, 72)
    protocol = dense_protocol(64, 68, 72, mirror=True)
    with serve_models(fake=session) as models:
        await occupy_device(models, session)
        task = start_classify(models, image, protocol)
        await until(lambda: ready_view_count(models) == 6)
        session.release_batches()
        await until(lambda: session.entered == 1 + LANES)
        session.release_all()
        (alone,) = classify_images(FakeSession(), [decode_rgb(image)], protocol)
        np.testing.assert_array_equal((await task).scores, alone.scores)


@async_test
async def test_the_computing_time_of_an_image_counts_batches_that_overlap_once() -> None:
    request = build_request(build_model(), png(64, 72), PROTOCOL)
    request.batches += [(5.0, 6.0), (2.0, 3.5), (3.0, 4.0), (3.1, 3.2)]
    assert request.compute_seconds == 3.0  # 2 to 4 and 5 to 6
    assert request.computed == 6.0
    assert request._timings(7.0).batches == 4


@async_test
async def test_a_view_that_fails_in_a_lane_is_tried_on_all_threads() -> None:
    """Its neighbors in other lanes may have taken the memory."""
    session = with_lanes()

    def fail(_: np.ndarray) -> None:
        if session.runs[-1] == (True, 1):
            raise OutOfMemory("planted")

    session._fail = fail
    with serve_models(fake=session) as models:
        tasks = await views_behind_a_batch(models, session, 2)
        session.release_all()
        for task in tasks:
            await task
    assert (True, 1) in session.runs
    assert (False, 1) in session.runs[1:]


@async_test
async def test_once_few_views_wait_the_lanes_are_left() -> None:
    session = with_lanes()
    session.lanes = 6
    with serve_models(fake=session) as models:
        tasks = await views_behind_a_batch(models, session, 4)
        session.release_batches()
        await until(lambda: session.entered == 5)  # in four of the six lanes
        session.release_batches(3)
        await until(lambda: sum(task.done() for task in tasks) == 3)
        tasks.append(start_classify(models, png(64, 72), PROTOCOL))
        await until(lambda: ready_view_count(models) == 1)
        assert session.entered == 5, "two of six lanes would be in use"
        session.release_all()
        for task in tasks:
            await task
    assert session.runs[-1] == (False, 1)


@async_test
async def test_views_so_small_that_a_batch_costs_more_than_they_do_stay_together_in_a_lane() -> None:
    session = with_lanes()
    with serve_models(fake=session) as models:
        await occupy_device(models, session)
        tasks = [start_classify(models, png(32, 41, seed), dense_protocol(32)) for seed in range(8)]
        await until(lambda: ready_view_count(models) == 8)
        session.release_all()
        for task in tasks:
            await task
    assert session.runs[0] == (False, 1)
    assert sorted(session.runs[1:]) == [(True, 2), (True, 6)]
