"""The state of one `classify_many`: which images to send, which are unanswered, which to retry.

`PendingImages` neither waits nor sends. `Client` and `AsyncClient` do that, each in its own way, and call:

    add, finish                   for each image of the caller's iterable, while there is room, and at its end
    next_request                  for the next request to send, when it is due
    answer_received               for each response of the server
    stream_ended, stream_failed   when a stream ends
    take_results                  for the results to give to the caller
"""

import asyncio
import heapq
import time
from collections.abc import AsyncIterable, AsyncIterator, Callable, Coroutine, Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import grpc
import grpc.aio

from prelunet.evaluator.client.calls import Attempts, Call, ClientSettings
from prelunet.evaluator.client.messages import labelled_image, stream_request
from prelunet.evaluator.errors import DeadlinePassed, ImageError, PreluNetError, UsageError
from prelunet.evaluator.pb.prelunet.v1 import prelunet_pb2 as pb

if TYPE_CHECKING:
    from prelunet.evaluator.datasets.dataset import Dataset

MAX_PENDING = 32  # images; the server also stops reading a stream at this number of unanswered images

Result: TypeAlias = "tuple[Any, pb.ClassifyResponse | PreluNetError]"
"""The caller's key of an image, and its response or error."""


@dataclass(frozen=True)
class _Image:
    """One unanswered image. number: its position among all images."""

    key: Any
    number: int
    request: pb.ClassifyStreamRequest
    attempts: Attempts


class PendingImages:
    """The images of one `classify_many`; for one thread at a time.

    request: builds the request of an image; deadline: for all images; max_pending: maximum number of images held.
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
            raise UsageError(f"max_pending is {max_pending}, but it must be at least 1")
        request(b"")  # report an invalid option now, not with the first image
        self.call = Call(settings, deadline, request_id)  # the stream, with all its attempts
        self._settings = settings
        self._request = request
        self._deadline = deadline
        self._max_pending = max_pending
        self._added = 0
        self._finished = False
        self._error: BaseException | None = None
        self._waiting: list[tuple[float, int, _Image]] = []  # a heap: when it is due, number, image
        self._sent: dict[str, _Image] = {}
        self._results: list[Result] = []
        self._reopen_at = 0.0  # on the clock of time.monotonic(): when a broken stream may be reopened

    @property
    def has_room(self) -> bool:
        """Whether one more image may be added."""
        return len(self._waiting) + len(self._sent) + len(self._results) < self._max_pending

    @property
    def idle(self) -> bool:
        """Whether the stream has nothing left to do: no image is to be sent or answered, and there are results for the
        caller or no more images.
        """
        return not self._waiting and not self._sent and (self._finished or bool(self._results))

    @property
    def done(self) -> bool:
        """Whether every image has been answered and its result taken."""
        return self.idle and not self._results

    def add(self, item: object) -> None:
        """Add an item of the caller's iterable: (key, image), or an image, whose key is its position."""
        number = self._added
        self._added += 1
        match item:
            case bytes():
                key, image = number, item
            case (key, bytes() as image):
                pass
            case _:
                raise UsageError(f"image {number} of classify_many is {type(item).__name__}; give bytes or (id, bytes)")
        try:
            request = stream_request(number, self._request(image))
        except ImageError as error:
            self._results.append((key, error))
        else:
            self._push(_Image(key, number, request, self._settings.attempts(self._deadline)), time.monotonic())

    def finish(self, error: BaseException | None = None) -> None:
        """Note that there are no more images. error: what the caller's iterable raised."""
        self._finished = True
        self._error = error

    def raise_error(self) -> None:
        """Raise what the caller's iterable raised, if anything."""
        if self._error is not None:
            raise self._error

    def seconds_until_due(self) -> float | None:
        """Return the seconds until an image can be sent, None if none is waiting."""
        if not self._waiting:
            return None
        return max(0.0, max(self._waiting[0][0], self._reopen_at) - time.monotonic())

    def seconds_until_work(self) -> float | None:
        """Return the seconds until a stream is needed or the deadline passes, None if only a new image can cause that.

        Returns 0 also if there are results to take. Raises DeadlinePassed after the deadline. For use while no stream
        is open; a stream would end by itself at the deadline.
        """
        due = 0.0 if self.idle or self._results else self.seconds_until_due()
        if due == 0.0 or self._deadline is None:
            return due
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise DeadlinePassed("the timeout for all images has passed; give a longer one, or None for no limit")
        return left if due is None else min(due, left)

    def next_request(self) -> pb.ClassifyStreamRequest | None:
        """Return the request to send now, None if none is due."""
        if self.seconds_until_due() != 0.0:
            return None
        _, _, image = heapq.heappop(self._waiting)
        image.attempts.begin()
        self._sent[image.request.id] = image
        return image.request

    def answer_received(self, response: pb.ClassifyStreamResponse) -> None:
        """Handle the server's response for one image."""
        image = self._sent.pop(response.id, None)
        if image is None:
            raise self.call.invalid_response(
                f"the id {response.id[:128]!a} of a response belongs to no unanswered image"
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
            raise self.call.invalid_response("a response of the stream holds neither a result nor an error")

    def stream_ended(self) -> None:
        """Handle the end of the stream without an error."""
        if self._sent:
            raise self.call.invalid_response("the server ended the stream before all images were answered")

    def stream_failed(self, failed: grpc.RpcError) -> None:
        """Handle the end of the stream with an error; raise it if the stream should not be reopened.

        An image that has used all its attempts is not sent again, because it may be what breaks the streams.
        A stream that the server ended because it was idle has not failed: the next image opens another.
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
        """Return and clear the results."""
        results, self._results = self._results, []
        return results

    def _push(self, image: _Image, due: float) -> None:
        heapq.heappush(self._waiting, (due, image.number, image))


# The streams of `AsyncClient`: images and requests between tasks, and the final status of a stream.


_CORE_ERROR = "Internal error from Core"  # gRPC's text for a request that it could not send
_STATUS_TIMEOUT = 1.0  # seconds for the status that follows; it has arrived, or is on its way within this process


class AsyncExchange:
    """`PendingImages` shared by three tasks: the caller's reads results, gRPC's sends, and one reads images."""

    def __init__(self, pending: PendingImages) -> None:
        self._pending = pending
        self._changed = asyncio.Event()
        self._stream = 0

    async def read_images(self, images: AsyncIterable[Any] | Iterable[Any]) -> None:
        """Add images while there is room, until there are no more."""
        error: BaseException | None = None
        try:
            iterator = aiter(images) if isinstance(images, AsyncIterable) else _in_threads(images)
            while True:
                while not self._pending.has_room:
                    await self._wait(None)
                self._pending.add(await anext(iterator))
                self._notify()
        except StopAsyncIteration:
            pass
        except BaseException as raised:  # raise_error raises it in the caller's task
            error = raised
        self._pending.finish(error)
        self._notify()

    async def wait_for_work(self) -> bool:
        """Wait until there is something to send or a result to take; False when all is done."""
        while (pause := self._pending.seconds_until_work()) != 0.0:
            await self._wait(pause)
        return not self._pending.done

    def open_stream(self) -> AsyncIterator[pb.ClassifyStreamRequest]:
        """Return the requests of a new stream, for gRPC's task; this ends the requests of the previous stream."""
        self._stream += 1
        return self._requests(self._stream)

    async def _requests(self, stream: int) -> AsyncIterator[pb.ClassifyStreamRequest]:
        while self._stream == stream and not self._pending.idle:
            if (request := self._pending.next_request()) is not None:
                yield request
            else:
                await self._wait(self._pending.seconds_until_due())

    def close_stream(self) -> None:
        """End the requests of the stream; further images belong to the next one."""
        self._stream += 1
        self._notify()

    def stream_ended(self) -> None:
        """Handle the end of the stream by the server."""
        self.close_stream()
        self._pending.stream_ended()

    def stream_failed(self, failed: grpc.RpcError) -> None:
        """Handle a broken stream; raise the error if it should not be reopened."""
        self.close_stream()
        self._pending.stream_failed(failed)

    def answer_received(self, response: pb.ClassifyStreamResponse) -> list[Result]:
        """Handle a response and return the results."""
        self._pending.answer_received(response)
        return self.take_results()

    def take_results(self) -> list[Result]:
        """Return and clear the results."""
        self._notify()  # there may be room now
        return self._pending.take_results()

    def _notify(self) -> None:
        """Wake all waiting tasks."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def _wait(self, seconds: float | None) -> None:
        """Wait until something changes, for at most `seconds`."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._changed.wait()


async def _in_threads(images: Iterable[Any]) -> AsyncIterator[Any]:
    """Yield the images of an iterable, fetching each in a thread, since that may take a while."""
    iterator, end = iter(images), object()
    while (item := await asyncio.to_thread(next, iterator, end)) is not end:
        yield item


class AsyncLabelledImages:
    """The messages of one evaluation, and the error that occurred while reading images.

    gRPC iterates over them in its own task and would only report that something failed there. begun: whether an image
    has been requested.
    """

    def __init__(self, dataset: "Dataset", start: pb.EvaluateRequest) -> None:
        self.begun = False
        self._dataset = dataset
        self._start = start
        self._error: Exception | None = None

    async def messages(self) -> AsyncIterator[pb.EvaluateRequest]:
        """Yield the messages in order; images are read in a thread."""
        yield self._start
        self.begun = True
        try:
            for sample in self._dataset.samples:
                yield await asyncio.to_thread(labelled_image, self._dataset, sample)
        except Exception as error:
            self._error = error  # raise_local_error raises it in the caller's task; ending the stream ends the call

    def raise_local_error(self) -> None:
        """Raise the error of this side, if there is one."""
        if self._error is not None:
            raise self._error


class StreamEnd:
    """How a stream ended.

    If a server ends a stream while a request is being sent, grpc.aio replaces the server's status by its own INTERNAL
    (grpc/grpc#36066), before or after the former arrives. Both run the done callbacks, so a callback records the
    server's status.
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
        """Return the server's status, None if it is OK. failed: what grpc.aio raised."""
        if failed.details() != _CORE_ERROR:
            return failed
        with suppress(TimeoutError):
            async with asyncio.timeout(_STATUS_TIMEOUT):
                await self._known.wait()
        if self._status is None:
            return failed
        return None if self._status.code() == grpc.StatusCode.OK else self._status


def _run_to_completion(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Return the result of a coroutine that does not need to wait."""
    try:
        coroutine.send(None)
    except StopIteration as done:
        return done.value
    coroutine.close()
    raise AssertionError("the stream has ended, so its status is known")
