"""What every call goes through: its status, its place among the calls in flight, its metrics, its line in the log."""

# ruff: noqa: N802  # gRPC's names of methods
import asyncio
import logging
import threading
import time
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace

import grpc
import pytest
from google.rpc.error_details_pb2 import RetryInfo
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_status import rpc_status

from evaluator.errors import OUTCOMES, ImageError, Overloaded, PreluNetError
from evaluator.pb.prelunet.v1 import prelunet_pb2 as pb
from evaluator.pb.prelunet.v1 import prelunet_pb2_grpc as pb_grpc
from evaluator.serving.calls import Call, note
from evaluator.serving.interceptor import Calls, _status_of_one_gone, _Watched
from evaluator.serving.metrics import Metrics
from evaluator.serving.status import error_from
from serving_harness import eventually, running_servicer

SERVICE = "prelunet.v1.PreluNetService"
CLASSIFY, STREAM = f"{SERVICE}/Classify", f"{SERVICE}/ClassifyStream"


class Toy(pb_grpc.PreluNetServiceServicer):
    """Answers with the model's name, raises what a test planted under that name, and waits for the gate at "wait"."""

    def __init__(self) -> None:
        self.planted: dict[str, Exception] = {}
        self.gate = threading.Event()
        self.waiting = 0
        self.left: list[str] = []

    async def _answer(self, name: str) -> pb.ClassifyResponse:
        note("toy", 3)
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
        """Send as a method that writes by itself, without reading."""
        for number in range(3):
            await context.write(pb.EvaluateResponse(progress=pb.EvaluateProgress(images=number)))

    async def ListModels(self, request: pb.ListModelsRequest, context) -> pb.ListModelsResponse:
        await context.abort(grpc.StatusCode.PERMISSION_DENIED, "the servicer's own")

    async def GetModel(self, request: pb.GetModelRequest, context) -> pb.GetModelResponse:
        context.set_code(grpc.StatusCode.DATA_LOSS)
        return pb.GetModelResponse()


@dataclass
class Served:
    """A toy behind our interceptor."""

    toy: Toy
    calls: Calls
    metrics: Metrics
    channel: grpc.Channel
    stub: pb_grpc.PreluNetServiceStub = field(init=False)

    def __post_init__(self) -> None:
        self.stub = pb_grpc.PreluNetServiceStub(self.channel)

    def value(self, name: str, **labels: str) -> float:
        return self.metrics.registry.get_sample_value(name, labels) or 0

    def ended(self, status: str, method: str = CLASSIFY) -> float:
        """Return how many calls have ended so."""
        return self.value("prelunet_calls_total", method=method, status=status)


@contextmanager
def served(most: int = 100) -> Iterator[Served]:
    toy, metrics = Toy(), Metrics()
    calls = Calls(most, metrics)
    with running_servicer(toy, calls) as address, grpc.insecure_channel(address) as channel:
        try:
            yield Served(toy, calls, metrics, channel)
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


@pytest.mark.parametrize("kind", [*OUTCOMES, PreluNetError, RuntimeError], ids=lambda kind: kind.__name__)
def test_an_error_becomes_its_status_whether_the_method_answers_once_or_often(kind: type[Exception]) -> None:
    with served() as server:
        server.toy.planted["bad"] = kind("planted")
        statuses = [
            failure(server.stub.Classify, request("bad")),
            failure(server.stub.ClassifyStream, iter([pb.ClassifyStreamRequest(request=request("bad"))])),
        ]
        expected = OUTCOMES[kind].grpc_status if kind in OUTCOMES else "INTERNAL"
        assert [status.code().name for status in statuses] == [expected] * 2
        if kind in OUTCOMES:
            assert [type(error_from(status, "")) for status in statuses] == [kind] * 2
        assert server.stub.Classify(request("next")).model.name == "next"
        for method in (CLASSIFY, STREAM):
            eventually(lambda method=method: server.ended(expected, method) == 1)


def test_a_status_that_a_method_sets_by_itself_stands() -> None:
    with served() as server:
        status = failure(server.stub.ListModels, pb.ListModelsRequest())
        assert (status.code().name, status.details()) == ("PERMISSION_DENIED", "the servicer's own")
        assert failure(server.stub.GetModel, pb.GetModelRequest()).code().name == "DATA_LOSS"
        eventually(lambda: server.ended("PERMISSION_DENIED", f"{SERVICE}/ListModels") == 1)
        eventually(lambda: server.ended("DATA_LOSS", f"{SERVICE}/GetModel") == 1)


def test_a_method_may_give_its_answers_or_send_them_itself() -> None:
    with served() as server:
        streamed = [pb.ClassifyStreamRequest(id=name, request=request(name)) for name in ("a", "b")]
        assert [each.response.model.name for each in server.stub.ClassifyStream(iter(streamed))] == ["a", "b"]
        assert [each.progress.images for each in server.stub.Evaluate(iter([]))] == [0, 1, 2]


@pytest.mark.parametrize("leaves", [True, False], ids=["left", "out of time"])
@pytest.mark.parametrize("streamed", [True, False])
def test_a_caller_who_goes_away_leaves_a_status_and_no_error_in_the_log(caplog, leaves: bool, streamed: bool) -> None:
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
        eventually(lambda: server.ended(expected, STREAM if streamed else CLASSIFY) == 1)
        assert server.toy.left == (["wait", "generator"] if streamed else ["wait"])
        assert server.calls.count == 0
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == []


@pytest.mark.parametrize("gone", [asyncio.CancelledError(), grpc.aio.InternalError("the write failed")], ids=repr)
def test_a_generator_is_closed_before_the_call_of_a_reader_who_has_left_ends(gone: BaseException) -> None:
    closed = []

    async def answers(_request: bytes, _context: object) -> AsyncIterator[bytes]:
        try:
            yield b"an answer"
        finally:
            await asyncio.sleep(0)
            closed.append(True)

    class Unread:
        """A context of a caller who has left."""

        def peer(self) -> str:
            return "nobody"

        def time_remaining(self) -> None:
            return None

        async def send_initial_metadata(self, _metadata: object) -> None:
            pass

        async def write(self, _answer: bytes) -> None:
            raise gone

    async def scenario() -> Call:
        call = Call(STREAM, "id")
        with pytest.raises(asyncio.CancelledError):  # which gRPC takes without a word
            await _Watched(grpc.unary_stream_rpc_method_handler(answers), call).handler().unary_stream(b"", Unread())
        assert closed == [True]
        return call

    assert asyncio.run(scenario()).status == "CANCELLED"


@pytest.mark.parametrize(
    ("elapsed", "remaining", "status"),
    [
        (1, None, "CANCELLED"),
        (1, 5.0, "CANCELLED"),
        (1, 0.0, "DEADLINE_EXCEEDED"),
        (1, 0.04, "DEADLINE_EXCEEDED"),  # the caller's clock rings a moment before ours
        (10, 0.1, "DEADLINE_EXCEEDED"),  # 10 s arrive as 10.1 s
        (10, 0.3, "CANCELLED"),
    ],
)
def test_whether_a_caller_gave_up_or_ran_out_of_time_is_told_from_the_time_that_is_left(
    elapsed: float, remaining: float | None, status: str
) -> None:
    call = Call(CLASSIFY, "id", begun=time.monotonic() - elapsed)
    assert _status_of_one_gone(call, SimpleNamespace(time_remaining=lambda: remaining)) == status


def test_calls_beyond_the_limit_are_refused_at_once_and_exactly_those() -> None:
    with served(most=4) as server, ThreadPoolExecutor(7) as pool:
        calls = [pool.submit(server.stub.Classify, request("wait"), timeout=30) for _ in range(7)]
        eventually(lambda: sum(call.done() for call in calls) == 3)  # nobody else is done before the gate opens
        refused = [call.exception() for call in calls if call.done()]
        server.toy.gate.set()
        assert sum(call.exception() is None for call in calls) == 4
        for status in refused:
            error = error_from(status, "")
            assert (type(error), error.retry_after) == (Overloaded, 1.0)
            assert "4 calls are in flight already" in str(error)
            assert any(detail.Is(RetryInfo.DESCRIPTOR) for detail in rpc_status.from_call(status).details)
        eventually(lambda: server.calls.count == 0)
        assert server.stub.Classify(request("next")).model.name == "next", "the places are free again"
        assert server.ended("RESOURCE_EXHAUSTED") == 3
        assert server.value("prelunet_refusals_total", model="", reason="calls") == 3


def test_a_call_too_many_is_refused_before_its_message_is_read() -> None:
    with served(most=1) as server:
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


def test_a_call_is_in_flight_from_before_its_message_has_come_until_its_caller_has_left() -> None:
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


def test_a_message_above_the_limit_and_one_that_is_none_end_their_call_and_no_other() -> None:
    with served() as server:
        too_large = failure(server.stub.Classify, pb.ClassifyRequest(image=bytes(5 * 2**20)))  # gRPC's own limit: 4 MiB
        assert too_large.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        rubbish = failure(server.channel.unary_unary(f"/{CLASSIFY}"), b"\xff\xff\xff\x01")
        assert rubbish.code() == grpc.StatusCode.INVALID_ARGUMENT
        eventually(lambda: server.calls.count == 0)
        assert server.stub.Classify(request("next")).model.name == "next"


@pytest.mark.parametrize("method", ["Check", "Watch"])
def test_rubbish_for_health_is_the_callers_fault_and_leaves_nothing_in_the_log(caplog, method: str) -> None:
    with served() as server:
        path = f"/grpc.health.v1.Health/{method}"
        call = server.channel.unary_unary(path) if method == "Check" else server.channel.unary_stream(path)
        assert failure(call, b"\xff\xff\xff\x01").code() == grpc.StatusCode.INVALID_ARGUMENT
    assert caplog.records == []


def test_methods_that_there_are_not_share_one_label() -> None:
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


def test_a_path_that_is_no_text_is_refused_and_the_next_call_works() -> None:
    with served() as server:
        for path in (b"/\xff\xfe/Nothing", b"/prelunet.v1.PreluNetService/\x80"):
            failure(server.channel.unary_unary(path), b"")
            assert server.stub.Classify(request("next")).model.name == "next"


def test_metrics_count_calls_by_method_and_status_and_their_seconds_and_leave_health_out() -> None:
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


def test_every_call_has_one_line_in_the_log_that_says_how_it_ended(caplog) -> None:
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
