"""Many images in one call: each is read, classified and answered by itself.

A request of a stream is read only when one of `HELD` places is free, and its place is free once its answer has been
sent. So gRPC's own flow control holds up a caller who sends faster than the server classifies, and one who does not
read the answers does not fill the server's memory. While a request waits before a model's door the next is not read
either: what is inside is bounded there, and before it a stream has one message, as any other call.

The door lets answers out that nobody reads, so it is the places that bound these: a place is worth about 100 kB, and
a request whose answer is larger takes as many places as it needs (`places_of`), before it is begun. Its size is known
beforehand only roughly; to wait until the answer is there would be too late, since by then others are being made. So
a stream keeps at most a few MB of answers, whatever it asks; what it asks next waits its turn, none overtakes it.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TypeAlias

from prelunet.evaluator.errors import UsageError
from prelunet.evaluator.pb.prelunet.v1 import prelunet_pb2 as pb
from prelunet.evaluator.serving import calls
from prelunet.evaluator.serving.logs import incident_of
from prelunet.evaluator.serving.messages import call_error

HELD = 32  # places of one stream: requests of it that may be unanswered
_OF_A_HEAT_MAP = 8  # places: a PNG file of 0.8 MB, so four at a time, which keeps four cores drawing
_CLASSES_A_PLACE = 1000  # 40 kB when they are sent, and a few times that as objects
MAX_ID = 128  # characters

# Of a request and what to call once it is let in; what is awaited holds nothing of the message but what it needs.
Classify: TypeAlias = Callable[[pb.ClassifyRequest, Callable[[], None]], Awaitable[pb.ClassifyResponse]]
Send: TypeAlias = Callable[[pb.ClassifyStreamResponse], Awaitable[None]]


async def classify_stream(classify: Classify, requests: AsyncIterator[pb.ClassifyStreamRequest], send: Send) -> None:
    """Answer the requests of a stream, each as soon as it can be.

    classify: as a call of its own would; its error is the answer to that request. send: waits while the caller reads
    no further; it is never called twice at a time. An error of `requests` or of `send` ends the stream; then, and when
    it is cancelled, all that is unanswered is cancelled too.
    """
    stream = _Stream(classify, send)
    try:
        async with asyncio.TaskGroup() as group:
            while await stream.place.acquire() and (request := await anext(requests, None)) is not None:
                places = places_of(request.request)
                for _ in range(1, places):
                    await stream.place.acquire()
                inside = asyncio.Event()
                group.create_task(stream.answer(request, stream.enter(request.id), inside, places))
                del request  # while the next is waited for
                await inside.wait()
    except ExceptionGroup as failures:  # the first failure has cancelled the rest
        raise failures.exceptions[0] from None


def places_of(request: pb.ClassifyRequest) -> int:
    """Return how many places of a stream the answer to a request takes, 1 to `HELD`."""
    classes = -(-request.top_k // _CLASSES_A_PLACE)
    return min(HELD, max(1, classes, _OF_A_HEAT_MAP if request.heatmap else 1))


class _Stream:
    """The unanswered requests of one stream. place: free for one more of them, or a part of one."""

    def __init__(self, classify: Classify, send: Send) -> None:
        self.place = asyncio.Semaphore(HELD)
        self._classify = classify
        self._send = send
        self._sending = asyncio.Lock()
        self._unanswered: set[str] = set()

    def enter(self, id_: str) -> UsageError | None:
        """Take the id of a request that was read; returns what is wrong with it, if it cannot be told from others."""
        if not 1 <= len(id_) <= MAX_ID:
            return UsageError(
                f"a request's `id` should have 1 to {MAX_ID} characters, not {len(id_)}: '{id_[:MAX_ID]}'"
            )
        if id_ in self._unanswered:
            return UsageError(f"the request with id '{id_}' has no answer yet; give each its own id until then")
        self._unanswered.add(id_)
        return None

    async def answer(
        self, request: pb.ClassifyStreamRequest, refusal: UsageError | None, inside: asyncio.Event, places: int
    ) -> None:
        """Answer one request and leave its places. inside: set once it holds up the next no more."""
        if refusal is not None:
            response = pb.ClassifyStreamResponse(error=call_error(refusal, ""))
        else:
            id_ = request.id
            try:
                answer = self._classify(request.request, inside.set)
                del request  # its image lies in it a second time
                response = pb.ClassifyStreamResponse(id=id_, response=await answer)
                calls.note_answer(failed=False)
            except Exception as error:
                calls.note_answer(failed=True)
                response = pb.ClassifyStreamResponse(id=id_, error=call_error(error, incident_of(error)))
        inside.set()
        async with self._sending:
            self._unanswered.discard(response.id)  # not later: who has the answer may use the id again
            await self._send(response)
        for _ in range(places):
            self.place.release()
