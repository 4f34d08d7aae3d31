"""Errors become a status in one place, and calls in flight are counted, so that stopping can wait for them."""

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias

import grpc
import grpc.aio

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
        codec = (handler.request_deserializer, handler.response_serializer)
        if handler.request_streaming:
            return grpc.stream_unary_rpc_method_handler(self._wrapped(handler.stream_unary, method), *codec)
        return grpc.unary_unary_rpc_method_handler(self._wrapped(handler.unary_unary, method), *codec)

    def _wrapped(self, behaviour: Any, method: str) -> Callable[..., Awaitable[Any]]:
        async def call(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
            self._calls.begin(context)
            try:
                return await behaviour(request, context)
            except grpc.aio.AbortError:  # a status is set already
                raise
            except Exception as error:
                incident = secrets.token_hex(6)
                if not may_be_told(error):
                    log.error("%s failed, id %s", method, incident, exc_info=error)
                status = status_of(error, incident)
                await context.abort(status.code, status.details, status.trailing_metadata)

        return call
