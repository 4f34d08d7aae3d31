"""grpc.health.v1 for draining: notify all watchers of a change at once, and end their streams at shutdown.

The servicer of grpcio-health-checking (1.81) drops its other watchers when one of them leaves. It also holds its lock
while it writes to a watcher, so a client that does not read would keep the server from announcing its shutdown.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from ..observability.call_context import Context

Response = health_pb2.HealthCheckResponse
# A name that is SERVING as long as the process answers, also while it loads models and while it stops.
LIVENESS = "liveness"


class Health(health_pb2_grpc.HealthServicer):  # type: ignore[misc]  # generated without types
    """The health of a server, initially NOT_SERVING.

    services: names that share the server's health; has_model: whether there is a model NAME or NAME/VERSION, whose
    health is the server's, too; serving: whether the server accepts new work.
    """

    def __init__(self, services: Iterable[str]) -> None:
        self._services = frozenset(("", *services))
        self.has_model: Callable[[str], bool] = lambda _: False
        self.serving = False
        self._closed = False
        self._changed = asyncio.Event()

    def set_serving(self, *, serving: bool) -> None:
        """Set the health of the server and notify all watchers at once."""
        self.serving = serving
        self.wake()

    def close(self) -> None:
        """End all watches, now and later: a stopping server waits for its calls, and a watch never ends by itself."""
        self._closed = True
        self.wake()

    def wake(self) -> None:
        """Notify all watchers, because a model was added or removed."""
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def Check(self, request: Any, context: Context) -> Any:
        """Return the current health; NOT_FOUND for an unknown service, as the protocol requires."""
        if (status := self._status(request.service)) == Response.SERVICE_UNKNOWN:
            await context.abort(grpc.StatusCode.NOT_FOUND, "no such service")
        return Response(status=status)

    async def Watch(self, request: Any, context: Context) -> AsyncIterator[Any]:
        """Send the current health, and again at each change."""
        last_sent = None
        while True:
            changed, status = self._changed, self._status(request.service)
            if status != last_sent:
                last_sent = status
                yield Response(status=status)  # blocks while the client does not read, but delays no other watcher
            elif self._closed:
                return
            else:
                await changed.wait()

    def _status(self, service: str) -> Any:
        if service == LIVENESS:
            return Response.SERVING
        if service not in self._services and not self.has_model(service):
            return Response.SERVICE_UNKNOWN
        return Response.SERVING if self.serving else Response.NOT_SERVING
