"""What a client sends."""

from collections.abc import Sequence

from prelunet.evaluator.datasets.sample import Dataset, Sample
from prelunet.evaluator.errors import DatasetError, ImageError, UsageError
from prelunet.evaluator.pb.prelunet.v1 import prelunet_pb2 as pb
from prelunet.evaluator.serving.status import MAX_MESSAGE

_ROOM = 4096  # bytes of a message for the file's name, its class and the framing


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
        raise UsageError(f"top_k is {top_k}, but a model can tell 1 to all of its classes")
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
    """Return one request of a stream; ImageError for an image that would end the stream instead of being refused."""
    if (size := request.ByteSize()) > MAX_MESSAGE - _ROOM:
        raise ImageError(f"{size} bytes are more than a message of {MAX_MESSAGE} bytes can carry. Send a smaller image")
    return pb.ClassifyStreamRequest(id=str(number), request=request)


def evaluate_start(
    dataset: Dataset,
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


def labelled_image(dataset: Dataset, sample: Sample) -> pb.EvaluateRequest:
    """Read one image; its class is sent by name, since the server's order of classes decides."""
    if not 0 <= sample.label < len(dataset.classes):
        raise DatasetError(f"{sample.file}: its class is not known; a report needs the true class of every image")
    try:
        sample.file.encode()
    except UnicodeEncodeError as error:
        raise DatasetError(f"{sample.file!a}: a name that is no Unicode cannot be sent. Rename the file") from error
    if sample.size > MAX_MESSAGE - _ROOM:
        raise DatasetError(
            f"{sample.file}: {sample.size} bytes are more than a message of {MAX_MESSAGE} bytes can carry. "
            "Take the file out of the dataset, or use `prelunet validate`"
        )
    data = dataset.reader.read(sample.file)  # the server refuses what is too large for it, and counts it
    return pb.EvaluateRequest(image=pb.LabelledImage(file=sample.file, data=data, wnid=dataset.classes[sample.label]))


def _checked(scales: Sequence[int] | None) -> Sequence[int]:
    """Return scales that a message can carry; the server knows which of them the model can be shown."""
    for scale in scales or ():
        if not 1 <= scale < 2**32:
            raise UsageError(f"scales has {scale}, but a scale is the shorter side of an image in pixels")
    return scales or ()
