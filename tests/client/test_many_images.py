"""`classify_many` of both clients against a scripted server: requests, answers, errors, and how much is held."""

import gc
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path

import grpc
import pytest

from prelunet.evaluator.errors import (
    DeadlinePassed,
    EnvironmentFault,
    ImageError,
    Interrupted,
    OutOfMemory,
    Overloaded,
    PermissionDenied,
    PreluNetError,
    Unauthenticated,
    UsageError,
)
from prelunet.evaluator.pb.prelunet.v1 import prelunet_pb2 as pb
from prelunet.evaluator.rpc.status import MAX_MESSAGE_BYTES
from tests.client.client_harness import AT_ONCE, ScriptedServicer, answer_to, served, text_of

PETS = [b"cat", b"dog", b"fox", b"owl", b"rat"]
ALL_PETS = [(0, "cat"), (1, "dog"), (2, "fox"), (3, "owl"), (4, "rat")]


def outcomes(results) -> list[tuple]:
    """Return keys with what their answers belong to, or with the class and text of their errors."""
    return [
        (key, (type(result), str(result)) if isinstance(result, PreluNetError) else text_of(result))
        for key, result in results
    ]


class PetsServicer(ScriptedServicer):
    """Does with an image what `steps` says: raise an error, or call a function of (request, context)."""

    def __init__(self, **steps: object) -> None:
        super().__init__()
        self.steps = steps
        self.images: list[str] = []

    def Classify(self, request, context):  # noqa: N802
        self.images.append(request.image.decode())
        step = self.steps.get(self.images[-1])
        self.script.appendleft(step)
        return super().Classify(request, context)


def test_answers_are_yielded_as_they_arrive_with_the_ids_of_their_images(client_to) -> None:
    gate = threading.Event()

    def late(request, context):
        gate.wait(30)
        return answer_to(request)

    with client_to(PetsServicer(cat=late)) as client:
        results = client.classify_many(PETS)
        first = outcomes(next(results) for _ in range(4))
        gate.set()
        assert sorted(first) == ALL_PETS[1:]
        assert outcomes(results) == ALL_PETS[:1]


def test_an_answer_is_yielded_while_the_iterable_waits_for_the_next_image(client_to) -> None:
    taken = threading.Event()

    def images() -> Iterator[bytes]:
        for pet in PETS:
            yield pet
            assert taken.wait(30)
            taken.clear()

    keys = []
    with client_to(ScriptedServicer()) as client:
        for key, _ in client.classify_many(images()):
            keys.append(key)
            taken.set()
    assert keys == [0, 1, 2, 3, 4]


def test_a_key_may_be_anything_and_repeated(client_to) -> None:
    images = [(Path("a"), b"cat"), (None, b"dog"), (Path("a"), b"fox"), ({}, b"owl")]
    with client_to(ScriptedServicer()) as client:
        results = outcomes(client.classify_many(images, max_pending=1))
    assert results == [(Path("a"), "cat"), (None, "dog"), (Path("a"), "fox"), ({}, "owl")]


def test_the_options_go_with_every_image(client_to) -> None:
    seen = []

    def look(request, _):
        seen.append(request)
        return answer_to(request)

    options = {"model": "six", "protocol": "dense", "scales": (32, 48), "mirror": False, "top_k": 3, "apply_exif": True}
    server = PetsServicer(cat=look, dog=look)
    with client_to(server) as client:
        list(client.classify_many(PETS[:2], **options, max_pending=1, request_id="batch:7"))
    assert seen == [pb.ClassifyRequest(image=image, **options) for image in PETS[:2]]
    assert {each.metadata["x-request-id"] for each in server.seen} == {"batch:7"}


def test_no_image_makes_no_call(client_to) -> None:
    server = ScriptedServicer()
    with client_to(server) as client:
        assert list(client.classify_many([])) == []
    assert server.seen == []


def test_an_image_without_an_answer_has_its_own_error_and_the_others_continue(client_of) -> None:
    server = PetsServicer(
        dog=ImageError("dog: no image"),
        fox=grpc.StatusCode.UNAVAILABLE,  # it breaks the server
        owl=OutOfMemory("owl: too large"),
        rat=Overloaded("full", retry_after=0.001),
    )
    with served(server) as address, client_of(address) as client:
        results = dict(outcomes(client.classify_many(PETS, request_id="r1")))
    assert results[0] == "cat"
    assert results[1] == (ImageError, "dog: no image (request id r1)")
    assert (results[2][0], results[3][0]) == (EnvironmentFault, OutOfMemory)
    assert results[4] == (Overloaded, "full (request id r1)")
    assert [server.images.count(pet) for pet in ("cat", "fox", "owl", "rat")] == [1, 5, 1, 5]


def test_an_image_too_large_for_a_message_is_refused_by_the_client_and_the_others_are_answered(client_to) -> None:
    server = ScriptedServicer()
    with client_to(server) as client:
        results = dict(outcomes(client.classify_many([b"cat", b"x" * MAX_MESSAGE_BYTES, b"dog"], request_id="r1")))
    assert (results[0], results[2]) == ("cat", "dog")
    text = f"{MAX_MESSAGE_BYTES} bytes do not fit into a message of this client, at most {MAX_MESSAGE_BYTES} bytes"
    assert results[1] == (ImageError, f"{text}. Send a smaller image, or use HTTP (request id r1)")
    assert len(server.seen) == 2


@pytest.mark.parametrize("kind", [Unauthenticated, PermissionDenied])
def test_a_refused_token_is_raised(client_to, kind: type[PreluNetError]) -> None:
    with client_to(ScriptedServicer(*[kind("no")] * 40)) as client, pytest.raises(kind, match="no"):
        list(client.classify_many(PETS))


def test_an_image_that_met_a_transient_error_is_sent_again(client_to) -> None:
    with client_to(ScriptedServicer(AT_ONCE, Interrupted("it stops"), AT_ONCE)) as client:
        assert sorted(outcomes(client.classify_many(PETS))) == ALL_PETS


def test_an_exception_of_the_iterable_is_raised_after_the_answers_to_the_images_before_it(client_to) -> None:
    def images() -> Iterator[bytes]:
        yield from PETS[:3]
        raise LookupError("no more pets")

    def slow(request, context):
        time.sleep(0.2)
        return answer_to(request)

    results = []
    with client_to(ScriptedServicer(slow, slow)) as client:
        with pytest.raises(LookupError, match="no more pets"):
            results.extend(client.classify_many(images()))
        assert sorted(outcomes(results)) == ALL_PETS[:3]
        with pytest.raises(
            UsageError, match=r"image 1 of classify_many: an image cannot be of type int; .*or .id, image.$"
        ):
            list(client.classify_many([b"cat", 7]))
        with pytest.raises(TypeError, match="not iterable"):
            list(client.classify_many(7))


@pytest.mark.parametrize(
    ("options", "text"),
    [({"top_k": 0}, "top_k is 0"), ({"max_pending": 0}, "max_pending is 0"), ({"scales": [0]}, "scales has 0"),
     ({"scales": [2**32]}, "scales has"), ({"request_id": "a b"}, "request_id is 'a b'"),
     ({"protocl": "dense"}, "no option 'protocl'. There are: model, protocol,"), ({"maps": True}, "no option 'maps'")],
)  # fmt: skip
def test_an_invalid_option_is_refused_at_once(client_to, options: dict, text: str) -> None:
    with client_to(ScriptedServicer()) as client, pytest.raises(UsageError, match=text):
        client.classify_many(PETS, **options)


def test_the_deadline_of_many_images_covers_them_all(client_to) -> None:
    gate = threading.Event()

    def stall(request, _):
        gate.wait(30)

    def slow() -> Iterator[bytes]:
        gate.wait(30)
        yield b"cat"

    with client_to(PetsServicer(dog=stall, fox=stall)) as client:
        results = client.classify_many(PETS, timeout=1)
        assert sorted(outcomes(next(results) for _ in range(3))) == [(0, "cat"), (3, "owl"), (4, "rat")]
        with pytest.raises(DeadlinePassed, match="the timeout for all images has passed"):
            list(results)
        with pytest.raises(DeadlinePassed, match=r"the timeout for all images has passed.* \(request id r1\)$"):
            list(client.classify_many(slow(), timeout=0.1, request_id="r1"))  # before there is anything to send
        gate.set()


def test_an_image_that_exceeds_the_timeout_of_the_client_has_an_error(client_to) -> None:
    gate = threading.Event()

    def stall(request, _):
        gate.wait(30)

    with client_to(PetsServicer(dog=stall), timeout=0.5) as client:
        results = dict(outcomes(client.classify_many(PETS)))
        gate.set()
    assert results.pop(1)[0] is DeadlinePassed
    assert results == {key: pet for key, pet in ALL_PETS if key != 1}


def test_at_most_max_pending_images_are_in_flight_and_as_many_if_the_server_is_slow(client_to) -> None:
    lock, now, most = threading.Lock(), 0, 0

    class Counting(ScriptedServicer):
        def Classify(self, request, context):  # noqa: N802
            nonlocal now, most
            with lock:
                now += 1
                most = max(most, now)
            time.sleep(0.01)
            with lock:
                now -= 1
            return answer_to(request)

    with client_to(Counting()) as client:
        assert len(list(client.classify_many([b"cat"] * 60, max_pending=4))) == 60
    assert most == 4


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


def test_leaving_the_loop_cancels_the_calls_in_flight_and_ends_the_thread(client_to) -> None:
    ended, closed = threading.Event(), threading.Event()

    def hold(request, context):
        context.add_callback(ended.set)
        ended.wait(30)

    def images() -> Iterator[bytes]:
        try:
            for number in count():
                yield b"%d" % number
        finally:
            closed.set()

    with client_to(ScriptedServicer(hold)) as client:
        results = client.classify_many(images())
        next(results)
        results.close()
        gc.collect()
        assert ended.wait(30)
        assert text_of(client.classify(b"cat")) == "cat"
    gc.collect()
    assert closed.wait(30)
    for thread in threading.enumerate():
        if thread.name == "prelunet-images":
            thread.join(30)
            assert not thread.is_alive()


@pytest.mark.parametrize("ask", ["classify", "classify_many"])
def test_closing_the_client_interrupts_calls_in_flight_and_refuses_further_ones(client_of, ask: str) -> None:
    arrived, gate = threading.Event(), threading.Event()

    def hold(request, context):
        arrived.set()
        gate.wait(30)
        return answer_to(request)

    def classify() -> object:
        return client.classify(b"cat") if ask == "classify" else list(client.classify_many([b"cat"]))

    server = ScriptedServicer(hold)
    with served(server) as address, ThreadPoolExecutor(1) as pool:
        with client_of(address) as client:
            call = pool.submit(classify)
            assert arrived.wait(30)
            client.close()
            assert type(call.exception(30)) is Interrupted
            assert str(call.exception()) == f"{address}: the client was closed before the answer arrived"
            with pytest.raises(UsageError, match="the client is closed"):
                classify()
        assert len(server.seen) == 1, "the caller has ended the call, and it was made again"
        gate.set()
