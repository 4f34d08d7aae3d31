"""What every call passes: status, limit of calls in flight, metrics and log line."""

# ruff: noqa: N802  # gRPC's names of methods
import asyncio
import json
import logging
import threading
import time
import weakref
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from google.rpc.error_details_pb2 import RetryInfo
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_status import rpc_status

from prelunet.evaluator.errors import ERROR_STATUSES, DeadlinePassed, ImageError, Overloaded, PreluNetError, UsageError
from prelunet.evaluator.pb.prelunet.v1 import prelunet_pb2 as pb
from prelunet.evaluator.pb.prelunet.v1 import prelunet_pb2_grpc as pb_grpc
from prelunet.evaluator.rpc.status import error_from
from prelunet.evaluator.serving.api.front import Front, Method, disconnect_status
from prelunet.evaluator.serving.calls import CallsInFlight
from prelunet.evaluator.serving.observability.call_context import Call, this_call
from prelunet.evaluator.serving.observability.logs import CallLog
from prelunet.evaluator.serving.observability.metrics import Metrics
from prelunet.evaluator.serving.options import ServerLimits
from tests.helpers.fakes import FakeSession
from tests.serving.api.inference_calls import infer_request
from tests.serving.api.raw_http2 import DATA, END_HEADERS, HEADERS, call_headers, connection, frame
from tests.serving.event_loop import async_test, settled, until
from tests.serving.serving_harness import GatedSession, RunningServer, eventually, png, running_server, running_servicer

SERVICE = "prelunet.v1.PreluNetService"
CLASSIFY, STREAM = f"{SERVICE}/Classify", f"{SERVICE}/ClassifyStream"


class Toy(pb_grpc.PreluNetServiceServicer):
    """Answers with the model's name, raises the error planted under that name, and for "wait" waits for the gate."""

    def __init__(self) -> None:
        self.planted: dict[str, Exception] = {}
        self.gate = threading.Event()
        self.waiting = 0
        self.left: list[str] = []

    async def _answer(self, name: str) -> pb.ClassifyResponse:
        this_call().record_views("toy", 3)
        if name in self.planted:
            raise self.planted[name]
        if name == "wait":
            self.waiting += 1
            try:
                while not self.gate.is_set():
                    await asyncio.sleep(0.01)
            except asyncio.CancelledError:
                self.left.append(name)
                raise
        return pb.ClassifyResponse(model=pb.ModelIdentity(name=name))

    async def Classify(self, request: pb.ClassifyRequest, context) -> pb.ClassifyResponse:
        return await self._answer(request.model)

    async def ClassifyStream(self, request_iterator, context) -> AsyncIterator[pb.ClassifyStreamResponse]:
        try:
            async for request in request_iterator:
                yield pb.ClassifyStreamResponse(id=request.id, response=await self._answer(request.request.model))
        finally:
            self.left.append("generator")

    async def Evaluate(self, request_iterator, context) -> None:
        """Write answers directly, without reading requests."""
        for number in range(3):
            await context.write(pb.EvaluateResponse(progress=pb.EvaluateProgress(images=number)))

    async def ListModels(self, request: pb.ListModelsRequest, context) -> pb.ListModelsResponse:
        await context.abort(grpc.StatusCode.PERMISSION_DENIED, "the servicer's own")

    async def GetModel(self, request: pb.GetModelRequest, context) -> pb.GetModelResponse:
        context.set_code(grpc.StatusCode.DATA_LOSS)
        return pb.GetModelResponse()


@dataclass
class Served:
    """A toy behind our front."""

    toy: Toy
    calls: CallsInFlight
    metrics: Metrics
    channel: grpc.Channel
    address: str
    stub: pb_grpc.PreluNetServiceStub = field(init=False)

    def __post_init__(self) -> None:
        self.stub = pb_grpc.PreluNetServiceStub(self.channel)

    def value(self, name: str, **labels: str) -> float:
        return self.metrics.registry.get_sample_value(name, labels) or 0

    def ended(self, status: str, method: str = CLASSIFY) -> float:
        """Return the number of calls that have ended with this status."""
        return self.value("prelunet_calls_total", method=method, status=status)


@contextmanager
def served(limit: int = 100, message_timeout: float = ServerLimits.message_timeout) -> Iterator[Served]:
    toy, metrics = Toy(), Metrics()
    calls = CallsInFlight(ServerLimits(max_calls=limit, message_timeout=message_timeout), metrics)
    with running_servicer(toy, calls) as address, grpc.insecure_channel(address) as channel:
        try:
            yield Served(toy, calls, metrics, channel, address)
        finally:
            toy.gate.set()
            eventually(lambda: calls.count == 0)
            assert metrics.registry.get_sample_value("prelunet_calls_now") == 0


def request(name: str) -> pb.ClassifyRequest:
    return pb.ClassifyRequest(model=name)


def failure(call, *arguments, **options) -> grpc.RpcError:
    with pytest.raises(grpc.RpcError) as caught:
        list(call(*arguments, timeout=30, **options))
    return caught.value


@pytest.mark.parametrize("kind", [*ERROR_STATUSES, PreluNetError, RuntimeError], ids=lambda kind: kind.__name__)
def test_an_error_becomes_its_status_in_unary_and_streaming_methods(kind: type[Exception]) -> None:
    with served() as server:
        server.toy.planted["bad"] = kind("planted")
        statuses = [
            failure(server.stub.Classify, request("bad")),
            failure(server.stub.ClassifyStream, iter([pb.ClassifyStreamRequest(request=request("bad"))])),
        ]
        expected = ERROR_STATUSES[kind].grpc_status if kind in ERROR_STATUSES else "INTERNAL"
        assert [status.code().name for status in statuses] == [expected] * 2
        if kind in ERROR_STATUSES:
            assert [type(error_from(status, "")) for status in statuses] == [kind] * 2
        assert server.stub.Classify(request("next")).model.name == "next"
        for method in (CLASSIFY, STREAM):
            eventually(lambda method=method: server.ended(expected, method) == 1)


def test_a_status_set_by_a_method_is_kept() -> None:
    with served() as server:
        status = failure(server.stub.ListModels, pb.ListModelsRequest())
        assert (status.code().name, status.details()) == ("PERMISSION_DENIED", "the servicer's own")
        assert failure(server.stub.GetModel, pb.GetModelRequest()).code().name == "DATA_LOSS"
        eventually(lambda: server.ended("PERMISSION_DENIED", f"{SERVICE}/ListModels") == 1)
        eventually(lambda: server.ended("DATA_LOSS", f"{SERVICE}/GetModel") == 1)


def test_a_streaming_method_may_yield_its_answers_or_write_them() -> None:
    with served() as server:
        streamed = [pb.ClassifyStreamRequest(id=name, request=request(name)) for name in ("a", "b")]
        assert [each.response.model.name for each in server.stub.ClassifyStream(iter(streamed))] == ["a", "b"]
        assert [each.progress.images for each in server.stub.Evaluate(iter([]))] == [0, 1, 2]


@pytest.mark.parametrize("leaves", [True, False], ids=["left", "out of time"])
@pytest.mark.parametrize("streamed", [True, False])
def test_a_caller_that_leaves_or_times_out_is_counted_and_logs_no_error(caplog, leaves: bool, streamed: bool) -> None:
    caplog.set_level(logging.INFO)
    with served() as server:
        timeout = 60 if leaves else 1
        if streamed:
            call = server.stub.ClassifyStream(
                iter([pb.ClassifyStreamRequest(request=request("wait"))]), timeout=timeout
            )
        else:
            call = server.stub.Classify.future(request("wait"), timeout=timeout)
        eventually(lambda: server.toy.waiting == 1)
        if leaves:
            call.cancel()
        expected = "CANCELLED" if leaves else "DEADLINE_EXCEEDED"
        eventually(lambda: server.calls.count == 0)
        assert server.ended(expected, STREAM if streamed else CLASSIFY) == 1
        assert server.toy.left == (["wait", "generator"] if streamed else ["wait"])
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == []


@pytest.mark.parametrize("gone", [asyncio.CancelledError(), grpc.aio.InternalError("the write failed")], ids=repr)
def test_the_generator_of_answers_is_closed_before_an_abandoned_call_ends(gone: BaseException) -> None:
    closed = []

    async def answers(_request: bytes, _context: object) -> AsyncIterator[bytes]:
        try:
            yield b"an answer"
        finally:
            await asyncio.sleep(0)
            closed.append(True)

    class Unread(FakeContext):
        """The context of a client that has left."""

        async def write(self, _answer: bytes) -> None:
            raise gone

    async def scenario() -> None:
        with pytest.raises(asyncio.CancelledError):  # which gRPC accepts silently
            await method.stream_stream(None, Unread(b"a question"))
        assert closed == [True]

    method, ended = wrapped(grpc.unary_stream_rpc_method_handler(answers), STREAM)
    asyncio.run(scenario())
    assert [call.status for call in ended] == ["CANCELLED"]


@pytest.mark.parametrize(
    ("elapsed", "remaining", "status"),
    [
        (1, None, "CANCELLED"),
        (1, 5.0, "CANCELLED"),
        (1, 0.0, "DEADLINE_EXCEEDED"),
        (1, 0.04, "DEADLINE_EXCEEDED"),  # the client's deadline passes a moment before ours
        (10, 0.1, "DEADLINE_EXCEEDED"),  # gRPC sends 10 s as 10.1 s
        (10, 0.3, "CANCELLED"),
    ],
)
def test_the_remaining_time_distinguishes_a_cancelled_call_from_an_expired_one(
    elapsed: float, remaining: float | None, status: str
) -> None:
    call = Call(CLASSIFY, "id", begun=time.monotonic() - elapsed)
    assert disconnect_status(call, SimpleNamespace(time_remaining=lambda: remaining)) == status


def test_exactly_the_calls_above_the_limit_are_refused() -> None:
    with served(limit=4) as server, ThreadPoolExecutor(7) as pool:
        calls = [pool.submit(server.stub.Classify, request("wait"), timeout=30) for _ in range(7)]
        eventually(lambda: sum(call.done() for call in calls) == 3)  # no other call ends before the gate opens
        refused = [call.exception() for call in calls if call.done()]
        server.toy.gate.set()
        assert sum(call.exception() is None for call in calls) == 4
        for status in refused:
            error = error_from(status, "")
            assert (type(error), error.retry_after) == (Overloaded, 1.0)
            assert "already has 4 calls in flight" in str(error)
            assert any(detail.Is(RetryInfo.DESCRIPTOR) for detail in rpc_status.from_call(status).details)
        eventually(lambda: server.calls.count == 0)
        assert server.stub.Classify(request("next")).model.name == "next", "the calls should no longer be in flight"
        assert server.ended("RESOURCE_EXHAUSTED") == 3
        assert server.value("prelunet_refusals_total", model="", reason="calls") == 3


def test_grpcs_own_retries_wait_as_long_as_a_full_server_asks() -> None:
    policy = {"maxAttempts": 5, "initialBackoff": "60s", "maxBackoff": "60s", "backoffMultiplier": 1}
    policy["retryableStatusCodes"] = ["RESOURCE_EXHAUSTED"]
    config = json.dumps({"methodConfig": [{"name": [{}], "retryPolicy": policy}]})
    with (
        served(limit=1) as server,
        grpc.insecure_channel(server.address, [("grpc.service_config", config)]) as channel,
        ThreadPoolExecutor(1) as pool,
    ):
        held = pool.submit(server.stub.Classify, request("wait"), timeout=30)
        eventually(lambda: server.toy.waiting == 1)
        later = pb_grpc.PreluNetServiceStub(channel).Classify.future(request("later"), timeout=30)
        eventually(lambda: server.ended("RESOURCE_EXHAUSTED") == 1)
        begun = time.monotonic()
        server.toy.gate.set()
        assert later.result().model.name == "later"
        assert 0.5 < time.monotonic() - begun < 20, "neither at once nor after the client's 60 s, but after about 1 s"
        held.result()


def test_a_call_above_the_limit_is_refused_before_its_message_is_read() -> None:
    with served(limit=1) as server:
        first = server.stub.Classify.future(request("wait"))
        eventually(lambda: server.toy.waiting == 1)
        never_sent = threading.Event()

        def nothing() -> Iterator[bytes]:
            never_sent.wait(30)
            yield from ()

        call = server.channel.stream_unary(f"/{CLASSIFY}")
        assert failure(call, nothing()).code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        never_sent.set()
        large = pb.ClassifyRequest(image=bytes(30 * 2**20))
        assert failure(server.stub.Classify, large).code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert isinstance(error_from(failure(server.stub.ClassifyStream, iter([])), ""), Overloaded)
        health = health_pb2_grpc.HealthStub(server.channel)
        assert health.Check(health_pb2.HealthCheckRequest()).status == health_pb2.HealthCheckResponse.SERVING
        server.toy.gate.set()
        assert first.result(30).model.name == "wait"


def test_a_call_is_in_flight_before_its_message_arrives_and_until_its_caller_leaves() -> None:
    with served() as server:
        sent = threading.Event()

        def later() -> Iterator[bytes]:
            sent.wait(30)
            yield request("late").SerializeToString()

        call = server.channel.stream_unary(f"/{CLASSIFY}").future(later())
        eventually(lambda: server.calls.count == 1)
        assert server.value("prelunet_calls_now") == 1
        call.cancel()
        eventually(lambda: server.calls.count == 0)
        sent.set()
        assert server.ended("CANCELLED") == 1


def test_a_message_that_is_too_large_or_malformed_ends_only_its_own_call() -> None:
    with served() as server:
        too_large = failure(server.stub.Classify, pb.ClassifyRequest(image=bytes(5 * 2**20)))  # gRPC's own limit: 4 MiB
        assert too_large.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        rubbish = failure(server.channel.unary_unary(f"/{CLASSIFY}"), b"\xff\xff\xff\x01")
        assert rubbish.code() == grpc.StatusCode.INVALID_ARGUMENT
        eventually(lambda: server.calls.count == 0)
        assert server.stub.Classify(request("next")).model.name == "next"


@pytest.mark.parametrize(("scales", "decoded"), [(8000, True), (40_000, False)])
def test_a_message_with_too_many_parts_is_refused_before_it_is_decoded(scales: int, decoded: bool) -> None:
    data = pb.ClassifyRequest(scales=[100] * scales).SerializeToString()
    sizes: list[int] = []

    def decode(data: bytes) -> pb.ClassifyRequest:
        sizes.append(len(data))
        return pb.ClassifyRequest.FromString(data)

    async def classify(_request: pb.ClassifyRequest, _context: object) -> bytes:
        return b"answered"

    context = FakeContext(data)
    method, ended = wrapped(grpc.unary_unary_rpc_method_handler(classify, decode))
    asyncio.run(method.stream_unary(None, context))
    assert (len(data) in sizes) == decoded
    assert [(call.status, call.bytes) for call in ended] == [("OK" if decoded else "INVALID_ARGUMENT", len(data))]
    assert bool(context.refusals) is not decoded


@async_test
async def test_a_caller_that_leaves_before_its_message_counts_as_cancelled() -> None:
    """Reading ends first; gRPC cancels the call in a later iteration of the event loop."""

    async def classify(_request: bytes, _context: object) -> bytes:
        return b"answered"

    context = FakeContext(grpc.aio.EOF)
    method, ended = wrapped(grpc.unary_unary_rpc_method_handler(classify))
    running = asyncio.create_task(method.stream_unary(None, context))
    for _ in range(20):
        await asyncio.sleep(0)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert ([call.status for call in ended], context.refusals) == (["CANCELLED"], [])


def test_only_the_method_holds_a_message() -> None:
    """It may have 64 MB, and wait for seconds."""
    kept = []

    class Message:
        """A message that allows weak references."""

        def __init__(self, _data: bytes) -> None:
            pass

    async def classify(request: Message, _context: object) -> bytes:
        message = weakref.ref(request)
        del request
        await asyncio.sleep(0)
        kept.append(message() is not None)
        return b"answered"

    method, _ = wrapped(grpc.unary_unary_rpc_method_handler(classify, Message))
    asyncio.run(method.stream_unary(None, FakeContext(b"a message")))
    assert kept == [False]


class EndedCalls(CallLog):
    """Keeps calls that end instead of logging them."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = []

    def ended(self, call: Call, seconds: float) -> None:
        assert seconds >= 0
        self.calls.append(call)


def wrapped(handler: Any, method: str = CLASSIFY, **limits: float) -> tuple[Any, list[Call]]:
    """Return gRPC's handler for a method of ours, and the list of its calls, which grows as they end."""
    log = EndedCalls()
    front = Front(CallsInFlight(ServerLimits(**limits), log=log))
    return Method(front, f"/{method}", handler).handler(), log.calls


class FakeContext:
    """The context of a client that sends one message or none. refusals: texts with which the call was aborted."""

    def __init__(self, data: object) -> None:
        self._data = data
        self.refusals: list[str] = []

    def peer(self) -> str:
        return "nobody"

    def invocation_metadata(self) -> None:
        return None

    def set_trailing_metadata(self, _metadata: object) -> None:
        pass

    def time_remaining(self) -> None:
        return None

    def code(self) -> None:
        return None

    async def read(self) -> object:
        return self._data

    async def send_initial_metadata(self, _metadata: object) -> None:
        pass

    async def abort(self, _code: object, details: str, _trailing: object) -> None:
        self.refusals.append(details)


@pytest.mark.parametrize("method", ["Check", "Watch"])
def test_a_malformed_health_request_is_an_invalid_argument_and_logs_nothing(caplog, method: str) -> None:
    with served() as server:
        path = f"/grpc.health.v1.Health/{method}"
        call = server.channel.unary_unary(path) if method == "Check" else server.channel.unary_stream(path)
        assert failure(call, b"\xff\xff\xff\x01").code() == grpc.StatusCode.INVALID_ARGUMENT
    assert caplog.records == []


def test_unknown_methods_share_one_label() -> None:
    with served() as server:
        paths = [f"/{SERVICE}/Nothing{number}" for number in range(20)]
        paths += [f"/nobody.v{number}/Nothing" for number in range(20)]
        paths += [
            "/",
            "/x",
            "//",
            "/\0",
            "/prelunet/v1.PreluNetService.Classify",
            "/prelunet.v1/PreluNetService/Classify",
        ]
        paths += [f"//{CLASSIFY}", f"/{CLASSIFY}/", f"/{CLASSIFY.lower()}", "/" + 5000 * "x", "/größer/als"]
        for path in paths:
            assert failure(server.channel.unary_unary(path), b"").code() == grpc.StatusCode.UNIMPLEMENTED
        eventually(lambda: server.ended("UNIMPLEMENTED", "unknown") == len(paths))
        methods = {
            sample.labels["method"]
            for metric in server.metrics.registry.collect()
            for sample in metric.samples
            if "method" in sample.labels
        }
        assert methods == {"unknown"}


def test_a_path_that_is_not_text_is_refused_and_the_next_call_works() -> None:
    with served() as server:
        for path in (b"/\xff\xfe/Nothing", b"/prelunet.v1.PreluNetService/\x80"):
            failure(server.channel.unary_unary(path), b"")
            assert server.stub.Classify(request("next")).model.name == "next"


def test_metrics_count_calls_by_method_and_status_without_health() -> None:
    with served() as server:
        server.toy.planted["bad"] = ImageError("planted")
        for name in ("a", "b", "bad"):
            if name == "bad":
                failure(server.stub.Classify, request(name))
            else:
                server.stub.Classify(request(name))
        list(server.stub.ClassifyStream(iter([])))
        health_pb2_grpc.HealthStub(server.channel).Check(health_pb2.HealthCheckRequest())
        eventually(lambda: server.calls.count == 0)
        assert (server.ended("OK"), server.ended("INVALID_ARGUMENT"), server.ended("OK", STREAM)) == (2, 1, 1)
        assert server.value("prelunet_call_seconds_count", method=CLASSIFY) == 3
        assert 0 < server.value("prelunet_call_seconds_sum", method=CLASSIFY) < 30
        counted = sum(
            sample.value
            for metric in server.metrics.registry.collect()
            for sample in metric.samples
            if sample.name == "prelunet_calls_total"
        )
        assert counted == 4


def test_every_call_has_one_log_line_with_its_status(caplog) -> None:
    caplog.set_level(logging.INFO)
    sent = [pb.ClassifyStreamRequest(id=name, request=request(name)) for name in ("a", "b")]
    with served() as server:
        server.toy.planted["bad"] = ImageError("planted\ntext")
        server.stub.Classify(request("a"))
        failure(server.stub.Classify, request("bad"))
        list(server.stub.ClassifyStream(iter(sent)))
        eventually(lambda: server.calls.count == 0)
    lines = [record.fields for record in caplog.records if record.getMessage() == "call ended"]
    assert len(lines) == 3
    for line in lines:
        assert line.pop("peer").startswith("ipv4:127.0.0.1:")
        assert 0 < line.pop("seconds") < 30
    size = len(request("a").SerializeToString())
    assert lines == [
        {"status": "OK", "model": "toy", "views": 3, "bytes": size},
        {
            "status": "INVALID_ARGUMENT",
            "model": "toy",
            "views": 3,
            "bytes": size + 2,
            "reason": "IMAGE_ERROR",
            "error": "planted\ntext",
        },
        {"status": "OK", "model": "toy", "views": 6, "bytes": sum(len(each.SerializeToString()) for each in sent)},
    ]


@contextmanager
def held() -> Iterator[Callable[[], Iterator[bytes]]]:
    """Yield the requests of a client that sends nothing and keeps its stream open until the block ends."""
    done = threading.Event()

    def nothing() -> Iterator[bytes]:
        done.wait(60)
        yield from ()

    try:
        yield nothing
    finally:
        done.set()


def test_a_call_whose_message_never_arrives_ends() -> None:
    with served(limit=1, message_timeout=0.2) as server, held() as nothing:
        silent = server.channel.stream_unary(f"/{CLASSIFY}").future(nothing(), timeout=60)
        assert silent.code() == grpc.StatusCode.DEADLINE_EXCEEDED
        assert "did not arrive within 0.2 s" in silent.details()
        assert isinstance(error_from(silent, ""), DeadlinePassed)
        eventually(lambda: server.calls.count == 0)
        assert server.ended("DEADLINE_EXCEEDED") == 1
        assert server.stub.Classify(request("next"), timeout=30).model.name == "next"


STREAMS = (STREAM, f"{SERVICE}/Evaluate", "inference.GRPCInferenceService/ModelStreamInfer")


@contextmanager
def served_stream(method: str, session: FakeSession, first: Iterable[bytes] = (), **limits: float) -> Iterator[Any]:
    """Yield a stream that uses the only call of a server, the server and a stub; no message follows `first`."""
    with (
        running_server(server_limits=ServerLimits(max_calls=1, **limits), six=session) as server,
        grpc.insecure_channel(server.address) as channel,
        held() as nothing,
    ):
        stream = channel.stream_stream(f"/{method}")(chain(first, nothing()), timeout=60)
        eventually(lambda: server.metric("prelunet_calls_now") == 1)
        yield stream, server, pb_grpc.PreluNetServiceStub(channel)


def ends_for_want_of_a_message(stream: Any, server: RunningServer, stub: pb_grpc.PreluNetServiceStub) -> str:
    """Return the error text of a stream that times out; assert that the next call is accepted."""
    with pytest.raises(grpc.RpcError) as caught:
        list(stream)
    error = error_from(caught.value, "")
    assert isinstance(error, DeadlinePassed)
    eventually(lambda: server.metric("prelunet_calls_now") == 0)
    assert stub.ListModels(pb.ListModelsRequest(), timeout=30).models
    return str(error)


@pytest.mark.parametrize("method", STREAMS)
def test_a_stream_whose_first_message_never_arrives_ends(method: str) -> None:
    with served_stream(method, FakeSession(), message_timeout=1.0) as (stream, server, stub):
        assert failure(stub.ListModels, pb.ListModelsRequest()).code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        text = ends_for_want_of_a_message(stream, server, stub)
        assert "first message of this stream did not arrive within 1 s" in text


def messages_of(method: str) -> list[bytes]:
    """Return the messages that start a stream with one image."""
    image = png(40, 57)
    classify = pb.ClassifyRequest(image=image, protocol="center")
    labelled = pb.LabelledImage(file="a", data=image, label=0)
    sent = {
        STREAMS[0]: [pb.ClassifyStreamRequest(id="a", request=classify)],
        STREAMS[1]: [
            pb.EvaluateRequest(start=pb.EvaluateStart(dataset="flowers", protocol="center")),
            pb.EvaluateRequest(image=labelled),
        ],
        STREAMS[2]: [infer_request([image])],
    }
    return [message.SerializeToString() for message in sent[method]]


@pytest.mark.parametrize("method", STREAMS)
def test_an_idle_stream_ends_but_not_while_an_answer_is_pending(method: str) -> None:
    session = GatedSession()
    with served_stream(method, session, messages_of(method), stream_idle_timeout=0.5) as (stream, server, stub):
        assert session.entered.wait(30)
        time.sleep(0.8)  # longer than the timeout
        refused = failure(stub.ListModels, pb.ListModelsRequest()).code()
        assert refused == grpc.StatusCode.RESOURCE_EXHAUSTED, "the stream should still be in flight"
        session.gate.set()
        if method != STREAMS[1]:  # an evaluation answers only at its end
            next(stream)
        assert "no message arrived within 0.5 s" in ends_for_want_of_a_message(stream, server, stub)


@pytest.mark.parametrize("last", ["idle", "reads no further"])
@async_test
async def test_the_message_timeout_runs_only_while_the_server_waits_and_no_message_is_in_progress(last: str) -> None:
    """The clock advances only when the test moves it."""
    loop, sent, reads = asyncio.get_running_loop(), asyncio.Queue[bytes](), asyncio.Event()
    clock = -10_000.0  # it must not reach the time limit of this test, set by the real clock
    loop.time = lambda: clock  # type: ignore[method-assign]
    calls, context = list[Call](), FakeContext(None)

    async def received() -> AsyncIterator[bytes]:
        while True:
            yield await sent.get()

    async def method(requests: AsyncIterator[bytes], _context: object) -> AsyncIterator[bytes]:
        calls.append(this_call())
        async for _ in requests:
            await reads.wait()
        yield b""

    async def passes(seconds: float) -> bool:
        """Advance the clock and return whether the stream is still open."""
        nonlocal clock
        clock += seconds
        for _ in range(50):
            await asyncio.sleep(0)
        return not context.refusals

    handler = grpc.stream_stream_rpc_method_handler(method)
    watched, _ = wrapped(handler, STREAM, message_timeout=10, stream_idle_timeout=100)
    running = asyncio.create_task(watched.stream_stream(received(), context))
    assert await passes(0)
    (call,) = calls
    assert await passes(9)
    sent.put_nowait(b"first")
    reads.set()
    assert await passes(0)
    assert await passes(1000), "a message is in progress"
    call.message_done()
    assert await passes(99)
    sent.put_nowait(b"second")
    assert await passes(0)
    call.message_done()
    assert await passes(99)
    if last == "reads no further":
        reads.clear()
        sent.put_nowait(b"third")
        assert await passes(0)
        call.message_done()
        assert await passes(1000)
        reads.set()
        assert await passes(0)
        assert await passes(99)
    assert not await passes(11.5), "a tenth later at most"
    assert "no message arrived within 100 s" in context.refusals[0]
    await running


def test_the_message_timeout_does_not_limit_the_time_to_answer() -> None:
    with served(message_timeout=0.2) as server:
        slow = server.stub.Classify.future(request("wait"), timeout=60)
        eventually(lambda: server.toy.waiting == 1)
        time.sleep(0.5)
        server.toy.gate.set()
        assert slow.result(30).model.name == "wait"


def test_a_call_that_sends_half_a_message_ends() -> None:
    half = bytes([0]) + (100).to_bytes(4, "big") + request("half").SerializeToString()

    async def scenario(address: str, count: Callable[[], float]) -> None:
        async with connection(address) as client:
            client.send(frame(HEADERS, call_headers(f"/{CLASSIFY}"), flags=END_HEADERS, stream=1))
            client.send(frame(DATA, half, stream=1))
            await until(lambda: count() == 1)

    with served(limit=1, message_timeout=0.2) as server:
        asyncio.run(scenario(server.address, lambda: server.ended("DEADLINE_EXCEEDED")))
        assert server.stub.Classify(request("next"), timeout=30).model.name == "next"


@pytest.mark.parametrize("method", [CLASSIFY, f"{SERVICE}/GetModel"])
def test_a_call_without_a_message_is_an_invalid_argument(method: str) -> None:
    with served(limit=1) as server:
        empty = server.channel.stream_unary(f"/{method}").future(iter(()), timeout=30)
        assert (empty.code(), "this call has no message" in empty.details()) == (grpc.StatusCode.INVALID_ARGUMENT, True)
        assert isinstance(error_from(empty, ""), UsageError)
        eventually(lambda: server.calls.count == 0)
        assert server.ended("INVALID_ARGUMENT", method) == 1


def test_only_the_first_message_of_a_unary_call_is_read() -> None:
    with served(limit=1) as server:
        sent = [request("first").SerializeToString(), b"\xff\xff", *[bytes(2**20)] * 20]
        call = server.channel.stream_unary(f"/{CLASSIFY}").future(iter(sent), timeout=30)
        assert pb.ClassifyResponse.FromString(call.result(30)).model.name == "first"
        eventually(lambda: server.calls.count == 0)
        assert server.ended("OK") == 1
        assert server.stub.Classify(request("next"), timeout=30).model.name == "next"


def test_silent_calls_of_one_connection_do_not_lock_out_others() -> None:
    limits = ServerLimits(max_calls=4, max_streams=2)
    with (
        running_server(server_limits=limits, fake=FakeSession()) as server,
        grpc.insecure_channel(server.address) as greedy,
        grpc.insecure_channel(server.address, options=[("grpc.use_local_subchannel_pool", 1)]) as other,
        held() as nothing,
    ):
        silent = [greedy.stream_unary(f"/{CLASSIFY}").future(nothing(), timeout=60) for _ in range(6)]
        eventually(lambda: server.metric("prelunet_calls_now") == 2)
        assert pb_grpc.PreluNetServiceStub(other).ListModels(pb.ListModelsRequest(), timeout=30).models
        eventually(lambda: server.metric("prelunet_calls_now") == 2)
        for call in silent:
            call.cancel()


def test_by_default_a_connection_has_at_most_half_of_the_calls_in_flight() -> None:
    assert 2 * ServerLimits.max_streams <= ServerLimits.max_calls


async def held_call(calls: CallsInFlight, peer: str, held: asyncio.Event) -> str:
    """Make a call that lasts until `held` is set; return "refused" or "answered"."""
    try:
        calls.begin(Call(CLASSIFY, "1", peer=peer))
    except Overloaded:
        return "refused"
    await held.wait()
    return "answered"


def test_an_address_that_takes_all_calls_leaves_a_quarter_more_for_others() -> None:
    calls = CallsInFlight(ServerLimits(max_calls=8))

    async def scenario() -> None:
        held = asyncio.Event()
        call = partial(held_call, calls)
        greedy = [asyncio.create_task(call(f"ipv4:10.0.0.1:{port}", held)) for port in range(12)]
        await settled()
        others = [asyncio.create_task(call(f"ipv4:10.0.0.{host}:1", held)) for host in (2, 3, 4)]
        await settled()
        held.set()
        assert [await task for task in greedy] == 8 * ["answered"] + 4 * ["refused"], "whatever its connections"
        assert [await task for task in others] == ["answered", "answered", "refused"]
        await settled()
        assert calls.count == 0
        held.clear()
        again = [asyncio.create_task(call("ipv4:10.0.0.9:1", held)) for _ in range(9)]
        await settled()
        held.set()
        assert [await task for task in again].count("answered") == 8, "nothing is kept of calls that ended"

    asyncio.run(scenario())


def test_connections_that_take_all_calls_leave_an_eighth_more_for_others_of_their_address() -> None:
    calls = CallsInFlight(ServerLimits(max_calls=80))

    async def scenario() -> None:
        held = asyncio.Event()

        def hold(count: int, peer: str) -> list[asyncio.Task[str]]:
            return [asyncio.create_task(held_call(calls, f"ipv4:10.0.0.{peer}", held)) for _ in range(count)]

        greedy = hold(80, "1:1")
        await settled()
        more = hold(1, "1:1")
        await settled()
        new = [task for port in range(2, 14) for task in hold(1, f"1:{port}")]
        await settled()
        others = hold(11, "2:1")
        await settled()
        held.set()
        answered = [[await task for task in tasks].count("answered") for tasks in (greedy, more, new, others)]
        assert answered == [80, 0, 10, 10]
        await settled()
        assert calls.count == 0

    asyncio.run(scenario())


def test_probes_do_not_count_as_calls_in_flight() -> None:
    calls = CallsInFlight(ServerLimits(max_calls=1))

    async def two_calls() -> None:
        calls.begin(Call("inference.GRPCInferenceService/ServerLive", "1"))
        assert calls.count == 0
        calls.begin(Call(CLASSIFY, "2"))
        assert calls.count == 1

    asyncio.run(two_calls())
    assert calls.count == 0
