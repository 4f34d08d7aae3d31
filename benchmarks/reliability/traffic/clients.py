"""Plain calls for all cases: channels, valid calls with checked answers, and latencies."""

import asyncio
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from benchmarks.common.results import environment
from benchmarks.common.server_process import MetricsSnapshot, PreluNetServer
from prelunet.evaluator.pb.prelunet.v1 import prelunet_pb2 as pb
from prelunet.evaluator.pb.prelunet.v1 import prelunet_pb2_grpc as pb_grpc

CLASSIFY = "/prelunet.v1.PreluNetService/Classify"
STREAM = "/prelunet.v1.PreluNetService/ClassifyStream"
TOLERANCE = 1e-4  # of a score: another batch sums in another order
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
CALL_SECONDS = 60.0  # deadline of a valid call
SETTLING = 10.0  # seconds until the server has noticed the end of calls and connections


def new_channel(address: str) -> grpc.aio.Channel:
    """Return a channel with its own connection."""
    options = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_receive_message_length", -1)]
    return grpc.aio.insecure_channel(address, options=options)


def classify(
    channel: grpc.aio.Channel,
    image: bytes,
    protocol: str = "center",
    *,
    timeout: float = CALL_SECONDS,
    compression: grpc.Compression | None = None,
    **fields: Any,
) -> Any:
    """Start a Classify call for one image. fields: further fields of the request."""
    request = pb.ClassifyRequest(image=image, protocol=protocol, **fields)
    return pb_grpc.PreluNetServiceStub(channel).Classify(request, timeout=timeout, compression=compression)


async def status_of(call: Any) -> str:
    """Wait for a call and return the name of its status."""
    try:
        await call
    except grpc.aio.AioRpcError as error:
        return error.code().name
    except asyncio.CancelledError:
        return "CANCELLED"
    return "OK"


def scores_of(response: pb.ClassifyResponse) -> dict[int, float]:
    """Return the scores of a response by class index."""
    return {one.class_index: one.score for one in response.predictions}


def same_scores(found: dict[int, float], expected: dict[int, float]) -> bool:
    """Return whether two answers differ only by rounding."""
    return found.keys() == expected.keys() and all(
        abs(found[index] - expected[index]) <= TOLERANCE for index in expected
    )


@dataclass
class CheckedCall:
    """A valid call, repeated. latencies: seconds of each call; failures: status and details of each failed call."""

    address: str
    image: bytes
    protocol: str = "center"
    latencies: list[float] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    _expected: dict[int, float] | None = None

    async def state(self) -> str:
        """Check the health and classify the image once; return "good" or what is wrong."""
        async with new_channel(self.address) as channel:
            health = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=CALL_SECONDS)
            try:
                if (await health).status != SERVING:
                    return "the health service does not report SERVING"
                return "good" if (await classify(channel, self.image, self.protocol)).predictions else "no prediction"
            except grpc.aio.AioRpcError as error:
                return f"{error.code().name}: {error.details()}"

    async def call(self, channel: grpc.aio.Channel) -> None:
        """Make the call once; its answer must equal the first one."""
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
            self.failures.append(f"the answer changed: {found}, before {self._expected}")

    async def times(self, count: int) -> list[float]:
        """Make `count` calls one after the other on a new connection; return their latencies."""
        before = len(self.latencies)
        async with new_channel(self.address) as channel:
            for _ in range(count):
                await self.call(channel)
        return self.latencies[before:]

    @asynccontextmanager
    async def in_background(self, pause: float = 0.01) -> AsyncIterator[None]:
        """Repeat the call while the block runs, which must not block the event loop."""
        stop = asyncio.Event()

        async def repeat() -> None:
            async with new_channel(self.address) as channel:
                while not stop.is_set():
                    await self.call(channel)
                    await asyncio.sleep(pause)

        repeated = asyncio.create_task(repeat())
        try:
            yield
        finally:
            stop.set()
            await repeated


async def kill_a_client(address: str, kind: str, picture: Path, seconds: float) -> bool:
    """Start a client process (victim.py) and kill it after `seconds` of calls; return whether it was calling."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "benchmarks.reliability.traffic.victim", address, kind, str(picture),
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment(),
    )  # fmt: skip
    assert process.stdout is not None
    line = await process.stdout.readline()
    await asyncio.sleep(seconds)
    alive = process.returncode is None
    process.kill()
    await process.communicate()
    return alive and line.strip() == b"calling"


@asynccontextmanager
async def peaks_of(server: PreluNetServer) -> AsyncIterator[dict[str, float]]:
    """Yield the most memory of a server's processes, `mb`, and the most calls in flight, `calls`, during the block."""
    peaks = {"mb": 0.0, "calls": 0.0}

    async def watch() -> None:
        while True:
            with suppress(OSError):
                peaks["mb"] = max(peaks["mb"], await asyncio.to_thread(server.tree_mb))
                peaks["calls"] = max(peaks["calls"], (await asyncio.to_thread(server.metrics))("calls_now"))
            await asyncio.sleep(0.2)

    watching = asyncio.create_task(watch())
    try:
        yield peaks
    finally:
        watching.cancel()


async def wait_until(condition: Callable[[], bool], seconds: float = SETTLING) -> bool:
    """Poll until a condition holds; return whether it did in time."""
    end = time.monotonic() + seconds
    while not (reached := condition()) and time.monotonic() < end:
        await asyncio.sleep(0.02)
    return reached


async def wait_until_settled(server: PreluNetServer, files: int) -> tuple[MetricsSnapshot, int]:
    """Wait until no call is in flight and at most `files` files are open; return the metrics and the surplus of files.

    After SETTLING seconds the current values are returned: what remains then was leaked.
    """
    for _ in range(int(SETTLING / 0.1)):
        metrics, surplus = server.metrics(), server.open_files() - files
        if not metrics.in_flight() and surplus <= 0:
            break
        await asyncio.sleep(0.1)
    return metrics, max(0, surplus)


def percentiles(latencies: Sequence[float]) -> dict[str, float]:
    """Return the median, 99th percentile and maximum of latencies, in milliseconds."""
    if not latencies:
        return {}
    ordered = sorted(latencies)
    return {
        "p50_ms": round(1000 * ordered[len(ordered) // 2], 2),
        "p99_ms": round(1000 * ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))], 2),
        "max_ms": round(1000 * ordered[-1], 2),
    }
