"""The messages of a client: what it reads and what it sends."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import grpc
from grpc_health.v1 import health_pb2

from prelunet.evaluator.client.calls import Call
from prelunet.evaluator.contract import ClassEntry
from prelunet.evaluator.errors import DatasetError, ImageError, UsageError
from prelunet.evaluator.pb.prelunet.v1 import prelunet_pb2 as pb
from prelunet.evaluator.rpc.convert import report_from_message, to_plain
from prelunet.evaluator.rpc.status import MAX_MESSAGE_BYTES

if TYPE_CHECKING:
    from prelunet.evaluator.datasets.dataset import Dataset, Sample


@dataclass(frozen=True)
class ServedModel:
    """A model as described by its server; sides in pixels, classes by class index."""

    name: str
    sha256: str
    architecture: str
    activation: str
    classes: tuple[ClassEntry, ...]
    crop: int
    default_scales: tuple[int, ...]
    max_side: int
    canvas: str
    circumstances: Mapping[str, Any]
    checkpoint_sha256: str


def served_model_from_message(model: pb.Model) -> ServedModel:
    """Read a server's description of a model."""
    return ServedModel(
        name=model.name,
        sha256=model.sha256,
        architecture=model.architecture,
        activation=model.activation,
        classes=tuple(ClassEntry(entry.wnid, entry.name) for entry in model.classes),
        crop=model.crop,
        default_scales=tuple(model.default_scales),
        max_side=model.max_side,
        canvas=model.canvas,
        circumstances=to_plain(model.circumstances),
        checkpoint_sha256=model.checkpoint_sha256,
    )


@dataclass(frozen=True)
class EvaluationProgress:
    """The progress of an evaluation.

    images: number of images answered, including refused ones; refused: number of refused images; top1_error: percent
    of the images evaluated so far, None if there are none yet; seconds: time since the evaluation began.
    """

    images: int
    refused: int
    top1_error: float | None
    seconds: float


class EvaluationResponses:
    """The responses of one evaluation. on_progress: called with every EvaluationProgress."""

    def __init__(self, call: Call, on_progress: Callable[[EvaluationProgress], object] | None) -> None:
        self._call = call
        self._on_progress = on_progress
        self._report: pb.Report | None = None

    def read(self, response: pb.EvaluateResponse) -> None:
        """Read one message."""
        if response.HasField("report"):
            self._report = response.report
        elif self._on_progress is not None and response.HasField("progress"):
            progress = response.progress
            top1_error = progress.top1_error if progress.HasField("top1_error") else None
            self._on_progress(EvaluationProgress(progress.images, progress.refused, top1_error, progress.seconds))

    def report(self) -> dict[str, Any]:
        """Return the report, which is the last message."""
        if self._report is None:
            raise self._call.invalid_response("the evaluation ended without a report")
        return report_from_message(self._report)


HEALTH = health_pb2.HealthCheckRequest()  # of the whole server
_UNANSWERED = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)


def is_serving(response: health_pb2.HealthCheckResponse) -> bool:
    """Whether a server reports that it accepts calls."""
    return bool(response.status == health_pb2.HealthCheckResponse.SERVING)


def is_unanswered(failed: grpc.RpcError) -> bool:
    """Whether a health check failed because no server answered."""
    return failed.code() in _UNANSWERED


# Requests.


_MESSAGE_OVERHEAD = 4096  # bytes of a message for the file's name, its class and the framing


def classify_request(
    image: bytes,
    *,
    model: str | None = None,
    protocol: str = "",
    scales: Sequence[int] | None = None,
    mirror: bool | None = None,
    top_k: int | None = None,
    heatmap: bool = False,
    apply_exif: bool = False,
) -> pb.ClassifyRequest:
    """Return the request for one image; the arguments are those of `Client.classify`."""
    if top_k is not None and not 1 <= top_k < 2**31:
        raise UsageError(f"top_k is {top_k}, but it must be between 1 and the model's number of classes")
    return pb.ClassifyRequest(
        image=image,
        model=model or "",
        protocol=protocol,
        scales=_checked(scales),
        mirror=mirror,
        top_k=top_k,
        heatmap=heatmap,
        apply_exif=apply_exif,
    )


def stream_request(number: int, request: pb.ClassifyRequest) -> pb.ClassifyStreamRequest:
    """Return one request of a stream. Raises ImageError for an image so large that it would end the whole stream."""
    if (size := request.ByteSize()) > MAX_MESSAGE_BYTES - _MESSAGE_OVERHEAD:
        raise ImageError(
            f"{size} bytes do not fit into a message, whose limit is {MAX_MESSAGE_BYTES} bytes. Send a smaller image"
        )
    return pb.ClassifyStreamRequest(id=str(number), request=request)


def evaluate_start(
    dataset: "Dataset",
    *,
    model: str | None,
    protocol: str,
    scales: Sequence[int] | None,
    mirror: bool | None,
    apply_exif: bool,
) -> pb.EvaluateRequest:
    """Return the first message of an evaluation; the arguments are those of `Client.evaluate`."""
    start = pb.EvaluateStart(
        model=model or "",
        protocol=protocol,
        dataset=dataset.location.name,
        scales=_checked(scales),
        mirror=mirror,
        apply_exif=apply_exif,
    )
    return pb.EvaluateRequest(start=start)


def labelled_image(dataset: "Dataset", sample: "Sample") -> pb.EvaluateRequest:
    """Read one image. Its class is sent by wnid, because the server's class indices apply."""
    if not 0 <= sample.label < len(dataset.classes):
        raise DatasetError(f"{sample.file}: its class is unknown; an evaluation needs the true class of every image")
    try:
        sample.file.encode()
    except UnicodeEncodeError as error:
        raise DatasetError(f"{sample.file!a}: the name is not Unicode and cannot be sent. Rename the file") from error
    if sample.size > MAX_MESSAGE_BYTES - _MESSAGE_OVERHEAD:
        raise DatasetError(
            f"{sample.file}: {sample.size} bytes do not fit into a message, whose limit is {MAX_MESSAGE_BYTES} bytes. "
            "Remove the file from the dataset, or use `prelunet validate`"
        )
    data = dataset.reader.read(sample.file)  # the server refuses and counts images beyond its own limit
    return pb.EvaluateRequest(image=pb.LabelledImage(file=sample.file, data=data, wnid=dataset.classes[sample.label]))


def _checked(scales: Sequence[int] | None) -> Sequence[int]:
    """Return the scales if a message can hold them; the server checks whether the model supports them."""
    for scale in scales or ():
        if not 1 <= scale < 2**32:
            raise UsageError(f"scales has {scale}, but a scale is a shorter side in pixels, 1 or more")
    return scales or ()
