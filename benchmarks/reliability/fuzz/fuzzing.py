"""Fuzzing: send damaged messages of every method and damaged pictures to a server, which must survive them.

When the server dies, it is restarted and the cases that were in flight are sent again one by one, which identifies the
case that killed it. A control case checks this with a server that dies of one picture.
"""

import asyncio
import io
import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import grpc
import grpc.aio
from PIL import Image

from benchmarks.common.runner import Case
from benchmarks.common.server_process import PreluNetServer
from benchmarks.reliability.cases import Json, ServerTestBed, claim, verdict
from benchmarks.reliability.fuzz.fuzz_cases import FuzzCase, case_of, method_at
from benchmarks.reliability.traffic.clients import CheckedCall, new_channel, wait_until_settled
from benchmarks.reliability.traffic.stream_end import StreamEnd
from prelunet.evaluator.pb.inference import inference_pb2 as oip
from prelunet.evaluator.pb.prelunet.v1 import prelunet_pb2 as pb

CASES = 100_000
CONCURRENCY = 24  # calls in flight
CONNECTIONS = 4
SAMPLED = 2500  # cases between two samples of the server's resident memory
CALL_TIMEOUT = 60.0  # deadline of every call, in seconds
DEAD = 0.5  # seconds until a dying process is gone
MAX_CRASHES = 5
FORBIDDEN_STATUSES = ("INTERNAL", "UNKNOWN", "UNAVAILABLE", "DATA_LOSS")  # no caller may cause these
# Beginning of the text of an INTERNAL error, for streams that carry only texts.
_INTERNAL_ERROR_PREFIX = "internal server error"
_CRASH_WIDTH = 20_000  # pixels: a picture of this width kills the control server
_BESIDE = 200  # further cases that the control server receives


@dataclass
class FuzzResults:
    """Results of the cases. wrong: cases with a forbidden outcome; slowest: seconds and number of one case."""

    statuses: Counter[str] = field(default_factory=Counter)
    inside: Counter[str] = field(default_factory=Counter)  # statuses of single images in streams
    wrong: list[tuple[int, str]] = field(default_factory=list)
    slowest: tuple[float, int] = (0.0, 0)
    in_flight: set[int] = field(default_factory=set)
    done: int = 0
    rss_mb: list[int] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)  # log lines
    foreign: int = 0  # lines that libraries wrote to stderr
    crashes: list[Json] = field(default_factory=list)


def cases(bed: ServerTestBed) -> Iterator[Case]:
    """Yield the two cases."""
    count = bed.reduced(CASES, 600)
    yield claim(
        "fuzz, a server that crashes",
        "the same check detects a server that dies of one picture, and names the case",
        {"seed": bed.seed},
        30,
        partial(_control, bed),
    )
    yield claim(
        "fuzz",
        f"{count} damaged messages and pictures cause no INTERNAL, no UNKNOWN and no crash, and every call is "
        f"answered within {CALL_TIMEOUT:g} s",
        {"cases": count, "seed": bed.seed},
        count / 250 + 20,
        partial(fuzz, bed.seed, range(count), bed.serve, bed.pictures[0].data),
    )


async def _control(bed: ServerTestBed) -> Json:
    """Fuzz a server that dies of one picture, which is among the cases."""
    beside = bed.reduced(_BESIDE, 60)
    deadly = next(number for number in itertools.count(beside) if _width_in(case_of(bed.seed, number)) == _CRASH_WIDTH)
    control = bed.control(dies_at_width=_CRASH_WIDTH)
    numbers = [*range(beside // 2), deadly, *range(beside // 2, beside)]
    result = await fuzz(bed.seed, numbers, partial(bed.serve, control=control), bed.pictures[0].data)
    named = [number for crash in result["crashes"] for _, number, *_ in crash["alone"]]
    numbers_sent = {name: result[name] for name in ("cases", "statuses")}
    return {"held": deadly in named, "deadly_case": deadly, "named": named, **numbers_sent}


def _width_in(case: FuzzCase) -> int:
    """Return the width of the picture in a Classify call; 0 if there is none."""
    if case.method.endswith("/Classify") and case.what.startswith("picture: one-row"):
        request = pb.ClassifyRequest.FromString(case.messages[0])
        try:
            with Image.open(io.BytesIO(request.image)) as image:
                image.load()
                return image.width
        except Exception:  # Pillow raises many types for damaged pictures
            return 0
    return 0


async def fuzz(seed: int, numbers: Sequence[int], serve: Callable[[], PreluNetServer], good_image: bytes) -> Json:
    """Send these cases to a server, restarting it when it dies."""
    tally, left, state, promised = FuzzResults(), iter(numbers), "not checked", 0.0
    remaining: dict[str, float] = {}
    begun = time.monotonic()
    while tally.done < len(numbers) and len(tally.crashes) < MAX_CRASHES:
        with serve() as server:
            promised = server.promised_mb
            await _send(server, seed, left, tally)
            if server.is_alive():
                metrics, _ = await wait_until_settled(server, server.open_files())
                remaining = metrics.in_flight()
                state = await CheckedCall(server.address, good_image).state()
                tally.rss_mb.append(round(server.rss_mb()))
                ended = await asyncio.to_thread(server.stop)
            else:
                ended = server.wait()
                tally.crashes.append(await _culprits(seed, tally, ended.code, serve))
            tally.errors += ended.errors
            tally.foreign += len(ended.foreign)
    return verdict(
        {
            "no_forbidden_status": not tally.wrong,
            "no_crash": not tally.crashes,
            "healthy_afterwards": state == "good",
            "nothing_left": not remaining,
            "no_error_in_the_log": not tally.errors,
            "all_sent": tally.done == len(numbers),
            "within_the_memory_of_the_start_line": max(tally.rss_mb, default=0) <= promised,
        },
        cases=tally.done,
        cases_per_second=round(tally.done / (time.monotonic() - begun), 1),
        statuses=dict(tally.statuses.most_common()),
        in_streams=dict(tally.inside.most_common()),
        slowest_seconds=round(tally.slowest[0], 2),
        slowest_case=tally.slowest[1],
        rss_mb=tally.rss_mb,
        start_line_mb=round(promised),
        lines_of_libraries_on_stderr=tally.foreign,
        wrong=tally.wrong[:20],
        crashes=tally.crashes,
        log=tally.errors[:10],
    )


async def _send(server: PreluNetServer, seed: int, numbers: Iterator[int], tally: FuzzResults) -> None:
    """Send cases until all are sent or the server is gone."""
    async with AsyncExitStack() as stack:
        channels = [await stack.enter_async_context(new_channel(server.address)) for _ in range(CONNECTIONS)]
        await asyncio.gather(
            *(
                _work(server, channel, seed, numbers, tally)
                for channel in itertools.islice(itertools.cycle(channels), CONCURRENCY)
            )
        )


async def _work(
    server: PreluNetServer, channel: grpc.aio.Channel, seed: int, numbers: Iterator[int], tally: FuzzResults
) -> None:
    while server.is_alive() and (number := next(numbers, None)) is not None:
        case = case_of(seed, number)
        tally.in_flight.add(number)
        begun = time.monotonic()
        status, inside = await call_case(channel, case)
        seconds = time.monotonic() - begun
        if status == "UNAVAILABLE":
            await asyncio.sleep(DEAD)
        if not server.is_alive():
            return  # its number stays in flight
        tally.in_flight.discard(number)
        if tally.done % SAMPLED == 0:
            tally.rss_mb.append(round(server.rss_mb()))
        tally.done += 1
        tally.statuses[status] += 1
        tally.inside.update(inside)
        tally.slowest = max(tally.slowest, (seconds, number))
        tally.wrong += [(number, one) for one in (status, *inside) if one in FORBIDDEN_STATUSES]
        if seconds >= CALL_TIMEOUT:
            tally.wrong.append((number, f"{status} after {seconds:.0f} s"))


async def call_case(channel: grpc.aio.Channel, case: FuzzCase) -> tuple[str, list[str]]:
    """Make a call; return its status and those of the single images of a stream."""
    inside: list[str] = []
    if method_at(case.method).streams == (False, False):
        call: Any = channel.unary_unary(case.method)
        try:
            await call(case.messages[0], timeout=CALL_TIMEOUT)
        except grpc.aio.AioRpcError as error:
            return error.code().name, inside
        return "OK", inside
    start: Any = channel.stream_stream(case.method)
    stream = start(case.messages, timeout=CALL_TIMEOUT)
    end = StreamEnd(stream)  # grpc.aio reports another status when a server ends a stream early
    try:
        async for response in stream:
            inside += image_status_of(case.method, response)
    except grpc.aio.AioRpcError as failed:
        ended = await end.status(failed)
        return "OK" if ended is None else ended.code().name, inside
    return "OK", inside


def image_status_of(method: str, response: bytes) -> list[str]:
    """Return the status of the image in a stream message, if the message has one."""
    if method.endswith("/ClassifyStream"):
        code = pb.ClassifyStreamResponse.FromString(response).error.code
        return [next(status.name for status in grpc.StatusCode if status.value[0] == code)]
    if method.endswith("/ModelStreamInfer"):
        text = oip.ModelStreamInferResponse.FromString(response).error_message
        return ["INTERNAL" if text.startswith(_INTERNAL_ERROR_PREFIX) else "refused" if text else "OK"]
    return []


async def _culprits(seed: int, tally: FuzzResults, code: int, serve: Callable[[], PreluNetServer]) -> Json:
    """Return how a server died, and which cases in flight kill it on their own, smallest first."""
    suspects, alone = sorted(tally.in_flight), list[Any]()
    tally.in_flight.clear()
    tally.done += len(suspects)
    left = iter(suspects)
    number: int | None = next(left, None)
    while number is not None:
        with serve() as server:
            while number is not None and server.is_alive():
                case = case_of(seed, number)
                async with new_channel(server.address) as channel:
                    status, _ = await call_case(channel, case)
                if status == "UNAVAILABLE":
                    await asyncio.sleep(DEAD)
                if not server.is_alive():
                    alone.append((sum(map(len, case.messages)), number, case.method, case.what))
                number = next(left, None)
    return {"code": code, "in_flight": suspects, "alone": sorted(alone)}
