"""The Open Inference Protocol in JSON, with the extension for binary tensor data, to and from plain types.

https://github.com/kserve/open-inference-protocol, specification/protocol/inference_rest.md; the extension is Triton's,
docs/protocol/extension_binary_data.md. `serving.inference` checks the requests.
"""

import base64
import math
from functools import partial
from typing import Annotated, Literal, TypeAlias

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from ...errors import UsageError
from ..inference import OUTPUT, InferAnswer, InferRequest, InputTensor, split_elements

LENGTH_HEADER = "inference-header-content-length"  # bytes of JSON before the binary data
# Decoding holds the GIL, and each value becomes an object many times its size; as for protobuf's messages.
_SMALL_JSON, _MAX_PARTS = 2**14, 1000

Int64: TypeAlias = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
Value: TypeAlias = bool | Int64 | float | str
Parameters: TypeAlias = dict[str, Value]


class RequestInput(Struct, forbid_unknown_fields=True):
    """An input tensor. data: of a BYTES tensor, base64 of each element; otherwise the data is binary."""

    name: str
    shape: list[Int64]
    datatype: str
    parameters: Parameters = {}
    data: list[str | list[str]] | None = None


class RequestOutput(Struct, forbid_unknown_fields=True):
    """A requested output tensor."""

    name: str
    parameters: Parameters = {}


class ModelInferRequest(Struct, forbid_unknown_fields=True):
    """1 to 64 images, and the protocol to classify them with."""

    inputs: list[RequestInput]
    id: str = ""
    parameters: Parameters = {}
    outputs: list[RequestOutput] = []


class ResponseOutput(Struct, forbid_unknown_fields=True):
    """An output tensor. parameters: `binary_data_size`, if its elements are binary data behind the JSON."""

    name: str
    datatype: Literal["FP32", "BYTES"]
    shape: tuple[int, ...]
    parameters: dict[str, int] | UnsetType = UNSET
    data: list[float | str] | UnsetType = UNSET


class ModelInferResponse(Struct, forbid_unknown_fields=True):
    """The scores of the images, or their best classes. id: the request's, if it has one."""

    model_name: str
    model_version: str
    outputs: list[ResponseOutput]
    id: str | UnsetType = UNSET


def parse_infer_request(body: bytes, length: str | None) -> tuple[InferRequest, str, bool]:
    """Return a request in plain types, its id, and whether its answer should be binary.

    length: value of LENGTH_HEADER. Raises UsageError.
    """
    if length is not None and not (length.isdecimal() and len(length) < 20 and int(length) <= len(body)):
        raise UsageError(f"header {LENGTH_HEADER} should be the number of bytes of JSON in a body of {len(body)} bytes")
    text, binary = (body, memoryview(b"")) if length is None else (body[: int(length)], memoryview(body)[int(length) :])
    parsed = _decode(text)
    binary_answer = _flag(parsed.parameters, "binary_data_output")
    tensors = []
    for each in parsed.inputs:
        size = each.parameters.pop("binary_data_size", None)
        tensor, binary = _input(each, size, binary)
        tensors.append(tensor)
    for wanted in parsed.outputs:
        binary_answer = _flag(wanted.parameters, "binary_data", default=binary_answer)
    if binary:
        raise UsageError(f"the body has {len(binary)} bytes after the binary data of its inputs")
    names = [output.name for output in parsed.outputs]
    of_output = parsed.outputs[0].parameters if names else {}
    request = InferRequest(parsed.parameters, len(tensors), tensors[0] if tensors else None, names, of_output)
    return request, parsed.id, binary_answer


def _decode(text: bytes) -> ModelInferRequest:
    if len(text) > _SMALL_JSON and sum(map(text.count, (b",", b"[", b"{"))) > _MAX_PARTS:
        raise UsageError(f"the JSON of this request has more than {_MAX_PARTS} values; send fewer images")
    try:
        return msgspec.json.decode(text, type=ModelInferRequest)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UsageError(f"the body is not a request of the Open Inference Protocol: {error}") from None


def _flag(parameters: Parameters, name: str, *, default: bool = False) -> bool:
    """Remove a parameter that only HTTP has, and return its value."""
    value = parameters.pop(name, default)
    if not isinstance(value, bool):
        raise UsageError(f"parameter '{name}' should be true or false")
    return value


def _input(tensor: RequestInput, size: Value | None, binary: memoryview) -> tuple[InputTensor, memoryview]:
    """Return a tensor, and the binary data after its own. size: of the tensor's binary data, None for base64."""
    if (size is None) == (tensor.data is None):
        raise UsageError(
            f"input '{tensor.name[:100]}' should have either `data`, the images in base64, or the parameter "
            "`binary_data_size`"
        )
    if tensor.data is not None:
        elements = _decoded(tensor, tensor.data)
        images, rest = (lambda _: elements), binary
    elif isinstance(size, bool) or not isinstance(size, int) or not 0 <= size <= len(binary):
        raise UsageError(f"`binary_data_size` is {size!r}, but the body has {len(binary)} bytes of binary data")
    else:
        images, rest = partial(split_elements, bytes(binary[:size])), binary[size:]
    return InputTensor(tensor.name, tensor.datatype, tensor.shape, tensor.parameters, images), rest


def _decoded(tensor: RequestInput, data: list[str | list[str]]) -> list[bytes]:
    """Return the elements of a tensor. data: its rows."""
    texts = [text for row in data for text in ([row] if isinstance(row, str) else row)]
    try:
        elements = [base64.b64decode(text, validate=True) for text in texts]
    except ValueError:
        raise UsageError(f"the elements of input '{tensor.name[:100]}' are not base64; or send binary data") from None
    if len(elements) != math.prod(tensor.shape[:2]):
        raise UsageError(
            f"input '{tensor.name[:100]}' has {len(elements)} elements, but its shape is {tensor.shape[:8]}"
        )
    return elements


def infer_response(answer: InferAnswer, id_: str, *, binary: bool) -> tuple[bytes, dict[str, str]]:
    """Return body and headers of an answer. id_: the request's; binary: with its elements behind the JSON."""
    raw, output = b"", ResponseOutput(OUTPUT, answer.datatype, answer.shape)
    if binary:
        raw = answer.raw()
        output.parameters = {"binary_data_size": len(raw)}
    else:
        output.data = [*answer.numbers()] if answer.top is None else [*answer.texts()]
    model = answer.model
    text = msgspec.json.encode(ModelInferResponse(model.name, str(model.version), [output], id_ or UNSET))
    if not binary:
        return text, {"content-type": "application/json"}
    return text + raw, {"content-type": "application/octet-stream", LENGTH_HEADER: str(len(text))}
