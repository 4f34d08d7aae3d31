"""The limit on the memory of unfinished and of compressed messages: who is refused, and who is not."""

import asyncio
import gc
import gzip
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from ipaddress import ip_network
from pathlib import Path

import grpc
import numpy as np
import pytest

from prelunet.evaluator.errors import Overloaded, UsageError
from prelunet.evaluator.pb.prelunet.v1 import prelunet_pb2 as pb
from prelunet.evaluator.pb.prelunet.v1 import prelunet_pb2_grpc as pb_grpc
from prelunet.evaluator.rpc.status import error_from
from prelunet.evaluator.serving import arriving
from prelunet.evaluator.serving.arriving import ArrivingBytes, process_memory
from prelunet.evaluator.serving.options import ServerLimits
from prelunet.evaluator.serving.proxies import TrustedProxies
from tests.helpers.fakes import FakeSession
from tests.serving.event_loop import async_test, new_channel, settled, until
from tests.serving.serving_harness import RunningServer, png, running_server

MIB = 2**20
SIZE = 200_000  # bytes of a compressed message
LARGE = 30 * MIB  # bytes of an image
IMAGE = pb.ClassifyRequest(model="fake", image=png(8, 8))


@dataclass
class Client:
    """A client behind a relay, which stops passing on its bytes after `allowed`."""

    stub: pb_grpc.PreluNetServiceStub
    allowed: list[int] = field(default_factory=list)


@asynccontextmanager
async def client(server: RunningServer, allowed: int = 2**40, source: str = "127.0.0.1") -> AsyncIterator[Client]:
    """Connect a client from an address through a relay, which passes on this many of its bytes and then stops."""
    host, _, port = server.address.rpartition(":")
    async with AsyncExitStack() as stack:

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            if host == "unix":
                there, server_writer = await asyncio.open_unix_connection(port)
            else:
                there, server_writer = await asyncio.open_connection(host, int(port), local_addr=(source, 0))
            stack.push_async_callback(server_writer.wait_closed)
            stack.callback(server_writer.close)

            async def back() -> None:
                while data := await there.read(MIB):
                    writer.write(data)

            async def forth() -> None:
                left = allowed
                while left and (data := await reader.read(min(left, MIB))):
                    server_writer.write(data)
                    await server_writer.drain()
                    left -= len(data)

            for each in (back(), forth()):
                stack.callback(asyncio.create_task(each).cancel)

        relay = await asyncio.start_server(serve, "127.0.0.1", 0)
        stack.callback(relay.close)
        channel = await stack.enter_async_context(new_channel(f"127.0.0.1:{relay.sockets[0].getsockname()[1]}"))
        yield Client(pb_grpc.PreluNetServiceStub(channel))


class Stream:
    """A stream of classifications that is idle between its messages."""

    def __init__(self, of: Client, **options: object) -> None:
        self.call = of.stub.ClassifyStream(**options)
        self._count = 0

    async def answers(self) -> bool:
        self._count += 1
        await self.call.write(pb.ClassifyStreamRequest(id=str(self._count), request=IMAGE))
        answer = await self.call.read()
        return answer is not grpc.aio.EOF and answer.id == str(self._count)


def uploads(of: Client, count: int, size: int = LARGE, **options: object) -> list["asyncio.Future[object]"]:
    """Start calls with images of this size, which no decoder accepts."""
    request = pb.ClassifyRequest(model="fake", image=bytes(size))
    return [asyncio.ensure_future(outcome(of.stub.Classify(request, timeout=50, **options))) for _ in range(count)]


async def outcome(call: object) -> grpc.aio.AioRpcError | None:
    try:
        await call  # type: ignore[misc]
    except grpc.aio.AioRpcError as error:
        return error
    return None


def refusals(server: RunningServer) -> float:
    return server.metric("prelunet_refusals_total", model="", reason="arriving")


@async_test
async def test_unfinished_messages_are_refused_in_a_process_beyond_its_memory_and_nobody_else_is() -> None:
    limits = ServerLimits(arriving_bytes=1)  # so each client may always have one
    with running_server(server_limits=limits, fake=FakeSession(), max_memory=process_memory() + 64 * MIB) as server:
        async with (
            client(server, allowed=5 * LARGE, source="127.0.0.2") as greedy,
            client(server, source="127.0.0.2") as neighbour,
            client(server) as other,
        ):
            idle = Stream(other)
            assert await idle.answers()
            unfinished = uploads(greedy, 8)
            done, _ = await asyncio.wait(unfinished, return_when=asyncio.FIRST_COMPLETED)
            error = done.pop().result()
            assert isinstance(error, grpc.aio.AioRpcError)
            assert error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
            ours = error_from(error, "")
            assert isinstance(ours, Overloaded)
            assert ours.retry_after == 1
            assert "most of the unfinished messages are from ipv4:127.0.0.2" in str(ours)
            for each in (neighbour, other):
                assert (await each.stub.Classify(IMAGE, timeout=30)).predictions
            assert await idle.answers()
            for call in unfinished:
                call.cancel()


@async_test
async def test_over_a_unix_socket_they_are_refused_too(tmp_path: Path) -> None:
    with running_server(
        fake=FakeSession(), max_memory=process_memory() + 64 * MIB, unix_socket=tmp_path / "socket"
    ) as server:
        async with client(server, allowed=5 * LARGE) as greedy:
            unfinished = uploads(greedy, 8)
            await until(lambda: refusals(server))
            for call in unfinished:
                call.cancel()


@async_test
async def test_slow_uploads_and_large_messages_are_not_refused_within_the_memory() -> None:
    with running_server(fake=FakeSession(), max_memory=process_memory() + 1024 * MIB) as server:
        async with client(server, allowed=2 * MIB) as slow, client(server) as fast:
            stream = Stream(fast)
            assert await stream.answers()
            held = uploads(slow, 40, 100_000)
            for _ in range(8):
                outcomes = await asyncio.gather(*uploads(fast, 2, 15 * MIB))
                assert [error.code() for error in outcomes if error] == 2 * [grpc.StatusCode.INVALID_ARGUMENT]
            await asyncio.sleep(0.3)
            assert await stream.answers()
            assert refusals(server) == 0
            for call in held:
                call.cancel()


@async_test
async def test_on_the_connection_of_a_proxy_only_the_client_with_the_most_is_refused() -> None:
    limits = ServerLimits(proxies=TrustedProxies("x-forwarded-for", (ip_network("127.0.0.1"),)))
    with running_server(server_limits=limits, fake=FakeSession(), max_memory=process_memory() + 32 * MIB) as server:
        async with client(server, allowed=5 * LARGE) as proxy:
            idle = Stream(proxy, metadata=(("x-forwarded-for", "192.0.2.2"),))
            unfinished = uploads(proxy, 8, metadata=(("x-forwarded-for", "192.0.2.1"),))
            await until(lambda: refusals(server) > 0)
            assert not idle.call.done()
            for call in unfinished:
                call.cancel()


@pytest.mark.parametrize("answered", [True, False], ids=["images", "too large"])
@async_test
async def test_compressed_messages_are_decompressed_only_as_far_as_there_is_room(answered: bool) -> None:
    """Twenty messages of 60 MB, of 8 MB on the wire; at most one of them is decompressed at a time."""
    image = png(8, 8) if answered else 60 * (np.random.default_rng(0).bytes(MIB // 7) + bytes(MIB - MIB // 7))
    data = gzip.compress(pb.ClassifyRequest(model="fake", image=image).SerializeToString(), 1)
    before = process_memory()
    most = 0
    with running_server(server_limits=ServerLimits(arriving_bytes=1), fake=FakeSession()) as server:
        async with new_channel(server.address) as channel:
            call = channel.unary_unary("/prelunet.v1.PreluNetService/Classify")
            calls = [asyncio.ensure_future(outcome(call(data, timeout=60))) for _ in range(20)]
            while not all(each.done() for each in calls):
                most = max(most, process_memory())
                await asyncio.sleep(0.005)
    codes = {each.result() and each.result().code().name for each in calls}  # type: ignore[union-attr]
    assert codes <= ({None} if answered else {"INVALID_ARGUMENT", "RESOURCE_EXHAUSTED"})
    # All messages, compressed, are in memory twice: the client is in this process. At most four images fit into the
    # queue, each twice while it is parsed; and a message that waits for its turn.
    assert most - before < 2 * 20 * len(data) + 9 * 60 * MIB, "all of them would take 20 times as much"


@async_test
async def test_while_the_event_loop_is_busy_no_second_message_is_decompressed(monkeypatch: pytest.MonkeyPatch) -> None:
    begun = []
    monkeypatch.setattr(arriving, "decompress", lambda data, _limit: begun.append(data))
    messages = ArrivingBytes()
    waiting = [asyncio.create_task(messages.decompressed(bytes([number]))) for number in range(3)]
    await asyncio.sleep(0)  # they begin
    time.sleep(0.2)  # busy, as with a burst of calls
    assert begun == [b"\0"]
    await asyncio.gather(*waiting)
    assert begun == [b"\0", b"\1", b"\2"]


@async_test
async def test_a_damaged_message_and_a_client_that_leaves_hold_up_no_other(caplog: pytest.LogCaptureFixture) -> None:
    arriving, data = ArrivingBytes(), gzip.compress(np.random.default_rng(0).bytes(SIZE))
    with pytest.raises(UsageError, match="cannot be decompressed"):
        await arriving.decompressed(data[:100] + data)
    for message in (data, data[:100] + data):
        leaving = asyncio.create_task(arriving.decompressed(message))
        await asyncio.sleep(0)
        leaving.cancel()
        assert len(await arriving.decompressed(data)) == SIZE
        del leaving
        await settled()
    gc.collect()
    assert caplog.messages == [], "nobody looks at the errors of those that have left"
