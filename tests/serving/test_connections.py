"""The server's limits on connections and messages, each tested by its effect on clients."""

import asyncio
import gzip
import os
import resource
import signal
import socket
import zlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from prelunet.evaluator.errors import EnvironmentFault
from prelunet.evaluator.pb.inference import inference_pb2
from prelunet.evaluator.pb.prelunet.v1 import prelunet_pb2
from prelunet.evaluator.rpc.tls import is_loopback
from prelunet.evaluator.serving import models
from prelunet.evaluator.serving.calls import CallsInFlight
from prelunet.evaluator.serving.lifecycle import serve
from prelunet.evaluator.serving.network import (
    explain_bind_error,
    host_port,
    is_wildcard,
    raise_open_file_limit,
)
from prelunet.evaluator.serving.options import ModelFile, ServeOptions, ServerLimits
from prelunet.evaluator.serving.server import Server
from tests.helpers.fakes import FakeSession
from tests.serving.api.raw_http2 import (
    ACK,
    DATA,
    END_HEADERS,
    END_STREAM,
    ENHANCE_YOUR_CALM,
    GOAWAY,
    HEADERS,
    PING,
    PREFACE,
    REFUSED_STREAM,
    RST_STREAM,
    SETTINGS,
    Connection,
    call_headers,
    connection,
    frame,
    reset_call,
)
from tests.serving.event_loop import async_test, new_channel, rpc_error

SHORT = 0.2  # seconds; no test fails if a slow machine takes longer


@asynccontextmanager
async def listening(**changes: object) -> AsyncIterator[str]:
    """Run a server with health, without models and with changed limits; yields its address."""
    server = Server("127.0.0.1", 0, CallsInFlight(replace(ServerLimits(), **changes)))  # type: ignore[arg-type]
    await server.open()
    try:
        yield server.address
    finally:
        await server.stop(0)


async def check(channel: grpc.aio.Channel, **options: object) -> int:
    """Check the health once."""
    stub = health_pb2_grpc.HealthStub(channel)
    return (await stub.Check(health_pb2.HealthCheckRequest(), timeout=20, **options)).status


async def succeeds(channel: grpc.aio.Channel) -> bool:
    """Return whether a health check works; only UNAVAILABLE is accepted as failure."""
    try:
        return bool(await check(channel))
    except grpc.aio.AioRpcError as error:
        if error.code() != grpc.StatusCode.UNAVAILABLE:
            raise
        return False


@async_test
async def test_a_connection_above_the_limit_is_closed_until_another_has_left() -> None:
    async with listening(max_connections=2) as address, new_channel(address) as first, new_channel(address) as second:
        await check(first)
        await check(second)
        async with new_channel(address) as third:
            error = await rpc_error(check(third))
            assert error.code() == grpc.StatusCode.UNAVAILABLE
        assert await check(first), "open connections should not be affected"
        await second.close()
        served = False
        while not served:  # until the server has noticed
            async with new_channel(address) as fourth:  # a new one each time: a client waits between its attempts
                served = await succeeds(fourth)


@pytest.mark.parametrize("greeting", [b"", PREFACE[:16], PREFACE], ids=["silence", "half a preface", "no settings"])
@async_test
async def test_a_connection_that_does_not_start_http2_is_closed(greeting: bytes) -> None:
    async with listening(handshake_timeout=SHORT) as address, connection(address, greeting) as slow:
        await asyncio.wait_for(slow.closed.wait(), 20)


@async_test
async def test_a_client_that_disappeared_is_detected() -> None:
    async with listening(keepalive=SHORT, keepalive_timeout=SHORT) as address, connection(address) as gone:
        await gone.until(PING)
        await asyncio.wait_for(gone.closed.wait(), 20)


@async_test
async def test_a_client_that_answers_pings_stays_connected() -> None:
    async with listening(keepalive=SHORT, keepalive_timeout=20) as address, connection(address) as idle:
        for times in range(1, 5):
            await idle.until(PING, times=times)
            idle.send(frame(PING, idle.frames[-1][2], flags=ACK))
        await answered(idle)


async def answered(client: Connection) -> None:
    """Make a call and wait for its response."""
    begin = frame(HEADERS, call_headers("/grpc.health.v1.Health/Check"), flags=END_HEADERS, stream=1)
    client.send(begin, frame(DATA, b"\0\0\0\0\0", flags=END_STREAM, stream=1))
    await client.until(DATA)


@async_test
async def test_pings_at_the_usual_rate_are_answered_without_calls_too() -> None:
    async with listening(min_ping_interval=SHORT / 2) as address, connection(address) as client:
        for number in range(8):
            client.send(frame(PING, b"%08d" % number))
            await client.until(PING, flags=ACK, times=number + 1)
            await asyncio.sleep(SHORT)
        assert client.error is None
        await answered(client)


@async_test
async def test_a_flood_of_pings_is_cut_off_and_others_are_served() -> None:
    async with listening() as address, connection(address) as client, new_channel(address) as other:
        client.send(*(frame(PING, b"%08d" % number) for number in range(20)))
        await client.until(GOAWAY)
        assert client.error == ENHANCE_YOUR_CALM
        await asyncio.wait_for(client.closed.wait(), 20)
        assert await check(other)


def test_clients_may_ping_every_ten_seconds() -> None:
    assert ServerLimits.min_ping_interval <= 10 / 2, "a ping may come early if the one before was late"


@async_test
async def test_calls_above_max_streams_wait_in_the_client() -> None:
    async with listening(max_streams=2) as address, new_channel(address) as channel:
        watch = health_pb2_grpc.HealthStub(channel).Watch
        open_ = [watch(health_pb2.HealthCheckRequest()) for _ in range(2)]
        for call in open_:
            await call.read()
        waiting = asyncio.ensure_future(check(channel))
        done, _ = await asyncio.wait({waiting}, timeout=SHORT)
        assert not done, "a third call should not have started"
        open_[0].cancel()
        assert await waiting


@pytest.mark.parametrize("max_streams", [8, ServerLimits.max_streams])
@async_test
async def test_every_call_of_a_burst_on_one_connection_is_answered(max_streams: int) -> None:
    """A client starts a call as soon as another is answered, before gRPC frees that call on the server."""
    async with listening(max_streams=max_streams) as address, new_channel(address) as channel:
        answers = await asyncio.gather(*(check(channel) for _ in range(600)))
        assert answers == [health_pb2.HealthCheckResponse.NOT_SERVING] * 600


@async_test
async def test_calls_that_are_reset_at_once_are_refused_above_a_limit_and_others_are_served() -> None:
    """Otherwise a client could fill the server's memory with them (CVE-2023-44487)."""
    async with listening(max_streams=4) as address, connection(address) as hasty, new_channel(address) as other:
        await hasty.until(SETTINGS)
        hasty.send(frame(SETTINGS, flags=ACK))
        hasty.send(*(reset_call("/grpc.health.v1.Health/Watch", 2 * n + 1) for n in range(1000)))
        await hasty.until(RST_STREAM)
        refusal = next(payload for kind, _, payload in hasty.frames if kind == RST_STREAM)
        assert int.from_bytes(refusal, "big") == REFUSED_STREAM
        assert await check(other)


@async_test
async def test_headers_up_to_the_limit_are_always_accepted_and_larger_ones_never() -> None:
    """By default gRPC rejects at random between a soft and a hard limit, which is 5/4 of the soft one."""
    async with listening(max_metadata=2**15) as address, new_channel(address) as channel:
        for _ in range(5):  # gRPC's default would reject 39 % of the larger ones
            assert await check(channel, metadata=(("x-long", "v" * 30_000),))
            error = await rpc_error(check(channel, metadata=(("x-long", "v" * 36_000),)))
            assert error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED


@async_test
async def test_a_call_that_is_not_read_holds_back_its_client() -> None:
    async with listening() as address, new_channel(address) as channel:
        call = channel.stream_stream("/grpc.health.v1.Health/Watch")()
        await call.write(b"")
        await call.read()
        ahead = asyncio.create_task(asyncio.wait_for(call.write(bytes(2**21)), SHORT))
        await asyncio.wait((ahead,))
        assert isinstance(ahead.exception(), TimeoutError)


@async_test
async def test_an_old_connection_is_ended_and_its_client_continues_on_a_new_one() -> None:
    async with (
        listening(max_connection_age=SHORT, connection_age_grace=20.0) as address,
        connection(address) as old,
        new_channel(address) as channel,
    ):
        await old.until(GOAWAY)
        assert old.error == 0, "GOAWAY should carry NO_ERROR"
        for _ in range(5):
            assert await check(channel)
            await asyncio.sleep(SHORT)


@async_test
async def test_connections_have_no_maximum_age_by_default() -> None:
    async with listening() as address, connection(address) as client:
        await client.until(SETTINGS)
        await asyncio.sleep(SHORT)
        assert client.error is None


def test_loopback_and_wildcard_addresses_are_recognized() -> None:
    assert all(map(is_loopback, ("127.0.0.1", "127.8.9.1", "::1", "localhost")))
    assert not any(map(is_loopback, ("0.0.0.0", "::", "10.0.0.1", "example.org", "")))
    assert all(map(is_wildcard, ("::", "::0", "0:0:0:0:0:0:0:0")))
    assert not any(map(is_wildcard, ("::1", "127.0.0.1", "localhost", "", "::ffff:127.0.0.1")))
    assert (host_port("::1", 5), host_port("127.0.0.1", 5)) == ("[::1]:5", "127.0.0.1:5")


@pytest.mark.parametrize(
    ("soft", "hard", "requested", "expected_soft", "expected"),
    [
        (1024, 20_000, 4096, 4096 + 256, 4096),
        (1024, 2048, 4096, 2048, 2048 - 256),
        (1024, resource.RLIM_INFINITY, 4096, 4096 + 256, 4096),
        (1024, 256, 4096, 256, 0),
        (9000, 9000, 4096, 9000, 4096),
        (resource.RLIM_INFINITY, resource.RLIM_INFINITY, 4096, resource.RLIM_INFINITY, 4096),
    ],
)
def test_the_open_file_limit_is_raised_as_far_as_possible(
    monkeypatch: pytest.MonkeyPatch, soft: int, hard: int, requested: int, expected_soft: int, expected: int
) -> None:
    rlimits = [(soft, hard)]
    monkeypatch.setattr(resource, "getrlimit", lambda _kind: rlimits[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda _kind, limits: rlimits.append(limits))
    assert raise_open_file_limit(requested) == expected
    assert rlimits[-1] == (expected_soft, hard)


def serving_with_files(monkeypatch: pytest.MonkeyPatch, open_files: int) -> ServeOptions:
    """Fake an open-file limit of `open_files`; return options to serve a model."""
    monkeypatch.setattr(resource, "getrlimit", lambda _kind: (open_files, open_files))
    monkeypatch.setattr(resource, "setrlimit", lambda _kind, _limits: None)
    monkeypatch.setattr(models, "open_with_placement", lambda *_: FakeSession())
    return ServeOptions((ModelFile("model", Path("model.onnx")),), port=0, lame_duck=0, grace=0)


@async_test
async def test_the_open_file_limit_caps_the_connections_with_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    line: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    serving = asyncio.create_task(serve(serving_with_files(monkeypatch, 256 + 2), line.set_result))
    address = (await asyncio.wait_for(line, 30)).split(": ")[0].removeprefix("serving on ")
    async with new_channel(address) as first, new_channel(address) as second, new_channel(address) as third:
        await check(first)
        await check(second)
        assert (await rpc_error(check(third))).code() == grpc.StatusCode.UNAVAILABLE
        assert await check(first)
    assert "allows 2 connections, so the server accepts 2 instead of 4096: raise the limit" in caplog.text
    os.kill(os.getpid(), signal.SIGTERM)
    await serving


@pytest.mark.parametrize("open_files", [256, 20])
def test_a_server_without_open_files_for_connections_does_not_start(
    monkeypatch: pytest.MonkeyPatch, open_files: int
) -> None:
    options = serving_with_files(monkeypatch, open_files)
    with pytest.raises(EnvironmentFault, match=rf"may open only {open_files} files, but .* 256 .*: raise the limit"):
        asyncio.run(serve(options, pytest.fail))


@pytest.mark.parametrize("compression", [grpc.Compression.Gzip, grpc.Compression.Deflate])
@async_test
async def test_a_compressed_message_is_accepted_unless_it_becomes_far_larger_than_it_was_sent(
    compression: grpc.Compression,
) -> None:
    """GRPC itself would decompress a message of any size before it checks the limit."""
    async with listening() as address, new_channel(address) as channel:
        check_health = health_pb2_grpc.HealthStub(channel).Check
        for size, code, text in (
            (2_000, grpc.StatusCode.NOT_FOUND, ""),  # there is no such service
            (200_000, grpc.StatusCode.NOT_FOUND, ""),
            (400_000, grpc.StatusCode.INVALID_ARGUMENT, "may become; send such a message without compression"),
        ):
            request = health_pb2.HealthCheckRequest(service="x" * size)  # a thousandth of it on the wire
            error = await rpc_error(check_health(request, timeout=20, compression=compression))
            assert error.code() == code
            assert text in (error.details() or "")
        assert await check(channel)


@pytest.mark.parametrize("damage", [lambda data: data[:-9], lambda data: data[:20] + b"damaged" + data[27:]])
@pytest.mark.parametrize("compressed", [gzip.compress, zlib.compress])
@async_test
async def test_a_damaged_compressed_message_is_refused(
    compressed: Callable[[bytes], bytes], damage: Callable[[bytes], bytes]
) -> None:
    async with listening() as address, new_channel(address) as channel:
        message = health_pb2.HealthCheckRequest(service="damaged below" * 50).SerializeToString()
        call = channel.unary_unary("/grpc.health.v1.Health/Check")
        error = await rpc_error(call(damage(compressed(message)), timeout=20))
        assert error.code() == grpc.StatusCode.INVALID_ARGUMENT
        assert "this message is" in (error.details() or "")


def test_no_message_of_a_method_begins_like_a_compressed_one() -> None:
    for file in (prelunet_pb2.DESCRIPTOR, inference_pb2.DESCRIPTOR):
        for method in (method for service in file.services_by_name.values() for method in service.methods):
            assert 15 not in method.input_type.fields_by_number, method.full_name


def test_an_unavailable_port_is_explained() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        assert explain_bind_error("127.0.0.1", port).startswith(f"port {port} is in use. Choose another --port")
    assert (
        explain_bind_error("203.0.113.7", 50051)
        == "203.0.113.7 is not an address of this machine. Choose another --host"
    )
    for host in ("no such host", "127.0.0..1"):
        assert explain_bind_error(host, 50051).startswith(f"{host} is not an address")
