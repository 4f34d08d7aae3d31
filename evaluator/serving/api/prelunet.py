"""The PreluNetService of proto/prelunet/v1: translates calls for the data plane. Nothing is computed here."""

import asyncio
import struct
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing, suppress
from functools import lru_cache
from itertools import accumulate
from pathlib import PurePosixPath
from typing import TypeAlias

from google.protobuf.json_format import ParseDict
from msgspec import to_builtins

from ...contract import MAX_SCALES, ClassEntry, ModelContract
from ...errors import DatasetError, Overloaded, UsageError
from ...pb.prelunet.v1 import prelunet_pb2 as pb
from ...pb.prelunet.v1 import prelunet_pb2_grpc as pb_grpc
from ...reporting.report import Report
from ...rpc.convert import convert_nested_lists
from ...rpc.status import client_message, code_of, reason_for
from ..answers import constant_part
from ..concurrency import answer_all, uncancelled
from ..data_plane import DataPlane
from ..evaluation import LabelledImage, Progress
from ..observability.call_context import Call, Context, this_call
from ..observability.logs import log_incident
from ..scheduling.model import RequestOptions
from ..scheduling.request import Answered

SERVICE = pb.DESCRIPTOR.services_by_name["PreluNetService"].full_name

MAX_FILE_NAME = 1024  # characters
# A report message lists only the first refused images: a million would not fit into a message, and after hours the
# client would get an error instead of the report.
MAX_LISTED_REFUSALS = 1000
_SCORE = struct.Struct("<f")  # as protobuf writes a float
_MAX_REFUSALS_BYTES = 2**20  # of names and reasons; a name may have 4 kB


class PreluNetServicer(pb_grpc.PreluNetServiceServicer):
    """Translates calls. The answers of Classify are serialized already."""

    def __init__(self, plane: DataPlane) -> None:
        self._plane = plane

    async def Classify(self, request: pb.ClassifyRequest, context: Context) -> bytes:
        """Classify one image."""
        answer = self._classify(request, this_call())
        del request  # it holds a second copy of the image
        return await answer

    def _classify(
        self, request: pb.ClassifyRequest, call: Call, on_admitted: Callable[[], None] | None = None
    ) -> Awaitable[bytes]:
        """Return the awaitable that answers a request, of Classify or of a stream, without the message."""
        return _written(
            self._plane.classify(
                request.image, request.model, options_in(request), call, classify_response, on_admitted
            )
        )

    async def ClassifyStream(self, request_iterator: AsyncIterator[pb.ClassifyStreamRequest], context: Context) -> None:
        """Classify the images of a stream."""
        call = this_call()
        await classify_stream(
            lambda request, on_admitted: self._classify(request, call, on_admitted),
            request_iterator,
            lambda answer: uncancelled(context.write(answer)),
            call,
        )

    async def Evaluate(self, request_iterator: AsyncIterator[pb.EvaluateRequest], context: Context) -> None:
        """Evaluate a streamed dataset."""
        start, call = start_of(await anext(request_iterator, None)), this_call()
        contract = self._plane.models.get(start.model).session.contract
        call.message_done()  # `start` gets no answer of its own

        async def images() -> AsyncGenerator[LabelledImage, None]:
            with suppress(StopAsyncIteration):
                while True:  # without a variable, which would hold a message until the next arrives
                    yield image_of(await anext(request_iterator), contract)

        async def send_progress(progress: Progress) -> None:
            message = pb.EvaluateResponse(progress=pb.EvaluateProgress(**to_builtins(progress)))
            await uncancelled(context.write(message))

        async with aclosing(images()) as labeled:
            report = await self._plane.evaluate(
                start.dataset, labeled, start.model, options_in(start), call, send_progress
            )
        await context.write(pb.EvaluateResponse(report=await asyncio.to_thread(report_message, report)))

    async def ListModels(self, request: pb.ListModelsRequest, context: Context) -> pb.ListModelsResponse:
        """List the served models, and what is wrong with others."""
        return pb.ListModelsResponse(**to_builtins(self._plane.list_models()))

    async def GetModel(self, request: pb.GetModelRequest, context: Context) -> pb.GetModelResponse:
        return pb.GetModelResponse(model=to_builtins(self._plane.get_model(request.name)))


async def _written(answer: Awaitable[Answered]) -> bytes:
    return (await answer).written


# Many images in one call: each request is read, classified and answered independently.
#
# The server reads a request of a stream only when one of its `STREAM_SLOTS` slots is free, and frees the slot once the
# answer has been sent. So gRPC's flow control slows down a client that sends faster than the server classifies, and a
# client that does not read its answers does not fill the server's memory. While a request waits for admission, the next
# one is not read either: admission limits the requests in the queue, and outside it a stream has one message, as any
# other call.
#
# Admission does not limit finished answers that the client has not read; the slots do. A slot stands for about 100 kB
# of answer. A request with a larger answer takes several slots (`slots_for`) before it starts. Its size is only
# estimated, but waiting for the answer itself would be too late: others would be in progress by then. So a stream holds
# at most a few MB of answers, whatever it requests. Later requests wait their turn; none overtakes.


STREAM_SLOTS = 32  # per stream: the maximum number of its unanswered requests
_HEATMAP_SLOTS = 8  # for a PNG file of 0.8 MB; four at a time keep four cores drawing
_CLASSES_PER_SLOT = 1000  # 40 kB on the wire, a few times that as objects
MAX_ID_LENGTH = 128  # characters

# Takes a request and a callback for its admission. The awaitable must not hold the message, only what it needs of it.
ClassifyOne: TypeAlias = Callable[[pb.ClassifyRequest, Callable[[], None]], Awaitable[bytes]]
Send: TypeAlias = Callable[[pb.ClassifyStreamResponse], Awaitable[None]]


async def classify_stream(
    classify: ClassifyOne, requests: AsyncIterator[pb.ClassifyStreamRequest], send: Send, call: Call
) -> None:
    """Answer each request of a stream as soon as its result is ready.

    classify: answers one request; its error becomes the answer to that request; send: sends an answer, and waits while
    the client does not read; never called concurrently. An error of `requests` or `send` ends the stream. Unanswered
    requests are cancelled when the stream ends with an error or is cancelled.
    """
    slots = asyncio.Semaphore(STREAM_SLOTS)
    sending = asyncio.Lock()
    unanswered: set[str] = set()

    async def answer(request: pb.ClassifyStreamRequest, on_admitted: Callable[[], None]) -> None:
        taken = slots_for(request.request)
        for _ in range(1, taken):
            await slots.acquire()
        response = pb.ClassifyStreamResponse()
        try:
            _require_new(request.id, unanswered)
            unanswered.add(request.id)
            response.id = request.id
            classified = classify(request.request, on_admitted)
            del request  # it holds a second copy of the image
            response.response.ParseFromString(await classified)
        except Exception as error:
            response.error.CopyFrom(call_error(error, log_incident(error)))
        if response.id:
            call.record_answer(failed=response.HasField("error"))
        on_admitted()
        async with sending:
            unanswered.discard(response.id)  # not later: the client may reuse the id once it has the answer
            await send(response)
        call.message_done()
        for _ in range(taken):
            slots.release()

    await answer_all(requests, slots, answer)


def slots_for(request: pb.ClassifyRequest) -> int:
    """Return the number of slots that the answer to a request takes, 1 to `STREAM_SLOTS`."""
    classes = -(-request.top_k // _CLASSES_PER_SLOT)
    return min(STREAM_SLOTS, max(1, classes, _HEATMAP_SLOTS if request.heatmap else 1))


def _require_new(id_: str, unanswered: set[str]) -> None:
    """Raise UsageError for a request's id that is invalid or already in use."""
    if not 1 <= len(id_) <= MAX_ID_LENGTH:
        raise UsageError(
            f"a request's `id` should have 1 to {MAX_ID_LENGTH} characters, not {len(id_)}: '{id_[:MAX_ID_LENGTH]}'"
        )
    if id_ in unanswered:
        raise UsageError(
            f"id '{id_}' is already in use by a request that has no answer yet; give each its own id until then"
        )


# Messages.


def options_in(request: pb.ClassifyRequest | pb.EvaluateStart) -> RequestOptions:
    """Return what a request asks of its images."""
    scales = tuple(request.scales[: MAX_SCALES + 1]) or None  # one above the limit is enough to refuse millions
    mirror = request.mirror if request.HasField("mirror") else None
    if isinstance(request, pb.EvaluateStart):
        return RequestOptions(request.protocol, scales, mirror, request.apply_exif)
    top = request.top_k if request.HasField("top_k") else None
    return RequestOptions(request.protocol, scales, mirror, request.apply_exif, top, request.heatmap, request.maps)


def classify_response(answer: Answered) -> bytes:
    """Return the serialized ClassifyResponse of an answer; serialized messages one after the other are one message."""
    classes = answer.model.session.contract.classes
    best = answer.classified.top(answer.plan.top)
    parts = [_prediction(index, classes[index]) + _SCORE.pack(score) for index, score in best]
    maps = [pb.HeatMap(**vars(of_class)) for of_class in answer.maps]
    own = pb.ClassifyResponse(heatmap=answer.heatmap, maps=maps, timings=pb.Timings(**vars(answer.timings)))
    return b"".join([*parts, own.SerializeToString(), answer.constant_part(_constant_bytes)])


@lru_cache(2**14)
def _prediction(index: int, entry: ClassEntry) -> bytes:
    """Return a serialized ClassifyResponse with one prediction, without its last bytes: those of the score."""
    prediction = pb.Prediction(class_index=index, wnid=entry.wnid, name=entry.name, score=1)
    return pb.ClassifyResponse(predictions=[prediction]).SerializeToString()[: -_SCORE.size]


def _constant_bytes(answer: Answered) -> bytes:
    return pb.ClassifyResponse(**to_builtins(constant_part(answer))).SerializeToString()


def call_error(error: BaseException, incident: str) -> pb.CallError:
    """Convert an error to an answer of a stream, with the same content as its status; incident: see `status_of`."""
    return pb.CallError(
        code=code_of(error).value[0],
        reason=reason_for(error),
        message=client_message(error, incident),
        retry_after_seconds=error.retry_after if isinstance(error, Overloaded) else None,
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
