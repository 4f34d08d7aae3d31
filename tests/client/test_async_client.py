"""What only asyncio has; what both clients do is in the other files."""

import asyncio
import inspect
import os
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import numpy as np
import pytest

from prelunet.evaluator.client import AsyncClient, Client
from prelunet.evaluator.datasets.dataset import Dataset, Sample
from prelunet.evaluator.errors import Overloaded, UsageError
from prelunet.evaluator.pb.prelunet.v1 import prelunet_pb2 as pb
from prelunet.evaluator.pb.prelunet.v1 import prelunet_pb2_grpc as pb_grpc
from prelunet.evaluator.serving.network import channel_options
from prelunet.evaluator.serving.options import ServerLimits
from tests.client.client_harness import ScriptedServicer, answer_to, served, text_of
from tests.helpers.fakes import FakeSession
from tests.serving.serving_harness import png, running_server


def methods(client: type) -> dict[str, list[tuple[str, Any, Any]]]:
    """Return the arguments of every public method: name, kind and default."""
    return {
        name: [(p.name, p.kind, p.default) for p in inspect.signature(method).parameters.values()]
        for name, method in inspect.getmembers(client, inspect.isfunction)
        if not name.startswith("_") or name == "__init__"
    }


def test_both_clients_have_the_same_methods_with_the_same_arguments() -> None:
    assert methods(AsyncClient) == methods(Client)
    assert {"classify", "classify_many", "evaluate", "models", "ready", "close"} < set(methods(Client))


def test_both_clients_give_the_same_answers() -> None:
    images = [png(40, 41 + n, seed=n) for n in range(12)]

    async def ask(address: str) -> list[Any]:
        async with AsyncClient(address) as client:
            alone = await asyncio.gather(*(client.classify(image) for image in images))
            many = {key: answer async for key, answer in client.classify_many(images)}
            assert await client.ready()
            return [alone, many, await client.models()]

    with running_server(fake=FakeSession()) as server, Client(server.address) as client:
        expected = [client.classify(image) for image in images]
        assert asyncio.run(ask(server.address)) == [expected, dict(enumerate(expected)), client.models()]


def on_scripted(server: Any, use: Callable[[AsyncClient], Awaitable[Any]]) -> Any:
    """Run `use` with a client of a scripted server."""

    async def run(address: str) -> Any:
        async with AsyncClient(address) as client:
            return await asyncio.wait_for(use(client), 60)

    with served(server) as address:
        return asyncio.run(run(address))


def test_an_asyncio_client_outside_its_block_is_refused() -> None:
    async def use() -> None:
        client = AsyncClient("127.0.0.1:1")
        for ask in (client.classify(b"cat"), client.models(), client.ready(), client.evaluate(pets())):
            with pytest.raises(UsageError, match="inside its `with` block"):
                await ask
        with pytest.raises(UsageError, match="inside its `with` block"):
            await anext(client.classify_many([b"cat"]))
        await client.close()
        async with AsyncClient("127.0.0.1:1") as used:
            pass
        with pytest.raises(UsageError, match="only one `async with` block"):
            await used.__aenter__()

    asyncio.run(use())


def test_a_client_of_another_event_loop_is_refused() -> None:
    async def enter(client: AsyncClient) -> None:
        await client.__aenter__()
        assert text_of(await client.classify(b"cat")) == "cat"

    async def use(client: AsyncClient) -> None:
        for ask in (client.classify, client.models, client.ready, client.evaluate):
            with pytest.raises(UsageError, match="belongs to another event loop; create one in each loop"):
                await ask(*([b"cat"] if ask == client.classify else [pets()] if ask == client.evaluate else []))
        with pytest.raises(UsageError, match="belongs to another event loop"):
            await anext(client.classify_many([b"cat"]))

    with served(ScriptedServicer()) as address:
        client = AsyncClient(address)
        asyncio.run(enter(client))
        asyncio.run(use(client))


def test_cancelling_a_task_cancels_its_call_on_the_server() -> None:
    arrived, ended = threading.Event(), threading.Event()

    def hold(request, context):
        context.add_callback(ended.set)
        arrived.set()
        ended.wait(30)

    def hold_stream(requests, context):
        next(requests)
        hold(None, context)
        yield from ()

    async def use(client: AsyncClient) -> None:
        async def many() -> None:
            async for _ in client.classify_many([b"cat"]):
                pass

        for call in (client.classify(b"cat"), many(), client.evaluate(pets())):
            task = asyncio.create_task(call)
            assert await asyncio.to_thread(arrived.wait, 30)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert await asyncio.to_thread(ended.wait, 30)
            arrived.clear()
            ended.clear()
        assert text_of(await client.classify(b"cat")) == "cat"

    on_scripted(ScriptedServicer(hold, hold, None, hold_stream), use)


def test_a_cancelled_task_stays_cancelled_while_the_client_is_closed() -> None:
    arrived, gate = threading.Event(), threading.Event()

    def hold(request, context):
        arrived.set()
        gate.wait(30)

    async def use(client: AsyncClient) -> None:
        task = asyncio.create_task(client.classify(b"cat"))
        assert await asyncio.to_thread(arrived.wait, 30)
        task.cancel()
        await client.close()
        with pytest.raises(asyncio.CancelledError):
            await task
        gate.set()

    on_scripted(ScriptedServicer(hold), use)


def test_a_task_that_waits_for_its_next_attempt_can_be_cancelled() -> None:
    server = ScriptedServicer(Overloaded("full", retry_after=3600))

    async def use(client: AsyncClient) -> None:
        task = asyncio.create_task(client.classify(b"cat", timeout=None))
        while not server.seen:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    on_scripted(server, use)


def test_an_asynchronous_generator_of_images_is_closed_while_one_of_them_is_prepared() -> None:
    closed = False
    noise = np.random.default_rng(5).integers(256, size=(1500, 1400, 3), dtype=np.uint8)  # a PNG takes half a second

    async def images() -> AsyncIterator[Any]:
        nonlocal closed
        try:
            yield b"cat"
            yield noise
        finally:
            closed = True

    async def use(client: AsyncClient) -> None:
        results = client.classify_many(images())
        assert text_of((await anext(results))[1]) == "cat"
        await results.aclose()
        assert closed

    on_scripted(ScriptedServicer(), use)


def test_images_may_come_from_an_asynchronous_iterable() -> None:
    closed = asyncio.Event()

    async def images() -> AsyncIterator[tuple[str, bytes]]:
        try:
            for name in ("cat", "dog", "fox"):
                await asyncio.sleep(0)
                yield name.upper(), name.encode()
        finally:
            closed.set()

    async def broken() -> AsyncIterator[bytes]:
        yield b"cat"
        raise LookupError("no more pets")

    async def cancelled() -> AsyncIterator[bytes]:
        yield b"cat"
        raise asyncio.CancelledError  # as of a task that it waits for

    left = asyncio.Event()

    async def waiting() -> AsyncIterator[bytes]:
        try:
            yield b"cat"
            await asyncio.Event().wait()
        finally:
            left.set()

    async def use(client: AsyncClient) -> None:
        results = client.classify_many(waiting())
        await anext(results)
        await results.aclose()
        assert left.is_set()
        answers = {key: text_of(answer) async for key, answer in client.classify_many(images())}
        assert answers == {"CAT": "cat", "DOG": "dog", "FOX": "fox"}
        closed.clear()
        results = client.classify_many(images())
        await anext(results)
        await results.aclose()
        await asyncio.wait_for(closed.wait(), 30)
        for source, error in ((broken, LookupError), (cancelled, asyncio.CancelledError)):
            with pytest.raises(error):
                [_ async for _ in client.classify_many(source())]

    on_scripted(ScriptedServicer(), use)


def test_an_abandoned_stream_ends_with_its_loop_without_a_log_line(caplog: pytest.LogCaptureFixture) -> None:
    kept = []

    async def use(client: AsyncClient) -> None:
        kept.append(client.classify_many([b"cat"] * 9, max_pending=2))
        await anext(kept[0])

    on_scripted(ScriptedServicer(), use)
    assert [record.getMessage() for record in caplog.records if record.name == "asyncio"] == []


def test_images_are_read_in_threads(tmp_path: Path) -> None:
    where: dict[str, int] = {}
    file = tmp_path / "cat.jpg"
    file.write_bytes(b"cat")

    def images() -> Iterator[bytes]:
        where["images"] = threading.get_ident()
        yield b"cat"

    class Noting:
        def read(self, file: str) -> bytes:
            where["read"] = threading.get_ident()
            return b"cat"

    class Noted(os.PathLike):
        def __init__(self, name: str) -> None:
            self.name = name

        def __fspath__(self) -> str:
            where[self.name] = threading.get_ident()
            return str(file)

    async def each_of(image: object) -> AsyncIterator[object]:
        yield image

    def report(requests, _):
        list(requests)
        yield pb.EvaluateResponse(report=pb.Report(worst=pb.WorstClasses()))

    async def use(client: AsyncClient) -> None:
        await client.evaluate(Dataset(Path("pets"), ("n0",), [Sample("a", 0, 3)], Noting()))
        assert [key async for key, _ in client.classify_many(images())] == [0]
        await client.classify(Noted("path"))
        assert [key async for key, _ in client.classify_many(each_of(Noted("path of many")))] == [0]
        assert where.keys() == {"images", "read", "path", "path of many"}
        assert threading.get_ident() not in where.values()

    on_scripted(ScriptedServicer(None, report), use)


def test_the_error_of_a_server_that_ends_a_stream_early_is_always_raised() -> None:
    """grpc.aio reports INTERNAL in about half of the cases, when a request is being sent at that moment."""

    def refuse(requests, context):
        next(requests)
        context.abort(grpc.StatusCode.INVALID_ARGUMENT, "no such option")

    async def use(client: AsyncClient) -> None:
        for _ in range(20):
            with pytest.raises(Exception, match="no such option"):
                await client.evaluate(pets())

    on_scripted(ScriptedServicer(*[None, refuse] * 20), use)


def test_of_a_burst_128_calls_are_in_flight_and_all_are_answered() -> None:
    now = most = 0

    class Counting(pb_grpc.PreluNetServiceServicer):
        async def Classify(self, request, context):  # noqa: N802
            nonlocal now, most
            now += 1
            most = max(most, now)
            await asyncio.sleep(0.02)
            now -= 1
            return answer_to(request)

    async def burst() -> list[Any]:
        server = grpc.aio.server(options=channel_options(ServerLimits()))
        pb_grpc.add_PreluNetServiceServicer_to_server(Counting(), server)
        address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        await server.start()
        async with AsyncClient(address) as client:
            answers = await asyncio.gather(*(client.classify(b"%d" % n) for n in range(2000)))
        await server.stop(None)
        return answers

    assert [text_of(answer) for answer in asyncio.run(burst())] == [f"{n}" for n in range(2000)]
    assert 64 < most <= 128


def pets() -> Dataset:
    class Same:
        def read(self, file: str) -> bytes:
            return b"cat"

    return Dataset(Path("pets"), ("n0",), [Sample(f"{n:03}", 0, 3) for n in range(50)], Same())
