"""The Open Inference Protocol: translates between calls of proto/inference and the classifiers."""

import asyncio
import importlib.metadata
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any, TypeVar

import grpc
import grpc.aio
from prometheus_client import Gauge, Histogram, Summary

from ...arrays import Float32Array
from ...errors import ImageError, ModelNotFound, UsageError
from ...pb.inference import inference_pb2 as pb
from ...pb.inference import inference_pb2_grpc as pb_grpc
from ...rpc.status import client_message
from ..classifier import Classifier
from ..models import Models
from ..observability import call_context
from ..observability.call_context import Caller, Context, caller_of
from ..observability.logs import log_incident, truncate
from ..observability.metrics import Metrics
from ..repository import Repository
from . import inference_messages as messages
from .concurrency import bounded, task_group
from .prelunet import STREAM_SLOTS

SERVICE = pb.DESCRIPTOR.services_by_name["GRPCInferenceService"].full_name

Result = TypeVar("Result")

_LARGE_MESSAGE = 2**20  # bytes; parsing it copies it twice, in half a millisecond
_MANY_ELEMENTS = 1000  # scores or texts; converting them takes a millisecond

_SHARED = "this server accepts images only in the message; send them in `raw_input_contents` or `contents`"
_FIXED = "this server's models are fixed at its start; it changes those of a folder: prelunet serve --models DIR"
UNIMPLEMENTED_METHODS: Mapping[str, str] = {
    "SystemSharedMemoryStatus": _SHARED,
    "SystemSharedMemoryRegister": _SHARED,
    "SystemSharedMemoryUnregister": _SHARED,
    "CudaSharedMemoryStatus": _SHARED,
    "CudaSharedMemoryRegister": _SHARED,
    "CudaSharedMemoryUnregister": _SHARED,
    "TraceSetting": "this server has no trace settings",
    "LogSettings": "this server's log settings are fixed at its start",
}


def add_to_server(
    server: grpc.aio.Server, models: Models, ready: Callable[[], bool], repository: Repository | None = None
) -> None:
    """Add the Open Inference Protocol to a server; arguments as those of `InferenceServicer`."""
    pb_grpc.add_GRPCInferenceServiceServicer_to_server(InferenceServicer(models, ready, repository), server)

    async def refuse(text: str, _request: bytes, context: Context) -> bytes:
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, text)

    refusals: dict[str, grpc.RpcMethodHandler[bytes, bytes]] = {
        name: grpc.unary_unary_rpc_method_handler(partial(refuse, text)) for name, text in UNIMPLEMENTED_METHODS.items()
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, refusals),))


class InferenceServicer(pb_grpc.GRPCInferenceServiceServicer):
    """Translates calls to the classifiers.

    ready: whether the server accepts new work, as reported by health; repository: of the models, None if they are
    fixed.
    """

    def __init__(self, models: Models, ready: Callable[[], bool], repository: Repository | None = None) -> None:
        self._models, self._ready, self._repository = models, ready, repository

    async def ServerLive(self, request: pb.ServerLiveRequest, context: Context) -> pb.ServerLiveResponse:  # noqa: ARG002, N802
        return pb.ServerLiveResponse(live=True)

    async def ServerReady(self, request: pb.ServerReadyRequest, context: Context) -> pb.ServerReadyResponse:  # noqa: ARG002, N802
        return pb.ServerReadyResponse(ready=self._ready())

    async def ModelReady(self, request: pb.ModelReadyRequest, context: Context) -> pb.ModelReadyResponse:  # noqa: ARG002, N802
        served = self._models.has(_with_version(request.name, request.version))
        return pb.ModelReadyResponse(ready=served and self._ready())

    async def ServerMetadata(self, request: pb.ServerMetadataRequest, context: Context) -> pb.ServerMetadataResponse:  # noqa: ARG002, N802
        version = importlib.metadata.version("prelunet")
        return pb.ServerMetadataResponse(name="prelunet", version=version, extensions=messages.EXTENSIONS)

    async def ModelMetadata(self, request: pb.ModelMetadataRequest, context: Context) -> pb.ModelMetadataResponse:  # noqa: ARG002, N802
        classifier = self._model(request.name, request.version)
        return messages.model_metadata(classifier, self._models.versions(classifier.name))

    async def ModelConfig(self, request: pb.ModelConfigRequest, context: Context) -> pb.ModelConfigResponse:  # noqa: ARG002, N802
        return pb.ModelConfigResponse(config=messages.model_config(self._model(request.name, request.version)))

    async def ModelStatistics(self, request: pb.ModelStatisticsRequest, context: Context) -> pb.ModelStatisticsResponse:  # noqa: ARG002, N802
        """Return the statistics of one model, or of each."""
        models = [self._model(request.name, request.version)] if request.name else self._models.all()
        return pb.ModelStatisticsResponse(
            model_stats=[model_statistics(model.name, model.version, self._models.metrics) for model in models]
        )

    async def RepositoryIndex(self, request: pb.RepositoryIndexRequest, context: Context) -> pb.RepositoryIndexResponse:  # noqa: ARG002, N802
        """List the loaded versions of all models, and those that are not served."""
        loaded = [version for model in self._models.all() for version in self._models.versions(model.name)]
        problems = {} if self._repository is None else self._repository.problems()
        return messages.repository_index(request, loaded, problems, ready=self._ready())

    async def RepositoryModelLoad(  # noqa: N802
        self,
        request: pb.RepositoryModelLoadRequest,
        context: Context,  # noqa: ARG002
    ) -> pb.RepositoryModelLoadResponse:
        await self._changeable(request, ()).load(request.model_name)
        return pb.RepositoryModelLoadResponse()

    async def RepositoryModelUnload(  # noqa: N802
        self,
        request: pb.RepositoryModelUnloadRequest,
        context: Context,  # noqa: ARG002
    ) -> pb.RepositoryModelUnloadResponse:
        await self._changeable(request, ("unload_dependents",)).unload(request.model_name)
        return pb.RepositoryModelUnloadResponse()

    def _changeable(
        self, request: pb.RepositoryModelLoadRequest | pb.RepositoryModelUnloadRequest, allowed: Sequence[str]
    ) -> Repository:
        """Return the repository; UsageError if models are fixed, or for a parameter that is not allowed."""
        if self._repository is None:
            raise UsageError(_FIXED)
        messages.require_no_repository(request.repository_name)
        if unknown := sorted(set(request.parameters) - set(allowed)):
            raise UsageError(
                f"parameter '{truncate(unknown[0], messages.MAX_QUOTED)}' is not supported: models and their "
                "configuration come only from the server's folder"
            )
        return self._repository

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
        return self._models.get(_with_version(name, version))

    async def _parse_request(self, request: pb.ModelInferRequest) -> tuple[Classifier, messages.ParsedRequest]:
        """Return the requested model and the parsed request."""
        classifier = self._model(request.model_name, request.model_version)
        parse = partial(messages.parse_request, request, classifier.session.contract)
        call = call_context.current_call.get()
        in_thread = call is None or call.message_bytes > _LARGE_MESSAGE
        return classifier, await run_inline_or_in_thread(parse, in_thread=in_thread)

    async def _infer(
        self, classifier: Classifier, parsed: messages.ParsedRequest, caller: Caller
    ) -> pb.ModelInferResponse:
        """Classify the images of a request; admission accepts all of them or none."""
        if parsed.timeout is not None:
            caller = caller.with_timeout(parsed.timeout)
        size, views = sum(map(len, parsed.images)), len(parsed.images) * len(parsed.protocol.views)
        call_context.record_views(classifier.name, views)
        with classifier.admission.admit_or_refuse(size, views, caller, len(parsed.images)):
            scores = await _scores_of(classifier, parsed, caller)
        in_thread = len(scores) * (parsed.top or len(classifier.session.contract.classes)) > _MANY_ELEMENTS
        return await run_inline_or_in_thread(
            partial(messages.infer_response, classifier, parsed, scores), in_thread=in_thread
        )


def _with_version(name: str, version: str) -> str:
    return f"{name}/{version}" if version else name


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


def model_statistics(name: str, version: int, metrics: Metrics) -> pb.ModelStatistics:
    """Return the statistics of one model, of all its versions, since the server started. version: the newest."""
    success = _duration(metrics.request_seconds.labels(name))
    stages = {field: _duration(metrics.stage_seconds.labels(name, stage)) for field, stage in _STAGES.items()}
    return pb.ModelStatistics(
        name=name,
        version=str(version),
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
