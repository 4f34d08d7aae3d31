"""A hanging device is detected, not too early, and no caller keeps waiting for it."""

import asyncio
import threading
from contextlib import ExitStack
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

from prelunet.evaluator.errors import DeviceLost
from prelunet.evaluator.machine import cores
from prelunet.evaluator.serving import lifecycle
from prelunet.evaluator.serving.options import QueueOptions
from prelunet.evaluator.serving.scheduling import watchdog
from prelunet.evaluator.serving.scheduling.model import ServedModel
from prelunet.evaluator.serving.scheduling.watchdog import (
    CHECK_INTERVAL,
    FIRST_BATCH_TIMEOUT,
    HANG_FACTOR,
    MIN_TIMEOUT,
    Watchdog,
)
from tests.serving.event_loop import async_test, until
from tests.serving.scheduling.scheduler_harness import (
    STAGING,
    DecodeGate,
    SteppedSession,
    all_decoded,
    build_model,
    dense_protocol,
    metric_value,
    occupy_device,
    serve_models,
    start_classify,
)
from tests.serving.serving_harness import png


@dataclass
class Clock:
    """A clock that the test advances."""

    now: float = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(watchdog, "time", clock)
    return clock


def hang_timeout(watching: Watchdog, reported: list[DeviceLost], of: ServedModel, pixels: int) -> int:
    """Return the number of seconds after which a batch is reported as hanging."""
    with watching.watch_batch(of, [], pixels):
        for seconds in range(100_000):
            if reported:
                reported.clear()
                return seconds - 1  # the longest time allowed
            watching.check(1)
    raise AssertionError("the batch is never reported")


def test_a_batch_may_take_twenty_times_the_longest_of_its_model_in_proportion_to_its_size(clock: Clock) -> None:
    reported: list[DeviceLost] = []
    watching, model, other = Watchdog(lambda error, _: reported.append(error)), build_model(), build_model(name="other")

    def measured(of: ServedModel, seconds: int, pixels: int) -> None:
        with watching.watch_batch(of, [], pixels):
            for _ in range(seconds):
                clock.now += 1
                watching.check(1)

    assert hang_timeout(watching, reported, model, 100) == FIRST_BATCH_TIMEOUT, (
        "a hanging batch does not count as the longest"
    )
    measured(model, 1, 100)
    assert hang_timeout(watching, reported, model, 100) == MIN_TIMEOUT
    assert hang_timeout(watching, reported, model, 1000) == HANG_FACTOR * 10
    measured(model, 10, 100)
    measured(model, 1, 500)
    assert [hang_timeout(watching, reported, model, pixels) for pixels in (50, 100, 300)] == [200, 200, 600]
    assert hang_timeout(watching, reported, other, 100) == FIRST_BATCH_TIMEOUT


def test_an_hour_of_suspension_does_not_raise_the_timeout(clock: Clock) -> None:
    reported: list[DeviceLost] = []
    watching, model = Watchdog(lambda error, _: reported.append(error)), build_model()
    with watching.watch_batch(model, [], 100):
        clock.now += 3600  # without a check
    assert hang_timeout(watching, reported, model, 100) == MIN_TIMEOUT


def test_a_batch_that_fails_says_nothing_of_the_time_of_others(clock: Clock) -> None:
    reported: list[DeviceLost] = []
    watching, model = Watchdog(lambda error, _: reported.append(error)), build_model()
    with pytest.raises(MemoryError), watching.watch_batch(model, [], 100):
        raise MemoryError
    assert hang_timeout(watching, reported, model, 100) == FIRST_BATCH_TIMEOUT


def test_a_hanging_batch_is_reported_once_with_its_views_and_no_other_is(clock: Clock) -> None:
    reported: list[tuple[DeviceLost, Any]] = []
    watching, model = Watchdog(lambda *arguments: reported.append(arguments)), build_model()
    hung, late = [object()], [object()]
    with watching.watch_batch(model, hung, 9):  # type: ignore[arg-type]
        watching.check(FIRST_BATCH_TIMEOUT)
        with watching.watch_batch(model, late, 9):  # type: ignore[arg-type]
            watching.check(1)
            watching.check(1)
    [(error, views)] = reported
    assert views is hung
    assert "CPUExecutionProvider has been computing one batch for 601 s" in str(error)


def test_time_in_which_the_process_was_suspended_does_not_count(clock: Clock) -> None:
    reported: list[DeviceLost] = []
    watching, looks = Watchdog(lambda error, _: reported.append(error)), 0

    def wait(seconds: float) -> bool:
        nonlocal looks
        assert seconds == CHECK_INTERVAL
        looks += 1
        clock.now += 1e6
        return looks > FIRST_BATCH_TIMEOUT / CHECK_INTERVAL

    with watching.watch_batch(build_model(), [], 9):
        watching.watch(SimpleNamespace(wait=wait))  # type: ignore[arg-type]
        assert reported == []
        looks = 0
        watching.watch(SimpleNamespace(wait=wait))  # type: ignore[arg-type]
        assert len(reported) == 1


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Report every batch that takes longer than a moment as hanging."""
    monkeypatch.setattr(watchdog, "FIRST_BATCH_TIMEOUT", 0.05)
    monkeypatch.setattr(watchdog, "MIN_TIMEOUT", 0.05)
    monkeypatch.setattr(watchdog, "CHECK_INTERVAL", 0.01)
    monkeypatch.setattr(lifecycle, "CLOSE_TIMEOUT", 0.2)


@pytest.mark.usefixtures("impatient")
@async_test
async def test_a_hanging_device_fails_all_waiting_and_later_requests_and_is_reported_once() -> None:
    reported: list[DeviceLost] = []
    session = SteppedSession()

    with serve_models(QueueOptions(turn_cost=0, ready_views=2), reported.append, fake=session) as models:
        tasks = [await occupy_device(models, session)]
        tasks += [
            start_classify(models, png(32, 41 + seed, seed), dense_protocol(32), client=f"{seed}") for seed in range(5)
        ]
        for task in tasks:
            with pytest.raises(DeviceLost, match="computing one batch"):
                await task
        with pytest.raises(DeviceLost, match="computing one batch"):
            await start_classify(models, png(32, 41), dense_protocol(32))
        assert metric_value(models, "batch_failures_total", "fake", reason="lost") == 1
        session.release_all()  # the batch ends after all, without effect
    assert len(reported) == 1
    assert session.entered == 1


@pytest.mark.usefixtures("impatient")
@async_test
async def test_images_decoded_in_one_go_with_that_of_a_hanging_batch_fail_too() -> None:
    session = SteppedSession()
    session.lanes = threads = max(2, cores())

    with serve_models(QueueOptions(), fake=session) as models, ExitStack() as stack:
        damaged = [png(32, 41)[: 1000 - number] for number in range(threads)]
        gates = [stack.enter_context(DecodeGate({len(image)})) for image in damaged]
        holding = []
        for image, gate in zip(damaged, gates, strict=True):
            holding.append(start_classify(models, image, dense_protocol(28)))
            await until(gate.entered.is_set)
        tasks = [start_classify(models, png(28, 30 + 4 * number), dense_protocol(28)) for number in range(threads)]
        await until(lambda: len(list(models.get("fake").waiting.images)) == threads)
        gates[0].open.set()  # its thread takes all of them, which need a batch each
        for task in tasks:
            with pytest.raises(DeviceLost, match="computing one batch"):
                async with asyncio.timeout(10):
                    await task
        assert session.entered == 1
        for gate in gates:
            gate.open.set()
        await asyncio.gather(*holding, return_exceptions=True)


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("hung", ["stage", "compute", "compute during stage"])
@async_test
async def test_on_a_gpu_a_staged_batch_fails_too_whichever_thread_hangs(
    hung: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    release, lost = threading.Event(), threading.Event()

    class Hanging(SteppedSession):
        def stage(self, images: Any, sizes: Any) -> Any:
            if threading.current_thread().name.startswith("stage"):
                monkeypatch.setattr(watchdog, "FIRST_BATCH_TIMEOUT", 0.05)  # not before it is there
                assert hung == "compute" or (release if hung == "stage" else lost).wait(30)
            return super().stage(images, sizes)

    monkeypatch.setattr(watchdog, "FIRST_BATCH_TIMEOUT", 600.0)
    session = Hanging(**STAGING)

    with serve_models(on_lost=lambda _: lost.set(), fake=session) as models:
        first = await occupy_device(models, session)
        if hung == "compute during stage":
            await asyncio.sleep(0.1)  # so that the first batch is the first to take too long
        tasks = [start_classify(models, png(32, 41, seed), dense_protocol(32)) for seed in range(3)]
        await until(lambda: all_decoded(models, 4) or tasks[0].done())
        for task in tasks if hung == "stage" else (first, *tasks):
            with pytest.raises(DeviceLost, match="computing one batch"):
                await task
        assert session.entered == 1, "nothing should have to move for that"
        release.set()
        session.release_all()
        await asyncio.gather(first, return_exceptions=True)
