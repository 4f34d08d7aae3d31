"""Between the messages of proto/prelunet/v1 and the evaluator's own data. Pure functions; nothing is computed here."""

from pathlib import PurePosixPath
from typing import Any

from google.protobuf.json_format import MessageToDict, ParseDict
from google.protobuf.message import Message

from evaluator.contract import ModelContract
from evaluator.engine.classify import Classified
from evaluator.engine.session import Circumstances
from evaluator.errors import DatasetError, UsageError
from evaluator.pb.prelunet.v1 import prelunet_pb2 as pb
from evaluator.protocols import Protocol, make_protocol
from evaluator.reporting.report import Report
from evaluator.serving.classifier import Classifier
from evaluator.serving.evaluation import LabelledImage

DEFAULT_PROTOCOL = "multi-scale"
DEFAULT_TOP_K = 5
MAX_FILE_NAME = 1024  # characters


def protocol_asked(name: str, contract: ModelContract) -> Protocol:
    """Return the protocol of that name, of no name the default; UsageError for one that there is not."""
    return make_protocol(name or DEFAULT_PROTOCOL, contract)


def top_k_asked(request: pb.ClassifyRequest, contract: ModelContract) -> int:
    """Return how many predictions to answer; UsageError for a number outside 1 to the number of classes."""
    classes = len(contract.classes)
    if not request.HasField("top_k"):
        return min(DEFAULT_TOP_K, classes)
    if not 1 <= request.top_k <= classes:
        raise UsageError(f"top_k is {request.top_k}, but this model can answer 1 to {classes} predictions")
    return request.top_k


def classify_response(
    classifier: Classifier, protocol: Protocol, top_k: int, request: pb.ClassifyRequest, classified: Classified
) -> pb.ClassifyResponse:
    """Return the answer for one image: its best classes, how it was looked at, and the heat maps if asked for."""
    classes = classifier.session.contract.classes
    return pb.ClassifyResponse(
        predictions=[
            pb.Prediction(class_index=index, wnid=classes[index].wnid, name=classes[index].name, score=score)
            for index, score in classified.top(top_k)
        ],
        model=model_identity(classifier),
        protocol=ParseDict(protocol.to_json(), pb.Protocol()),
        views=[
            pb.View(
                scale=result.view.scale,
                mirrored=result.view.mirrored,
                windows=pb.WindowGrid(rows=result.windows[0], columns=result.windows[1]),
            )
            for result in classified.views
        ],
        capped=classified.capped,
        circumstances=circumstances_message(classifier.session.circumstances),
        heatmap=classifier.heat_maps(request.image, protocol, classified) if request.heatmap else b"",
    )


def model_identity(classifier: Classifier) -> pb.ModelIdentity:
    """Return name and hash of a served model."""
    return pb.ModelIdentity(name=classifier.name, sha256=classifier.session.model_sha256)


def model_message(classifier: Classifier) -> pb.Model:
    """Return what a served model says of itself and what runs it."""
    contract = classifier.session.contract
    return pb.Model(
        name=classifier.name,
        sha256=classifier.session.model_sha256,
        architecture=contract.name,
        activation=contract.architecture["activation"],
        classes=[pb.ClassEntry(wnid=entry.wnid, name=entry.name) for entry in contract.classes],
        crop=contract.crop,
        default_scales=contract.default_scales,
        max_side=contract.max_side,
        canvas=contract.canvas,
        circumstances=circumstances_message(classifier.session.circumstances),
        checkpoint_sha256=contract.checkpoint_sha256,
    )


def circumstances_message(circumstances: Circumstances) -> pb.Circumstances:
    """Return what computes the answers."""
    return ParseDict(circumstances.to_json(), pb.Circumstances())


def start_of(request: pb.EvaluateRequest | None) -> pb.EvaluateStart:
    """Return the first message of an evaluation; UsageError when it is not `start` or names no dataset."""
    if request is None:
        raise UsageError("the stream is empty; send `start` (model, protocol, dataset), then every image as `image`")
    if request.WhichOneof("message") != "start":
        raise UsageError("the first message of an evaluation should be `start` (model, protocol, dataset)")
    if not PurePosixPath(request.start.dataset).name:
        raise UsageError("`start` names no dataset; the report needs a name, as in dataset: 'flowers'")
    return request.start


def image_of(request: pb.EvaluateRequest, contract: ModelContract) -> LabelledImage:
    """Return one labelled image of an evaluation; UsageError or DatasetError that names what is wrong with it."""
    if request.WhichOneof("message") != "image":
        raise UsageError("after `start`, which is sent once, every message of an evaluation should be an `image`")
    image = request.image
    if not 1 <= len(image.file) <= MAX_FILE_NAME:
        raise DatasetError(f"an image's file name should have 1 to {MAX_FILE_NAME} characters, not {len(image.file)}")
    return LabelledImage(image.file, image.data, _label_of(image, contract))


def _label_of(image: pb.LabelledImage, contract: ModelContract) -> int:
    """Return the class index of the truth, told as an index or as a wnid."""
    truth = image.WhichOneof("truth")
    if truth is None:
        raise DatasetError(f"{image.file}: no true class; give `label` (class index) or `wnid`")
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
            f"{image.file}: the model has no class '{image.wnid}'. Its {len(contract.classes)} begin with {first}"
        )
    return label


def report_message(report: Report) -> pb.Report:
    """Return report.json as its twin on the wire; null becomes an unset field."""
    return ParseDict(report, pb.Report())


def report_from_message(message: pb.Report) -> Report:
    """Return report.json from its twin on the wire, with its keys in the same order."""
    return to_plain(message)


def to_plain(message: Message) -> dict[str, Any]:
    """Return a message as plain data under its own field names, in their order; None where an optional one is unset."""
    plain = MessageToDict(message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)
    return _with_nulls(plain, message)


def _with_nulls(plain: dict[str, Any], message: Message) -> dict[str, Any]:
    """Write None where an optional field is unset, at any depth: there JSON has null and the conversion nothing."""
    result: dict[str, Any] = {}
    for field in message.DESCRIPTOR.fields:
        value, inner = plain.get(field.name), getattr(message, field.name)
        if isinstance(value, dict) and isinstance(inner, Message):
            value = _with_nulls(value, inner)
        elif isinstance(value, list) and field.message_type is not None:
            value = [_with_nulls(entry, part) for entry, part in zip(value, inner, strict=True)]
        result[field.name] = value
    return result
