"""The limit on the bytes of unfinished messages: who is refused, and who is not."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from ipaddress import ip_network

import grpc
import pytest

from prelunet.evaluator.errors import Overloaded
from prelunet.evaluator.pb.prelunet.v1 import prelunet_pb2 as pb
from prelunet.evaluator.pb.prelunet.v1 import prelunet_pb2_grpc as pb_grpc
from prelunet.evaluator.rpc.status import error_from
from prelunet.evaluator.serving.api.arriving import ArrivingBytes
from prelunet.evaluator.serving.options import ServerLimits
from prelunet.evaluator.serving.proxies import TrustedProxies
from tests.helpers.fakes import FakeSession
from tests.serving.event_loop import async_test, new_channel, until
from tests.serving.serving_harness import RunningServer, png, running_server

MIB = 2**20
LARGE = 30 * MIB  # bytes of an image; three of them are more than the limit
LIMITS = ServerLimits(arriving_bytes=1)  # so the limit is one message of 64 MiB
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
async def test_too_many_unfinished_messages_are_refused_and_nobody_else_is() -> None:
    with running_server(server_limits=LIMITS, fake=FakeSession()) as server:
        async with (
            client(server, allowed=80 * MIB, source="127.0.0.2") as greedy,
            client(server, source="127.0.0.2") as neighbour,
            client(server) as other,
        ):
            idle = [Stream(each) for each in (neighbour, other)]
            assert all([await stream.answers() for stream in idle])
            unfinished = uploads(greedy, 4)
            done, _ = await asyncio.wait(unfinished, return_when=asyncio.FIRST_COMPLETED)
            error = done.pop().result()
            assert isinstance(error, grpc.aio.AioRpcError)
            assert error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
            ours = error_from(error, "")
            assert isinstance(ours, Overloaded)
            assert ours.retry_after == 1
            assert "limit of 67108864 bytes (option --arriving-bytes), most of them from ipv4:127.0.0.2" in str(ours)
            assert refusals(server) == 3, "one has room, however large it is"
            for each in (neighbour, other):
                assert (await each.stub.Classify(IMAGE, timeout=30)).predictions
            assert all([await stream.answers() for stream in idle])
            for call in unfinished:
                call.cancel()


@async_test
async def test_an_older_idle_stream_of_the_same_connection_is_spared() -> None:
    with running_server(server_limits=LIMITS, fake=FakeSession()) as server:
        async with client(server, allowed=80 * MIB) as greedy:
            idle = Stream(greedy)
            assert await idle.answers()
            unfinished = uploads(greedy, 4)
            await until(lambda: refusals(server) == 4)
            assert not idle.call.done()
            for call in unfinished:
                call.cancel()


@async_test
async def test_slow_uploads_and_complete_messages_beside_an_idle_stream_are_not_refused() -> None:
    with running_server(server_limits=LIMITS, fake=FakeSession()) as server:
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
    proxies = TrustedProxies("x-forwarded-for", (ip_network("127.0.0.1"),))
    limits = ServerLimits(arriving_bytes=1, proxies=proxies)
    with running_server(server_limits=limits, fake=FakeSession()) as server:
        async with client(server, allowed=80 * MIB) as proxy:
            unfinished = uploads(proxy, 3, metadata=(("x-forwarded-for", "192.0.2.1"),))
            await asyncio.sleep(0.05)
            idle = Stream(proxy, metadata=(("x-forwarded-for", "192.0.2.2"),))
            await until(lambda: refusals(server) > 0)
            await asyncio.sleep(0.3)
            assert not idle.call.done()
            assert refusals(server) == 3
            for call in unfinished:
                call.cancel()


def test_a_system_without_the_kernels_counts_is_reported_at_the_start(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ArrivingBytes()
    assert caplog.text == ""
    monkeypatch.delattr(socket, "TCP_INFO")
    ArrivingBytes()
    assert "--arriving-bytes has no effect: this system does not report how many bytes have arrived" in caplog.text
