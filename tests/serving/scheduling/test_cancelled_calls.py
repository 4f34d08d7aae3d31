"""Calls that are cancelled or past their deadline, which are not computed, and models that are closed."""

import asyncio
import threading
from collections.abc import Callable

import numpy as np
import pytest

from prelunet.evaluator.engine.batching import BatchPlan, BatchRules
from prelunet.evaluator.engine.classify import classify_images
from prelunet.evaluator.errors import DeadlinePassed, Interrupted
from prelunet.evaluator.imaging.decode import decode_rgb
from prelunet.evaluator.imaging.decode_memory import ByteSemaphore
from prelunet.evaluator.imaging.views import ViewImage
from prelunet.evaluator.machine import cores
from prelunet.evaluator.protocols import View
from prelunet.evaluator.serving.options import QueueOptions
from prelunet.evaluator.serving.scheduling import executor
from prelunet.evaluator.serving.scheduling import request as request_module
from prelunet.evaluator.serving.scheduling.model import BatchTimes
from prelunet.evaluator.serving.scheduling.request import ReadyView, Request
from prelunet.evaluator.serving.scheduling.waiting import Waiting
from tests.helpers.fakes import FakeSession
from tests.serving.event_loop import async_test, until
from tests.serving.scheduling.scheduler_harness import (
    GPU_RULES,
    STAGING,
    DecodeGate,
    SteppedSession,
    build_model,
    build_request,
    deadline_in,
    dense_protocol,
    metric_value,
    occupy_device,
    ready_view_count,
    serve_models,
    stage_batch,
    start_classify,
)
from tests.serving.serving_harness import eventually, png, webp


@pytest.mark.parametrize("rules", [BatchRules(), GPU_RULES], ids=["cpu", "gpu"])
@async_test
async def test_a_request_cancelled_while_waiting_is_never_computed(rules: BatchRules) -> None:
    session = SteppedSession(rules=rules)

    with serve_models(fake=session) as models:
        await occupy_device(models, session)
        cancelled = start_classify(models, png(40, 57), dense_protocol(40, 44, mirror=True), client="gone")
        other = start_classify(models, png(32, 41), dense_protocol(32))
        await until(lambda: ready_view_count(models) == 5)
        cancelled.cancel()
        await until(lambda: ready_view_count(models) == 1)
        session.release_all()
        await other
        with pytest.raises(asyncio.CancelledError):
            await cancelled
        assert metric_value(models, "dropped_views_total", "fake", reason="cancelled") == 4
        assert metric_value(models, "batch_views_sum", "fake") == 2
    assert len(session.calls) == 2


@async_test
async def test_a_request_cancelled_before_or_during_decoding_is_never_computed() -> None:
    held = png(32, 41, 2) + b"end"

    session = SteppedSession()
    with serve_models(QueueOptions(turn_cost=0, ready_views=1), fake=session) as models:
        busy = await occupy_device(models, session)
        with DecodeGate({len(held)}) as gate:
            decoding = start_classify(models, held, dense_protocol(32, 50))
            await until(gate.entered.is_set)
            waiting = start_classify(models, png(40, 57), dense_protocol(40, 44, 48))
            await until(lambda: metric_value(models, "waiting_images", "fake") == 3)
            for task in (waiting, decoding):
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
            assert metric_value(models, "dropped_views_total", "fake", reason="cancelled") == 3
            assert len(gate.threads) == 1
        await until(lambda: metric_value(models, "dropped_views_total", "fake", reason="cancelled") == 5)
        assert session.entered == 1
        assert ready_view_count(models) == 0
        session.release_all()
        await busy


@async_test
async def test_cancelling_a_request_being_computed_does_not_affect_others() -> None:
    session = SteppedSession()

    with serve_models(fake=session) as models:
        running = await occupy_device(models, session)
        other = start_classify(models, png(32, 41), dense_protocol(32))
        running.cancel()
        await asyncio.wait([running])
        session.release_all()
        await other
        assert metric_value(models, "dropped_views_total", "fake", reason="cancelled") == 0
        assert metric_value(models, "request_seconds_count", "fake") == 1, (
            "no answer is built for a caller that has left"
        )


@async_test
async def test_a_request_past_its_deadline_fails_at_once_and_is_not_computed() -> None:
    session = SteppedSession()

    with serve_models(fake=session) as models:
        first = await occupy_device(models, session)
        with pytest.raises(DeadlinePassed, match="has passed"):  # while the device is held
            await start_classify(models, png(40, 57), dense_protocol(40, 44), deadline=deadline_in(0.05))
        with pytest.raises(DeadlinePassed, match="has passed"):
            await start_classify(models, png(40, 57), dense_protocol(40), deadline=deadline_in(-0.01))
        session.release_all()
        await first
        assert metric_value(models, "dropped_views_total", "fake", reason="expired") == 3
    assert session.calls == [(1, 28, 28, 3)]


@pytest.mark.parametrize("lanes", [1, 2])
@async_test
async def test_a_view_with_far_less_time_than_its_batch_takes_is_not_run_but_later_ones_are(lanes: int) -> None:
    session = FakeSession()
    session.lanes = lanes

    with serve_models(fake=session) as models:
        model = models.get("")
        model.batch_times[False].record(28 * 28, 3600.0)
        model.batch_times[False].record(28 * 28, 3600.0)
        for _ in range(2):
            with pytest.raises(DeadlinePassed, match="leaves less time than a batch takes"):
                await start_classify(models, png(32, 41), dense_protocol(32), deadline=deadline_in(30))
        assert session.calls == []
        await start_classify(models, png(32, 41), dense_protocol(32), deadline=deadline_in(30))
        assert metric_value(models, "dropped_views_total", "fake", reason="expired") == 2


@pytest.mark.parametrize(
    ("batches", "pixels", "expected"),
    [
        ([], 100, 0.0),
        ([(100, 8.0)], 100, 8.0),
        ([(100, 8.0)], 25, 2.0),
        ([(100, 8.0)], 1000, 8.0),
        ([(100, 1.0), (100, 90.0), (50, 2.0)], 100, 2.0),
        ([(100, 90.0)] * 5 + [(100, 1.0)] * 8, 100, 1.0),
    ],
)
def test_a_batch_is_expected_to_take_its_share_of_a_larger_one_and_at_least_as_long_as_a_smaller_one(
    batches: list[tuple[int, float]], pixels: int, expected: float
) -> None:
    batch_times = BatchTimes()
    for measured in batches:
        batch_times.record(*measured)
    assert batch_times.expected(pixels) == expected


def test_batch_times_may_be_used_in_several_threads() -> None:
    batch_times, failed, ended = BatchTimes(), list[Exception](), threading.Event()

    def again(work: Callable[[], object]) -> None:
        try:
            while not ended.is_set():
                work()
        except Exception as error:
            failed.append(error)

    estimates: list[float] = []
    works = (
        lambda: batch_times.record(100, 2.0),
        lambda: estimates.append(batch_times.expected(50)),
        batch_times.forget_oldest,
    )
    threads = [threading.Thread(target=again, args=(work,)) for work in works for _ in range(2)]
    for thread in threads:
        thread.start()
    eventually(lambda: bool(failed) or len(estimates) > 20_000)
    ended.set()
    for thread in threads:
        thread.join()
    assert failed == []
    assert {*estimates} <= {0.0, 1.0}


@async_test
async def test_small_images_need_no_free_decoding_memory_and_others_free_their_thread_at_their_deadline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    semaphore = ByteSemaphore(100)
    monkeypatch.setattr(request_module, "decode_semaphore", lambda *, gpu: semaphore)
    with serve_models(fake=FakeSession()) as models:
        with semaphore.reservation() as reserve:
            reserve(100)
            await start_classify(models, webp(32, 41), dense_protocol(32))
            monkeypatch.setattr(request_module, "SMALL_BYTES", 0)
            tasks = [
                start_classify(models, webp(32, 41), dense_protocol(32), deadline=deadline_in(1)) for _ in range(3)
            ]
            await until(lambda: len(semaphore._waiters) == min(3, cores()) or tasks[0].done())
            for task in tasks:
                with pytest.raises(DeadlinePassed):
                    await task
            await until(lambda: metric_value(models, "dropped_views_total", "fake", reason="expired") == 3)
        await start_classify(models, webp(32, 41), dense_protocol(32))


@async_test
async def test_a_staged_batch_runs_without_requests_cancelled_meanwhile() -> None:
    session = SteppedSession(**STAGING)

    with serve_models(fake=session) as models:
        _, tasks = await stage_batch(models, session)
        tasks[1].cancel()
        await asyncio.wait([tasks[1]])
        session.release_all()
        for seed in (0, 2):
            (alone,) = classify_images(FakeSession(), [decode_rgb(png(32, 41, seed))], dense_protocol(32))
            np.testing.assert_array_equal((await tasks[seed]).scores, alone.scores)
        assert metric_value(models, "dropped_views_total", "fake", reason="cancelled") == 1
        assert metric_value(models, "batch_views_sum", "fake") == 3
    assert session.calls[1][0] == 3, "the planned shape stays, because a new one costs time on a GPU"


@async_test
async def test_a_view_computed_although_its_caller_has_left_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """This counter is 0 in all other tests; here the views of a cancelled call are computed deliberately."""
    session = SteppedSession(**STAGING)
    begin = Waiting.begin
    monkeypatch.setattr(Waiting, "begin", lambda waiting, views: (list(views), begin(waiting, views)[1]))

    with serve_models(late=1, fake=session) as models:
        _, tasks = await stage_batch(models, session)
        tasks[1].cancel()
        await asyncio.wait([tasks[1]])
        session.release_all()
        await asyncio.gather(tasks[0], tasks[2])


@async_test
async def test_a_request_that_ends_while_a_batch_is_planned_is_not_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    session, plan_views, loop = SteppedSession(), executor.plan_views, asyncio.get_running_loop()

    with serve_models(fake=session) as models:
        await occupy_device(models, session)
        tasks = [start_classify(models, png(32, 41, seed), dense_protocol(32), client=f"{seed}") for seed in range(3)]
        await until(lambda: ready_view_count(models) == 3)

        def planned(*arguments: object) -> BatchPlan:
            monkeypatch.undo()
            loop.call_soon_threadsafe(tasks[1].cancel)
            eventually(lambda: metric_value(models, "dropped_views_total", "fake", reason="cancelled") == 1)
            return plan_views(*arguments)

        monkeypatch.setattr(executor, "plan_views", planned)
        session.release_all()
        await asyncio.wait(tasks)
        assert [task.cancelled() for task in tasks] == [False, True, False]
    assert session.calls == [(1, 28, 28, 3), (2, 32, 41, 3)]


@async_test
async def test_an_expired_request_is_dropped_even_if_its_timer_has_not_fired() -> None:
    """As when the event loop is blocked."""
    model = build_model()
    waiting, view = model.waiting, ViewImage(View(32, mirrored=False), np.zeros((32, 41, 3)), False)

    def waiting_request(seconds: float) -> Request:
        return build_request(model, b"", dense_protocol(32), deadline=deadline_in(seconds))

    late, fine, later = requests = [waiting_request(seconds) for seconds in (0.0, 30.0, 30.0)]
    for request in requests:
        waiting.add(request)
    assert [waiting.take_image("process") for _ in range(2)] == [fine, later]
    for request in (fine, later):
        waiting.decoded(request, [ReadyView(request, 0, view)])
    planned = waiting.ready.to_plan(model)
    assert waiting.take(planned, alone=True)
    later.deadline = deadline_in(0.0)
    wanted, _ = waiting.begin(planned)
    assert [view.request for view in wanted] == [fine]
    for request in (late, later):
        with pytest.raises(DeadlinePassed):
            await request.reply
    assert not fine.reply.done()


@async_test
async def test_closing_the_models_finishes_waiting_requests_and_refuses_new_ones() -> None:
    session = SteppedSession()

    with serve_models(fake=session) as models:
        tasks = [
            await occupy_device(models, session),
            *(start_classify(models, png(32, 41), dense_protocol(32, 50)) for _ in range(5)),
        ]
        await until(lambda: metric_value(models, "waiting_images", "fake") == 6)
        closing = asyncio.create_task(asyncio.to_thread(models.close))
        await until(lambda: models.get("").waiting.closed)
        with pytest.raises(Interrupted, match="the server has stopped"):
            await start_classify(models, png(32, 41), dense_protocol(32))
        session.release_all()
        assert len(await asyncio.gather(*tasks)) == 6
        await closing
