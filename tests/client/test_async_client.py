"""What only asyncio has; what both clients do is in test_retries.py, test_streams.py and test_evaluations.py."""

import asyncio
import gc
import inspect
import os
import threading
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import numpy as np
import pytest

import prelunet.evaluator.client.messages
from prelunet.evaluator.client import AsyncClient, Client
from prelunet.evaluator.client.backends import StreamEnd
from prelunet.evaluator.client.calls import Attempts
from prelunet.evaluator.datasets.dataset import Dataset, Sample
from prelunet.evaluator.errors import ImageError, Overloaded, UsageError
from prelunet.evaluator.pb.prelunet.v1 import prelunet_pb2 as pb
from tests.client.client_harness import QUICK, ScriptedServicer, served, text_of
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
        async with AsyncClient(address, retries=replace(QUICK, answers_per_retry=1)) as client:
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
        with asyncio.Runner() as runner:  # whose loop still runs
            client = AsyncClient(address)
            runner.run(enter(client))
            thread = threading.Thread(target=asyncio.run, args=(use(client),))
            thread.start()
            thread.join()
            runner.run(client.close())


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

    on_scripted(ScriptedServicer(hold, hold_stream, hold_stream), use)


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


def test_a_task_that_waits_for_its_next_attempt_can_be_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    async def use(client: AsyncClient) -> None:
        waiting, pause = asyncio.Event(), Attempts.pause
        monkeypatch.setattr(Attempts, "pause", lambda self, error, **more: waiting.set() or pause(self, error, **more))
        task = asyncio.create_task(client.classify(b"cat", timeout=None))
        await waiting.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    on_scripted(ScriptedServicer(Overloaded("full", retry_after=3600)), use)


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
        assert [(key, text_of(answer)) async for key, answer in client.classify_many(images())] == [
            ("CAT", "cat"),
            ("DOG", "dog"),
            ("FOX", "fox"),
        ]
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


def test_slow_work_runs_in_threads(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
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

    def thousand(request, context):
        return pb.ClassifyResponse(predictions=[pb.Prediction(class_index=n) for n in range(1000)])

    def report(requests, _):
        list(requests)
        yield pb.EvaluateResponse(report=pb.Report(worst=pb.WorstClasses()))

    reading = prelunet.evaluator.client.messages.answer_from_message

    def noting(message: pb.ClassifyResponse) -> Any:
        where[f"{len(message.predictions)} predictions"] = threading.get_ident()
        return reading(message)

    monkeypatch.setattr(prelunet.evaluator.client.messages, "answer_from_message", noting)

    async def use(client: AsyncClient) -> None:
        here = threading.get_ident()
        assert len((await client.classify(b"cat")).predictions) == 1000
        assert [key async for key, _ in client.classify_many(images())] == [0]
        await client.evaluate(Dataset(Path("pets"), ("n0",), [Sample("a", 0, 3)], Noting()))
        await client.classify(Noted("path"))
        assert [key async for key, _ in client.classify_many(each_of(Noted("path of many")))] == [0]
        assert {name for name, thread in where.items() if thread == here} == {"1 predictions"}
        assert len(where) == 6

    on_scripted(ScriptedServicer(thousand, None, report), use)


def test_many_tasks_share_a_client() -> None:
    async def use(client: AsyncClient) -> None:
        names = [f"{n}" for n in range(200)]
        answers = await asyncio.gather(*(client.classify(name.encode()) for name in names))
        assert [text_of(answer) for answer in answers] == names

        async def many(name: str) -> list[str]:
            return [text_of(answer) async for _, answer in client.classify_many([name.encode()] * 20)]

        assert await asyncio.gather(*(many(name) for name in "abcd")) == [[name] * 20 for name in "abcd"]

    on_scripted(ScriptedServicer(), use)


class Ending:
    """A stream of grpc.aio whose statuses arrive in an order chosen by the test."""

    def __init__(self) -> None:
        self.callbacks: list[Callable[[Any], None]] = []

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        self.callbacks.append(callback)

    def end(self, code: grpc.StatusCode, details: str) -> grpc.aio.AioRpcError:
        self._status = grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(("key", details)), details)
        for callback in self.callbacks:
            callback(self)
        return self._status

    async def code(self) -> grpc.StatusCode:
        return self._status.code()

    async def details(self) -> str | None:
        return self._status.details()

    async def trailing_metadata(self) -> grpc.aio.Metadata:
        return self._status.trailing_metadata()


INTERNAL, NOT_FOUND, OK = grpc.StatusCode.INTERNAL, grpc.StatusCode.NOT_FOUND, grpc.StatusCode.OK
CORE_ERROR = "Internal error from Core"


@pytest.mark.parametrize("late", [False, True], ids=["before", "after"])
def test_the_status_of_the_server_is_found_although_grpc_replaces_it_by_its_own(late: bool) -> None:
    async def status(code: grpc.StatusCode, details: str) -> grpc.RpcError | None:
        stream = Ending()
        end = StreamEnd(stream)
        if not late:
            stream.end(code, details)
        failed = stream.end(INTERNAL, CORE_ERROR)
        asking = asyncio.create_task(end.status(failed))
        await asyncio.sleep(0)
        if late:
            stream.end(code, details)
        stream.end(grpc.StatusCode.CANCELLED, "cancelled here")
        return await asking

    async def check() -> None:
        found = await status(NOT_FOUND, "no model")
        assert found is not None
        assert (found.code(), found.details()) == (NOT_FOUND, "no model")
        assert tuple(found.trailing_metadata()) == (("key", "no model"),)
        assert await status(OK, "") is None

    asyncio.run(check())


def test_the_wait_for_a_status_that_never_comes_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("prelunet.evaluator.client.backends._STATUS_TIMEOUT", 0.01)

    async def check() -> None:
        stream = Ending()
        end = StreamEnd(stream)
        failed = stream.end(INTERNAL, CORE_ERROR)
        assert await end.status(failed) is failed
        other = stream.end(INTERNAL, "a mistake; its id is 7")
        assert await end.status(other) is other

    asyncio.run(check())


def test_the_error_of_a_server_that_ends_a_stream_early_is_always_raised() -> None:
    """grpc.aio reports INTERNAL in about half of the cases, when a request is being sent at that moment."""

    def refuse(requests, context):
        next(requests)
        context.abort(grpc.StatusCode.INVALID_ARGUMENT, "no such option")

    async def use(client: AsyncClient) -> None:
        for _ in range(20):
            with pytest.raises(Exception, match="no such option"):
                [_ async for _ in client.classify_many([b"x" * 1000] * 40)]
            with pytest.raises(Exception, match="no such option"):
                await client.evaluate(pets())

    on_scripted(ScriptedServicer(*[refuse] * 40), use)


def test_an_error_that_was_handled_keeps_nothing_alive() -> None:
    async def use(client: AsyncClient) -> None:
        with pytest.raises(ImageError) as caught:
            await client.classify(b"cat")
        seen = weakref.ref(caught.value)
        caught = None
        await asyncio.sleep(0)
        assert seen() is None, "error, traceback and the request's image would live until the next collection"

    gc.collect()
    gc.disable()
    try:
        on_scripted(ScriptedServicer(ImageError("no image")), use)
    finally:
        gc.enable()


def pets() -> Dataset:
    class Same:
        def read(self, file: str) -> bytes:
            return b"cat"

    return Dataset(Path("pets"), ("n0",), [Sample(f"{n:03}", 0, 3) for n in range(50)], Same())
