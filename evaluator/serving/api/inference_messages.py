"""Parse and build messages of proto/inference. Nothing is computed here."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from ...arrays import Float32Array
from ...contract import MAX_SCALES, ModelContract
from ...engine.scores import top_k
from ...errors import UsageError
from ...pb.inference import inference_pb2 as pb
from ...protocols import EvaluationProtocol, ProtocolOverrides, build_protocol, default_protocol_name
from ..classifier import Classifier
from ..observability.logs import truncate
from ..repository import Version

Parameters: TypeAlias = Mapping[str, pb.InferParameter]
Input: TypeAlias = pb.ModelInferRequest.InferInputTensor

INPUT, OUTPUT = "images", "scores"
MAX_IMAGES = 64  # per call
MAX_VIEWS = 1024  # of all images together, if a call has several
# Names as in Triton's documentation.
EXTENSIONS = ("classification", "model_configuration", "model_repository", "statistics", "parameters")
_PLATFORM = "prelunet_onnx"

LENGTH_PREFIX = 4  # bytes before each element of raw BYTES, little-endian
_EXPECTED_INPUT = f"this model takes one input: '{INPUT}', datatype BYTES, shape [N] with N from 1 to {MAX_IMAGES}"
MAX_QUOTED = 100  # characters of a client's text in an error message
_SCALES = re.compile(r"\d{1,9}(,\d{1,9})*", re.ASCII)

# Parameters and the types of InferParameter that each may have.
_REQUEST_PARAMETERS: Mapping[str, frozenset[str]] = {
    "protocol": frozenset({"string"}),
    "scales": frozenset({"string", "int64"}),
    "mirror": frozenset({"bool"}),
    "apply_exif": frozenset({"bool"}),
    "timeout": frozenset({"int64"}),
    "priority": frozenset({"int64"}),
    "triton_enable_empty_final_response": frozenset({"bool"}),  # sent by Triton's C++ client with every call
}
_OUTPUT_PARAMETERS: Mapping[str, frozenset[str]] = {"classification": frozenset({"int64"})}
_INPUT_PARAMETERS: Mapping[str, frozenset[str]] = {}
# Triton's parameters, by prefix. Its clients send a whole family when the user sets one of it.
_UNSUPPORTED_PARAMETERS: Mapping[str, str] = {
    "sequence_": "this server has no sequences, each request is independent. Call without a sequence_id",
    "shared_memory_": "this server accepts images only in the message, and answers in one. Call without shared memory",
}


@dataclass(frozen=True)
class ParsedRequest:
    """A validated request.

    id: the client's, repeated in the answer; images: encoded, 1 to MAX_IMAGES; top: number of best classes to return
    for each image, None for all scores; timeout: in seconds, None for only the call's deadline; raw: whether tensors
    are sent as raw bytes.
    """

    id: str
    images: tuple[bytes, ...]
    protocol: EvaluationProtocol
    top: int | None
    timeout: float | None
    raw: bool


def parse_request(request: pb.ModelInferRequest, contract: ModelContract) -> ParsedRequest:
    """Parse and validate a request; raises UsageError."""
    values = _values(request.parameters, _REQUEST_PARAMETERS, "the request")
    tensor = _input_of(request)
    count = _image_count(tensor.shape)
    raw = len(request.raw_input_contents) > 0
    images = _raw_images(request, tensor, count) if raw else _typed_images(tensor, count)
    protocol = _protocol_of(values, contract)
    if count > 1 and count * len(protocol.views) > MAX_VIEWS:
        raise UsageError(
            f"{count} images have {count * len(protocol.views)} views with protocol {protocol.name}, but a call may "
            f"have at most {MAX_VIEWS}. Send fewer images per call"
        )
    return ParsedRequest(request.id, tuple(images), protocol, _top_of(request, contract), _timeout_of(values), raw)


def _values(parameters: Parameters, allowed: Mapping[str, frozenset[str]], where: str) -> dict[str, Any]:
    """Return the values of parameters by name; UsageError for an unknown parameter or a wrong type."""
    values: dict[str, Any] = {}
    for name, parameter in sorted(parameters.items()):  # a map has no order on the wire
        if name.startswith(tuple(_UNSUPPORTED_PARAMETERS)):
            reason = next(why for prefix, why in _UNSUPPORTED_PARAMETERS.items() if name.startswith(prefix))
            raise UsageError(f"{where} has a parameter '{truncate(name, MAX_QUOTED)}': {reason}")
        if name not in allowed:
            raise UsageError(
                f"{where} has an unknown parameter '{truncate(name, MAX_QUOTED)}'. "
                f"Allowed: {', '.join(allowed) or 'none'}"
            )
        choice = parameter.WhichOneof("parameter_choice")
        kind = "empty" if choice is None else choice.removesuffix("_param").removeprefix("u")  # unsigned ones, too
        if choice is None or kind not in allowed[name]:
            types = " or ".join(sorted(allowed[name]))
            raise UsageError(f"parameter '{name}' of {where} should be of type {types}, not {kind}")
        values[name] = getattr(parameter, choice)
    return values


def _input_of(request: pb.ModelInferRequest) -> Input:
    """Return the input tensor; UsageError unless it is the only one and has the expected name and type."""
    if not request.inputs:
        raise UsageError(f"the request has no input; {_EXPECTED_INPUT}")
    if len(request.inputs) > 1:  # there may be millions
        raise UsageError(f"the request has {len(request.inputs)} inputs; {_EXPECTED_INPUT}")
    tensor = request.inputs[0]
    if tensor.name != INPUT:
        raise UsageError(f"the model has no input '{truncate(tensor.name, MAX_QUOTED)}'; {_EXPECTED_INPUT}")
    if tensor.datatype != "BYTES":
        raise UsageError(f"input '{INPUT}' has datatype '{truncate(tensor.datatype, MAX_QUOTED)}'; {_EXPECTED_INPUT}")
    _values(tensor.parameters, _INPUT_PARAMETERS, f"input '{INPUT}'")
    return tensor


def _image_count(shape: Sequence[int]) -> int:
    """Return the number of images that a shape declares."""
    if not (len(shape) == 1 or (len(shape) == 2 and shape[1] == 1)) or not 1 <= shape[0] <= MAX_IMAGES:
        dimensions = ", ".join(map(str, shape[:8])) + (", …" if len(shape) > 8 else "")
        raise UsageError(f"input '{INPUT}' has shape [{dimensions}]; {_EXPECTED_INPUT}")
    return shape[0]


def _raw_images(request: pb.ModelInferRequest, tensor: Input, count: int) -> list[bytes]:
    """Return the images in `raw_input_contents`."""
    if tensor.contents.ListFields():
        raise UsageError(
            f"input '{INPUT}' has elements both in `contents` and in `raw_input_contents`; send only one of them"
        )
    if len(request.raw_input_contents) > 1:
        raise UsageError(
            f"`raw_input_contents` has {len(request.raw_input_contents)} entries for one input; send one entry"
        )
    raw = request.raw_input_contents[0]
    images, end = [], 0
    for index in range(count):
        start = end + LENGTH_PREFIX
        end = start + int.from_bytes(raw[end:start], "little")
        if end > len(raw):
            raise UsageError(
                f"`raw_input_contents` of {len(raw)} bytes ends within {INPUT}[{index}], but its shape declares "
                f"{count}. Precede each image by its length as {LENGTH_PREFIX} bytes, little-endian"
            )
        images.append(raw[start:end])
    if end < len(raw):
        raise UsageError(
            f"`raw_input_contents` has {len(raw) - end} bytes after {INPUT}[{count - 1}]; the shape of '{INPUT}' "
            "should give the number of images"
        )
    return images


def _typed_images(tensor: Input, count: int) -> list[bytes]:
    """Return the images in `contents`."""
    filled = [field.name for field, _ in tensor.contents.ListFields()]
    if wrong := [name for name in filled if name != "bytes_contents"]:
        raise UsageError(f"input '{INPUT}' has `{wrong[0]}`; the elements of a BYTES tensor go into `bytes_contents`")
    elements = tensor.contents.bytes_contents
    if not elements:
        raise UsageError(
            f"input '{INPUT}' has no elements; send the images in `raw_input_contents`, or as `bytes_contents` in the "
            "input's `contents`"
        )
    if len(elements) != count:
        raise UsageError(
            f"input '{INPUT}' has {len(elements)} elements in `bytes_contents`, but its shape declares {count}; the "
            "two should be equal"
        )
    return list(elements)


def _protocol_of(values: Mapping[str, Any], contract: ModelContract) -> EvaluationProtocol:
    """Return the requested protocol; UsageError if there is no such protocol."""
    overrides = ProtocolOverrides(
        scales=_scales_of(values.get("scales")), mirror=values.get("mirror"), apply_exif=values.get("apply_exif")
    )
    return build_protocol(str(values.get("protocol", "")) or default_protocol_name(contract), contract, overrides)


def _scales_of(value: str | int | None) -> tuple[int, ...] | None:
    if value is None:
        return None
    if isinstance(value, str) and (len(value) > 6 * MAX_SCALES or not _SCALES.fullmatch(value)):
        raise UsageError(
            f"parameter 'scales' should be 1 to {MAX_SCALES} comma-separated integers in pixels, as in '256,384,480'"
        )
    return tuple(map(int, str(value).split(",")))


def _timeout_of(values: Mapping[str, Any]) -> float | None:
    """Return the requested timeout in seconds; None for only the call's deadline."""
    if values.get("priority", 0) != 0:
        raise UsageError("parameter 'priority' should be 0: this server has no priorities, it serves clients in turn")
    microseconds = int(values.get("timeout", 0))
    if microseconds < 0:
        raise UsageError(f"parameter 'timeout' is {microseconds} microseconds; it should be 0 (none) or more")
    return microseconds / 1e6 or None


def _top_of(request: pb.ModelInferRequest, contract: ModelContract) -> int | None:
    """Return the number of best classes to return for each image; None for all scores."""
    if not request.outputs:
        return None
    wrong = (output.name for output in request.outputs if output.name != OUTPUT)
    if (name := next(wrong, None)) is not None:
        raise UsageError(f"the model has no output '{truncate(name, MAX_QUOTED)}'. Its only output: {OUTPUT}")
    if len(request.outputs) > 1:
        raise UsageError(f"output '{OUTPUT}' is requested {len(request.outputs)} times; request it once")
    values = _values(request.outputs[0].parameters, _OUTPUT_PARAMETERS, f"output '{OUTPUT}'")
    if "classification" not in values:
        return None
    top, classes = int(values["classification"]), len(contract.classes)
    if not 1 <= top <= classes:
        raise UsageError(
            f"parameter 'classification' is {top}, but this model has {classes} classes; give 1 to {classes}"
        )
    return top


def infer_response(
    classifier: Classifier, parsed: ParsedRequest, scores: Sequence[Float32Array]
) -> pb.ModelInferResponse:
    """Build the answer to a request. scores: one float32 (classes,) per image."""
    contract = classifier.session.contract
    response = pb.ModelInferResponse(model_name=classifier.name, model_version=str(classifier.version), id=parsed.id)
    if parsed.top is None:
        output = response.outputs.add(name=OUTPUT, datatype="FP32", shape=(len(scores), len(contract.classes)))
        elements = np.stack(scores).astype("<f4", copy=False)
        if parsed.raw:
            response.raw_output_contents.append(elements.tobytes())
        else:
            output.contents.fp32_contents.extend(elements.ravel().tolist())
    else:
        output = response.outputs.add(name=OUTPUT, datatype="BYTES", shape=(len(scores), parsed.top))
        texts = [  # in Triton's format: `score:class index:name`
            f"{score:f}:{index}:{contract.classes[index].name}".encode()
            for of_image in scores
            for index, score in top_k(of_image, parsed.top)
        ]
        if parsed.raw:
            response.raw_output_contents.append(raw_elements(texts))
        else:
            output.contents.bytes_contents.extend(texts)
    return response


def raw_elements(elements: Iterable[bytes]) -> bytes:
    """Return the elements of a BYTES tensor as binary data, each after its length."""
    return b"".join(len(each).to_bytes(LENGTH_PREFIX, "little") + each for each in elements)


def model_metadata(classifier: Classifier, versions: Iterable[Classifier]) -> pb.ModelMetadataResponse:
    """Return the inputs and outputs of a served model. versions: the loaded ones."""
    tensor, classes = pb.ModelMetadataResponse.TensorMetadata, len(classifier.session.contract.classes)
    return pb.ModelMetadataResponse(
        name=classifier.name,
        versions=[str(each.version) for each in versions],
        platform=_PLATFORM,
        inputs=[tensor(name=INPUT, datatype="BYTES", shape=[-1, 1])],
        outputs=[tensor(name=OUTPUT, datatype="FP32", shape=[-1, classes])],
    )


def model_config(classifier: Classifier) -> pb.ModelConfig:
    """Return a served model's configuration in Triton's form; dimensions exclude the batch."""
    session = classifier.session
    parameters = {
        "sha256": session.model_sha256,
        "architecture": session.contract.name,
        "provider": session.circumstances.provider,
        "precision": session.circumstances.precision,
    }
    return pb.ModelConfig(
        name=classifier.name,
        platform=_PLATFORM,
        backend="prelunet",
        max_batch_size=MAX_IMAGES,
        input=[pb.ModelInput(name=INPUT, data_type=pb.TYPE_STRING, dims=[1])],
        output=[pb.ModelOutput(name=OUTPUT, data_type=pb.TYPE_FP32, dims=[len(session.contract.classes)])],
        dynamic_batching=pb.ModelDynamicBatching(),
        parameters={name: pb.ModelParameter(string_value=value) for name, value in parameters.items()},
    )


def require_no_repository(name: str) -> None:
    """Refuse the name of a repository. name: as in a request."""
    if name:
        raise UsageError("this server has no repositories; leave `repository_name` empty")


def repository_index(
    request: pb.RepositoryIndexRequest,
    loaded: Sequence[Classifier],
    problems: Mapping[Version, str],
    *,
    ready: bool,
) -> pb.RepositoryIndexResponse:
    """List the versions of all models. problems: of those in the folder; ready: whether the server accepts new work."""
    require_no_repository(request.repository_name)
    rows = {
        Version(each.name, each.version): ("READY", "") if ready else ("UNAVAILABLE", "the server accepts no new work")
        for each in loaded
    }
    for version, reason in problems.items():
        rows[version] = rows.get(version, ("UNAVAILABLE", ""))[0], reason
    return pb.RepositoryIndexResponse(
        models=[
            pb.RepositoryIndexResponse.ModelIndex(
                name=version.name, version=str(version.number), state=state, reason=reason
            )
            for version, (state, reason) in rows.items()
            if state == "READY" or not request.ready
        ]
    )
