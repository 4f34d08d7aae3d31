"""The routes of the HTTP port: they translate requests for the data plane, and its answers to JSON."""

import asyncio
from collections.abc import Callable, Iterable, Mapping
from email.parser import BytesHeaderParser
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias, TypeVar

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType
from starlette.datastructures import QueryParams
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ...contract import MAX_SCALES
from ...errors import ModelNotFound, UsageError
from ...reporting.live_page import live_page
from ..answers import ClassifyResponse, ListModelsResponse, Model, classify_response
from ..data_plane import DataPlane
from ..inference import Inference, ModelConfig, ModelIndex, ModelMetadata, ModelStatisticsResponse, ServerMetadata
from ..scheduling.model import RequestOptions
from ..scheduling.request import Answered
from .door import JSON, Endpoint, HttpCall, HttpDoor, JsonResponse
from .examples import example_routes
from .inference_json import LENGTH_HEADER, ModelInferRequest, ModelInferResponse, infer_response, parse_infer_request
from .openapi import File, Operation, description
from .reports import report_routes

_LARGE_BODY = 2**20  # bytes, whose JSON takes milliseconds to parse
_MAX_HEAD = 2**12  # bytes before the file in a form
_Scale: TypeAlias = Annotated[int, Meta(ge=1, lt=2**32)]


class ClassifyForm(Struct, forbid_unknown_fields=True):
    """A form with one file."""

    image: File


class ClassifyBody(Struct, forbid_unknown_fields=True):
    """A JSON body. image: the encoded image, in base64."""

    image: bytes


class ClassifyQuery(Struct, forbid_unknown_fields=True):
    """The query parameters of /v1/classify."""

    model: Annotated[str, Meta(description="Name of a served model; required when there are several.")] = ""
    protocol: Annotated[str, Meta(description="As in the proto file, e.g. center, dense-256, multi-scale.")] = ""
    top_k: Annotated[int, Meta(ge=1, lt=2**31, description="Number of predictions; 5 by default.")] | UnsetType = UNSET
    heatmap: Annotated[
        Literal["png", "maps"] | UnsetType,
        Meta(description="Heat maps of the five best classes: an image, or numbers in `maps`."),
    ] = UNSET
    apply_exif: Annotated[bool, Meta(description="Whether to apply the image's EXIF orientation.")] = False
    scales: (
        Annotated[tuple[_Scale, ...], Meta(min_length=1, description="Scales in pixels that replace the protocol's.")]
        | UnsetType
    ) = UNSET
    mirror: Annotated[bool | UnsetType, Meta(description="Whether each scale is also classified mirrored.")] = UNSET


class RepositoryModelRequest(Struct, forbid_unknown_fields=True):
    """To load or unload a model. The body may also be empty."""

    parameters: dict[str, bool | int | str] = {}


class RepositoryIndexRequest(Struct, forbid_unknown_fields=True):
    """To list models, or only those that accept new work. The body may also be empty."""

    ready: bool = False


class RepositoryModelResponse(Struct, forbid_unknown_fields=True):
    """The model is loaded, or unloaded."""


class ServerLiveResponse(Struct, forbid_unknown_fields=True):
    """Whether the server is alive."""

    live: bool


class ReadyResponse(Struct, forbid_unknown_fields=True):
    """Whether the server, or the model, accepts new work."""

    ready: bool


_Body = TypeVar("_Body", RepositoryModelRequest, RepositoryIndexRequest)


def add_routes(
    door: HttpDoor, plane: DataPlane, reports: Path | None = None, examples: Mapping[str, Path] = {}
) -> None:
    """Add the routes to a door. reports: folder of reports for the live page; examples: images for it, by name."""
    operations = _Routes(plane).operations()
    routes = [Route(each.path, door.endpoint_of(each.rpc, each.endpoint), methods=[each.method]) for each in operations]
    described = JsonResponse(description(operations)).body

    async def openapi(_request: Request) -> Response:
        return Response(described, media_type=JSON)

    html, policy = live_page(reports=reports is not None, examples=bool(examples))
    headers = {"Content-Security-Policy": policy, "Cache-Control": "no-cache", "Referrer-Policy": "no-referrer"}

    async def page(_request: Request) -> Response:  # without a token: the page asks for one
        return Response(html, headers=headers, media_type="text/html")

    routes += [Route("/openapi.json", openapi), Route("/", page)]
    routes += [] if reports is None else report_routes(door, reports)
    door.router.routes += routes + (example_routes(door, examples) if examples else [])


class _Routes:
    """What the routes do."""

    def __init__(self, plane: DataPlane) -> None:
        self._plane, self._inference = plane, Inference(plane)

    def operations(self) -> list[Operation]:
        """Return the operations, in the order in which their paths are tried."""
        own, live = self._inference, _described(lambda: ServerLiveResponse(True))
        image = {"*/*": File, "multipart/form-data": ClassifyForm, JSON: ClassifyBody}
        index = {JSON: RepositoryIndexRequest}
        operations = [
            Operation("GET", "/v1/models", "ListModels", _described(self._plane.list_models), ListModelsResponse),
            Operation("GET", "/v1/models/{name:path}", "GetModel", _described(self._plane.get_model), Model),
            Operation("POST", "/v1/classify", "Classify", self._classify, ClassifyResponse, image, ClassifyQuery),
            Operation("GET", "/v2", "ServerMetadata", _described(own.server_metadata), ServerMetadata),
            Operation("GET", "/v2/health/live", "ServerLive", live, ServerLiveResponse),
            Operation("GET", "/v2/health/ready", "ServerReady", self._server_ready, ReadyResponse, probe=True),
            Operation("POST", "/v2/repository/index", "RepositoryIndex", self._index, list[ModelIndex], index),
            Operation(
                "GET", "/v2/models/stats", "ModelStatistics", _described(own.statistics), ModelStatisticsResponse,
                suffix="OfAll",
            ),
        ]  # fmt: skip
        for model, suffix in (("{name}", ""), ("{name}/versions/{version}", "OfVersion")):
            operations += [msgspec.structs.replace(each, suffix=suffix) for each in self._of_model(model)]
        return operations

    def _of_model(self, model: str) -> list[Operation]:
        """Return the operations on a model, or a version of it. model: its part of the path."""
        path, stored, own = f"/v2/models/{model}", f"/v2/repository/models/{model}", self._inference
        tensors, change = {JSON: ModelInferRequest, "application/octet-stream": File}, {JSON: RepositoryModelRequest}
        return [
            Operation("POST", f"{stored}/load", "RepositoryModelLoad", self._load, RepositoryModelResponse, change),
            Operation(
                "POST", f"{stored}/unload", "RepositoryModelUnload", self._unload, RepositoryModelResponse, change
            ),
            Operation("GET", path, "ModelMetadata", _described(own.model_metadata), ModelMetadata),
            Operation("GET", f"{path}/ready", "ModelReady", self._model_ready, ReadyResponse, probe=True),
            Operation("GET", f"{path}/config", "ModelConfig", _described(own.model_config), ModelConfig),
            Operation("GET", f"{path}/stats", "ModelStatistics", _described(own.statistics), ModelStatisticsResponse),
            Operation("POST", f"{path}/infer", "ModelInfer", self._infer, ModelInferResponse, tensors, binary=True),
        ]

    async def _classify(self, request: HttpCall) -> Response:
        media_type = request.headers.get("content-type", "").lower()
        if media_type.startswith("multipart/"):
            request.body = image_in_form(request.body)
        elif media_type.startswith(JSON):
            request.body = image_in_json(request.body)
        model, options = _options_in(request.query)
        answered = await self._plane.classify(request.take_body(), model, options, request.call, _written)
        return Response(answered.written, media_type=JSON)

    async def _infer(self, request: HttpCall) -> Response:
        call, length = request.call, request.headers.get(LENGTH_HEADER)
        parse = partial(parse_infer_request, request.take_body(), length, **request.parameters)
        parsed = await asyncio.to_thread(parse) if call.message_bytes > _LARGE_BODY else parse()
        call.id = parsed.id
        answering = self._inference.infer(parsed, call, infer_response)
        del parse, parsed  # free them while waiting, with the second copy of the images
        body, headers = await answering
        return Response(body, headers=headers)

    async def _server_ready(self, _request: HttpCall) -> Response:
        ready = self._plane.ready()
        return JsonResponse(ReadyResponse(ready), 200 if ready else 503)

    async def _model_ready(self, request: HttpCall) -> Response:
        if self._plane.ready() and not self._inference.has(**request.parameters):
            raise ModelNotFound("no such model or version is served; GET /v1/models lists all")  # no names: no token
        return await self._server_ready(request)

    async def _index(self, request: HttpCall) -> Response:
        only_ready = _body_of(request, RepositoryIndexRequest).ready
        return JsonResponse(self._inference.index(only_ready=only_ready))

    async def _load(self, request: HttpCall) -> Response:
        await self._inference.load(*_repository_model(request))
        return JsonResponse(RepositoryModelResponse())

    async def _unload(self, request: HttpCall) -> Response:
        await self._inference.unload(*_repository_model(request))
        return JsonResponse(RepositoryModelResponse())


def _written(answer: Answered) -> bytes:
    return msgspec.json.encode(classify_response(answer))


def _described(describe: Callable[..., Struct]) -> Endpoint:
    """Return the endpoint that answers with a description, given the parameters of the path."""

    async def endpoint(request: HttpCall) -> Response:
        return JsonResponse(describe(**request.parameters))

    return endpoint


def _options_in(query: QueryParams) -> tuple[str, RequestOptions]:
    """Return the name of the model, and what a request asks of its image; raises UsageError."""
    values: dict[str, Any] = dict(query)
    if len(values) < len(query.multi_items()):
        raise UsageError("a query parameter is given twice; give each once, as in scales=256,384")
    if "scales" in values:
        values["scales"] = values["scales"].split(",")[: MAX_SCALES + 1]  # one above the limit, to refuse thousands
    try:
        asked = msgspec.convert(values, ClassifyQuery, strict=False)
    except msgspec.ValidationError as error:
        text, valid = (
            str(error).replace("Expected `bool`, got `str`", "true or false is expected"),
            ", ".join(ClassifyQuery.__struct_fields__),
        )
        raise UsageError(f"the query of this request is not valid: {text}. Its parameters may be: {valid}") from None
    given = {name: value for name, value in msgspec.structs.asdict(asked).items() if value is not UNSET}
    model, top, heatmap = given.pop("model"), given.pop("top_k", None), given.pop("heatmap", "")
    return model, RequestOptions(**given, top=top, heatmap=heatmap == "png", maps=heatmap == "maps")


def image_in_form(body: bytes) -> bytes:
    """Return the file in a form of one part, a file named image (RFC 7578). Raises UsageError for any other form.

    With a single part there is little to parse. A parser for forms of all kinds (python-multipart 0.0.34) takes more
    than a minute for 64 MiB that are meant to keep it busy.
    """
    head = body[: max(0, body.find(b"\r\n\r\n", 0, _MAX_HEAD))]
    delimiter, _, fields = head.partition(b"\r\n")
    end = body.find(b"\r\n" + delimiter, len(head))
    part = BytesHeaderParser().parsebytes(fields)
    named = part.get_param("name", header="content-disposition") == "image" and part.get_filename() is not None
    alone = body.startswith(b"--", end + 2 + len(delimiter))  # the closing delimiter, RFC 2046, 5.1.1
    if not delimiter.startswith(b"--") or end < 0 or not alone or not named:
        raise UsageError(
            "this form is not one file named image and nothing else; send curl -F image=@photo.jpg, or the image as "
            "the body (curl --data-binary @photo.jpg), and options in the query, as in ?top_k=3"
        )
    return body[len(head) + 4 : end]


def image_in_json(body: bytes) -> bytes:
    """Return the image in a JSON body. Raises UsageError for any other."""
    try:
        return msgspec.json.decode(body, type=ClassifyBody).image
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise UsageError(
            f'this JSON is not {{"image": "…"}} with the encoded image in base64: {error}; options go into the query, '
            "as in ?top_k=3"
        ) from None


def _body_of(request: HttpCall, kind: type[_Body]) -> _Body:
    """Return the body of a request to the repository, which may be empty; raises UsageError."""
    try:
        return msgspec.json.decode(request.take_body() or b"{}", type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"the body is neither empty nor the JSON of such a request: {error}") from None


def _repository_model(request: HttpCall) -> tuple[str, Iterable[str]]:
    """Return the model to load or unload, and the names of the parameters."""
    return "/".join(request.parameters.values()), _body_of(request, RepositoryModelRequest).parameters
