"""Parse and build messages of proto/prelunet/v1. Nothing is computed here."""

from itertools import accumulate
from pathlib import PurePosixPath

from google.protobuf.json_format import ParseDict

from ...answer import Answer
from ...contract import MAX_SCALES, ModelContract
from ...errors import DatasetError, Overloaded, UsageError
from ...pb.prelunet.v1 import prelunet_pb2 as pb
from ...protocols import (
    EvaluationProtocol,
    ProtocolOverrides,
    build_protocol,
    default_protocol_name,
    supported_protocols,
)
from ...reporting.report import Report
from ...rpc.convert import convert_nested_lists
from ...rpc.status import client_message, code_of, reason_for
from ..classifier import Classifier
from .evaluation import LabelledImage

MAX_FILE_NAME = 1024  # characters
# A report message lists only the first refused images: a million would not fit into a message, and after hours the
# client would get an error instead of the report.
MAX_LISTED_REFUSALS = 1000
_MAX_REFUSALS_BYTES = 2**20  # of names and reasons; a name may have 4 kB


def requested_protocol(request: pb.ClassifyRequest | pb.EvaluateStart, contract: ModelContract) -> EvaluationProtocol:
    """Return the requested protocol, by default the model's; UsageError if there is no such protocol."""
    overrides = ProtocolOverrides(
        scales=tuple(request.scales[: MAX_SCALES + 1]) or None,  # one above the limit is enough to refuse millions
        mirror=request.mirror if request.HasField("mirror") else None,
        apply_exif=request.apply_exif,
    )
    return build_protocol(request.protocol or default_protocol_name(contract), contract, overrides)


def classify_response(answer: Answer) -> pb.ClassifyResponse:
    """Convert the answer for one image to its message.

    Converts field by field: via JSON, an answer with 1000 classes takes 20 ms.
    """
    return pb.ClassifyResponse(
        predictions=[pb.Prediction(**vars(prediction)) for prediction in answer.predictions],
        model=pb.ModelIdentity(**answer.model),
        protocol=pb.Protocol(**answer.protocol),
        views=[pb.View(**vars(view)) for view in answer.views],
        capped=answer.capped,
        circumstances=pb.Circumstances(**answer.circumstances),
        heatmap=answer.heatmap,
        maps=[pb.HeatMap(**vars(of_class)) for of_class in answer.maps],
        timings=None if answer.timings is None else pb.Timings(**vars(answer.timings)),
    )


def call_error(error: BaseException, incident: str) -> pb.CallError:
    """Convert an error to an answer of a stream, with the same content as its status; incident: see `status_of`."""
    return pb.CallError(
        code=code_of(error).value[0],
        reason=reason_for(error),
        message=client_message(error, incident),
        retry_after_seconds=error.retry_after if isinstance(error, Overloaded) else None,
    )


def model_message(classifier: Classifier) -> pb.Model:
    """Describe a served model and the device that runs it."""
    contract = classifier.session.contract
    return pb.Model(
        name=classifier.name,
        version=classifier.version,
        sha256=classifier.session.model_sha256,
        architecture=contract.name,
        activation=contract.architecture.activation,
        classes=[pb.ClassEntry(wnid=entry.wnid, name=entry.name) for entry in contract.classes],
        crop=contract.crop,
        default_scales=contract.default_scales,
        max_side=contract.max_side,
        canvas=contract.canvas,
        circumstances=ParseDict(classifier.session.circumstances.to_json(), pb.Circumstances()),
        checkpoint_sha256=contract.checkpoint_sha256,
        protocols=supported_protocols(contract),
    )


def start_of(request: pb.EvaluateRequest | None) -> pb.EvaluateStart:
    """Return the `start` of an evaluation's first message; UsageError if it is missing or names no dataset."""
    if request is None:
        raise UsageError("the stream is empty; send `start` (model, protocol, dataset), then every image as `image`")
    if request.WhichOneof("message") != "start":
        raise UsageError("the first message of an evaluation should be `start` (model, protocol, dataset)")
    if not PurePosixPath(request.start.dataset).name or len(request.start.dataset) > MAX_FILE_NAME:
        raise UsageError(
            f"`start` should name the dataset in 1 to {MAX_FILE_NAME} characters, for example dataset: 'flowers'"
        )
    return request.start


def image_of(request: pb.EvaluateRequest, contract: ModelContract) -> LabelledImage:
    """Return one labeled image of an evaluation; UsageError or DatasetError if the message is invalid."""
    if request.WhichOneof("message") != "image":
        raise UsageError("after the first message, `start`, every message of an evaluation should be an `image`")
    image = request.image
    if not 1 <= len(image.file) <= MAX_FILE_NAME:
        raise DatasetError(f"an image's file name should have 1 to {MAX_FILE_NAME} characters, not {len(image.file)}")
    if "\0" in image.file:
        raise DatasetError("an image's file name should not contain a NUL character")
    return LabelledImage(image.file, image.data, _label_of(image, contract))


def _label_of(image: pb.LabelledImage, contract: ModelContract) -> int:
    """Return the true class index, which the image gives as an index or as a wnid."""
    truth = image.WhichOneof("truth")
    if truth is None:
        raise DatasetError(f"{image.file}: no true class; set `label` (class index) or `wnid`")
    if truth == "label":
        if image.label >= len(contract.classes):
            raise DatasetError(
                f"{image.file}: label {image.label}, but class indices are 0 to {len(contract.classes) - 1}"
            )
        return image.label
    label = contract.class_index(image.wnid)
    if label is None:
        first = ", ".join(entry.wnid for entry in contract.classes[:5])
        raise DatasetError(
            f"{image.file}: the model has no class '{image.wnid}'. The first of its {len(contract.classes)}: {first}"
        )
    return label


def report_message(report: Report) -> pb.Report:
    """Convert report.json to its message; null becomes an unset field.

    Only the first refused images are listed, up to the limits above; `refused` counts them all.
    """
    refusals = report["refusals"][:MAX_LISTED_REFUSALS]
    sizes = accumulate(len(each["file"].encode()) + len(each["reason"].encode()) for each in refusals)
    listed = {**report, "refusals": refusals[: sum(size <= _MAX_REFUSALS_BYTES for size in sizes)]}
    return ParseDict(convert_nested_lists(listed, lambda numbers: {"values": numbers}), pb.Report())
