"""The messages of a client: what it reads and what it sends."""

from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..answer import Answer
from ..contract import ClassEntry
from ..errors import DatasetError, ImageError, UsageError
from ..pb.prelunet.v1 import prelunet_pb2 as pb
from ..rpc.convert import answer_from_message, to_plain
from ..rpc.status import MAX_MESSAGE_BYTES
from .backends import Backend

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


_MAX_INLINE_PREDICTIONS = 50  # reading an answer of 1000 classes takes 20 ms, too long for an event loop


async def read_answer(message: pb.ClassifyResponse, backend: Backend) -> Answer:
    """Read the answer for one image."""
    if len(message.predictions) > _MAX_INLINE_PREDICTIONS:
        return await backend.run_slow(answer_from_message, message)
    return answer_from_message(message)


# Requests.


_MESSAGE_OVERHEAD = 4096  # bytes of a message for the file's name, its class and the framing


def classify_request(
    image: bytes = b"",
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
    if isinstance(top_k, int) and not 1 <= top_k < 2**31:
        raise UsageError(f"top_k is {top_k}, but it must be between 1 and the model's number of classes")
    with _invalid_options():
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
    if not hasattr(dataset, "samples"):
        raise UsageError(
            f"dataset is a {type(dataset).__name__}; open it first: prelunet.evaluator.datasets.open_dataset"
        )
    with _invalid_options():
        start = pb.EvaluateStart(
            model=model or "",
            protocol=protocol,
            dataset=dataset.location.name,
            scales=_checked(scales),
            mirror=mirror,
            apply_exif=apply_exif,
        )
    return pb.EvaluateRequest(start=start)


class LabelledImages:
    """The messages of one evaluation. begun: whether an image has been requested."""

    def __init__(self, dataset: "Dataset", start: pb.EvaluateRequest, backend: Backend) -> None:
        self.begun = False
        self._dataset = dataset
        self._start = start
        self._backend = backend
        self._error: Exception | None = None

    async def messages(self) -> AsyncGenerator[pb.EvaluateRequest, None]:
        """Yield the messages in order. An image that cannot be read ends them, and so the call."""
        yield self._start
        self.begun = True
        try:
            for sample in self._dataset.samples:
                yield await self._backend.run_slow(_labelled_image, self._dataset, sample)
        except Exception as error:  # gRPC would only report that something failed here
            self._error = error

    def raise_error(self) -> None:
        """Raise what ended the messages too early, if anything."""
        if self._error is not None:
            raise self._error


def _labelled_image(dataset: "Dataset", sample: "Sample") -> pb.EvaluateRequest:
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
            f"{sample.file}: {sample.size} bytes do not fit into a message, whose limit is {MAX_MESSAGE_BYTES} bytes. "
            "Remove the file from the dataset, or use `prelunet validate`"
        )
    data = dataset.reader.read(sample.file)  # the server refuses and counts images beyond its own limit
    return pb.EvaluateRequest(image=pb.LabelledImage(file=sample.file, data=data, wnid=dataset.classes[sample.label]))


@contextmanager
def _invalid_options() -> Iterator[None]:
    """Convert what Python and protobuf raise for an option of a wrong type, and for text that is not Unicode."""
    try:
        yield
    except (TypeError, ValueError) as error:
        raise UsageError(f"an option cannot be sent: {error}. Give a value of the documented type") from error


def _checked(scales: Sequence[int] | None) -> Sequence[int]:
    """Return the scales if a message can hold them; the server checks whether the model supports them."""
    for scale in scales or ():
        if not 1 <= scale < 2**32:
            raise UsageError(f"scales has {scale}, but a scale is a shorter side in pixels, 1 or more")
    return scales or ()
