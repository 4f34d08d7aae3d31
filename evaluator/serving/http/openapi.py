"""The OpenAPI description of the HTTP port: its routes, with the schemas of /v1 from the proto file."""

import importlib.metadata
from collections.abc import Iterable
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from starlette.routing import Route

from ...pb.prelunet.v1 import prelunet_pb2 as pb

_NAMES = {  # of types in JSON Schema
    FieldDescriptor.CPPTYPE_DOUBLE: "number",
    FieldDescriptor.CPPTYPE_FLOAT: "number",
    FieldDescriptor.CPPTYPE_INT32: "integer",
    FieldDescriptor.CPPTYPE_UINT32: "integer",
    FieldDescriptor.CPPTYPE_BOOL: "boolean",
    FieldDescriptor.CPPTYPE_STRING: "string",
}
_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {"type": "string", "description": "What is wrong, and how to fix it."},
        "code": {"type": "string", "description": "Name of the gRPC status; not under /v2."},
        "reason": {"type": "string", "description": "As in google.rpc.ErrorInfo, e.g. IMAGE_ERROR; not under /v2."},
        "request_id": {"type": "string", "description": "As the header x-request-id; not under /v2."},
    },
}
_QUERY = {
    "model": ({"type": "string"}, "Name of a served model; required when there are several."),
    "protocol": ({"type": "string"}, "As in the proto file, e.g. center, dense-256, multi-scale."),
    "top_k": ({"type": "integer", "minimum": 1}, "Number of predictions; 5 by default."),
    "heatmap": ({"enum": ["png", "maps"]}, "Heat maps of the five best classes: an image, or numbers in `maps`."),
    "apply_exif": ({"type": "boolean"}, "Whether to apply the image's EXIF orientation."),
    "scales": ({"type": "string", "pattern": r"^\d+(,\d+)*$"}, "Scales in pixels that replace the protocol's."),
    "mirror": ({"type": "boolean"}, "Whether each scale is also classified mirrored."),
}
_FILE = {"type": "string", "contentMediaType": "application/octet-stream"}
_FORM = {"type": "object", "properties": {"image": _FILE}, "required": ["image"], "additionalProperties": False}
_ANSWERS = {
    "/v1/classify": pb.ClassifyResponse.DESCRIPTOR,
    "/v1/models": pb.ListModelsResponse.DESCRIPTOR,
    "/v1/models/{name}": pb.Model.DESCRIPTOR,
}


def description(routes: Iterable[Route]) -> dict[str, Any]:
    """Return the description as plain data. routes: named after gRPC methods."""
    schemas: dict[str, Any] = {"Error": _ERROR}
    error = {"schema": {"$ref": "#/components/schemas/Error"}}
    paths: dict[str, Any] = {}
    for route in routes:
        (method,) = (route.methods or set()) - {"HEAD"}
        path = route.path_format
        answer = _schema(_ANSWERS[path], schemas) if path in _ANSWERS else {}
        operation: dict[str, Any] = {
            "summary": f"As {route.name} over gRPC.",
            "parameters": [
                {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
                for name in route.param_convertors
            ],
            "responses": {
                "200": {"description": "The answer.", "content": {"application/json": {"schema": answer}}},
                "default": {"description": "An error.", "content": {"application/json": error}},
            },
        }
        if method == "POST":
            operation["requestBody"] = {"content": {"*/*": {}}}
        if path == "/v1/classify":
            operation["requestBody"]["content"]["multipart/form-data"] = {"schema": _FORM}
            operation["parameters"] = [
                {"name": name, "in": "query", "schema": schema, "description": text}
                for name, (schema, text) in _QUERY.items()
            ]
        paths[path] = {method.lower(): operation}
    return {
        "openapi": "3.1.0",
        "info": {"title": "prelunet", "version": importlib.metadata.version("prelunet")},
        "security": [{}, {"token": []}],
        "paths": paths,
        "components": {"securitySchemes": {"token": {"type": "http", "scheme": "bearer"}}, "schemas": schemas},
    }


def _schema(message: Any, schemas: dict[str, Any]) -> dict[str, Any]:
    """Return a reference to the schema of a message, given its descriptor; the schema is added to `schemas`."""
    if message.name not in schemas:
        schemas[message.name] = {
            "type": "object",
            "properties": {field.name: _field_schema(field, schemas) for field in message.fields},
            "required": [field.name for field in message.fields if not field.has_presence],
            "additionalProperties": False,
        }
    return {"$ref": f"#/components/schemas/{message.name}"}


def _field_schema(field: FieldDescriptor, schemas: dict[str, Any]) -> dict[str, Any]:
    inner = field.message_type
    if inner is None:
        one: dict[str, Any] = {"type": _NAMES[field.cpp_type]}
    elif inner.GetOptions().map_entry:
        return {"type": "object", "additionalProperties": _field_schema(inner.fields_by_name["value"], schemas)}
    else:
        one = _schema(inner, schemas)
    return {"type": "array", "items": one} if field.is_repeated else one
