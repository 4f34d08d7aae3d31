"""Graceful shutdown: every call gets an answer."""

import asyncio
import io
import os
import signal
import struct
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from prelunet.evaluator.errors import DeviceLost, NotReady
from prelunet.evaluator.imaging.limits import DecodeLimits
from prelunet.evaluator.pb.inference import inference_pb2 as inference_pb
from prelunet.evaluator.pb.inference import inference_pb2_grpc as inference_grpc
from prelunet.evaluator.pb.prelunet.v1 import prelunet_pb2 as pb
from prelunet.evaluator.pb.prelunet.v1 import prelunet_pb2_grpc as pb_grpc
from prelunet.evaluator.rpc.status import error_from
from prelunet.evaluator.serving import lifecycle, models, watched_files
from prelunet.evaluator.serving import server as server_module
from prelunet.evaluator.serving.api.health import LIVENESS
from prelunet.evaluator.serving.calls import CallsInFlight
from prelunet.evaluator.serving.http import reports
from prelunet.evaluator.serving.lifecycle import ServeResult, ShutdownEvents, serve, wait_and_shut_down
from prelunet.evaluator.serving.models import Models
from prelunet.evaluator.serving.observability.metrics import Metrics
from prelunet.evaluator.serving.options import AccessOptions, HttpOptions, ModelFile, ServeOptions, ServerLimits
from prelunet.evaluator.serving.scheduling import watchdog
from prelunet.evaluator.serving.server import SERVICES, Server
from tests.helpers.fakes import FakeSession
from tests.helpers.tls_files import write_tokens
from tests.serving.api.raw_http2 import (
    DATA,
    END_HEADERS,
    END_STREAM,
    HEADERS,
    INITIAL_WINDOW_SIZE,
    PREFACE,
    SETTINGS,
    call_headers,
    connection,
    frame,
)
from tests.serving.event_loop import async_test, new_channel, rpc_error, until
from tests.serving.serving_harness import GatedSession, png

SERVING, NOT_SERVING = (getattr(health_pb2.HealthCheckResponse, name) for name in ("SERVING", "NOT_SERVING"))
LONG = 60.0  # seconds, longer than any test: whatever ends sooner was not ended by this timeout
IMAGE = png(40, 57)


@dataclass
class DrainingServer:
    """A server waiting for shutdown. ended: its result."""

    address: str
    server: Server
    events: ShutdownEvents
    ended: "asyncio.Task[ServeResult]"

    def signal(self) -> None:
        self.events.post(signal.SIGTERM)


@asynccontextmanager
async def draining_server(
    session: Any,
    *,
    lame_duck: float = LONG,
    grace: float = LONG,
    limits: ServerLimits = ServerLimits(),
    metrics: Metrics | None = None,
    http: HttpOptions = HttpOptions(),
) -> AsyncIterator[DrainingServer]:
    """Serve a session as `model` until shutdown is requested."""
    events, server = ShutdownEvents(), Server("127.0.0.1", 0, CallsInFlight(limits, metrics), http=http)
    served = Models([(ModelFile("model", Path("model.onnx")), session)], DecodeLimits(), on_lost=events.post)
    await server.start(served)
    ended = asyncio.create_task(wait_and_shut_down(server, served, events, lame_duck=lame_duck, grace=grace))
    try:
        yield DrainingServer(server.address, server, events, ended)
        async with asyncio.timeout(30):
            await ended
    finally:
        if isinstance(session, GatedSession):
            session.gate.set()
        ended.cancel()


async def classify(channel: grpc.aio.Channel) -> pb.ClassifyResponse:
    stub = pb_grpc.PreluNetServiceStub(channel)
    return await stub.Classify(pb.ClassifyRequest(image=IMAGE, protocol="center"), timeout=30)


async def health_of(channel: grpc.aio.Channel, service: str = "", timeout: float | None = None) -> int:
    request = health_pb2.HealthCheckRequest(service=service)
    return (await health_pb2_grpc.HealthStub(channel).Check(request, timeout=timeout)).status


async def until_closed(channel: grpc.aio.Channel) -> None:
    """Check the health until the port is closed.

    Health is answered to the end, so a check may be on its way when the port closes: gRPC's core cancels it, or, about
    once in a hundred times, never gives it to the server, so that it would wait until the last call has ended.
    """
    code = grpc.StatusCode.CANCELLED
    while code in {grpc.StatusCode.CANCELLED, grpc.StatusCode.DEADLINE_EXCEEDED}:
        try:
            while True:
                await health_of(channel, timeout=1)
        except grpc.aio.AioRpcError as error:
            code = error.code()
    assert code is grpc.StatusCode.UNAVAILABLE


@async_test
async def test_after_a_signal_health_is_not_serving_at_once_and_new_calls_and_connections_still_work() -> None:
    async with draining_server(FakeSession()) as stop, new_channel(stop.address) as channel:
        inference = inference_grpc.GRPCInferenceServiceStub(channel)
        assert {await health_of(channel, name) for name in ("", *SERVICES, "model", LIVENESS)} == {SERVING}
        assert (await inference.ServerReady(inference_pb.ServerReadyRequest())).ready
        stop.signal()
        await until(lambda: not stop.server.serving)
        assert {await health_of(channel, name) for name in ("", *SERVICES, "model")} == {NOT_SERVING}
        assert await health_of(channel, LIVENESS) == SERVING, "a supervisor should not kill a server that drains"
        assert not (await inference.ServerReady(inference_pb.ServerReadyRequest())).ready
        assert (await classify(channel)).predictions
        async with new_channel(stop.address) as fresh:
            assert (await classify(fresh)).predictions
        stop.signal()
        assert await stop.ended == ServeResult()


@async_test
async def test_a_second_signal_closes_the_port_and_calls_in_flight_get_their_answers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(server_module, "CONNECTION_LINGER", 0.5)
    session = GatedSession()
    async with draining_server(session) as stop, new_channel(stop.address) as channel:
        stop.signal()
        await until(lambda: not stop.server.serving)
        calls = [asyncio.create_task(classify(channel)) for _ in range(5)]
        await until(lambda: stop.server.calls == 5)
        stop.signal()
        async with new_channel(stop.address) as fresh:
            await until_closed(fresh)
        await asyncio.sleep(0.8)  # longer than the linger of clients without a call
        assert not any(call.done() for call in calls)
        session.gate.set()
        assert all(answer.predictions for answer in await asyncio.gather(*calls))
        assert await stop.ended == ServeResult()


@pytest.mark.parametrize("first", [number for number in lifecycle.SHUTDOWN_SIGNALS if number != signal.SIGINT])
@async_test
async def test_each_signal_shuts_down_and_two_at_once_count_as_one(
    first: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    events = ShutdownEvents()
    events.install_signal_handlers()
    os.kill(os.getpid(), first)
    os.kill(os.getpid(), signal.SIGINT)
    assert await events.next(LONG) in {first, signal.SIGINT}  # the system may deliver two that wait in either order
    assert await events.next(0.1) is None
    monkeypatch.setattr(lifecycle, "SIGNAL_DEBOUNCE", 0.0)
    os.kill(os.getpid(), signal.SIGINT)
    assert await events.next(LONG) == signal.SIGINT


@async_test
async def test_the_lame_duck_period_ends_by_itself() -> None:
    async with draining_server(FakeSession(), lame_duck=0.05) as stop:
        stop.signal()
        assert await stop.ended == ServeResult()


@async_test
async def test_calls_that_exceed_the_grace_period_are_cut_off_and_counted() -> None:
    session = GatedSession()
    async with draining_server(session, lame_duck=0, grace=0.2) as stop, new_channel(stop.address) as channel:
        calls = [asyncio.create_task(classify(channel)) for _ in range(3)]
        await until(lambda: stop.server.calls == 3)
        stop.signal()
        failures = [await rpc_error(call) for call in calls]
        assert {error.code() for error in failures} <= {grpc.StatusCode.CANCELLED, grpc.StatusCode.UNAVAILABLE}
        session.gate.set()  # otherwise its thread would not end
        assert await stop.ended == ServeResult(unfinished=3)


@async_test
async def test_a_third_signal_cuts_off_calls_in_flight() -> None:
    session = GatedSession()
    async with draining_server(session) as stop, new_channel(stop.address) as channel:
        call = asyncio.create_task(classify(channel))
        await until(lambda: stop.server.calls == 1)
        for _ in range(3):
            stop.signal()
        await rpc_error(call)
        session.gate.set()
        assert await stop.ended == ServeResult(unfinished=1)


STOPPING = "this server is stopping; try another, or again later"


async def call_until(channel: grpc.aio.Channel, ends: Callable[[grpc.aio.AioRpcError], bool]) -> list[Any]:
    """Make short calls without a pause until one ends so; return the errors of all failed calls."""
    failures = []
    stub = pb_grpc.PreluNetServiceStub(channel)
    while True:
        try:
            await stub.ListModels(pb.ListModelsRequest(), timeout=30)
        except grpc.aio.AioRpcError as error:
            failures.append(error)
            if ends(error):
                return failures


def reason_of(error: grpc.aio.AioRpcError) -> type[Exception]:
    return type(error_from(error, ""))


@pytest.mark.parametrize("stubborn", [False, True], ids=["refused once", "however often they are refused"])
@async_test
async def test_no_call_of_clients_that_call_without_a_pause_is_cancelled(stubborn: bool) -> None:
    async with draining_server(FakeSession(), lame_duck=0.05) as stop, AsyncExitStack() as stack:

        def ends(error: grpc.aio.AioRpcError) -> bool:
            return not stubborn or error.details() != STOPPING

        channels = [await stack.enter_async_context(new_channel(stop.address)) for _ in range(8)]
        callers = [asyncio.create_task(call_until(channel, ends)) for channel in channels]
        stop.signal()
        for failures in await asyncio.gather(*callers):
            *refusals, last = failures
            assert {error.code() for error in failures} == {grpc.StatusCode.UNAVAILABLE}
            assert {reason_of(error) for error in refusals} <= {NotReady}
            if stubborn:
                assert refusals, "calls are refused for a moment before the port closes"
            else:
                assert (reason_of(last), last.details()) == (NotReady, STOPPING)
        assert await stop.ended == ServeResult()


@async_test
async def test_no_call_of_http_clients_that_call_without_a_pause_is_lost() -> None:
    # A lame duck in which even on a busy machine every client gets an answer, the one that closes its connection.
    async with draining_server(FakeSession(), lame_duck=1, http=HttpOptions(port=0)) as stop:

        def call_until_refused() -> int:
            with httpx.Client(base_url=stop.server.http_url, timeout=30, trust_env=False) as client:
                answers = 0
                with suppress(httpx.ConnectError):
                    while client.post("/v1/classify?protocol=center", content=IMAGE).raise_for_status():
                        answers += 1
                return answers

        callers = [asyncio.create_task(asyncio.to_thread(call_until_refused)) for _ in range(4)]
        await asyncio.sleep(0.1)
        stop.signal()
        assert min(await asyncio.gather(*callers)) > 0
        assert await stop.ended == ServeResult()


@async_test
async def test_while_new_calls_are_refused_calls_in_flight_continue_and_probes_and_health_are_answered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(server_module, "CONNECTION_LINGER", 0.5)
    monkeypatch.setattr(server_module, "REFUSAL_PERIOD", 1.0)  # enough for the few calls that should be made in it
    session, metrics = GatedSession(), Metrics()
    async with (
        draining_server(session, lame_duck=0, metrics=metrics) as stop,
        new_channel(stop.address) as channel,
        new_channel(stop.address) as other,
    ):
        call, stream = asyncio.create_task(classify(channel)), pb_grpc.PreluNetServiceStub(channel).ClassifyStream()
        request = pb.ClassifyRequest(image=IMAGE, protocol="center")
        await stream.write(pb.ClassifyStreamRequest(id="before", request=request))
        await until(lambda: stop.server.calls == 2)
        stop.signal()
        [error] = await call_until(other, lambda _: True)
        assert (reason_of(error), error.details()) == (NotReady, STOPPING)
        assert not stop.ended.done()
        assert await health_of(other) == NOT_SERVING
        inference = inference_grpc.GRPCInferenceServiceStub(other)
        assert (await inference.ServerLive(inference_pb.ServerLiveRequest())).live
        assert not (await inference.ServerReady(inference_pb.ServerReadyRequest())).ready
        await stream.write(pb.ClassifyStreamRequest(id="while", request=request))
        await stream.done_writing()
        session.gate.set()
        assert (await call).predictions
        assert {(await stream.read()).id for _ in range(2)} == {"before", "while"}
        refusals = {"model": "", "reason": "stopping"}
        assert metrics.registry.get_sample_value("prelunet_refusals_total", refusals) == 1
        assert await stop.ended == ServeResult()


@async_test
async def test_a_signal_ends_the_refusal_period_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "REFUSAL_PERIOD", LONG)
    session = GatedSession()
    async with draining_server(session, lame_duck=0) as stop, new_channel(stop.address) as channel:
        call = asyncio.create_task(classify(channel))
        await until(lambda: stop.server.calls == 1)
        stop.signal()
        await until(lambda: not stop.server.serving)
        stop.signal()
        await rpc_error(call)
        session.gate.set()
        assert await stop.ended == ServeResult(unfinished=1)


@async_test
async def test_a_call_whose_message_is_still_arriving_is_awaited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "CONNECTION_LINGER", 0.5)
    message = pb.ClassifyRequest(image=IMAGE, protocol="center").SerializeToString()
    body = b"\0" + struct.pack(">I", len(message)) + message
    async with draining_server(FakeSession(), lame_duck=0) as stop, connection(stop.address) as client:
        begin = frame(HEADERS, call_headers("/prelunet.v1.PreluNetService/Classify"), flags=END_HEADERS, stream=1)
        client.send(begin, frame(DATA, body[:7], stream=1))
        await until(lambda: stop.server.calls == 1)
        stop.signal()
        await until(lambda: not stop.server.serving)
        client.send(frame(DATA, body[7:], flags=END_STREAM, stream=1))
        await client.until(DATA)
        assert await stop.ended == ServeResult()


@async_test
async def test_all_health_watchers_are_notified_even_after_one_has_left() -> None:
    async with draining_server(FakeSession()) as stop, new_channel(stop.address) as channel:
        watch = health_pb2_grpc.HealthStub(channel).Watch
        first, second, named = (watch(health_pb2.HealthCheckRequest(service=name)) for name in ("", "", SERVICES[0]))
        assert [(await call.read()).status for call in (first, second, named)] == [SERVING] * 3
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first.read()
        stop.signal()
        assert [(await call.read()).status for call in (second, named)] == [NOT_SERVING] * 2
        stop.signal()
        assert [await call.read() for call in (second, named)] == [grpc.aio.EOF] * 2  # they do not delay the shutdown
        assert await stop.ended == ServeResult()


@async_test
async def test_the_health_of_an_unknown_service_is_not_found() -> None:
    async with draining_server(FakeSession(), lame_duck=0) as stop, new_channel(stop.address) as channel:
        assert (await rpc_error(health_of(channel, "nobody"))).code() == grpc.StatusCode.NOT_FOUND
        watched = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service="nobody"))
        assert (await watched.read()).status == health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
        stop.signal()
        assert await watched.read() == grpc.aio.EOF


@async_test
async def test_a_health_watcher_that_does_not_read_delays_no_other() -> None:
    no_room = PREFACE + frame(SETTINGS, struct.pack(">HI", INITIAL_WINDOW_SIZE, 0))
    async with (
        draining_server(FakeSession(), grace=0.5) as stop,
        connection(stop.address, no_room) as deaf,
        new_channel(stop.address) as channel,
    ):
        message = frame(DATA, b"\0\0\0\0\0", flags=END_STREAM, stream=1)
        begin = frame(HEADERS, call_headers("/grpc.health.v1.Health/Watch"), flags=END_HEADERS, stream=1)
        deaf.send(begin, message)
        await deaf.until(HEADERS)  # the answer has started, but its message does not fit the window
        other = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        assert (await other.read()).status == SERVING
        stop.signal()
        assert (await other.read()).status == NOT_SERVING
        stop.signal()
        assert await stop.ended == ServeResult()


@async_test
async def test_an_open_reflection_stream_does_not_delay_the_shutdown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "CONNECTION_LINGER", 0.5)
    async with draining_server(FakeSession(), lame_duck=0) as stop, new_channel(stop.address) as channel:
        stream = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo()
        for _ in range(2):
            await stream.write(reflection_pb2.ServerReflectionRequest(list_services=""))
            listed = (await stream.read()).list_services_response.service
            assert set(SERVICES) < {service.name for service in listed}
        stop.signal()
        assert await asyncio.wait_for(stop.ended, 20) == ServeResult()  # not at the end of the grace period


class Lost(FakeSession):
    """A fake whose device is lost at the first run."""

    def compute(self, staged: Any) -> Any:
        raise DeviceLost("CUDAExecutionProvider gives nothing but errors from now on (/secret/place)")


@async_test
async def test_a_lost_device_ends_the_server_without_a_lame_duck_period_and_calls_get_unavailable() -> None:
    async with draining_server(Lost()) as stop, new_channel(stop.address) as channel:
        error = await rpc_error(classify(channel))
        assert error.code() == grpc.StatusCode.UNAVAILABLE
        assert "secret" not in (error.details() or "")
        ended = await stop.ended
        assert isinstance(ended.lost, DeviceLost)
        assert (ended.unfinished, ended.stuck) == (0, False)


@async_test
async def test_a_device_lost_in_the_lame_duck_period_ends_it() -> None:
    async with draining_server(FakeSession()) as stop:
        stop.signal()
        await until(lambda: not stop.server.serving)
        stop.events.post(DeviceLost("gone"))
        assert isinstance((await stop.ended).lost, DeviceLost)


@async_test
async def test_a_device_lost_in_the_grace_period_fails_the_calls_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "CONNECTION_LINGER", 0.5)

    class LostLate(GatedSession):
        def compute(self, staged: Any) -> Any:
            super().compute(staged)
            raise DeviceLost("gone")

    session = LostLate()
    async with draining_server(session, lame_duck=0) as stop, new_channel(stop.address) as channel:
        calls = [asyncio.create_task(classify(channel)) for _ in range(5)]
        await until(lambda: stop.server.calls == 5)
        stop.signal()
        async with new_channel(stop.address) as fresh:
            await until_closed(fresh)
        session.gate.set()
        assert {reason_of(await rpc_error(call)) for call in calls} == {DeviceLost}
        ended = await stop.ended
        assert isinstance(ended.lost, DeviceLost)
        assert (ended.unfinished, ended.stuck) == (0, False)


@async_test
async def test_a_hanging_device_does_not_prevent_the_shutdown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lifecycle, "CLOSE_TIMEOUT", 0.2)
    session = GatedSession()
    async with draining_server(session, lame_duck=0, grace=0.1) as stop, new_channel(stop.address) as channel:
        call = asyncio.create_task(classify(channel))
        assert await asyncio.to_thread(session.entered.wait, 30)
        stop.signal()
        await rpc_error(call)
        assert await stop.ended == ServeResult(unfinished=1, stuck=True)


@async_test
async def test_a_hanging_device_ends_the_server_without_a_signal_and_fails_its_calls(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(server_module, "CONNECTION_LINGER", 0.5)
    monkeypatch.setattr(lifecycle, "CLOSE_TIMEOUT", 0.2)
    monkeypatch.setattr(watchdog, "FIRST_BATCH_TIMEOUT", 0.05)
    monkeypatch.setattr(watchdog, "CHECK_INTERVAL", 0.01)
    async with draining_server(GatedSession()) as stop, new_channel(stop.address) as channel:
        calls = [asyncio.create_task(classify(channel)) for _ in range(3)]
        assert {reason_of(await rpc_error(call)) for call in calls} == {DeviceLost}
        await until(lambda: not stop.server.serving)
        ended = await stop.ended
        assert isinstance(ended.lost, DeviceLost)
        assert (ended.unfinished, ended.stuck) == (0, True)


@async_test
async def test_while_models_load_health_is_not_serving_and_calls_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loading, ports = GatedSession(), []

    def slowly(*_: Any, **__: Any) -> FakeSession:
        loading.entered.set()
        assert loading.gate.wait(30)
        return FakeSession()

    def listening(*arguments: Any, **options: Any) -> Server:
        ports.append(Server(*arguments, **options))
        return ports[-1]

    monkeypatch.setattr(models, "open_with_placement", slowly)
    monkeypatch.setattr("prelunet.evaluator.serving.lifecycle.Server", listening)
    announced = asyncio.Event()
    options = ServeOptions((ModelFile("model", Path("model.onnx")),), port=0, lame_duck=0)
    serving = asyncio.create_task(serve(options, lambda _: announced.set()))
    assert await asyncio.to_thread(loading.entered.wait, 30)
    async with new_channel(ports[0].address) as channel:
        assert {await health_of(channel, name) for name in ("", *SERVICES)} == {NOT_SERVING}
        assert await health_of(channel, LIVENESS) == SERVING, "nor one that loads"
        error = await rpc_error(classify(channel))
        assert error.code() == grpc.StatusCode.UNAVAILABLE
        assert "loading its models" in (error.details() or "")
        stub = pb_grpc.PreluNetServiceStub(channel)
        assert reason_of(await rpc_error(stub.Evaluate(iter([])).read())) is NotReady
        probes = inference_grpc.GRPCInferenceServiceStub(channel)
        assert (await probes.ServerLive(inference_pb.ServerLiveRequest())).live, "a loading server should not be killed"
        assert not (await probes.ServerReady(inference_pb.ServerReadyRequest())).ready
        assert not (await probes.ModelReady(inference_pb.ModelReadyRequest(name="model"))).ready
        loading.gate.set()
        await asyncio.wait_for(announced.wait(), 30)
        assert {await health_of(channel, name) for name in ("", *SERVICES)} == {SERVING}
        assert (await classify(channel)).predictions
        assert (await probes.ModelReady(inference_pb.ModelReadyRequest(name="model"))).ready
    os.kill(os.getpid(), signal.SIGTERM)
    assert await serving == ServeResult()


@async_test
async def test_a_signal_while_models_load_ends_the_server_before_it_serves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    opened: list[str] = []
    seen: list[ShutdownEvents] = []

    def listening() -> ShutdownEvents:
        seen.append(ShutdownEvents())
        return seen[0]

    def and_then_a_signal(path: Path, *_: Any, **__: Any) -> FakeSession:
        opened.append(path.name)
        os.kill(os.getpid(), signal.SIGINT)
        while not seen[0].begun:
            time.sleep(0.005)
        return FakeSession()

    def report(line: str) -> None:
        raise AssertionError(f"unexpected line: {line}")

    monkeypatch.setattr("prelunet.evaluator.serving.lifecycle.ShutdownEvents", listening)
    monkeypatch.setattr(models, "open_with_placement", and_then_a_signal)
    files = (ModelFile("a", Path("a.onnx")), ModelFile("b", Path("b.onnx")))
    assert await serve(ServeOptions(files, port=0), report) == ServeResult()
    assert opened == ["a.onnx"], "the second model should not be loaded"


@async_test
async def test_a_file_system_that_hangs_is_logged_and_never_prevents_the_exit(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The server abandons a thread that reads tokens, later one that loads a model, instead of waiting for it."""
    hangs, answers = threading.Event(), threading.Event()
    write_tokens(tmp_path / "tokens.toml", ("alice", ("classify",)))

    def hanging(*_: Any) -> Any:
        hangs.set()
        assert answers.wait(60)
        return b""

    monkeypatch.setattr(lifecycle, "CLOSE_TIMEOUT", 0.2)
    monkeypatch.setattr(watched_files, "INTERVAL", 0.01)
    monkeypatch.setattr(watched_files, "READ_TIMEOUT", 0.02)
    monkeypatch.setattr(models, "open_with_placement", lambda *_: FakeSession())
    options = ServeOptions(
        (ModelFile("model", Path("model.onnx")),), port=0, lame_duck=0,
        access=AccessOptions(token_file=tmp_path / "tokens.toml"),
    )  # fmt: skip
    started = asyncio.Event()
    serving = asyncio.create_task(serve(options, lambda _: started.set()))
    await started.wait()
    monkeypatch.setattr(watched_files, "read_small_file", hanging)
    await until(lambda: "the tokens are not read: their file system has not answered" in caplog.text)
    os.kill(os.getpid(), signal.SIGTERM)
    assert await serving == ServeResult(stuck=True)
    monkeypatch.undo()
    monkeypatch.setattr(lifecycle, "CLOSE_TIMEOUT", 0.2)
    monkeypatch.setattr(models, "open_with_placement", hanging)
    hangs.clear()
    serving = asyncio.create_task(serve(replace(options, access=AccessOptions()), lambda _: None))
    await until(hangs.is_set)
    os.kill(os.getpid(), signal.SIGTERM)
    assert await serving == ServeResult(stuck=True)
    answers.set()
    await until(lambda: not watched_files.unfinished_threads())


@async_test
async def test_reports_that_hang_in_their_transfer_never_prevent_the_exit(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    answers = threading.Event()

    class HangingFile(io.RawIOBase):
        def readable(self) -> bool:
            return True

        def readinto(self, _buffer: Any) -> int:
            assert answers.wait(60)
            return 0

    monkeypatch.setattr(lifecycle, "CLOSE_TIMEOUT", 0.2)
    monkeypatch.setattr(models, "open_with_placement", lambda *_: FakeSession())
    monkeypatch.setattr(reports, "open_report", lambda *_: io.BufferedReader(HangingFile()))
    lines: list[str] = []
    options = ServeOptions(
        (ModelFile("model", Path("model.onnx")),), port=0, lame_duck=0, grace=0.5,
        http=HttpOptions(0, reports=tmp_path),
    )  # fmt: skip
    serving = asyncio.create_task(serve(options, lines.append))
    await until(lambda: lines)
    url = lines[0].partition("http on ")[2].split()[0]
    before = set(threading.enumerate())
    async with httpx.AsyncClient(base_url=url, timeout=30, trust_env=False) as client:
        views = [asyncio.create_task(client.get("/reports/report.html")) for _ in range(8)]
        await until(lambda: len(set(threading.enumerate()) - before) == 8)
        os.kill(os.getpid(), signal.SIGTERM)
        assert (await serving).stuck
        assert all(thread.daemon for thread in set(threading.enumerate()) - before)
        answers.set()
        await asyncio.gather(*views, return_exceptions=True)
    await until(lambda: not watched_files.unfinished_threads())
