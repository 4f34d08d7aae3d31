"""Ask a prelunet server. The same errors as with a model file at hand; `evaluator.protocols` tells what a protocol is.

with Client("127.0.0.1:50051") as client:
    answer = client.classify(Path("cat.jpg").read_bytes())
    print(answer.predictions[0].name)
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Self

import grpc

from evaluator.contract import ClassEntry
from evaluator.datasets.sample import Dataset, Sample
from evaluator.engine.answer import Answer
from evaluator.errors import DatasetError, UsageError
from evaluator.pb.prelunet.v1 import prelunet_pb2 as pb
from evaluator.pb.prelunet.v1 import prelunet_pb2_grpc as pb_grpc
from evaluator.serving.status import MAX_MESSAGE, error_from
from evaluator.serving.wire import answer_from_message, report_from_message, to_plain

_CHANNEL_OPTIONS = (
    ("grpc.max_receive_message_length", MAX_MESSAGE),  # a report of 1000 classes may pass gRPC's 4 MiB
    ("grpc.enable_http_proxy", 0),  # the address is meant as it stands; a proxy for downloads has no part in it
)
_ROOM = 4096  # bytes of a message for the file's name, its class and the framing


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


class Client:
    """A connection to a server; use it in a `with` block, from any number of threads.

    address: host:port; timeout: seconds for an answer to one image or question, None to wait for ever.
    Every method raises the errors of `evaluator.errors` that the server had, and EnvironmentFault that names the
    address when no server answers there. The model's name may be left out where only one is served.
    """

    def __init__(self, address: str, *, timeout: float | None = 60.0) -> None:
        self.address = address
        self._timeout = timeout
        self._channel = grpc.insecure_channel(address, options=_CHANNEL_OPTIONS)
        self._stub = pb_grpc.PreluNetServiceStub(self._channel)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection."""
        self._channel.close()

    def classify(
        self,
        image: bytes,
        *,
        model: str | None = None,
        protocol: str = "",
        top_k: int | None = None,
        heatmap: bool = False,
        apply_exif: bool = False,
    ) -> Answer:
        """Classify one encoded image.

        top_k: 1 to the number of classes; None is 5, or all where there are fewer;
        heatmap: draw where each of the five best classes is seen; apply_exif: obey the camera's note on rotation.
        """
        if top_k is not None and not 1 <= top_k < 2**31:
            raise UsageError(f"top_k is {top_k}, but a model can tell 1 to all of its classes")
        request = pb.ClassifyRequest(
            image=image, model=model or "", protocol=protocol, top_k=top_k, heatmap=heatmap, apply_exif=apply_exif
        )
        with _errors_of(self.address):
            return answer_from_message(self._stub.Classify(request, timeout=self._timeout))

    def evaluate(
        self,
        dataset: Dataset,
        *,
        model: str | None = None,
        protocol: str = "",
        apply_exif: bool = False,
        timeout: float | None = None,
    ) -> dict[str, Any]:
        """Send a labelled dataset and return its report, equal to what `prelunet validate` and `report` give.

        apply_exif: obey the camera's note on rotation; timeout: seconds for all of it, None to wait for ever.
        Raises DatasetError for an image that cannot be read.
        """
        start = pb.EvaluateStart(
            model=model or "", protocol=protocol, dataset=dataset.location.name, apply_exif=apply_exif
        )
        requests = _Requests(dataset, start)
        try:
            with _errors_of(self.address):
                response = self._stub.Evaluate(iter(requests), timeout=timeout)
        finally:
            requests.raise_own_error()  # if there is one, what the server says of the rest does not matter
        return report_from_message(response.report)

    def models(self) -> list[ServedModel]:
        """Return what is served, in the server's order."""
        with _errors_of(self.address):
            listed = self._stub.ListModels(pb.ListModelsRequest(), timeout=self._timeout).models
            asked = (pb.GetModelRequest(name=model.name) for model in listed)
            return [_model(self._stub.GetModel(request, timeout=self._timeout).model) for request in asked]


class _Requests:
    """The messages of one evaluation, and what went wrong while they were made.

    gRPC asks for them in a thread of its own and would tell only that something failed there.
    """

    def __init__(self, dataset: Dataset, start: pb.EvaluateStart) -> None:
        self._dataset = dataset
        self._start = start
        self._error: Exception | None = None

    def __iter__(self) -> Iterator[pb.EvaluateRequest]:
        yield pb.EvaluateRequest(start=self._start)
        try:
            for sample in self._dataset.samples:
                yield pb.EvaluateRequest(image=self._image(sample))
        except Exception as error:  # told by raise_own_error in the caller's thread; ending the stream ends the call
            self._error = error

    def _image(self, sample: Sample) -> pb.LabelledImage:
        """Read one image; its class is sent by name, since the server's order of classes decides."""
        if not 0 <= sample.label < len(self._dataset.classes):
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
        data = self._dataset.reader.read(sample.file)  # the server refuses what is too large for it, and counts it
        return pb.LabelledImage(file=sample.file, data=data, wnid=self._dataset.classes[sample.label])

    def raise_own_error(self) -> None:
        """Raise what went wrong on this side, if anything did."""
        if self._error is not None:
            raise self._error


@contextmanager
def _errors_of(address: str) -> Iterator[None]:
    """Turn the status of a failed call into our error."""
    try:
        yield
    except grpc.RpcError as error:
        raise error_from(error, address) from error


def _model(model: pb.Model) -> ServedModel:
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
