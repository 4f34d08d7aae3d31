"""The Open Inference Protocol in JSON, with the extension for binary tensor data: to and from proto/inference.

https://github.com/kserve/open-inference-protocol, specification/protocol/inference_rest.md; the extension is Triton's,
docs/protocol/extension_binary_data.md. Nothing is computed here, and `inference_messages` checks the requests.
"""

import base64
import json
import math
from collections.abc import Mapping
from typing import Any, TypeAlias

import msgspec
import numpy as np
from google.protobuf.message import Message

from ...errors import UsageError
from ...pb.inference import inference_pb2 as pb
from ..api.inference_messages import LENGTH_PREFIX, raw_elements

LENGTH_HEADER = "inference-header-content-length"  # bytes of JSON before the binary data
# Decoding holds the GIL, and each value becomes an object many times its size, as in `interceptor.exceeds_part_limit`.
_SMALL_JSON, _MAX_PARTS = 2**14, 1000

Value: TypeAlias = bool | int | float | str
Parameters: TypeAlias = dict[str, Value]


class Input(msgspec.Struct, forbid_unknown_fields=True):
    """An input tensor. data: of a BYTES tensor, base64 of each element; otherwise the data is binary."""

    name: str
    shape: list[int]
    datatype: str
    parameters: Parameters = {}
    data: list[str | list[str]] | None = None


class Output(msgspec.Struct, forbid_unknown_fields=True):
    """A requested output tensor."""

    name: str
    parameters: Parameters = {}


class InferRequest(msgspec.Struct, forbid_unknown_fields=True):
    """The JSON of a request."""

    inputs: list[Input]
    id: str = ""
    parameters: Parameters = {}
    outputs: list[Output] = []


def parse_infer_request(body: bytes, length: str | None, name: str, version: str) -> tuple[pb.ModelInferRequest, bool]:
    """Return the message of a request, and whether its answer should be binary.

    length: value of LENGTH_HEADER; name, version: of the model. Raises UsageError.
    """
    if length is not None and not (length.isdecimal() and len(length) < 20 and int(length) <= len(body)):
        raise UsageError(f"header {LENGTH_HEADER} should be the number of bytes of JSON in a body of {len(body)} bytes")
    text, binary = (body, memoryview(b"")) if length is None else (body[: int(length)], memoryview(body)[int(length) :])
    parsed = _decode(text)
    binary_answer = _flag(parsed.parameters, "binary_data_output")
    request = pb.ModelInferRequest(model_name=name, model_version=version, id=parsed.id)
    try:
        _set(request.parameters, parsed.parameters)
        for each in parsed.inputs:
            size = each.parameters.pop("binary_data_size", None)
            tensor = request.inputs.add(name=each.name, datatype=each.datatype, shape=each.shape)
            _set(tensor.parameters, each.parameters)
            data, binary = _data_of(each, size, binary)
            request.raw_input_contents.append(data)
        for wanted in parsed.outputs:
            binary_answer = _flag(wanted.parameters, "binary_data", default=binary_answer)
            _set(request.outputs.add(name=wanted.name).parameters, wanted.parameters)
    except ValueError as error:  # of protobuf: a number that does not fit into 64 bits
        raise UsageError(f"the request has a number that is too large: {error}") from None
    if binary:
        raise UsageError(f"the body has {len(binary)} bytes after the binary data of its inputs")
    return request, binary_answer


def _decode(text: bytes) -> InferRequest:
    if len(text) > _SMALL_JSON and sum(map(text.count, (b",", b"[", b"{"))) > _MAX_PARTS:
        raise UsageError(f"the JSON of this request has more than {_MAX_PARTS} values; send fewer images")
    try:
        return msgspec.json.decode(text, type=InferRequest)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UsageError(f"the body is not a request of the Open Inference Protocol: {error}") from None


def _data_of(tensor: Input, size: Value | None, binary: memoryview) -> tuple[bytes, memoryview]:
    """Return the data of a tensor, and the binary data after it. size: of the tensor's binary data, None for base64."""
    if (size is None) == (tensor.data is None):
        raise UsageError(
            f"input '{tensor.name[:100]}' should have either `data`, the images in base64, or the parameter "
            "`binary_data_size`"
        )
    if tensor.data is not None:
        return _elements(tensor), binary
    if isinstance(size, bool) or not isinstance(size, int) or not 0 <= size <= len(binary):
        raise UsageError(f"`binary_data_size` is {size!r}, but the body has {len(binary)} bytes of binary data")
    return bytes(binary[:size]), binary[size:]


def _flag(parameters: Parameters, name: str, *, default: bool = False) -> bool:
    """Remove a parameter that only HTTP has, and return its value."""
    value = parameters.pop(name, default)
    if not isinstance(value, bool):
        raise UsageError(f"parameter '{name}' should be true or false")
    return value


def _set(target: Any, parameters: Parameters) -> None:
    names = {bool: "bool_param", int: "int64_param", float: "double_param", str: "string_param"}
    for name, value in parameters.items():
        setattr(target[name], names[type(value)], value)


def _elements(tensor: Input) -> bytes:
    """Return the elements of a tensor as binary data."""
    texts = [text for row in tensor.data or () for text in ([row] if isinstance(row, str) else row)]
    try:
        elements = [base64.b64decode(text, validate=True) for text in texts]
    except ValueError:
        raise UsageError(f"the elements of input '{tensor.name[:100]}' are not base64; or send binary data") from None
    if len(elements) != math.prod(tensor.shape[:2]):
        raise UsageError(
            f"input '{tensor.name[:100]}' has {len(elements)} elements, but its shape is {tensor.shape[:8]}"
        )
    return raw_elements(elements)


def infer_response(response: pb.ModelInferResponse, *, binary: bool) -> tuple[bytes, dict[str, str]]:
    """Return body and headers of an answer. response: with its one output in `raw_output_contents`."""
    (tensor,), (raw,) = response.outputs, response.raw_output_contents
    output: dict[str, Any] = {"name": tensor.name, "datatype": tensor.datatype, "shape": list(tensor.shape)}
    if binary:
        output["parameters"] = {"binary_data_size": len(raw)}
    elif tensor.datatype == "BYTES":
        output["data"] = _texts(raw)
    else:
        output["data"] = np.frombuffer(raw, "<f4").tolist()
    content = {"model_name": response.model_name, "model_version": response.model_version, "outputs": [output]}
    text = json.dumps(content | ({"id": response.id} if response.id else {})).encode()
    if not binary:
        return text, {"content-type": "application/json"}
    return text + raw, {"content-type": "application/octet-stream", LENGTH_HEADER: str(len(text))}


def _texts(raw: bytes) -> list[str]:
    texts, end = [], 0
    while end < len(raw):
        start = end + LENGTH_PREFIX
        end = start + int.from_bytes(raw[end:start], "little")
        texts.append(raw[start:end].decode())
    return texts


def plain(message: Message) -> dict[str, Any]:
    """Return a message as JSON's types: 64-bit integers are numbers, which protobuf's own JSON has as text."""
    result: dict[str, Any] = {}
    for field in message.DESCRIPTOR.fields:
        value = getattr(message, field.name)
        if isinstance(value, Mapping):
            result[field.name] = {key: _plain(field, each) for key, each in value.items()}
        elif field.is_repeated:
            result[field.name] = [_plain(field, each) for each in value]
        elif not field.has_presence or message.HasField(field.name):
            result[field.name] = _plain(field, value)
    return result


def _plain(field: Any, value: Any) -> Any:
    if isinstance(value, Message):
        return plain(value)
    return field.enum_type.values_by_number[value].name if field.enum_type is not None else value
