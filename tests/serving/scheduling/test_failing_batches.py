"""A failed batch fails as few requests as possible, a lost device all of them."""

import asyncio
import threading
import weakref
from contextlib import ExitStack
from dataclasses import replace

import numpy as np
import pytest
from msgspec import structs

from prelunet.evaluator.engine.batching import BatchRules
from prelunet.evaluator.engine.classify import classify_images
from prelunet.evaluator.errors import DeviceLost, OutOfMemory
from prelunet.evaluator.imaging.decode import decode_rgb
from prelunet.evaluator.machine import cores
from prelunet.evaluator.serving.data_plane import DataPlane
from prelunet.evaluator.serving.observability.call_context import Call
from prelunet.evaluator.serving.options import QueueOptions
from prelunet.evaluator.serving.scheduling import executor
from prelunet.evaluator.serving.scheduling import request as request_module
from prelunet.evaluator.serving.scheduling.model import RequestOptions
from tests.helpers.fakes import FakeSession
from tests.serving.event_loop import async_test, until
from tests.serving.scheduling.scheduler_harness import (
    GPU_RULES,
    STAGING,
    DecodeGate,
    SteppedSession,
    all_decoded,
    dense_protocol,
    metric_value,
    occupy_device,
    ready_view_count,
    serve_models,
    stage_batch,
    start_classify,
)
from tests.serving.serving_harness import png

MAGIC = 7  # seed of an image on which some sessions fail


def magic(images: np.ndarray) -> bool:
    """Return whether the failing image is in a batch."""
    with_it = decode_rgb(png(32, 41, seed=MAGIC))
    return any((image[:32, :41] == with_it).all() for image in images if image.shape[0] >= 32 and image.shape[1] >= 41)


def fails_with_magic(images: np.ndarray) -> None:
    if magic(images):
        raise RuntimeError("planted")


@async_test
async def test_one_bad_image_fails_alone_and_the_others_of_its_batch_are_answered() -> None:
    session = SteppedSession(fail=fails_with_magic)

    with serve_models(fake=session) as models:
        await occupy_device(models, session)
        images = [png(32, 41, seed) for seed in (1, 2, 3, MAGIC, 4, 5, 6, 8)]
        tasks = [start_classify(models, image, dense_protocol(32), client=f"{n}") for n, image in enumerate(images)]
        await until(lambda: ready_view_count(models) == 8)
        session.release_all()
        for task, image in zip(tasks, images, strict=True):
            if image == png(32, 41, MAGIC):
                with pytest.raises(RuntimeError, match="planted"):
                    await task
            else:
                (alone,) = classify_images(FakeSession(), [decode_rgb(image)], dense_protocol(32))
                np.testing.assert_array_equal((await task).scores, alone.scores)
        assert await start_classify(models, png(32, 41, 9), dense_protocol(32)), "the device keeps working"
        failures = metric_value(models, "batch_failures_total", "fake", reason="error")
        assert failures == 4, "of 8, 4, 2 and 1 views"


@async_test
async def test_the_other_views_of_a_failed_request_are_not_computed() -> None:
    session = SteppedSession(fail=fails_with_magic)

    with serve_models(fake=session) as models:
        await occupy_device(models, session)
        failing = start_classify(models, png(32, 41, MAGIC), dense_protocol(32, 50))
        await until(lambda: ready_view_count(models) == 2)
        session.release_all()
        with pytest.raises(RuntimeError, match="planted"):
            await failing
        assert metric_value(models, "dropped_views_total", "fake", reason="failed") == 1
    assert {shape[1] for shape in session.calls} == {28}


@pytest.mark.parametrize("rules", [BatchRules(), GPU_RULES], ids=["cpu", "gpu"])
@async_test
async def test_a_batch_too_large_for_the_memory_is_split_and_all_requests_are_answered(rules: BatchRules) -> None:
    def out_of_memory(images: np.ndarray) -> None:
        if len(images) > 2:
            raise OutOfMemory("planted")

    session = SteppedSession(rules=rules, fail=out_of_memory)

    with serve_models(fake=session) as models:
        await occupy_device(models, session)
        tasks = [start_classify(models, png(32, 41, seed), dense_protocol(32)) for seed in range(7)]
        await until(lambda: ready_view_count(models) == 7)
        session.release_all()
        answers = await asyncio.gather(*tasks)
        assert len({answer.scores.tobytes() for answer in answers}) == 7
        assert metric_value(models, "batch_failures_total", "fake", reason="memory") == 3
    assert max(shape[0] for shape in session.calls) == 2


@async_test
async def test_a_view_too_large_for_the_memory_fails_and_the_device_is_not_lost() -> None:
    def out_of_memory(images: np.ndarray) -> None:
        if images.shape[1] > 40:
            raise OutOfMemory("planted")

    with serve_models(fake=SteppedSession(fail=out_of_memory)) as models:
        models.get("").session.release_all()
        with pytest.raises(OutOfMemory, match="planted"):
            await start_classify(models, png(48, 61, 1), dense_protocol(48))
        await start_classify(models, png(32, 41, 1), dense_protocol(32))


@pytest.mark.parametrize("error", [DeviceLost("planted"), RuntimeError("planted")], ids=["known", "found by probing"])
@async_test
async def test_a_lost_device_fails_all_waiting_and_later_requests_and_is_reported_once(error: Exception) -> None:
    def broken(images: np.ndarray) -> None:
        if lost.is_set():
            raise error

    lost, reported = threading.Event(), []
    session = SteppedSession(fail=broken)

    with (
        serve_models(
            QueueOptions(turn_cost=0, ready_views=5), reported.append, fake=session, other=FakeSession()
        ) as models,
        ExitStack() as stack,
    ):
        first = await occupy_device(models, session)
        gate = stack.enter_context(DecodeGate(set()))
        tasks = [
            start_classify(models, png(32, 41 + seed, seed), dense_protocol(32), client=f"{seed}") for seed in range(4)
        ]
        tasks.append(start_classify(models, png(32, 41, 5), dense_protocol(32, 33, 34, 35)))  # no room for their views
        await until(lambda: ready_view_count(models) == 4 and metric_value(models, "waiting_images", "fake") == 6)
        lost.set()
        session.release_all()
        for task in (first, *tasks, start_classify(models, png(32, 41), dense_protocol(32), model="other")):
            with pytest.raises(DeviceLost, match="planted"):
                await task
        assert not models.get("fake").waiting.mark_lost(DeviceLost("again"), []), "the device was lost already"
        assert len(gate.threads) == 4, "waiting images are not decoded any more"
    assert len(reported) == 1
    assert "planted" in str(reported[0])
    assert session.calls == []


@async_test
async def test_an_image_being_decoded_when_the_device_is_lost_fails_too() -> None:
    late = png(32, 41, 2) + b"end"

    def lost_at_first(_images: np.ndarray) -> None:
        if not reported:
            raise DeviceLost("planted")

    reported: list[DeviceLost] = []

    session = SteppedSession(fail=lost_at_first)
    session.release_all()
    with (
        serve_models(QueueOptions(turn_cost=0, batch_wait=0), on_lost=reported.append, fake=session) as models,
        DecodeGate({len(late)}) as gate,
    ):
        decoding = start_classify(models, late, dense_protocol(32))
        await until(gate.entered.is_set)
        for task in (start_classify(models, png(32, 41), dense_protocol(32)), decoding):
            with pytest.raises(DeviceLost, match="planted"):
                await task
            await until(lambda: reported)
            gate.open.set()
    assert session.entered == 1


@pytest.mark.parametrize(
    ("owner", "function"),
    [(executor, "plan_views"), (executor, "pack_batch"), (executor, "unpack_results"), (request_module, "cut_views")],
)
@async_test
async def test_an_error_outside_of_the_session_fails_one_request_and_all_threads_continue(
    owner: object, function: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_memory(*_arguments: object, **_options: object) -> None:
        raise MemoryError("planted")

    with serve_models(fake=FakeSession()) as models:
        for _ in range(2 * cores()):  # more often than there are decoding threads
            with monkeypatch.context() as patch:
                patch.setattr(owner, function, no_memory)
                with pytest.raises(OutOfMemory, match="too little main memory"):
                    await start_classify(models, png(32, 41), dense_protocol(32))
        await start_classify(models, png(32, 41), dense_protocol(32))


@async_test
async def test_a_batch_that_cannot_be_staged_ahead_is_computed_anyway() -> None:
    class Failing(SteppedSession):
        def stage(self, images, sizes):
            if threading.current_thread().name.startswith("stage"):
                raise OutOfMemory("planted")
            return super().stage(images, sizes)

    session = Failing(**STAGING)

    with serve_models(fake=session) as models:
        _, tasks = await stage_batch(models, session)
        session.release_all()
        assert len(await asyncio.gather(*tasks)) == 3


@pytest.mark.parametrize(
    ("error", "failures"), [(RuntimeError("planted"), {"error": 2}), (OutOfMemory("planted"), {"memory": 2})]
)
@async_test
async def test_window_scores_that_cannot_be_fetched_fail_only_the_request_that_needs_them(
    error: Exception, failures: dict[str, int]
) -> None:
    class NoWindows(SteppedSession):
        def compute(self, staged):
            def fetch():
                raise error

            return structs.replace(super().compute(staged), fetch_window_scores=fetch)

    session = NoWindows()

    with serve_models(fake=session) as models:
        await occupy_device(models, session)
        options = RequestOptions("dense-32", mirror=False, heatmap=True)
        answer = DataPlane(models).classify(png(32, 41, 1), "fake", options, Call())
        mapped = asyncio.create_task(answer)
        plain = start_classify(models, png(32, 41, 2), dense_protocol(32))
        await until(lambda: ready_view_count(models) == 2)
        session.release_all()
        with pytest.raises(type(error), match="planted"):
            await mapped
        assert (await plain).views[0].window_scores is None
        assert await start_classify(models, png(32, 41, 9), dense_protocol(32)), "the device keeps working"
        for reason, number in failures.items():
            assert metric_value(models, "batch_failures_total", "fake", reason=reason) == number, (
                "of two views, and one"
            )


@pytest.mark.parametrize("staged", [False, True])
@async_test
async def test_the_canvases_of_a_failed_batch_are_freed_before_it_is_retried(staged: bool) -> None:
    """Including staged ones and those in the frames of the error."""
    canvases: list[weakref.ref[np.ndarray]] = []
    alive: list[int] = []

    def runtime(images: np.ndarray) -> None:
        if len(images) > 1:
            raise RuntimeError("the runtime's own")

    def fail(images: np.ndarray) -> None:
        alive.append(sum(reference() is not None for reference in canvases))
        canvases.append(weakref.ref(images))
        try:
            runtime(images)
        except RuntimeError as error:
            del images
            raise OutOfMemory("planted") from error

    if staged:
        rules = replace(GPU_RULES, max_pixels=4 * 32 * 44)
        session = SteppedSession(provider="CUDAExecutionProvider", rules=rules, fail=fail)
    else:
        session = SteppedSession(fail=fail)

    with serve_models(fake=session) as models:
        await occupy_device(models, session)
        tasks = [start_classify(models, png(32, 41, seed), dense_protocol(32)) for seed in range(4)]
        await until(lambda: all_decoded(models, 5))
        await until(lambda: not ready_view_count(models) if staged else ready_view_count(models) == 4)
        session.release_all()
        await asyncio.gather(*tasks)
    assert len(alive) == 1 + 7, "of 4, 2, 1, 1, 2, 1 and 1 views"
    assert max(alive) == 0
