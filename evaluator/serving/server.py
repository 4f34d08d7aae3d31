"""The server: our services, grpc.health.v1 and reflection over gRPC on one port, and over HTTP on another.

The servicers only translate messages: no arithmetic, no numpy, no error handling (`Front` does that), and
nothing slow on the event loop's thread.
"""

import asyncio
import time
from collections.abc import Awaitable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
from grpc_health.v1 import health, health_pb2_grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2
from grpc_reflection.v1alpha._async import ReflectionServicer

from ..errors import EnvironmentFault
from ..imaging.limits import DecodeLimits
from ..pb.prelunet.v1 import prelunet_pb2_grpc as pb_grpc
from .api import inference
from .api.front import Front
from .api.health import Health
from .api.prelunet import SERVICE, PreluNetServicer
from .calls import CallsInFlight
from .data_plane import DataPlane
from .http.door import HttpDoor
from .http.examples import find_examples
from .http.listener import ConnectionLimits, Listener
from .http.routes import add_routes
from .models import Models
from .network import channel_options, connections_to, explain_bind_error, host_port, keep_room, unix_host
from .options import HttpOptions
from .repository import Repository
from .watched_files import Certificates

SERVICES = (SERVICE, inference.SERVICE)  # health reports each by name
_FOREVER = 1e6  # seconds; `Server.stop` has its own timeout
_POLL_INTERVAL = 0.02  # seconds between checks of the calls in flight
# Seconds for connections to close after the last call. Clients that respond need one round trip. gRPC would wait 20 s
# for a client that has disappeared, and without limit for one with an open reflection stream.
CONNECTION_LINGER = 2.0
# Seconds during which calls are refused before the port closes. If calls come, their refusals are held back for as long
# again. gRPC cancels calls that its core has accepted and the event loop has not started, so none should arrive then.
REFUSAL_PERIOD = 0.25


class Server:
    """A server on its port; created and used inside one running event loop."""

    def __init__(
        self,
        host: str,
        port: int,
        calls: CallsInFlight | None = None,
        *,
        certificates: Certificates | None = None,
        http: HttpOptions = HttpOptions(),
        unix_socket: Path | None = None,
        shared: bool = False,
    ) -> None:
        """Bind the ports, so that a port in use is reported before models load for minutes.

        calls: with the limits on clients, tokens, metrics, log and traces; certificates: None without TLS; unix_socket:
        for gRPC, instead of host and port; shared: the ports, with other processes. Raises EnvironmentFault for a port
        that is unavailable.
        """
        self._calls = calls = calls or CallsInFlight()
        metrics, limits = calls.metrics, calls.limits
        metrics.limits.labels("max-calls").set(limits.max_calls)
        metrics.limits.labels("max-connections").set(limits.max_connections)
        metrics.ready.set_function(lambda: self.serving)
        self._health = Health(SERVICES)
        self._making_room: asyncio.Task[None] | None = None
        self._front = Front(calls)
        self._front.refusal_message = "the server is loading its models; try again later"
        self._server = grpc.aio.server(handlers=[self._front], options=channel_options(limits, shared=shared))
        self._host = host if unix_socket is None else unix_host(unix_socket, "--unix-socket")
        address = host_port(self._host, port)
        try:
            if certificates is None or unix_socket is not None:  # clients could not verify a path as a host name
                self._port = self._server.add_insecure_port(address)
            else:
                self._port = self._server.add_secure_port(address, certificates.credentials())
        except RuntimeError as error:  # without the reason, which gRPC only logs
            raise EnvironmentFault(f"cannot listen on {address}: {explain_bind_error(self._host, port)}") from error
        if unix_socket is None:
            metrics.grpc_connections.set_function(lambda: sum(1 for _ in connections_to(self._port)))
        self._door, self._http, self._reports = None, None, http.reports
        self._examples = {} if http.examples is None else find_examples(http.examples)
        if http.enabled:
            self._door = HttpDoor(calls, (host, *http.host_names), lambda: self.serving)
            self._http = Listener(
                self._door,
                host if http.unix_socket is None else unix_host(http.unix_socket, "--http-unix-socket"),
                http.port or 0,
                ConnectionLimits(
                    limits.max_connections, limits.max_metadata, limits.handshake_timeout, http.keep_alive
                ),
                option="--http-port",
                tls=None if certificates is None or http.unix_socket is not None else certificates.context,
                shared=shared,
            )
            metrics.http_connections.set_function(partial(getattr, self._http, "connections"))

    @property
    def address(self) -> str:
        """Return host:port or unix:PATH, as clients use it."""
        return host_port(self._host, self._port)

    @property
    def http_url(self) -> str:
        """Return the URL of the live page, unix:PATH for a Unix socket, "" without HTTP."""
        return "" if self._http is None else self._http.url

    @property
    def serving(self) -> bool:
        """Return whether new calls are answered, as health reports it."""
        return self._health.serving

    @property
    def calls(self) -> int:
        return self._calls.count

    async def open(self) -> None:
        """Answer on the gRPC port during loading: health reports NOT_SERVING, calls to our services get UNAVAILABLE.

        Liveness probes succeed. An HTTP port refuses connections: many proxies take a server that accepts them for
        ready, and do not send a refused request to another.
        """
        unloaded = DataPlane(Models((), DecodeLimits()), ready=lambda: False)
        inference.add_to_front(self._front, unloaded)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._front)
        names = (*SERVICES, health.SERVICE_NAME, reflection.SERVICE_NAME)
        self._front.add_generic_rpc_handlers(_reflection(names))
        await self._server.start()
        calls, limit = self._calls, self._calls.limits.max_connections
        self._making_room = asyncio.create_task(keep_room(self._port, limit, calls.peers, calls.recent))

    async def start(self, models: Models, repository: Repository | None = None) -> None:
        """Answer calls; health reports SERVING for the whole server, each of our services and each model.

        repository: None if the models are fixed.
        """
        if self._making_room is None:
            await self.open()
        self._health.has_model = models.has
        models.on_change.append(self._health.wake)
        plane = DataPlane(models, repository, lambda: self.serving, self._calls.limits.max_evaluation_images)
        pb_grpc.add_PreluNetServiceServicer_to_server(PreluNetServicer(plane), self._front)
        inference.add_to_front(self._front, plane)
        self._front.refusal_message = ""
        self._health.set_serving(serving=True)
        if self._door is not None and self._http is not None:
            add_routes(self._door, plane, self._reports, self._examples)
            self._http.open()

    def set_not_serving(self) -> None:
        """Make health report NOT_SERVING; calls still work."""
        self._health.set_serving(serving=False)

    async def refuse(self, cutoff: "asyncio.Future[Any]") -> None:
        """Refuse new gRPC calls with UNAVAILABLE from now on; calls in flight, probes, health and HTTP are answered.

        Returns after REFUSAL_PERIOD, or when `cutoff` is done. If calls came, their callers may retry at once; then
        refusals are held back for a second period, until the port is closed, so that no retry is on its way to it.
        """
        self.set_not_serving()
        self._front.stopping = True
        self._front.refusal_message = "this server is stopping; try another, or again later"
        await asyncio.wait({cutoff}, timeout=REFUSAL_PERIOD)
        if self._front.refused_count and not cutoff.done():
            self._front.refusals_released.clear()
            await asyncio.wait({cutoff}, timeout=REFUSAL_PERIOD)

    async def stop(self, grace: float, cutoff: Awaitable[object] | None = None) -> int:
        """Close the ports and let calls in flight finish within `grace` seconds; return how many of ours did not.

        cutoff: when it is done, calls in flight are cut off at once.
        """
        self.set_not_serving()
        self._health.close()
        if self._making_room is not None:
            self._making_room.cancel()
        closing = [self._server.stop(_FOREVER)] + ([self._http.close()] if self._http is not None else [])
        stopping = asyncio.ensure_future(asyncio.gather(*closing))
        if not self._front.refusals_released.is_set():
            await asyncio.sleep(_POLL_INTERVAL)  # the port closes, and connected clients are notified
            self._front.refusals_released.set()
            await asyncio.sleep(_POLL_INTERVAL)  # the refusals are sent
        idle = asyncio.ensure_future(self._idle())
        waited: set[asyncio.Future[Any]] = {stopping, idle}
        if cutoff is not None:
            waited.add(asyncio.ensure_future(cutoff))
        await asyncio.wait(waited, timeout=grace, return_when=asyncio.FIRST_COMPLETED)
        idle.cancel()
        unfinished = 0 if stopping.done() else self.calls
        if not stopping.done():
            if self._http is not None:
                self._http.abort()
            await self._server.stop(None)
        await stopping
        return unfinished

    async def _idle(self) -> None:
        """Return when none of our calls is in flight and clients have had time to read the last answers."""
        last = time.monotonic()
        while time.monotonic() < last + CONNECTION_LINGER:
            await asyncio.sleep(_POLL_INTERVAL)
            if self.calls:  # also a later one, on an HTTP connection accepted before the port closed
                last = time.monotonic()


def _reflection(names: Sequence[str]) -> list[grpc.GenericRpcHandler]:
    """Return reflection v1alpha, and v1, which grpcio-reflection (1.81) lacks; their messages are the same."""
    method = grpc.stream_stream_rpc_method_handler(
        ReflectionServicer(names).ServerReflectionInfo,
        reflection_pb2.ServerReflectionRequest.FromString,
        reflection_pb2.ServerReflectionResponse.SerializeToString,
    )
    services = (reflection.SERVICE_NAME, "grpc.reflection.v1.ServerReflection")
    return [grpc.method_handlers_generic_handler(each, {"ServerReflectionInfo": method}) for each in services]
