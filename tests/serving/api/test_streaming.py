"""`ClassifyStream`: many images in one call. First `classify_stream` alone, then over the network."""

import asyncio
import gc
import queue
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from prelunet.evaluator.errors import ImageError, ModelNotFound, Overloaded
from prelunet.evaluator.pb.prelunet.v1 import prelunet_pb2 as pb
from prelunet.evaluator.pb.prelunet.v1 import prelunet_pb2_grpc as pb_grpc
from prelunet.evaluator.rpc.status import error_from, reason_for
from prelunet.evaluator.serving import concurrency
from prelunet.evaluator.serving.api.prelunet import MAX_ID_LENGTH, STREAM_SLOTS, classify_stream, slots_for
from prelunet.evaluator.serving.concurrency import uncancelled
from prelunet.evaluator.serving.observability.call_context import Call
from prelunet.evaluator.serving.options import QueueOptions
from tests.helpers.fakes import FakeSession, fake_contract
from tests.serving.event_loop import async_test, one_by_one, settled
from tests.serving.serving_harness import GatedSession, eventually, png, running_server


def numbered(*ids: str) -> list[pb.ClassifyStreamRequest]:
    return [pb.ClassifyStreamRequest(id=id_, request=pb.ClassifyRequest(model=id_)) for id_ in ids]


class Answerer:
    """Answers with the model's name once a test allows it; records started and cancelled requests.

    outside: models whose requests are never admitted.
    """

    def __init__(self, *, waits: bool = False, outside: str = "") -> None:
        self.begun: list[str] = []
        self.cancelled: list[str] = []
        self._waits = waits
        self._outside = outside
        self._allowed: dict[str, asyncio.Event] = {}

    def allow(self, name: str) -> None:
        self._allowed.setdefault(name, asyncio.Event()).set()

    async def classify(self, request: pb.ClassifyRequest, on_admitted: Callable[[], None]) -> bytes:
        self.begun.append(request.model)
        if request.model not in self._outside:
            on_admitted()
        try:
            if self._waits:
                await self._allowed.setdefault(request.model, asyncio.Event()).wait()
        except asyncio.CancelledError:
            self.cancelled.append(request.model)
            raise
        return pb.ClassifyResponse(model=pb.ModelIdentity(name=request.model)).SerializeToString()


class Reader:
    """Reads answers as a client would: all of them, or none until a test allows it."""

    def __init__(self, *, reads: bool = True) -> None:
        self.answers: list[pb.ClassifyStreamResponse] = []
        self.waiting = 0
        self.reads = asyncio.Event()
        if reads:
            self.reads.set()

    async def send(self, response: pb.ClassifyStreamResponse) -> None:
        assert self.waiting == 0, "gRPC accepts one message at a time"
        self.waiting += 1
        await self.reads.wait()
        self.waiting -= 1
        self.answers.append(response)

    def ids(self) -> list[str]:
        return [answer.id for answer in self.answers]


def test_answers_are_sent_when_ready_and_not_in_the_order_of_the_requests() -> None:
    async def scenario() -> list[str]:
        answerer, reader = Answerer(waits=True), Reader()
        stream = asyncio.create_task(
            classify_stream(answerer.classify, one_by_one(numbered("a", "b", "c")), reader.send, Call())
        )
        for name in ("c", "a", "b"):
            answerer.allow(name)
            await settled()
        await stream
        assert [answer.response.model.name for answer in reader.answers] == reader.ids()
        return reader.ids()

    assert asyncio.run(scenario()) == ["c", "a", "b"]


@pytest.mark.parametrize("stuck", ["classifying", "reading"])
@async_test
async def test_reading_stops_at_the_limit_of_unanswered_requests(stuck: str) -> None:
    pulled = 0

    def pulling() -> Iterator[pb.ClassifyStreamRequest]:
        nonlocal pulled
        for request in numbered(*(f"{n:03}" for n in range(3 * STREAM_SLOTS))):
            pulled += 1
            yield request

    answerer, reader = Answerer(waits=stuck == "classifying"), Reader(reads=stuck == "classifying")
    stream = asyncio.create_task(classify_stream(answerer.classify, one_by_one(pulling()), reader.send, Call()))
    await settled()
    assert (pulled, len(answerer.begun), reader.answers) == (STREAM_SLOTS, STREAM_SLOTS, [])
    if stuck == "classifying":
        answerer.allow("005")
        await settled()
        assert (pulled, reader.ids()) == (STREAM_SLOTS + 1, ["005"])
        for number in range(3 * STREAM_SLOTS):
            answerer.allow(f"{number:03}")
    reader.reads.set()
    await stream
    assert sorted(reader.ids()) == [f"{n:03}" for n in range(3 * STREAM_SLOTS)]


@pytest.mark.parametrize(
    ("fields", "slots"),
    [
        ({}, 1),
        ({"top_k": -5}, 1),
        ({"top_k": 1000}, 1),
        ({"top_k": 1001}, 2),
        ({"top_k": 2**31 - 1}, STREAM_SLOTS),
        ({"heatmap": True}, 8),
        ({"heatmap": True, "top_k": 21_841}, 22),
    ],
    ids=str,
)
def test_a_request_takes_slots_by_the_size_of_its_answer(fields: dict, slots: int) -> None:
    assert slots_for(pb.ClassifyRequest(**fields)) == slots


@async_test
async def test_at_most_four_unread_heat_maps_are_drawn_and_later_requests_wait() -> None:
    """Otherwise a stream would hold 32 of them in memory, which no limit of the queue counts."""
    maps = [f"{n}" for n in range(9)]
    requests = [
        *(pb.ClassifyStreamRequest(id=n, request=pb.ClassifyRequest(model=n, heatmap=True)) for n in maps),
        *numbered("small", "too"),
    ]

    answerer, reader = Answerer(), Reader(reads=False)
    stream = asyncio.create_task(classify_stream(answerer.classify, one_by_one(requests), reader.send, Call()))
    await settled()
    assert (answerer.begun, reader.answers) == (maps[:4], [])
    reader.reads.set()
    await stream
    assert (answerer.begun, reader.ids()) == ([*maps, "small", "too"],) * 2


@async_test
async def test_the_slots_of_a_heat_map_serve_as_many_small_answers_once_it_is_sent() -> None:
    small = [f"{n:02}" for n in range(2 * STREAM_SLOTS)]
    requests = [
        pb.ClassifyStreamRequest(id="map", request=pb.ClassifyRequest(model="map", heatmap=True)),
        *numbered(*small),
    ]

    answerer, reader = Answerer(waits=True), Reader()
    stream = asyncio.create_task(classify_stream(answerer.classify, one_by_one(requests), reader.send, Call()))
    await settled()
    assert answerer.begun == ["map", *small[: STREAM_SLOTS - 8]]
    answerer.allow("map")
    await settled()
    assert answerer.begun == ["map", *small[:STREAM_SLOTS]]
    for name in small:
        answerer.allow(name)
    await stream
    assert len(reader.answers) == len(requests)


@async_test
async def test_reading_stops_while_a_request_waits_for_admission() -> None:
    """Otherwise a stream would hold STREAM_SLOTS images outside the queue, which no limit of the queue counts."""

    answerer, reader = Answerer(waits=True, outside="c"), Reader()
    stream = asyncio.create_task(
        classify_stream(answerer.classify, one_by_one(numbered("a", "b", "c", "d")), reader.send, Call())
    )
    await settled()
    assert answerer.begun == ["a", "b", "c"]
    answerer.allow("a")
    await settled()
    assert (answerer.begun, reader.ids()) == (["a", "b", "c"], ["a"]), "admitted requests are answered meanwhile"
    answerer.allow("c")
    await settled()
    assert (answerer.begun[3:], reader.ids()) == (["d"], ["a", "c"])
    for name in "bd":
        answerer.allow(name)
    await stream


@async_test
async def test_a_request_is_not_held_while_its_answer_is_pending() -> None:
    class Asked:
        """A request that allows weak references."""

        top_k, heatmap = 0, False

    kept: list[weakref.ref[object]] = []

    allowed = asyncio.Event()

    def classify(request: object, on_admitted: Callable[[], None]) -> Awaitable[bytes]:
        kept.append(weakref.ref(request))

        async def answer() -> bytes:
            on_admitted()
            await allowed.wait()
            return b""

        return answer()

    async def incoming() -> AsyncIterator[Any]:
        yield SimpleNamespace(id="a", request=Asked())
        await allowed.wait()

    reader = Reader(reads=False)
    stream = asyncio.create_task(classify_stream(classify, incoming(), reader.send, Call()))
    await settled()
    gc.collect()
    assert [found() for found in kept] == [None], "while it is answered"
    allowed.set()
    await settled()
    assert reader.waiting == 1
    reader.reads.set()
    await stream
    assert reader.ids() == ["a"]


def test_a_failed_image_gets_its_own_error_and_the_stream_continues(caplog) -> None:
    failures = {"b": ImageError("no image"), "c": RuntimeError("/secret/broken"), "d": Overloaded("full", 2.5)}

    async def classify(request: pb.ClassifyRequest, _inside: Callable[[], None]) -> bytes:
        if request.model in failures:
            raise failures[request.model]
        return pb.ClassifyResponse(capped=True).SerializeToString()

    reader = Reader()
    asyncio.run(classify_stream(classify, one_by_one(numbered("a", "b", "c", "d", "e")), reader.send, Call()))
    answers = {answer.id: answer for answer in reader.answers}
    assert [answers[id_].response.capped for id_ in "ae"] == [True, True]
    assert answers["b"].error == pb.CallError(code=3, reason="IMAGE_ERROR", message="no image")
    assert answers["d"].error == pb.CallError(code=8, reason="OVERLOADED", message="full", retry_after_seconds=2.5)
    ours = answers["c"].error
    assert (ours.code, ours.reason, ours.HasField("retry_after_seconds")) == (13, "", False)
    assert "/secret" not in ours.message
    incident = ours.message.rpartition(" ")[2]
    assert f"incident {incident}" in caplog.text
    assert "RuntimeError: /secret/broken" in caplog.text


@pytest.mark.parametrize(
    ("ids", "text"),
    [
        (["", "z"], "1 to 128 characters, not 0"),
        (["x" * (MAX_ID_LENGTH + 1), "z"], "1 to 128 characters, not 129: 'xxx"),
        (["a", "a", "z"], "id 'a' is already in use by a request that has no answer yet"),
    ],
)
@async_test
async def test_a_request_with_an_invalid_id_gets_an_error_without_an_id(ids: list[str], text: str) -> None:
    answerer, reader = Answerer(waits=True), Reader()
    stream = asyncio.create_task(classify_stream(answerer.classify, one_by_one(numbered(*ids)), reader.send, Call()))
    await settled()
    (refused,) = reader.answers  # without the id: it could be confused with the answer to the other request
    assert (refused.id, refused.error.code, refused.error.reason) == ("", 3, "USAGE_ERROR")
    assert text in refused.error.message
    for id_ in {*ids}:
        answerer.allow(id_)
    await stream
    assert sorted(reader.ids()[1:]) == sorted({*ids} & {"a", "z"})
    assert all(answer.HasField("response") for answer in reader.answers[1:])


def test_an_id_of_the_maximum_length_is_accepted() -> None:
    reader = Reader()
    asyncio.run(classify_stream(Answerer().classify, one_by_one(numbered("ü" * MAX_ID_LENGTH)), reader.send, Call()))
    assert [(len(answer.id), answer.HasField("response")) for answer in reader.answers] == [(MAX_ID_LENGTH, True)]


@async_test
async def test_an_id_may_be_reused_as_soon_as_its_answer_has_arrived() -> None:
    requests: asyncio.Queue[pb.ClassifyStreamRequest | None] = asyncio.Queue()
    answers: list[pb.ClassifyStreamResponse] = []

    async def incoming() -> AsyncIterator[pb.ClassifyStreamRequest]:
        while (request := await requests.get()) is not None:
            yield request

    async def send(response: pb.ClassifyStreamResponse) -> None:
        answers.append(response)
        requests.put_nowait(numbered("a")[0] if len(answers) < 5 else None)
        await settled()  # the client is faster than the server

    requests.put_nowait(numbered("a")[0])
    await classify_stream(Answerer().classify, incoming(), send, Call())
    assert [(answer.id, answer.HasField("response")) for answer in answers] == [("a", True)] * 5


@pytest.mark.parametrize("end", ["bad request", "reader gone", "cancelled"])
@async_test
async def test_the_end_of_a_stream_cancels_all_unanswered_requests(end: str) -> None:
    answerer, bad = Answerer(waits=True), asyncio.Event()

    async def incoming() -> AsyncIterator[pb.ClassifyStreamRequest]:
        for request in numbered("a", "b", "c"):
            yield request
        await bad.wait()
        raise ModelNotFound("planted")

    async def send(_: pb.ClassifyStreamResponse) -> None:
        raise ModelNotFound("planted")

    stream = asyncio.create_task(classify_stream(answerer.classify, incoming(), send, Call()))
    await settled()
    if end == "bad request":
        bad.set()
    elif end == "reader gone":
        answerer.allow("a")
    else:
        stream.cancel()
    with pytest.raises(asyncio.CancelledError if end == "cancelled" else ModelNotFound):
        await stream
    assert sorted(answerer.cancelled) == (["b", "c"] if end == "reader gone" else ["a", "b", "c"])


SMALL = fake_contract(classes=3, default_scales=(31, 44))
IMAGE = png(40, 57, seed=1)


@pytest.fixture(scope="module")
def stub() -> Iterator[pb_grpc.PreluNetServiceStub]:
    sessions = {"six": FakeSession(), "three": FakeSession(SMALL, seed=1)}
    with running_server(**sessions) as server, grpc.insecure_channel(server.address) as channel:
        yield pb_grpc.PreluNetServiceStub(channel)


def named(requests: Iterable[pb.ClassifyRequest]) -> Iterator[pb.ClassifyStreamRequest]:
    return (pb.ClassifyStreamRequest(id=f"{n}", request=request) for n, request in enumerate(requests))


def without_timings(response: pb.ClassifyResponse) -> pb.ClassifyResponse:
    response.ClearField("timings")
    return response


def test_every_answer_of_a_stream_equals_that_of_a_separate_call(stub) -> None:
    all_changes = [
        {},
        {"heatmap": True},
        {"top_k": 2},
        {"scales": [33, 45]},
        {"mirror": False},
        *[{"protocol": "center"}] * 36,
    ]
    requests = [
        pb.ClassifyRequest(image=png(30 + n, 80 - n, seed=n), model=("six", "three")[n % 2], **changes)
        for n, changes in enumerate(all_changes)
    ]
    alone = [without_timings(stub.Classify(request)) for request in requests]
    answers = {answer.id: answer for answer in stub.ClassifyStream(named(requests), timeout=60)}
    assert len(answers) == len(requests) > STREAM_SLOTS
    assert all(answer.response.timings.batches >= 1 for answer in answers.values())
    assert [without_timings(answers[f"{n}"].response) for n in range(len(requests))] == alone


@pytest.mark.parametrize(
    "changes",
    [
        {"image": b""},
        {"image": IMAGE[:-900]},
        {"model": "nine"},
        {"model": ""},
        {"protocol": "twelve-crop"},
        {"scales": [27]},
        {"top_k": 7},
    ],
    ids=lambda changes: str(changes)[:30],
)
def test_an_error_in_a_stream_equals_that_of_a_separate_call(stub, changes: dict) -> None:
    good = pb.ClassifyRequest(image=IMAGE, model="six", protocol="center")
    bad = pb.ClassifyRequest(**{"image": IMAGE, "model": "six", **changes})
    with pytest.raises(grpc.RpcError) as alone:
        stub.Classify(bad)
    answers = {answer.id: answer for answer in stub.ClassifyStream(named([good, bad, good]), timeout=60)}
    assert [answers[id_].WhichOneof("result") for id_ in "012"] == ["response", "error", "response"]
    error = answers["1"].error
    assert (error.code, error.message) == (alone.value.code().value[0], alone.value.details())
    assert error.reason == reason_for(error_from(alone.value, ""))


def test_an_image_above_the_limit_waits_for_admission_and_all_are_answered() -> None:
    session, sent = GatedSession(), queue.SimpleQueue()
    with (
        running_server(queue=QueueOptions(max_views=2), fake=session) as server,
        grpc.insecure_channel(server.address) as channel,
    ):
        admission = server.models.get("").admission
        requests = [pb.ClassifyRequest(image=IMAGE, protocol="center")] * 5
        for request in named(requests):
            sent.put(request)
        stub = pb_grpc.PreluNetServiceStub(channel)
        stream = stub.ClassifyStream(iter(sent.get, None), timeout=60)
        eventually(lambda: len(admission.waiters) == 1)
        assert server.metric("prelunet_waiting_images", model="fake") == 2
        with pytest.raises(grpc.RpcError, match="the limit is 2 views"):
            stub.Classify(requests[0])
        stub.ListModels(pb.ListModelsRequest())  # time for the server to read more
        assert (admission.used.images, len(admission.waiters)) == (2, 1), "of five images; two should not be read yet"
        session.gate.set()
        sent.put(None)
        answers = list(stream)
        assert sorted((answer.id, answer.WhichOneof("result")) for answer in answers) == [
            (f"{n}", "response") for n in range(5)
        ]
        assert server.metric("prelunet_refusals_total", model="fake", reason="views") == 1, "of the separate call"


def test_an_abandoned_stream_leaves_nothing_waiting_for_admission() -> None:
    session = GatedSession()
    with (
        running_server(queue=QueueOptions(max_views=2), fake=session) as server,
        grpc.insecure_channel(server.address) as channel,
    ):
        admission = server.models.get("").admission
        stub = pb_grpc.PreluNetServiceStub(channel)
        stream = stub.ClassifyStream(named([pb.ClassifyRequest(image=IMAGE, protocol="center")] * 3), timeout=60)
        eventually(lambda: len(admission.waiters) == 1)
        stream.cancel()
        eventually(lambda: (admission.used.images, len(admission.waiters)) == (0, 0))
        session.gate.set()
        assert stub.Classify(pb.ClassifyRequest(image=IMAGE, protocol="center")).predictions


@pytest.mark.parametrize("leaves", [True, False], ids=["left", "out of time"])
def test_an_abandoned_or_expired_stream_is_not_computed(leaves: bool) -> None:
    session, sent = GatedSession(), queue.SimpleQueue()
    with running_server(fake=session) as server, grpc.insecure_channel(server.address) as channel:
        stub = pb_grpc.PreluNetServiceStub(channel)
        first = stub.Classify.future(pb.ClassifyRequest(image=IMAGE, protocol="dense-29"))
        assert session.entered.wait(30)
        stream = stub.ClassifyStream(iter(sent.get, None), timeout=60 if leaves else 0.5)
        for request in named([pb.ClassifyRequest(image=IMAGE, protocol="dense-41")] * 5):
            sent.put(request)
        if leaves:
            eventually(lambda: server.metric("prelunet_waiting_images", model="fake") == 6)
            stream.cancel()
        errors: list[int] = []
        with pytest.raises(grpc.RpcError) as caught:
            errors.extend(answer.error.code for answer in stream)
        assert caught.value.code().name == ("CANCELLED" if leaves else "DEADLINE_EXCEEDED")
        assert set(errors) <= {4}, "the deadline of an image may pass a moment before that of its stream"
        eventually(lambda: server.metric("prelunet_waiting_images", model="fake") == 1)
        session.gate.set()
        sent.put(None)
        assert first.result(30).predictions
        assert stub.Classify(pb.ClassifyRequest(image=IMAGE, protocol="dense-43")).predictions
    assert {shape[1] for shape in session.calls} == {29, 43}, "41, the stream's scale, should not be computed"


def test_a_client_that_sends_faster_than_the_server_classifies_is_slowed_down() -> None:
    session, pulled = GatedSession(), 0
    image = png(600, 700)  # 1.3 MB
    assert len(image) > 2**20

    def pulling() -> Iterator[pb.ClassifyStreamRequest]:
        nonlocal pulled
        for request in named([pb.ClassifyRequest(image=image, protocol="center")] * (3 * STREAM_SLOTS)):
            pulled += 1
            yield request

    with running_server(fake=session) as server, grpc.insecure_channel(server.address) as channel:
        stub = pb_grpc.PreluNetServiceStub(channel)
        stream = stub.ClassifyStream(pulling(), timeout=120)
        eventually(lambda: server.metric("prelunet_waiting_images", model="fake") == STREAM_SLOTS)
        for _ in range(50):
            stub.ListModels(pb.ListModelsRequest())  # time for the server to read more
        assert server.metric("prelunet_waiting_images", model="fake") == STREAM_SLOTS
        assert pulled < 2 * STREAM_SLOTS, "the rest waits in gRPC's buffers, which should be few"
        session.gate.set()
        assert len(list(stream)) == pulled == 3 * STREAM_SLOTS


def test_a_client_that_reads_no_answers_slows_down_only_itself() -> None:
    """Its answers, of a thousand classes each, fill gRPC's buffers; then no further request of it is read."""
    requests = [pb.ClassifyRequest(image=IMAGE, model="many", protocol="center", top_k=1000)] * (5 * STREAM_SLOTS)
    with (
        running_server(many=FakeSession(fake_contract(classes=1000)), other=FakeSession()) as server,
        grpc.insecure_channel(server.address, options=[("grpc.http2.bdp_probe", 0)]) as channel,  # window: 64 kB
        grpc.insecure_channel(server.address) as another,
    ):
        stream = pb_grpc.PreluNetServiceStub(channel).ClassifyStream(named(requests), timeout=120)
        assert next(stream).ByteSize() > 30_000
        stub, before = pb_grpc.PreluNetServiceStub(another), -1.0
        while before != (answered := server.metric("prelunet_request_seconds_count", model="many")):
            before = answered
            for _ in range(20):
                assert stub.Classify(pb.ClassifyRequest(image=IMAGE, model="other"), timeout=30).predictions
        assert answered <= 3 * STREAM_SLOTS
        assert server.metric("prelunet_waiting_images", model="many") == 0, (
            "answers that wait to be sent should not count as waiting images"
        )
        assert len(list(stream)) == len(requests) - 1


@async_test
async def test_a_write_that_is_cancelled_is_finished_first() -> None:
    """Otherwise the error of a stream, sent behind an answer in progress, may never arrive."""
    begun, go_on, written = asyncio.Event(), asyncio.Event(), []

    async def write() -> None:
        begun.set()
        await go_on.wait()
        written.append("all of it")

    writing = asyncio.create_task(uncancelled(write()))
    await begun.wait()
    writing.cancel()
    for _ in range(3):  # so that the cancellation arrives
        await asyncio.sleep(0)
    assert not writing.done()
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await writing
    assert written == ["all of it"]


@async_test
async def test_a_write_that_nobody_reads_is_given_up_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(concurrency, "_UNREAD_SECONDS", 0.05)
    writing = asyncio.create_task(uncancelled(asyncio.Event().wait()))
    await asyncio.sleep(0)
    writing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(writing, 20)
