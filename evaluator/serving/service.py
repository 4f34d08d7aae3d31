"""Our own service: calls of proto/prelunet/v1 translated to and from the classifiers."""

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass
from typing import Any, TypeAlias

import grpc.aio

from prelunet.evaluator.pb.prelunet.v1 import prelunet_pb2 as pb
from prelunet.evaluator.pb.prelunet.v1 import prelunet_pb2_grpc as pb_grpc
from prelunet.evaluator.protocols import Protocol
from prelunet.evaluator.serving import calls, messages
from prelunet.evaluator.serving.caller import Caller
from prelunet.evaluator.serving.classifier import Classifier
from prelunet.evaluator.serving.evaluation import LabelledImage, Progress, evaluate
from prelunet.evaluator.serving.models import Models
from prelunet.evaluator.serving.options import Limits
from prelunet.evaluator.serving.streaming import classify_stream

SERVICE = pb.DESCRIPTOR.services_by_name["PreluNetService"].full_name

_AT_ONCE = 100  # predictions that are written into a message on the event loop's thread, in 0.2 ms

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"


def caller_of(context: Context) -> Caller:
    """Return who calls, until when, and under which request id."""
    remaining = context.time_remaining()
    call = calls.current()
    return Caller(
        client=context.peer(),
        deadline=None if remaining is None else time.monotonic() + remaining,
        request_id=call.request_id if call else "",
    )


@dataclass(frozen=True)
class _Asked:
    """What a request asks of a model. image: encoded; a message gives a new copy each time."""

    classifier: Classifier
    image: bytes
    protocol: Protocol
    top_k: int
    heatmap: bool

    async def answer(self, caller: Caller, inside: Callable[[], None] | None) -> pb.ClassifyResponse:
        """Answer it; inside: see `PreluNetServicer._classify`."""
        size, views = len(self.image), len(self.protocol.views)
        async with AsyncExitStack() as door:
            if inside is None:
                door.enter_context(self.classifier.admitted(size, views, caller.client))
            else:
                await door.enter_async_context(self.classifier.entered(size, views, caller.client))
                inside()
            answer = await self.classifier.answer(
                self.image, self.protocol, self.top_k, heatmap=self.heatmap, caller=caller
            )
        if self.top_k > _AT_ONCE:
            return await asyncio.to_thread(messages.classify_response, answer)
        return messages.classify_response(answer)


class PreluNetServicer(pb_grpc.PreluNetServiceServicer):
    """Translates calls. evaluation_images: that one evaluation may have."""

    def __init__(self, models: Models, evaluation_images: int = Limits.max_evaluation_images) -> None:
        self._models = models
        self._evaluation_images = evaluation_images

    async def Classify(self, request: pb.ClassifyRequest, context: Context) -> pb.ClassifyResponse:  # noqa: N802
        """Classify one image."""
        answer = self._classify(request, caller_of(context))
        del request  # its image lies in it a second time
        return await answer

    def _classify(
        self, request: pb.ClassifyRequest, caller: Caller, inside: Callable[[], None] | None = None
    ) -> Awaitable[pb.ClassifyResponse]:
        """Read one request, of a call of its own or of a stream; what is returned answers it, without the message.

        inside: given where the request waits while the queue is full, and called when it is in.
        """
        classifier = self._models.get(request.model)
        contract = classifier.session.contract
        protocol, top_k = messages.protocol_asked(request, contract), messages.top_k_asked(request, contract)
        calls.note(classifier.name, len(protocol.views))
        asked = _Asked(classifier, request.image, protocol, top_k, request.heatmap)
        return asked.answer(caller, inside)

    async def ClassifyStream(  # noqa: N802
        self, request_iterator: AsyncIterator[pb.ClassifyStreamRequest], context: Context
    ) -> None:
        """Classify the images of a stream."""
        caller = caller_of(context)
        await classify_stream(
            lambda request, inside: self._classify(request, caller, inside), request_iterator, context.write
        )

    async def Evaluate(  # noqa: N802
        self, request_iterator: AsyncIterator[pb.EvaluateRequest], context: Context
    ) -> None:
        """Evaluate a streamed dataset."""
        start = messages.start_of(await anext(request_iterator, None))
        classifier = self._models.get(start.model)
        contract = classifier.session.contract
        protocol = messages.protocol_asked(start, contract)
        calls.note(classifier.name, 0)

        async def images() -> AsyncGenerator[LabelledImage, None]:
            async for request in request_iterator:
                calls.note(classifier.name, len(protocol.views))
                yield messages.image_of(request, contract)

        async def tell(progress: Progress) -> None:
            await context.write(pb.EvaluateResponse(progress=messages.progress_message(progress)))

        async with aclosing(images()) as labelled:
            report = await evaluate(
                classifier, protocol, start.dataset, labelled, tell, caller_of(context), most=self._evaluation_images
            )
        await context.write(pb.EvaluateResponse(report=await asyncio.to_thread(messages.report_message, report)))

    async def ListModels(self, request: pb.ListModelsRequest, context: Context) -> pb.ListModelsResponse:  # noqa: ARG002, N802
        """Name the models."""
        return pb.ListModelsResponse(models=map(messages.model_identity, self._models.all()))

    async def GetModel(self, request: pb.GetModelRequest, context: Context) -> pb.GetModelResponse:  # noqa: ARG002, N802
        """Describe one model."""
        return pb.GetModelResponse(model=messages.model_message(self._models.get(request.name)))
