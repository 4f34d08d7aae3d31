"""How a stream of grpc.aio ended."""

import asyncio
from collections.abc import Coroutine
from typing import Any

import grpc
import grpc.aio

_CORE_ERROR = "Internal error from Core"  # gRPC's text for a request that it could not send
STATUS_TIMEOUT = 1.0  # seconds for the status that follows; it has arrived, or is on its way within this process


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
        details = _result(stream.details())
        if not self._status.done() and details != _CORE_ERROR:
            trailing = grpc.aio.Metadata(*(_result(stream.trailing_metadata()) or ()))
            status = grpc.aio.AioRpcError(_result(stream.code()), grpc.aio.Metadata(), trailing, details)
            self._status.set_result(status)

    async def status(self, failed: grpc.RpcError) -> grpc.RpcError | None:
        """Return the server's status, None if it is OK. failed: what grpc.aio raised."""
        if failed.details() != _CORE_ERROR:
            return failed
        try:
            async with asyncio.timeout(STATUS_TIMEOUT):
                status = await self._status
        except TimeoutError:
            return failed
        return None if status.code() == grpc.StatusCode.OK else status


def _result(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Return the result of a coroutine that does not suspend, as those of a call that has ended."""
    try:
        coroutine.send(None)
    except StopIteration as done:
        return done.value
    raise AssertionError("the coroutine was suspended")
