"""`classify_many` of both clients against a scripted server: requests, answers, and broken streams."""

import gc
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import count
from pathlib import Path

import grpc
import pytest

from prelunet.evaluator.client import Client, RetryPolicy
from prelunet.evaluator.client.backends import BlockingBackend, each
from prelunet.evaluator.client.calls import ClientSettings
from prelunet.evaluator.client.messages import classify_request
from prelunet.evaluator.client.streams import Exchange, PendingImages
from prelunet.evaluator.errors import (
    DeadlinePassed,
    EnvironmentFault,
    ImageError,
    Interrupted,
    OutOfMemory,
    Overloaded,
    PreluNetError,
    UsageError,
)
from prelunet.evaluator.pb.prelunet.v1 import prelunet_pb2 as pb
from prelunet.evaluator.rpc.status import MAX_MESSAGE_BYTES, status_of
from tests.client.client_harness import (
    AT_ONCE,
    QUICK,
    Relay,
    ScriptedServicer,
    answer_to,
    answers_to,
    bad,
    good,
    served,
    text_of,
)

UNAVAILABLE = grpc.StatusCode.UNAVAILABLE
PETS = [b"cat", b"dog", b"fox", b"owl", b"rat"]


def outcomes(results) -> list[tuple]:
    """Return keys with what their answers belong to, or with the class and text of their errors."""
    return [
        (key, (type(result), str(result)) if isinstance(result, PreluNetError) else text_of(result))
        for key, result in results
    ]


def test_images_get_their_own_answers_in_the_order_of_the_server(client_to) -> None:
    def backwards(requests, _):
        yield from [good(next(requests)) for _ in PETS][::-1]
        yield from answers_to(requests, _)

    with client_to(ScriptedServicer(backwards)) as client:
        results = list(client.classify_many(PETS))
    assert outcomes(results) == [(4, "rat"), (3, "owl"), (2, "fox"), (1, "dog"), (0, "cat")]
    assert (results[0][1].timings.queue_seconds, results[0][1].timings.batches) == (0.25, 3)


def test_a_key_may_be_anything_and_repeated(client_to) -> None:
    images = [(Path("a"), b"cat"), (None, b"dog"), (Path("a"), b"fox"), ({}, b"owl")]
    with client_to(ScriptedServicer()) as client:
        assert outcomes(client.classify_many(images)) == [
            (Path("a"), "cat"),
            (None, "dog"),
            (Path("a"), "fox"),
            ({}, "owl"),
        ]


def test_the_options_go_with_every_image(client_to) -> None:
    seen = []

    def look(requests, _):
        for request in requests:
            seen.append(request.request)
            yield good(request)

    options = {"model": "six", "protocol": "dense", "scales": (32, 48), "mirror": False, "top_k": 3, "apply_exif": True}
    server = ScriptedServicer(look)
    with client_to(server) as client:
        list(client.classify_many(PETS[:2], **options, request_id="batch:7"))
    wanted = [pb.ClassifyRequest(image=image, **options) for image in PETS[:2]]
    assert seen == wanted
    assert server.seen[0].metadata["x-request-id"] == "batch:7"


def test_an_answer_may_exceed_the_default_limit_of_grpc(client_to) -> None:
    heatmap = b"x" * (5 * 2**20)
    with client_to(ScriptedServicer(lambda request, _: pb.ClassifyResponse(heatmap=heatmap))) as client:
        assert client.classify(b"cat").heatmap == heatmap


def test_no_image_makes_no_call(client_to) -> None:
    server = ScriptedServicer()
    with client_to(server) as client:
        assert list(client.classify_many([])) == []
    assert server.seen == []


def test_a_bad_image_has_its_own_error_and_the_stream_continues(client_of) -> None:
    def some(requests, _):
        errors = {b"dog": ImageError("dog: no image"), b"owl": OutOfMemory("owl: too large"), b"rat": ValueError("x")}
        for request in requests:
            error = errors.get(request.request.image)
            yield bad(request, error) if error else good(request)

    server = ScriptedServicer(some)
    with served(server) as address, client_of(address, retries=QUICK) as client:
        results = outcomes(client.classify_many(PETS, request_id="r1"))
    assert results == [
        (0, "cat"),
        (1, (ImageError, "dog: no image (request id r1)")),
        (2, "fox"),
        (3, (OutOfMemory, "owl: too large (request id r1)")),
        (4, (PreluNetError, f"{address}: status 13: x (request id r1)")),
    ]
    assert len(server.seen) == 1


def test_an_image_too_large_for_a_message_is_refused_by_the_client_and_the_others_are_answered(
    client_to, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("prelunet.evaluator.client.messages.MAX_MESSAGE_BYTES", 4096 + 5)  # three bytes and the framing
    images = [*[b"large"] * 50, b"cat", b"dog", *[b"large"] * 50, b"fox"]
    with client_to(ScriptedServicer()) as client:
        results = dict(outcomes(client.classify_many(images, max_pending=4, request_id="r1")))
    assert {results.pop(number) for number in (50, 51, 102)} == {"cat", "dog", "fox"}
    assert len(results) == 100
    text = "7 bytes do not fit into a message, whose limit is 4101 bytes. Send a smaller image"
    assert set(results.values()) == {(ImageError, f"{text} (request id r1)")}
    server = ScriptedServicer()
    with client_to(server) as client:
        assert outcomes(client.classify_many([b"large"] * 9, max_pending=2)) == [
            (n, (ImageError, text)) for n in range(9)
        ]
    assert server.seen == [], "there is nothing to send"


def test_refused_images_count_as_pending_until_their_errors_are_taken(
    client_to, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("prelunet.evaluator.client.messages.MAX_MESSAGE_BYTES", 4096)
    asked = taken = 0

    def images() -> Iterator[bytes]:
        nonlocal asked
        for _ in range(500):
            asked += 1
            assert asked <= taken + 2 * 4 + 1  # four whose errors are on their way, four more
            yield b"large"

    with client_to(ScriptedServicer()) as client:
        for _key, error in client.classify_many(images(), max_pending=4):
            assert type(error) is ImageError
            taken += 1
    assert taken == 500


def test_an_image_that_met_a_transient_error_is_sent_again_on_the_same_stream(client_to) -> None:
    def full(requests, _):
        left = {b"dog": 2, b"fox": 2, b"rat": 99}
        for request in requests:
            image = request.request.image
            left[image] = left.get(image, 0) - 1
            error = Interrupted("the server stops") if image == b"fox" else AT_ONCE
            yield bad(request, error) if left[image] >= 0 else good(request)

    server = ScriptedServicer(full)
    with client_to(server, retries=QUICK) as client:
        results = dict(outcomes(client.classify_many(PETS)))
    assert results == {0: "cat", 1: "dog", 2: "fox", 3: "owl", 4: (Overloaded, "too much to do")}
    assert len(server.seen) == 1


def test_images_sent_again_use_the_retry_budget(client_to) -> None:
    sent = []

    def full(requests, _):
        for request in requests:
            sent.append(request.request.image)
            yield bad(request, AT_ONCE)

    with client_to(ScriptedServicer(full), retries=replace(QUICK, retry_budget=4)) as client:
        results = list(client.classify_many(PETS))
    assert [type(error) for _, error in results] == [Overloaded] * 5
    assert len(sent) == 5 + 4


@pytest.mark.parametrize("code", [UNAVAILABLE, grpc.StatusCode.CANCELLED], ids=["unavailable", "cancelled"])
def test_a_broken_stream_is_reopened_for_the_unanswered_images(client_to, code: grpc.StatusCode) -> None:
    sent: list[list[bytes]] = []

    def breaks_after(answers: int):
        def some(requests, context):
            sent.append([])
            for number, request in enumerate(requests):
                sent[-1].append(request.request.image)
                if number == answers:
                    context.abort(code, "gone")
                yield good(request)

        return some

    server = ScriptedServicer(breaks_after(2), breaks_after(0), code, breaks_after(1))
    with client_to(server, retries=replace(QUICK, attempts=6)) as client:
        results = outcomes(client.classify_many(PETS, max_pending=2, request_id="again"))
    assert sorted(results) == [(0, "cat"), (1, "dog"), (2, "fox"), (3, "owl"), (4, "rat")]
    assert len(server.seen) == 5
    assert {seen.metadata["x-request-id"] for seen in server.seen} == {"again"}
    assert sent[1][0] == b"fox", "what was answered is not sent again, and the oldest comes first"


@pytest.mark.parametrize("waits", [True, False], ids=["nothing is sent", "something is sent"])
def test_a_stream_that_the_server_ended_because_it_was_idle_is_reopened_at_no_cost(client_to, waits: bool) -> None:
    ended = threading.Event()

    def idle(requests, context):
        yield good(next(requests))
        context.add_callback(ended.set)
        context.abort_with_status(status_of(DeadlinePassed("no message arrived within 300 s"), ""))

    def images() -> Iterator[bytes]:
        yield b"cat"
        if waits:
            assert ended.wait(30)
        yield from PETS[1:]

    server = ScriptedServicer(idle, idle)
    with client_to(server, retries=replace(QUICK, retry_budget=0)) as client:
        results = outcomes(client.classify_many(images()))
    assert sorted(results) == [(0, "cat"), (1, "dog"), (2, "fox"), (3, "owl"), (4, "rat")]
    assert len(server.seen) == 3


def test_an_image_whose_stream_always_times_out_gets_the_error(client_to) -> None:
    """As one does that takes longer on its way than a server gives the first message of a stream."""
    server = ScriptedServicer(*[DeadlinePassed("the first message of this stream did not arrive within 60 s")] * 9)
    with client_to(server, retries=QUICK) as client:
        ((key, (kind, text)),) = outcomes(client.classify_many([b"cat"]))
    assert (key, kind, "did not arrive within 60 s" in text) == (0, DeadlinePassed, True)
    assert len(server.seen) == QUICK.attempts


def test_a_stream_that_breaks_repeatedly_without_an_answer_raises_its_error(client_to) -> None:
    server = ScriptedServicer(*[UNAVAILABLE] * 9)
    with client_to(server, retries=QUICK) as client, pytest.raises(EnvironmentFault, match="bare"):
        list(client.classify_many(PETS))
    assert len(server.seen) == 4


def test_a_stream_that_ends_in_a_permanent_error_raises_it_and_is_not_reopened(client_to) -> None:
    server = ScriptedServicer(UsageError("ids should differ"))
    with client_to(server, retries=QUICK) as client, pytest.raises(UsageError, match="ids should differ"):
        list(client.classify_many(PETS))
    assert len(server.seen) == 1


def test_an_image_that_breaks_every_stream_gets_an_error_and_the_others_get_answers(client_to) -> None:
    def poisoned(requests, context):
        crashing = False
        for request in requests:
            if request.request.image == b"dog":
                crashing = True
                continue
            yield good(request)
            if crashing:
                context.abort(UNAVAILABLE, "crashed")

    server = ScriptedServicer(*[poisoned] * 20)
    images = [b"cat", b"dog", *(f"{n}".encode() for n in range(30))]
    with client_to(server, retries=QUICK) as client:
        results = dict(outcomes(client.classify_many(images, max_pending=3)))
    assert results[1] == (EnvironmentFault, results[1][1])
    assert "crashed" in results[1][1]
    assert [results[n + 2] for n in range(30)] == [f"{n}" for n in range(30)]
    assert len(server.seen) == 5


def test_a_stream_whose_connection_is_reset_is_reopened(client_of) -> None:
    def stall(requests, _):
        yield good(next(requests))
        reset.wait(30)

    reset = threading.Event()
    retries = replace(QUICK, max_backoff=0.2, attempts=50)
    with (
        served(ScriptedServicer(stall)) as address,
        Relay(address) as relay,
        client_of(relay.address, retries=retries) as client,
    ):
        results = client.classify_many(PETS)
        first = next(results)
        relay.cut()
        rest = list(results)
        reset.set()
    assert sorted(outcomes([first, *rest])) == [(0, "cat"), (1, "dog"), (2, "fox"), (3, "owl"), (4, "rat")]


def test_an_exception_of_the_iterable_is_raised_after_the_answers_to_the_images_before_it(client_to) -> None:
    def images() -> Iterator[bytes]:
        yield from PETS[:3]
        raise LookupError("no more pets")

    server = ScriptedServicer()
    results = []
    with client_to(server) as client:
        with pytest.raises(LookupError, match="no more pets"):
            results.extend(client.classify_many(images()))
        assert outcomes(results) == [(0, "cat"), (1, "dog"), (2, "fox")]
        with pytest.raises(
            UsageError, match=r"image 1 of classify_many: an image cannot be of type int; .*or .id, image.$"
        ):
            list(client.classify_many([b"cat", 7]))
        with pytest.raises(TypeError, match="not iterable"):
            list(client.classify_many(7))


@pytest.mark.parametrize(
    ("options", "text"),
    [({"top_k": 0}, "top_k is 0"), ({"max_pending": 0}, "max_pending is 0"), ({"scales": [0]}, "scales has 0"),
     ({"scales": [2**32]}, "scales has"), ({"request_id": "a b"}, "request_id is 'a b'")],
)  # fmt: skip
def test_an_invalid_option_is_refused_at_once(client_to, options: dict, text: str) -> None:
    with client_to(ScriptedServicer()) as client, pytest.raises(UsageError, match=text):
        client.classify_many(PETS, **options)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda requests, _: (pb.ClassifyStreamResponse(id="77", response=answer_to(r.request)) for r in requests),
        lambda requests, _: (pb.ClassifyStreamResponse(id=r.id) for r in requests),
        lambda requests, _: iter([next(requests)][:0]),
    ],
    ids=["another id", "no result", "no answer"],
)
def test_a_server_that_violates_the_protocol_is_reported(client_of, wrong) -> None:
    with (
        served(ScriptedServicer(wrong)) as address,
        client_of(address) as client,
        pytest.raises(PreluNetError, match=f"^{address}: .* Do client and server have the same version"),
    ):
        list(client.classify_many(PETS))


def test_an_abandoned_stream_ends_on_the_server_even_while_its_error_is_kept(client_to) -> None:
    ended = threading.Event()

    def wrong(requests, context):
        context.add_callback(ended.set)
        yield pb.ClassifyStreamResponse(id="77", response=answer_to(next(requests).request))
        ended.wait(30)

    with client_to(ScriptedServicer(wrong)) as client:
        with pytest.raises(PreluNetError) as caught:
            list(client.classify_many(PETS))
        assert ended.wait(20)
    assert caught.value.__traceback__ is not None


class Broken(grpc.RpcError):
    """How a stream ends whose connection is lost, or cannot be made."""

    def __init__(self, words: str = "gone") -> None:
        self.words = words

    def code(self):
        return UNAVAILABLE

    def details(self):
        return self.words

    def trailing_metadata(self):
        return ()


def test_known_results_are_returned_before_a_broken_stream_is_reopened() -> None:
    settings = ClientSettings("there:1", None, RetryPolicy(initial_backoff=10**6, max_backoff=10**6))
    pending = PendingImages(settings, classify_request, None, None, max_pending=3)
    pending.add(pending.build(b"cat"))
    assert pending.next_request().id == "0"
    pending.stream_failed(Broken())
    assert pending.seconds_until_work() > 1
    assert pending.next_request() is None
    pending.add(pending.build(b"x" * MAX_MESSAGE_BYTES))
    assert pending.seconds_until_work() == 0
    assert [(key, type(error)) for key, error in pending.take_results()] == [(1, ImageError)]
    assert pending.seconds_until_work() > 1


def test_a_stream_to_an_absent_server_is_no_attempt_of_its_images() -> None:
    pending = PendingImages(
        ClientSettings("there:1", None, RetryPolicy(attempts=2, initial_backoff=1e-9, max_backoff=1e-9)),
        classify_request,
        None,
        None,
        max_pending=3,
    )
    pending.add(pending.build(b"cat"))
    refused = Broken("connections to all backends failing; last error: Connection refused")
    for ending in (refused, refused, refused, Broken()):  # the first one that a server has seen is the last
        pending.call.begin()
        while pending.next_request() is None:
            pass
        pending.stream_failed(ending)
        assert pending.take_results() == []
    assert not pending.idle


def test_an_image_read_while_a_stream_breaks_belongs_to_the_next_stream() -> None:
    settings = ClientSettings("there:1", None, RetryPolicy(initial_backoff=1e-9, max_backoff=1e-9))
    pending = PendingImages(settings, classify_request, None, None, max_pending=2)
    streams = []

    async def open_stream(requests):
        streams.append(requests)
        first = await anext(requests)
        if len(streams) == 1:
            raise Broken
        lost = [request async for request in streams[0]]
        assert lost == [], "an image sent to a closed stream would never get an answer"
        yield good(first)
        async for request in requests:
            yield good(request)

    answers = Exchange(pending, BlockingBackend(), open_stream).answers(PETS[:2])
    assert outcomes(each(answers)) == [(0, "cat"), (1, "dog")]
    assert len(streams) == 2


def test_the_deadline_of_many_images_covers_them_all(client_to) -> None:
    gate = threading.Event()

    def stall(requests, _):
        yield good(next(requests))
        gate.wait(30)

    def slow() -> Iterator[bytes]:
        gate.wait(30)
        yield b"cat"

    with client_to(ScriptedServicer(stall), retries=QUICK) as client:
        results = client.classify_many(PETS, timeout=0.3)
        assert outcomes([next(results)]) == [(0, "cat")]
        with pytest.raises(DeadlinePassed):
            list(results)
        with pytest.raises(DeadlinePassed, match=r"the timeout for all images has passed.* \(request id r1\)$"):
            list(client.classify_many(slow(), timeout=0.1, request_id="r1"))  # before there is anything to send
        gate.set()


class Image(bytes):
    """An image that is counted as long as it lives. alive: number of them now; most: the maximum so far."""

    alive = most = 0

    def __new__(cls, *arguments) -> "Image":
        cls.alive += 1
        cls.most = max(cls.most, cls.alive)
        return super().__new__(cls, *arguments)

    def __del__(self) -> None:
        Image.alive -= 1


@pytest.mark.parametrize("max_pending", [1, 5])
def test_no_more_images_are_held_than_max_pending(client_to, max_pending: int) -> None:
    asked, answered, most = 0, 0, 0

    def images() -> Iterator[tuple[int, bytes]]:
        nonlocal asked, most
        for number in range(200):
            asked += 1
            most = max(most, asked - answered)
            yield number, Image(b"%d" % number)

    Image.alive = Image.most = 0
    with client_to(ScriptedServicer()) as client:
        for key, answer in client.classify_many(images(), max_pending=max_pending):
            answered += 1
            assert text_of(answer) == str(key)
    assert answered == 200
    assert most <= max_pending + 1  # one is on its way
    assert Image.most <= 5, "the bytes themselves should not outlive their message"  # made, taken, in threads' hands
    gc.collect()
    assert Image.alive == 0


def test_no_more_images_are_read_while_answers_are_not_taken(client_to) -> None:
    asked = []

    def images() -> Iterator[bytes]:
        for number in count():
            asked.append(number)
            yield b"x" * 100_000 + b"%d" % number

    with client_to(ScriptedServicer()) as client:
        results = client.classify_many(images(), max_pending=8)
        for _ in range(20):
            next(results)
        assert len(asked) <= 20 + 8
        results.close()
    assert len(asked) <= 20 + 8 + 1  # one may have been under way


def test_leaving_the_loop_ends_the_call_and_the_threads(client_to) -> None:
    ended = threading.Event()

    def watch(requests, context):
        context.add_callback(ended.set)
        yield from answers_to(requests, context)

    closed = threading.Event()

    def images() -> Iterator[bytes]:
        try:
            for number in count():
                yield b"%d" % number
        finally:
            closed.set()

    with client_to(ScriptedServicer(watch)) as client:
        for _key, _answer in client.classify_many(images()):
            break
        gc.collect()
        assert ended.wait(30)
        assert text_of(client.classify(b"cat")) == "cat"
    gc.collect()
    assert closed.wait(30)
    for thread in threading.enumerate():
        if thread.name == "prelunet-images" or "consume_request_iterator" in thread.name:
            thread.join(30)
            assert not thread.is_alive()


def test_several_threads_share_a_client_for_many_images() -> None:
    def ask(client: Client, name: str) -> list[tuple]:
        return outcomes(client.classify_many((name + str(n)).encode() for n in range(40)))

    with served(ScriptedServicer()) as address, Client(address) as client, ThreadPoolExecutor(4) as pool:
        calls = [pool.submit(ask, client, name) for name in "abcd"]
        assert [call.result(60) for call in calls] == [[(n, f"{name}{n}") for n in range(40)] for name in "abcd"]


def test_closing_the_client_interrupts_calls_in_flight_and_refuses_further_ones(client_of) -> None:
    arrived, gate = threading.Event(), threading.Event()

    def hold(request, context):
        arrived.set()
        gate.wait(30)
        return answer_to(request)

    server = ScriptedServicer(hold)
    with served(server) as address, ThreadPoolExecutor(1) as pool:
        with client_of(address) as client:
            call = pool.submit(client.classify, b"cat")
            assert arrived.wait(30)
            client.close()
            assert type(call.exception(30)) is Interrupted
            assert str(call.exception()) == f"{address}: the client was closed before the answer arrived"
            with pytest.raises(UsageError, match="the client is closed"):
                client.classify(b"cat")
            with pytest.raises(UsageError, match="the client is closed"):
                list(client.classify_many([b"cat"]))
        assert len(server.seen) == 1, "the caller has ended the call, and it was made again"
        gate.set()
