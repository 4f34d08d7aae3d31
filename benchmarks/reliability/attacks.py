"""Clients that send images which are cheap to send and dear to decode, from another address or from the same one."""

import asyncio
import functools
import io
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from functools import partial
from itertools import cycle

import grpc
from PIL import Image

from benchmarks.common.runner import Case
from benchmarks.common.server_process import PreluNetServer
from benchmarks.reliability.cases import Json, ServerTestBed, claim, verdict
from benchmarks.reliability.traffic.clients import CheckedCall, classify, new_channel, percentiles

ATTACK, ALONE = 60.0, 10.0  # seconds
CONNECTIONS, IN_FLIGHT = 8, 8  # of the attacker, and its calls in flight on each
INTERVAL = 0.1  # seconds between the calls of the polite client
# The 99th percentile of the polite client's latency may be this many times what it is alone, plus a batch.
SLOWER = {"another address": 3.0, "the same address": 10.0}
BATCH_SECONDS = 0.05  # of a batch of the attacker's views, at most
ADDRESSES = {"another address": "127.0.0.2", "the same address": "127.0.0.1"}
STATUSES = {"OK", "INVALID_ARGUMENT", "RESOURCE_EXHAUSTED", "DEADLINE_EXCEEDED"}  # of the attacker's calls
LIMIT_MB = 2048  # memory limit of the server, for its whole process tree


def cases(bed: ServerTestBed) -> Iterator[Case]:
    """Return a case for each place that the attack comes from."""
    seconds = 3.0 if bed.tiny else ATTACK
    for place in ADDRESSES:
        yield claim(
            f"cheap bytes, dear pixels, {place}",
            f"{CONNECTIONS} connections from {place} with {IN_FLIGHT} calls in flight each send small files of up to "
            "64 megapixels: a polite client loses no call, and the 99th percentile of its latency stays below "
            f"{SLOWER[place]:g} times that without the attack, plus a batch; the memory limit is kept",
            {"place": place, "seconds": seconds, "seed": bed.seed},
            seconds + 30,
            partial(_attacked, bed, place, seconds),
        )


@functools.cache
def dear_images() -> tuple[bytes, ...]:
    """Return images that take long to decode, or much memory: of 16 and 64 megapixels, and of 99 scans."""
    images = []
    for side in (4000, 8000):
        plain = Image.new("RGB", (side, side), (9, 99, 199))
        images += [_encoded(plain, "WEBP", lossless=True), _encoded(plain.convert("RGBA"), "PNG", compress_level=9)]
    gray = _encoded(Image.new("L", (4000, 4000), 99), "JPEG", progressive=True)
    last_scan = gray[gray.rindex(b"\xff\xda") : -2]
    return (*images, gray[:-2] + last_scan * 90 + gray[-2:])


def _encoded(image: Image.Image, kind: str, **options: object) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


async def _attacked(bed: ServerTestBed, place: str, seconds: float) -> Json:
    images = dear_images()
    with bed.serve("--memory-limit", f"{LIMIT_MB}M") as server:
        good = CheckedCall(server.address, bed.pictures[0].data)
        await good.times(20)
        alone = await _polite(good, seconds=min(seconds, ALONE))
        statuses: dict[str, int] = {}
        peak = [0.0]
        async with relay(server.address, ADDRESSES[place]) as address:
            watch = asyncio.create_task(_watch_memory(server, peak))
            attack = [
                asyncio.create_task(_attack(address, images, connection, statuses)) for connection in range(CONNECTIONS)
            ]
            await asyncio.sleep(min(seconds / 3, 2.0))  # until its calls wait everywhere
            meanwhile = await _polite(good, seconds=seconds)
            for task in (*attack, watch):
                task.cancel()
            await asyncio.gather(*attack, watch, return_exceptions=True)
        afterwards = await _polite(good, seconds=min(seconds, 2.0))
        ended = await asyncio.to_thread(server.stop)
    before, beside = percentiles(alone), percentiles(meanwhile)
    return verdict(
        {
            "no_good_call_failed": not good.failures,
            "attack_took_place": sum(statuses.values()) > 0,
            "statuses_right": set(statuses) <= STATUSES,
            "latency_bounded": beside["p99_ms"] <= SLOWER[place] * before["p99_ms"] + 1000 * BATCH_SECONDS,
            "memory_limit_kept": peak[0] <= LIMIT_MB,
            "no_error_in_the_log": not ended.errors,
        },
        statuses=statuses,
        failures=good.failures[:5],
        alone=before,
        meanwhile=beside,
        afterwards=percentiles(afterwards),
        most_mb=round(peak[0]),
        start_line_mb=round(server.promised_mb),
    )


async def _polite(good: CheckedCall, *, seconds: float) -> list[float]:
    """Make a call every INTERVAL, whether or not the one before is answered; return their latencies in seconds."""
    first, end = len(good.latencies), time.monotonic() + seconds
    async with new_channel(good.address) as channel, asyncio.TaskGroup() as group:
        while time.monotonic() < end:
            group.create_task(good.call(channel))
            await asyncio.sleep(INTERVAL)
    return good.latencies[first:]


async def _attack(address: str, images: tuple[bytes, ...], connection: int, statuses: dict[str, int]) -> None:
    """Keep IN_FLIGHT calls in flight on one connection."""
    sent = cycle(images[connection % len(images) :] + images[: connection % len(images)])

    async def again(channel: grpc.aio.Channel) -> None:
        while True:
            status = "OK"
            try:
                await classify(channel, next(sent))
            except grpc.aio.AioRpcError as error:
                status = error.code().name
                await asyncio.sleep(0.01)  # this process must not be the one that is too slow
            statuses[status] = statuses.get(status, 0) + 1

    async with new_channel(address) as channel, asyncio.TaskGroup() as group:
        for _ in range(IN_FLIGHT):
            group.create_task(again(channel))


async def _watch_memory(server: PreluNetServer, peak: list[float]) -> None:
    while True:
        with suppress(OSError):
            peak[0] = max(peak[0], server.tree_mb())
        await asyncio.sleep(0.1)


@asynccontextmanager
async def relay(server: str, source: str) -> AsyncIterator[str]:
    """Forward connections to a server from another address of loopback; yield the address to connect to."""
    host, port = server.rsplit(":", 1)

    async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while data := await reader.read(2**16):
                writer.write(data)
                await writer.drain()
        writer.close()

    async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            to_server = await asyncio.open_connection(host, int(port), local_addr=(source, 0))
            await asyncio.gather(copy(reader, to_server[1]), copy(to_server[0], writer))
        writer.close()

    listening = await asyncio.start_server(forward, "127.0.0.1", 0)
    try:
        yield f"127.0.0.1:{listening.sockets[0].getsockname()[1]}"
    finally:
        listening.close()
