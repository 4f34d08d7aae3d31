"""What a client reads."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import grpc
from grpc_health.v1 import health_pb2

from prelunet.evaluator.client.calls import Call
from prelunet.evaluator.contract import ClassEntry
from prelunet.evaluator.pb.prelunet.v1 import prelunet_pb2 as pb
from prelunet.evaluator.serving.wire import report_from_message, to_plain


@dataclass(frozen=True)
class ServedModel:
    """What a server says of one model; sides in pixels, classes by class index."""

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


def served_model(model: pb.Model) -> ServedModel:
    """Read what a server says of one model."""
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
class Progress:
    """How far an evaluation is.

    images: that are answered, refused ones included; refused: of them; top1_error: percent of the evaluated images so
    far, None where there is none yet; seconds: since the evaluation began.
    """

    images: int
    refused: int
    top1_error: float | None
    seconds: float


class Evaluation:
    """The answers of one evaluation. tell: called with every Progress."""

    def __init__(self, call: Call, tell: Callable[[Progress], object] | None) -> None:
        self._call = call
        self._tell = tell
        self._report: pb.Report | None = None

    def read(self, response: pb.EvaluateResponse) -> None:
        """Read one message."""
        if response.HasField("report"):
            self._report = response.report
        elif self._tell is not None and response.HasField("progress"):
            progress = response.progress
            top1_error = progress.top1_error if progress.HasField("top1_error") else None
            self._tell(Progress(progress.images, progress.refused, top1_error, progress.seconds))

    def report(self) -> dict[str, Any]:
        """Return the report, which is the last message."""
        if self._report is None:
            raise self._call.broken("the evaluation ended without a report")
        return report_from_message(self._report)


HEALTH = health_pb2.HealthCheckRequest()  # of the whole server
_NOT_THERE = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)


def is_serving(response: health_pb2.HealthCheckResponse) -> bool:
    """Whether a server says that it takes calls."""
    return bool(response.status == health_pb2.HealthCheckResponse.SERVING)


def not_there(failed: grpc.RpcError) -> bool:
    """Whether a question about health failed because nothing answers."""
    return failed.code() in _NOT_THERE
