"""The messages of a client: what it reads and what it sends."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypedDict, Unpack

from ..answer import ClassEntry
from ..errors import DatasetError, ImageError, UsageError
from ..image_input import ImageInput, encoded_image
from ..pb.prelunet.v1 import prelunet_pb2 as pb
from ..rpc.convert import to_plain
from ..rpc.status import MAX_MESSAGE_BYTES

if TYPE_CHECKING:
    from ..datasets.dataset import Dataset, Sample


@dataclass(frozen=True)
class ServedModel:
    """A model as described by its server; sides in pixels, classes by class index, the default protocol first."""

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
    protocols: tuple[str, ...]


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
        protocols=tuple(model.protocols),
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


def progress_from_message(progress: pb.EvaluateProgress) -> EvaluationProgress:
    """Read a server's report on the progress of an evaluation."""
    top1_error = progress.top1_error if progress.HasField("top1_error") else None
    return EvaluationProgress(progress.images, progress.refused, top1_error, progress.seconds)


# Requests.


class EvaluateOptions(TypedDict, total=False):
    """How the images of a dataset are classified.

    model: name of a served model, needed if there are several; protocol: name, "" for the model's default;
    scales: shorter sides in pixels, None for the protocol's; mirror: whether to add a mirrored copy of each view, None
    for the protocol's choice; apply_exif: apply EXIF orientation.
    """

    model: str | None
    protocol: str
    scales: Sequence[int] | None
    mirror: bool | None
    apply_exif: bool


class ClassifyOptions(EvaluateOptions, total=False):
    """How an image is classified, and what its answer holds.

    top_k: 1 to the number of classes, None for 5, or all if there are fewer; heatmap: draw a heat map of each of the
    top five classes.
    """

    top_k: int | None
    heatmap: bool


_MESSAGE_OVERHEAD = 4096  # bytes of a message for the file's name, its class and the framing


def classify_request(image: ImageInput, **options: Unpack[ClassifyOptions]) -> pb.ClassifyRequest:
    """Return the request for one image, which is read; this may take long. Raises UsageError and ImageError."""
    with _invalid_options(options, ClassifyOptions):
        top_k = options.get("top_k")
        if isinstance(top_k, int) and not 1 <= top_k < 2**31:
            raise UsageError(f"top_k is {top_k}, but it must be between 1 and the model's number of classes")
        _check_scales(options.get("scales"))
        request = pb.ClassifyRequest(**options)
    data = encoded_image(image)
    if len(data) > MAX_MESSAGE_BYTES - _MESSAGE_OVERHEAD:  # gRPC would repeat what few servers accept
        raise ImageError(
            f"{len(data)} bytes do not fit into a message of this client, at most {MAX_MESSAGE_BYTES} bytes. "
            "Send a smaller image, or use HTTP"
        )
    request.image = data
    return request


def evaluate_start(dataset: "Dataset", **options: Unpack[EvaluateOptions]) -> pb.EvaluateRequest:
    """Return the first message of an evaluation. Raises UsageError."""
    if not hasattr(dataset, "samples"):
        raise UsageError(
            f"dataset is a {type(dataset).__name__}; open it first: prelunet.evaluator.datasets.open_dataset"
        )
    with _invalid_options(options, EvaluateOptions):
        _check_scales(options.get("scales"))
        return pb.EvaluateRequest(start=pb.EvaluateStart(dataset=dataset.location.name, **options))


def labelled_image(dataset: "Dataset", sample: "Sample") -> pb.EvaluateRequest:
    """Read one image. Its class is sent by wnid, because the server's class indices apply."""
    if not 0 <= sample.label < len(dataset.classes):
        raise DatasetError(f"{sample.file}: its class is unknown; an evaluation needs the true class of every image")
    if sample.also or dataset.candidates is not None:
        what = "several true classes" if sample.also else "predictions among some classes only"
        raise DatasetError(f"{sample.file}: a call cannot have {what}. Use `prelunet validate`")
    try:
        sample.file.encode()
    except UnicodeEncodeError as error:
        raise DatasetError(f"{sample.file!a}: the name is not Unicode and cannot be sent. Rename the file") from error
    if sample.size > MAX_MESSAGE_BYTES - _MESSAGE_OVERHEAD:
        raise DatasetError(
            f"{sample.file}: {sample.size} bytes do not fit into a message, at most {MAX_MESSAGE_BYTES} bytes. "
            "Remove the file from the dataset, or use `prelunet validate`"
        )
    data = dataset.reader.read(sample.file)  # the server refuses and counts images beyond its own limit
    return pb.EvaluateRequest(image=pb.LabelledImage(file=sample.file, data=data, wnid=dataset.classes[sample.label]))


@contextmanager
def _invalid_options(options: Mapping[str, object], declared: type[EvaluateOptions]) -> Iterator[None]:
    """Refuse unknown options, and convert the errors for wrong types and for text that is not Unicode."""
    known = declared.__annotations__
    if unknown := options.keys() - known.keys():
        raise UsageError(f"no option {min(unknown)!r}. There are: {', '.join(known)}")
    try:
        yield
    except (TypeError, ValueError) as error:
        raise UsageError(f"an option cannot be sent: {error}. Give a value of the documented type") from error


def _check_scales(scales: Sequence[int] | None) -> None:
    """Check that a message can hold the scales; the server checks whether the model supports them."""
    for scale in scales or ():
        if not 1 <= scale < 2**32:
            raise UsageError(f"scales has {scale}, but a scale is a shorter side in pixels, 1 or more")
