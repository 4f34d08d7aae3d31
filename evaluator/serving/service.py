"""Our own service: calls of proto/prelunet/v1 translated to and from the classifiers."""

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import Any, TypeAlias

import grpc.aio

from evaluator.pb.prelunet.v1 import prelunet_pb2 as pb
from evaluator.pb.prelunet.v1 import prelunet_pb2_grpc as pb_grpc
from evaluator.serving import calls, messages
from evaluator.serving.caller import Caller
from evaluator.serving.evaluation import LabelledImage, Progress, evaluate
from evaluator.serving.models import Models
from evaluator.serving.streaming import classify_stream

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


class PreluNetServicer(pb_grpc.PreluNetServiceServicer):
    """Translates calls."""

    def __init__(self, models: Models) -> None:
        self._models = models

    async def Classify(self, request: pb.ClassifyRequest, context: Context) -> pb.ClassifyResponse:  # noqa: N802
        """Classify one image."""
        return await self._classify(request, caller_of(context))

    async def _classify(self, request: pb.ClassifyRequest, caller: Caller) -> pb.ClassifyResponse:
        """Answer one request, of a call of its own or of a stream."""
        classifier = self._models.get(request.model)
        protocol = messages.protocol_asked(request, classifier.session.contract)
        top_k = messages.top_k_asked(request, classifier.session.contract)
        calls.note(classifier.name, len(protocol.views))
        image = request.image  # once: a message gives a new copy each time
        with classifier.admitted(len(image), len(protocol.views)):
            answer = await classifier.answer(image, protocol, top_k, heatmap=request.heatmap, caller=caller)
        if top_k > _AT_ONCE:
            return await asyncio.to_thread(messages.classify_response, answer)
        return messages.classify_response(answer)

    async def ClassifyStream(  # noqa: N802
        self, request_iterator: AsyncIterator[pb.ClassifyStreamRequest], context: Context
    ) -> None:
        """Classify the images of a stream."""
        caller = caller_of(context)
        await classify_stream(lambda request: self._classify(request, caller), request_iterator, context.write)

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
            report = await evaluate(classifier, protocol, start.dataset, labelled, tell, caller_of(context))
        await context.write(pb.EvaluateResponse(report=await asyncio.to_thread(messages.report_message, report)))

    async def ListModels(self, request: pb.ListModelsRequest, context: Context) -> pb.ListModelsResponse:  # noqa: ARG002, N802
        """Name the models."""
        return pb.ListModelsResponse(models=map(messages.model_identity, self._models.all()))

    async def GetModel(self, request: pb.GetModelRequest, context: Context) -> pb.GetModelResponse:  # noqa: ARG002, N802
        """Describe one model."""
        return pb.GetModelResponse(model=messages.model_message(self._models.get(request.name)))
