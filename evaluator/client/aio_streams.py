"""What `AsyncClient` needs for its streams: images and requests between tasks, and the status of a stream's end."""

import asyncio
from collections.abc import AsyncIterable, AsyncIterator, Coroutine, Iterable
from contextlib import suppress
from typing import Any

import grpc
import grpc.aio

from prelunet.evaluator.client.many import Many, Told
from prelunet.evaluator.client.requests import labelled_image
from prelunet.evaluator.datasets.sample import Dataset
from prelunet.evaluator.pb.prelunet.v1 import prelunet_pb2 as pb

_UNTOLD = "Internal error from Core"  # gRPC's words for a request that it could not send
_PATIENCE = 1.0  # seconds for the status that follows; it has arrived already, or is under way inside of this process


class AsyncExchange:
    """`Many` between three tasks: the caller's that reads, gRPC's that sends, and one that takes images."""

    def __init__(self, many: Many) -> None:
        self._many = many
        self._changed = asyncio.Event()
        self._stream = 0

    async def take(self, images: AsyncIterable[Any] | Iterable[Any]) -> None:
        """Take images while there is room, until there are no more of them."""
        error: BaseException | None = None
        try:
            each = aiter(images) if isinstance(images, AsyncIterable) else _in_threads(images)
            while True:
                while not self._many.room:
                    await self._wait(None)
                self._many.take(await anext(each))
                self._notify()
        except StopAsyncIteration:
            pass
        except BaseException as raised:  # told by raise_error in the caller's task
            error = raised
        self._many.finish(error)
        self._notify()

    async def wait_for_work(self) -> bool:
        """Wait until there is something to send or to tell; False when everything is told."""
        while (pause := self._many.work_in()) != 0.0:
            await self._wait(pause)
        return not self._many.done

    def open_stream(self) -> AsyncIterator[pb.ClassifyStreamRequest]:
        """Return the requests of a new stream, for gRPC's task; those of the stream before end."""
        self._stream += 1
        return self._requests(self._stream)

    async def _requests(self, stream: int) -> AsyncIterator[pb.ClassifyStreamRequest]:
        while self._stream == stream and not self._many.idle:
            if (request := self._many.next_request()) is not None:
                yield request
            else:
                await self._wait(self._many.due_in())

    def close_stream(self) -> None:
        """Let the requests of the stream end; what is taken from here on belongs to the next one."""
        self._stream += 1
        self._notify()

    def ended(self) -> None:
        """Take note that the server ended the stream."""
        self.close_stream()
        self._many.ended()

    def broke(self, failed: grpc.RpcError) -> None:
        """Take note that the stream broke; raises the error where that is the end of all."""
        self.close_stream()
        self._many.broke(failed)

    def answered(self, response: pb.ClassifyStreamResponse) -> list[Told]:
        """Take note of an answer; returns what there is to tell."""
        self._many.answered(response)
        return self.take_results()

    def take_results(self) -> list[Told]:
        """Return what there is to tell."""
        self._notify()  # there may be room now
        return self._many.take_results()

    def _notify(self) -> None:
        """Wake everybody who waits."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def _wait(self, seconds: float | None) -> None:
        """Wait until something changes, or for so long."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._changed.wait()


async def _in_threads(images: Iterable[Any]) -> AsyncIterator[Any]:
    """Ask for each image in a thread, since making it may take a while."""
    each, end = iter(images), object()
    while (given := await asyncio.to_thread(next, each, end)) is not end:
        yield given


class LabelledImages:
    """The messages of one evaluation, and what went wrong while they were made.

    gRPC asks for them in a task of its own and would tell only that something failed there. begun: whether an image has
    been asked for.
    """

    def __init__(self, dataset: Dataset, start: pb.EvaluateRequest) -> None:
        self.begun = False
        self._dataset = dataset
        self._start = start
        self._error: Exception | None = None

    async def messages(self) -> AsyncIterator[pb.EvaluateRequest]:
        """Give them in order; images are read in a thread."""
        yield self._start
        self.begun = True
        try:
            for sample in self._dataset.samples:
                yield await asyncio.to_thread(labelled_image, self._dataset, sample)
        except Exception as error:  # told by raise_own_error in the caller's task; ending the stream ends the call
            self._error = error

    def raise_own_error(self) -> None:
        """Raise what went wrong on this side, if anything did."""
        if self._error is not None:
            raise self._error


class StreamEnd:
    """How a stream ended.

    Where a server ends a stream while a request is being sent, grpc.aio puts an INTERNAL of its own in the place of the
    server's status (grpc/grpc#36066), before or after that arrives. Each of them calls what waits for the end, so
    the server's is noted there.
    """

    def __init__(self, stream: Any) -> None:
        self._status: grpc.aio.AioRpcError | None = None
        self._known = asyncio.Event()
        stream.add_done_callback(self._note)

    def _note(self, stream: Any) -> None:
        details = _now(stream.details())
        if self._status is None and details != _UNTOLD:
            code, trailing = _now(stream.code()), _now(stream.trailing_metadata())
            self._status = grpc.aio.AioRpcError(code, grpc.aio.Metadata(), trailing, details)
            self._known.set()

    async def status(self, failed: grpc.RpcError) -> grpc.RpcError | None:
        """Return the server's status, None where it is OK. failed: what grpc.aio raised."""
        if failed.details() != _UNTOLD:
            return failed
        with suppress(TimeoutError):
            async with asyncio.timeout(_PATIENCE):
                await self._known.wait()
        if self._status is None:
            return failed
        return None if self._status.code() == grpc.StatusCode.OK else self._status


def _now(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Return the result of a coroutine that has nothing to wait for."""
    try:
        coroutine.send(None)
    except StopIteration as done:
        return done.value
    coroutine.close()
    raise AssertionError("the stream has ended, so its status is known")
