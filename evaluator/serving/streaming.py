"""Many images in one call: each is read, classified and answered by itself.

A request of a stream is read only when one of `HELD` places is free, and its place is free once its answer has been
sent. So gRPC's own flow control holds up a caller who sends faster than the server classifies, and one who does not
read the answers does not fill the server's memory.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TypeAlias

from evaluator.errors import UsageError
from evaluator.pb.prelunet.v1 import prelunet_pb2 as pb
from evaluator.serving.logs import incident_of
from evaluator.serving.messages import call_error

HELD = 32  # requests of one stream that may be unanswered
MAX_ID = 128  # characters

Classify: TypeAlias = Callable[[pb.ClassifyRequest], Awaitable[pb.ClassifyResponse]]
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
                group.create_task(stream.answer(request, stream.enter(request.id)))
    except ExceptionGroup as failures:  # the first failure has cancelled the rest
        raise failures.exceptions[0] from None


class _Stream:
    """The unanswered requests of one stream. place: free for one more of them."""

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

    async def answer(self, request: pb.ClassifyStreamRequest, refusal: UsageError | None) -> None:
        """Answer one request and leave its place."""
        response = await self._response(request, refusal)
        async with self._sending:
            self._unanswered.discard(response.id)  # not later: who has the answer may use the id again
            await self._send(response)
        self.place.release()

    async def _response(
        self, request: pb.ClassifyStreamRequest, refusal: UsageError | None
    ) -> pb.ClassifyStreamResponse:
        if refusal is not None:
            return pb.ClassifyStreamResponse(error=call_error(refusal, ""))
        try:
            return pb.ClassifyStreamResponse(id=request.id, response=await self._classify(request.request))
        except Exception as error:
            return pb.ClassifyStreamResponse(id=request.id, error=call_error(error, incident_of(error)))
