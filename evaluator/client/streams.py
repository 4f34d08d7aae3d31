"""The stream of `classify_many`.

`PendingImages` is the state of one `classify_many`: which images to send, which are unanswered, which to retry. It
neither waits nor sends. `Exchange` does that, and calls:

    build, add, finish            for each image of the caller's iterable, while there is room, and at its end
    next_request                  for the next request to send, when it is due
    answer_received               for each response of the server
    stream_ended, stream_failed   when a stream ends
    take_results                  for the results to give to the caller
"""

import heapq
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, TypeAlias

import grpc

from ..answer import Answer
from ..errors import DeadlinePassed, ImageError, PreluNetError, UsageError
from ..image_input import encoded_image
from ..pb.prelunet.v1 import prelunet_pb2 as pb
from .backends import Backend
from .calls import Attempts, Call, ClientSettings
from .messages import read_answer, stream_request

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
        request: Callable[..., pb.ClassifyRequest],
        deadline: float | None,
        request_id: str | None,
        max_pending: int,
    ) -> None:
        if max_pending < 1:
            raise UsageError(f"max_pending is {max_pending}, but it must be at least 1")
        request()  # report an invalid option now, not with the first image
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

    def build(self, item: object) -> "_Image | Result":
        """Build the request of the next item of the caller's iterable, which may take long: (key, image), or an image,
        whose key is its position. Return the result instead for an image that cannot be sent.
        """
        number = self._added
        self._added += 1
        key, image = item if isinstance(item, tuple) and len(item) == 2 else (number, item)
        try:
            request = stream_request(number, self._request(encoded_image(image)))
        except ImageError as error:
            return key, self.call.with_request_id(error)
        except UsageError as error:
            raise UsageError(f"image {number} of classify_many: {error}, or (id, image)") from error
        attempts = Attempts(self._settings.retries, self._settings.budget, self._deadline)
        return _Image(key, number, request, attempts)

    def add(self, built: "_Image | Result") -> None:
        """Add what `build` returned."""
        if isinstance(built, _Image):
            self._push(built, time.monotonic())
        else:
            self._results.append(built)

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
            text = "the timeout for all images has passed; give a longer one, or None for no limit"
            raise self.call.with_request_id(DeadlinePassed(text))
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


class Exchange:
    """`PendingImages` shared by three threads or tasks: the caller's takes answers, gRPC's sends requests, and a third
    reads images, because a broken stream may be reopened while the iterable still produces the next image.

    open_stream: makes a call of these requests and yields its responses.
    """

    def __init__(
        self,
        pending: PendingImages,
        backend: Backend,
        open_stream: Callable[[AsyncGenerator[Any, None]], AsyncGenerator[Any, None]],
    ) -> None:
        self._pending = pending
        self._backend = backend
        self._open_stream = open_stream
        self._condition = backend.Condition()
        self._stopped = False
        self._stream = 0  # the number of the stream that may send requests

    async def answers(self, images: Any) -> AsyncGenerator[tuple[Any, Answer | PreluNetError], None]:
        """Yield the answers; a stream is open while there is something to send or to wait for."""
        reading = self._backend.start(self._read(images))
        try:
            while await self._wait_for_work():
                if results := self._take_results():
                    for result in results:
                        yield await self._to_answer(result)
                    continue
                responses = self._open_stream(self._requests(self._stream))
                try:
                    async with aclosing(responses):
                        async for response in responses:
                            with self._condition:
                                self._pending.answer_received(response)
                            for result in self._take_results():
                                yield await self._to_answer(result)
                except grpc.RpcError as failed:
                    with self._condition:
                        self._close_stream()  # first: further images belong to the next stream
                        self._pending.stream_failed(failed)
                else:
                    with self._condition:
                        self._close_stream()
                        self._pending.stream_ended()
            self._pending.raise_error()
        finally:
            self._stopped = True
            self._close_stream()
            await self._backend.stop(reading)  # leave the caller's iterable before returning

    async def _read(self, images: Any) -> None:
        """Add images while there is room, until there are no more."""
        error: BaseException | None = None
        try:
            async with aclosing(self._backend.map(self._pending.build, images)) as iterator:
                while await self._has_room():
                    built = await anext(iterator)
                    with self._condition:
                        self._pending.add(built)
                        self._condition.notify_all()
        except StopAsyncIteration:
            pass
        except BaseException as raised:  # raise_error raises it for the caller
            error = raised
        with self._condition:
            self._pending.finish(error)
            self._condition.notify_all()

    async def _has_room(self) -> bool:
        """Wait until there is room for an image; False once the caller has stopped."""
        with self._condition:
            while not self._pending.has_room and not self._stopped:
                await self._condition.changed()
            return not self._stopped

    async def _wait_for_work(self) -> bool:
        """Wait until there is something to send or a result to take; False when all is done."""
        with self._condition:
            while (pause := self._pending.seconds_until_work()) != 0.0:
                await self._condition.changed(pause)
            return not self._pending.done

    async def _requests(self, stream: int) -> AsyncGenerator[pb.ClassifyStreamRequest, None]:
        """Yield the requests of a stream until there are no more, or the stream is closed."""
        while (request := await self._next_request(stream)) is not None:
            yield request

    async def _next_request(self, stream: int) -> pb.ClassifyStreamRequest | None:
        with self._condition:
            while self._stream == stream and not self._pending.idle:
                if (request := self._pending.next_request()) is not None:
                    return request
                await self._condition.changed(self._pending.seconds_until_due())
            return None

    def _close_stream(self) -> None:
        with self._condition:
            self._stream += 1
            self._condition.notify_all()

    def _take_results(self) -> list[Result]:
        with self._condition:
            self._condition.notify_all()  # there may be room now
            return self._pending.take_results()

    async def _to_answer(self, result: Result) -> tuple[Any, Answer | PreluNetError]:
        key, outcome = result
        return key, await read_answer(outcome, self._backend) if isinstance(outcome, pb.ClassifyResponse) else outcome
