"""What a server does not take on, where the time of an image goes, and that nothing is left of those who leave."""

import asyncio
import gc
import random
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import grpc
import pytest

from evaluator.engine.batching import BatchRules
from evaluator.errors import DeadlinePassed, ImageError, Overloaded, UsageError
from evaluator.pb.prelunet.v1 import prelunet_pb2 as pb
from evaluator.pb.prelunet.v1 import prelunet_pb2_grpc as pb_grpc
from evaluator.protocols import make_protocol
from evaluator.serving import door
from evaluator.serving.caller import Caller
from evaluator.serving.door import Door, Pace
from evaluator.serving.metrics import Metrics
from evaluator.serving.models import Models
from evaluator.serving.options import QueueOptions
from evaluator.serving.request import Request, views_and_pixels
from fakes import FakeSession, fake_contract
from heart import HeldSession, counted, served, until
from serving_harness import png, running_server

CENTER = make_protocol("center", fake_contract())


def made_door(**queue: int) -> tuple[Door, Metrics]:
    metrics = Metrics()
    return Door("fake", QueueOptions(**queue), metrics.of_model("fake", FakeSession())), metrics


@pytest.mark.parametrize("surplus", [0, 1, 7])
def test_of_q_and_k_calls_exactly_k_are_refused_at_once_and_the_others_are_answered(surplus: int) -> None:
    session = HeldSession()

    async def scenario() -> None:
        with served(QueueOptions(max_views=12), fake=session) as models:
            classifier = models.get("fake")

            async def ask(number: int) -> str:
                image = png(40, 41 + number, number)
                try:
                    with classifier.admitted(len(image), 1):
                        answer = await classifier.answer(image, CENTER, 1, heatmap=False)
                        return answer.predictions[0].name
                except Overloaded as error:
                    return "refused" if error.retry_after else "refused for ever"

            tasks = [asyncio.create_task(ask(number)) for number in range(12 + surplus)]
            await until(lambda: counted(models, "waiting_views", "fake") == 12)
            await until(lambda: sum(task.done() for task in tasks) == surplus)
            assert counted(models, "waiting_images", "fake") == 12
            assert counted(models, "refusals_total", "fake", reason="views") == surplus
            session.free()
            answers = await asyncio.gather(*tasks)
            assert answers.count("refused") == surplus
            assert await ask(99) != "refused", "the places should be free again"

    asyncio.run(scenario())


def test_a_refusal_reaches_the_client_as_resource_exhausted() -> None:
    session = HeldSession()
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
            grpc.RpcError, match=r"1 views of .* wait for model 'fake' already, and at most 1 views"
        ) as no:
            stub.Classify(call, timeout=30)
        session.free()
        assert first.result(30).predictions
    assert no.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED


def test_images_beyond_the_bytes_that_may_wait_are_refused_but_one_alone_never() -> None:
    door, metrics = made_door(max_bytes=1000)
    with door.admitted(5000, 2):
        assert metrics.registry.get_sample_value("prelunet_waiting_bytes", {"model": "fake"}) == 5000
        with pytest.raises(Overloaded, match="2 views of 5000 bytes wait"), door.admitted(1, 1):
            pass
    with door.admitted(600, 1), door.admitted(400, 1):
        pass
    with door.admitted(600, 1), pytest.raises(Overloaded, match="1 views of 600 bytes"), door.admitted(401, 1):
        pass
    assert (door.images, door.views, door.bytes) == (0, 0, 0)
    refusals = metrics.registry.get_sample_value("prelunet_refusals_total", {"model": "fake", "reason": "bytes"})
    assert refusals == 2


def test_an_image_of_more_views_than_may_wait_is_let_in_where_nothing_waits() -> None:
    door, _ = made_door(max_views=3)
    with door.admitted(1, 60), pytest.raises(Overloaded, match="60 views of 1 bytes"), door.admitted(1, 1):
        pass
    with door.admitted(1, 2), door.admitted(1, 1):
        assert door.views == 3


@pytest.mark.parametrize("error", [ImageError("x"), asyncio.CancelledError(), KeyboardInterrupt()])
def test_a_place_is_given_back_whatever_becomes_of_the_image(error: BaseException) -> None:
    door, _ = made_door()
    with pytest.raises(type(error)), door.admitted(10, 3):
        raise error
    assert (door.images, door.views, door.bytes) == (0, 0, 0)


class Clock:
    """Stands still until a test moves it."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_the_pace_is_that_of_answers_while_something_waits() -> None:
    clock = Clock()
    pace = Pace(clock)
    assert pace.seconds(10) is None
    pace.begin()
    clock.now += 3
    pace.left(2)
    assert pace.seconds(1) == pytest.approx(1.5)
    clock.now += 100  # nothing waits
    pace.begin()
    clock.now += 1
    pace.left(2)
    assert pace.seconds(4) == pytest.approx(4 * (1.5 * 2 * 254 / 256 + 1) / (2 * 254 / 256 + 2))
    clock.now += 5
    pace.left(0)  # one that was not answered: its time counts, its views do not
    assert pace.seconds(4) == pytest.approx(4 * (1.5 * 2 * 254 / 256 + 6) / (2 * 254 / 256 + 2))


def test_the_pace_of_long_ago_is_forgotten() -> None:
    clock = Clock()
    pace = Pace(clock)
    pace.begin()
    for seconds in (50.0, 0.1):
        for _ in range(300):
            clock.now += 10 * seconds
            pace.left(10)
    assert pace.seconds(1) == pytest.approx(0.1, rel=0.01)  # of 50 s a view, (246/256)^300 is left


@pytest.mark.parametrize(
    ("seconds", "told"), [(None, door.UNKNOWN), (0.0001, door.SOONEST), (2.0, 6.0), (1000.0, door.LATEST)]
)
def test_who_is_refused_is_told_when_those_who_wait_will_be_through(seconds: float | None, told: float) -> None:
    door, _ = made_door(max_views=3)
    clock = door._pace._clock = Clock()
    if seconds is not None:
        with door.admitted(1, 1):
            clock.now += seconds
    with door.admitted(1, 3), pytest.raises(Overloaded) as refusal, door.admitted(1, 1):
        pass
    assert refusal.value.retry_after == pytest.approx(told)


def test_a_view_that_would_take_gigabytes_is_refused_by_its_size_before_it_is_made() -> None:
    contract = fake_contract(max_side=16384)

    async def scenario() -> None:
        with served(fake=FakeSession(contract)) as models:

            async def ask(name: str) -> object:
                protocol = make_protocol(name, contract)
                return await models.get("fake").answer(png(20, 200), protocol, 1, heatmap=False)

            with pytest.raises(UsageError, match="seen as 1600x6400 pixels, more than the 2097152"):
                await ask("dense-1600")
            with pytest.raises(UsageError, match="together have 4334420 pixels, more than the 4194304"):  # each fits
                await ask("dense-600-601-602")
            assert await ask("dense-40")

    asyncio.run(scenario())


def test_a_model_whose_scales_are_large_is_served_at_its_own_scales() -> None:
    contract = fake_contract(default_scales=(800, 900), max_side=4096)
    with served(large=FakeSession(contract)) as models:
        models.get("large")._check_size(200, 2000, make_protocol("multi-scale", contract))


@pytest.mark.parametrize("heatmap", [False, True])
def test_an_answer_says_where_its_time_went(heatmap: bool) -> None:
    session = HeldSession(rules=BatchRules(max_pixels=2 * 37 * 53))
    protocol = make_protocol("dense-37-40-43", session.contract)

    async def scenario() -> None:
        with served(fake=session) as models:
            asked = models.get("fake").answer(png(40, 57), protocol, 2, heatmap=heatmap)
            task = asyncio.create_task(asked)
            await until(lambda: session.entered)
            await asyncio.sleep(0.05)
            session.free()
            timings = (await task).timings
            assert timings is not None
            assert timings.batches == len(session.calls) == 5  # at 37 both views fit one batch, at 40 and 43 one each
            assert timings.compute_seconds >= 0.05
            assert timings.decode_seconds > 0
            parts = timings.queue_seconds + timings.decode_seconds + timings.compute_seconds
            assert timings.queue_seconds >= 0
            assert parts < timings.total_seconds
            assert counted(models, "request_seconds_sum", "fake") == timings.total_seconds
            for stage, seconds in (
                ("queue", timings.queue_seconds),
                ("decode", timings.decode_seconds),
                ("compute", timings.compute_seconds),
            ):
                assert counted(models, "stage_seconds_sum", "fake", stage=stage) == seconds
            assert counted(models, "stage_seconds_count", "fake", stage="average") == 1
            assert counted(models, "last_answer_timestamp_seconds", "fake") > 1e9

    asyncio.run(scenario())


@pytest.mark.parametrize("provider", ["CPUExecutionProvider", "CUDAExecutionProvider"])
def test_whoever_leaves_whenever_nothing_of_them_is_left_and_every_view_is_computed_or_dropped(provider: str) -> None:
    """Callers come, leave and run out of time at random, some with images that are none."""
    rules = BatchRules(canvas_step=4, max_pixels=9 * 40 * 60, switch_pixels=10**4)
    sessions = {
        name: HeldSession(provider=provider, rules=rules if provider.startswith("CUDA") else None, seed=seed)
        for seed, name in enumerate(("one", "two"))
    }
    chance = random.Random(0)
    images = [png(30 + number, 50 - number, number) for number in range(8)]
    protocols = [make_protocol(name, fake_contract()) for name in ("center", "dense-33-41", "ten-crop", "spp-18")]
    became: Counter[str] = Counter()
    admitted: Counter[str] = Counter()  # views, by model

    async def caller(models: Models, number: int) -> None:
        await asyncio.sleep(chance.random() / 4)
        name, protocol = chance.choice(("one", "two")), chance.choice(protocols)
        image, views = chance.choice(images)[: 60 if number % 8 == 2 else None], len(protocol.views)
        in_a_moment = asyncio.get_running_loop().time() + 0.001 + chance.random() / 10
        who = Caller(f"{number % 9}", in_a_moment if number % 4 == 0 else None)
        if number % 4 == 1:
            task = asyncio.current_task()
            assert task is not None
            asyncio.get_running_loop().call_at(in_a_moment, task.cancel)
        try:
            with models.get(name).admitted(len(image), views):
                admitted[name] += views
                await models.get(name).answer(image, protocol, 1, heatmap=chance.random() < 0.1, caller=who)
            became["answered"] += 1
        except (ImageError, DeadlinePassed, Overloaded, asyncio.CancelledError) as error:
            became[type(error).__name__] += 1

    async def scenario() -> None:
        with served(QueueOptions(max_views=60, ready_views=20), **sessions) as models:
            tasks = [asyncio.create_task(caller(models, number)) for number in range(200)]
            await until(lambda: {"DeadlinePassed", "CancelledError", "Overloaded"} <= set(became))
            while not all(task.done() for task in tasks):
                for session in sessions.values():
                    session.let_go()
                await asyncio.sleep(0.002)
        for name in sessions:
            reasons = ("cancelled", "expired", "failed")
            dropped = [counted(models, "dropped_views_total", name, reason=reason) for reason in reasons]
            computed = counted(models, "batch_views_sum", name)
            assert computed + sum(dropped) == admitted[name]
            assert sum(dropped) > 0

    asyncio.run(scenario())
    assert became["answered"] > 0
    gc.collect()
    left = [found for found in gc.get_objects() if type(found) is Request and found.lane.session in sessions.values()]
    assert left == []


def test_an_image_that_is_none_fails_before_its_views_take_room() -> None:
    async def scenario() -> None:
        with served(fake=FakeSession()) as models:
            with pytest.raises(ImageError):
                await models.get("fake").answer(b"none", CENTER, 1, heatmap=False)
            assert counted(models, "dropped_views_total", "fake", reason="failed") == 1
            assert counted(models, "failed_seconds_count", "fake") == 1
            assert counted(models, "request_seconds_count", "fake") == 0

    asyncio.run(scenario())


def test_a_mirrored_protocol_costs_a_client_twice_the_turns_of_a_plain_one() -> None:
    plain = replace(make_protocol("dense-33-41", fake_contract()), mirror=False)
    assert views_and_pixels(plain) == (2, 33 * 33 + 41 * 41)
    assert views_and_pixels(replace(plain, mirror=True)) == (4, 2 * (33 * 33 + 41 * 41))
    assert views_and_pixels(make_protocol("ten-crop", fake_contract())) == (10, 10 * 28 * 28)
