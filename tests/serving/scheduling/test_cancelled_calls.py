"""Callers who leave or run out of time, of whom nothing is computed any more, and models that are closed."""

import asyncio
import threading
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from prelunet.evaluator.engine.batching import BatchRules, Plan
from prelunet.evaluator.engine.classify import classify_images
from prelunet.evaluator.errors import DeadlinePassed, Interrupted
from prelunet.evaluator.imaging.decode import decode_rgb
from prelunet.evaluator.imaging.decode_memory import DecodingRoom
from prelunet.evaluator.imaging.views import ViewImage
from prelunet.evaluator.machine import cores
from prelunet.evaluator.protocols import View
from prelunet.evaluator.serving.observability.call_context import Caller
from prelunet.evaluator.serving.observability.metrics import Metrics
from prelunet.evaluator.serving.options import QueueOptions
from prelunet.evaluator.serving.scheduling import executor
from prelunet.evaluator.serving.scheduling.queue import Waiting, ready_views
from prelunet.evaluator.serving.scheduling.request import Lane, Request, Speed
from tests.helpers.fakes import FakeSession
from tests.serving.scheduling.scheduler_harness import (
    GPU_RULES,
    Gate,
    HeldSession,
    all_decoded,
    ask,
    counted,
    dense,
    occupied,
    ready,
    served,
    soon,
    until,
    with_models,
)
from tests.serving.serving_harness import eventually, png


@pytest.mark.parametrize("rules", [BatchRules(), GPU_RULES], ids=["cpu", "gpu"])
def test_what_is_cancelled_while_it_waits_is_never_computed(rules: BatchRules) -> None:
    session = HeldSession(rules=rules)

    async def scenario() -> None:
        with served(fake=session) as models:
            await occupied(models, session)
            cancelled = ask(models, png(40, 57), dense(40, 44, mirror=True), client="gone")
            other = ask(models, png(32, 41), dense(32))
            await until(lambda: ready(models) == 5)
            cancelled.cancel()
            await until(lambda: ready(models) == 1)
            session.free()
            await other
            with pytest.raises(asyncio.CancelledError):
                await cancelled
            assert counted(models, "dropped_views_total", "fake", reason="cancelled") == 4
            assert counted(models, "batch_views_sum", "fake") == 2

    with_models(scenario)
    assert len(session.calls) == 2


def test_what_is_cancelled_before_or_while_it_is_decoded_is_never_computed() -> None:
    held = png(32, 41, 2) + b"end"

    async def scenario() -> None:
        session = HeldSession()
        with served(QueueOptions(ready_views=1), fake=session) as models:
            busy = await occupied(models, session)
            gate = Gate(models, {len(held)})
            decoding = ask(models, held, dense(32, 50))
            await until(gate.entered.is_set)
            waiting = ask(models, png(40, 57), dense(40, 44, 48))
            await until(lambda: len(models.get("")._waiting._encoded) == 1)
            for task in (waiting, decoding):
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
            assert counted(models, "dropped_views_total", "fake", reason="cancelled") == 3
            assert gate.prepared == 1
            gate.open.set()
            await until(lambda: counted(models, "dropped_views_total", "fake", reason="cancelled") == 5)
            assert session.entered == 1
            assert ready(models) == 0
            session.free()
            await busy

    with_models(scenario)


def test_cancelling_what_is_being_computed_disturbs_nobody() -> None:
    session = HeldSession()

    async def scenario() -> None:
        with served(fake=session) as models:
            running = await occupied(models, session)
            other = ask(models, png(32, 41), dense(32))
            running.cancel()
            await asyncio.wait([running])
            session.free()
            await other
            assert counted(models, "dropped_views_total", "fake", reason="cancelled") == 0
            assert counted(models, "request_seconds_count", "fake") == 1, "no answer is made for who has left"

    with_models(scenario)


def test_a_caller_whose_time_is_over_is_told_at_once_and_nothing_of_it_is_computed() -> None:
    session = HeldSession()

    async def scenario() -> None:
        with served(fake=session) as models:
            first = await occupied(models, session)
            with pytest.raises(DeadlinePassed, match="is over"):  # while the device is held
                await ask(models, png(40, 57), dense(40, 44), deadline=soon(0.05))
            with pytest.raises(DeadlinePassed, match="is over"):
                await ask(models, png(40, 57), dense(40), deadline=soon(-0.01))
            session.free()
            await first
            assert counted(models, "dropped_views_total", "fake", reason="expired") == 2

    with_models(scenario)
    assert session.calls == [(1, 28, 28, 3)]


def test_a_view_with_far_less_time_than_its_batch_takes_is_not_run_and_later_ones_are_tried_again() -> None:
    session = FakeSession()

    async def scenario() -> None:
        with served(fake=session) as models:
            lane = models.get("")._lane
            lane.speed.measured(28 * 28, 3600.0)
            lane.speed.measured(28 * 28, 3600.0)
            for _ in range(2):
                with pytest.raises(DeadlinePassed, match="is shorter than a batch takes"):
                    await ask(models, png(32, 41), dense(32), deadline=soon(30))
            assert session.calls == []
            await ask(models, png(32, 41), dense(32), deadline=soon(30))
            assert counted(models, "dropped_views_total", "fake", reason="expired") == 2

    with_models(scenario)


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
def test_a_batch_is_expected_to_take_its_share_of_a_larger_one_and_no_less_than_a_smaller(
    batches: list[tuple[int, float]], pixels: int, expected: float
) -> None:
    speed = Speed()
    for measured in batches:
        speed.measured(*measured)
    assert speed.expected(pixels) == expected


def test_the_speed_is_told_in_one_thread_while_another_measures_and_a_third_doubts() -> None:
    speed, failed, ended = Speed(), list[Exception](), threading.Event()

    def again(work: Callable[[], object]) -> None:
        try:
            while not ended.is_set():
                work()
        except Exception as error:
            failed.append(error)

    told: list[float] = []
    works = (lambda: speed.measured(100, 2.0), lambda: told.append(speed.expected(50)), speed.doubted)
    threads = [threading.Thread(target=again, args=(work,)) for work in works for _ in range(2)]
    for thread in threads:
        thread.start()
    eventually(lambda: bool(failed) or len(told) > 20_000)
    ended.set()
    for thread in threads:
        thread.join()
    assert failed == []
    assert {*told} <= {0.0, 1.0}


def test_who_runs_out_of_time_while_it_waits_for_memory_to_be_decoded_in_holds_no_thread_any_more() -> None:
    async def scenario() -> None:
        with served(fake=FakeSession()) as models:
            classifier, waiting = models.get(""), models.get("")._waiting
            room = classifier._room = DecodingRoom(100)
            with room.place() as admit:
                admit(100)
                tasks = [ask(models, png(32, 41), dense(32), deadline=soon(0.2)) for _ in range(3)]
                await until(lambda: len(room._line) == min(3, cores()) or tasks[0].done())
                for task in tasks:
                    with pytest.raises(DeadlinePassed):
                        await task
                await until(lambda: not waiting._decoding)
                assert counted(models, "dropped_views_total", "fake", reason="expired") == 3
            await ask(models, png(32, 41), dense(32))

    with_models(scenario)


def test_a_staged_batch_runs_without_those_who_left_meanwhile() -> None:
    session = HeldSession(provider="CUDAExecutionProvider", rules=replace(GPU_RULES, max_pixels=3 * 32 * 44))

    async def scenario() -> None:
        with served(fake=session) as models:
            await occupied(models, session)
            tasks = [ask(models, png(32, 41, seed), dense(32), client=f"{seed}") for seed in range(3)]
            await until(lambda: all_decoded(models, 4) and not ready(models))
            tasks[1].cancel()
            await asyncio.wait([tasks[1]])
            session.free()
            for seed in (0, 2):
                (alone,) = classify_images(FakeSession(), [decode_rgb(png(32, 41, seed))], dense(32))
                np.testing.assert_array_equal((await tasks[seed]).scores, alone.scores)
            assert counted(models, "dropped_views_total", "fake", reason="cancelled") == 1
            assert counted(models, "batch_views_sum", "fake") == 3

    with_models(scenario)
    assert session.calls[1][0] == 3, "the shape stays that of the plan, because a new one costs a GPU time"


def test_a_view_that_is_computed_though_its_caller_has_left_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The counter that stays at 0 everywhere else: here whoever has left is run all the same."""
    session = HeldSession(provider="CUDAExecutionProvider", rules=replace(GPU_RULES, max_pixels=3 * 32 * 44))
    begin = Waiting.begin
    monkeypatch.setattr(Waiting, "begin", lambda waiting, views: (list(views), begin(waiting, views)[1]))

    async def scenario() -> None:
        with served(late=1, fake=session) as models:
            await occupied(models, session)
            tasks = [ask(models, png(32, 41, seed), dense(32), client=f"{seed}") for seed in range(3)]
            await until(lambda: all_decoded(models, 4) and not ready(models))
            tasks[1].cancel()
            await asyncio.wait([tasks[1]])
            session.free()
            await asyncio.gather(tasks[0], tasks[2])

    with_models(scenario)


def test_who_leaves_while_a_batch_is_planned_is_not_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    session, plan_views = HeldSession(), executor.plan_views

    async def scenario() -> None:
        with served(fake=session) as models:
            await occupied(models, session)
            tasks = [ask(models, png(32, 41, seed), dense(32), client=f"{seed}") for seed in range(3)]
            await until(lambda: ready(models) == 3)

            def planned(*arguments: object) -> Plan:
                plan = plan_views(*arguments)
                if waiting := list(models.get("")._waiting._ready):
                    monkeypatch.undo()
                    models.get("")._waiting.fail(waiting[1].request, RuntimeError("planted"))
                return plan

            monkeypatch.setattr(executor, "plan_views", planned)
            session.free()
            became = await asyncio.gather(*tasks, return_exceptions=True)
            assert sum(isinstance(answer, RuntimeError) for answer in became) == 1
            assert counted(models, "dropped_views_total", "fake", reason="failed") == 1

    with_models(scenario)
    assert session.calls == [(1, 28, 28, 3), (2, 32, 41, 3)]


def test_who_ran_out_of_time_is_left_out_also_where_no_timer_has_said_so() -> None:
    """As when the event loop has been held up."""
    lane = Lane("fake", FakeSession(), Metrics().of_model("fake", FakeSession()), lambda *_: [])

    async def scenario() -> None:
        def waiting_request(seconds: float) -> Request:
            reply = asyncio.get_running_loop().create_future()
            return Request(lane, b"", dense(32), Caller(deadline=soon(seconds)), lambda _: None, reply)

        waiting, views = Waiting(QueueOptions()), [ViewImage(View(32, mirrored=False), np.zeros((32, 41, 3)), False)]
        late, fine, later = requests = [waiting_request(seconds) for seconds in (0.0, 30.0, 30.0)]
        for request in requests:
            waiting.add(request)
        assert [waiting.next_image(), waiting.next_image()] == [fine, later]
        for request in (fine, later):
            waiting.decoded(request, ready_views(request, views))
        planned = waiting.next_views()
        assert planned is not None
        assert waiting.take(planned)
        later.caller = Caller(deadline=soon(0.0))
        wanted, _ = waiting.begin(planned)
        assert [view.request for view in wanted] == [fine]
        for request in (late, later):
            with pytest.raises(DeadlinePassed):
                await request.reply
        assert not fine.reply.done()

    with_models(scenario)


def test_closing_a_model_finishes_what_waits_and_lets_nothing_more_in() -> None:
    session = HeldSession()

    async def scenario() -> None:
        with served(fake=session, other=FakeSession()) as models:
            tasks = [await occupied(models, session), ask(models, png(32, 41), dense(32))]
            await until(lambda: ready(models) == 1)
            closing = asyncio.create_task(asyncio.to_thread(models.get("fake").close))
            await until(lambda: models.get("fake")._lane.closed)
            with pytest.raises(Interrupted, match="'fake' is served no more"):
                await ask(models, png(32, 41), dense(32))
            await ask(models, png(32, 41), dense(32), model="other") if session.free() else None
            await asyncio.gather(closing, *tasks)
            await ask(models, png(32, 41), dense(32), model="other")

    with_models(scenario)


def test_closing_everything_finishes_what_waits() -> None:
    session = HeldSession()

    async def scenario() -> None:
        with served(fake=session) as models:
            tasks = [await occupied(models, session), *(ask(models, png(32, 41), dense(32, 50)) for _ in range(5))]
            await until(lambda: models.get("")._lane.unanswered == 6)
            closing = asyncio.create_task(asyncio.to_thread(models.close))
            await until(lambda: models.get("")._lane.closed)
            session.free()
            assert len(await asyncio.gather(*tasks)) == 6
            await closing

    with_models(scenario)
