"""The asyncio client."""

from collections.abc import AsyncGenerator, AsyncIterable, Callable, Iterable, Sequence
from contextlib import aclosing
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Self

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from ..answer import Answer
from ..errors import DeadlinePassed, Overloaded, PreluNetError, UsageError
from ..image_input import ImageInput, encoded_image, is_image
from ..pb.prelunet.v1 import prelunet_pb2 as pb
from ..pb.prelunet.v1 import prelunet_pb2_grpc as pb_grpc
from ..rpc.convert import report_from_message
from ..rpc.credentials import Credentials
from .backends import AsyncBackend, Backend
from .calls import DEFAULT_RETRY_POLICY, Call, ClientSettings, RetryPolicy, Timeout
from .channel import CHANNEL_OPTIONS
from .messages import (
    EvaluationProgress,
    LabelledImages,
    ServedModel,
    classify_request,
    evaluate_start,
    progress_from_message,
    read_answer,
    served_model_from_message,
)
from .pacing import MAX_IN_FLIGHT, Pacer
from .streams import MAX_PENDING, Exchange, PendingImages

if TYPE_CHECKING:
    from ..datasets.dataset import Dataset

_NO_TURN = (
    f"the timeout has passed while the call waited for its turn: {MAX_IN_FLIGHT} others of this client, or as many as "
    "the server accepts, are in flight. Allow more time, or make fewer calls at once"
)
_UNANSWERED = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)  # a health check without a server


class AsyncClient:
    """`Client` for asyncio, with the same methods, arguments, results and errors. Use it in an `async with` block.

    It belongs to the event loop that runs the block. Cancelling a task also cancels its call on the server.
    """

    _backend: ClassVar[Backend] = AsyncBackend()  # see backends.py

    def __init__(
        self,
        address: str,
        *,
        timeout: Timeout = "default",
        retries: RetryPolicy = DEFAULT_RETRY_POLICY,
        credentials: Credentials = Credentials(),
    ) -> None:
        self._settings = ClientSettings(address, timeout, retries, credentials)
        self._settings.closed = True  # until the block begins: gRPC's channel needs the running loop
        self._pacer = Pacer(self._backend)
        self._channel: Any = None

    @property
    def address(self) -> str:
        """Return the server's address."""
        return self._settings.address

    async def __aenter__(self) -> Self:
        if self._channel is not None:
            raise UsageError("an AsyncClient can be used in only one `async with` block; create a new one")
        self._loop = self._backend.running_loop()
        self._channel = self._backend.new_channel(self.address, self._settings.channel_credentials, CHANNEL_OPTIONS)
        self._stub: Any = pb_grpc.PreluNetServiceStub(self._channel)
        self._health = health_pb2_grpc.HealthStub(self._channel)
        self._settings.closed = False
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connection; calls in flight end with Interrupted."""
        self._settings.closed = True
        if self._channel is not None:
            await self._backend.close(self._channel)

    async def classify(  # noqa: PLR0913 - one argument per option
        self,
        image: ImageInput,
        *,
        model: str | None = None,
        protocol: str = "",
        scales: Sequence[int] | None = None,
        mirror: bool | None = None,
        top_k: int | None = None,
        heatmap: bool = False,
        apply_exif: bool = False,
        timeout: Timeout = "default",
        request_id: str | None = None,
    ) -> Answer:
        """Classify one image.

        Of any number of calls, at most 128 are in flight; the others wait in order of arrival, and then read their
        images. A file is sent as it is, pixels as a PNG.
        image: path of an image file, its bytes, a Pillow image, or an array: uint8 (H, W, 3), RGB, or (H, W), gray;
        protocol: name, "" for the model's default; scales: shorter sides in pixels, None for the protocol's;
        mirror: whether to add a mirrored copy of each view, None for the protocol's choice;
        top_k: 1 to the number of classes, None for 5, or all if there are fewer;
        heatmap: draw a heat map of each of the top five classes; apply_exif: apply EXIF orientation;
        timeout: seconds from now to the answer, instead of the client's timeout.
        """
        request = classify_request(
            image if isinstance(image, bytes) else b"",
            model=model,
            protocol=protocol,
            scales=scales,
            mirror=mirror,
            top_k=top_k,
            heatmap=heatmap,
            apply_exif=apply_exif,
        )
        read = None if isinstance(image, bytes) else partial(encoded_image, image)
        call = self._new_call(timeout, request_id)
        return await read_answer(await self._unary_call("Classify", request, call, read), self._backend)

    def classify_many(  # noqa: PLR0913 - one argument per option
        self,
        images: AsyncIterable[Any] | Iterable[Any],
        *,
        model: str | None = None,
        protocol: str = "",
        scales: Sequence[int] | None = None,
        mirror: bool | None = None,
        top_k: int | None = None,
        heatmap: bool = False,
        apply_exif: bool = False,
        max_pending: int = MAX_PENDING,
        timeout: float | None = None,
        request_id: str | None = None,
    ) -> AsyncGenerator[tuple[Any, Answer | PreluNetError], None]:
        """Classify many images over one stream; yield the answers as they arrive, in any order.

        images: (id, image) pairs, where an id can be anything, or images alone, which get the ids 0, 1, 2, ...; each
        image as for `classify`; read in another thread, since that may take long. Only `AsyncClient` accepts an
        asynchronous iterable, too. Yields (id, answer), or (id, error) for a refused or unreadable image; the other
        images continue.
        max_pending: maximum number of images held; no more are read while this many are unanswered or their answers
        are not taken. timeout: seconds for all images. The other arguments are those of `classify`.

        A broken stream is reopened for the unanswered images, and an image that met a transient error is sent again,
        as far as the client's retries allow. An exception of `images` is raised after the answers to the images before
        it.
        """
        if is_image(images):
            raise UsageError(f"images is a {type(images).__name__}, but it must be several images, as in [image]")
        request = partial(
            classify_request,
            model=model,
            protocol=protocol,
            scales=scales,
            mirror=mirror,
            top_k=top_k,
            heatmap=heatmap,
            apply_exif=apply_exif,
        )
        deadline = self._settings.deadline(timeout)
        pending = PendingImages(self._settings, request, deadline, request_id, max_pending)
        open_stream = partial(self._open_stream, "ClassifyStream", pending.call)
        return Exchange(pending, self._backend, open_stream).answers(images)

    async def evaluate(  # noqa: PLR0913 - one argument per option
        self,
        dataset: "Dataset",
        *,
        model: str | None = None,
        protocol: str = "",
        scales: Sequence[int] | None = None,
        mirror: bool | None = None,
        apply_exif: bool = False,
        progress: Callable[[EvaluationProgress], object] | None = None,
        timeout: float | None = None,
        request_id: str | None = None,
    ) -> dict[str, Any]:
        """Send a labeled dataset and return its report, the same as that of `prelunet validate` and `report`.

        Unlike theirs, it lists only the first refused images, at most 1000 and 1 MiB of names and reasons.
        progress: called with the progress about once a second; timeout: seconds for the whole call, None for no limit.
        The other arguments are those of `classify`. Images are read in a thread. Nothing is retried after the first
        image has been read. Raises DatasetError for an image that cannot be read.
        """
        call = self._new_call(timeout, request_id)
        start = evaluate_start(
            dataset, model=model, protocol=protocol, scales=scales, mirror=mirror, apply_exif=apply_exif
        )
        while True:
            images, report = LabelledImages(dataset, start, self._backend), None
            responses = self._open_stream("Evaluate", call, images.messages())
            try:
                async with aclosing(responses):
                    async for response in responses:
                        if response.HasField("report"):
                            report = response.report
                        elif progress is not None and response.HasField("progress"):
                            progress(progress_from_message(response.progress))
            except grpc.RpcError as failed:
                images.raise_error()  # takes precedence over the server's error
                pause = call.pause_after(failed, repeatable=not images.begun)
            else:
                images.raise_error()
                if report is None:
                    raise call.invalid_response("the evaluation ended without a report")
                return await self._backend.run_slow(report_from_message, report)  # 1000 classes take a while
            await self._backend.sleep(pause)

    async def models(self, *, timeout: Timeout = "default", request_id: str | None = None) -> list[ServedModel]:
        """Return the served models, in the server's order."""
        deadline = self._settings.deadline(timeout)

        async def send(method: str, request: object) -> Any:
            return await self._unary_call(method, request, self._new_call(timeout, request_id, deadline))

        listed = (await send("ListModels", pb.ListModelsRequest())).models
        requests = (pb.GetModelRequest(name=model.name) for model in listed)
        return [served_model_from_message((await send("GetModel", request)).model) for request in requests]

    async def ready(self, *, timeout: Timeout = "default") -> bool:
        """Whether the server accepts calls; False if it reports that it does not, or does not answer in time."""
        call = self._new_call(timeout, None)
        options = call.begin()
        try:
            response = await self._backend.unary(self._health.Check, health_pb2.HealthCheckRequest(), options)
        except grpc.RpcError as failed:
            if failed.code() in _UNANSWERED:
                return False
            raise call.failure_of(failed).error from failed
        return bool(response.status == health_pb2.HealthCheckResponse.SERVING)

    def _new_call(self, timeout: Timeout, request_id: str | None, deadline: float | None = None) -> Call:
        patient = timeout == "default" and self._settings.default_timeout
        call = Call(self._settings, deadline or self._settings.deadline(timeout), request_id, patient=patient)
        self._check_loop()
        return call

    def _check_loop(self) -> None:
        if self._backend.running_loop() is not self._loop:
            raise UsageError("this AsyncClient belongs to another event loop; create one in each loop")

    async def _unary_call(self, method: str, request: Any, call: Call, read: Callable[[], bytes] | None = None) -> Any:
        """Make a unary call, with retries, when its turn comes. read: returns the image that the request needs."""
        again = False
        while True:
            if not await self._pacer.enter(call.turn_deadline, first=again):
                raise call.with_request_id(DeadlinePassed(_NO_TURN))
            try:
                if read is not None:  # not before its turn: of a large burst, few images should be in memory
                    request.image, read = await self._backend.run_slow(read), None
                options = call.begin()
                response = await self._backend.unary(getattr(self._stub, method), request, options)
            except grpc.RpcError as failed:
                failure, pause = call.failure_of(failed), 0.0
                full = isinstance(failure.error, Overloaded)
                again = not failure.absent  # a server has seen it, so its deadline has begun
                if not (full and self._pacer.refused() and call.forgive_refusal()):
                    pause = call.pause_after(failed)
                    if full:  # keep the turn: the others would be refused, too
                        await self._backend.sleep(pause)
                        pause = 0.0
            else:
                call.answer_received()
                self._pacer.answered()
                return response
            finally:
                self._pacer.leave()
            await self._backend.sleep(pause)

    def _open_stream(self, method: str, call: Call, requests: AsyncGenerator[Any, None]) -> AsyncGenerator[Any, None]:
        """Begin an attempt of a streaming call and return its responses."""
        self._check_loop()
        options = call.begin()
        return self._backend.stream(getattr(self._stub, method), requests, options)
