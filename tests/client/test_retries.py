"""What is repeated, and when; deadlines; servers that are absent, loading or stopping."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2

from prelunet.evaluator.client import Client
from prelunet.evaluator.errors import (
    DeadlinePassed,
    EnvironmentFault,
    ImageError,
    NotReady,
    OutOfMemory,
    Overloaded,
    PreluNetError,
    UsageError,
)
from prelunet.evaluator.imaging.limits import DecodeLimits
from prelunet.evaluator.pb.prelunet.v1 import prelunet_pb2 as pb
from prelunet.evaluator.pb.prelunet.v1 import prelunet_pb2_grpc as pb_grpc
from prelunet.evaluator.serving.models import Models
from prelunet.evaluator.serving.observability.metrics import Metrics
from prelunet.evaluator.serving.options import ModelFile, QueueOptions
from prelunet.evaluator.serving.server import Server
from tests.client.client_harness import AT_ONCE, Relay, ScriptedServicer, free_port, health_servicer, served, text_of
from tests.helpers.fakes import FakeSession
from tests.serving.serving_harness import eventually, png, run_in_thread

UNAVAILABLE, RESOURCE_EXHAUSTED = grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED


@pytest.mark.parametrize("failure", [UNAVAILABLE, RESOURCE_EXHAUSTED, grpc.StatusCode.CANCELLED, AT_ONCE], ids=repr)
def test_a_transient_error_is_retried(client_to, failure) -> None:
    server = ScriptedServicer(failure)
    with client_to(server) as client:
        assert text_of(client.classify(b"cat")) == "cat"
    assert len(server.seen) == 2


@pytest.mark.parametrize("failure", [OutOfMemory("x"), ImageError("x"), ZeroDivisionError("x")], ids=repr)
def test_a_permanent_error_is_not_retried(client_to, failure) -> None:
    server = ScriptedServicer(failure)
    with client_to(server) as client, pytest.raises(PreluNetError):
        client.classify(b"cat")
    assert len(server.seen) == 1


def test_the_error_of_the_fifth_attempt_is_raised(client_to) -> None:
    server = ScriptedServicer(*[AT_ONCE] * 4, Overloaded("still too much to do", retry_after=7))
    with client_to(server) as client, pytest.raises(Overloaded, match="still too much to do") as caught:
        client.classify(b"cat")
    assert len(server.seen) == 5
    assert caught.value.retry_after == 7
    assert isinstance(caught.value.__cause__, grpc.RpcError)


def test_nothing_is_repeated_or_waited_for_without_retries(client_of, client_to) -> None:
    server = ScriptedServicer(UNAVAILABLE)
    with client_to(server, retries=False) as client, pytest.raises(EnvironmentFault, match="bare"):
        client.classify(b"cat")
    assert len(server.seen) == 1
    with (
        client_of(f"127.0.0.1:{free_port()}", retries=False, timeout=None) as client,
        pytest.raises(EnvironmentFault, match="connection refused"),
    ):
        client.classify(b"cat")


def test_the_requested_wait_is_kept_and_the_deadline_covers_all_attempts(client_to) -> None:
    server = ScriptedServicer(Overloaded("full", retry_after=0.4), Overloaded("full", retry_after=0.2))
    with client_to(server) as client:
        client.classify(b"cat", timeout=8)
    first, second, third = server.seen
    assert second.when - first.when >= 0.39
    assert third.when - second.when >= 0.19
    assert third.remaining <= 8 - 0.6 + 0.3  # gRPC rounds what it sends


def test_a_large_image_is_retried_like_any_other(client_to) -> None:
    server = ScriptedServicer(AT_ONCE)
    with client_to(server) as client:
        assert len(text_of(client.classify(b"x" * 3_000_000))) == 3_000_000
    assert len(server.seen) == 2


def test_a_call_has_its_own_deadline_or_that_of_its_client_or_none(client_to) -> None:
    server = ScriptedServicer()
    with client_to(server, timeout=17) as client:
        client.classify(b"cat")
        client.classify(b"cat", timeout=23)
        client.classify(b"cat", timeout=None)
        client.models()
        client.models(timeout=23)
        list(client.classify_many([b"cat"]))
        list(client.classify_many([b"cat"], timeout=5))
    forever = float("inf")
    wanted = [17, 23, forever, 17, 17, 17, 23, 23, 23, 17, 5]
    seen = [each.remaining if each.remaining < 10**6 else forever for each in server.seen]
    assert seen == pytest.approx(wanted, abs=3)  # seconds that a busy machine may take


def test_an_answer_that_comes_too_late_ends_in_deadline_passed(client_of) -> None:
    gate = threading.Event()

    def never(request, context):
        gate.wait(30)

    with served(ScriptedServicer(never)) as address, client_of(address) as client:
        with pytest.raises(DeadlinePassed, match=f"{address}: no answer in time"):
            client.classify(b"cat", timeout=0.2)
        gate.set()


@pytest.mark.parametrize("timeout", [0, -1, float("nan"), float("inf"), "soon"])
def test_an_invalid_timeout_is_refused_before_anything_is_sent(client_of, client_to, timeout) -> None:
    server = ScriptedServicer()
    with client_to(server) as client:
        with pytest.raises(UsageError, match="timeout is"):
            client.classify(b"cat", timeout=timeout)
        with pytest.raises(UsageError, match="timeout is"):
            client.classify_many([b"cat"], timeout=timeout)
    with pytest.raises(UsageError, match="timeout is"):
        client_of("127.0.0.1:1", timeout=timeout)
    assert server.seen == []


# Calls, and their results.
ASKED = {
    "classify": lambda client: text_of(client.classify(b"cat")),
    "models": lambda client: [model.name for model in client.models()],
    "classify_many": lambda client: sorted(
        (key, text_of(answer)) for key, answer in client.classify_many([b"0", b"1"])
    ),
}
WANTED = {"classify": "cat", "models": ["six", "three"], "classify_many": [(0, "0"), (1, "1")]}


@pytest.mark.parametrize("method", ASKED)
def test_a_server_that_starts_late_is_waited_for(client_of, method: str) -> None:
    port = free_port()
    with client_of(f"127.0.0.1:{port}") as client, ThreadPoolExecutor(1) as pool:
        call = pool.submit(ASKED[method], client)
        time.sleep(0.5)
        assert not call.done()
        with served(ScriptedServicer(), port):
            assert call.result(30) == WANTED[method]


@pytest.mark.parametrize("method", ASKED)
def test_waiting_for_a_server_that_loads_its_models_costs_no_attempt(client_of, method: str) -> None:
    server, status = ScriptedServicer(), health_servicer()
    status.set("", health_pb2.HealthCheckResponse.NOT_SERVING)
    with served(server, status=status) as address, client_of(address) as client, ThreadPoolExecutor(1) as pool:
        call = pool.submit(ASKED[method], client)
        time.sleep(0.5)
        assert not call.done()
        assert server.seen == []
        status.set("", health_pb2.HealthCheckResponse.SERVING)
        assert call.result(30) == WANTED[method]


@pytest.mark.parametrize("method", ASKED)
def test_an_absent_server_is_reported_with_its_address_at_the_deadline(client_of, method: str) -> None:
    address = f"127.0.0.1:{free_port()}"
    with client_of(address, timeout=0.3) as client:
        begun = time.monotonic()
        with pytest.raises(EnvironmentFault, match=f"^{address}: nothing listens there: .*prelunet serve --model"):
            ASKED[method](client)
    assert 0.3 <= time.monotonic() - begun < 5


def test_a_server_that_loads_its_models_for_too_long_is_reported_as_not_ready(client_of) -> None:
    status = health_servicer()
    status.set("", health_pb2.HealthCheckResponse.NOT_SERVING)
    with (
        served(ScriptedServicer(), status=status) as address,
        client_of(address) as client,
        pytest.raises(NotReady, match=f"^{address}: the server is loading its models or stopping"),
    ):
        client.classify(b"cat", timeout=0.3)


def test_a_call_whose_connection_is_reset_is_retried(client_of) -> None:
    arrived, gate = threading.Event(), threading.Event()

    def hold(request, context):
        arrived.set()
        gate.wait(30)

    server = ScriptedServicer(hold)
    with (
        served(server) as address,
        Relay(address) as relay,
        client_of(relay.address) as client,
        ThreadPoolExecutor(1) as pool,
    ):
        call = pool.submit(client.classify, b"cat")
        assert arrived.wait(30)
        relay.cut()
        assert text_of(call.result(30)) == "cat"
        gate.set()
    assert len(server.seen) == 2


def test_calls_take_turns_among_the_servers_of_a_name_and_continue_when_one_stops(client_of) -> None:
    first, second, status = ScriptedServicer(), ScriptedServicer(), health_servicer()
    with served(first) as one, served(second, status=status) as two, client_of(f"ipv4:{one},{two}") as client:
        while not (first.seen and second.seen):  # until both are connected
            client.classify(b"cat")
        before = len(first.seen), len(second.seen)
        for _ in range(20):
            client.classify(b"cat")
        assert (len(first.seen), len(second.seen)) == (before[0] + 10, before[1] + 10)
        second.script.extend([UNAVAILABLE] * 3)
        for _ in range(6):
            assert text_of(client.classify(b"cat")) == "cat"
        status.set("", health_pb2.HealthCheckResponse.NOT_SERVING)
        time.sleep(0.5)
        seen = len(second.seen)
        for _ in range(6):
            client.classify(b"cat")
        assert len(second.seen) == seen


@asynccontextmanager
async def opened(port: int = 0) -> AsyncIterator[Server]:
    """Yield a server of ours that has still to load its models; it drains at the end."""
    server = Server("127.0.0.1", port)
    await server.open()
    yield server
    await server.refuse(asyncio.get_running_loop().create_future())
    await server.stop(grace=5)


def fake_models() -> Models:
    return Models([(ModelFile("fake", Path("fake.onnx")), FakeSession())], DecodeLimits(), QueueOptions(), Metrics())


def test_a_server_that_loads_its_models_tells_other_clients_of_grpc_when_to_return() -> None:
    with (
        run_in_thread(opened) as (server, _),
        grpc.insecure_channel(server.address) as channel,
        pytest.raises(grpc.RpcError) as caught,
    ):
        pb_grpc.PreluNetServiceStub(channel).Classify(pb.ClassifyRequest(), wait_for_ready=True, timeout=30)
    assert ("grpc-retry-pushback-ms", "5000") in caught.value.trailing_metadata()


def test_no_call_is_lost_while_a_server_is_restarted_three_times() -> None:
    """2,000 calls of 16 threads. Each restart begins at a number of answers, so that it happens under load."""
    answered, images = count(), [png(40, 40 + width, seed=width) for width in range(10)]
    reached = [threading.Event() for _ in range(3)]

    async def restarts() -> None:
        port = 0
        for life in range(4):
            models = fake_models()
            async with opened(port) as server:
                port = int(server.address.rpartition(":")[2])
                await asyncio.sleep(0.2)  # loading
                await server.start(models)
                addresses.append(server.address)
                await asyncio.to_thread((reached[life] if life < 3 else done).wait, 60)
            await asyncio.to_thread(models.close)

    addresses: list[str] = []
    done = threading.Event()
    serving = threading.Thread(target=asyncio.run, args=(restarts(),))
    serving.start()
    eventually(lambda: bool(addresses))

    def classify(number: int) -> str:
        answer = client.classify(images[number % len(images)], protocol="center")
        if (calls := next(answered)) % 500 == 499 and calls < 1500:
            reached[calls // 500].set()
        return answer.model["name"]

    try:
        with Client(addresses[0]) as client, ThreadPoolExecutor(16) as pool:
            assert list(pool.map(classify, range(2000))) == ["fake"] * 2000
    finally:
        for event in (*reached, done):
            event.set()
        serving.join()
    assert len(addresses) == 4
