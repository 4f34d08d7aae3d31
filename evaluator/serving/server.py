"""The gRPC server: our services, grpc.health.v1 and reflection on one port.

The servicers only translate: no arithmetic, no numpy, no error handling (one interceptor does that), and nothing long
on the event loop's own thread.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Sequence
from typing import Any, TypeAlias, cast

import grpc
import grpc.aio
from grpc_health.v1 import health, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from prelunet.evaluator.errors import EnvironmentFault, NotReady
from prelunet.evaluator.imaging.limits import DecodeLimits
from prelunet.evaluator.pb.prelunet.v1 import prelunet_pb2_grpc as pb_grpc
from prelunet.evaluator.serving.api import inference
from prelunet.evaluator.serving.api.health import Health
from prelunet.evaluator.serving.api.interceptor import OUR_METHODS, PROBES, CallInterceptor, CallsInFlight
from prelunet.evaluator.serving.api.prelunet import SERVICE, PreluNetServicer
from prelunet.evaluator.serving.models import Models
from prelunet.evaluator.serving.network import channel_options, explain_bind_error, host_port
from prelunet.evaluator.serving.observability.metrics import Metrics
from prelunet.evaluator.serving.options import ServerLimits

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"

SERVICES = (SERVICE, inference.SERVICE)  # whose health is told by name
_FOR_EVER = 1e6  # seconds: somebody else looks at the clock
_POLL_INTERVAL = 0.02  # seconds between two looks at the calls in flight
# Seconds for connections to end once no call is left. Clients that are there take as long as a packet; gRPC would wait
# 20 s for one that is gone, and for as long as it likes for one that keeps a stream of reflection open.
CONNECTION_LINGER = 2.0
# Seconds in which calls are refused before the port closes, and as many in which refusals are held back if some came.
# gRPC cancels what its core has accepted and the event loop has not begun, so no call should be on its way then.
REFUSAL_PERIOD = 0.25


class Server:
    """A server on its port; made and used inside one running event loop."""

    def __init__(
        self, host: str, port: int, limits: ServerLimits = ServerLimits(), metrics: Metrics | None = None
    ) -> None:
        """Take the port, so that a port in use is told before models are loaded for minutes.

        limits: of what clients may do; metrics: of the server. Raises EnvironmentFault when the port cannot be had.
        """
        self._metrics = metrics or Metrics()
        self._calls = CallsInFlight(limits.max_calls, self._metrics)
        self._max_evaluation_images = limits.max_evaluation_images
        self._health = Health(SERVICES)
        self._services = _Services(self._metrics)
        self._opened = False
        self._server = grpc.aio.server(
            handlers=[self._services],
            interceptors=[CallInterceptor(self._calls, limits.message_timeout, limits.stream_idle_timeout)],
            options=channel_options(limits),
        )
        self._host = host
        self._port = self._bind(port)

    @property
    def address(self) -> str:
        """Return host:port as clients write it."""
        return host_port(self._host, self._port)

    @property
    def serving(self) -> bool:
        """Return whether new work is taken, as health says."""
        return self._health.serving

    @property
    def calls(self) -> int:
        """Return how many calls are in flight."""
        return self._calls.count

    def _bind(self, port: int) -> int:
        wanted = host_port(self._host, port)
        try:
            bound = self._server.add_insecure_port(wanted)
        except RuntimeError as error:  # all that gRPC says; the reason goes to its own log
            raise EnvironmentFault(f"cannot listen on {wanted}: {explain_bind_error(self._host, port)}") from error
        return bound

    async def open(self) -> None:
        """Answer on the port while models are loaded: health says NOT_SERVING, calls of ours get UNAVAILABLE.

        Who asks whether the server lives is told that it does.
        """
        inference.add_to_server(cast(grpc.aio.Server, self._services), Models((), DecodeLimits()), lambda: False)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        reflection.enable_server_reflection((*SERVICES, health.SERVICE_NAME, reflection.SERVICE_NAME), self._server)
        self._opened = True
        await self._server.start()

    async def start(self, models: Models) -> None:
        """Answer calls; health says SERVING for the whole server and for each of our services."""
        if not self._opened:
            await self.open()
        self._services.clear()
        servicer = PreluNetServicer(models, self._max_evaluation_images)
        pb_grpc.add_PreluNetServiceServicer_to_server(servicer, self._services)
        inference.add_to_server(cast(grpc.aio.Server, self._services), models, lambda: self.serving)
        self._services.refusal_message = ""
        self._health.set_serving(serving=True)

    def set_not_serving(self) -> None:
        """Let health say NOT_SERVING; calls still work."""
        self._health.set_serving(serving=False)

    async def refuse(self, cutoff: "asyncio.Future[Any]") -> None:
        """Refuse new calls with UNAVAILABLE from now on; those that have begun go on, probes and health are answered.

        Returns after a moment, or when `cutoff` is done. If calls came even so, their callers try again without a
        pause: those of a second moment are told when the port is closed, so that they have nothing on its way to it.
        """
        self.set_not_serving()
        self._services.refusal_message = "this server is stopping; try another, or again later"
        await asyncio.wait({cutoff}, timeout=REFUSAL_PERIOD)
        if self._services.refused_count and not cutoff.done():
            self._services.refusals_released.clear()
            await asyncio.wait({cutoff}, timeout=REFUSAL_PERIOD)

    async def stop(self, grace: float, cutoff: Awaitable[object] | None = None) -> int:
        """Close the port, let calls in flight finish within `grace` seconds; returns how many of ours did not.

        hurry: when it is done they are cut off at once.
        """
        self.set_not_serving()
        self._health.close()
        stopping = asyncio.ensure_future(self._server.stop(_FOR_EVER))
        if not self._services.refusals_released.is_set():
            await asyncio.sleep(_POLL_INTERVAL)  # the port closes, and who is connected is told
            self._services.refusals_released.set()
            await asyncio.sleep(_POLL_INTERVAL)  # they are told
        idle = asyncio.ensure_future(self._idle())
        waited: set[asyncio.Future[Any]] = {stopping, idle}
        if cutoff is not None:
            waited.add(asyncio.ensure_future(cutoff))
        await asyncio.wait(waited, timeout=grace, return_when=asyncio.FIRST_COMPLETED)
        idle.cancel()
        unfinished = 0 if stopping.done() else self.calls
        if not stopping.done():
            await self._server.stop(None)
        await stopping
        return unfinished

    async def _idle(self) -> None:
        """Return when no call of ours is in flight, and clients have had time to read the last answers."""
        while self.calls:
            await asyncio.sleep(_POLL_INTERVAL)
        await asyncio.sleep(CONNECTION_LINGER)


class _Services(grpc.GenericRpcHandler):
    """Our services: not before models are loaded, and no more once the server stops.

    refusing: what calls are told instead, empty while they are answered; told: until it is set they wait for that;
    refused: how many came while the server stopped. Probes are always answered.
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
        """Forget what answers while models are loaded."""
        self._handlers.clear()
        self._ready = True

    def add_generic_rpc_handlers(self, handlers: Sequence[grpc.GenericRpcHandler]) -> None:
        """Take a service, as the server itself would; gRPC's generated code calls this."""
        self._handlers.extend(handlers)

    def add_registered_method_handlers(self, _service: str, _handlers: Any) -> None:
        """Do nothing, as grpc.aio's own server."""

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> "grpc.RpcMethodHandler[Any, Any] | None":
        """Return what answers a method, None for one that is not ours."""
        method = handler_call_details.method
        if self.refusal_message and method.startswith(OUR_METHODS) and method not in PROBES:
            if self._ready:
                self.refused_count += 1
                self._refusals.labels("", "stopping").inc()
            return _refusal_handler(self.refusal_message, self.refusals_released)
        found = (handler.service(handler_call_details) for handler in self._handlers)
        return next((method for method in found if method is not None), None)


def _refusal_handler(text: str, refusals_released: asyncio.Event) -> "grpc.RpcMethodHandler[Any, Any]":
    async def refuse(_requests: AsyncIterator[Any], _context: Context) -> AsyncIterator[Any]:
        await refusals_released.wait()
        raise NotReady(text)
        yield  # type: ignore[unreachable]  # it makes this a stream, which can answer any kind of call

    return grpc.stream_stream_rpc_method_handler(refuse)
