"""The I/O of a client: over asyncio, and over threads.

The methods of `AsyncClient` are coroutines over a backend. Over `AsyncBackend` their awaits suspend them. Over
`BlockingBackend` their awaits block the thread, so `run` runs them to their end without an event loop: `Client` does.
An event loop in a thread of its own would cost one thread's calls a tenth of their rate, and would not survive a fork.
"""

import asyncio
import sys
import threading
import time
from collections.abc import AsyncGenerator, AsyncIterable, Callable, Coroutine, Generator
from contextlib import suppress
from typing import Any, TypeAlias, TypeVar, cast

import grpc
import grpc.aio

_T = TypeVar("_T")


class BlockingBackend:
    """Synchronous gRPC, and threads. The coroutines never suspend."""

    def new_channel(self, address: str, credentials: grpc.ChannelCredentials | None, options: Any) -> grpc.Channel:
        """Return a channel. credentials: None without TLS."""
        if credentials is None:
            return grpc.insecure_channel(address, options)
        return grpc.secure_channel(address, credentials, options)

    async def close(self, channel: grpc.Channel) -> None:
        """Close a channel; its calls end with CANCELLED."""
        channel.close()

    async def unary(self, method: Callable[..., Any], request: object, options: dict[str, Any]) -> Any:
        """Make a call and return its response; raise grpc.RpcError."""
        try:
            return method(request, **options)
        except ValueError as error:
            raise _closed() from error

    async def stream(
        self, method: Callable[..., Any], requests: AsyncGenerator[object, None], options: dict[str, Any]
    ) -> AsyncGenerator[Any, None]:
        """Make a call of many requests and yield its responses; raise grpc.RpcError. Closing it cancels the call."""
        try:
            call = method(each(requests), **options)
        except ValueError as error:
            raise _closed() from error
        try:
            for response in call:
                yield response
        finally:
            call.cancel()

    async def sleep(self, seconds: float) -> None:
        """Wait."""
        time.sleep(seconds)

    async def run_slow(self, function: Callable[..., _T], *arguments: Any) -> _T:
        """Run a function that takes long."""
        return function(*arguments)

    async def map(self, function: Callable[[Any], _T], images: Any) -> AsyncGenerator[_T, None]:
        """Yield the function's result for each item of a caller's iterable; both may take long."""
        for image in images:
            yield function(image)

    def start(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine in a thread of its own, which ends with the program at the latest."""
        threading.Thread(target=run, args=(coroutine,), name="prelunet-images", daemon=True).start()

    async def stop(self, _: Any) -> None:
        """Do nothing: a thread cannot be cancelled."""

    def running_loop(self) -> None:
        """Return None: there is no event loop."""

    class Event(threading.Event):
        """What one thread waits for."""

        async def reached(self, seconds: float | None = None) -> bool:
            """Wait until it is set, for at most `seconds`; return whether it is set."""
            return self.wait(seconds)

    class Condition(threading.Condition):
        """A lock, and the means to wait for a change of what it protects."""

        async def changed(self, seconds: float | None = None) -> None:
            """Release the lock and wait for `notify_all`, for at most `seconds`."""
            self.wait(seconds)


def run(coroutine: Coroutine[Any, Any, _T]) -> _T:
    """Run a coroutine that never suspends to its end, in this thread."""
    hooks = sys.get_asyncgen_hooks()
    sys.set_asyncgen_hooks(None, None)  # of a loop that runs in this thread: it would close our generators at its end
    try:
        coroutine.send(None)
    except StopIteration as done:
        result: _T = done.value
        return result
    finally:
        sys.set_asyncgen_hooks(*hooks)
    coroutine.close()
    raise AssertionError("the coroutine was suspended")


def each(items: AsyncGenerator[_T, None]) -> Generator[_T, None, None]:
    """Yield the items of an asynchronous generator that never suspends."""

    async def following() -> _T:
        return await anext(items)

    try:
        while True:
            try:
                item = run(following())
            except StopAsyncIteration:
                return
            yield item
    finally:
        run(items.aclose())


class AsyncBackend:
    """grpc.aio, and the tasks of one event loop."""

    def new_channel(self, address: str, credentials: grpc.ChannelCredentials | None, options: Any) -> grpc.aio.Channel:
        """Return a channel. credentials: None without TLS."""
        if credentials is None:
            return grpc.aio.insecure_channel(address, options)
        return grpc.aio.secure_channel(address, credentials, options)

    async def close(self, channel: grpc.aio.Channel) -> None:
        """Close a channel; its calls end with CANCELLED."""
        await channel.close()

    async def unary(self, method: Callable[..., Any], request: object, options: dict[str, Any]) -> Any:
        """Make a call and return its response; raise grpc.RpcError."""
        try:
            return _parsed(await method(request, **options))
        except asyncio.CancelledError:
            _raise_if_closed()
            raise

    async def stream(
        self, method: Callable[..., Any], requests: AsyncGenerator[object, None], options: dict[str, Any]
    ) -> AsyncGenerator[Any, None]:
        """Make a call of many requests and yield its responses; raise grpc.RpcError. Closing it cancels the call."""
        call = method(requests, **options)
        end = StreamEnd(call)
        try:
            async for response in call:
                yield _parsed(response)
        except grpc.RpcError as failed:
            if (status := await end.status(failed)) is not None:
                try:
                    raise status
                finally:
                    del status  # it refers to the traceback and so to this frame: a cycle
        except asyncio.CancelledError:
            _raise_if_closed()
            raise
        finally:
            call.cancel()

    async def sleep(self, seconds: float) -> None:
        """Wait."""
        await asyncio.sleep(seconds)

    async def run_slow(self, function: Callable[..., _T], *arguments: Any) -> _T:
        """Run a function that would hold up the event loop."""
        return await asyncio.to_thread(function, *arguments)

    async def map(self, function: Callable[[Any], _T], images: Any) -> AsyncGenerator[_T, None]:
        """Yield the function's result for each item of a caller's iterable; threads run the function and an ordinary
        iterable, since both may read files. Closing it closes an asynchronous generator of the caller.
        """
        if isinstance(images, AsyncIterable):
            try:
                async for image in images:
                    yield await asyncio.to_thread(function, image)
            finally:
                if isinstance(images, AsyncGenerator):
                    await images.aclose()
        else:
            results, end = map(function, images), object()
            while (result := await asyncio.to_thread(next, results, end)) is not end:
                yield cast("_T", result)

    def start(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run a coroutine in a task of its own."""
        return asyncio.create_task(coroutine)

    async def stop(self, task: Any) -> None:
        """Cancel what `start` returned, and wait until it has ended."""
        task.cancel()
        await asyncio.wait({task})

    def running_loop(self) -> asyncio.AbstractEventLoop:
        """Return the event loop of the running task."""
        return asyncio.get_running_loop()

    class Event(asyncio.Event):
        """What one task waits for."""

        async def reached(self, seconds: float | None = None) -> bool:
            """Wait until it is set, for at most `seconds`; return whether it is set."""
            with suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await self.wait()
            return self.is_set()

    class Condition:
        """The means to wait for a change. Tasks need no lock: they are interrupted only where they await."""

        def __init__(self) -> None:
            self._event = AsyncBackend.Event()

        def __enter__(self) -> None:
            pass

        def __exit__(self, *_: object) -> None:
            pass

        def notify_all(self) -> None:
            """Wake all waiting tasks."""
            self._event.set()
            self._event = AsyncBackend.Event()

        async def changed(self, seconds: float | None = None) -> None:
            """Wait for `notify_all`, for at most `seconds`."""
            await self._event.reached(seconds)


Backend: TypeAlias = AsyncBackend | BlockingBackend
Event: TypeAlias = AsyncBackend.Event | BlockingBackend.Event


# Where grpc.aio differs from synchronous gRPC.


def _parsed(response: Any) -> Any:
    """Return the response. It is None if its bytes are no message; synchronous gRPC raises an error then."""
    if response is None:
        raise _status(grpc.StatusCode.INTERNAL, "not a message of this service. Has the server another version?")
    return response


def _raise_if_closed() -> None:
    """Raise CANCELLED, as synchronous gRPC does, for a CancelledError although nobody cancelled the task: the channel
    was closed.
    """
    task = asyncio.current_task()
    if task is not None and not task.cancelling():
        raise _closed() from None


def _closed() -> grpc.aio.AioRpcError:
    """Return CANCELLED, as for a call in flight, instead of gRPC's ValueError or CancelledError."""
    return _status(grpc.StatusCode.CANCELLED, "the channel was closed")


def _status(code: grpc.StatusCode, details: str | None, trailing: Any = ()) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(*trailing), details)


_CORE_ERROR = "Internal error from Core"  # gRPC's text for a request that it could not send
_STATUS_TIMEOUT = 1.0  # seconds for the status that follows; it has arrived, or is on its way within this process


class StreamEnd:
    """How a stream ended.

    If a server ends a stream while a request is being sent, grpc.aio replaces the server's status by its own INTERNAL
    (grpc/grpc#36066), before or after the former arrives. Both run the done callbacks, so a callback records the
    server's status.
    """

    def __init__(self, stream: Any) -> None:
        self._status: asyncio.Future[grpc.aio.AioRpcError] = asyncio.get_running_loop().create_future()
        stream.add_done_callback(self._note)

    def _note(self, stream: Any) -> None:
        details = run(stream.details())  # none of these suspends: the stream has ended
        if not self._status.done() and details != _CORE_ERROR:
            self._status.set_result(_status(run(stream.code()), details, run(stream.trailing_metadata()) or ()))

    async def status(self, failed: grpc.RpcError) -> grpc.RpcError | None:
        """Return the server's status, None if it is OK. failed: what grpc.aio raised."""
        if failed.details() != _CORE_ERROR:
            return failed
        try:
            async with asyncio.timeout(_STATUS_TIMEOUT):
                status = await self._status
        except TimeoutError:
            return failed
        return None if status.code() == grpc.StatusCode.OK else status
