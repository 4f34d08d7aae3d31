"""The server: our services, grpc.health.v1 and reflection over gRPC on one port, and over HTTP on another.

The servicers only translate messages: no arithmetic, no numpy, no error handling (an interceptor does that), and
nothing slow on the event loop's thread.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

import grpc
import grpc.aio
from grpc_health.v1 import health, health_pb2_grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2
from grpc_reflection.v1alpha._async import ReflectionServicer

from ..errors import EnvironmentFault, NotReady
from ..imaging.limits import DecodeLimits
from ..pb.prelunet.v1 import prelunet_pb2_grpc as pb_grpc
from .access import AccessControl
from .api import inference
from .api.arriving import ArrivingBytes
from .api.calls import OUR_METHODS, PROBES, CallsInFlight
from .api.health import Health
from .api.interceptor import CallInterceptor
from .api.prelunet import SERVICE, PreluNetServicer
from .certificates import Certificates
from .http.door import HttpDoor
from .http.listener import ConnectionLimits, Listener
from .http.routes import Routes
from .models import Models
from .network import channel_options, connections_to, explain_bind_error, host_port, unix_host
from .observability.call_context import Context
from .observability.metrics import Metrics
from .options import HttpOptions, ServerLimits
from .repository import Repository

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
        limits: ServerLimits = ServerLimits(),
        calls: CallsInFlight | None = None,
        *,
        certificates: Certificates | None = None,
        access: AccessControl | None = None,
        http: HttpOptions = HttpOptions(),
        unix_socket: Path | None = None,
    ) -> None:
        """Bind the ports, so that a port in use is reported before models load for minutes.

        limits: on clients; calls: with metrics, log and traces; certificates: None without TLS; access: None without
        tokens; unix_socket: for gRPC, instead of host and port. Raises EnvironmentFault if a port is unavailable.
        """
        self._calls = calls or CallsInFlight(limits.max_calls)
        self._metrics = self._calls.metrics
        self._metrics.limits.labels("max-calls").set(limits.max_calls)
        self._metrics.limits.labels("max-connections").set(limits.max_connections)
        self._metrics.ready.set_function(lambda: self.serving)
        self._max_evaluation_images = limits.max_evaluation_images
        self._health = Health(SERVICES)
        self._services = _Services(self._metrics)
        self._opened = False
        arriving = ArrivingBytes(limits, self._metrics)
        self._server = grpc.aio.server(
            handlers=[self._services],
            interceptors=[CallInterceptor(self._calls, limits, arriving, access)],
            options=channel_options(limits),
        )
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
            self._metrics.grpc_connections.set_function(lambda: connections_to(self._port))
        self._routes, self._http = None, None
        if http.enabled:
            names = (host, *http.host_names)
            door = HttpDoor(self._calls, limits, arriving, access, names, lambda: self.serving)
            self._routes = Routes(door, http.reports)
            self._http = Listener(
                door,
                host if http.unix_socket is None else unix_host(http.unix_socket, "--http-unix-socket"),
                http.port or 0,
                ConnectionLimits(
                    limits.max_connections, limits.max_metadata, limits.handshake_timeout, http.keep_alive
                ),
                option="--http-port",
                tls=None if certificates is None or http.unix_socket is not None else certificates.context,
            )
            self._metrics.http_connections.set_function(partial(getattr, self._http, "connections"))

    @property
    def address(self) -> str:
        """Return host:port or unix:PATH, as clients use it."""
        return host_port(self._host, self._port)

    @property
    def http_address(self) -> str:
        """Return host:port or unix:PATH of HTTP, "" without it."""
        return "" if self._http is None else self._http.address

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
        inference.add_to_server(cast(grpc.aio.Server, self._services), Models((), DecodeLimits()), lambda: False)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        names = (*SERVICES, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, self._server)
        self._server.add_generic_rpc_handlers((_reflection_v1(names),))
        self._opened = True
        await self._server.start()

    async def start(self, models: Models, repository: Repository | None = None) -> None:
        """Answer calls; health reports SERVING for the whole server, each of our services and each model.

        repository: None if the models are fixed.
        """
        if not self._opened:
            await self.open()
        self._services.clear()
        self._health.has_model, models.on_change = models.has, self._health.wake
        servicer = PreluNetServicer(models, self._max_evaluation_images, repository)
        pb_grpc.add_PreluNetServiceServicer_to_server(servicer, self._services)
        inference.add_to_server(cast(grpc.aio.Server, self._services), models, lambda: self.serving, repository)
        self._services.refusal_message = ""
        self._health.set_serving(serving=True)
        if self._routes is not None and self._http is not None:
            self._routes.serve(models, repository)
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
        self._services.refusal_message = "this server is stopping; try another, or again later"
        await asyncio.wait({cutoff}, timeout=REFUSAL_PERIOD)
        if self._services.refused_count and not cutoff.done():
            self._services.refusals_released.clear()
            await asyncio.wait({cutoff}, timeout=REFUSAL_PERIOD)

    async def stop(self, grace: float, cutoff: Awaitable[object] | None = None) -> int:
        """Close the ports and let calls in flight finish within `grace` seconds; return how many of ours did not.

        cutoff: when it is done, calls in flight are cut off at once.
        """
        self.set_not_serving()
        self._health.close()
        closing = [self._server.stop(_FOREVER)] + ([self._http.close()] if self._http is not None else [])
        stopping = asyncio.ensure_future(asyncio.gather(*closing))
        if not self._services.refusals_released.is_set():
            await asyncio.sleep(_POLL_INTERVAL)  # the port closes, and connected clients are notified
            self._services.refusals_released.set()
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


def _reflection_v1(services: Sequence[str]) -> grpc.GenericRpcHandler:
    """Return reflection v1, which grpcio-reflection (1.81) lacks; its messages are those of v1alpha."""
    method = grpc.stream_stream_rpc_method_handler(
        ReflectionServicer(services).ServerReflectionInfo,
        reflection_pb2.ServerReflectionRequest.FromString,
        reflection_pb2.ServerReflectionResponse.SerializeToString,
    )
    return grpc.method_handlers_generic_handler("grpc.reflection.v1.ServerReflection", {"ServerReflectionInfo": method})


class _Services(grpc.GenericRpcHandler):
    """Our services, from the end of loading until shutdown; calls before and after are refused, except probes.

    refusal_message: the error of refused calls, empty while calls are answered; refusals_released: refused calls wait
    until it is set; refused_count: number of calls refused during shutdown.
    """

    def __init__(self, metrics: Metrics) -> None:
        self.refusal_message = "the server is loading its models; try again later"
        self.refused_count = 0
        self.refusals_released = asyncio.Event()
        self.refusals_released.set()
        self._ready = False
        self._refusals = metrics.refusals
        self._handlers: list[grpc.GenericRpcHandler] = []

    def clear(self) -> None:
        self._handlers.clear()
        self._ready = True

    def add_generic_rpc_handlers(self, handlers: Sequence[grpc.GenericRpcHandler]) -> None:
        """Add a service; called by gRPC's generated code in place of the server's method."""
        self._handlers.extend(handlers)

    def add_registered_method_handlers(self, _service: str, _handlers: Any) -> None:
        """Do nothing, like grpc.aio's server."""

    def refusal(self, method: str) -> NotReady | None:
        """Return the error of a call, if calls of its method are refused now."""
        if not self.refusal_message or not method.startswith(OUR_METHODS) or method in PROBES:
            return None
        if self._ready:
            self.refused_count += 1
            self._refusals.labels("", "stopping").inc()
        return NotReady(self.refusal_message)

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> "grpc.RpcMethodHandler[Any, Any] | None":
        """Return the handler of a method, None if it is not ours."""
        if (refusal := self.refusal(handler_call_details.method)) is not None:

            async def refuse(_requests: AsyncIterator[Any], _context: Context) -> AsyncIterator[Any]:
                await self.refusals_released.wait()
                raise refusal
                yield  # type: ignore[unreachable]  # makes this a stream handler, which can answer any kind of call

            return grpc.stream_stream_rpc_method_handler(refuse)
        candidates = (handler.service(handler_call_details) for handler in self._handlers)
        return next((candidate for candidate in candidates if candidate is not None), None)
