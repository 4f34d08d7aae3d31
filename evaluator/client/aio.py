"""The asyncio client."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager, suppress
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any, Self, Unpack

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from ..answer import Answer
from ..errors import ModelNotFound, PreluNetError, UsageError
from ..image_input import ImageInput
from ..pb.prelunet.v1 import prelunet_pb2 as pb
from ..pb.prelunet.v1 import prelunet_pb2_grpc as pb_grpc
from ..rpc.convert import answer_from_message
from ..rpc.credentials import Credentials
from ..rpc.status import is_misconfigured
from .calls import MAX_PENDING, PROBE_TIMEOUT, UNANSWERED, Call, ClientSettings, ManyImages, Timeout
from .channel import open_channel
from .messages import (
    ClassifyOptions,
    EvaluateOptions,
    EvaluationProgress,
    ServedModel,
    classify_request,
    served_model_from_message,
)
from .sync import Client

if TYPE_CHECKING:
    from ..datasets.dataset import Dataset

_MAX_INLINE_PREDICTIONS = 50  # reading an answer of 1000 classes takes 20 ms, too long for an event loop


class AsyncClient:
    """`Client` for asyncio, with the same methods, arguments, results and errors. Use it in an `async with` block.

    It belongs to the event loop that runs the block. Cancelling a task also cancels its call on the server.
    """

    def __init__(
        self,
        address: str,
        *,
        timeout: Timeout = "default",
        retries: bool = True,
        credentials: Credentials = Credentials(),
    ) -> None:
        self._settings = ClientSettings(address, timeout, credentials, retries=retries)
        self._arguments: dict[str, Any] = {"timeout": timeout, "retries": retries, "credentials": credentials}
        self._evaluating: set[Client] = set()
        self._settings.closed = True  # until the block begins: gRPC's channel needs the running loop
        self._channel: grpc.aio.Channel | None = None

    @property
    def address(self) -> str:
        """Return the server's address."""
        return self._settings.address

    async def __aenter__(self) -> Self:
        if self._channel is not None:
            raise UsageError("an AsyncClient can be used in only one `async with` block; create a new one")
        settings = self._settings
        self._loop = asyncio.get_running_loop()
        self._channel = channel = open_channel(grpc.aio, settings.address, settings.credentials, settings.options())
        self._stub: Any = pb_grpc.PreluNetServiceStub(channel)
        self._health: Any = health_pb2_grpc.HealthStub(channel)
        settings.closed = False
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connection; calls in flight end with Interrupted."""
        self._settings.closed = True
        for client in self._evaluating:
            client.close()
        if self._channel is not None:
            await self._channel.close()

    async def classify(
        self,
        image: ImageInput,
        *,
        timeout: Timeout = "default",
        request_id: str | None = None,
        **options: Unpack[ClassifyOptions],
    ) -> Answer:
        """Classify one image, as `Client.classify`. A thread reads the image, unless it is bytes."""
        call = self._call(timeout, request_id)
        new_request = partial(classify_request, image, **options)
        request = new_request() if isinstance(image, bytes) else await asyncio.to_thread(new_request)
        return await _read_answer(await self._unary("Classify", request, call))

    def classify_many(
        self,
        images: AsyncIterable[Any] | Iterable[Any],
        *,
        max_pending: int = MAX_PENDING,
        timeout: float | None = None,
        request_id: str | None = None,
        **options: Unpack[ClassifyOptions],
    ) -> AsyncGenerator[tuple[Any, Answer | PreluNetError], None]:
        """Classify many images, as `Client.classify_many`. images: may also be an asynchronous iterable."""
        many = ManyImages(self._settings, images, options, max_pending, timeout, request_id)
        return self._answers(many, images)

    async def _answers(
        self, many: ManyImages, images: AsyncIterable[Any] | Iterable[Any]
    ) -> AsyncGenerator[tuple[Any, Answer | PreluNetError], None]:
        self._check_loop()
        events: asyncio.Queue[Any] = asyncio.Queue()  # what `_read` puts, and calls that have ended
        room = asyncio.Semaphore(many.max_pending)
        reading = asyncio.create_task(_read(many, images, events, room))
        calls: dict[Any, Any] = {}  # in flight, with the ids of their images
        end: BaseException | None = None  # why there are no more images
        try:
            while calls or end is None:
                try:
                    event = await asyncio.wait_for(events.get(), many.call.left())
                except TimeoutError:
                    raise many.timed_out() from None
                if isinstance(event, BaseException):
                    end = event
                    continue
                key, result = (
                    event if isinstance(event, tuple) else (calls.pop(event), await self._outcome(event, many))
                )
                if isinstance(result, pb.ClassifyRequest):
                    await self._try_connection(many.call)
                    call = self._stub.Classify(result, **many.arguments())
                    calls[call] = key
                    call.add_done_callback(events.put_nowait)
                    continue
                room.release()
                yield key, result
            many.raise_end(end)
        finally:
            for call in calls:
                call.cancel()
            reading.cancel()
            await asyncio.wait({reading})  # leave the caller's iterable before returning

    async def _outcome(self, call: Any, many: ManyImages) -> Answer | PreluNetError:
        try:
            async with self._errors(many.call):
                response = await call
            return await _read_answer(_checked(response, many.call))
        except PreluNetError as error:
            return many.error_of_image(error)

    async def evaluate(
        self,
        dataset: "Dataset",
        *,
        progress: Callable[[EvaluationProgress], object] | None = None,
        timeout: float | None = None,
        request_id: str | None = None,
        **options: Unpack[EvaluateOptions],
    ) -> dict[str, Any]:
        """Send a labeled dataset and return its report, as `Client.evaluate`, which runs in a thread.

        It has a connection of its own. progress: called in the event loop.
        """
        self._call(timeout, request_id)  # may it begin?
        report_progress = None if progress is None else partial(self._call_in_loop, progress)
        with Client(self.address, **self._arguments) as client:  # leaving it cancels the call
            self._evaluating.add(client)
            try:
                evaluate = partial(client.evaluate, dataset, timeout=timeout, request_id=request_id, **options)
                return await asyncio.to_thread(evaluate, progress=report_progress)
            finally:
                self._evaluating.remove(client)

    def _call_in_loop(self, function: Callable[[EvaluationProgress], object], progress: EvaluationProgress) -> None:
        async def call() -> None:
            function(progress)

        asyncio.run_coroutine_threadsafe(call(), self._loop).result()

    async def models(self, *, timeout: Timeout = "default", request_id: str | None = None) -> list[ServedModel]:
        """Return the served models, in the server's order."""
        call = self._call(timeout, request_id)
        listed = (await self._unary("ListModels", pb.ListModelsRequest(), call)).models
        found = []
        for model in listed:
            with suppress(ModelNotFound):  # unloaded meanwhile
                response = await self._unary("GetModel", pb.GetModelRequest(name=model.name), call)
                found.append(served_model_from_message(response.model))
        return found

    async def ready(self, *, timeout: Timeout = "default") -> bool:
        """Whether the server accepts calls; False if it reports that it does not, or does not answer in time."""
        call = self._call(timeout, None)
        try:
            response = await self._health.Check(health_pb2.HealthCheckRequest(), **call.arguments())
        except grpc.RpcError as failed:
            if failed.code() in UNANSWERED:
                return False
            raise call.error(failed) from failed
        except asyncio.CancelledError:
            if self._ended_by_close():
                raise call.interrupted() from None
            raise
        return bool(response.status == health_pb2.HealthCheckResponse.SERVING)

    def _call(self, timeout: Timeout, request_id: str | None) -> Call:
        call = Call(self._settings, timeout, request_id)
        self._check_loop()
        return call

    def _check_loop(self) -> None:
        if asyncio.get_running_loop() is not self._loop:
            raise UsageError("this AsyncClient belongs to another event loop; create one in each loop")

    async def _unary(self, method: str, request: object, call: Call, limit: float | None = None) -> Any:
        await self._try_connection(call)
        async with self._errors(call):
            response = await getattr(self._stub, method)(request, **call.arguments(limit))
        return _checked(response, call)

    async def _try_connection(self, call: Call) -> None:
        """Before a client's first call, raise the error of a connection that waiting would not bring about."""
        if not self._settings.probed:
            self._settings.probed = True
            failed = await self._no_connection(call.left(PROBE_TIMEOUT))
            if failed is not None and is_misconfigured(failed):
                self._settings.probed = False
                raise call.error(failed) from failed
            if self._settings.closed:
                raise call.interrupted()

    async def _no_connection(self, timeout: float | None) -> grpc.RpcError | None:
        """Return why there is no connection to a server that accepts calls, None if there is or if it is not known."""
        try:
            await self._health.Check(health_pb2.HealthCheckRequest(), timeout=timeout)
        except grpc.RpcError as failed:
            return failed if failed.code() == grpc.StatusCode.UNAVAILABLE else None
        except asyncio.CancelledError:
            if not self._ended_by_close():
                raise
        return None

    def _ended_by_close(self) -> bool:
        """Return whether a CancelledError is of the channel's end, not of this task."""
        task = asyncio.current_task()
        return self._settings.closed and task is not None and not task.cancelling()

    @asynccontextmanager
    async def _errors(self, call: Call) -> AsyncIterator[None]:
        """Convert gRPC's errors. A call that waits for a server in vain gets the reason, not only that time is up."""
        try:
            yield
        except grpc.RpcError as failed:
            if self._settings.retries and failed.code() == grpc.StatusCode.DEADLINE_EXCEEDED:
                failed = await self._no_connection(PROBE_TIMEOUT) or failed
            raise call.error(failed) from failed
        except asyncio.CancelledError:
            if self._ended_by_close():
                raise call.interrupted() from None
            raise


def _checked(response: Any, call: Call) -> Any:
    """Return the response. grpc.aio has None for bytes that are no message; synchronous gRPC raises an error."""
    if response is None:
        raise call.invalid_response("the response is not a message of this service")
    return response


async def _read_answer(message: pb.ClassifyResponse) -> Answer:
    if len(message.predictions) > _MAX_INLINE_PREDICTIONS:
        return await asyncio.to_thread(answer_from_message, message)
    return answer_from_message(message)


async def _in_thread(items: Iterable[Any]) -> AsyncGenerator[Any, None]:
    """Yield the items of an iterable that takes long."""
    iterator, end = iter(items), object()
    while (item := await asyncio.to_thread(next, iterator, end)) is not end:
        yield item


async def _read(
    many: ManyImages, images: AsyncIterable[Any] | Iterable[Any], events: "asyncio.Queue[Any]", room: asyncio.Semaphore
) -> None:
    """Build requests while there is room; at last, put why there are no more, and close the caller's generator."""
    source = images if isinstance(images, AsyncIterable) else _in_thread(images)
    try:
        iterator = aiter(source)
        for number in count():
            await room.acquire()
            image = await anext(iterator)
            events.put_nowait(await asyncio.to_thread(many.build, number, image))
    except BaseException as end:
        events.put_nowait(end)
    finally:
        if isinstance(source, AsyncGenerator):
            await source.aclose()
