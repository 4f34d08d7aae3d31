"""Clients that take much and send little, from another address or from the same one: others hardly notice."""

import asyncio
import functools
import gzip
import itertools
import math
import random
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import grpc
import httpx
from PIL import Image

from benchmarks.common.runner import Case
from benchmarks.common.server_process import PreluNetServer
from benchmarks.reliability.cases import NAME, Json, ServerTestBed, claim, verdict
from benchmarks.reliability.traffic.clients import CLASSIFY, STREAM, CheckedCall, new_channel, peaks_of, percentiles
from benchmarks.reliability.traffic.pictures import SHAPES, dear_pictures, encoded, marked_picture, pixels
from prelunet.evaluator.pb.inference import inference_pb2
from prelunet.evaluator.pb.prelunet.v1 import prelunet_pb2 as pb
from tests.serving.api.raw_http2 import (
    DATA,
    END_HEADERS,
    END_STREAM,
    HEADERS,
    PREFACE,
    SETTINGS,
    Connection,
    call_headers,
    connection,
    frame,
    message,
)

ATTACK, SHORT_ATTACK, ALONE = 60.0, 20.0, 10.0  # seconds
INTERVAL = 0.1  # seconds between the calls of a polite client
# The 99th percentile of the polite clients' latencies, with JPEG and with WebP, may be this many times what it is
# alone, plus a batch. WebP is decoded in a process, and may have to wait for all those of an attacker at its address.
SLOWER = {
    "another address": (3.0, 10.0), "the same address": (10.0, math.inf), "the same Unix socket": (10.0, math.inf)
}  # fmt: skip
TEN_TIMES = dict.fromkeys(SLOWER, (10.0, 10.0))
BATCH_SECONDS = 0.05  # of a batch of the attacker's views, at most, unless they are large
LONG_BATCHES = (BATCH_SECONDS, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)  # seconds, buckets of prelunet_batch_seconds
ADDRESSES = {"another address": "127.0.0.2", "the same address": "127.0.0.1"}
REFUSALS = {"INVALID_ARGUMENT", "RESOURCE_EXHAUSTED"}
STATUSES = {"OK", "DEADLINE_EXCEEDED", *REFUSALS}  # of all calls
MODEL_INFER = "/inference.GRPCInferenceService/ModelInfer"
LIMIT_MB, SMALL_LIMIT_MB = 2560, 750  # memory limit of the server, for its whole process tree
LARGE_VIEW = 1024  # pixels, side of a view
LARGE = 60 * 2**20  # bytes of a large message
UNFINISHED_MESSAGE = message(bytes(LARGE))[:-10]
PAUSE = 1.0  # seconds until a stream or message that the server has ended begins anew
TINY_ATTACK = 3.0  # seconds, in which a busy machine refuses some of what it admitted
RAMP = 1 / 12  # of the attack's duration: its calls begin at random moments before, so that they do not end together


@dataclass(frozen=True)
class Attack:
    """What an attacker does.

    calls: on each connection at any time; call: makes one, number `stream`, until its end; prepare: what takes time
    before; slower: see SLOWER; seconds: of the attack; options, memory_mb: of the server, and its memory limit; places:
    where it comes from; long_batches: whether batches of its views may take longer than BATCH_SECONDS; over: keeps the
    calls of one connection in flight.
    """

    name: str
    sentence: str
    connections: int
    calls: int
    call: Callable[[Any, int], Awaitable[None]]
    prepare: Callable[[], object] = object
    slower: Mapping[str, tuple[float, float]] = field(default_factory=lambda: SLOWER)
    seconds: float = ATTACK
    options: Sequence[str] = ()
    memory_mb: int = LIMIT_MB
    places: Sequence[str] = tuple(ADDRESSES)
    long_batches: bool = False
    over: "Callable[[Attack, PreluNetServer, str, str, float], Coroutine[Any, Any, None]]" = field(
        default_factory=lambda: _over_grpc
    )


def cases(bed: ServerTestBed) -> Iterator[Case]:
    """Return a case for each attack and each place that it comes from."""
    for attack, place in [(each, place) for each in ATTACKS for place in each.places]:
        seconds = TINY_ATTACK if bed.tiny else attack.seconds
        jpeg, webp = attack.slower[place]
        yield claim(
            f"{attack.name}, {place}",
            f"{attack.sentence}, from {place}: two polite clients, with JPEG and WebP, lose no call, and the 99th "
            f"percentile of their latencies stays below {jpeg:g} times (JPEG)"
            f"{f' and {webp:g} times (WebP)' if webp < math.inf else ''} that without the attack, plus a batch; "
            "health reports SERVING; the memory limit and the memory of the start line are kept",
            {"place": place, "seconds": seconds, "seed": bed.seed},
            seconds + min(seconds, ALONE) + 10,
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
    options, socket = attack.options, bed.folder / f"{secrets.token_hex(4)}.sock"
    if place not in ADDRESSES:
        options = (*options, "--unix-socket", str(socket))
    with bed.serve("--memory-limit", f"{attack.memory_mb}M", *options) as server:
        address = server.address or f"unix:{socket}"
        good = CheckedCall(address, bed.pictures[0].data)
        webp = CheckedCall(address, encoded(pixels(*SHAPES[0], bed.seed), "WEBP"))
        for each in (good, webp):
            await each.times(20)
        alone = await _polite(good, webp, seconds=min(seconds, ALONE))
        async with peaks_of(server) as peaks:
            attackers = [
                asyncio.create_task(attack.over(attack, server, address, ADDRESSES.get(place, ""), RAMP * seconds))
                for _ in range(attack.connections)
            ]
            await asyncio.sleep(RAMP * seconds + 1)  # until its calls wait everywhere
            meanwhile = await _polite(good, webp, seconds=seconds)
            state, metrics, files = await good.state(), server.metrics(), server.open_files()
        for attacker in attackers:
            attacker.cancel()
        ends = await asyncio.gather(*attackers, return_exceptions=True)
        ended = await asyncio.to_thread(server.stop)
    batch = BATCH_SECONDS
    if attack.long_batches:
        done = metrics("batch_seconds_count")
        batch = next((most for most in LONG_BATCHES if metrics("batch_seconds_bucket", le=str(most)) == done), math.inf)
    bounded = [
        beside.get("p99_ms", 0) <= slower * before["p99_ms"] + 1000 * batch
        for before, beside, slower in zip(alone, meanwhile, attack.slower[place], strict=True)
    ]
    counts = {code.name: metrics("calls_total", status=code.name) for code in grpc.StatusCode}
    statuses = {status: round(count) for status, count in counts.items() if count}
    return verdict(
        {
            "no_good_call_failed": not (good.failures or webp.failures),
            # The server may refuse most of its calls, so that few are in flight.
            "attack_took_place": max(peaks["calls"], sum(statuses.get(each, 0) for each in REFUSALS))
            >= attack.connections * attack.calls / 2
            and files > attack.connections / 2
            and all(isinstance(end, asyncio.CancelledError) for end in ends),
            "statuses_right": set(statuses) <= STATUSES,
            "latency_bounded": all(bounded),
            "health_reports_serving": state == "good",
            "memory_limit_kept": peaks["mb"] <= attack.memory_mb,
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
        batch_ms=1000 * batch,
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


async def _over_grpc(attack: Attack, _server: PreluNetServer, address: str, source: str, ramp: float) -> None:
    """Connect again when the server closes the connection. ramp: see RAMP."""
    while True:
        async with _connected(address, source) as there:
            numbers = itertools.count(1, 2)

            async def again(there: Connection, numbers: Iterator[int]) -> None:
                await asyncio.sleep(random.uniform(0, ramp))
                while not there.closed.is_set():
                    with suppress(ConnectionError):
                        await attack.call(there, next(numbers))

            async with asyncio.TaskGroup() as group:
                for _ in range(attack.calls):
                    group.create_task(again(there, numbers))
            await there.closed.wait()
        await asyncio.sleep(PAUSE)


@asynccontextmanager
async def _connected(address: str, source: str) -> AsyncIterator[Connection]:
    if not address.startswith("unix:"):
        async with connection(address, source=source, polite=True) as there:
            yield there
        return
    reader, writer = await asyncio.open_unix_connection(address.removeprefix("unix:"))
    there = Connection(reader, writer, polite=True)
    listening = asyncio.create_task(there.listen())
    there.send(PREFACE + frame(SETTINGS))
    try:
        yield there
    finally:
        listening.cancel()
        writer.close()


async def _over_http(attack: Attack, server: PreluNetServer, _address: str, source: str, ramp: float) -> None:
    await asyncio.sleep(random.uniform(0, ramp))
    transport = httpx.AsyncHTTPTransport(local_address=source)
    async with httpx.AsyncClient(base_url=f"http://{server.http}", transport=transport, timeout=60) as client:
        for number in itertools.count():
            with suppress(httpx.TransportError):
                await attack.call(client, number)
            await asyncio.sleep(0.01)


@functools.cache
def dear_messages() -> tuple[bytes, ...]:
    """Return messages with the images that are dear for their bytes."""
    requests = (pb.ClassifyRequest(image=image, protocol="center", apply_exif=True) for image in dear_pictures())
    return tuple(message(request.SerializeToString()) for request in requests)


@functools.cache
def compressed_forms() -> tuple[bytes, ...]:
    """Return forms in gzip: with a valid image of half of LARGE, and with one that is too large."""
    head = b'--x\r\ncontent-disposition: form-data; name="image"; filename="1.png"\r\n\r\n'
    images = (marked_picture(1).ljust(size, b"\0") for size in (LARGE // 2, LARGE))
    return tuple(gzip.compress(b"%b%b\r\n--x--\r\n" % (head, image)) for image in images)


async def _send_form(client: httpx.AsyncClient, number: int) -> None:
    headers = {"content-type": "multipart/form-data; boundary=x", "content-encoding": "gzip"}
    forms = compressed_forms()
    await client.post("/v1/classify?protocol=center", content=forms[number % len(forms)], headers=headers)


@functools.cache
def compressed_inferences() -> tuple[bytes, ...]:
    """Return a message of LARGE in gzip, with two valid images."""
    image = marked_picture(1).ljust(LARGE // 2, b"\0")
    tensor = inference_pb2.ModelInferRequest.InferInputTensor(name="images", datatype="BYTES", shape=[2])
    raw = 2 * (len(image).to_bytes(4, "little") + image)
    request = inference_pb2.ModelInferRequest(model_name=NAME, inputs=[tensor], raw_input_contents=[raw])
    return (message(gzip.compress(request.SerializeToString()), compressed=True),)


@functools.cache
def large_messages() -> tuple[bytes, ...]:
    """Return a message of LARGE, complete and not compressed."""
    return (message(pb.ClassifyRequest(image=bytes(LARGE)).SerializeToString()),)


@functools.cache
def large_views() -> tuple[bytes, ...]:
    """Return a message with an image of 16 kB, to be classified at scale LARGE_VIEW, also mirrored."""
    image = encoded(pixels(300, 300, 1), "JPEG", quality=60)
    return (message(pb.ClassifyRequest(image=image, scales=[LARGE_VIEW], mirror=True).SerializeToString()),)


async def _send_one(
    messages: Callable[[], Sequence[bytes]], there: Connection, stream: int, path: str = CLASSIFY
) -> None:
    headers = call_headers(path, ("grpc-encoding", "gzip"))  # of the messages that are marked as compressed
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
        "a connection with 4 calls in flight sends images of up to 30 MB that have a few pixels and "
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
        "a connection sends 60 messages of 60 MiB without their last bytes",
        connections=1,
        calls=60,
        call=_send_unfinished,
        slower=TEN_TIMES,
        places=tuple(SLOWER),
    ),
    Attack(
        f"unfinished messages, memory limit {SMALL_LIMIT_MB} MB",
        "a connection sends 60 messages of 60 MiB without their last bytes",
        connections=1,
        calls=60,
        call=_send_unfinished,
        seconds=SHORT_ATTACK,
        memory_mb=SMALL_LIMIT_MB,
        places=("the same address", "the same Unix socket"),
    ),
    Attack(
        f"large messages, memory limit {SMALL_LIMIT_MB} MB",
        "a connection with 60 calls in flight sends images of 60 MiB, more than one may have",
        connections=1,
        calls=60,
        call=partial(_send_one, large_messages),
        prepare=large_messages,
        slower=TEN_TIMES,
        seconds=SHORT_ATTACK,
        memory_mb=SMALL_LIMIT_MB,
        places=("another address", "the same Unix socket"),
    ),
    Attack(
        "idle connections",
        "300 connections, as many as there may be, that answer pings and make no call",
        connections=300,
        calls=0,
        call=_send_unfinished,
        slower=TEN_TIMES,
        seconds=SHORT_ATTACK,
        options=("--max-connections", "300", "--keepalive", "1"),
    ),
    *(
        Attack(
            f"compressed forms, memory limit {limit} MB",
            "40 connections send HTTP forms of 30 and 60 MiB, in 30 and 60 kB of gzip",
            connections=40,
            calls=1,
            call=_send_form,
            prepare=compressed_forms,
            slower=TEN_TIMES,
            seconds=SHORT_ATTACK,
            options=("--http-port", "0"),
            memory_mb=limit,
            over=_over_http,
        )
        for limit in (LIMIT_MB, SMALL_LIMIT_MB)
    ),
    *(
        Attack(
            f"compressed inferences, memory limit {limit} MB",
            "a connection with 60 calls in flight sends two images of 30 MiB in a message of 60 kB of gzip",
            connections=1,
            calls=60,
            call=partial(_send_one, compressed_inferences, path=MODEL_INFER),
            prepare=compressed_inferences,
            slower=TEN_TIMES,
            seconds=SHORT_ATTACK,
            memory_mb=limit,
        )
        for limit in (LIMIT_MB, SMALL_LIMIT_MB)
    ),
    *(
        Attack(
            f"large views, {name}",
            f"a connection with 4 calls in flight sends images of 16 kB to be classified at scale {LARGE_VIEW}, {what}",
            connections=1,
            calls=4,
            call=partial(_send_one, large_views),
            prepare=large_views,
            slower=TEN_TIMES,
            seconds=SHORT_ATTACK,
            options=options,
            long_batches=True,
        )
        for name, what, options in (
            ("refused", "which is refused by default", ()),
            ("allowed", "which --max-view-pixels allows", ("--max-view-pixels", str(LARGE_VIEW**2))),
        )
    ),
)
