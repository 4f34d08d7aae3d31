"""The OpenAPI description of the HTTP port, from the types that its routes declare."""

import importlib.metadata
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, TypeAlias

import msgspec

from ..access import REQUIRED
from .door import JSON, Endpoint, Error, InferenceError

File: TypeAlias = Annotated[str, msgspec.Meta(extra_json_schema={"contentMediaType": "application/octet-stream"})]

_ERRORS = {
    400: "The request is invalid, or the server cannot load the model.",
    401: "The server requires a token, and this request has none that it knows.",
    403: "The token lacks the scope for this, or a web page of another site has sent the request.",
    404: "The model or its version is not served.",
    413: "The body is too large.",
    429: "The server is at its limits, or has too little memory for the request; Retry-After may have the seconds.",
    500: "A fault of the server, or of its model file.",
    503: "The server is starting or stopping, or its machine has failed.",
    504: "The time for the request is over.",
}


class Operation(msgspec.Struct, frozen=True):
    """A route that does what a gRPC method does, with its scope and limits.

    path: as Starlette has it; name: of the method; endpoint: answers a request; answer: type of its JSON; bodies: types
    of the request by media type; query: struct of the parameters; binary: also answers with binary data; probe: has the
    same answer with status 503; suffix: of its name in the description, which is such as modelReadyOfVersion.
    """

    method: Literal["GET", "POST"]
    path: str
    name: str
    endpoint: Endpoint
    answer: Any
    bodies: Mapping[str, Any] = {}
    query: type[msgspec.Struct] | None = None
    binary: bool = False
    probe: bool = False
    suffix: str = ""

    @property
    def rpc(self) -> str:
        """Return the full name of the method, as in "prelunet.v1.PreluNetService/Classify"."""
        service = "inference.GRPCInferenceService" if self.path.startswith("/v2") else "prelunet.v1.PreluNetService"
        return f"{service}/{self.name}"


def description(operations: Sequence[Operation]) -> dict[str, Any]:
    """Return the description as plain data."""
    declared = [kind for each in operations for kind in (each.answer, *each.bodies.values())]
    types: list[Any] = [File, Error, InferenceError, *declared]
    found, components = msgspec.json.schema_components(types, ref_template="#/components/schemas/{name}")
    schemas = dict(zip(map(repr, types), found, strict=True))
    paths: dict[str, Any] = {}
    for each in operations:
        path = each.path.replace(":path", "")
        paths[path] = {each.method.lower(): _operation(each, path, schemas)}
    return {
        "openapi": "3.1.0",
        "info": {"title": "prelunet", "version": importlib.metadata.version("prelunet")},
        "security": [{}, {"token": []}],
        "paths": paths,
        "components": {"securitySchemes": {"token": {"type": "http", "scheme": "bearer"}}, "schemas": components},
    }


def _operation(operation: Operation, path: str, schemas: Mapping[str, Any]) -> dict[str, Any]:
    """Return the description of one route. schemas: by the representation of the type."""

    def content(types: Mapping[str, Any]) -> dict[str, Any]:
        return {media_type: {"schema": schemas[repr(kind)]} for media_type, kind in types.items()}

    parameters: list[dict[str, Any]] = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in ("name", "version")
        if f"{{{name}}}" in path
    ]
    if operation.query is not None:
        fields = msgspec.json.schema(operation.query)["$defs"][operation.query.__name__]["properties"]
        for name, schema in fields.items():
            lists = {"style": "form", "explode": False} if schema.get("type") == "array" else {}
            parameters.append({"name": name, "in": "query", "schema": schema, **lists})
    answer = content({JSON: operation.answer} | ({"application/octet-stream": File} if operation.binary else {}))
    error = content({JSON: InferenceError if path.startswith("/v2") else Error})
    needs_token = REQUIRED[f"/{operation.rpc}"] != "nothing"
    responses = {
        "200": {"description": "The answer.", "content": answer},
        **{
            str(status): {"description": text, "content": error}
            for status, text in _ERRORS.items()
            if status != 401 or needs_token
        },
        "default": {"description": "Another error.", "content": error},
    }
    if operation.probe:
        responses["503"] = {"description": "Not ready.", "content": answer}
    body = {"requestBody": {"content": content(operation.bodies)}} if operation.bodies else {}
    return {
        "operationId": f"{operation.name[0].lower()}{operation.name[1:]}{operation.suffix}",
        "summary": f"As {operation.rpc} over gRPC.",
        "parameters": parameters,
        **body,
        "responses": responses,
    }
