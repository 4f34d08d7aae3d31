"""The Open Inference Protocol: translates between calls of proto/inference and the classifiers."""

import asyncio
import importlib.metadata
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from contextlib import aclosing
from functools import partial
from typing import Any, TypeVar

import grpc
import grpc.aio
from prometheus_client import Gauge, Histogram, Summary

from prelunet.evaluator.arrays import Float32Array
from prelunet.evaluator.errors import ImageError, ModelNotFound, UsageError
from prelunet.evaluator.pb.inference import inference_pb2 as pb
from prelunet.evaluator.pb.inference import inference_pb2_grpc as pb_grpc
from prelunet.evaluator.rpc.status import client_message
from prelunet.evaluator.serving.api import inference_messages as messages
from prelunet.evaluator.serving.api.concurrency import bounded, task_group
from prelunet.evaluator.serving.api.prelunet import STREAM_SLOTS
from prelunet.evaluator.serving.classifier import Classifier
from prelunet.evaluator.serving.models import Models
from prelunet.evaluator.serving.observability import call_context
from prelunet.evaluator.serving.observability.call_context import Caller, Context, caller_of
from prelunet.evaluator.serving.observability.logs import log_incident, truncate
from prelunet.evaluator.serving.observability.metrics import Metrics

SERVICE = pb.DESCRIPTOR.services_by_name["GRPCInferenceService"].full_name

Result = TypeVar("Result")

_LARGE_MESSAGE = 2**20  # bytes; parsing it copies it twice, in half a millisecond
_MANY_ELEMENTS = 1000  # scores or texts; converting them takes a millisecond

_SHARED = "this server accepts images only in the message; send them in `raw_input_contents` or `contents`"
_FIXED = "this server's models are fixed at its start: prelunet serve --model NAME=MODEL.onnx"
UNIMPLEMENTED_METHODS: Mapping[str, str] = {
    "RepositoryModelLoad": _FIXED,
    "RepositoryModelUnload": _FIXED,
    "SystemSharedMemoryStatus": _SHARED,
    "SystemSharedMemoryRegister": _SHARED,
    "SystemSharedMemoryUnregister": _SHARED,
    "CudaSharedMemoryStatus": _SHARED,
    "CudaSharedMemoryRegister": _SHARED,
    "CudaSharedMemoryUnregister": _SHARED,
    "TraceSetting": "this server has no trace settings",
    "LogSettings": "this server's log settings are fixed at its start",
}


def add_to_server(server: grpc.aio.Server, models: Models, ready: Callable[[], bool]) -> None:
    """Add the Open Inference Protocol to a server. ready: whether it accepts new work, as reported by health."""
    pb_grpc.add_GRPCInferenceServiceServicer_to_server(InferenceServicer(models, ready), server)

    async def refuse(text: str, _request: bytes, context: Context) -> bytes:
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, text)

    refusals: dict[str, grpc.RpcMethodHandler[bytes, bytes]] = {
        name: grpc.unary_unary_rpc_method_handler(partial(refuse, text)) for name, text in UNIMPLEMENTED_METHODS.items()
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, refusals),))


class InferenceServicer(pb_grpc.GRPCInferenceServiceServicer):
    """Translates calls to the classifiers."""

    def __init__(self, models: Models, ready: Callable[[], bool]) -> None:
        self._models = models
        self._ready = ready

    async def ServerLive(self, request: pb.ServerLiveRequest, context: Context) -> pb.ServerLiveResponse:  # noqa: ARG002, N802
        """Report that the server is alive."""
        return pb.ServerLiveResponse(live=True)

    async def ServerReady(self, request: pb.ServerReadyRequest, context: Context) -> pb.ServerReadyResponse:  # noqa: ARG002, N802
        """Report whether the server accepts new work."""
        return pb.ServerReadyResponse(ready=self._ready())

    async def ModelReady(self, request: pb.ModelReadyRequest, context: Context) -> pb.ModelReadyResponse:  # noqa: ARG002, N802
        """Report whether a model accepts new work."""
        served = any(model.name == request.name for model in self._models.all())
        return pb.ModelReadyResponse(ready=served and request.version in messages.VERSIONS and self._ready())

    async def ServerMetadata(self, request: pb.ServerMetadataRequest, context: Context) -> pb.ServerMetadataResponse:  # noqa: ARG002, N802
        """Describe the server."""
        version = importlib.metadata.version("prelunet")
        return pb.ServerMetadataResponse(name="prelunet", version=version, extensions=messages.EXTENSIONS)

    async def ModelMetadata(self, request: pb.ModelMetadataRequest, context: Context) -> pb.ModelMetadataResponse:  # noqa: ARG002, N802
        """Describe the inputs and outputs of a model."""
        return messages.model_metadata(self._model(request.name, request.version))

    async def ModelConfig(self, request: pb.ModelConfigRequest, context: Context) -> pb.ModelConfigResponse:  # noqa: ARG002, N802
        """Return a model's configuration in Triton's form."""
        return pb.ModelConfigResponse(config=messages.model_config(self._model(request.name, request.version)))

    async def ModelStatistics(self, request: pb.ModelStatisticsRequest, context: Context) -> pb.ModelStatisticsResponse:  # noqa: ARG002, N802
        """Return the statistics of one model, or of each."""
        models = [self._model(request.name, request.version)] if request.name else self._models.all()
        return pb.ModelStatisticsResponse(
            model_stats=[model_statistics(model.name, self._models.metrics) for model in models]
        )

    async def RepositoryIndex(self, request: pb.RepositoryIndexRequest, context: Context) -> pb.RepositoryIndexResponse:  # noqa: ARG002, N802
        """List the served models."""
        names = [model.name for model in self._models.all()]
        return messages.repository_index(request, names, ready=self._ready())

    async def ModelInfer(self, request: pb.ModelInferRequest, context: Context) -> pb.ModelInferResponse:  # noqa: N802
        """Classify the images of a request."""
        if (call := call_context.current_call.get()) is not None:
            call.id = request.id
        caller = caller_of(context)
        classifier, parsed = await self._parse_request(request)
        del request  # free it while waiting; its images are in `parsed`
        return await self._infer(classifier, parsed, caller)

    async def ModelStreamInfer(  # noqa: N802
        self, request_iterator: AsyncIterator[pb.ModelInferRequest], context: Context
    ) -> AsyncIterator[pb.ModelStreamInferResponse]:
        """Classify the images of a stream of requests."""
        caller = caller_of(context)

        async def answer(request: pb.ModelInferRequest) -> pb.ModelStreamInferResponse:
            id_ = request.id
            try:
                classifier, parsed = await self._parse_request(request)
                del request
                response = await self._infer(classifier, parsed, caller)
                response.parameters["triton_final_response"].bool_param = True  # for Triton's clients
                call_context.record_answer(failed=False)
                return pb.ModelStreamInferResponse(infer_response=response)
            except Exception as error:  # belongs to this request only; the others continue
                call_context.record_answer(failed=True)
                return pb.ModelStreamInferResponse(
                    error_message=client_message(error, log_incident(error)),
                    infer_response=pb.ModelInferResponse(id=id_),
                )

        async with aclosing(answer_in_order(request_iterator, answer, STREAM_SLOTS)) as responses:
            async for response in responses:
                yield response
                call_context.note_done()

    def _model(self, name: str, version: str) -> Classifier:
        """Return a served model; the protocol requires a name even if there is only one model."""
        if not name:
            available = ", ".join(model.name for model in self._models.all())
            raise ModelNotFound(f"the request names no model. Available: {available}")
        if version not in messages.VERSIONS:
            raise ModelNotFound(
                f"model '{truncate(name, messages.MAX_QUOTED)}' has no version "
                f"'{truncate(version, messages.MAX_QUOTED)}'. Its only version: {messages.VERSION}"
            )
        return self._models.get(name)

    async def _parse_request(self, request: pb.ModelInferRequest) -> tuple[Classifier, messages.ParsedRequest]:
        """Return the requested model and the parsed request."""
        classifier = self._model(request.model_name, request.model_version)
        parse = partial(messages.parse_request, request, classifier.session.contract)
        call = call_context.current_call.get()
        in_thread = call is None or call.bytes > _LARGE_MESSAGE
        return classifier, await run_inline_or_in_thread(parse, in_thread=in_thread)

    async def _infer(
        self, classifier: Classifier, parsed: messages.ParsedRequest, caller: Caller
    ) -> pb.ModelInferResponse:
        """Classify the images of a request; admission accepts all of them or none."""
        contract = classifier.session.contract
        if parsed.timeout is not None:
            caller = caller.with_timeout(parsed.timeout)
        size, views = sum(map(len, parsed.images)), len(parsed.images) * len(parsed.protocol.views)
        call_context.record_views(classifier.name, views)
        with classifier.admission.admit_or_refuse(size, views, caller, len(parsed.images)):
            scores = await _scores_of(classifier, parsed, caller)
        in_thread = len(scores) * (parsed.top or len(contract.classes)) > _MANY_ELEMENTS
        return await run_inline_or_in_thread(
            partial(messages.infer_response, classifier.name, parsed, scores, contract), in_thread=in_thread
        )


async def run_inline_or_in_thread(function: Callable[[], Result], *, in_thread: bool) -> Result:
    """Call a function, in a thread only if it takes long: handing over to a thread costs 0.1 ms."""
    return await asyncio.to_thread(function) if in_thread else function()


async def _scores_of(classifier: Classifier, parsed: messages.ParsedRequest, caller: Caller) -> list[Float32Array]:
    """Classify every image of a request; the first failure cancels the others, and the error names its image."""

    protocol = parsed.protocol  # `classify` must not hold all images: a traceback would keep them alive

    async def classify(index: int, image: bytes) -> Float32Array:
        try:
            return await classifier.classify(image, protocol, lambda classified: classified.scores, caller=caller)
        except ImageError as error:
            raise ImageError(f"{messages.INPUT}[{index}]: {error}") from error
        except UsageError as error:
            raise UsageError(f"{messages.INPUT}[{index}]: {error}") from error

    async with task_group() as group:
        tasks = [group.create_task(classify(index, image)) for index, image in enumerate(parsed.images)]
    return [task.result() for task in tasks]


# Triton's model statistics, derived from the server's Prometheus metrics.


_STAGES = {"queue": "queue", "compute_input": "decode", "compute_infer": "compute", "compute_output": "average"}


def model_statistics(name: str, metrics: Metrics) -> pb.ModelStatistics:
    """Return the statistics of one model since the server started."""
    success = _duration(metrics.request_seconds.labels(name))
    stages = {field: _duration(metrics.stage_seconds.labels(name, stage)) for field, stage in _STAGES.items()}
    return pb.ModelStatistics(
        name=name,
        version=messages.VERSION,
        last_inference=round(1000 * _samples(metrics.last_answer.labels(name))[""]),
        inference_count=success.count,
        execution_count=_duration(metrics.batch_seconds.labels(name)).count,
        inference_stats=pb.InferStatistics(
            success=success, fail=_duration(metrics.failed_seconds.labels(name)), **stages
        ),
    )


def _duration(instrument: Histogram | Summary) -> pb.StatisticDuration:
    """Return the number of observations and their sum in nanoseconds. instrument: observes seconds."""
    samples = _samples(instrument)
    return pb.StatisticDuration(count=round(samples["_count"]), ns=round(1e9 * samples["_sum"]))


def _samples(instrument: Gauge | Histogram | Summary) -> dict[str, float]:
    """Return an instrument's values by the suffix of their names: "_count" and "_sum"; for a gauge only ""."""
    (metric,) = instrument.collect()
    return {
        sample.name.removeprefix(metric.name): sample.value for sample in metric.samples if "le" not in sample.labels
    }


# Many requests of a stream in progress at a time, answered in order.


Request = TypeVar("Request")
Response = TypeVar("Response")


async def answer_in_order(
    requests: AsyncIterator[Request], answer: Callable[[Request], Awaitable[Response]], limit: int
) -> AsyncGenerator[Response, None]:
    """Yield the answer to each request, in the order of the requests.

    limit: maximum number of requests that have been read and whose answer has not been taken.
    Raises the error of `requests`, after the answers to all earlier requests, and errors of `answer`. Closing the
    generator cancels unanswered requests.
    """
    slots = asyncio.Semaphore(limit)
    answers: asyncio.Queue[asyncio.Future[Response] | None] = asyncio.Queue()

    async def read() -> None:
        try:
            async for request in bounded(requests, slots):
                answers.put_nowait(asyncio.ensure_future(answer(request)))
                del request  # free it while waiting for the next
        finally:
            answers.put_nowait(None)

    reader = asyncio.create_task(read())
    try:
        while (task := await answers.get()) is not None:
            yield await task
            slots.release()
        await reader
    finally:
        unfinished: list[asyncio.Future[Any]] = [reader]
        while not answers.empty():
            unfinished += filter(None, [answers.get_nowait()])
        for each in unfinished:
            each.cancel()
        await asyncio.gather(*unfinished, return_exceptions=True)
