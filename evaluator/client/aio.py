"""The asyncio client."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterable, Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Self

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2_grpc

from prelunet.evaluator.answer import Answer
from prelunet.evaluator.client.calls import DEFAULT_RETRY_POLICY, Call, ClientSettings, RetryPolicy, Timeout
from prelunet.evaluator.client.channel import CHANNEL_OPTIONS
from prelunet.evaluator.client.messages import (
    HEALTH,
    EvaluationProgress,
    EvaluationResponses,
    ServedModel,
    classify_request,
    evaluate_start,
    is_serving,
    is_unanswered,
    served_model_from_message,
)
from prelunet.evaluator.client.streams import (
    MAX_PENDING,
    AsyncExchange,
    AsyncLabelledImages,
    PendingImages,
    Result,
    StreamEnd,
)
from prelunet.evaluator.errors import Interrupted, PreluNetError, UsageError
from prelunet.evaluator.pb.prelunet.v1 import prelunet_pb2 as pb
from prelunet.evaluator.pb.prelunet.v1 import prelunet_pb2_grpc as pb_grpc
from prelunet.evaluator.rpc.convert import answer_from_message

if TYPE_CHECKING:
    from prelunet.evaluator.datasets.dataset import Dataset

_MAX_INLINE_PREDICTIONS = 50  # reading an answer of 1000 classes takes 20 ms, too long for an event loop


class AsyncClient:
    """`Client` for asyncio, with the same methods, arguments, results and errors. Use it in an `async with` block.

    It belongs to the event loop that runs the block. Cancelling a task also cancels its call on the server.
    """

    def __init__(
        self, address: str, *, timeout: float | None = 60.0, retries: RetryPolicy = DEFAULT_RETRY_POLICY
    ) -> None:
        self._settings = ClientSettings(address, timeout, retries)
        self._settings.closed = True  # until the block begins: gRPC's channel needs the running loop
        self._channel: grpc.aio.Channel | None = None

    @property
    def address(self) -> str:
        """Return the server's address."""
        return self._settings.address

    async def __aenter__(self) -> Self:
        if self._channel is not None:
            raise UsageError("an AsyncClient can be used in only one `async with` block; create a new one")
        self._channel = grpc.aio.insecure_channel(self.address, options=CHANNEL_OPTIONS)
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
            await self._channel.close()

    async def classify(  # noqa: PLR0913 - one argument per option
        self,
        image: bytes,
        *,
        model: str | None = None,
        protocol: str = "",
        scales: Sequence[int] | None = None,
        mirror: bool | None = None,
        top_k: int | None = None,
        heatmap: bool = False,
        apply_exif: bool = False,
        timeout: Timeout = "client",
        request_id: str | None = None,
    ) -> Answer:
        """Classify one encoded image, as `Client.classify`."""
        request = classify_request(
            image,
            model=model,
            protocol=protocol,
            scales=scales,
            mirror=mirror,
            top_k=top_k,
            heatmap=heatmap,
            apply_exif=apply_exif,
        )
        call = Call(self._settings, self._settings.deadline(timeout), request_id)
        return await _answer_from(await self._unary_call("Classify", request, call))

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
        """Classify many encoded images over one stream, as `Client.classify_many`.

        images: an asynchronous iterable, or an ordinary one, which is read in a thread since it may read files.
        """
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
        return self._stream(
            PendingImages(self._settings, request, self._settings.deadline(timeout), request_id, max_pending), images
        )

    async def _stream(
        self, pending: PendingImages, images: AsyncIterable[Any] | Iterable[Any]
    ) -> AsyncGenerator[tuple[Any, Answer | PreluNetError], None]:
        """Yield the answers; a stream is open while there is something to send or to wait for."""
        exchange = AsyncExchange(pending)
        reader = asyncio.create_task(exchange.read_images(images))
        try:
            while await exchange.wait_for_work():
                if results := exchange.take_results():
                    for result in results:
                        yield await _to_answer(result)
                    continue
                requests, options = exchange.open_stream(), pending.call.begin()
                stream = self._stub.ClassifyStream(requests, **options)
                end = StreamEnd(stream)
                try:
                    async for response in stream:
                        for result in exchange.answer_received(_require_message(response, pending.call)):
                            yield await _to_answer(result)
                    exchange.stream_ended()
                except grpc.RpcError as failed:
                    if (status := await end.status(failed)) is None:
                        exchange.stream_ended()
                    else:
                        exchange.stream_failed(status)
                except asyncio.CancelledError:
                    self._raise_unless_cancelled()
                    raise
                finally:
                    stream.cancel()
            pending.raise_error()
        finally:
            exchange.close_stream()
            reader.cancel()
            await asyncio.wait({reader})  # leave the caller's iterable before returning

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
        """Send a labelled dataset and return its report, as `Client.evaluate`; images are read in a thread."""
        call = Call(self._settings, self._settings.deadline(timeout), request_id)
        start = evaluate_start(
            dataset, model=model, protocol=protocol, scales=scales, mirror=mirror, apply_exif=apply_exif
        )
        while True:
            options = call.begin()
            requests, evaluation = AsyncLabelledImages(dataset, start), EvaluationResponses(call, progress)
            stream = self._stub.Evaluate(requests.messages(), **options)
            end = StreamEnd(stream)
            try:
                async for response in stream:
                    evaluation.read(_require_message(response, call))
                status = None
            except grpc.RpcError as failed:
                status = await end.status(failed)
            except asyncio.CancelledError:
                self._raise_unless_cancelled()
                raise
            finally:
                stream.cancel()
            requests.raise_local_error()  # takes precedence over the server's error
            if status is None:
                return await asyncio.to_thread(evaluation.report)  # 1000 classes take a while
            await asyncio.sleep(call.pause_after(status, repeatable=not requests.begun))

    async def models(self, *, timeout: Timeout = "client", request_id: str | None = None) -> list[ServedModel]:
        """Return the served models, in the server's order."""
        deadline = self._settings.deadline(timeout)

        async def send(method: str, request: object) -> Any:
            return await self._unary_call(method, request, Call(self._settings, deadline, request_id))

        listed = (await send("ListModels", pb.ListModelsRequest())).models
        requests = (pb.GetModelRequest(name=model.name) for model in listed)
        return [served_model_from_message((await send("GetModel", request)).model) for request in requests]

    async def ready(self, *, timeout: Timeout = "client") -> bool:
        """Whether the server accepts calls; False if it reports that it does not, or does not answer in time."""
        call = Call(self._settings, self._settings.deadline(timeout), None)
        options = call.begin()
        try:
            return is_serving(await self._health.Check(HEALTH, **options))
        except grpc.RpcError as failed:
            if is_unanswered(failed):
                return False
            raise call.failure_of(failed).error from failed
        except asyncio.CancelledError:
            self._raise_unless_cancelled()
            raise

    async def _unary_call(self, method: str, request: object, call: Call) -> Any:
        """Make a unary call, with retries."""
        while True:
            options = call.begin()  # first: outside a block there is no stub
            try:
                response = await getattr(self._stub, method)(request, **options)
            except grpc.RpcError as failed:
                pause = call.pause_after(failed)
            except asyncio.CancelledError:
                self._raise_unless_cancelled()
                raise
            else:
                call.answer_received()
                return _require_message(response, call)
            await asyncio.sleep(pause)

    def _raise_unless_cancelled(self) -> None:
        """Raise Interrupted if gRPC reports "cancelled" but nobody cancelled the task: the client was closed."""
        task = asyncio.current_task()
        if task is not None and not task.cancelling():
            raise Interrupted(f"{self.address}: the client was closed before the answer arrived")


def _require_message(response: Any, call: Call) -> Any:
    """Return the message. It is None if grpc.aio could not parse the bytes, where synchronous gRPC raises an error."""
    if response is None:
        raise call.invalid_response("the server there does not send messages of this service")
    return response


async def _answer_from(message: pb.ClassifyResponse) -> Answer:
    if len(message.predictions) > _MAX_INLINE_PREDICTIONS:
        return await asyncio.to_thread(answer_from_message, message)
    return answer_from_message(message)


async def _to_answer(result: Result) -> tuple[Any, Answer | PreluNetError]:
    key, outcome = result
    return key, await _answer_from(outcome) if isinstance(outcome, pb.ClassifyResponse) else outcome
