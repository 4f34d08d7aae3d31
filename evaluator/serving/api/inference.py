"""The Open Inference Protocol over gRPC: translates between its messages and the plain types of `serving.inference`."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from functools import partial

from msgspec import to_builtins

from ...errors import UsageError
from ...pb.inference import inference_pb2 as pb
from ...pb.inference import inference_pb2_grpc as pb_grpc
from ...rpc.status import client_message
from ..concurrency import answer_all, uncancelled
from ..data_plane import DataPlane
from ..inference import INPUT, OUTPUT, InferAnswer, Inference, InferRequest, InputTensor, Parameters, split_elements
from ..observability.call_context import Call, Context, this_call
from ..observability.logs import log_incident
from .front import Front
from .prelunet import STREAM_SLOTS

SERVICE = pb.DESCRIPTOR.services_by_name["GRPCInferenceService"].full_name


def add_to_front(front: Front, plane: DataPlane) -> None:
    """Add the Open Inference Protocol to the services of a server."""
    pb_grpc.add_GRPCInferenceServiceServicer_to_server(InferenceServicer(plane), front)


class InferenceServicer(pb_grpc.GRPCInferenceServiceServicer):
    """Translates calls."""

    def __init__(self, plane: DataPlane) -> None:
        self._plane, self._inference = plane, Inference(plane)

    async def ServerLive(self, request: pb.ServerLiveRequest, context: Context) -> pb.ServerLiveResponse:
        return pb.ServerLiveResponse(live=True)

    async def ServerReady(self, request: pb.ServerReadyRequest, context: Context) -> pb.ServerReadyResponse:
        return pb.ServerReadyResponse(ready=self._plane.ready())

    async def ModelReady(self, request: pb.ModelReadyRequest, context: Context) -> pb.ModelReadyResponse:
        ready = self._inference.has(request.name, request.version) and self._plane.ready()
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
        return pb.ModelStatisticsResponse(**to_builtins(self._inference.statistics(request.name, request.version)))

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
        write = partial(infer_response, raw=len(request.raw_input_contents) > 0)
        return self._inference.infer(infer_request(request), call, write)

    async def ModelStreamInfer(self, request_iterator: AsyncIterator[pb.ModelInferRequest], context: Context) -> None:
        """Classify the images of a stream of requests, which are answered in their order."""
        call, slots, latest = this_call(), asyncio.Semaphore(STREAM_SLOTS), asyncio.Event()
        latest.set()  # of the latest request: once its answer is sent

        async def answer(request: pb.ModelInferRequest, on_admitted: Callable[[], None]) -> None:
            nonlocal latest
            before, latest = latest, asyncio.Event()
            id_, sent = request.id, latest
            on_admitted()  # what is too much is refused, not awaited
            try:
                answering = self._infer(request, call)
                del request
                inferred = await answering
                inferred.parameters["triton_final_response"].bool_param = True  # for Triton's clients
                response = pb.ModelStreamInferResponse(infer_response=inferred)
            except Exception as error:  # belongs to this request only; the others continue
                response = pb.ModelStreamInferResponse(
                    error_message=client_message(error, log_incident(error)),
                    infer_response=pb.ModelInferResponse(id=id_),
                )
            call.record_answer(failed=bool(response.error_message))
            await before.wait()
            await uncancelled(context.write(response))
            sent.set()
            call.message_done()
            slots.release()

        await answer_all(request_iterator, slots, answer)


def _require_no_repository(name: str) -> None:
    if name:
        raise UsageError("this server has no repositories; leave `repository_name` empty")


# Messages to plain types, and back.


def infer_request(request: pb.ModelInferRequest) -> InferRequest:
    """Return a request in plain types, which hold the message until its images are read."""
    outputs = request.outputs
    return InferRequest(
        model=request.model_name,
        version=request.model_version,
        id=request.id,
        parameters=_parameters(request.parameters),
        inputs=len(request.inputs),
        tensor=_input(request, request.inputs[0]) if request.inputs else None,
        outputs=[output.name for output in outputs],
        output_parameters=_parameters(outputs[0].parameters) if outputs else {},
    )


def _parameters(parameters: Mapping[str, pb.InferParameter]) -> Parameters:
    choices = {name: each.WhichOneof("parameter_choice") for name, each in parameters.items()}
    return {name: choice and getattr(parameters[name], choice) for name, choice in choices.items()}


def _input(request: pb.ModelInferRequest, tensor: pb.ModelInferRequest.InferInputTensor) -> InputTensor:
    def elements(count: int) -> Sequence[bytes]:
        return _raw_elements(request, tensor, count) if request.raw_input_contents else _typed_elements(tensor)

    return InputTensor(tensor.name, tensor.datatype, tensor.shape, _parameters(tensor.parameters), elements)


def _raw_elements(
    request: pb.ModelInferRequest, tensor: pb.ModelInferRequest.InferInputTensor, count: int
) -> Sequence[bytes]:
    """Return the elements in `raw_input_contents`."""
    if tensor.contents.ListFields():
        raise UsageError(
            f"input '{INPUT}' has elements both in `contents` and in `raw_input_contents`; send only one of them"
        )
    if len(request.raw_input_contents) > 1:
        raise UsageError(
            f"`raw_input_contents` has {len(request.raw_input_contents)} entries for one input; send one entry"
        )
    return split_elements(request.raw_input_contents[0], count)


def _typed_elements(tensor: pb.ModelInferRequest.InferInputTensor) -> Sequence[bytes]:
    """Return the elements in `contents`."""
    filled = [field.name for field, _ in tensor.contents.ListFields()]
    if wrong := [name for name in filled if name != "bytes_contents"]:
        raise UsageError(f"input '{INPUT}' has `{wrong[0]}`; the elements of a BYTES tensor go into `bytes_contents`")
    if not tensor.contents.bytes_contents:
        raise UsageError(
            f"input '{INPUT}' has no elements; send the images in `raw_input_contents`, or as `bytes_contents` in the "
            "input's `contents`"
        )
    return tensor.contents.bytes_contents


def infer_response(answer: InferAnswer, *, raw: bool) -> pb.ModelInferResponse:
    """Return the message of an answer. raw: with its elements as binary data, as the request's."""
    model = answer.model
    response = pb.ModelInferResponse(model_name=model.name, model_version=str(model.version), id=answer.id)
    output = response.outputs.add(name=OUTPUT, datatype=answer.datatype, shape=answer.shape)
    if raw:
        response.raw_output_contents.append(answer.raw())
    elif answer.top is None:
        output.contents.fp32_contents.extend(answer.numbers())
    else:
        output.contents.bytes_contents.extend(text.encode() for text in answer.texts())
    return response
