"""Refused images, timings, and that callers who leave leave nothing behind.

Admission control alone: test_admission_queue.py.
"""

import asyncio
import gc
import math
import random
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import grpc
import pytest

from prelunet.evaluator.engine.batching import BatchRules
from prelunet.evaluator.errors import DeadlinePassed, ImageError, Overloaded, UsageError
from prelunet.evaluator.imaging.header import PNG_SIGNATURE
from prelunet.evaluator.pb.prelunet.v1 import prelunet_pb2 as pb
from prelunet.evaluator.pb.prelunet.v1 import prelunet_pb2_grpc as pb_grpc
from prelunet.evaluator.protocols import build_protocol, supported_protocols
from prelunet.evaluator.serving.data_plane import DataPlane
from prelunet.evaluator.serving.decoding import prepare_image
from prelunet.evaluator.serving.models import Models
from prelunet.evaluator.serving.observability.call_context import Call
from prelunet.evaluator.serving.options import QueueOptions
from prelunet.evaluator.serving.scheduling.model import RequestOptions
from prelunet.evaluator.serving.scheduling.request import Decoder, Request
from tests.helpers.fakes import FakeSession, fake_contract
from tests.serving.event_loop import async_test, until
from tests.serving.scheduling.scheduler_harness import (
    SteppedSession,
    build_model,
    build_request,
    call_of,
    metric_value,
    serve_models,
)
from tests.serving.serving_harness import png, running_server

CENTER = build_protocol("center", fake_contract())


@pytest.mark.parametrize("surplus", [0, 1, 7])
@async_test
async def test_exactly_the_calls_above_the_limit_are_refused_at_once_and_the_others_are_answered(surplus: int) -> None:
    session = SteppedSession()

    with serve_models(QueueOptions(turn_cost=0, max_views=12), fake=session) as models:
        plane = DataPlane(models)

        async def ask(number: int) -> str:
            image = png(40, 41 + number, number)
            try:
                answered = await plane.classify(image, "fake", RequestOptions("center"), Call())
                return str(answered.classified.scores.argmax())
            except Overloaded as error:
                return "refused" if error.retry_after else "refused for ever"

        tasks = [asyncio.create_task(ask(number)) for number in range(12 + surplus)]
        await until(lambda: metric_value(models, "waiting_views", "fake") == 12)
        await until(lambda: sum(task.done() for task in tasks) == surplus)
        assert metric_value(models, "waiting_images", "fake") == 12
        assert metric_value(models, "refusals_total", "fake", reason="views") == surplus
        session.release_all()
        answers = await asyncio.gather(*tasks)
        assert answers.count("refused") == surplus
        assert await ask(99) != "refused", "the queue should have room again"


def test_a_refusal_reaches_the_client_as_resource_exhausted() -> None:
    session = SteppedSession()
    call = pb.ClassifyRequest(image=png(40, 41), protocol="center")
    with (
        running_server(queue=QueueOptions(max_views=1), fake=session) as server,
        grpc.insecure_channel(server.address) as channel,
        ThreadPoolExecutor(1) as pool,
    ):
        stub = pb_grpc.PreluNetServiceStub(channel)
        first = pool.submit(stub.Classify, call, timeout=30)
        asyncio.run(until(lambda: session.entered))
        with pytest.raises(
            grpc.RpcError, match=r"'fake' already has 1 unanswered views .*; the limit is 1 views"
        ) as no:
            stub.Classify(call, timeout=30)
        session.release_all()
        assert first.result(30).predictions
    assert no.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED


@async_test
async def test_a_view_that_would_take_gigabytes_is_refused_before_it_is_created() -> None:
    contract = fake_contract(max_side=16384)

    with serve_models(fake=FakeSession(contract)) as models:

        async def ask(name: str) -> object:
            return await DataPlane(models).classify(png(20, 200), "fake", RequestOptions(name), Call())

        with pytest.raises(UsageError, match="1600x6400 pixels, more than this server's limit of 25600"):
            await ask("dense-1600")
        with pytest.raises(
            UsageError, match="together have 98616 pixels, more than this server's limit of 76800"
        ):  # each fits
            await ask("dense-77-78-79-80")
        assert await ask("dense-40")


@async_test
async def test_the_most_elongated_image_is_answered_with_every_protocol_of_the_model() -> None:
    contract = fake_contract()
    with serve_models(fake=FakeSession(contract)) as models:
        for name in supported_protocols(contract):
            assert await DataPlane(models).classify(png(20, 200), "fake", RequestOptions(name), Call()), name


@async_test
async def test_a_server_may_allow_larger_views_than_the_model_needs() -> None:
    contract, queue = fake_contract(max_side=16384), QueueOptions(turn_cost=0, max_view_pixels=300 * 1200)

    with serve_models(queue, fake=FakeSession(contract)) as models:
        ask = partial(DataPlane(models).classify, png(20, 200), "fake", call=Call())
        assert await ask(options=RequestOptions("dense-300"))
        with pytest.raises(UsageError, match="301x1204 pixels, more than this server's limit of 360000"):
            await ask(options=RequestOptions("dense-301"))


def test_a_model_with_large_default_scales_is_served_at_these_scales() -> None:
    contract = fake_contract(default_scales=(800, 900), max_side=4096)
    plan = build_model(FakeSession(contract)).plan(RequestOptions("multi-scale"))
    assert prepare_image(png(20, 200), plan.prepare).resized[900][0].shape == (900, 3600, 3)


@pytest.mark.parametrize("heatmap", [False, True])
@async_test
async def test_an_answer_has_the_timings_of_its_stages(heatmap: bool) -> None:
    session = SteppedSession(rules=BatchRules(max_pixels=2 * 37 * 53))
    options = RequestOptions("dense-37-40-43", top=2, heatmap=heatmap)

    with serve_models(fake=session) as models:
        answer = DataPlane(models).classify(png(40, 57), "fake", options, Call())
        task = asyncio.create_task(answer)
        await until(lambda: session.entered)
        await asyncio.sleep(0.05)
        session.release_all()
        timings = (await task).timings
        assert timings.batches == len(session.calls) == 5  # at 37 both views fit one batch, at 40 and 43 one each
        assert timings.compute_seconds >= 0.05
        assert timings.decode_seconds > 0
        parts = timings.queue_seconds + timings.decode_seconds + timings.compute_seconds
        assert timings.queue_seconds >= 0
        assert parts < timings.total_seconds
        assert metric_value(models, "request_seconds_sum", "fake") == timings.total_seconds
        for stage, seconds in (
            ("queue", timings.queue_seconds),
            ("decode", timings.decode_seconds),
            ("compute", timings.compute_seconds),
        ):
            assert metric_value(models, "stage_seconds_sum", "fake", stage=stage) == seconds
        assert metric_value(models, "stage_seconds_count", "fake", stage="average") == 1
        assert metric_value(models, "last_answer_timestamp_seconds", "fake") > 1e9


@pytest.mark.parametrize(
    ("provider", "lanes", "turn_cost"),
    [
        ("CPUExecutionProvider", 1, 0),
        ("CPUExecutionProvider", 1, 50_000),
        ("CPUExecutionProvider", 3, 0),
        ("CPUExecutionProvider", 3, 50_000),
        ("CUDAExecutionProvider", 1, 0),
    ],
)
def test_requests_cancelled_at_any_time_leave_nothing_and_every_view_is_computed_or_dropped(
    provider: str, lanes: int, turn_cost: int
) -> None:
    """Callers arrive, cancel and pass their deadline at random, some with invalid images."""
    rules = BatchRules(canvas_step=4, max_pixels=9 * 40 * 60, switch_pixels=10**4)
    sessions = {
        name: SteppedSession(provider=provider, rules=rules if provider.startswith("CUDA") else None, seed=seed)
        for seed, name in enumerate(("one", "two"))
    }
    for session in sessions.values():
        session.lanes = lanes
    chance = random.Random(0)
    images = [png(30 + number, 50 - number, number) for number in range(8)]
    protocols = ("center", "dense-33-41", "ten-crop", "spp-18")
    became: Counter[str] = Counter()
    admitted: Counter[str] = Counter()  # views, by model

    async def caller(models: Models, number: int) -> None:
        await asyncio.sleep(chance.random() / 4)
        name, protocol = chance.choice(("one", "two")), chance.choice(protocols)
        image = chance.choice(images)[: 60 if number % 8 == 2 else None]
        in_a_moment = asyncio.get_running_loop().time() + 0.001 + chance.random() / 10
        call = call_of(f"{number % 9}", deadline=in_a_moment if number % 4 == 0 else math.inf)
        if number % 4 == 1:
            task = asyncio.current_task()
            assert task is not None
            asyncio.get_running_loop().call_at(in_a_moment, task.cancel)
        try:
            await DataPlane(models).classify(image, name, RequestOptions(protocol, heatmap=chance.random() < 0.1), call)
            became["answered"] += 1
        except (ImageError, DeadlinePassed, Overloaded, asyncio.CancelledError) as error:
            became[type(error).__name__] += 1
            if isinstance(error, Overloaded):
                return
        admitted[name] += call.views

    async def scenario() -> None:
        with serve_models(QueueOptions(turn_cost=turn_cost, max_views=60, ready_views=20), **sessions) as models:
            tasks = [asyncio.create_task(caller(models, number)) for number in range(200)]
            await until(lambda: {"DeadlinePassed", "CancelledError", "Overloaded"} <= set(became))
            while not all(task.done() for task in tasks):
                for session in sessions.values():
                    session.release_batches()
                await asyncio.sleep(0.002)
        for name in sessions:
            reasons = ("cancelled", "expired", "failed")
            dropped = [metric_value(models, "dropped_views_total", name, reason=reason) for reason in reasons]
            computed = metric_value(models, "batch_views_sum", name)
            assert computed + sum(dropped) == admitted[name]
            assert sum(dropped) > 0

    asyncio.run(scenario())
    assert became["answered"] > 0
    gc.collect()
    left = [found for found in gc.get_objects() if type(found) is Request and found.model.session in sessions.values()]
    assert left == []


@async_test
async def test_bytes_that_are_not_an_image_fail_and_are_counted() -> None:
    with serve_models(fake=FakeSession()) as models:
        with pytest.raises(ImageError):
            await DataPlane(models).classify(b"none", "fake", RequestOptions("center"), Call())
        assert metric_value(models, "dropped_views_total", "fake", reason="failed") == 1
        assert metric_value(models, "failed_seconds_count", "fake") == 1
        assert metric_value(models, "request_seconds_count", "fake") == 0


def test_a_mirrored_protocol_costs_twice_as_much_as_a_plain_one() -> None:
    model = build_model()

    def views_and_pixels(options: RequestOptions) -> tuple[int, int]:
        plan = model.plan(options)
        return plan.views, plan.pixels

    assert views_and_pixels(RequestOptions("dense-33-41", mirror=False)) == (2, 33 * 33 + 41 * 41)
    assert views_and_pixels(RequestOptions("dense-33-41", mirror=True)) == (4, 2 * (33 * 33 + 41 * 41))
    assert views_and_pixels(RequestOptions("ten-crop")) == (10, 10 * 28 * 28)


@async_test
async def test_a_header_of_absurd_size_costs_no_more_than_the_largest_image() -> None:
    model = build_model()
    costs = [build_request(model, PNG_START + 2 * side.to_bytes(4), CENTER).decode_cost for side in (2**13, 2**32 - 1)]
    assert costs[0] == costs[1]


PNG_START = PNG_SIGNATURE + (13).to_bytes(4) + b"IHDR"  # width and height follow


@async_test
async def test_an_identity_takes_no_more_decoding_processes_than_its_share() -> None:
    one = build_model(name="one", process_share=2)
    models, waiting = (one, build_model(name="two")), one.waiting
    for model, client in zip((0, 1, 1, 0, 1), ("many:1", "many:2", "many:3", "many:4", "polite:1"), strict=True):
        waiting.add(build_request(models[model], b"GIF89a", CENTER, client))
    taken = [waiting.take_image("process") for _ in range(3)]
    assert [request.call.peer for request in taken if request] == ["many:1", "many:2", "polite:1"]
    assert taken[0] is not None
    waiting.decode_failed(taken[0], ImageError("damaged"))
    last = waiting.take_image("process")
    assert last is not None
    assert last.call.identity == "many"


@pytest.mark.parametrize("decoder", ["thread", "process"])
@async_test
async def test_decoding_is_shared_among_clients_by_the_pixels_of_their_files(decoder: Decoder) -> None:
    """An image of 16 times as many pixels costs about 16 times as much, also where its file is no larger."""
    model = build_model()
    for client, side, number in (("large", 800, 30), ("small", 200, 100)):
        image = PNG_START + 2 * side.to_bytes(4) if decoder == "thread" else b"GIF89a" + 2 * side.to_bytes(2, "little")
        for _ in range(number):
            model.waiting.add(build_request(model, image, CENTER, client))
    order = [request.call.peer for _ in range(100) if (request := model.waiting.take_image(decoder)) is not None]
    assert order.count("small") == pytest.approx(100 * 16 / 17, abs=2)
    assert order[: order.index("large") + 50].count("large") > 1
