"""The Open Inference Protocol over gRPC: translates between its messages and `serving.inference`."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from contextlib import aclosing
from functools import partial
from typing import Any, TypeVar

import grpc
import grpc.aio
from msgspec import to_builtins

from ...errors import UsageError
from ...pb.inference import inference_pb2 as pb
from ...pb.inference import inference_pb2_grpc as pb_grpc
from ...rpc.status import client_message
from ..concurrency import bounded
from ..data_plane import DataPlane
from ..inference import Inference
from ..observability.call_context import Call, Context, this_call
from ..observability.logs import log_incident
from . import inference_messages as messages
from .prelunet import STREAM_SLOTS

SERVICE = pb.DESCRIPTOR.services_by_name["GRPCInferenceService"].full_name

_SHARED = "this server accepts images only in the message; send them in `raw_input_contents` or `contents`"
UNIMPLEMENTED_METHODS: Mapping[str, str] = {
    **{f"SystemSharedMemory{verb}": _SHARED for verb in ("Status", "Register", "Unregister")},
    **{f"CudaSharedMemory{verb}": _SHARED for verb in ("Status", "Register", "Unregister")},
    "TraceSetting": "this server has no trace settings",
    "LogSettings": "this server's log settings are fixed at its start",
}


def add_to_server(server: grpc.aio.Server, plane: DataPlane) -> None:
    """Add the Open Inference Protocol to a server."""
    pb_grpc.add_GRPCInferenceServiceServicer_to_server(InferenceServicer(plane), server)

    async def refuse(text: str, _request: bytes, context: Context) -> bytes:
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, text)

    refusals: dict[str, grpc.RpcMethodHandler[bytes, bytes]] = {
        name: grpc.unary_unary_rpc_method_handler(partial(refuse, text)) for name, text in UNIMPLEMENTED_METHODS.items()
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, refusals),))


class InferenceServicer(pb_grpc.GRPCInferenceServiceServicer):
    """Translates calls."""

    def __init__(self, plane: DataPlane) -> None:
        self._inference = Inference(plane)

    async def ServerLive(self, request: pb.ServerLiveRequest, context: Context) -> pb.ServerLiveResponse:
        return pb.ServerLiveResponse(live=True)

    async def ServerReady(self, request: pb.ServerReadyRequest, context: Context) -> pb.ServerReadyResponse:
        return pb.ServerReadyResponse(ready=self._inference.ready())

    async def ModelReady(self, request: pb.ModelReadyRequest, context: Context) -> pb.ModelReadyResponse:
        ready = self._inference.has(request.name, request.version) and self._inference.ready()
        return pb.ModelReadyResponse(ready=ready)

    async def ServerMetadata(self, request: pb.ServerMetadataRequest, context: Context) -> pb.ServerMetadataResponse:
        return pb.ServerMetadataResponse(**to_builtins(self._inference.server_metadata()))

    async def ModelMetadata(self, request: pb.ModelMetadataRequest, context: Context) -> pb.ModelMetadataResponse:
        described = self._inference.model_metadata(request.name, request.version)
        return pb.ModelMetadataResponse(**to_builtins(described))

    async def ModelConfig(self, request: pb.ModelConfigRequest, context: Context) -> pb.ModelConfigResponse:
        config = self._inference.model_config(request.name, request.version)
        return pb.ModelConfigResponse(config=to_builtins(config))

    async def ModelStatistics(self, request: pb.ModelStatisticsRequest, context: Context) -> pb.ModelStatisticsResponse:
        """Return the statistics of one model, or of each."""
        found = self._inference.statistics(request.name, request.version)
        return pb.ModelStatisticsResponse(model_stats=to_builtins(found))

    async def RepositoryIndex(self, request: pb.RepositoryIndexRequest, context: Context) -> pb.RepositoryIndexResponse:
        """List the loaded versions of all models, and those that are not served."""
        _require_no_repository(request.repository_name)
        return pb.RepositoryIndexResponse(models=to_builtins(self._inference.index(only_ready=request.ready)))

    async def RepositoryModelLoad(
        self, request: pb.RepositoryModelLoadRequest, context: Context
    ) -> pb.RepositoryModelLoadResponse:
        _require_no_repository(request.repository_name)
        await self._inference.load(request.model_name, request.parameters)
        return pb.RepositoryModelLoadResponse()

    async def RepositoryModelUnload(
        self, request: pb.RepositoryModelUnloadRequest, context: Context
    ) -> pb.RepositoryModelUnloadResponse:
        _require_no_repository(request.repository_name)
        await self._inference.unload(request.model_name, request.parameters)
        return pb.RepositoryModelUnloadResponse()

    async def ModelInfer(self, request: pb.ModelInferRequest, context: Context) -> pb.ModelInferResponse:
        """Classify the images of a request."""
        call = this_call()
        call.id = request.id
        answer = self._infer(request, call)
        del request  # it holds a second copy of the images
        return await answer

    def _infer(self, request: pb.ModelInferRequest, call: Call) -> Awaitable[pb.ModelInferResponse]:
        """Return the awaitable that answers a request, alone or of a stream, without the message."""
        write = partial(messages.infer_response, id_=request.id, raw=len(request.raw_input_contents) > 0)
        name, version = request.model_name, request.model_version
        return self._inference.infer(name, version, messages.infer_request(request), call, write)

    async def ModelStreamInfer(
        self, request_iterator: AsyncIterator[pb.ModelInferRequest], context: Context
    ) -> AsyncIterator[pb.ModelStreamInferResponse]:
        """Classify the images of a stream of requests."""
        call = this_call()

        async def answer(request: pb.ModelInferRequest) -> pb.ModelStreamInferResponse:
            id_ = request.id
            try:
                answered = self._infer(request, call)
                del request
                response = await answered
                response.parameters["triton_final_response"].bool_param = True  # for Triton's clients
                call.record_answer(failed=False)
                return pb.ModelStreamInferResponse(infer_response=response)
            except Exception as error:  # belongs to this request only; the others continue
                call.record_answer(failed=True)
                return pb.ModelStreamInferResponse(
                    error_message=client_message(error, log_incident(error)),
                    infer_response=pb.ModelInferResponse(id=id_),
                )

        async with aclosing(answer_in_order(request_iterator, answer, STREAM_SLOTS)) as responses:
            async for response in responses:
                yield response
                call.message_done()


def _require_no_repository(name: str) -> None:
    if name:
        raise UsageError("this server has no repositories; leave `repository_name` empty")


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
