"""What the server reads from messages of proto/inference and writes into them. Nothing is computed here."""

import importlib.metadata
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from prelunet.evaluator.arrays import Float32Array
from prelunet.evaluator.contract import MAX_SCALES, ModelContract
from prelunet.evaluator.engine.scores import top_k
from prelunet.evaluator.errors import UsageError
from prelunet.evaluator.pb.inference import inference_pb2 as pb
from prelunet.evaluator.protocols import EvaluationProtocol, ProtocolOverrides, build_protocol, default_protocol_name
from prelunet.evaluator.serving.classifier import Classifier
from prelunet.evaluator.serving.observability.logs import truncate

Value: TypeAlias = bool | int | float | str
Parameters: TypeAlias = Mapping[str, pb.InferParameter]
Input: TypeAlias = pb.ModelInferRequest.InferInputTensor

INPUT, OUTPUT = "images", "scores"
VERSION = "1"  # of every model: a file that is served does not change
VERSIONS = ("", VERSION)  # by which it can be asked for
MAX_IMAGES = 64  # in a call
MAX_VIEWS = 1024  # of all images of a call that has several
EXTENSIONS = (
    "classification",
    "model_configuration",
    "statistics",
    "parameters",
)  # as Triton's documentation names them
_PLATFORM = "prelunet_onnx"

_LENGTH_PREFIX = 4  # bytes in front of each element of raw BYTES, the lowest first
_EXPECTED_INPUT = f"this model takes one input: '{INPUT}', datatype BYTES, shape [N] with N from 1 to {MAX_IMAGES}"
MAX_QUOTED = 100  # characters of a caller's text in a text of ours
_SCALES = re.compile(r"\d{1,9}(,\d{1,9})*", re.ASCII)

# What a parameter may be; of the types of InferParameter.
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
# Of Triton's, by how they begin. Its clients send all of a family where their user named one.
_UNSUPPORTED_PARAMETERS: Mapping[str, str] = {
    "sequence_": "this server has no sequences, each request stands alone. Call without a sequence_id",
    "shared_memory_": "this server takes images in the message only, and answers in one. Call without shared memory",
}
_TYPES = {
    "bool_param": "bool",
    "int64_param": "int64",
    "uint64_param": "int64",
    "string_param": "string",
    "double_param": "double",
}


@dataclass(frozen=True)
class ParsedRequest:
    """What a request asks for.

    id: the caller's, told back; images: encoded, 1 to MAX_IMAGES; top: how many classes of each to tell, None for the
    scores of all; timeout: seconds, None for no other than the call's; raw: whether tensors travel as raw bytes.
    """

    id: str
    images: tuple[bytes, ...]
    protocol: EvaluationProtocol
    top: int | None
    timeout: float | None
    raw: bool


def parse_request(request: pb.ModelInferRequest, contract: ModelContract) -> ParsedRequest:
    """Return what a request asks for; UsageError that says what is wrong with it."""
    given = _values(request.parameters, _REQUEST_PARAMETERS, "the request")
    tensor = _input_of(request)
    count = _image_count(tensor.shape)
    raw = len(request.raw_input_contents) > 0
    images = _raw_images(request, tensor, count) if raw else _typed_images(tensor, count)
    protocol = _protocol_of(given, contract)
    if count > 1 and count * len(protocol.views) > MAX_VIEWS:
        raise UsageError(
            f"protocol {protocol.name} sees {count} images in {count * len(protocol.views)} views, more than the "
            f"{MAX_VIEWS} that a call may have. Send fewer images in a call"
        )
    return ParsedRequest(request.id, tuple(images), protocol, _top_of(request, contract), _timeout_of(given), raw)


def _values(given: Parameters, allowed: Mapping[str, frozenset[str]], where: str) -> dict[str, Value]:
    """Return the values of parameters by name; UsageError for one that is not known, or of another type."""
    values: dict[str, Value] = {}
    for name, parameter in sorted(given.items()):  # a map travels in no order
        if name.startswith(tuple(_UNSUPPORTED_PARAMETERS)):
            why = next(why for beginning, why in _UNSUPPORTED_PARAMETERS.items() if name.startswith(beginning))
            raise UsageError(f"{where} has a parameter '{truncate(name, MAX_QUOTED)}': {why}")
        if name not in allowed:
            available = ", ".join(allowed) or "none"
            raise UsageError(
                f"{where} has a parameter '{truncate(name, MAX_QUOTED)}' that this server does not know. There are: {available}"
            )
        choice = parameter.WhichOneof("parameter_choice")
        if choice is None or _TYPES[choice] not in allowed[name]:
            types = " or ".join(sorted(allowed[name]))
            raise UsageError(
                f"parameter '{name}' of {where} should be of type {types}, not {_TYPES[choice] if choice else 'empty'}"
            )
        values[name] = getattr(parameter, choice)
    return values


def _input_of(request: pb.ModelInferRequest) -> Input:
    """Return the input; UsageError unless there is this one and no other."""
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
    """Return how many images a shape promises."""
    if not (len(shape) == 1 or (len(shape) == 2 and shape[1] == 1)) or not 1 <= shape[0] <= MAX_IMAGES:
        told = ", ".join(map(str, shape[:8])) + (", …" if len(shape) > 8 else "")
        raise UsageError(f"input '{INPUT}' has shape [{told}]; {_EXPECTED_INPUT}")
    return shape[0]


def _raw_images(request: pb.ModelInferRequest, tensor: Input, count: int) -> list[bytes]:
    """Return the images of raw_input_contents."""
    if tensor.contents.ListFields():
        raise UsageError(
            f"input '{INPUT}' has its elements twice, in `contents` and in `raw_input_contents`; send one of them"
        )
    if len(request.raw_input_contents) > 1:
        raise UsageError(
            f"`raw_input_contents` has {len(request.raw_input_contents)} entries for one input; it should have one"
        )
    raw = request.raw_input_contents[0]
    images, place = [], 0
    for index in range(count):
        start = place + _LENGTH_PREFIX
        place = start + int.from_bytes(raw[place:start], "little")
        if place > len(raw):
            raise UsageError(
                f"`raw_input_contents` of {len(raw)} bytes ends within {INPUT}[{index}], its shape promises {count}. "
                f"Each image has its length in front, as {_LENGTH_PREFIX} bytes with the lowest first"
            )
        images.append(raw[start:place])
    if place < len(raw):
        raise UsageError(
            f"`raw_input_contents` goes on for {len(raw) - place} bytes behind the last of {count} images; the shape "
            f"of '{INPUT}' should say how many there are"
        )
    return images


def _typed_images(tensor: Input, count: int) -> list[bytes]:
    """Return the images of `contents`."""
    filled = [field.name for field, _ in tensor.contents.ListFields()]
    if wrong := [name for name in filled if name != "bytes_contents"]:
        raise UsageError(f"input '{INPUT}' has `{wrong[0]}`; the elements of a BYTES tensor go into `bytes_contents`")
    elements = tensor.contents.bytes_contents
    if not elements:
        raise UsageError(
            f"input '{INPUT}' has no elements; send the images in `raw_input_contents`, or in `contents` of the input "
            "as `bytes_contents`"
        )
    if len(elements) != count:
        raise UsageError(
            f"input '{INPUT}' has {len(elements)} elements in `bytes_contents`, but its shape says {count}; make them "
            "the same number"
        )
    return list(elements)


def _protocol_of(given: Mapping[str, Value], contract: ModelContract) -> EvaluationProtocol:
    """Return the protocol that the parameters ask for; UsageError for one that there is not."""
    overrides = ProtocolOverrides(
        scales=_scales_of(given.get("scales")),
        mirror=_flag(given.get("mirror")),
        apply_exif=_flag(given.get("apply_exif")),
    )
    return build_protocol(str(given.get("protocol", "")) or default_protocol_name(contract), contract, overrides)


def _flag(value: Value | None) -> bool | None:
    return None if value is None else bool(value)


def _scales_of(value: Value | None) -> tuple[int, ...] | None:
    if value is None:
        return None
    if isinstance(value, str) and (len(value) > 6 * MAX_SCALES or not _SCALES.fullmatch(value)):
        raise UsageError(
            f"parameter 'scales' should hold 1 to {MAX_SCALES} whole numbers of pixels with commas, as in '256,384,480'"
        )
    return tuple(map(int, str(value).split(",")))


def _timeout_of(given: Mapping[str, Value]) -> float | None:
    """Return the seconds that the answer is worth having; None for as long as the call has."""
    if given.get("priority", 0) != 0:
        raise UsageError("parameter 'priority' should be 0: this server has no priorities, callers take turns")
    microseconds = int(given.get("timeout", 0))
    if microseconds < 0:
        raise UsageError(f"parameter 'timeout' is {microseconds} microseconds; it should be 0 (none) or more")
    return microseconds / 1e6 or None


def _top_of(request: pb.ModelInferRequest, contract: ModelContract) -> int | None:
    """Return how many classes of each image to tell; None for the scores of all."""
    if not request.outputs:
        return None
    wrong = (output.name for output in request.outputs if output.name != OUTPUT)
    if (name := next(wrong, None)) is not None:
        raise UsageError(f"the model has no output '{truncate(name, MAX_QUOTED)}'. There is: {OUTPUT}")
    if len(request.outputs) > 1:
        raise UsageError(f"output '{OUTPUT}' is asked for {len(request.outputs)} times; once is enough")
    given = _values(request.outputs[0].parameters, _OUTPUT_PARAMETERS, f"output '{OUTPUT}'")
    if "classification" not in given:
        return None
    top, classes = int(given["classification"]), len(contract.classes)
    if not 1 <= top <= classes:
        raise UsageError(f"parameter 'classification' is {top}, but this model can tell 1 to {classes} classes")
    return top


def infer_response(
    model: str, parsed: ParsedRequest, scores: Sequence[Float32Array], contract: ModelContract
) -> pb.ModelInferResponse:
    """Return the answer to a request. model: its name; scores: float32 (classes,) of each image."""
    response = pb.ModelInferResponse(model_name=model, model_version=VERSION, id=parsed.id)
    if parsed.top is None:
        output = response.outputs.add(name=OUTPUT, datatype="FP32", shape=(len(scores), len(contract.classes)))
        elements = np.stack(scores).astype("<f4", copy=False)
        if parsed.raw:
            response.raw_output_contents.append(elements.tobytes())
        else:
            output.contents.fp32_contents.extend(elements.ravel().tolist())
    else:
        output = response.outputs.add(name=OUTPUT, datatype="BYTES", shape=(len(scores), parsed.top))
        texts = [text for of_image in scores for text in _class_texts(of_image, parsed.top, contract)]
        if parsed.raw:
            response.raw_output_contents.append(
                b"".join(len(text).to_bytes(_LENGTH_PREFIX, "little") + text for text in texts)
            )
        else:
            output.contents.bytes_contents.extend(texts)
    return response


def _class_texts(scores: Float32Array, top: int, contract: ModelContract) -> list[bytes]:
    """Return the best classes as Triton writes them: score, class index, name."""
    return [f"{score:f}:{index}:{contract.classes[index].name}".encode() for index, score in top_k(scores, top)]


def streamed(response: pb.ModelInferResponse) -> pb.ModelStreamInferResponse:
    """Return an answer as part of a stream; Triton's clients look for the mark of a request's last answer."""
    response.parameters["triton_final_response"].bool_param = True
    return pb.ModelStreamInferResponse(infer_response=response)


def streamed_error(id_: str, text: str) -> pb.ModelStreamInferResponse:
    """Return the error of the request of a stream that has this id."""
    return pb.ModelStreamInferResponse(error_message=text, infer_response=pb.ModelInferResponse(id=id_))


def server_metadata() -> pb.ServerMetadataResponse:
    """Return what the server is."""
    version = importlib.metadata.version("prelunet")
    return pb.ServerMetadataResponse(name="prelunet", version=version, extensions=EXTENSIONS)


def model_metadata(classifier: Classifier) -> pb.ModelMetadataResponse:
    """Return inputs and outputs of a served model."""
    tensor, classes = pb.ModelMetadataResponse.TensorMetadata, len(classifier.session.contract.classes)
    return pb.ModelMetadataResponse(
        name=classifier.name,
        versions=[VERSION],
        platform=_PLATFORM,
        inputs=[tensor(name=INPUT, datatype="BYTES", shape=[-1, 1])],
        outputs=[tensor(name=OUTPUT, datatype="FP32", shape=[-1, classes])],
    )


def model_config(classifier: Classifier) -> pb.ModelConfig:
    """Return Triton's configuration of a served model; its dimensions leave out the number of images."""
    session = classifier.session
    told = {
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
        parameters={name: pb.ModelParameter(string_value=value) for name, value in told.items()},
    )


def repository_index(
    request: pb.RepositoryIndexRequest, names: Sequence[str], *, ready: bool
) -> pb.RepositoryIndexResponse:
    """Return the names of the served models. ready: whether the server takes new work."""
    if request.repository_name:
        raise UsageError("this server has no repositories; leave `repository_name` empty")
    state = {"state": "READY"} if ready else {"state": "UNAVAILABLE", "reason": "the server takes no new work"}
    entry = pb.RepositoryIndexResponse.ModelIndex
    listed = names if ready or not request.ready else ()
    return pb.RepositoryIndexResponse(models=[entry(name=name, version=VERSION, **state) for name in listed])
