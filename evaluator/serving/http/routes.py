"""The routes of the HTTP port: each does what a gRPC method does, by the same servicer."""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ...errors import ModelNotFound, UsageError
from ...pb.inference import inference_pb2 as oip
from ...pb.prelunet.v1 import prelunet_pb2 as pb
from ...reporting.live_page import live_page
from ..api import inference, prelunet
from ..api.inference import InferenceServicer, run_inline_or_in_thread
from ..api.prelunet import PreluNetServicer
from ..models import Models
from ..repository import Repository
from .door import Answer, HttpCall, HttpDoor, JsonResponse
from .forms import image_in_form
from .inference_json import LENGTH_HEADER, infer_response, parse_infer_request, plain
from .openapi import description
from .reports import report_routes

_LARGE_BODY = 2**20  # bytes, whose JSON or form takes milliseconds to parse
_LARGE_ANSWER = 10_000  # bytes of a message, whose JSON takes milliseconds, too
_REPOSITORY = ("/v2/repository/models/{name}", "/v2/repository/models/{name}/versions/{version}")
_MODEL = ("/v2/models/{name}", "/v2/models/{name}/versions/{version}")


def _flag(text: str) -> bool:
    return {"true": True, "false": False}[text]


def _number(text: str) -> int:
    if not (text.isascii() and text.isdigit()):  # `int` also reads 1_0 and other scripts
        raise ValueError
    return int(text)


# Query parameters of /v1/classify: fields of ClassifyRequest, and how to read them.
CLASSIFY_PARAMETERS: Mapping[str, Callable[[str], Any]] = {
    "model": str,
    "protocol": str,
    "top_k": _number,
    "heatmap": {"png": "heatmap", "maps": "maps"}.__getitem__,  # the field to set
    "apply_exif": _flag,
    "scales": lambda text: [_number(each) for each in text.split(",")],
    "mirror": _flag,
}


class _RepositoryRequest(msgspec.Struct, forbid_unknown_fields=True):
    parameters: dict[str, bool | int | str] = {}


class _IndexRequest(msgspec.Struct, forbid_unknown_fields=True):
    ready: bool = False


_RepositoryBody = TypeVar("_RepositoryBody", _RepositoryRequest, _IndexRequest)


class Routes:
    """Adds the routes to a door, which works after `serve`. reports: folder of reports for the live page."""

    def __init__(self, door: HttpDoor, reports: Path | None = None) -> None:
        self._door, self._ready = door, door.ready
        self._add("GET", "/v1/models", prelunet.SERVICE, "ListModels", self._list_models)
        self._add("GET", "/v1/models/{name:path}", prelunet.SERVICE, "GetModel", self._get_model)
        self._add("POST", "/v1/classify", prelunet.SERVICE, "Classify", self._classify)
        routes: tuple[tuple[str, str, str, Answer], ...] = (
            ("GET", "/v2", "ServerMetadata", partial(self._plain, "ServerMetadata")),
            ("GET", "/v2/health/live", "ServerLive", partial(self._plain, "ServerLive")),
            ("GET", "/v2/health/ready", "ServerReady", partial(self._probe, "ServerReady")),
            ("POST", "/v2/repository/index", "RepositoryIndex", self._index),
            ("GET", "/v2/models/stats", "ModelStatistics", partial(self._plain, "ModelStatistics")),
            *(("POST", f"{path}/load", "RepositoryModelLoad", self._load) for path in _REPOSITORY),
            *(("POST", f"{path}/unload", "RepositoryModelUnload", self._unload) for path in _REPOSITORY),
            *(("GET", path, "ModelMetadata", partial(self._plain, "ModelMetadata")) for path in _MODEL),
            *(("GET", f"{path}/ready", "ModelReady", partial(self._probe, "ModelReady")) for path in _MODEL),
            *(("GET", f"{path}/config", "ModelConfig", self._config) for path in _MODEL),
            *(("GET", f"{path}/stats", "ModelStatistics", partial(self._plain, "ModelStatistics")) for path in _MODEL),
            *(("POST", f"{path}/infer", "ModelInfer", self._infer) for path in _MODEL),
        )
        for method, path, name, answer in routes:
            self._add(method, path, inference.SERVICE, name, answer)
        described = JsonResponse(description(each for each in door.router.routes if isinstance(each, Route))).body

        async def openapi(_request: Request) -> Response:
            return Response(described, media_type=JsonResponse.media_type)

        html, policy = live_page(reports=reports is not None)
        headers = {"Content-Security-Policy": policy, "Cache-Control": "no-cache", "Referrer-Policy": "no-referrer"}

        async def page(_request: Request) -> Response:  # without a token: the page asks for one
            return Response(html, headers=headers, media_type="text/html")

        door.router.routes += [Route("/openapi.json", openapi), Route("/", page)]
        if reports is not None:
            door.router.routes += report_routes(door, reports)

    def serve(self, models: Models, repository: Repository | None = None) -> None:
        self._prelunet = PreluNetServicer(models, repository=repository)
        self._inference = InferenceServicer(models, self._ready, repository)

    def _add(self, method: str, path: str, service: str, name: str, answer: Answer) -> None:
        endpoint = self._door.endpoint_of(f"{service}/{name}", answer)
        self._door.router.routes.append(Route(path, endpoint, methods=[method], name=f"{service}/{name}"))

    async def _list_models(self, call: HttpCall) -> Response:
        return await _proto_json(await self._prelunet.ListModels(pb.ListModelsRequest(), call.context))

    async def _get_model(self, call: HttpCall) -> Response:
        found = await self._prelunet.GetModel(pb.GetModelRequest(**call.parameters), call.context)
        return await _proto_json(found.model)

    async def _classify(self, call: HttpCall) -> Response:
        if call.headers.get("content-type", "").lower().startswith("multipart/"):
            large = len(call.body) > _LARGE_BODY
            call.body = await run_inline_or_in_thread(partial(image_in_form, call.take_body()), in_thread=large)
        return await _proto_json(await self._prelunet.Classify(_classify_request(call), call.context))

    async def _infer(self, call: HttpCall) -> Response:
        version = call.parameters.get("version", "")
        length, large = call.headers.get(LENGTH_HEADER), len(call.body) > _LARGE_BODY
        parsed = await run_inline_or_in_thread(
            partial(parse_infer_request, call.take_body(), length, call.parameters["name"], version), in_thread=large
        )
        answer, binary = self._inference.ModelInfer(parsed[0], call.context), parsed[1]
        del parsed  # now `answer` alone holds the message, and frees it early
        response = await answer
        large = not binary and response.ByteSize() > _LARGE_ANSWER
        body, headers = await run_inline_or_in_thread(partial(infer_response, response, binary=binary), in_thread=large)
        return Response(body, headers=headers)

    async def _message(self, name: str, call: HttpCall) -> dict[str, Any]:
        """Call a method of the Open Inference Protocol whose request has no more than name and version of a model."""
        request = getattr(oip, f"{name}Request")(**call.parameters)
        return plain(await getattr(self._inference, name)(request, call.context))

    async def _plain(self, name: str, call: HttpCall) -> Response:
        return JsonResponse(await self._message(name, call))

    async def _probe(self, name: str, call: HttpCall) -> Response:
        found = await self._message(name, call)
        if not found["ready"] and self._ready():
            raise ModelNotFound("no such model or version is served; GET /v1/models lists all")  # no names: no token
        return JsonResponse(found, 200 if found["ready"] else 503)

    async def _config(self, call: HttpCall) -> Response:
        return JsonResponse((await self._message("ModelConfig", call))["config"])

    async def _index(self, call: HttpCall) -> Response:
        request = oip.RepositoryIndexRequest(ready=_repository_body(call, _IndexRequest).ready)
        return JsonResponse(plain(await self._inference.RepositoryIndex(request, call.context))["models"])

    async def _load(self, call: HttpCall) -> Response:
        await self._inference.RepositoryModelLoad(oip.RepositoryModelLoadRequest(**_repository(call)), call.context)
        return JsonResponse({})

    async def _unload(self, call: HttpCall) -> Response:
        await self._inference.RepositoryModelUnload(oip.RepositoryModelUnloadRequest(**_repository(call)), call.context)
        return JsonResponse({})


def _repository_body(call: HttpCall, kind: type[_RepositoryBody]) -> _RepositoryBody:
    """Return the body of a request to the repository, which may be empty; raises UsageError."""
    try:
        return msgspec.json.decode(call.take_body() or b"{}", type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"the body is neither empty nor the JSON of such a request: {error}") from None


def _repository(call: HttpCall) -> dict[str, Any]:
    """Return the fields of a request to load or unload a model. The servicer checks the names of the parameters."""
    parameters = _repository_body(call, _RepositoryRequest).parameters
    return {
        "model_name": "/".join(call.parameters.values()),
        "parameters": dict.fromkeys(parameters, oip.ModelRepositoryParameter()),
    }


def _classify_request(call: HttpCall) -> pb.ClassifyRequest:
    """Return the message of a request; raises UsageError."""
    request = pb.ClassifyRequest(image=call.take_body())
    for name, text in call.query.multi_items():
        if name not in CLASSIFY_PARAMETERS:
            raise UsageError(f"no query parameter '{name[:100]}'. Valid: {', '.join(CLASSIFY_PARAMETERS)}")
        if len(call.query.getlist(name)) > 1:
            raise UsageError(f"query parameter '{name}' is given twice; give it once, as in scales=256,384")
        try:
            value = CLASSIFY_PARAMETERS[name](text)
            request.MergeFrom(pb.ClassifyRequest(**({value: True} if name == "heatmap" else {name: value})))
        except (KeyError, ValueError):
            raise UsageError(f"query parameter '{name}' has no valid value: '{text[:100]}'") from None
    return request


async def _proto_json(message: Message) -> Response:
    """Return the JSON form of a message, with the names and all fields of the proto file."""

    def convert() -> Response:
        content = MessageToDict(message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)
        return JsonResponse(content)

    return await run_inline_or_in_thread(convert, in_thread=message.ByteSize() > _LARGE_ANSWER)
