"""The Open Inference Protocol in plain types, under both front ends: neither protobuf nor HTTP.

https://github.com/kserve/open-inference-protocol, with Triton's extensions. A front end reads an `InferRequest`,
`Inference` checks it and has its images classified, and the front end writes the `InferAnswer`. Descriptions are
structs with the names and the order of proto/inference.
"""

import asyncio
import base64
import importlib.metadata
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Annotated, Any, Literal, TypeAlias, TypeVar

import numpy as np
from msgspec import UNSET, Meta, Struct, UnsetType, ValidationError, convert
from prometheus_client import Gauge, Histogram, Summary

from ..arrays import Float32Array
from ..contract import MAX_SCALES
from ..engine.scores import top_k
from ..errors import ModelNotFound, UsageError
from .data_plane import DataPlane
from .observability.call_context import Call
from .observability.logs import truncate
from .observability.metrics import Metrics
from .repository import Version
from .scheduling.model import RequestOptions, ServedModel

INPUT, OUTPUT = "images", "scores"
MAX_IMAGES = 64  # per call
MAX_VIEWS = 1024  # of all images together, if a call has several
LENGTH_PREFIX = 4  # bytes before each element of raw BYTES, little-endian
# Names as in Triton's documentation.
EXTENSIONS = ("classification", "model_configuration", "model_repository", "statistics", "parameters")

_LARGE_MESSAGE = 2**20  # bytes; splitting it copies it, in half a millisecond; a thread costs 0.1 ms
_MANY_ELEMENTS = 1000  # scores or texts; converting them takes a millisecond
_PLATFORM = "prelunet_onnx"
EXPECTED_INPUT = (
    f"this model takes one input: '{INPUT}', datatype BYTES, shape [N] with N from 1 to {MAX_IMAGES}: image files, "
    "not arrays of pixels"
)
_MAX_QUOTED = 100  # characters of a client's text in an error message
_SCALES = re.compile(r"\d{1,9}(,\d{1,9})*", re.ASCII)

Kind = TypeVar("Kind", bound=Struct)
Written = TypeVar("Written")
Parameters: TypeAlias = Mapping[str, bool | int | float | str | None]  # None is as if it were not there
# MLServer's: the elements are base64, as they always are in JSON.
ContentType: TypeAlias = Annotated[str, Meta(pattern="^(base64|str)$")]


# Requests and answers.


class InputTensor(Struct, frozen=True):
    """An input as sent.

    elements: returns them, given their number, or raises UsageError; json: they should be base64 and may be anything.
    """

    name: str
    datatype: str
    shape: Sequence[int]
    parameters: Parameters
    elements: Callable[[int], Sequence[Any]]
    json: bool = False


class InferRequest(Struct, frozen=True):
    """A request as sent, with any number of inputs and outputs: there may be millions, and only one each is valid.

    version: "" for the newest; inputs: their number; tensor: the first of them; outputs: the names of the requested
    ones; output_parameters: of the first of them.
    """

    model: str
    version: str
    id: str
    parameters: Parameters
    inputs: int
    tensor: InputTensor | None
    outputs: Sequence[str]
    output_parameters: Parameters


class CheckedRequest(Struct, frozen=True):
    """A valid request.

    images: encoded, 1 to MAX_IMAGES; top: number of best classes to return for each image, None for all scores;
    binary: answer with binary data, over HTTP; timeout: in seconds, infinity for only the call's deadline.
    """

    images: tuple[bytes, ...]
    options: RequestOptions
    top: int | None
    binary: bool
    timeout: float


class InferAnswer(Struct, frozen=True, eq=False):
    """An answer: its one output.

    id: the request's; scores: float32 (classes,) of each image; top, binary: as in `CheckedRequest`.
    """

    model: ServedModel
    id: str
    scores: Sequence[Float32Array]
    top: int | None
    binary: bool

    @property
    def datatype(self) -> Literal["FP32", "BYTES"]:
        return "FP32" if self.top is None else "BYTES"

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.scores), self.top or len(self.model.session.contract.classes)

    def numbers(self) -> list[float]:
        """Return all scores, image by image."""
        scores: list[float] = np.concatenate(self.scores).tolist()
        return scores

    def texts(self) -> list[str]:
        """Return the best classes of each image in Triton's format: `score:class index:name`."""
        classes = self.model.session.contract.classes
        return [
            f"{score:f}:{index}:{classes[index].name}"
            for of_image in self.scores
            for index, score in top_k(of_image, self.top or 0)
        ]

    def raw(self) -> bytes:
        """Return the elements of the output as binary data."""
        if self.top is None:
            return np.concatenate(self.scores).astype("<f4", copy=False).tobytes()
        elements = [text.encode() for text in self.texts()]
        return b"".join(len(each).to_bytes(LENGTH_PREFIX, "little") + each for each in elements)


# Descriptions. Their names are those of the messages, and of the schemas in the OpenAPI description.


class _Declared(Struct, forbid_unknown_fields=True):
    pass


class RequestParameters(_Declared):
    """The parameters of a request. scales: comma-separated; timeout: in microseconds, 0 for none; priority: 0.

    content_type: of an input that does not state its own.
    """

    protocol: str = ""
    scales: int | str | UnsetType = UNSET
    mirror: bool | UnsetType = UNSET
    apply_exif: bool = False
    timeout: Annotated[int, Meta(ge=0)] = 0
    priority: int = 0
    binary_data_output: bool = False
    content_type: ContentType | UnsetType = UNSET
    triton_enable_empty_final_response: bool = False  # sent by Triton's C++ client with every call


class InputParameters(_Declared):
    """The parameters of an input. binary_data_size: number of bytes behind the JSON; sent over gRPC, too, by KServe."""

    binary_data_size: int | UnsetType = UNSET
    content_type: ContentType | UnsetType = UNSET


class OutputParameters(_Declared):
    """The parameters of an output. classification: number of best classes, instead of all scores."""

    classification: int | UnsetType = UNSET
    binary_data: bool | UnsetType = UNSET


class ServerMetadata(_Declared):
    """Name and version of the server, and the extensions of the protocol that it supports."""

    name: str
    version: str
    extensions: tuple[str, ...]


class TensorMetadata(_Declared):
    """An input or output of a model; -1 is any number of images."""

    name: str
    datatype: Literal["BYTES", "FP32"]
    shape: tuple[int, ...]


class ModelMetadata(_Declared):
    """The inputs and outputs of a model. versions: the loaded ones, newest first."""

    name: str
    versions: tuple[str, ...]
    platform: str
    inputs: tuple[TensorMetadata, ...]
    outputs: tuple[TensorMetadata, ...]


class ModelTensor(_Declared):
    """An input or output in a model's configuration; its dimensions exclude the batch."""

    name: str
    data_type: Literal["TYPE_STRING", "TYPE_FP32"]
    dims: tuple[int, ...]


class ModelDynamicBatching(_Declared):
    """Requests of all clients share batches."""


class ModelParameter(_Declared):
    """A value of a model's parameters."""

    string_value: str


class ModelConfig(_Declared):
    """A model's configuration in Triton's form."""

    name: str
    platform: str
    max_batch_size: int
    input: tuple[ModelTensor, ...]
    output: tuple[ModelTensor, ...]
    dynamic_batching: ModelDynamicBatching
    parameters: dict[str, ModelParameter]
    backend: str


class StatisticDuration(_Declared):
    """Number of events, and their total duration in nanoseconds."""

    count: int
    ns: int


class InferStatistics(_Declared):
    """Statistics of the images sent to a model, by stage."""

    success: StatisticDuration
    fail: StatisticDuration
    queue: StatisticDuration
    compute_input: StatisticDuration
    compute_infer: StatisticDuration
    compute_output: StatisticDuration


class ModelStatistics(_Declared):
    """Statistics of all versions of a model since the server started.

    version: the newest; last_inference: in milliseconds since 1970, 0 before the first answer.
    """

    name: str
    version: str
    last_inference: int
    inference_count: int
    execution_count: int
    inference_stats: InferStatistics


class ModelStatisticsResponse(_Declared):
    """Statistics of the models."""

    model_stats: list[ModelStatistics]


class ModelIndex(_Declared):
    """A version of a model. reason: why it is not served, or what is wrong with its folder; otherwise empty."""

    name: str
    version: str
    state: Literal["READY", "UNAVAILABLE"]
    reason: str


class Inference:
    """Answers the calls of the protocol, on the event loop's thread; nothing is computed here.

    name, version: of a model; without a version the newest. Raises ModelNotFound if it is not served.
    """

    def __init__(self, plane: DataPlane) -> None:
        self._plane = plane

    def has(self, name: str, version: str = "") -> bool:
        """Return whether a model is served, by a server that is ready or not."""
        return self._plane.models.has(_with_version(name, version))

    def server_metadata(self) -> ServerMetadata:
        return ServerMetadata("prelunet", importlib.metadata.version("prelunet"), EXTENSIONS)

    def model_metadata(self, name: str, version: str = "") -> ModelMetadata:
        served = self._model(name, version)
        versions = tuple(str(each.version) for each in self._plane.models.versions(served.name))
        inputs = TensorMetadata(INPUT, "BYTES", (-1, 1))
        outputs = TensorMetadata(OUTPUT, "FP32", (-1, len(served.session.contract.classes)))
        return ModelMetadata(served.name, versions, _PLATFORM, (inputs,), (outputs,))

    def model_config(self, name: str, version: str = "") -> ModelConfig:
        served = self._model(name, version)
        session = served.session
        parameters = {
            "sha256": session.model_sha256,
            "architecture": session.contract.name,
            "provider": session.circumstances.provider,
            "precision": session.circumstances.precision,
        }
        return ModelConfig(
            name=served.name,
            platform=_PLATFORM,
            max_batch_size=MAX_IMAGES,
            input=(ModelTensor(INPUT, "TYPE_STRING", (1,)),),
            output=(ModelTensor(OUTPUT, "TYPE_FP32", (len(session.contract.classes),)),),
            dynamic_batching=ModelDynamicBatching(),
            parameters={key: ModelParameter(value) for key, value in parameters.items()},
            backend="prelunet",
        )

    def statistics(self, name: str = "", version: str = "") -> ModelStatisticsResponse:
        """Return the statistics of a model, or of each without a name."""
        models = [self._model(name, version)] if name else self._plane.models.all()
        metrics = self._plane.models.metrics
        return ModelStatisticsResponse([model_statistics(model.name, model.version, metrics) for model in models])

    def index(self, *, only_ready: bool) -> list[ModelIndex]:
        """List the loaded versions of all models, and those that are not served, with what is wrong with them."""
        ready = self._plane.ready()
        served = [each for model in self._plane.models.all() for each in self._plane.models.versions(model.name)]
        reason = "" if ready else "the server accepts no new work"
        loaded = dict.fromkeys((Version(each.name, each.version) for each in served), reason)
        return [
            ModelIndex(name, str(number), "READY" if ready and (name, number) in loaded else "UNAVAILABLE", reason)
            for (name, number), reason in {**loaded, **self._plane.problems()}.items()
            if not only_ready or (ready and (name, number) in loaded)
        ]

    async def load(self, name: str, parameters: Iterable[str]) -> None:
        """Load a model of the server's folder. name: or NAME/VERSION; parameters: UsageError if there are any."""
        _require_known(parameters, ())
        await self._plane.folder().load(name)

    async def unload(self, name: str, parameters: Iterable[str]) -> None:
        """Do the reverse."""
        _require_known(parameters, ("unload_dependents",))
        await self._plane.folder().unload(name)

    async def infer(self, request: InferRequest, call: Call, write: Callable[[InferAnswer], Written]) -> Written:
        """Classify the images of a request, of a call with its `message_bytes`, and return the answer as written.

        Raises UsageError for an invalid request, and the errors of `DataPlane.classify_all`.
        """
        served, id_ = self._model(request.model, request.version), request.id
        check = partial(check_request, request, served)
        del request  # free it while waiting, with the second copy of its images
        checked = await asyncio.to_thread(check) if call.message_bytes > _LARGE_MESSAGE else check()
        del check
        answers = await self._plane.classify_all(checked.images, served, checked.options, call, checked.timeout, INPUT)
        scores = [each.classified.scores for each in answers]
        answer = InferAnswer(answers[0].model, id_, scores, checked.top, checked.binary)
        many = answer.shape[0] * answer.shape[1] > _MANY_ELEMENTS
        return await asyncio.to_thread(write, answer) if many else write(answer)

    def _model(self, name: str, version: str) -> ServedModel:
        """Return a served model; the protocol requires a name even if there is only one model."""
        if not name:
            available = ", ".join(model.name for model in self._plane.models.all())
            raise ModelNotFound(f"the request names no model. Available: {available}")
        return self._plane.models.get(_with_version(name, version))


def _with_version(name: str, version: str) -> str:
    return f"{name}/{version}" if version else name


def _require_known(parameters: Iterable[str], known: Sequence[str]) -> None:
    if unknown := sorted(set(parameters) - set(known)):
        raise UsageError(
            f"parameter '{truncate(unknown[0], _MAX_QUOTED)}' is not supported: models and their configuration come "
            "only from the server's folder"
        )


# Checking a request.


def check_request(request: InferRequest, served: ServedModel) -> CheckedRequest:
    """Check a request. Raises UsageError."""
    asked = _converted(request.parameters, RequestParameters, "the request")
    if asked.priority != 0:
        raise UsageError("parameter 'priority' should be 0: this server has no priorities, it serves clients in turn")
    images = _images_of(request, asked.content_type)
    count = len(images)
    mirror = None if asked.mirror is UNSET else asked.mirror
    options = RequestOptions(asked.protocol, _scales_of(asked.scales), mirror, asked.apply_exif)
    plan = served.plan(options)
    if count > 1 and count * plan.views > MAX_VIEWS:
        raise UsageError(
            f"{count} images have {count * plan.views} views with protocol {plan.protocol.name}, but a call may "
            f"have at most {MAX_VIEWS}. Send fewer images per call"
        )
    output = _output_of(request, len(served.session.contract.classes))
    top = None if output.classification is UNSET else output.classification
    binary = asked.binary_data_output if output.binary_data is UNSET else output.binary_data
    return CheckedRequest(tuple(images), options, top, binary, asked.timeout / 1e6 or math.inf)


def _converted(parameters: Parameters, kind: type[Kind], where: str) -> Kind:
    """Return parameters that are all known and of the right type; otherwise raise UsageError."""
    try:
        return convert({name: value for name, value in parameters.items() if value is not None}, kind)
    except ValidationError as error:
        allowed, text = ", ".join(kind.__struct_fields__), truncate(str(error), 2 * _MAX_QUOTED)
        raise UsageError(f"the parameters of {where} are not valid: {text}. Allowed: {allowed}") from None


def _images_of(request: InferRequest, content_type: str | UnsetType) -> Sequence[bytes]:
    """Return the images; UsageError unless they are in one input of the expected name, type and shape.

    content_type: of the request.
    """
    tensor = request.tensor
    if tensor is None or request.inputs > 1:
        raise UsageError(f"the request has {request.inputs} inputs; {EXPECTED_INPUT}")
    if tensor.name != INPUT:
        raise UsageError(f"the model has no input '{truncate(tensor.name, _MAX_QUOTED)}'; {EXPECTED_INPUT}")
    if tensor.datatype != "BYTES":
        raise UsageError(f"input '{INPUT}' has datatype '{truncate(tensor.datatype, _MAX_QUOTED)}'; {EXPECTED_INPUT}")
    own = _converted(tensor.parameters, InputParameters, f"input '{INPUT}'").content_type
    count = _image_count(tensor.shape)
    elements = tensor.elements(count)
    if len(elements) != count:
        raise UsageError(
            f"input '{INPUT}' has {len(elements)} elements, but its shape declares {count}; the two should be equal"
        )
    if not tensor.json and own is UNSET and content_type is UNSET:
        return elements
    try:
        return [base64.b64decode(each, validate=True) for each in elements]
    except (TypeError, ValueError):
        raise UsageError(
            f"the elements of input '{INPUT}' are not base64; send each image file in base64, or as binary data "
            "without the parameter 'content_type'"
        ) from None


def _image_count(shape: Sequence[int]) -> int:
    """Return the number of images that a shape declares."""
    if not (len(shape) == 1 or (len(shape) == 2 and shape[1] == 1)) or not 1 <= shape[0] <= MAX_IMAGES:
        dimensions = ", ".join(map(str, shape[:8])) + (", …" if len(shape) > 8 else "")
        raise UsageError(f"input '{INPUT}' has shape [{dimensions}]; {EXPECTED_INPUT}")
    return shape[0]


def split_elements(raw: bytes, count: int) -> list[bytes]:
    """Return the images in binary data, each of which follows its length."""
    images, end = [], 0
    for index in range(count):
        start = end + LENGTH_PREFIX
        end = start + int.from_bytes(raw[end:start], "little")
        if end > len(raw):
            raise UsageError(
                f"the binary data of {len(raw)} bytes ends within {INPUT}[{index}], but its shape declares "
                f"{count}. Precede each image by its length as {LENGTH_PREFIX} bytes, little-endian"
            )
        images.append(raw[start:end])
    if end < len(raw):
        raise UsageError(
            f"the binary data has {len(raw) - end} bytes after {INPUT}[{count - 1}]; the shape of '{INPUT}' "
            "should give the number of images"
        )
    return images


def _scales_of(value: str | int | UnsetType) -> tuple[int, ...] | None:
    if value is UNSET:
        return None
    if isinstance(value, str) and (len(value) > 6 * MAX_SCALES or not _SCALES.fullmatch(value)):
        raise UsageError(
            f"parameter 'scales' should be 1 to {MAX_SCALES} comma-separated integers in pixels, as in '256,384,480'"
        )
    return tuple(map(int, str(value).split(",")))


def _output_of(request: InferRequest, classes: int) -> OutputParameters:
    """Return the valid parameters of the requested output. classes: of the model."""
    if (name := next((name for name in request.outputs if name != OUTPUT), None)) is not None:
        raise UsageError(f"the model has no output '{truncate(name, _MAX_QUOTED)}'. Its only output: {OUTPUT}")
    if len(request.outputs) > 1:
        raise UsageError(f"output '{OUTPUT}' is requested {len(request.outputs)} times; request it once")
    asked = _converted(request.output_parameters, OutputParameters, f"output '{OUTPUT}'")
    if asked.classification is not UNSET and not 1 <= asked.classification <= classes:
        raise UsageError(
            f"parameter 'classification' is {asked.classification}, but this model has {classes} classes; give 1 to "
            f"{classes}"
        )
    return asked


# Triton's model statistics, derived from the server's Prometheus metrics.

_STAGES = {"queue": "queue", "compute_input": "decode", "compute_infer": "compute", "compute_output": "average"}


def model_statistics(name: str, version: int, metrics: Metrics) -> ModelStatistics:
    """Return the statistics of one model, of all its versions, since the server started. version: the newest."""
    success = _duration(metrics.request_seconds.labels(name))
    stages = {field: _duration(metrics.stage_seconds.labels(name, stage)) for field, stage in _STAGES.items()}
    return ModelStatistics(
        name=name,
        version=str(version),
        last_inference=round(1000 * _samples(metrics.last_answer.labels(name))[""]),
        inference_count=success.count,
        execution_count=_duration(metrics.batch_seconds.labels(name)).count,
        inference_stats=InferStatistics(success=success, fail=_duration(metrics.failed_seconds.labels(name)), **stages),
    )


def _duration(instrument: Histogram | Summary) -> StatisticDuration:
    """Return the number of observations and their sum in nanoseconds. instrument: observes seconds."""
    samples = _samples(instrument)
    return StatisticDuration(round(samples["_count"]), round(1e9 * samples["_sum"]))


def _samples(instrument: Gauge | Histogram | Summary) -> dict[str, float]:
    """Return an instrument's values by the suffix of their names: "_count" and "_sum"; for a gauge only ""."""
    (metric,) = instrument.collect()
    return {
        sample.name.removeprefix(metric.name): sample.value for sample in metric.samples if "le" not in sample.labels
    }
