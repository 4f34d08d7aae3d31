"""What fails with a batch: no more than has to, and everything when the device is lost."""

import asyncio
import threading
import weakref
from dataclasses import replace

import numpy as np
import pytest

from prelunet.evaluator.engine.batching import BatchRules
from prelunet.evaluator.engine.classify import classify_images
from prelunet.evaluator.errors import DeviceLost, OutOfMemory
from prelunet.evaluator.imaging.decode import decode_rgb
from prelunet.evaluator.serving.options import QueueOptions
from prelunet.evaluator.serving.scheduling import executor
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
    until,
    with_models,
)
from tests.serving.serving_harness import png

MAGIC = 7  # seed of an image that some sessions do not bear


def magic(images: np.ndarray) -> bool:
    """Say whether the image that is not borne is in a batch."""
    with_it = decode_rgb(png(32, 41, seed=MAGIC))
    return any((image[:32, :41] == with_it).all() for image in images if image.shape[0] >= 32 and image.shape[1] >= 41)


def fails_with_magic(images: np.ndarray) -> None:
    if magic(images):
        raise RuntimeError("planted")


def test_one_bad_image_fails_alone_and_its_neighbours_are_answered() -> None:
    session = HeldSession(fail=fails_with_magic)

    async def scenario() -> None:
        with served(fake=session) as models:
            await occupied(models, session)
            images = [png(32, 41, seed) for seed in (1, 2, 3, MAGIC, 4, 5, 6, 8)]
            tasks = [ask(models, image, dense(32), client=f"{n}") for n, image in enumerate(images)]
            await until(lambda: ready(models) == 8)
            session.free()
            for task, image in zip(tasks, images, strict=True):
                if image == png(32, 41, MAGIC):
                    with pytest.raises(RuntimeError, match="planted"):
                        await task
                else:
                    (alone,) = classify_images(FakeSession(), [decode_rgb(image)], dense(32))
                    np.testing.assert_array_equal((await task).scores, alone.scores)
            assert await ask(models, png(32, 41, 9), dense(32)), "the device lives on"
            failures = counted(models, "batch_failures_total", "fake", reason="error")
            assert failures == 4, "of 8, 4, 2 and 1 views"

    with_models(scenario)


def test_the_other_views_of_a_request_that_failed_are_not_computed() -> None:
    session = HeldSession(fail=fails_with_magic)

    async def scenario() -> None:
        with served(fake=session) as models:
            await occupied(models, session)
            failing = ask(models, png(32, 41, MAGIC), dense(32, 50))
            await until(lambda: ready(models) == 2)
            session.free()
            with pytest.raises(RuntimeError, match="planted"):
                await failing
            assert counted(models, "dropped_views_total", "fake", reason="failed") == 1

    with_models(scenario)
    assert {shape[1] for shape in session.calls} == {28}


@pytest.mark.parametrize("rules", [BatchRules(), GPU_RULES], ids=["cpu", "gpu"])
def test_too_little_memory_for_a_batch_splits_it_and_all_are_answered(rules: BatchRules) -> None:
    def out_of_memory(images: np.ndarray) -> None:
        if len(images) > 2:
            raise OutOfMemory("planted")

    session = HeldSession(rules=rules, fail=out_of_memory)

    async def scenario() -> None:
        with served(fake=session) as models:
            await occupied(models, session)
            tasks = [ask(models, png(32, 41, seed), dense(32)) for seed in range(7)]
            await until(lambda: ready(models) == 7)
            session.free()
            answers = await asyncio.gather(*tasks)
            assert len({answer.scores.tobytes() for answer in answers}) == 7
            assert counted(models, "batch_failures_total", "fake", reason="memory") == 3

    with_models(scenario)
    assert max(shape[0] for shape in session.calls) == 2


def test_a_view_that_alone_is_too_large_for_the_memory_is_told_so_and_the_device_is_not_lost() -> None:
    def out_of_memory(images: np.ndarray) -> None:
        if images.shape[1] > 40:
            raise OutOfMemory("planted")

    async def scenario() -> None:
        with served(fake=HeldSession(fail=out_of_memory)) as models:
            models.get("").session.free()
            with pytest.raises(OutOfMemory, match="planted"):
                await ask(models, png(48, 61, 1), dense(48))
            await ask(models, png(32, 41, 1), dense(32))

    with_models(scenario)


@pytest.mark.parametrize("error", [DeviceLost("planted"), RuntimeError("planted")], ids=["known", "found by probing"])
def test_a_lost_device_fails_all_that_waits_and_comes_and_is_told_once(error: Exception) -> None:
    def broken(images: np.ndarray) -> None:
        if lost.is_set():
            raise error

    lost, told = threading.Event(), []
    session = HeldSession(fail=broken)

    async def scenario() -> None:
        with served(QueueOptions(ready_views=5), told.append, fake=session, other=FakeSession()) as models:
            first = await occupied(models, session)
            gate = Gate(models, set())
            tasks = [ask(models, png(32, 41 + seed, seed), dense(32), client=f"{seed}") for seed in range(4)]
            tasks.append(ask(models, png(32, 41, 5), dense(32, 33, 34, 35)))  # for whose views there is no room
            await until(lambda: ready(models) == 4 and len(models.get("fake")._waiting._encoded) == 1)
            lost.set()
            session.free()
            for task in (first, *tasks, ask(models, png(32, 41), dense(32), model="other")):
                with pytest.raises(DeviceLost, match="planted"):
                    await task
            assert not models.get("fake")._waiting.lose(DeviceLost("again"), []), "that is no news"
            assert gate.prepared == 4, "what still waits to be decoded need not be any more"

    with_models(scenario)
    assert len(told) == 1
    assert "planted" in str(told[0])
    assert session.calls == []


def test_an_image_that_is_decoded_while_the_device_is_lost_fails_too() -> None:
    late = png(32, 41, 2) + b"end"

    def lost_at_first(_images: np.ndarray) -> None:
        if not told:
            raise DeviceLost("planted")

    told: list[DeviceLost] = []

    async def scenario() -> None:
        session = HeldSession(fail=lost_at_first)
        session.free()
        with served(QueueOptions(batch_wait=0), on_lost=told.append, fake=session) as models:
            gate = Gate(models, {len(late)})
            decoding = ask(models, late, dense(32))
            await until(gate.entered.is_set)
            for task in (ask(models, png(32, 41), dense(32)), decoding):
                with pytest.raises(DeviceLost, match="planted"):
                    await task
                await until(lambda: told)
                gate.open.set()
        assert session.entered == 1

    with_models(scenario)


def test_an_error_outside_of_the_session_fails_one_request_and_the_thread_lives_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def scenario() -> None:
        with served(fake=FakeSession()) as models:
            for function in ("plan_views", "pack_batch", "results_of"):
                with monkeypatch.context() as patch:

                    def no_memory(*_arguments, **_options):
                        raise MemoryError("planted")

                    patch.setattr(executor, function, no_memory)
                    with pytest.raises(OutOfMemory, match="too little main memory"):
                        await ask(models, png(32, 41), dense(32))
                await ask(models, png(32, 41), dense(32))

    with_models(scenario)


def test_what_cannot_be_staged_ahead_is_computed_all_the_same() -> None:
    class Failing(HeldSession):
        def stage(self, images, sizes):
            if threading.current_thread().name.startswith("stage"):
                raise OutOfMemory("planted")
            return super().stage(images, sizes)

    session = Failing(provider="CUDAExecutionProvider", rules=replace(GPU_RULES, max_pixels=3 * 32 * 44))

    async def scenario() -> None:
        with served(fake=session) as models:
            await occupied(models, session)
            tasks = [ask(models, png(32, 41, seed), dense(32)) for seed in range(3)]
            await until(lambda: all_decoded(models, 4) and not ready(models))
            session.free()
            assert len(await asyncio.gather(*tasks)) == 3

    with_models(scenario)


@pytest.mark.parametrize(
    ("error", "failures"), [(RuntimeError("planted"), {"error": 2}), (OutOfMemory("planted"), {"memory": 2})]
)
def test_window_scores_that_cannot_be_fetched_fail_the_request_that_wants_them_and_no_other(
    error: Exception, failures: dict[str, int]
) -> None:
    class NoWindows(HeldSession):
        def compute(self, staged):
            def fetch():
                raise error

            return replace(super().compute(staged), take_window_scores=fetch)

    session = NoWindows()

    async def scenario() -> None:
        with served(fake=session) as models:
            await occupied(models, session)
            image, classifier = png(32, 41, 1), models.get("fake")
            mapped = asyncio.create_task(classifier.answer(image, dense(32), 2, heatmap=True))
            plain = ask(models, png(32, 41, 2), dense(32))
            await until(lambda: ready(models) == 2)
            session.free()
            with pytest.raises(type(error), match="planted"):
                await mapped
            assert (await plain).views[0].window_scores is None
            assert await ask(models, png(32, 41, 9), dense(32)), "the device lives on"
            for reason, number in failures.items():
                assert counted(models, "batch_failures_total", "fake", reason=reason) == number, "of two views, and one"

    with_models(scenario)


@pytest.mark.parametrize("staged", [False, True])
def test_the_canvases_of_a_batch_that_failed_are_gone_before_less_is_tried(staged: bool) -> None:
    """Also those that were staged, and those in the frames of the error."""
    canvases: list[weakref.ref[np.ndarray]] = []
    alive: list[int] = []

    def runtime(images: np.ndarray) -> None:
        if len(images) > 1:
            raise RuntimeError("the runtime's own")

    def fail(images: np.ndarray) -> None:
        alive.append(sum(found() is not None for found in canvases))
        canvases.append(weakref.ref(images))
        try:
            runtime(images)
        except RuntimeError as error:
            del images
            raise OutOfMemory("planted") from error

    if staged:
        rules = replace(GPU_RULES, max_pixels=4 * 32 * 44)
        session = HeldSession(provider="CUDAExecutionProvider", rules=rules, fail=fail)
    else:
        session = HeldSession(fail=fail)

    async def scenario() -> None:
        with served(fake=session) as models:
            await occupied(models, session)
            tasks = [ask(models, png(32, 41, seed), dense(32)) for seed in range(4)]
            await until(lambda: all_decoded(models, 5))
            await until(lambda: not ready(models) if staged else ready(models) == 4)
            session.free()
            await asyncio.gather(*tasks)

    with_models(scenario)
    assert len(alive) == 1 + 7, "of 4, 2, 1, 1, 2, 1 and 1 views"
    assert max(alive) == 0


def test_views_of_which_nothing_can_be_made_fail_their_request_and_the_thread_that_decodes_lives_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def planted(*_arguments: object) -> tuple[int, int]:
        raise MemoryError("planted")

    async def scenario() -> None:
        with served(fake=FakeSession()) as models:
            threads = [thread for thread in threading.enumerate() if thread.name.startswith("decode-")]
            for _ in range(2 * len(threads)):
                with monkeypatch.context() as patch:
                    patch.setattr(models.get("")._lane, "canvas_of", planted)
                    with pytest.raises(OutOfMemory, match="too little main memory"):
                        await ask(models, png(32, 41), dense(32))
            await ask(models, png(32, 41), dense(32))
            assert all(thread.is_alive() for thread in threads)

    with_models(scenario)
