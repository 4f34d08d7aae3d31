"""Errors become a status in one place, and calls in flight are counted, so that stopping can wait for them."""

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeAlias

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from evaluator.errors import UsageError
from evaluator.serving.status import may_be_told, status_of

Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any] | None"

log = logging.getLogger(__name__)


class Calls:
    """The calls in flight."""

    def __init__(self) -> None:
        self.count = 0
        self._none = asyncio.Event()
        self._none.set()

    def begin(self, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        """Count a call until gRPC is done with it, which is after its answer has been sent."""
        self.count += 1
        self._none.clear()
        context.add_done_callback(self._end)  # type: ignore[arg-type]  # any function will do; the stubs forgot

    def _end(self, _context: object) -> None:
        self.count -= 1
        if self.count == 0:
            self._none.set()

    async def wait_for_none(self) -> None:
        """Return once no call is in flight."""
        await self._none.wait()


class ErrorsToStatus(grpc.aio.ServerInterceptor):
    """Gives every call that answers once (all of ours; the library's streams pass) a status by the error table."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler:
        """Wrap the method that is called."""
        handler = await continuation(handler_call_details)
        if handler is None or handler.response_streaming:
            return handler
        method = handler_call_details.method
        codec = (_lenient(handler.request_deserializer), handler.response_serializer)
        if handler.request_streaming:
            return grpc.stream_unary_rpc_method_handler(self._wrapped(handler.stream_unary, method), *codec)
        return grpc.unary_unary_rpc_method_handler(self._wrapped(handler.unary_unary, method), *codec)

    def _wrapped(self, behaviour: Any, method: str) -> Callable[..., Awaitable[Any]]:
        async def call(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
            self._calls.begin(context)
            try:
                checked = _decoded(request) if not hasattr(request, "__aiter__") else _all_decoded(request)
                return await behaviour(checked, context)
            except grpc.aio.AbortError:  # a status is set already
                raise
            except Exception as error:
                incident = secrets.token_hex(6)
                if not may_be_told(error):
                    log.error("%s failed, id %s", method, incident, exc_info=error)
                status = status_of(error, incident)
                await context.abort(status.code, status.details, status.trailing_metadata)

        return call


class _Undecodable:
    """Stands for bytes that are no message, so that a handler of ours, not gRPC's UNKNOWN, answers them."""


def _lenient(deserialize: Callable[[bytes], Any] | None) -> Callable[[bytes], Any]:
    """Let a deserializer return `_Undecodable` instead of raising where nobody could give it a status."""

    def lenient(data: bytes) -> Any:
        try:
            return data if deserialize is None else deserialize(data)
        except DecodeError:
            return _Undecodable()

    return lenient


def _decoded(request: Any) -> Any:
    if isinstance(request, _Undecodable):
        raise UsageError("the bytes of the request are no message of this method; use the proto file of this server")
    return request


async def _all_decoded(requests: AsyncIterator[Any]) -> AsyncIterator[Any]:
    async for request in requests:
        yield _decoded(request)
