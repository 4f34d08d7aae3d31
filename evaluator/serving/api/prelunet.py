"""The PreluNetService of proto/prelunet/v1: translates between its calls and the classifiers."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, aclosing, suppress
from typing import TypeAlias

from ...answer import resolve_top_k
from ...errors import UsageError
from ...pb.prelunet.v1 import prelunet_pb2 as pb
from ...pb.prelunet.v1 import prelunet_pb2_grpc as pb_grpc
from ..models import Models
from ..observability import call_context
from ..observability.call_context import Caller, Context, caller_of
from ..observability.logs import log_incident
from ..options import ServerLimits
from ..repository import Repository
from . import prelunet_messages
from .concurrency import bounded, task_group, uncancelled
from .evaluation import LabelledImage, evaluate
from .prelunet_messages import call_error

SERVICE = pb.DESCRIPTOR.services_by_name["PreluNetService"].full_name

_MAX_INLINE_PREDICTIONS = 100  # converted to a message on the event loop's thread, in 0.2 ms; more in another thread


class PreluNetServicer(pb_grpc.PreluNetServiceServicer):
    """Translates calls.

    max_evaluation_images: maximum number of images of one evaluation; repository: of the models, None if they are
    fixed.
    """

    def __init__(
        self,
        models: Models,
        max_evaluation_images: int = ServerLimits.max_evaluation_images,
        repository: Repository | None = None,
    ) -> None:
        self._models, self._repository = models, repository
        self._max_evaluation_images = max_evaluation_images

    async def Classify(self, request: pb.ClassifyRequest, context: Context) -> pb.ClassifyResponse:  # noqa: N802
        """Classify one image."""
        answer = self._classify(request, caller_of(context))
        del request  # it holds a second copy of the image
        return await answer

    def _classify(
        self, request: pb.ClassifyRequest, caller: Caller, on_admitted: Callable[[], None] | None = None
    ) -> Awaitable[pb.ClassifyResponse]:
        """Validate a request, of Classify or of a stream, and return the awaitable that answers it without the message.

        on_admitted: if given, the request waits while the queue is full, and this is called once it is admitted;
        without it the request is refused instead.
        """
        classifier = self._models.get(request.model)
        contract = classifier.session.contract
        protocol = prelunet_messages.requested_protocol(request, contract)
        top_k = resolve_top_k(request.top_k if request.HasField("top_k") else None, len(contract.classes))
        heatmap, maps = request.heatmap, request.maps  # `answer` must not hold the message
        call_context.record_views(classifier.name, len(protocol.views))

        async def answer(image: bytes) -> pb.ClassifyResponse:
            size, views = len(image), len(protocol.views)
            async with AsyncExitStack() as stack:
                if on_admitted is None:
                    stack.enter_context(classifier.admission.admit_or_refuse(size, views, caller))
                else:
                    await stack.enter_async_context(classifier.admission.admit_or_wait(size, views, caller))
                    on_admitted()
                result = await classifier.answer(image, protocol, top_k, heatmap=heatmap, maps=maps, caller=caller)
            if top_k > _MAX_INLINE_PREDICTIONS:
                return await asyncio.to_thread(prelunet_messages.classify_response, result)
            return prelunet_messages.classify_response(result)

        return answer(request.image)  # an argument: a traceback would keep a variable of the closure alive

    async def ClassifyStream(  # noqa: N802
        self, request_iterator: AsyncIterator[pb.ClassifyStreamRequest], context: Context
    ) -> None:
        """Classify the images of a stream."""
        caller = caller_of(context)
        await classify_stream(
            lambda request, on_admitted: self._classify(request, caller, on_admitted),
            request_iterator,
            lambda answer: uncancelled(context.write(answer)),
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
        call_context.note_done()  # `start` gets no answer of its own

        async def images() -> AsyncGenerator[LabelledImage, None]:
            with suppress(StopAsyncIteration):
                while True:  # without a variable, which would hold a message until the next arrives
                    yield prelunet_messages.image_of(await anext(request_iterator), contract)

        async with aclosing(images()) as labeled:
            report = await evaluate(
                classifier,
                protocol,
                start.dataset,
                labeled,
                lambda progress: uncancelled(context.write(pb.EvaluateResponse(progress=progress))),
                caller_of(context),
                max_images=self._max_evaluation_images,
            )
        await context.write(
            pb.EvaluateResponse(report=await asyncio.to_thread(prelunet_messages.report_message, report))
        )

    async def ListModels(self, request: pb.ListModelsRequest, context: Context) -> pb.ListModelsResponse:  # noqa: ARG002, N802
        """List the served models, and what is wrong with others."""
        problems = {} if self._repository is None else self._repository.problems()
        return pb.ListModelsResponse(
            models=[
                pb.ModelIdentity(name=each.name, sha256=each.session.model_sha256, version=each.version)
                for each in self._models.all()
            ],
            problems=[
                pb.VersionProblem(name=version.name, version=version.number, reason=reason)
                for version, reason in problems.items()
            ],
        )

    async def GetModel(self, request: pb.GetModelRequest, context: Context) -> pb.GetModelResponse:  # noqa: ARG002, N802
        return pb.GetModelResponse(model=prelunet_messages.model_message(self._models.get(request.name)))


# Many images in one call: each request is read, classified and answered independently.
#
# The server reads a request of a stream only when one of its `STREAM_SLOTS` slots is free, and frees the slot once the
# answer has been sent. So gRPC's flow control slows down a client that sends faster than the server classifies, and a
# client that does not read its answers does not fill the server's memory. While a request waits for admission, the next
# one is not read either: admission limits the requests in the queue, and outside it a stream has one message, as any
# other call.
#
# Admission does not limit finished answers that the client has not read; the slots do. A slot stands for about 100 kB
# of answer. A request with a larger answer takes several slots (`slots_for`) before it starts. Its size is only
# estimated, but waiting for the answer itself would be too late: others would be in progress by then. So a stream holds
# at most a few MB of answers, whatever it requests. Later requests wait their turn; none overtakes.


STREAM_SLOTS = 32  # per stream: the maximum number of its unanswered requests
_HEATMAP_SLOTS = 8  # for a PNG file of 0.8 MB; four at a time keep four cores drawing
_CLASSES_PER_SLOT = 1000  # 40 kB on the wire, a few times that as objects
MAX_ID_LENGTH = 128  # characters

# Takes a request and a callback for its admission. The awaitable must not hold the message, only what it needs of it.
ClassifyOne: TypeAlias = Callable[[pb.ClassifyRequest, Callable[[], None]], Awaitable[pb.ClassifyResponse]]
Send: TypeAlias = Callable[[pb.ClassifyStreamResponse], Awaitable[None]]


async def classify_stream(classify: ClassifyOne, requests: AsyncIterator[pb.ClassifyStreamRequest], send: Send) -> None:
    """Answer each request of a stream as soon as its result is ready.

    classify: answers one request; its error becomes the answer to that request; send: sends an answer, and waits while
    the client does not read; never called concurrently. An error of `requests` or `send` ends the stream. Unanswered
    requests are cancelled when the stream ends with an error or is cancelled.
    """
    slots = asyncio.Semaphore(STREAM_SLOTS)
    sending = asyncio.Lock()
    unanswered: set[str] = set()

    async def answer(
        request: pb.ClassifyStreamRequest, refusal: UsageError | None, admission: asyncio.Event, taken: int
    ) -> None:
        """Answer one request and free its slots. admission: set once the next request may be read."""
        if refusal is not None:
            response = pb.ClassifyStreamResponse(error=call_error(refusal, ""))
        else:
            id_ = request.id
            try:
                classified = classify(request.request, admission.set)
                del request  # it holds a second copy of the image
                response = pb.ClassifyStreamResponse(id=id_, response=await classified)
                call_context.record_answer(failed=False)
            except Exception as error:
                call_context.record_answer(failed=True)
                response = pb.ClassifyStreamResponse(id=id_, error=call_error(error, log_incident(error)))
        admission.set()
        async with sending:
            unanswered.discard(response.id)  # not later: the client may reuse the id once it has the answer
            await send(response)
        call_context.note_done()
        for _ in range(taken):
            slots.release()

    async with task_group() as group:
        async for request in bounded(requests, slots):
            taken = slots_for(request.request)
            for _ in range(1, taken):
                await slots.acquire()
            refusal = _id_error(request.id, unanswered)
            if refusal is None:
                unanswered.add(request.id)
            admission = asyncio.Event()
            group.create_task(answer(request, refusal, admission, taken))
            del request  # free it while waiting for the next
            await admission.wait()


def slots_for(request: pb.ClassifyRequest) -> int:
    """Return the number of slots that the answer to a request takes, 1 to `STREAM_SLOTS`."""
    classes = -(-request.top_k // _CLASSES_PER_SLOT)
    return min(STREAM_SLOTS, max(1, classes, _HEATMAP_SLOTS if request.heatmap else 1))


def _id_error(id_: str, unanswered: set[str]) -> UsageError | None:
    """Return the error of a request's id if it is invalid or already in use."""
    if not 1 <= len(id_) <= MAX_ID_LENGTH:
        return UsageError(
            f"a request's `id` should have 1 to {MAX_ID_LENGTH} characters, not {len(id_)}: '{id_[:MAX_ID_LENGTH]}'"
        )
    if id_ in unanswered:
        return UsageError(
            f"id '{id_}' is already in use by a request that has no answer yet; give each its own id until then"
        )
    return None
