"""The gRPC server: our service, grpc.health.v1 and reflection on one port.

The servicer only translates: no arithmetic, no numpy, no error handling (one interceptor does that), and nothing long
on the event loop's own thread.
"""

import asyncio
import signal
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import grpc
import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from evaluator.engine.session import Placement
from evaluator.errors import EnvironmentFault
from evaluator.imaging.decode import DecodeLimits
from evaluator.pb.prelunet.v1 import prelunet_pb2 as pb
from evaluator.pb.prelunet.v1 import prelunet_pb2_grpc as pb_grpc
from evaluator.serving import messages
from evaluator.serving.classifier import MAX_WAITING
from evaluator.serving.evaluation import LabelledImage, evaluate
from evaluator.serving.interceptor import Calls, ErrorsToStatus
from evaluator.serving.models import ModelFile, Models, load_models
from evaluator.serving.status import MAX_MESSAGE

SERVICE = pb.DESCRIPTOR.services_by_name["PreluNetService"].full_name

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"


@dataclass(frozen=True)
class ServeOptions:
    """How to serve. port: 0 takes a free one; grace: seconds."""

    models: tuple[ModelFile, ...]
    host: str = "127.0.0.1"
    port: int = 50051
    placement: Placement = field(default_factory=Placement)
    grace: float = 30.0  # what calls in flight have after a signal
    limits: DecodeLimits = field(default_factory=DecodeLimits)
    max_waiting: int = MAX_WAITING  # images of one model


class PreluNetServicer(pb_grpc.PreluNetServiceServicer):
    """Translates calls of proto/prelunet/v1."""

    def __init__(self, models: Models) -> None:
        self._models = models

    async def Classify(self, request: pb.ClassifyRequest, context: Context) -> pb.ClassifyResponse:  # noqa: ARG002, N802
        """Classify one image."""
        classifier = self._models.get(request.model)
        protocol = messages.protocol_asked(request, classifier.session.contract)
        top_k = messages.top_k_asked(request, classifier.session.contract)
        with classifier.admitted(len(request.image)):
            answer = await classifier.answer(request.image, protocol, top_k, heatmap=request.heatmap)
        return await asyncio.to_thread(messages.classify_response, answer)  # 20 ms where 1000 classes are told

    async def Evaluate(  # noqa: N802
        self,
        request_iterator: AsyncIterator[pb.EvaluateRequest],
        context: Context,  # noqa: ARG002
    ) -> pb.EvaluateResponse:
        """Evaluate a streamed dataset."""
        start = messages.start_of(await anext(request_iterator, None))
        classifier = self._models.get(start.model)
        contract = classifier.session.contract
        protocol = messages.protocol_asked(start, contract)

        async def images() -> AsyncIterator[LabelledImage]:
            async for request in request_iterator:
                yield messages.image_of(request, contract)

        report = await evaluate(classifier, protocol, start.dataset, images())
        return pb.EvaluateResponse(report=await asyncio.to_thread(messages.report_message, report))

    async def ListModels(self, request: pb.ListModelsRequest, context: Context) -> pb.ListModelsResponse:  # noqa: ARG002, N802
        """Name the models."""
        return pb.ListModelsResponse(models=map(messages.model_identity, self._models.all()))

    async def GetModel(self, request: pb.GetModelRequest, context: Context) -> pb.GetModelResponse:  # noqa: ARG002, N802
        """Describe one model."""
        return pb.GetModelResponse(model=messages.model_message(self._models.get(request.name)))


class Server:
    """A server on its port; made and used inside one running event loop."""

    def __init__(self, host: str, port: int, limits: DecodeLimits | None = None) -> None:
        """Take the port, so that a port in use is told before models are loaded for minutes.

        limits: of images; a message may hold twice as much, so that one slightly too large is refused in our words.

        Raises EnvironmentFault when it cannot be had.
        """
        self._calls = Calls()
        self._health = health.aio.HealthServicer()
        self._models: Models | None = None
        self._server = grpc.aio.server(
            interceptors=[ErrorsToStatus(self._calls)],
            options=[
                ("grpc.so_reuseport", 0),  # else a second server started by mistake would share the calls silently
                ("grpc.max_receive_message_length", max(MAX_MESSAGE, 2 * (limits or DecodeLimits()).max_bytes)),
            ],
        )
        self._host = host
        self._port = self._bind(port)

    @property
    def address(self) -> str:
        """Return host:port as clients write it."""
        return _join(self._host, self._port)

    def _bind(self, port: int) -> int:
        wanted = _join(self._host, port)
        try:
            bound = self._server.add_insecure_port(wanted)
        except RuntimeError as error:  # all that gRPC says; the reason goes to its own log
            raise EnvironmentFault(
                f"cannot listen on {wanted}: the port is in use, or {self._host} is no address of this machine. "
                "Choose another --port (0 takes a free one) or --host, or stop the other program"
            ) from error
        return bound

    async def start(self, models: Models) -> None:
        """Answer calls; health says SERVING for the whole server and for our service."""
        self._models = models
        pb_grpc.add_PreluNetServiceServicer_to_server(PreluNetServicer(models), self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        reflection.enable_server_reflection((SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME), self._server)
        await self._health.set(SERVICE, health_pb2.HealthCheckResponse.SERVING)
        await self._server.start()

    async def stop(self, grace: float) -> int:
        """Refuse new calls, let those in flight finish within `grace` seconds; returns how many did not."""
        await self._health.enter_graceful_shutdown()
        stopping = asyncio.create_task(self._server.stop(grace))
        idle = asyncio.create_task(self._calls.wait_for_none())
        await asyncio.wait({stopping, idle}, timeout=grace, return_when=asyncio.FIRST_COMPLETED)
        unfinished = self._calls.count
        idle.cancel()
        if not stopping.done():
            await self._server.stop(None)  # streams that never end, such as health's Watch, are not waited for
        await stopping
        if self._models is not None:
            await asyncio.to_thread(self._models.close)
        return unfinished


def _join(host: str, port: int) -> str:
    """Return host:port; an IPv6 address needs brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


async def serve(options: ServeOptions, announce: Callable[[str], None]) -> int:
    """Serve until SIGTERM or SIGINT, then finish what is in flight; returns how many calls the grace period cut off.

    announce: told once, when every model is loaded and calls are answered, what is served where.
    Raises EnvironmentFault when the port or the device cannot be had, ContractError for a file that is no model.
    """
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopped.set)
    server = Server(options.host, options.port, options.limits)
    loading = asyncio.to_thread(load_models, options.models, options.placement)
    models = Models(await loading, options.limits, options.max_waiting)
    await server.start(models)
    announce(_start_line(server.address, models))
    await stopped.wait()  # a signal that came while models were loading counts too
    return await server.stop(options.grace)


def _start_line(address: str, models: Models) -> str:
    """Say where, what, on which provider, in which precision and with which versions."""
    served = models.all()
    names = ", ".join(
        f"{model.name} ({model.session.contract.name}, {len(model.session.contract.classes)} classes, "
        f"sha256 {model.session.model_sha256[:12]}, {model.session.circumstances.precision})"
        for model in served
    )
    return f"serving on {address}: {names} | {served[0].session.circumstances} grpcio {grpc.__version__}"
