"""A server in a thread of the test process, on a free port, for tests of the server and the client."""

import asyncio
import io
import math
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc.aio
import numpy as np
import pytest
from google.protobuf.message import Message
from grpc_health.v1 import health, health_pb2_grpc
from PIL import Image

from prelunet.evaluator.engine.session import Outputs
from prelunet.evaluator.errors import DeviceLost
from prelunet.evaluator.imaging.limits import DecodeLimits
from prelunet.evaluator.pb.prelunet.v1 import prelunet_pb2_grpc as pb_grpc
from prelunet.evaluator.serving.access import AccessControl
from prelunet.evaluator.serving.api.front import Front
from prelunet.evaluator.serving.calls import CallsInFlight
from prelunet.evaluator.serving.models import Models
from prelunet.evaluator.serving.observability.metrics import Metrics
from prelunet.evaluator.serving.options import HttpOptions, ModelFile, QueueOptions, ServerLimits
from prelunet.evaluator.serving.server import Server
from prelunet.evaluator.serving.watched_files import Certificates
from tests.helpers.fakes import FakeSession


@dataclass(frozen=True)
class RunningServer:
    """A running server.

    address: host:port; http: that of HTTP, "" without; models: the served models; loop_thread: id of its event loop's
    thread.
    """

    address: str
    models: Models
    loop_thread: int
    http: str = ""

    def metric(self, name: str, **labels: str) -> float:
        """Return the value of a metric as in a scrape; 0 if it does not exist yet."""
        return self.models.metrics.registry.get_sample_value(name, labels) or 0

    def calls_logged(self, caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
        """Return the fields of the log lines of its ended calls, and of no other server's: those may appear late."""
        records = [record for record in caplog.records if record.thread == self.loop_thread]
        return [record.fields for record in records if record.getMessage() == "call ended"]  # type: ignore[attr-defined]


@contextmanager
def running_server(
    limits: DecodeLimits | None = None,
    queue: QueueOptions = QueueOptions(),
    server_limits: ServerLimits | None = None,
    metrics: Metrics | None = None,
    on_lost: Callable[[DeviceLost], None] | None = None,
    *,
    certificates: Certificates | None = None,
    access: AccessControl | None = None,
    http: HttpOptions = HttpOptions(),
    unix_socket: Path | None = None,
    tracing: Any = None,
    max_memory: int | None = None,
    **sessions: Any,
) -> Iterator[RunningServer]:
    """Serve sessions (real or fake) under their keywords; the files are called NAME.onnx in a folder /secret.

    limits: on images; server_limits: all other limits; metrics: of the server, for tests to read; tracing: a `Tracing`;
    max_memory: of this process, above which unfinished messages are refused.
    """
    metrics = metrics or Metrics()
    calls = CallsInFlight(server_limits or ServerLimits(), metrics, tracing=tracing, access=access)
    loaded = [(ModelFile(name, Path(f"/secret/{name}.onnx")), session) for name, session in sessions.items()]
    lost = {} if on_lost is None else {"on_lost": on_lost}

    @asynccontextmanager
    async def served() -> AsyncIterator[tuple[Server, Models]]:
        server = Server("127.0.0.1", 0, calls, certificates=certificates, http=http, unix_socket=unix_socket)
        models = Models(loaded, limits or DecodeLimits(), queue, metrics, **lost)
        await server.start(models)
        calls.arriving.max_memory = max_memory or math.inf
        yield server, models
        await server.stop(grace=5)
        await asyncio.to_thread(models.close)

    with run_in_thread(served) as ((server, models), thread):
        http_address = server.http_url.rpartition("//")[2].rstrip("/")  # or unix:PATH
        yield RunningServer(server.address, models, thread, http_address)


@contextmanager
def running_servicer(servicer: pb_grpc.PreluNetServiceServicer, calls: CallsInFlight) -> Iterator[str]:
    """Serve a test's servicer behind what every call passes; yields the address."""

    @asynccontextmanager
    async def served() -> AsyncIterator[str]:
        front = Front(calls)
        server = grpc.aio.server(handlers=[front], options=[("grpc.so_reuseport", 0)])
        pb_grpc.add_PreluNetServiceServicer_to_server(servicer, front)
        health_pb2_grpc.add_HealthServicer_to_server(health.aio.HealthServicer(), front)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        yield f"127.0.0.1:{port}"
        await server.stop(5)

    with run_in_thread(served) as (address, _):
        yield address


@contextmanager
def run_in_thread(served: Callable[[], AbstractAsyncContextManager[Any]]) -> Iterator[tuple[Any, int]]:
    """Run an async context manager on its own event loop in a thread; yields its value and the thread's id."""
    ready, state = threading.Event(), {}

    async def live() -> None:
        async with served() as value:
            state.update(value=value, stop=asyncio.Event(), loop=asyncio.get_running_loop())
            ready.set()
            await state["stop"].wait()

    thread = threading.Thread(target=lambda: asyncio.run(live()))
    thread.start()
    assert ready.wait(30), "the server did not start"
    try:
        assert thread.ident is not None
        yield state["value"], thread.ident
    finally:
        state["loop"].call_soon_threadsafe(state["stop"].set)
        thread.join()


class GatedSession(FakeSession):
    """A fake whose runs wait until the gate is open; `entered` is set when one waits."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.gate = threading.Event()
        self.entered = threading.Event()

    def compute(self, staged: Any) -> Outputs:
        self.entered.set()
        assert self.gate.wait(30), "nobody opened the gate"
        return super().compute(staged)


class Referable:
    """A message that allows weak references; protobuf's do not."""

    def __init__(self, message: Message) -> None:
        self._message = message

    def __getattr__(self, name: str) -> Any:
        return getattr(self._message, name)


def eventually(condition: Callable[[], bool]) -> None:
    """Wait until another thread makes a condition true; the test fails after 30 s."""
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.005)


def png(height: int, width: int, seed: int = 0, kind: str = "PNG") -> bytes:
    """Return an encoded image of random pixels."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, kind)
    return buffer.getvalue()


def webp(height: int, width: int) -> bytes:
    """Return the same in a format that is decoded in another process."""
    return png(height, width, kind="WEBP")
