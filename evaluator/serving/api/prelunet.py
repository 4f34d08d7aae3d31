"""Our own service: calls of proto/prelunet/v1 translated to and from the classifiers."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass
from typing import TypeAlias

from prelunet.evaluator.errors import UsageError
from prelunet.evaluator.pb.prelunet.v1 import prelunet_pb2 as pb
from prelunet.evaluator.pb.prelunet.v1 import prelunet_pb2_grpc as pb_grpc
from prelunet.evaluator.protocols import EvaluationProtocol
from prelunet.evaluator.serving.api import prelunet_messages
from prelunet.evaluator.serving.api.evaluation import EvaluationProgress, LabelledImage, evaluate
from prelunet.evaluator.serving.api.prelunet_messages import call_error
from prelunet.evaluator.serving.classifier import Classifier
from prelunet.evaluator.serving.models import Models
from prelunet.evaluator.serving.observability import call_context
from prelunet.evaluator.serving.observability.call_context import Caller, Context, caller_of
from prelunet.evaluator.serving.observability.logs import log_incident
from prelunet.evaluator.serving.options import ServerLimits

SERVICE = pb.DESCRIPTOR.services_by_name["PreluNetService"].full_name

_MAX_INLINE_PREDICTIONS = 100  # predictions that are written into a message on the event loop's thread, in 0.2 ms


@dataclass(frozen=True)
class _ParsedRequest:
    """What a request asks of a model. image: encoded; a message gives a new copy each time."""

    classifier: Classifier
    image: bytes
    protocol: EvaluationProtocol
    top_k: int
    heatmap: bool

    async def answer(self, caller: Caller, on_admitted: Callable[[], None] | None) -> pb.ClassifyResponse:
        """Answer it; inside: see `PreluNetServicer._classify`."""
        size, views = len(self.image), len(self.protocol.views)
        async with AsyncExitStack() as stack:
            if on_admitted is None:
                stack.enter_context(self.classifier.admit_or_refuse(size, views, caller.client))
            else:
                await stack.enter_async_context(self.classifier.admit_or_wait(size, views, caller.client))
                on_admitted()
            answer = await self.classifier.answer(
                self.image, self.protocol, self.top_k, heatmap=self.heatmap, caller=caller
            )
        if self.top_k > _MAX_INLINE_PREDICTIONS:
            return await asyncio.to_thread(prelunet_messages.classify_response, answer)
        return prelunet_messages.classify_response(answer)


class PreluNetServicer(pb_grpc.PreluNetServiceServicer):
    """Translates calls. max_evaluation_images: that one evaluation may have."""

    def __init__(self, models: Models, max_evaluation_images: int = ServerLimits.max_evaluation_images) -> None:
        self._models = models
        self._max_evaluation_images = max_evaluation_images

    async def Classify(self, request: pb.ClassifyRequest, context: Context) -> pb.ClassifyResponse:  # noqa: N802
        """Classify one image."""
        answer = self._classify(request, caller_of(context))
        del request  # its image lies in it a second time
        return await answer

    def _classify(
        self, request: pb.ClassifyRequest, caller: Caller, on_admitted: Callable[[], None] | None = None
    ) -> Awaitable[pb.ClassifyResponse]:
        """Read one request, of a call of its own or of a stream; what is returned answers it, without the message.

        inside: given where the request waits while the queue is full, and called when it is in.
        """
        classifier = self._models.get(request.model)
        contract = classifier.session.contract
        protocol, top_k = (
            prelunet_messages.requested_protocol(request, contract),
            prelunet_messages.requested_top_k(request, contract),
        )
        call_context.record_views(classifier.name, len(protocol.views))
        parsed = _ParsedRequest(classifier, request.image, protocol, top_k, request.heatmap)
        return parsed.answer(caller, on_admitted)

    async def ClassifyStream(  # noqa: N802
        self, request_iterator: AsyncIterator[pb.ClassifyStreamRequest], context: Context
    ) -> None:
        """Classify the images of a stream."""
        caller = caller_of(context)
        await classify_stream(
            lambda request, on_admitted: self._classify(request, caller, on_admitted), request_iterator, context.write
        )

    async def Evaluate(  # noqa: N802
        self, request_iterator: AsyncIterator[pb.EvaluateRequest], context: Context
    ) -> None:
        """Evaluate a streamed dataset."""
        start = prelunet_messages.start_of(await anext(request_iterator, None))
        classifier = self._models.get(start.model)
        contract = classifier.session.contract
        protocol = prelunet_messages.requested_protocol(start, contract)
        call_context.record_views(classifier.name, 0)
        call_context.note_done()  # the start, which has no answer of its own

        async def images() -> AsyncGenerator[LabelledImage, None]:
            async for request in request_iterator:
                call_context.record_views(classifier.name, len(protocol.views))
                yield prelunet_messages.image_of(request, contract)

        async def send_progress(progress: EvaluationProgress) -> None:
            await context.write(pb.EvaluateResponse(progress=prelunet_messages.progress_message(progress)))

        async with aclosing(images()) as labelled:
            report = await evaluate(
                classifier,
                protocol,
                start.dataset,
                labelled,
                send_progress,
                caller_of(context),
                max_images=self._max_evaluation_images,
            )
        await context.write(
            pb.EvaluateResponse(report=await asyncio.to_thread(prelunet_messages.report_message, report))
        )

    async def ListModels(self, request: pb.ListModelsRequest, context: Context) -> pb.ListModelsResponse:  # noqa: ARG002, N802
        """Name the models."""
        return pb.ListModelsResponse(models=map(prelunet_messages.model_identity, self._models.all()))

    async def GetModel(self, request: pb.GetModelRequest, context: Context) -> pb.GetModelResponse:  # noqa: ARG002, N802
        """Describe one model."""
        return pb.GetModelResponse(model=prelunet_messages.model_message(self._models.get(request.name)))


# Many images in one call: each is read, classified and answered by itself.
#
# A request of a stream is read only when one of `STREAM_SLOTS` places is free, and its place is free once its answer
# has been sent. So gRPC's own flow control holds up a caller who sends faster than the server classifies, and one who
# does not read the answers does not fill the server's memory. While a request waits before a model's door the next is
# not read either: what is inside is bounded there, and before it a stream has one message, as any other call.
#
# The door lets answers out that nobody reads, so it is the places that bound these: a place is worth about 100 kB, and
# a request whose answer is larger takes as many places as it needs (`slots_for`), before it is begun. Its size is known
# beforehand only roughly; to wait until the answer is there would be too late, since by then others are being made. So
# a stream keeps at most a few MB of answers, whatever it asks; what it asks next waits its turn, none overtakes it.


STREAM_SLOTS = 32  # places of one stream: requests of it that may be unanswered
_HEATMAP_SLOTS = 8  # places: a PNG file of 0.8 MB, so four at a time, which keeps four cores drawing
_CLASSES_PER_SLOT = 1000  # 40 kB when they are sent, and a few times that as objects
MAX_ID_LENGTH = 128  # characters

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
            while await stream.free_slots.acquire() and (request := await anext(requests, None)) is not None:
                slots = slots_for(request.request)
                for _ in range(1, slots):
                    await stream.free_slots.acquire()
                on_admitted = asyncio.Event()
                group.create_task(stream.answer(request, stream.register(request.id), on_admitted, slots))
                del request  # while the next is waited for
                await on_admitted.wait()
    except ExceptionGroup as failures:  # the first failure has cancelled the rest
        raise failures.exceptions[0] from None


def slots_for(request: pb.ClassifyRequest) -> int:
    """Return how many places of a stream the answer to a request takes, 1 to `STREAM_SLOTS`."""
    classes = -(-request.top_k // _CLASSES_PER_SLOT)
    return min(STREAM_SLOTS, max(1, classes, _HEATMAP_SLOTS if request.heatmap else 1))


class _Stream:
    """The unanswered requests of one stream. place: free for one more of them, or a part of one."""

    def __init__(self, classify: Classify, send: Send) -> None:
        self.free_slots = asyncio.Semaphore(STREAM_SLOTS)
        self._classify = classify
        self._send = send
        self._sending = asyncio.Lock()
        self._unanswered: set[str] = set()

    def register(self, id_: str) -> UsageError | None:
        """Take the id of a request that was read; returns what is wrong with it, if it cannot be told from others."""
        if not 1 <= len(id_) <= MAX_ID_LENGTH:
            return UsageError(
                f"a request's `id` should have 1 to {MAX_ID_LENGTH} characters, not {len(id_)}: '{id_[:MAX_ID_LENGTH]}'"
            )
        if id_ in self._unanswered:
            return UsageError(f"the request with id '{id_}' has no answer yet; give each its own id until then")
        self._unanswered.add(id_)
        return None

    async def answer(
        self, request: pb.ClassifyStreamRequest, refusal: UsageError | None, on_admitted: asyncio.Event, slots: int
    ) -> None:
        """Answer one request and leave its places. inside: set once it holds up the next no more."""
        if refusal is not None:
            response = pb.ClassifyStreamResponse(error=call_error(refusal, ""))
        else:
            id_ = request.id
            try:
                answer = self._classify(request.request, on_admitted.set)
                del request  # its image lies in it a second time
                response = pb.ClassifyStreamResponse(id=id_, response=await answer)
                call_context.record_answer(failed=False)
            except Exception as error:
                call_context.record_answer(failed=True)
                response = pb.ClassifyStreamResponse(id=id_, error=call_error(error, log_incident(error)))
        on_admitted.set()
        async with self._sending:
            self._unanswered.discard(response.id)  # not later: who has the answer may use the id again
            await self._send(response)
        call_context.note_done()
        for _ in range(slots):
            self.free_slots.release()
