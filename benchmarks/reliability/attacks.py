"""Clients that take much and send little, from another address or from the same one: others hardly notice."""

import asyncio
import functools
import gzip
import itertools
import math
import random
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from functools import partial

import grpc
from PIL import Image

from benchmarks.common.runner import Case
from benchmarks.reliability.cases import Json, ServerTestBed, claim, verdict
from benchmarks.reliability.traffic.clients import CLASSIFY, STREAM, CheckedCall, new_channel, peaks_of, percentiles
from benchmarks.reliability.traffic.pictures import SHAPES, dear_pictures, encoded, marked_picture, pixels
from prelunet.evaluator.pb.prelunet.v1 import prelunet_pb2 as pb
from tests.serving.api.raw_http2 import (
    DATA,
    END_HEADERS,
    END_STREAM,
    HEADERS,
    Connection,
    call_headers,
    connection,
    frame,
    message,
)

ATTACK, ALONE = 60.0, 10.0  # seconds
INTERVAL = 0.1  # seconds between the calls of a polite client
# The 99th percentile of the polite clients' latencies, with JPEG and with WebP, may be this many times what it is
# alone, plus a batch. WebP is decoded in a process, and may have to wait for all those of an attacker at its address.
SLOWER = {"another address": (3.0, 10.0), "the same address": (10.0, math.inf)}
BATCH_SECONDS = 0.05  # of a batch of the attacker's views, at most
ADDRESSES = {"another address": "127.0.0.2", "the same address": "127.0.0.1"}
STATUSES = {"OK", "INVALID_ARGUMENT", "RESOURCE_EXHAUSTED", "DEADLINE_EXCEEDED"}  # of all calls
LIMIT_MB = 2560  # memory limit of the server, for its whole process tree
UNFINISHED_MESSAGE = message(bytes(60 * 2**20))[:-10]
PAUSE = 1.0  # seconds until a stream or message that the server has ended begins anew
RAMP = 1 / 12  # of the attack's duration: its calls begin at random moments before, so that they do not end together


@dataclass(frozen=True)
class Attack:
    """What an attacker does.

    calls: on each connection at any time; call: makes one, number `stream`, until its end; prepare: what takes time
    before; slower: see SLOWER.
    """

    name: str
    sentence: str
    connections: int
    calls: int
    call: Callable[[Connection, int], Awaitable[None]]
    prepare: Callable[[], object] = object
    slower: Mapping[str, tuple[float, float]] = field(default_factory=lambda: SLOWER)


def cases(bed: ServerTestBed) -> Iterator[Case]:
    """Return a case for each attack and each place that it comes from."""
    seconds = 1.0 if bed.tiny else ATTACK
    for attack, place in itertools.product(ATTACKS, ADDRESSES):
        jpeg, webp = attack.slower[place]
        yield claim(
            f"{attack.name}, {place}",
            f"{attack.sentence}, from {place}: two polite clients, with JPEG and WebP, lose no call, and the 99th "
            f"percentile of their latencies stays below {jpeg:g} times (JPEG)"
            f"{f' and {webp:g} times (WebP)' if webp < math.inf else ''} that without the attack, plus a batch; "
            "health reports SERVING; the memory limit and the memory of the start line are kept",
            {"place": place, "seconds": seconds, "seed": bed.seed},
            seconds + 20,
            partial(_attacked, bed, attack, place, seconds),
        )


@functools.cache
def expensive_messages() -> tuple[bytes, ...]:
    """Return messages with images that take long to decode, or much memory: 16 and 64 megapixels, and 91 scans."""
    images = []
    for side in (4000, 8000):
        plain = Image.new("RGB", (side, side), (9, 99, 199))
        images += [encoded(plain, "WEBP", lossless=True), encoded(plain.convert("RGBA"), "PNG", compress_level=9)]
    gray = encoded(Image.new("L", (4000, 4000), 99), "JPEG", progressive=True)
    last_scan = gray[gray.rindex(b"\xff\xda") : -2]
    images.append(gray[:-2] + last_scan * 90 + gray[-2:])
    requests = (pb.ClassifyRequest(image=image, protocol="center") for image in images)
    return tuple(message(request.SerializeToString()) for request in requests)


async def _attacked(bed: ServerTestBed, attack: Attack, place: str, seconds: float) -> Json:
    attack.prepare()
    with bed.serve("--memory-limit", f"{LIMIT_MB}M") as server:
        good = CheckedCall(server.address, bed.pictures[0].data)
        webp = CheckedCall(server.address, encoded(pixels(*SHAPES[0], bed.seed), "WEBP"))
        for each in (good, webp):
            await each.times(20)
        alone = await _polite(good, webp, seconds=min(seconds, ALONE))
        async with peaks_of(server) as peaks:
            attackers = [
                asyncio.create_task(_attack(attack, server.address, ADDRESSES[place], RAMP * seconds))
                for _ in range(attack.connections)
            ]
            await asyncio.sleep(RAMP * seconds + 1)  # until its calls wait everywhere
            meanwhile = await _polite(good, webp, seconds=seconds)
            state, metrics = await good.state(), server.metrics()
        for attacker in attackers:
            attacker.cancel()
        ends = await asyncio.gather(*attackers, return_exceptions=True)
        ended = await asyncio.to_thread(server.stop)
    bounded = [
        beside.get("p99_ms", 0) <= slower * before["p99_ms"] + 1000 * BATCH_SECONDS
        for before, beside, slower in zip(alone, meanwhile, attack.slower[place], strict=True)
    ]
    counts = {code.name: metrics("calls_total", status=code.name) for code in grpc.StatusCode}
    statuses = {status: round(count) for status, count in counts.items() if count}
    return verdict(
        {
            "no_good_call_failed": not (good.failures or webp.failures),
            # The server may refuse most of its calls, so that few are in flight.
            "attack_took_place": max(peaks["calls"], statuses.get("RESOURCE_EXHAUSTED", 0))
            >= attack.connections * attack.calls / 2
            and all(isinstance(end, asyncio.CancelledError) for end in ends),
            "statuses_right": set(statuses) <= STATUSES,
            "latency_bounded": all(bounded),
            "health_reports_serving": state == "good",
            "memory_limit_kept": peaks["mb"] <= LIMIT_MB,
            "within_the_memory_of_the_start_line": peaks["mb"] <= server.promised_mb,
            "no_error_in_the_log": not ended.errors,
        },
        statuses=statuses,
        failures=[*good.failures[:5], *webp.failures[:5], *(str(end) for end in ends if isinstance(end, Exception))],
        state=state,
        alone=alone[0],
        meanwhile=meanwhile[0],
        webp_alone=alone[1],
        webp_meanwhile=meanwhile[1],
        most_calls=peaks["calls"],
        most_mb=round(peaks["mb"]),
        start_line_mb=round(server.promised_mb),
    )


async def _polite(*clients: CheckedCall, seconds: float) -> list[dict[str, float]]:
    """Let each client make a call every INTERVAL, whether or not the one before is answered; return their latencies."""
    first, end = [len(client.latencies) for client in clients], time.monotonic() + seconds
    async with AsyncExitStack() as stack, asyncio.TaskGroup() as group:
        channels = [await stack.enter_async_context(new_channel(client.address)) for client in clients]
        while time.monotonic() < end:
            for client, channel in zip(clients, channels, strict=True):
                group.create_task(client.call(channel))
            await asyncio.sleep(INTERVAL)
    return [percentiles(client.latencies[start:]) for client, start in zip(clients, first, strict=True)]


async def _attack(attack: Attack, address: str, source: str, ramp: float) -> None:
    """Keep the calls of one connection in flight, and connect again when the server closes it. ramp: see RAMP."""
    while True:
        async with connection(address, source=source, polite=True) as there:
            numbers = itertools.count(1, 2)

            async def again(there: Connection, numbers: Iterator[int]) -> None:
                await asyncio.sleep(random.uniform(0, ramp))
                while not there.closed.is_set():
                    with suppress(ConnectionError):
                        await attack.call(there, next(numbers))

            async with asyncio.TaskGroup() as group:
                for _ in range(attack.calls):
                    group.create_task(again(there, numbers))
        await asyncio.sleep(PAUSE)


@functools.cache
def dear_messages() -> tuple[bytes, ...]:
    """Return messages with the images that are dear for their bytes, in some 30 kB of gzip each."""
    requests = (pb.ClassifyRequest(image=image, protocol="center", apply_exif=True) for image in dear_pictures())
    return tuple(message(gzip.compress(request.SerializeToString()), compressed=True) for request in requests)


async def _send_one(messages: Callable[[], Sequence[bytes]], there: Connection, stream: int) -> None:
    headers = call_headers(CLASSIFY, ("grpc-encoding", "gzip"))  # of the messages that are marked as compressed
    there.send(frame(HEADERS, headers, flags=END_HEADERS, stream=stream))
    await there.send_data(stream, messages()[stream // 2 % len(messages())])
    there.send(frame(DATA, flags=END_STREAM, stream=stream))
    await there.ended[stream].wait()
    await asyncio.sleep(0.01)  # this process must not be the one that is too slow


async def _hold_stream(there: Connection, stream: int) -> None:
    """Open a stream that sends nothing, or every eighth time an image and then nothing more."""
    there.send(frame(HEADERS, call_headers(STREAM), flags=END_HEADERS, stream=stream))
    if stream % 16 == 1:
        request = pb.ClassifyRequest(image=marked_picture(1), protocol="center")
        await there.send_data(stream, message(pb.ClassifyStreamRequest(id="1", request=request).SerializeToString()))
    await there.ended[stream].wait()
    await asyncio.sleep(PAUSE)


async def _send_unfinished(there: Connection, stream: int) -> None:
    there.send(frame(HEADERS, call_headers(CLASSIFY), flags=END_HEADERS, stream=stream))
    await there.send_data(stream, UNFINISHED_MESSAGE)
    await there.ended[stream].wait()
    await asyncio.sleep(PAUSE)


ATTACKS = (
    Attack(
        "cheap bytes, expensive pixels",
        "8 connections with 8 calls in flight each send small files of up to 64 megapixels",
        connections=8,
        calls=8,
        call=partial(_send_one, expensive_messages),
        prepare=expensive_messages,
    ),
    Attack(
        "few pixels, expensive bytes",
        "a connection with 4 calls in flight sends images of up to 30 MB, in 30 kB of gzip, that have a few pixels and "
        "millions of fill bytes, comments, segments, extensions, chunks or numbers, or are plain text",
        connections=1,
        calls=4,
        call=partial(_send_one, dear_messages),
        prepare=dear_messages,
        slower={**SLOWER, "another address": (10.0, 10.0)},  # each message of 30 MB is copied by the event loop
    ),
    Attack(
        "idle streams",
        "16 connections hold 128 streams each that send nothing, or one image and then nothing",
        connections=16,
        calls=128,
        call=_hold_stream,
    ),
    Attack(
        "unfinished messages",
        "a connection sends 40 messages of 60 MiB without their last bytes",
        connections=1,
        calls=40,
        call=_send_unfinished,
    ),
)
