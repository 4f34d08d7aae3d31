"""How waiting views are batched: which share a batch, in which order, and what is decoded meanwhile."""

import asyncio
import threading
from typing import Any

import numpy as np
import pytest

from prelunet.evaluator.engine.batching import BatchRules
from prelunet.evaluator.engine.classify import classify_images
from prelunet.evaluator.engine.session import Outputs
from prelunet.evaluator.imaging.decode import decode_rgb
from prelunet.evaluator.machine import cores
from prelunet.evaluator.protocols import EvaluationProtocol, build_protocol
from prelunet.evaluator.serving.data_plane import DataPlane
from prelunet.evaluator.serving.decoding import DecodeProcess
from prelunet.evaluator.serving.observability.call_context import Call
from prelunet.evaluator.serving.options import QueueOptions
from prelunet.evaluator.serving.scheduling import request as request_module
from prelunet.evaluator.serving.scheduling.model import RequestOptions
from tests.helpers.fakes import FakeSession, fake_contract
from tests.serving.event_loop import async_test, until
from tests.serving.scheduling.scheduler_harness import (
    GPU_RULES,
    DecodeGate,
    SteppedSession,
    all_decoded,
    build_model,
    build_request,
    dense_protocol,
    metric_value,
    occupy_device,
    ready_view_count,
    serve_models,
    start_classify,
)
from tests.serving.serving_harness import png, webp


@pytest.mark.parametrize("provider", ["CPUExecutionProvider", "CUDAExecutionProvider"])
@async_test
async def test_requests_share_batches_and_get_the_answers_they_get_alone(provider: str) -> None:
    session = SteppedSession(provider=provider, rules=BatchRules() if provider.startswith("CPU") else GPU_RULES)
    images = [png(32, 41 + 5 * (seed % 3), seed) for seed in range(9)]
    protocol = dense_protocol(32, 48, mirror=True)

    with serve_models(fake=session) as models:
        first = await occupy_device(models, session)
        tasks = [start_classify(models, image, protocol) for image in images]
        await until(lambda: all_decoded(models, 10))
        session.release_all()
        for image, task in zip(images, tasks, strict=True):
            (alone,) = classify_images(FakeSession(), [decode_rgb(image)], protocol)
            result = await task
            np.testing.assert_array_equal(result.scores, alone.scores)
            assert [view.windows for view in result.views] == [view.windows for view in alone.views]
        await first
        assert metric_value(models, "batch_views_sum", "fake") == 37
    assert len(session.calls) < 20


@async_test
async def test_on_a_cpu_a_thread_that_does_not_compute_decodes_images_small_or_not() -> None:
    session = SteppedSession(provider="CPUExecutionProvider", rules=BatchRules())

    with serve_models(QueueOptions(turn_cost=50_000), fake=session) as models, DecodeGate(set()) as gate:
        await occupy_device(models, session)
        tasks = [start_classify(models, png(32, 41, seed), dense_protocol(32)) for seed in range(4)]
        await until(lambda: ready_view_count(models) == 4)
        assert session.calls == [], "all of them are decoded during the batch"
        session.release_all()
        await asyncio.gather(*tasks)
        await start_classify(models, png(100, 128), dense_protocol(32))
    assert gate.threads == ["compute-cpu"] * 6
    assert session.calls == [(1, 28, 28, 3), (4, 32, 41, 3), (1, 32, 41, 3)]


@pytest.mark.parametrize(
    ("limits", "turns"),
    [
        ({}, [4, 1]),  # a view of 45x45 takes 44 million multiply-adds here, of 200
        ({"turn_work": 10**8}, [2, 2, 1]),
        ({"turn_work": 10**6}, [1, 1, 1, 1, 1]),
        ({"turn_cost": 5 * 10**5}, [2, 2, 1]),
        ({"turn_cost": 10**5}, [1, 1, 1, 1, 1]),
    ],
)
@async_test
async def test_a_thread_takes_several_photos_in_a_turn_that_decoding_or_the_net_makes_short(
    limits: dict[str, int], turns: list[int]
) -> None:
    """A newcomer waits for the turns that have begun."""
    model = build_model(queue=QueueOptions(**limits))  # type: ignore[arg-type]
    for seed in range(5):
        model.waiting.add(build_request(model, png(100, 128, seed), dense_protocol(45)))
    found: list[int] = []
    while taken := model.waiting.take_images():
        found.append(len(taken))
    assert found == turns


@async_test
async def test_on_a_gpu_the_thread_that_computes_decodes_nothing() -> None:
    session = FakeSession(provider="CUDAExecutionProvider", rules=GPU_RULES)

    with serve_models(QueueOptions(turn_cost=50_000), fake=session) as models, DecodeGate(set()) as gate:
        for image in (png(32, 41), png(100, 128)):
            await start_classify(models, image, dense_protocol(32))
    assert [thread.rpartition("-")[0] for thread in gate.threads] == ["decode-cuda-0"] * 2


@async_test
async def test_on_a_cpu_views_of_equal_shape_share_a_batch() -> None:
    session = SteppedSession()

    with serve_models(fake=session) as models:
        await occupy_device(models, session)
        tasks = []
        for side, width in ((32, 41), (48, 61), (32, 41)):
            tasks.append(start_classify(models, png(side, width, len(tasks)), dense_protocol(side)))
            await until(lambda: ready_view_count(models) == len(tasks))
        session.release_all()
        await asyncio.gather(*tasks)
    assert session.calls == [(1, 28, 28, 3), (2, 32, 41, 3), (1, 48, 61, 3)]


@async_test
async def test_a_batch_runs_on_the_canvas_planned_among_all_waiting_views() -> None:
    """Eight small views wait before eight large ones: planned alone they would get a smaller canvas.

    That would cost a GPU new plans twice.
    """
    session = SteppedSession(rules=GPU_RULES)

    with serve_models(fake=session) as models:
        await occupy_device(models, session)
        tasks = [start_classify(models, png(32, 41, seed), dense_protocol(32)) for seed in range(8)]
        await until(lambda: ready_view_count(models) == 8)
        tasks += [start_classify(models, png(48, 61, seed), dense_protocol(48)) for seed in range(8)]
        await until(lambda: ready_view_count(models) == 16)
        session.release_all()
        await asyncio.gather(*tasks)
    assert session.calls == [(1, 28, 28, 3), (8, 48, 64, 3), (8, 48, 64, 3)]


@pytest.mark.parametrize("large", ["many images", "one image of many views"])
@async_test
async def test_a_large_client_delays_the_small_image_of_another_by_at_most_one_batch(large: str) -> None:
    session = SteppedSession(rules=BatchRules(max_pixels=4 * 32 * 41))

    with serve_models(fake=session) as models:
        await occupy_device(models, session)
        if large == "many images":
            tasks = [
                start_classify(models, png(32, 41, seed), dense_protocol(32), client="large") for seed in range(40)
            ]
        else:
            scales = tuple(range(28, 40))
            tasks = [
                start_classify(models, png(32, 41, seed), dense_protocol(*scales), client="large") for seed in range(3)
            ]
        await until(lambda: ready_view_count(models) >= 36)
        session.release_batches()  # one batch of the large client starts
        await until(lambda: session.entered == 2)
        small = start_classify(models, png(33, 35, 1), dense_protocol(33), client="small")
        await until(lambda: all_decoded(models, len(tasks) + 1))
        session.release_batches(2)
        await small
        assert len(session.calls) == 3
        assert session.calls[-1] == (1, 33, 35, 3)
        session.release_all()
        await asyncio.gather(*tasks)


@async_test
async def test_models_of_one_device_take_turns_and_share_its_threads() -> None:
    rules = BatchRules(max_pixels=2 * 32 * 41)
    sessions = {name: SteppedSession(rules=rules, seed=seed) for seed, name in enumerate(("busy", "quiet"))}
    order = []
    for name, session in sessions.items():
        session._fail = lambda _, name=name: order.append(name)

    with serve_models(**sessions) as models:
        await occupy_device(models, sessions["busy"], "busy")
        tasks = [
            start_classify(models, png(32, 41, seed), dense_protocol(32), model="busy", client=f"{seed}")
            for seed in range(12)
        ]
        await until(lambda: ready_view_count(models) == 12)
        tasks += [start_classify(models, png(32, 41, seed), dense_protocol(32), model="quiet") for seed in range(6)]
        await until(lambda: ready_view_count(models) == 18)
        assert [session.entered for session in sessions.values()] == [1, 0], "one batch at a time"
        for session in sessions.values():
            session.release_all()
        await asyncio.gather(*tasks)
    assert sorted(order[1:7]) == ["busy"] * 3 + ["quiet"] * 3
    threads = {thread for session in sessions.values() for thread in session.computing}
    assert {thread.name for thread in threads} == {"compute-cpu"}
    assert len(threads) <= max(2, cores())


@async_test
async def test_a_session_without_lanes_never_runs_in_two_threads_at_once() -> None:
    class Watched(FakeSession):
        def compute(self, staged: Any) -> Outputs:
            free.append(running.acquire(blocking=False))
            try:
                return super().compute(staged)
            finally:
                running.release()

    running, free = threading.Lock(), list[bool]()
    with serve_models(QueueOptions(), fake=Watched(rules=BatchRules(max_pixels=2 * 32 * 60))) as models:
        images = [png(32, 41 + seed % 5, seed) for seed in range(60)]
        await asyncio.gather(*(start_classify(models, image, dense_protocol(32)) for image in images))
    assert len(free) >= 30
    assert all(free)


@async_test
async def test_small_images_are_decoded_while_the_views_of_another_client_never_end() -> None:
    """Those have waited for longer than `batch_wait`, so that they come first otherwise."""
    session = SteppedSession(rules=BatchRules(max_pixels=32 * 41))  # one view a batch
    small = png(28, 28)

    with serve_models(QueueOptions(turn_cost=20_000, batch_wait=0), fake=session) as models:
        await occupy_device(models, session)
        busy = [start_classify(models, png(60, 77, seed), dense_protocol(32), client="busy") for seed in range(5)]
        await until(lambda: ready_view_count(models) == 5)
        quiet = start_classify(models, small, dense_protocol(28), client="quiet")
        await until(lambda: models.get("fake").admission.used.images == 7)
        session.release_batches(3)  # of the device's occupant, and of two views
        await quiet
        assert not all(task.done() for task in busy)
        session.release_all()
        await asyncio.gather(*busy)


@async_test
async def test_a_batch_that_could_grow_waits_for_an_image_being_decoded() -> None:
    session = FakeSession()
    late = png(32, 41, 2) + b"end"

    with (
        serve_models(QueueOptions(turn_cost=0, batch_wait=60), fake=session) as models,
        DecodeGate({len(late)}) as gate,
    ):
        second = start_classify(models, late, dense_protocol(32))
        await until(gate.entered.is_set)
        first = start_classify(models, png(32, 41, 1), dense_protocol(32))
        await until(lambda: ready_view_count(models) == 1)
        assert session.calls == []
        gate.open.set()
        await asyncio.gather(first, second)
    assert session.calls == [(2, 32, 41, 3)]


@pytest.mark.parametrize(
    ("options", "rules"),
    [
        (QueueOptions(turn_cost=0, batch_wait=0.01), BatchRules()),
        (QueueOptions(turn_cost=0, batch_wait=60), BatchRules(max_pixels=32 * 41)),
    ],
    ids=["the time is over", "the batch is full"],
)
@async_test
async def test_a_batch_does_not_wait_for_an_image_being_decoded_if(options: QueueOptions, rules: BatchRules) -> None:
    late = png(32, 41, 2) + b"end"

    with serve_models(options, fake=FakeSession(rules=rules)) as models, DecodeGate({len(late)}) as gate:
        second = start_classify(models, late, dense_protocol(32))
        await until(gate.entered.is_set)
        await start_classify(models, png(32, 41, 1), dense_protocol(32))
        assert not second.done()
        gate.open.set()
        await second


@async_test
async def test_a_batch_does_not_wait_while_another_model_could_compute() -> None:
    late = webp(32, 41) + b"end"
    session = SteppedSession()

    with (
        serve_models(QueueOptions(turn_cost=0, batch_wait=3600), fake=session, other=FakeSession()) as models,
        DecodeGate({len(late)}) as gate,
    ):
        busy = await occupy_device(models, session)
        second = start_classify(models, late, dense_protocol(32))
        await until(gate.entered.is_set)
        tasks = [start_classify(models, png(32, 41, 1), dense_protocol(32), model=model) for model in ("fake", "other")]
        await until(lambda: ready_view_count(models) == 2)
        session.release_all()
        # The first model does not wait for the late image; the second, then alone, does.
        await asyncio.wait([busy])
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        assert not second.done()
        gate.open.set()
        await asyncio.gather(second, *tasks)


@async_test
async def test_a_batch_does_not_wait_if_nothing_is_being_decoded() -> None:
    with serve_models(QueueOptions(turn_cost=0, batch_wait=3600), fake=FakeSession()) as models:
        await start_classify(models, png(32, 41, 1), dense_protocol(32))


@async_test
async def test_decoding_stops_at_the_limit_of_ready_views_but_a_new_client_still_has_room() -> None:
    session, small = SteppedSession(), png(33, 35) + b"end"

    with (
        serve_models(QueueOptions(turn_cost=0, ready_views=8), fake=session) as models,
        DecodeGate({len(small)}) as gate,
    ):
        await occupy_device(models, session)
        tasks = [start_classify(models, png(32, 41, seed), dense_protocol(32), client="large") for seed in range(40)]
        await until(lambda: ready_view_count(models) == 6)
        newcomer = start_classify(models, small, dense_protocol(33), client="small")
        await until(gate.entered.is_set)
        assert (ready_view_count(models), len(gate.threads)) == (6, 8)
        gate.open.set()
        session.release_all()
        await asyncio.gather(newcomer, *tasks)


@async_test
async def test_decoding_stops_at_the_limit_of_ready_bytes_but_one_image_is_always_decoded() -> None:
    session = SteppedSession()

    with serve_models(QueueOptions(turn_cost=0, ready_bytes=4 * 3 * 32 * 41), fake=session) as models:
        await occupy_device(models, session)
        tasks = [start_classify(models, png(32, 41, seed), dense_protocol(32), client=f"{seed}") for seed in range(12)]
        await until(lambda: ready_view_count(models) == 4)
        large = start_classify(models, png(90, 95), dense_protocol(90), client="large")
        session.release_all()
        await asyncio.gather(large, *tasks)


@pytest.mark.parametrize(
    "protocol",
    [
        dense_protocol(40, mirror=True),  # a mirrored view shares the memory of the other
        dense_protocol(40, 50),
        build_protocol("ten-crop", fake_contract()),
    ],
    ids=lambda protocol: protocol.name,
)
@async_test
async def test_the_room_reserved_for_a_square_image_is_what_its_views_take(protocol: EvaluationProtocol) -> None:
    request = build_request(build_model(), png(60, 60), protocol)
    ready = request.decode(None)
    taken = sum(ready_view.view.image.nbytes for ready_view in ready if not ready_view.view.view.mirrored)
    assert request.decoded_bytes == sum(view.bytes for view in ready) == taken


@async_test
async def test_slow_heat_maps_do_not_delay_other_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    drawing, go_on = threading.Event(), threading.Event()

    def slow(*_arguments: object) -> bytes:
        drawing.set()
        assert go_on.wait(30)
        return b"drawn"

    monkeypatch.setattr(request_module, "png_bytes", slow)

    with serve_models(fake=FakeSession()) as models:

        async def answer(*, heatmap: bool) -> bytes:
            options = RequestOptions("dense-40", mirror=False, heatmap=heatmap)
            return (await DataPlane(models).classify(png(40, 57), "fake", options, Call())).heatmap

        maps = [asyncio.create_task(answer(heatmap=True)) for _ in range(20)]
        await until(drawing.is_set)
        assert await answer(heatmap=False) == b""
        assert not any(task.done() for task in maps)
        go_on.set()
        assert {*await asyncio.gather(*maps)} == {b"drawn"}


@async_test
async def test_images_that_take_long_to_decode_delay_neither_easy_ones_nor_another_address(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    entered, go_on = threading.Semaphore(0), threading.Event()
    prepare = DecodeProcess.prepare

    def slow(process: DecodeProcess, image: bytes, *arguments: Any) -> Any:
        if image == webp(32, 41):
            entered.release()
            assert go_on.wait(30)
        return prepare(process, image, *arguments)

    monkeypatch.setattr(DecodeProcess, "prepare", slow)
    with serve_models(fake=FakeSession()) as models:
        hard = [
            start_classify(models, webp(32, 41), dense_protocol(32), client=f"greedy:{port}")
            for port in range(3 * cores())
        ]
        for _ in range(cores()):
            assert await asyncio.to_thread(entered.acquire, timeout=30)
        await start_classify(models, webp(33, 45), dense_protocol(32), client="polite:1")
        for seed in range(20):
            await start_classify(models, png(32, 41, seed), dense_protocol(32))
        assert not any(task.done() for task in hard)
        go_on.set()
        (alone,) = classify_images(FakeSession(), [decode_rgb(webp(32, 41))], dense_protocol(32))
        for task in hard:
            np.testing.assert_array_equal((await task).scores, alone.scores)
