"""Every call has an id, the client's or a new one: it is returned, in every log line, and known to the queue."""

# ruff: noqa: N802  # gRPC's names of methods
import asyncio
import json
import logging
import math
import re
import time
from collections.abc import AsyncIterator, Iterator

import grpc
import pytest

from prelunet.evaluator.errors import ImageError, Overloaded
from prelunet.evaluator.pb.prelunet.v1 import prelunet_pb2 as pb
from prelunet.evaluator.pb.prelunet.v1 import prelunet_pb2_grpc as pb_grpc
from prelunet.evaluator.serving.calls import CallsInFlight
from prelunet.evaluator.serving.observability.call_context import (
    REQUEST_ID,
    Call,
    current_call,
    request_id_from,
    this_call,
)
from prelunet.evaluator.serving.observability.logs import JsonFormatter
from prelunet.evaluator.serving.scheduling.request import Request
from prelunet.evaluator.serving.scheduling.waiting import Waiting
from tests.helpers.fakes import FakeSession
from tests.serving.serving_harness import eventually, png, running_server, running_servicer

log = logging.getLogger("prelunet.test_request_ids")


class Toy(pb_grpc.PreluNetServiceServicer):
    """Records the calls; raises the planted errors, one per call."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.planted: list[Exception] = []

    async def Classify(self, request: pb.ClassifyRequest, context) -> pb.ClassifyResponse:
        self.calls.append(this_call())
        if self.planted:
            raise self.planted.pop(0)
        await asyncio.create_task(self._log_in_a_task())
        await asyncio.to_thread(log.info, "in a thread")
        return pb.ClassifyResponse()

    async def _log_in_a_task(self) -> None:
        log.info("in a task")

    async def ClassifyStream(self, request_iterator, context) -> AsyncIterator[pb.ClassifyStreamResponse]:
        self.calls.append(this_call())
        if self.planted:
            raise self.planted.pop(0)
        async for request in request_iterator:
            yield pb.ClassifyStreamResponse(id=request.id)

    async def Evaluate(self, request_iterator, context) -> None:
        await context.write(pb.EvaluateResponse())


@pytest.fixture(scope="module")
def toy() -> Toy:
    return Toy()


@pytest.fixture(scope="module")
def calls() -> CallsInFlight:
    return CallsInFlight()


@pytest.fixture(scope="module")
def address(toy: Toy, calls: CallsInFlight) -> Iterator[str]:
    with running_servicer(toy, calls) as address:
        yield address


@pytest.fixture(scope="module")
def stub(address: str) -> Iterator[pb_grpc.PreluNetServiceStub]:
    with grpc.insecure_channel(address) as channel:
        yield pb_grpc.PreluNetServiceStub(channel)


def request_id_in(metadata) -> str:
    (value,) = [value for key, value in metadata or () if key == REQUEST_ID]
    return value


GOOD = ["a", "0", "x" * 128, "AZaz09._:-", "4bf92f3577b34da6a3ce929d0e0e4736"]
BAD = ["", " ", "x" * 129, "a b", "a/b", "a=b", 'a"b', "a,b", "a%0ab", "a{b}"]


@pytest.mark.parametrize("given", GOOD, ids=lambda given: given[:20])
def test_the_callers_request_id_is_returned_and_reaches_the_queue(stub, toy, given: str) -> None:
    _, call = stub.Classify.with_call(pb.ClassifyRequest(), metadata=((REQUEST_ID, given),))
    assert request_id_in(call.trailing_metadata()) == given
    assert toy.calls[-1].request_id == given


@pytest.mark.parametrize("given", BAD, ids=lambda given: ascii(given)[:20])
def test_an_unsafe_request_id_is_replaced(stub, toy, given: str) -> None:
    _, call = stub.Classify.with_call(pb.ClassifyRequest(), metadata=((REQUEST_ID, given),))
    assert re.fullmatch("[0-9a-f]{16}", request_id_in(call.trailing_metadata()))
    assert toy.calls[-1].request_id == request_id_in(call.trailing_metadata())


@pytest.mark.parametrize("given", ["a\nb", "a\x85b", "ü", "a\u2028b", b"bytes"], ids=ascii)
def test_a_request_id_that_no_client_library_would_send_is_replaced_too(given: str | bytes) -> None:
    assert re.fullmatch("[0-9a-f]{16}", request_id_from([("other", "x"), (REQUEST_ID, given)]))


def test_calls_without_a_request_id_get_a_new_one_each_and_of_two_the_first_counts(stub) -> None:
    created = {request_id_in(stub.Classify.with_call(pb.ClassifyRequest())[1].trailing_metadata()) for _ in range(20)}
    assert len(created) == 20
    _, call = stub.Classify.with_call(pb.ClassifyRequest(), metadata=((REQUEST_ID, "one"), (REQUEST_ID, "two")))
    assert request_id_in(call.trailing_metadata()) == "one"


def test_an_error_has_the_request_id_in_its_trailing_metadata(stub, toy) -> None:
    toy.planted = [ImageError("planted")]
    with pytest.raises(grpc.RpcError) as caught:
        stub.Classify(pb.ClassifyRequest(), metadata=((REQUEST_ID, "mine"),))
    assert request_id_in(caught.value.trailing_metadata()) == "mine"


def test_a_stream_has_the_request_id_after_its_last_answer_or_its_error(stub, toy) -> None:
    sent = [pb.ClassifyStreamRequest(id="a"), pb.ClassifyStreamRequest(id="b")]
    stream = stub.ClassifyStream(iter(sent), metadata=((REQUEST_ID, "mine"),))
    assert [answer.id for answer in stream] == ["a", "b"]
    assert request_id_in(stream.trailing_metadata()) == "mine"
    evaluation = stub.Evaluate(iter([]), metadata=((REQUEST_ID, "self-writing"),))
    list(evaluation)
    assert request_id_in(evaluation.trailing_metadata()) == "self-writing"
    toy.planted = [ImageError("planted")]
    stream = stub.ClassifyStream(iter([]), metadata=((REQUEST_ID, "failing"),))
    with pytest.raises(grpc.RpcError):
        next(stream)
    assert request_id_in(stream.trailing_metadata()) == "failing"


def test_grpc_itself_can_retry_a_refused_call(address: str, toy: Toy) -> None:
    """gRPC does not retry a call once it has received initial metadata, so an error should not send it."""
    policy = {
        "maxAttempts": 3,
        "initialBackoff": "0.01s",
        "maxBackoff": "0.02s",
        "backoffMultiplier": 1,
        "retryableStatusCodes": ["RESOURCE_EXHAUSTED"],
    }
    config = json.dumps(
        {"methodConfig": [{"name": [{"service": "prelunet.v1.PreluNetService"}], "retryPolicy": policy}]}
    )
    toy.planted = [Overloaded("planted"), Overloaded("planted")]
    before = len(toy.calls)
    with grpc.insecure_channel(address, options=[("grpc.service_config", config)]) as channel:
        pb_grpc.PreluNetServiceStub(channel).Classify(pb.ClassifyRequest(), timeout=30)
    assert len(toy.calls) == before + 3


def test_the_caller_is_the_connection_with_its_deadline_and_id(address: str, toy: Toy) -> None:
    with grpc.insecure_channel(address) as first, grpc.insecure_channel(address, options=[("x", 1)]) as second:
        for channel in (first, first, second):
            pb_grpc.PreluNetServiceStub(channel).Classify(pb.ClassifyRequest(), timeout=100)
        pb_grpc.PreluNetServiceStub(second).Classify(pb.ClassifyRequest())
    calls = toy.calls[-4:]
    assert calls[0].peer == calls[1].peer != calls[2].peer == calls[3].peer
    assert all(call.peer.startswith("ipv4:127.0.0.1:") for call in calls)
    for call in calls[:3]:
        assert call.deadline < math.inf
        assert call.deadline - time.monotonic() == pytest.approx(100, abs=5)  # gRPC sends it rounded
    assert calls[3].deadline == math.inf
    assert len({call.request_id for call in calls}) == 4


def test_every_image_reaches_the_queue_with_its_client_deadline_and_request_id(monkeypatch: pytest.MonkeyPatch) -> None:
    queued: list[Request] = []
    image = png(40, 57)
    request = pb.ClassifyRequest(image=image, protocol="center")
    labelled = pb.LabelledImage(file="a", data=image, label=1)
    add = Waiting.add

    def recorded(waiting: Waiting, added: Request) -> None:
        queued.append(added)
        add(waiting, added)

    monkeypatch.setattr(Waiting, "add", recorded)
    with running_server(fake=FakeSession()) as server, grpc.insecure_channel(server.address) as channel:
        stub = pb_grpc.PreluNetServiceStub(channel)
        with_id = {"timeout": 60, "metadata": ((REQUEST_ID, "mine"),)}
        stub.Classify(request, **with_id)
        streamed = [pb.ClassifyStreamRequest(id=id_, request=request) for id_ in ("a", "b")]
        assert all(answer.HasField("response") for answer in stub.ClassifyStream(iter(streamed), **with_id))
        start = pb.EvaluateStart(dataset="photos", protocol="center")
        *_, last = stub.Evaluate(iter([pb.EvaluateRequest(start=start), pb.EvaluateRequest(image=labelled)]), **with_id)
        assert last.report.evaluated == 1
    assert len(queued) == 4
    assert {each.call.request_id for each in queued} == {"mine"}
    assert len({each.call.peer for each in queued}) == 1
    assert queued[0].call.peer.startswith("ipv4:127.0.0.1:")
    assert all(0 < each.deadline - time.monotonic() < 61 for each in queued)
    assert queued[1].deadline == queued[2].deadline, "the deadline of a stream is that of each image"


def test_every_log_line_of_a_call_has_its_request_id_and_method(stub, calls) -> None:
    lines: list[dict] = []

    class Kept(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(json.loads(JsonFormatter().format(record)))

    kept, logger = Kept(), logging.getLogger("prelunet")
    logger.addHandler(kept)
    logger.setLevel(logging.INFO)
    try:
        for given in ("one", "two"):
            stub.Classify(pb.ClassifyRequest(), metadata=((REQUEST_ID, given),))
        eventually(lambda: calls.count == 0)
    finally:
        logger.removeHandler(kept)
        logger.setLevel(logging.NOTSET)
    lines = [line for line in lines if line["request_id"] in {"one", "two"}]  # others may appear late
    assert [(line["request_id"], line["message"]) for line in lines] == [
        (given, message) for given in ("one", "two") for message in ("in a task", "in a thread", "call ended")
    ]
    assert {line["method"] for line in lines} == {"prelunet.v1.PreluNetService/Classify"}


def test_outside_of_calls_there_is_no_current_call() -> None:
    this_call().record_views("nobody", 1)
    assert current_call.get() is None
