"""A server that follows a script, and both clients behind one interface."""

import asyncio
import socket
import threading
import time
from collections import deque
from collections.abc import Iterator
from concurrent import futures
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2_grpc

from prelunet.evaluator.client import AsyncClient
from prelunet.evaluator.errors import Overloaded
from prelunet.evaluator.pb.prelunet.v1 import prelunet_pb2 as pb
from prelunet.evaluator.pb.prelunet.v1 import prelunet_pb2_grpc as pb_grpc
from prelunet.evaluator.rpc.status import status_of

AT_ONCE = Overloaded("too much to do", retry_after=0.001)


@dataclass(frozen=True)
class RecordedAttempt:
    """One attempt as the server saw it. when: on the clock of time.monotonic(); remaining: seconds to the deadline."""

    method: str
    when: float
    remaining: float
    metadata: dict[str, str]


class ScriptedServicer(pb_grpc.PreluNetServiceServicer):
    """Follows its script, one step per call; calls beyond it get a good answer.

    A step is an error of ours, a bare status code, a function of (request, context) or None for a good answer. The
    answer names the image's bytes, so that a test can tell which one it belongs to.
    """

    def __init__(self, *script: Any) -> None:
        self.script = deque(script)
        self.seen: list[RecordedAttempt] = []

    def _step(self, method: str, context: grpc.ServicerContext) -> Any:
        metadata = {str(key): str(value) for key, value in context.invocation_metadata()}
        self.seen.append(RecordedAttempt(method, time.monotonic(), context.time_remaining(), metadata))
        step = self.script.popleft() if self.script else None
        if isinstance(step, Exception):
            context.abort_with_status(status_of(step, "0123456789ab"))
        if isinstance(step, grpc.StatusCode):
            context.abort(step, "bare")
        return step

    def Classify(self, request, context):  # noqa: N802
        step = self._step("Classify", context)
        return answer_to(request) if step is None else step(request, context)

    def Evaluate(self, request_iterator, context):  # noqa: N802
        step = self._step("Evaluate", context)
        yield from step(request_iterator, context)

    def ListModels(self, request, context):  # noqa: N802
        self._step("ListModels", context)
        return pb.ListModelsResponse(models=[pb.ModelIdentity(name=name) for name in ("six", "three")])

    def GetModel(self, request, context):  # noqa: N802
        self._step("GetModel", context)
        return pb.GetModelResponse(model=pb.Model(name=request.name, default_scales=[32, 48]))


def answer_to(request: pb.ClassifyRequest) -> pb.ClassifyResponse:
    """Return an answer that names the image."""
    return pb.ClassifyResponse(
        predictions=[pb.Prediction(class_index=3, wnid="n3", name=request.image.decode(), score=0.5)],
        timings=pb.Timings(queue_seconds=0.25, decode_seconds=0.5, compute_seconds=1, total_seconds=2, batches=3),
    )


def text_of(answer: Any) -> str:
    """Return which image an answer belongs to."""
    return answer.predictions[0].name


def health_servicer() -> health.HealthServicer:
    """Return the health of a server, SERVING at first. Each client that watches it takes a thread of the server.

    The servicer's default, which takes none, sends while it holds its lock, and a connection that is reset at that
    moment stops the whole server: the thread that serves it waits for the same lock.
    """
    return health.HealthServicer(experimental_non_blocking=False)


@contextmanager
def served(
    servicer: pb_grpc.PreluNetServiceServicer, port: int = 0, status: health.HealthServicer | None = None
) -> Iterator[str]:
    """Serve with gRPC's plain server; yields its address. status: its health, of `health_servicer`."""
    pool = futures.ThreadPoolExecutor(16)
    server = grpc.server(pool)
    pb_grpc.add_PreluNetServiceServicer_to_server(servicer, server)
    health_pb2_grpc.add_HealthServicer_to_server(status or health_servicer(), server)
    address = f"127.0.0.1:{server.add_insecure_port(f'127.0.0.1:{port}')}"
    server.start()
    try:
        yield address
    finally:
        server.stop(None).wait()
        pool.shutdown()


def free_port() -> int:
    """Return a port on which nothing listens."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return int(taken.getsockname()[1])


class AsyncInThread:
    """`AsyncClient` with the interface of `Client`: its event loop runs in a thread of its own."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        try:
            self.client = AsyncClient(*arguments, **options)
            self._run(self.client.__aenter__())
        except BaseException:
            self._stop()
            raise

    def _run(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(60)

    def _stop(self) -> None:
        self._run(self._loop.shutdown_asyncgens())
        self._run(self._loop.shutdown_default_executor())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def __enter__(self) -> "AsyncInThread":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
        self._stop()

    def close(self) -> None:
        self._run(self.client.close())

    def classify(self, *arguments: Any, **options: Any) -> Any:
        return self._run(self.client.classify(*arguments, **options))

    def evaluate(self, *arguments: Any, **options: Any) -> Any:
        return self._run(self.client.evaluate(*arguments, **options))

    def models(self, **options: Any) -> Any:
        return self._run(self.client.models(**options))

    def ready(self, **options: Any) -> Any:
        return self._run(self.client.ready(**options))

    def classify_many(self, *arguments: Any, **options: Any) -> Iterator[Any]:
        return self._each(self.client.classify_many(*arguments, **options))

    def _each(self, results: Any) -> Iterator[Any]:
        async def after() -> Any:
            return await anext(results, None)

        try:
            while (result := self._run(after())) is not None:
                yield result
        finally:
            self._run(results.aclose())


class Relay:
    """A way to a server whose connections can be cut."""

    def __init__(self, target: str) -> None:
        self._target = target
        self._sockets: list[socket.socket] = []

    def __enter__(self) -> "Relay":
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listening.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()
        self.cut()

    def _accept(self) -> None:
        host, _, port = self._target.rpartition(":")
        with suppress(OSError):  # closed
            while True:
                near, _ = self._listening.accept()
                far = socket.create_connection((host, int(port)))
                self._sockets += [near, far]
                for pair in ((near, far), (far, near)):
                    threading.Thread(target=self._copy, args=pair, daemon=True).start()

    @staticmethod
    def _copy(source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):  # cut
            while data := source.recv(65536):
                target.sendall(data)

    def cut(self) -> None:
        """Break every connection."""
        sockets, self._sockets = self._sockets, []
        for each in sockets:
            with suppress(OSError):  # where the other side was quicker
                each.shutdown(socket.SHUT_RDWR)
            each.close()
