"""The images of one `classify_many`: which are to be sent, which are unanswered, which are asked again.

Nothing here waits or sends; `Client` and `AsyncClient` do that, each in its own way, and hold to what this says:

    add, finish       what the caller's iterable gives, while there is room
    next_request      what to send, when it is due
    answer_received   what the server says
    stream_ended, stream_failed  how a stream came to its end
    take_results      what to give to the caller
"""

import asyncio
import heapq
import time
from collections.abc import AsyncIterable, AsyncIterator, Callable, Coroutine, Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeAlias

import grpc
import grpc.aio

from prelunet.evaluator.client.calls import Attempts, Call, ClientSettings
from prelunet.evaluator.client.messages import labelled_image, stream_request
from prelunet.evaluator.datasets.dataset import Dataset
from prelunet.evaluator.errors import DeadlinePassed, ImageError, PreluNetError, UsageError
from prelunet.evaluator.pb.prelunet.v1 import prelunet_pb2 as pb

MAX_PENDING = 32  # images; a server leaves as many of a stream unanswered before it reads no further

Result: TypeAlias = "tuple[Any, pb.ClassifyResponse | PreluNetError]"
"""The caller's key of an image, and what became of it."""


@dataclass(frozen=True)
class _Image:
    """One image that has no answer yet. number: its place among all."""

    key: Any
    number: int
    request: pb.ClassifyStreamRequest
    attempts: Attempts


class PendingImages:
    """The images of one `classify_many`; for one thread at a time.

    request: makes a request of an image; deadline: of all of them; max_pending: so many images are held at most.
    """

    def __init__(
        self,
        settings: ClientSettings,
        request: Callable[[bytes], pb.ClassifyRequest],
        deadline: float | None,
        request_id: str | None,
        max_pending: int,
    ) -> None:
        if max_pending < 1:
            raise UsageError(f"max_pending is {max_pending}, but at least one image has to be held")
        request(b"")  # an option that cannot be is told now, not with the first image
        self.call = Call(settings, deadline, request_id)  # the stream, through all its attempts
        self._settings = settings
        self._request = request
        self._deadline = deadline
        self._max_pending = max_pending
        self._taken = 0
        self._finished = False
        self._error: BaseException | None = None
        self._waiting: list[tuple[float, int, _Image]] = []  # a heap: when it is due, number, image
        self._sent: dict[str, _Image] = {}
        self._results: list[Result] = []
        self._reopen_at = 0.0  # on the clock of time.monotonic(): when a stream that broke may be taken up again

    @property
    def has_room(self) -> bool:
        """Whether one more image may be taken."""
        return len(self._waiting) + len(self._sent) + len(self._results) < self._max_pending

    @property
    def idle(self) -> bool:
        """Whether a stream has nothing more to do: nothing is to be sent or answered, and there is something to tell
        or an end.
        """
        return not self._waiting and not self._sent and (self._finished or bool(self._results))

    @property
    def done(self) -> bool:
        """Whether every image has been answered and told."""
        return self.idle and not self._results

    def add(self, given: object) -> None:
        """Take what the caller's iterable gave: an image, whose key is then its place among all, or key and image."""
        number = self._taken
        self._taken += 1
        match given:
            case bytes():
                key, image = number, given
            case (key, bytes() as image):
                pass
            case _:
                raise UsageError(
                    f"image {number} of classify_many is {type(given).__name__}; give bytes or (id, bytes)"
                )
        try:
            request = stream_request(number, self._request(image))
        except ImageError as error:
            self._results.append((key, error))
        else:
            self._push(_Image(key, number, request, self._settings.attempts(self._deadline)), time.monotonic())

    def finish(self, error: BaseException | None = None) -> None:
        """Take note that there are no more images; error: what the caller's iterable raised."""
        self._finished = True
        self._error = error

    def raise_error(self) -> None:
        """Raise what the caller's iterable raised, if anything."""
        if self._error is not None:
            raise self._error

    def seconds_until_due(self) -> float | None:
        """Return the seconds until something can be sent; None where nothing waits."""
        if not self._waiting:
            return None
        return max(0.0, max(self._waiting[0][0], self._reopen_at) - time.monotonic())

    def seconds_until_work(self) -> float | None:
        """Return the seconds until a stream is needed or the time is over; None where that takes a new image.

        0 where there is something to tell too. Raises DeadlinePassed when the time is over; for use while there is no
        stream, which would end then.
        """
        due = 0.0 if self.idle or self._results else self.seconds_until_due()
        if due == 0.0 or self._deadline is None:
            return due
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise DeadlinePassed("the time for all images is over; give it more, or None to wait for ever")
        return left if due is None else min(due, left)

    def next_request(self) -> pb.ClassifyStreamRequest | None:
        """Return what should be sent now; None where nothing is due."""
        if self.seconds_until_due() != 0.0:
            return None
        _, _, image = heapq.heappop(self._waiting)
        image.attempts.begin()
        self._sent[image.request.id] = image
        return image.request

    def answer_received(self, response: pb.ClassifyStreamResponse) -> None:
        """Take note of what the server says of one image."""
        image = self._sent.pop(response.id, None)
        if image is None:
            raise self.call.invalid_response(
                f"an answer has the id {response.id[:128]!a}, which no unanswered image has"
            )
        if response.HasField("response"):
            self.call.answer_received()
            self._results.append((image.key, response.response))
        elif response.HasField("error"):
            failure = self.call.failure_from_message(response.error)
            pause = image.attempts.pause(failure.error, absent=failure.absent) if failure.transient else None
            if pause is None:
                self._results.append((image.key, failure.error))
            else:
                self._push(image, time.monotonic() + pause)
        else:
            raise self.call.invalid_response("an answer of the stream holds neither a result nor an error")

    def stream_ended(self) -> None:
        """Take note that the server ended the stream without an error."""
        if self._sent:
            raise self.call.invalid_response("the server ended the stream before all images were answered")

    def stream_failed(self, failed: grpc.RpcError) -> None:
        """Take note that the stream ended with an error; raise it where the stream should not be taken up again.

        An image that has been sent as often as an image may be is not sent once more: it may be what breaks them all.
        A server that ends a stream because it was idle for too long is no failure: the next image opens another.
        """
        timed_out = isinstance(self.call.failure_of(failed).error, DeadlinePassed)
        if not timed_out or (self._deadline is not None and time.monotonic() >= self._deadline):
            self._reopen_at = time.monotonic() + self.call.pause_after(failed)
        absent = self.call.failure_of(failed).absent
        for image in self._sent.values():
            if absent:  # no server has seen it
                image.attempts.discard_last()
                self._push(image, 0.0)
            elif image.attempts.exhausted:
                self._results.append((image.key, self.call.failure_of(failed).error))
            else:
                self._push(image, 0.0)
        self._sent.clear()

    def take_results(self) -> list[Result]:
        """Return what there is to tell, once."""
        results, self._results = self._results, []
        return results

    def _push(self, image: _Image, due: float) -> None:
        heapq.heappush(self._waiting, (due, image.number, image))


# What `AsyncClient` needs for its streams: images and requests between tasks, and the status of a stream's end.


_CORE_ERROR = "Internal error from Core"  # gRPC's words for a request that it could not send
_STATUS_TIMEOUT = (
    1.0  # seconds for the status that follows; it has arrived already, or is under way inside of this process
)


class AsyncExchange:
    """`PendingImages` between three tasks: the caller's that reads, gRPC's that sends, and one that takes images."""

    def __init__(self, pending: PendingImages) -> None:
        self._pending = pending
        self._changed = asyncio.Event()
        self._stream = 0

    async def read_images(self, images: AsyncIterable[Any] | Iterable[Any]) -> None:
        """Take images while there is room, until there are no more of them."""
        error: BaseException | None = None
        try:
            each = aiter(images) if isinstance(images, AsyncIterable) else _in_threads(images)
            while True:
                while not self._pending.has_room:
                    await self._wait(None)
                self._pending.add(await anext(each))
                self._notify()
        except StopAsyncIteration:
            pass
        except BaseException as raised:  # told by raise_error in the caller's task
            error = raised
        self._pending.finish(error)
        self._notify()

    async def wait_for_work(self) -> bool:
        """Wait until there is something to send or to tell; False when everything is told."""
        while (pause := self._pending.seconds_until_work()) != 0.0:
            await self._wait(pause)
        return not self._pending.done

    def open_stream(self) -> AsyncIterator[pb.ClassifyStreamRequest]:
        """Return the requests of a new stream, for gRPC's task; those of the stream before end."""
        self._stream += 1
        return self._requests(self._stream)

    async def _requests(self, stream: int) -> AsyncIterator[pb.ClassifyStreamRequest]:
        while self._stream == stream and not self._pending.idle:
            if (request := self._pending.next_request()) is not None:
                yield request
            else:
                await self._wait(self._pending.seconds_until_due())

    def close_stream(self) -> None:
        """Let the requests of the stream end; what is taken from here on belongs to the next one."""
        self._stream += 1
        self._notify()

    def stream_ended(self) -> None:
        """Take note that the server ended the stream."""
        self.close_stream()
        self._pending.stream_ended()

    def stream_failed(self, failed: grpc.RpcError) -> None:
        """Take note that the stream broke; raises the error where that is the end of all."""
        self.close_stream()
        self._pending.stream_failed(failed)

    def answer_received(self, response: pb.ClassifyStreamResponse) -> list[Result]:
        """Take note of an answer; returns what there is to tell."""
        self._pending.answer_received(response)
        return self.take_results()

    def take_results(self) -> list[Result]:
        """Return what there is to tell."""
        self._notify()  # there may be room now
        return self._pending.take_results()

    def _notify(self) -> None:
        """Wake everybody who waits."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def _wait(self, seconds: float | None) -> None:
        """Wait until something changes, or for so long."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._changed.wait()


async def _in_threads(images: Iterable[Any]) -> AsyncIterator[Any]:
    """Ask for each image in a thread, since making it may take a while."""
    each, end = iter(images), object()
    while (given := await asyncio.to_thread(next, each, end)) is not end:
        yield given


class AsyncLabelledImages:
    """The messages of one evaluation, and what went wrong while they were made.

    gRPC asks for them in a task of its own and would tell only that something failed there. begun: whether an image has
    been asked for.
    """

    def __init__(self, dataset: Dataset, start: pb.EvaluateRequest) -> None:
        self.begun = False
        self._dataset = dataset
        self._start = start
        self._error: Exception | None = None

    async def messages(self) -> AsyncIterator[pb.EvaluateRequest]:
        """Give them in order; images are read in a thread."""
        yield self._start
        self.begun = True
        try:
            for sample in self._dataset.samples:
                yield await asyncio.to_thread(labelled_image, self._dataset, sample)
        except Exception as error:  # told by raise_local_error in the caller's task; ending the stream ends the call
            self._error = error

    def raise_local_error(self) -> None:
        """Raise what went wrong on this side, if anything did."""
        if self._error is not None:
            raise self._error


class StreamEnd:
    """How a stream ended.

    Where a server ends a stream while a request is being sent, grpc.aio puts an INTERNAL of its own in the place of the
    server's status (grpc/grpc#36066), before or after that arrives. Each of them calls what waits for the end, so
    the server's is noted there.
    """

    def __init__(self, stream: Any) -> None:
        self._status: grpc.aio.AioRpcError | None = None
        self._known = asyncio.Event()
        stream.add_done_callback(self._note)

    def _note(self, stream: Any) -> None:
        details = _run_to_completion(stream.details())
        if self._status is None and details != _CORE_ERROR:
            code, trailing = _run_to_completion(stream.code()), _run_to_completion(stream.trailing_metadata())
            self._status = grpc.aio.AioRpcError(code, grpc.aio.Metadata(), trailing, details)
            self._known.set()

    async def status(self, failed: grpc.RpcError) -> grpc.RpcError | None:
        """Return the server's status, None where it is OK. failed: what grpc.aio raised."""
        if failed.details() != _CORE_ERROR:
            return failed
        with suppress(TimeoutError):
            async with asyncio.timeout(_STATUS_TIMEOUT):
                await self._known.wait()
        if self._status is None:
            return failed
        return None if self._status.code() == grpc.StatusCode.OK else self._status


def _run_to_completion(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Return the result of a coroutine that has nothing to wait for."""
    try:
        coroutine.send(None)
    except StopIteration as done:
        return done.value
    coroutine.close()
    raise AssertionError("the stream has ended, so its status is known")
