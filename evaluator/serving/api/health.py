"""grpc.health.v1, so that a server can be drained: told to all watchers at once, and ended for them in the end.

The servicer of grpcio-health-checking (1.81) forgets its other watchers when one of them leaves, and holds its lock
while it writes to one, so that a client that does not read would keep a server from saying that it stops.
"""

import asyncio
from collections.abc import AsyncIterator, Iterable
from typing import Any, TypeAlias

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
Response = health_pb2.HealthCheckResponse


class Health(health_pb2_grpc.HealthServicer):  # type: ignore[misc]  # generated without types
    """The health of a server: NOT_SERVING until it is told otherwise. services: whose health is that of the server."""

    def __init__(self, services: Iterable[str]) -> None:
        self._services = frozenset(("", *services))
        self._serving = False
        self._closed = False
        self._changed = asyncio.Event()

    @property
    def serving(self) -> bool:
        """Return whether the server takes new work."""
        return self._serving

    def set_serving(self, *, serving: bool) -> None:
        """Say how the server is, at once and to everybody who watches."""
        self._serving = serving
        self._wake()

    def close(self) -> None:
        """End every watch, for ever: a server that stops waits for its calls, and a watch never ends of itself."""
        self._closed = True
        self._wake()

    def _wake(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def Check(self, request: Any, context: Context) -> Any:  # noqa: N802
        """Answer once; NOT_FOUND for a service that is not there, as the protocol has it."""
        if request.service not in self._services:
            await context.abort(grpc.StatusCode.NOT_FOUND, "no such service")
        return Response(status=self._status(request.service))

    async def Watch(self, request: Any, context: Context) -> AsyncIterator[Any]:  # noqa: ARG002, N802
        """Answer now and at each change."""
        last_sent = None
        while True:
            changed, status = self._changed, self._status(request.service)
            if status != last_sent:
                last_sent = status
                yield Response(status=status)  # a client that does not read is waited for here, and holds up nobody
            elif self._closed:
                return
            else:
                await changed.wait()

    def _status(self, service: str) -> Any:
        if service not in self._services:
            return Response.SERVICE_UNKNOWN
        return Response.SERVING if self._serving else Response.NOT_SERVING
