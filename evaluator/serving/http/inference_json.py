"""The Open Inference Protocol in JSON, with the extension for binary tensor data, to and from plain types.

https://github.com/kserve/open-inference-protocol, specification/protocol/inference_rest.md; the extension is Triton's,
docs/protocol/extension_binary_data.md. `serving.inference` checks the requests.
"""

from collections.abc import Sequence
from typing import Annotated, Any, Literal, TypeAlias

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from ...errors import UsageError
from ..inference import EXPECTED_INPUT, INPUT, OUTPUT, InferAnswer, InferRequest, InputTensor, split_elements

LENGTH_HEADER = "inference-header-content-length"  # bytes of JSON before the binary data
# Decoding holds the GIL, and each value becomes an object many times its size; as for protobuf's messages.
_SMALL_JSON, _MAX_PARTS = 2**14, 1000

Int64: TypeAlias = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
Parameters: TypeAlias = dict[str, bool | Int64 | float | str | None]
# Any kind is parsed, so that the check of the datatype can explain a tensor of numbers.
Data: TypeAlias = Annotated[list[Any], Meta(extra_json_schema={"items": {"type": "string"}})]


class RequestInput(Struct, forbid_unknown_fields=True):
    """An input tensor. data: of a BYTES tensor, base64 of each element; otherwise the data is binary."""

    name: str
    shape: list[Int64]
    datatype: str
    parameters: Parameters | None = None
    data: Data | None = None


class RequestOutput(Struct, forbid_unknown_fields=True):
    """A requested output tensor."""

    name: str
    parameters: Parameters | None = None


class ModelInferRequest(Struct, forbid_unknown_fields=True):
    """1 to 64 images, and the protocol to classify them with. model_name, model_version: as in the path, if at all."""

    inputs: list[RequestInput]
    id: str | None = None
    model_name: str | None = None
    model_version: str | None = None
    parameters: Parameters | None = None
    outputs: list[RequestOutput] | None = None


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


def parse_infer_request(body: bytes, length: str | None, name: str, version: str = "") -> InferRequest:
    """Return a request in plain types. length: value of LENGTH_HEADER; name, version: of the path.

    Raises UsageError.
    """
    if length is not None and not (length.isdecimal() and len(length) < 20 and int(length) <= len(body)):
        raise UsageError(f"header {LENGTH_HEADER} should be the number of bytes of JSON in a body of {len(body)} bytes")
    text, binary = (body, memoryview(b"")) if length is None else (body[: int(length)], memoryview(body)[int(length) :])
    parsed = _decode(text)
    outputs = parsed.outputs or []
    named = (("model_name", parsed.model_name, name), ("model_version", parsed.model_version, version))
    for field, of_body, of_path in named:
        if of_body and of_path and of_body != of_path:
            raise UsageError(
                f"`{field}` is {of_body[:100]!r}, but the path has {of_path[:100]!r}; leave it out, or give that of "
                "the path"
            )
    return InferRequest(
        model=name,
        version=version or parsed.model_version or "",
        id=parsed.id or "",
        parameters=parsed.parameters or {},
        inputs=len(parsed.inputs),
        tensor=_input(parsed.inputs[0], binary) if parsed.inputs else None,
        outputs=[output.name for output in outputs],
        output_parameters=(outputs and outputs[0].parameters) or {},
    )


def _decode(text: bytes) -> ModelInferRequest:
    if len(text) > _SMALL_JSON and sum(map(text.count, (b",", b"[", b"{"))) > _MAX_PARTS:
        raise UsageError(f"the JSON of this request has more than {_MAX_PARTS} values; {EXPECTED_INPUT}")
    try:
        return msgspec.json.decode(text, type=ModelInferRequest)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UsageError(f"the body is not a request of the Open Inference Protocol: {error}") from None


def _input(tensor: RequestInput, binary: memoryview) -> InputTensor:
    parameters, data = tensor.parameters or {}, tensor.data
    size = parameters.get("binary_data_size")

    def elements(count: int) -> Sequence[Any]:
        if (size is None) == (data is None):
            raise UsageError(
                f"input '{INPUT}' should have either `data`, the images in base64, or the parameter `binary_data_size`"
            )
        if (size or 0) != len(binary):
            raise UsageError(f"`binary_data_size` is {size or 0}, but the body has {len(binary)} bytes of binary data")
        if data is None:
            return split_elements(bytes(binary), count)
        return [element for row in data for element in (row if isinstance(row, list) else [row])]

    return InputTensor(tensor.name, tensor.datatype, tensor.shape, parameters, elements, json=data is not None)


def infer_response(answer: InferAnswer) -> tuple[bytes, dict[str, str]]:
    """Return body and headers of an answer, whose elements may be binary data behind the JSON."""
    raw, output = b"", ResponseOutput(OUTPUT, answer.datatype, answer.shape)
    if answer.binary:
        raw = answer.raw()
        output.parameters = {"binary_data_size": len(raw)}
    else:
        output.data = [*answer.numbers()] if answer.top is None else [*answer.texts()]
    model = answer.model
    text = msgspec.json.encode(ModelInferResponse(model.name, str(model.version), [output], answer.id or UNSET))
    if not answer.binary:
        return text, {"content-type": "application/json"}
    return text + raw, {"content-type": "application/octet-stream", LENGTH_HEADER: str(len(text))}
