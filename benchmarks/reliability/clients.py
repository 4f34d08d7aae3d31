"""Plain calls for all cases: channels, good calls whose answers are checked, and how long they take."""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from benchmarks.common.server_process import MetricsSnapshot, ServerProcess
from prelunet.evaluator.pb.prelunet.v1 import prelunet_pb2 as pb
from prelunet.evaluator.pb.prelunet.v1 import prelunet_pb2_grpc as pb_grpc

TOLERANCE = 1e-4  # of a score: sums in another order, as another batch gives them
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
CALL_SECONDS = 60.0  # for any good call
SETTLING = 10.0  # seconds for the ends of calls and connections to be noticed


def new_channel(address: str) -> grpc.aio.Channel:
    """Return a channel with a connection of its own."""
    options = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_receive_message_length", -1)]
    return grpc.aio.insecure_channel(address, options=options)


async def health_of(channel: grpc.aio.Channel) -> int:
    """Ask for the health once."""
    told = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=CALL_SECONDS)
    status: int = told.status
    return status


def classify(
    channel: grpc.aio.Channel, image: bytes, protocol: str = "center", *, timeout: float = CALL_SECONDS, **more: Any
) -> Any:
    """Begin a call for one image."""
    request = pb.ClassifyRequest(image=image, protocol=protocol, **more)
    return pb_grpc.PreluNetServiceStub(channel).Classify(request, timeout=timeout)


def scores_of(response: pb.ClassifyResponse) -> dict[int, float]:
    """Return the scores of an answer by class index."""
    return {one.class_index: one.score for one in response.predictions}


def same_scores(found: dict[int, float], expected: dict[int, float]) -> bool:
    """Say whether two answers differ by rounding only."""
    return found.keys() == expected.keys() and all(
        abs(found[index] - expected[index]) <= TOLERANCE for index in expected
    )


@dataclass
class CheckedCall:
    """A good call to a server, made again and again. latencies: seconds of each; failures: of those that failed."""

    address: str
    image: bytes
    protocol: str = "center"
    latencies: list[float] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    _expected: dict[int, float] | None = None

    async def state(self) -> str:
        """Ask for the health and once for the image; "good", or what is not."""
        async with new_channel(self.address) as channel:
            try:
                if await health_of(channel) != SERVING:
                    return "health says that it does not serve"
                return "good" if (await classify(channel, self.image, self.protocol)).predictions else "no prediction"
            except grpc.aio.AioRpcError as error:
                return f"{error.code().name}: {error.details()}"

    async def ask(self, channel: grpc.aio.Channel) -> None:
        """Make the call once; its answer should be that of the first."""
        begun = time.monotonic()
        try:
            found = scores_of(await classify(channel, self.image, self.protocol, top_k=10))
        except grpc.aio.AioRpcError as error:
            self.failures.append(f"{error.code().name}: {error.details()}")
            return
        self.latencies.append(time.monotonic() - begun)
        if self._expected is None:
            self._expected = found
        elif not same_scores(found, self._expected):
            self.failures.append(f"another answer than before: {found}, not {self._expected}")

    async def times(self, count: int) -> list[float]:
        """Make so many calls, one after the other, on a connection of their own; returns their latencies."""
        already = len(self.latencies)
        async with new_channel(self.address) as channel:
            for _ in range(count):
                await self.ask(channel)
        return self.latencies[already:]

    def meanwhile(self, pause: float = 0.01) -> "BackgroundCalls":
        """Return a block during which the call is made again and again."""
        return BackgroundCalls(self, pause)


class BackgroundCalls:
    """Makes good calls one after the other while its block runs; needs a loop that is not held up."""

    def __init__(self, good: CheckedCall, pause: float) -> None:
        self._good = good
        self._pause = pause
        self._stop = False

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._run())
        return self

    async def _run(self) -> None:
        async with new_channel(self._good.address) as channel:
            while not self._stop:
                await self._good.ask(channel)
                await asyncio.sleep(self._pause)

    async def __aexit__(self, _kind: type[BaseException] | None, _error: object, _trace: TracebackType | None) -> None:
        self._stop = True
        await self._task


async def wait_until(condition: Callable[[], bool], seconds: float = SETTLING) -> bool:
    """Wait for something that nobody tells; returns whether it came."""
    end = time.monotonic() + seconds
    while not (came := condition()) and time.monotonic() < end:
        await asyncio.sleep(0.02)
    return came


async def wait_until_settled(server: ServerProcess, files: int) -> tuple[MetricsSnapshot, int]:
    """Wait until no call is under way and no more than so many files are open; returns the metrics, and how many more.

    As they are after a while, where that does not come: what is left then is left for good.
    """
    for _ in range(int(SETTLING / 0.1)):
        metrics, more = server.metrics(), server.open_files() - files
        if not metrics.left() and more <= 0:
            break
        await asyncio.sleep(0.1)
    return metrics, max(0, more)


def percentiles(latencies: Sequence[float]) -> dict[str, float]:
    """Return median, 99th percentile and largest of latencies in milliseconds."""
    if not latencies:
        return {}
    ordered = sorted(latencies)
    return {
        "p50_ms": round(1000 * ordered[len(ordered) // 2], 2),
        "p99_ms": round(1000 * ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))], 2),
        "max_ms": round(1000 * ordered[-1], 2),
    }
