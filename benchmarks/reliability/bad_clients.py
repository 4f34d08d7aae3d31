"""Clients that vanish, stall, flood or idle: valid calls continue meanwhile, and nothing is left behind."""

import asyncio
import random
import time
import zlib
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, suppress
from functools import partial
from typing import Any

import grpc

from benchmarks.common.runner import Case
from benchmarks.common.server_process import PreluNetServer
from benchmarks.reliability.cases import NAME, Json, ServerTestBed, claim, verdict
from benchmarks.reliability.traffic.clients import (
    CLASSIFY,
    STREAM,
    CheckedCall,
    classify,
    kill_a_client,
    new_channel,
    peaks_of,
    percentiles,
    status_of,
    wait_until,
    wait_until_settled,
)
from benchmarks.reliability.traffic.pictures import encoded, pixels
from tests.serving.api.raw_http2 import (
    ACK,
    DATA,
    END_HEADERS,
    ENHANCE_YOUR_CALM,
    HEADERS,
    PING,
    PREFACE,
    RST_STREAM,
    SETTINGS,
    call_headers,
    connection,
    frame,
    message,
    reset_call,
)

BEGINNING = message(b"", 100_000)
KEEPALIVE = 1  # seconds of silence until the server pings; 20 s later it gives up
GOOD_AFTERWARDS = 20
GOOD_CALLS = 200  # baseline, without bad clients
HANDSHAKE = 3.0  # seconds
OPTIONS = ("--keepalive", str(KEEPALIVE), "--handshake-timeout", str(HANDSHAKE))
ARRIVAL = 3.0  # timeout of a call's message in this test, in seconds; the default is 60
ON_ONE = 50  # calls per connection whose messages never come
IDLE = 3.0  # seconds for which all connections stay idle
FLOOD, MAX_PINGS = 5.0, 100_000  # seconds; maximum number of pings on a connection that is not closed
RESETS, RESET_SECONDS = 50_000, 5.0  # calls that are started and reset, evenly over these seconds
RESETS_MB = 50.0  # memory limit per resetting connection: 512 calls, and what gRPC needs to refuse others
RESETS_P99 = 0.5  # seconds; maximum 99th percentile of the latency of valid calls meanwhile
COMPRESSED, BOMBS = 100, 16  # messages of each algorithm
BOMB_MB = 512  # decompressed
# The median latency of valid calls may meanwhile be at most SLOWER times the baseline plus EXTRA_SECONDS.
SLOWER = 5.0
EXTRA_SECONDS = 0.02
# What the bad clients do; returns whether the server treated them correctly, and numbers.
Doing = Callable[[PreluNetServer], Awaitable[tuple[bool, Json]]]


def cases(bed: ServerTestBed) -> Iterator[Case]:
    """Return a case for each kind of client."""
    kills, slow, idle, flood = bed.reduced(30, 3), bed.reduced(200, 9), bed.reduced(1000, 50), bed.reduced(20, 2)
    half_open = bed.reduced(50, 5)
    tried: tuple[tuple[str, str, float, Doing], ...] = (
        ("killed clients", f"kill -9 of {kills} client processes in the middle of calls", kills,
         lambda server: _killed(server, bed, kills)),
        ("slow clients", f"{slow} connections that send a byte now and then, or headers and no message", 15,
         lambda server: _slow(server, slow)),
        ("half-open connections", f"{half_open} clients that do not answer any more are cut off", 35,
         lambda server: _half_open(server, half_open)),
        ("ping floods", f"{flood} clients that send pings without end, and again when they are cut off", 10,
         lambda server: _floods(server, flood)),
        ("idle connections", f"{idle} connections that do nothing", 10, lambda server: _idle(server, idle)),
        ("compressed messages",
         f"{COMPRESSED} messages in gzip and in deflate are answered, {BOMBS} that hold {BOMB_MB} MB are refused, "
         "and the memory of the start line is kept", 15, _compressed),
    )  # fmt: skip
    for name, what, seconds, doing in tried:
        yield claim(
            name,
            f"{what}: valid calls continue meanwhile, and afterwards nothing is left behind",
            {"what": what, "seed": bed.seed},
            seconds + 10,
            partial(_beside, bed, OPTIONS, doing),
        )
    hasty = bed.reduced(4, 1)
    yield claim(
        "rapid resets",
        f"{hasty} connections start {RESETS} calls in {RESET_SECONDS:g} s and reset them at once (CVE-2023-44487): "
        "memory stays bounded, the 99th percentile of the latency of valid calls stays below "
        f"{1000 * RESETS_P99:g} ms, and afterwards nothing is left behind",
        {"connections": hasty, "calls": RESETS, "seconds": RESET_SECONDS},
        RESET_SECONDS + 8,
        partial(_beside, bed, (), lambda server: _resets(server, hasty), RESETS_P99),
    )
    stalled = bed.reduced(20, 3)
    yield claim(
        "messages that never come",
        f"{stalled} connections with {ON_ONE} calls each, a third of them streams, send no message or only the "
        "beginning of one, and so use up --max-calls: a call on another connection is answered even so, the calls time "
        "out, and nothing is left behind",
        {"connections": stalled, "calls": ON_ONE, "arrival": ARRIVAL},
        ARRIVAL + 15,
        partial(_stalled, bed, stalled),
    )


async def _beside(bed: ServerTestBed, options: Sequence[str], doing: Doing, p99: float | None = None) -> Json:
    """Make valid calls alone, then beside bad clients, and check what is left.

    p99: maximum of the valid calls' 99th percentile, in seconds, instead of SLOWER and EXTRA_SECONDS.
    """
    with bed.serve(*options) as server:
        good = CheckedCall(server.address, bed.pictures[0].data)
        await good.times(20)
        alone = await good.times(bed.reduced(GOOD_CALLS, 20))
        files = server.open_files()
        for _ in range(20):  # until earlier calls have been cleaned up
            await asyncio.sleep(0.1)
            files = min(files, server.open_files())
        threads = server.threads()
        first = len(good.latencies)
        async with good.in_background():
            right, numbers = await doing(server)
        meanwhile = good.latencies[first:]
        metrics, more_files = await wait_until_settled(server, files)
        ended = await asyncio.to_thread(server.stop)
    before, beside = percentiles(alone), percentiles(meanwhile)
    slow = SLOWER * before["p50_ms"] + 1000 * EXTRA_SECONDS
    return verdict(
        {
            "treated_correctly": right,
            "no_good_call_failed": not good.failures,
            "good_calls_meanwhile": len(meanwhile) > 0,
            "latency_bounded": beside.get("p50_ms", 0) <= slow if p99 is None else beside.get("p99_ms", 0) < 1000 * p99,
            "nothing_left": not metrics.in_flight() and not more_files,
            "no_view_computed_late": metrics("late_views_total", model=NAME) == 0,
            "no_error_in_the_log": not ended.errors,
        },
        **numbers,
        good_calls=len(meanwhile),
        failures=good.failures[:5],
        alone=before,
        meanwhile=beside,
        left=metrics.in_flight(),
        more_open_files=more_files,
        threads_before=threads,
        log=ended.errors[:5],
    )


async def _killed(server: PreluNetServer, bed: ServerTestBed, count: int) -> tuple[bool, Json]:
    """Start client processes and kill each at a random moment during its calls."""
    rng, picture = random.Random(bed.seed), bed.folder / "victim.jpg"
    picture.write_bytes(max((one.data for one in bed.pictures), key=len))
    in_flight = []
    for number in range(count):
        kind = ("classify", "stream", "evaluate")[number % 3]
        in_flight.append(await kill_a_client(server.address, kind, picture, rng.uniform(0, 0.1)))
    return all(in_flight), {"killed": count, "with_calls_in_flight": sum(in_flight)}


# Raw HTTP/2 connections


async def _slow(server: PreluNetServer, count: int) -> tuple[bool, Json]:
    """Send slowly in three ways; connections that do not complete the handshake in time must be closed."""
    async with AsyncExitStack() as stack:
        hello = [await stack.enter_async_context(connection(server.address, b"")) for _ in range(count // 3)]
        headers = [await stack.enter_async_context(connection(server.address)) for _ in range(count // 3)]
        bodies = [await stack.enter_async_context(connection(server.address)) for _ in range(count // 3)]
        begin = frame(HEADERS, call_headers(CLASSIFY), flags=END_HEADERS, stream=1)
        for number, one in enumerate(bodies):
            one.send(begin)
            if number % 2:  # the others send no message at all
                one.send(frame(DATA, BEGINNING, stream=1))
        end = time.monotonic() + HANDSHAKE + 3
        place, almost = 0, PREFACE[:-2]  # neither the preface nor the headers are ever completed
        while time.monotonic() < end:
            for one in (one for one in hello if not one.closed.is_set()):
                one.send(almost[place : place + 1])
            for one in headers:
                one.send(begin[:-1][place : place + 1])
            for one in bodies[1::2]:
                one.send(frame(DATA, b"\xff", stream=1))
            place += 1
            await asyncio.sleep(0.1)
        cut = sum(one.closed.is_set() for one in hello)
    return cut == len(hello), {"connections": 3 * (count // 3), "without_a_handshake_cut_off": cut}


async def _stalled(bed: ServerTestBed, count: int) -> Json:
    """Use up --max-calls with calls that send no message; the calls must time out though their clients stay."""
    places = count * ON_ONE
    with bed.serve("--max-calls", str(places), control=bed.control(arrival=ARRIVAL)) as server:
        good, files = CheckedCall(server.address, bed.pictures[0].data), server.open_files()
        async with AsyncExitStack() as stack:
            there = [await stack.enter_async_context(connection(server.address)) for _ in range(count)]
            for one in there:
                for number in range(ON_ONE):  # every third is a stream, every second one also starts its message
                    path = CLASSIFY if number % 3 else STREAM
                    one.send(frame(HEADERS, call_headers(path), flags=END_HEADERS, stream=2 * number + 1))
                    if number % 2:
                        one.send(frame(DATA, BEGINNING + b"\xff", stream=2 * number + 1))
            full = await wait_until(lambda: server.metrics()("calls_now") == places, ARRIVAL)
            await good.times(1)  # on another connection of the same address
            free = await wait_until(lambda: server.metrics()("calls_now") == 0, 2 * ARRIVAL)
            expired = server.metrics()("calls_total", status="DEADLINE_EXCEEDED")
            await good.times(GOOD_AFTERWARDS)
            stayed = not any(one.closed.is_set() for one in there)
        metrics, more_files = await wait_until_settled(server, files)
        ended = await asyncio.to_thread(server.stop)
    return verdict(
        {
            "all_places_taken": full,
            "all_places_free_again": free and stayed,
            "each_timed_out": expired == places,
            "good_calls_answered": not good.failures and len(good.latencies) == 1 + GOOD_AFTERWARDS,
            "nothing_left": not metrics.in_flight() and not more_files,
            "no_error_in_the_log": not ended.errors,
        },
        calls=places,
        timed_out=expired,
        failures=good.failures[:5],
        left=metrics.in_flight(),
        more_open_files=more_files,
        log=ended.errors[:5],
    )


async def _half_open(server: PreluNetServer, count: int) -> tuple[bool, Json]:
    """Abandon connections with a started call: they read nothing and answer no ping."""
    patience = KEEPALIVE + 20 + 10
    async with AsyncExitStack() as stack:
        gone = [await stack.enter_async_context(connection(server.address)) for _ in range(count)]
        for one in gone:
            one.send(frame(HEADERS, call_headers(CLASSIFY), flags=END_HEADERS, stream=1))
        begun = time.monotonic()
        with suppress(TimeoutError):
            async with asyncio.timeout(patience):
                await asyncio.gather(*(one.closed.wait() for one in gone))
        seconds = time.monotonic() - begun
        cut = sum(one.closed.is_set() for one in gone)
        pinged = sum(one.count(PING) > 0 for one in gone)
    return cut == count, {"connections": count, "pinged": pinged, "cut_off": cut, "after_seconds": round(seconds, 1)}


async def _floods(server: PreluNetServer, count: int) -> tuple[bool, Json]:
    """Let clients flood with pings and reconnect as soon as they are closed."""
    floods = [flood for some in await asyncio.gather(*(_flooder(server) for _ in range(count))) for flood in some]
    calmed = sum(was_calmed for was_calmed, _ in floods)
    numbers = {"clients": count, "connections": len(floods), "closed_with_enhance_your_calm": calmed}
    return calmed == len(floods), {**numbers, "pings_sent": sum(sent for _, sent in floods)}


async def _flooder(server: PreluNetServer) -> list[tuple[bool, int]]:
    """Return for each connection whether it got ENHANCE_YOUR_CALM, and the number of pings sent."""
    floods, end = [], time.monotonic() + FLOOD
    while time.monotonic() < end:
        async with connection(server.address) as there:
            sent = 0
            while not there.closed.is_set() and sent < MAX_PINGS:
                there.send(*(frame(PING, b"%08d" % number) for number in range(100)))
                sent += 100
                await asyncio.sleep(0.002)
            floods.append((there.error == ENHANCE_YOUR_CALM, sent))
    return floods


async def _resets(server: PreluNetServer, count: int) -> tuple[bool, Json]:
    """Let clients start calls and reset them at once."""
    memory, begun = server.rss_mb(), time.monotonic()
    refused = sum(await asyncio.gather(*(_hasty(server, RESETS // count) for _ in range(count))))
    seconds, grown = time.monotonic() - begun, server.rss_mb() - memory
    numbers = {"calls": RESETS, "resets_per_second": round(RESETS / seconds), "refused": refused}
    return grown <= RESETS_MB * count and seconds < 2 * RESET_SECONDS, {**numbers, "memory_more_mb": round(grown, 1)}


async def _hasty(server: PreluNetServer, calls: int) -> int:
    """Start and reset calls, at even pace; return how many of them were refused."""
    async with connection(server.address) as there:
        await there.until(SETTINGS)
        there.send(frame(SETTINGS, flags=ACK))  # before that, gRPC takes only a few calls
        begun = time.monotonic()
        for sent in range(0, calls, 50):
            there.send(*(reset_call(CLASSIFY, 2 * (sent + number) + 1) for number in range(50)))
            await there.writer.drain()
            await asyncio.sleep(begun + RESET_SECONDS * sent / calls - time.monotonic())
        return there.count(RST_STREAM)


async def _compressed(server: PreluNetServer) -> tuple[bool, Json]:
    """Send compressed messages that are valid and such as become too large."""
    image = encoded(pixels(57, 40, 1), "JPEG", comment=bytes(60_000))  # compresses well
    kinds = {"gzip": (grpc.Compression.Gzip, 31), "deflate": (grpc.Compression.Deflate, 15)}
    answers, refusals = Counter[str](), Counter[str]()
    async with peaks_of(server) as peaks, new_channel(server.address) as channel:
        for compression, window in kinds.values():
            calls = [classify(channel, image, compression=compression) for _ in range(COMPRESSED)]
            answers.update(await asyncio.gather(*map(status_of, calls)))
            send: Any = channel.unary_unary(CLASSIFY)
            bomb = await asyncio.to_thread(_bomb, window)
            refusals.update(await asyncio.gather(*(status_of(send(bomb, timeout=60)) for _ in range(BOMBS))))
    right = answers == {"OK": 2 * COMPRESSED} and refusals.total() == 2 * BOMBS
    right &= refusals.keys() <= {"INVALID_ARGUMENT", "RESOURCE_EXHAUSTED"} and peaks["mb"] <= server.promised_mb
    numbers = {"answers": dict(answers), "refusals": dict(refusals)}
    return right, {**numbers, "most_mb": round(peaks["mb"]), "start_line_mb": round(server.promised_mb)}


def _bomb(window: int) -> bytes:
    """Return BOMB_MB of zeros, compressed. window: of zlib, says which format."""
    compressor = zlib.compressobj(wbits=window)
    return b"".join([*(compressor.compress(bytes(2**20)) for _ in range(BOMB_MB)), compressor.flush()])


async def _idle(server: PreluNetServer, count: int) -> tuple[bool, Json]:
    """Open connections and leave them idle."""
    files, memory = server.open_files(), server.rss_mb()
    channels = [new_channel(server.address) for _ in range(count)]
    try:
        for place in range(0, count, 50):
            await asyncio.gather(*(channel.channel_ready() for channel in channels[place : place + 50]))
        await asyncio.sleep(IDLE)
        opened = server.open_files() - files
        grown = server.rss_mb() - memory
    finally:
        for place in range(0, count, 50):
            await asyncio.gather(*(channel.close() for channel in channels[place : place + 50]))
    return opened >= count, {"connections": count, "open_files_more": opened, "memory_more_mb": round(grown, 1)}
