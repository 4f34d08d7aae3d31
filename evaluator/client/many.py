"""The images of one `classify_many`: which are to be sent, which are unanswered, which are asked again.

Nothing here waits or sends; `Client` and `AsyncClient` do that, each in its own way, and hold to what this says:

    take, finish      what the caller's iterable gives, while there is room
    next_request      what to send, when it is due
    answered          what the server says
    ended, broke      how a stream came to its end
    take_results      what to give to the caller
"""

import heapq
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import grpc

from prelunet.evaluator.client.calls import Call, Terms
from prelunet.evaluator.client.requests import stream_request
from prelunet.evaluator.client.retries import Attempts
from prelunet.evaluator.errors import DeadlinePassed, ImageError, PreluNetError, UsageError
from prelunet.evaluator.pb.prelunet.v1 import prelunet_pb2 as pb

AHEAD = 32  # images; a server leaves as many of a stream unanswered before it reads no further

Told: TypeAlias = "tuple[Any, pb.ClassifyResponse | PreluNetError]"
"""The caller's key of an image, and what became of it."""


@dataclass(frozen=True)
class _Image:
    """One image that has no answer yet. number: its place among all."""

    key: Any
    number: int
    request: pb.ClassifyStreamRequest
    attempts: Attempts


class Many:
    """The images of one `classify_many`; for one thread at a time.

    request: makes a request of an image; deadline: of all of them; ahead: so many images are held at most.
    """

    def __init__(
        self,
        terms: Terms,
        request: Callable[[bytes], pb.ClassifyRequest],
        deadline: float | None,
        request_id: str | None,
        ahead: int,
    ) -> None:
        if ahead < 1:
            raise UsageError(f"ahead is {ahead}, but at least one image has to be held")
        request(b"")  # an option that cannot be is told now, not with the first image
        self.call = Call(terms, deadline, request_id)  # the stream, through all its attempts
        self._terms = terms
        self._request = request
        self._deadline = deadline
        self._ahead = ahead
        self._taken = 0
        self._finished = False
        self._error: BaseException | None = None
        self._waiting: list[tuple[float, int, _Image]] = []  # a heap: when it is due, number, image
        self._sent: dict[str, _Image] = {}
        self._results: list[Told] = []
        self._open_from = 0.0  # on the clock of time.monotonic(): when a stream that broke may be taken up again

    @property
    def room(self) -> bool:
        """Whether one more image may be taken."""
        return len(self._waiting) + len(self._sent) + len(self._results) < self._ahead

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

    def take(self, given: object) -> None:
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
            self._push(_Image(key, number, request, self._terms.attempts(self._deadline)), time.monotonic())

    def finish(self, error: BaseException | None = None) -> None:
        """Take note that there are no more images; error: what the caller's iterable raised."""
        self._finished = True
        self._error = error

    def raise_error(self) -> None:
        """Raise what the caller's iterable raised, if anything."""
        if self._error is not None:
            raise self._error

    def due_in(self) -> float | None:
        """Return the seconds until something can be sent; None where nothing waits."""
        if not self._waiting:
            return None
        return max(0.0, max(self._waiting[0][0], self._open_from) - time.monotonic())

    def work_in(self) -> float | None:
        """Return the seconds until a stream is needed or the time is over; None where that takes a new image.

        0 where there is something to tell too. Raises DeadlinePassed when the time is over; for use while there is no
        stream, which would end then.
        """
        due = 0.0 if self.idle or self._results else self.due_in()
        if due == 0.0 or self._deadline is None:
            return due
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise DeadlinePassed("the time for all images is over; give it more, or None to wait for ever")
        return left if due is None else min(due, left)

    def next_request(self) -> pb.ClassifyStreamRequest | None:
        """Return what should be sent now; None where nothing is due."""
        if self.due_in() != 0.0:
            return None
        _, _, image = heapq.heappop(self._waiting)
        image.attempts.begin()
        self._sent[image.request.id] = image
        return image.request

    def answered(self, response: pb.ClassifyStreamResponse) -> None:
        """Take note of what the server says of one image."""
        image = self._sent.pop(response.id, None)
        if image is None:
            raise self.call.broken(f"an answer has the id {response.id[:128]!a}, which no unanswered image has")
        if response.HasField("response"):
            self.call.answered()
            self._results.append((image.key, response.response))
        elif response.HasField("error"):
            failure = self.call.failure_told(response.error)
            pause = image.attempts.pause(failure.error, absent=failure.absent) if failure.passing else None
            if pause is None:
                self._results.append((image.key, failure.error))
            else:
                self._push(image, time.monotonic() + pause)
        else:
            raise self.call.broken("an answer of the stream holds neither a result nor an error")

    def ended(self) -> None:
        """Take note that the server ended the stream without an error."""
        if self._sent:
            raise self.call.broken("the server ended the stream before all images were answered")

    def broke(self, failed: grpc.RpcError) -> None:
        """Take note that the stream ended with an error; raise it where the stream should not be taken up again.

        An image that has been sent as often as an image may be is not sent once more: it may be what breaks them all.
        """
        self._open_from = time.monotonic() + self.call.pause_after(failed)
        absent = self.call.failure_of(failed).absent
        for image in self._sent.values():
            if absent:  # no server has seen it
                image.attempts.take_back()
                self._push(image, 0.0)
            elif image.attempts.spent:
                self._results.append((image.key, self.call.failure_of(failed).error))
            else:
                self._push(image, 0.0)
        self._sent.clear()

    def take_results(self) -> list[Told]:
        """Return what there is to tell, once."""
        results, self._results = self._results, []
        return results

    def _push(self, image: _Image, due: float) -> None:
        heapq.heappush(self._waiting, (due, image.number, image))
