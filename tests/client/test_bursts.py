"""Bursts of calls: what is in flight, what waits, and how long; with a full server, too."""

import asyncio
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from prelunet.evaluator.client import AsyncClient, RetryPolicy
from prelunet.evaluator.errors import DeadlinePassed, Interrupted, Overloaded
from prelunet.evaluator.pb.prelunet.v1 import prelunet_pb2_grpc as pb_grpc
from prelunet.evaluator.rpc.status import status_of
from tests.client.client_harness import AT_ONCE, QUICK, ScriptedServicer, answer_to, served, text_of
from tests.helpers.fakes import FakeSession
from tests.serving.serving_harness import QueueOptions, png, running_server


def test_of_a_burst_128_calls_are_in_flight_and_the_others_wait_in_order_of_arrival() -> None:
    seen: list[int] = []

    class Holding(pb_grpc.PreluNetServiceServicer):
        async def Classify(self, request, context):  # noqa: N802
            seen.append(int(request.image))
            await gate.wait()
            return answer_to(request)

    async def burst() -> list[Any]:
        nonlocal gate
        gate = asyncio.Event()
        server = grpc.aio.server()
        pb_grpc.add_PreluNetServiceServicer_to_server(Holding(), server)
        address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        await server.start()
        async with AsyncClient(address) as client:
            calls = [asyncio.create_task(client.classify(b"%d" % n)) for n in range(2000)]
            while len(seen) < 128:
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.1)  # in which more would arrive
            assert sorted(seen) == list(range(128))
            gate.set()
            answers = await asyncio.gather(*calls)
        await server.stop(None)
        return answers

    gate: asyncio.Event
    assert [text_of(answer) for answer in asyncio.run(burst())] == [f"{n}" for n in range(2000)]
    assert max(abs(when - number) for when, number in enumerate(seen)) < 128


class Small(pb_grpc.PreluNetServiceServicer):
    """A server that is full with three calls."""

    def __init__(self) -> None:
        self.room, self.refused = threading.Semaphore(3), 0

    def Classify(self, request, context):  # noqa: N802
        if not self.room.acquire(blocking=False):
            self.refused += 1
            time.sleep(0.001)  # so that the calls that it has accepted are still in flight
            context.abort_with_status(status_of(AT_ONCE, ""))
        try:
            time.sleep(0.01)
            return answer_to(request)
        finally:
            self.room.release()


def test_a_full_server_gets_as_many_calls_as_it_accepts_and_none_fails(client_to) -> None:
    server, names = Small(), [f"{n}" for n in range(300)]
    with client_to(server, retries=replace(QUICK, retry_budget=5)) as client, ThreadPoolExecutor(50) as pool:
        answers = pool.map(lambda name: client.classify(name.encode()), names)
        assert [text_of(answer) for answer in answers] == names
    assert 5 < server.refused < 250, "refusals should neither cost retries nor repeat for ever"


def test_a_full_server_is_reported_at_once_without_retries(client_to) -> None:
    with client_to(Small(), retries=RetryPolicy.none()) as client, ThreadPoolExecutor(8) as pool:
        calls = [pool.submit(client.classify, b"cat") for _ in range(8)]
        assert {type(call.exception()) for call in calls} == {Overloaded, type(None)}


def test_a_burst_beyond_the_queue_of_a_real_server_is_answered() -> None:
    async def burst(address: str) -> list[Any]:
        async with AsyncClient(address) as client:
            return await asyncio.gather(*(client.classify(image, timeout=60) for image in images * 20))

    images = [png(28, 28 + n, seed=n) for n in range(10)]
    with running_server(fake=FakeSession(), queue=QueueOptions(max_views=60)) as server:
        answers = asyncio.run(burst(server.address))
        assert len(answers[0].views) == 6, "ten images should fill the queue"
        assert answers[:10] * 20 == answers


@pytest.fixture
def one_at_a_time(client_to, monkeypatch: pytest.MonkeyPatch):
    """Return how to connect a client that has one call in flight to a server that holds the first call until a gate is
    open; yields the client, how to make a call in another thread, and the gate.
    """
    monkeypatch.setattr("prelunet.evaluator.client.pacing.MAX_IN_FLIGHT", 1)

    @contextmanager
    def connected(**options: Any) -> Iterator[tuple[Any, Callable[..., Future], threading.Event]]:
        arrived, gate = threading.Event(), threading.Event()

        def hold(request, context):
            arrived.set()
            gate.wait(30)
            return answer_to(request)

        with client_to(ScriptedServicer(hold), **options) as client, ThreadPoolExecutor(8) as pool:
            try:
                first = pool.submit(client.classify, b"first", timeout=None)
                assert arrived.wait(30)
                yield client, lambda *image, **more: pool.submit(client.classify, *image, **more), gate
                gate.set()
                first.exception(30)
            finally:
                gate.set()

    return connected


def test_the_wait_counts_towards_a_timeout_of_ones_own(one_at_a_time) -> None:
    for of_the_client, of_the_call in (({"timeout": 0.2}, {}), ({}, {"timeout": 0.2})):
        with one_at_a_time(**of_the_client) as (_, call, _gate):
            error = call(b"second", request_id="second-1", **of_the_call).exception(30)
            assert type(error) is DeadlinePassed
            assert "waited for its turn" in str(error)
            assert str(error).endswith("(request id second-1)")


def test_the_default_timeout_begins_when_a_call_is_sent(one_at_a_time, monkeypatch: pytest.MonkeyPatch) -> None:
    with one_at_a_time() as (_, call, gate):
        monkeypatch.setattr("prelunet.evaluator.client.calls._DEFAULT_TIMEOUT", 0.3)
        waiting = [call(b"%d" % n) for n in range(3)]
        time.sleep(0.6)
        assert not any(future.done() for future in waiting)
        gate.set()
        assert [text_of(future.result(30)) for future in waiting] == ["0", "1", "2"]


def test_the_default_timeout_does_not_run_while_there_is_no_server(client_of, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("prelunet.evaluator.client.calls._DEFAULT_TIMEOUT", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with client_of(f"127.0.0.1:{port}") as client, ThreadPoolExecutor(20) as pool:
        calls = [pool.submit(client.classify, b"%d" % n) for n in range(20)]
        time.sleep(1)
        with served(ScriptedServicer(), port):
            assert [text_of(call.result(30)) for call in calls] == [f"{n}" for n in range(20)]


def test_an_image_is_read_when_its_turn_comes(one_at_a_time, tmp_path: Path) -> None:
    with one_at_a_time() as (_, call, gate):
        waiting = call(tmp_path / "late.jpg")
        time.sleep(0.1)
        (tmp_path / "late.jpg").write_bytes(b"late")
        gate.set()
        assert text_of(waiting.result(30)) == "late"


def test_an_unreadable_image_gives_its_turn_to_the_next_call(one_at_a_time, tmp_path: Path) -> None:
    with one_at_a_time() as (_, call, gate):
        waiting = [call(tmp_path / "gone.jpg") for _ in range(3)]
        gate.set()
        assert all("gone.jpg: cannot be read" in str(future.exception(30)) for future in waiting)
        assert text_of(call(b"dog").result(30)) == "dog"


def test_closing_the_client_interrupts_the_calls_that_wait(one_at_a_time) -> None:
    with one_at_a_time() as (client, call, _):
        waiting = [call(b"%d" % n) for n in range(3)]
        time.sleep(0.1)
        client.close()
        assert {type(future.exception(30)) for future in waiting} == {Interrupted}


def test_a_cancelled_task_leaves_the_queue() -> None:
    async def use() -> None:
        server = grpc.aio.server()
        gate, seen = asyncio.Event(), []

        class Holding(pb_grpc.PreluNetServiceServicer):
            async def Classify(self, request, context):  # noqa: N802
                seen.append(int(request.image))
                await gate.wait()
                return answer_to(request)

        pb_grpc.add_PreluNetServiceServicer_to_server(Holding(), server)
        address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        await server.start()
        async with AsyncClient(address) as client:
            calls = [asyncio.create_task(client.classify(b"%d" % n)) for n in range(300)]
            while len(seen) < 128:
                await asyncio.sleep(0.01)
            for call in calls[100:280]:  # some are in flight, some wait
                call.cancel()
            gate.set()
            results = await asyncio.gather(*calls, return_exceptions=True)
            assert {type(result) for result in results[100:280]} == {asyncio.CancelledError}
            assert [text_of(answer) for answer in results[:100] + results[280:]] == [
                f"{n}" for n in [*range(100), *range(280, 300)]
            ]
            assert set(seen) == {*range(128), *range(280, 300)}
            assert len(await asyncio.gather(*(client.classify(b"7") for _ in range(300)))) == 300
        await server.stop(None)

    asyncio.run(asyncio.wait_for(use(), 60))
