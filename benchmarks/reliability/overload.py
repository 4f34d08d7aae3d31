"""More calls than may wait: exactly the surplus is refused, at once, with the time after which to retry.

This holds for the calls of one client, that is, of one connection. When it has filled the queue, another client is
still admitted until the queue holds a quarter more than its limit.
"""

import asyncio
import json
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import grpc.aio

from benchmarks.common.runner import Case
from benchmarks.common.server_process import PreluNetServer
from benchmarks.reliability.cases import NAME, Json, ServerTestBed, claim, verdict
from benchmarks.reliability.fault_injection import write_control
from benchmarks.reliability.traffic.clients import (
    CheckedCall,
    classify,
    new_channel,
    percentiles,
    wait_until,
    wait_until_settled,
)
from prelunet.evaluator.client import AsyncClient
from prelunet.evaluator.errors import Overloaded
from prelunet.evaluator.pb.prelunet.v1 import prelunet_pb2 as pb
from prelunet.evaluator.pb.prelunet.v1 import prelunet_pb2_grpc as pb_grpc
from prelunet.evaluator.rpc.status import error_from

AT_ONCE = 0.5  # seconds for a refusal, with all the calls that arrive at the same moment
REFUSAL_TIMEOUT = 10.0  # seconds for all refusals; the other calls are held until then
SIZES = ((1, 1), (8, 5), (64, 32), (150, 100))  # waiting calls and surplus; all share one connection, which allows 256
PROTOCOLS = {"center": 1, "ten-crop": 10}  # name → views
RESERVE = 4  # 1/RESERVE of the queue is reserved for clients that use less than their share
SECOND_SURPLUS = 2  # calls of the second client beyond this reserve
ROOM, STREAMS, IN_A_STREAM = 8, 6, 40  # queue limit in views, streams of each kind, images per stream
POLL_SECONDS = 0.005
BURST = 2000  # concurrent calls on one channel, which starts at most 128 at a time
REFUSED = "RESOURCE_EXHAUSTED, retry later"
TRITON_BURST = Path(__file__).parent / "traffic" / "triton_burst.py"
GOOD_CALLS = 100  # one after the other, before and after
# The median latency of valid calls may afterwards be at most SLOWER times the earlier one plus EXTRA_SECONDS.
SLOWER = 2.0
EXTRA_SECONDS = 0.003


@dataclass(frozen=True)
class Reply:
    """The outcome of a call. seconds: until then; retry_after: seconds, None if the server states none."""

    status: str
    seconds: float
    retry_after: float | None = None
    overloaded: bool = False


def cases(bed: ServerTestBed) -> Iterator[Case]:
    """Yield a case for each queue limit, size and protocol, and one for streams, which wait instead."""
    bounds = (("views", "center"), ("views", "ten-crop"), ("bytes", "center"), ("calls", "center"))
    for waiting, more in SIZES[1:2] if bed.tiny else SIZES:
        for bound, protocol in bounds:
            if bound == "calls" and waiting == 1:  # gRPC counts a call for a while after its answer
                continue
            yield claim(
                f"overload, {bound}, {waiting} + {more}, {protocol}",
                f"with a queue of {waiting} calls ({bound}), {waiting} + {more} calls of one client get exactly {more} "
                "refusals, at once, "
                + ("" if bound == "calls" else "a second client is admitted up to a quarter more, ")
                + "and valid calls keep their latency afterwards",
                {"bound": bound, "waiting": waiting, "more": more, "protocol": protocol},
                5,
                partial(_overload, bed, waiting, more, bound, protocol),
            )
    streams = bed.reduced(STREAMS, 3)
    yield claim(
        "overload, streams",
        f"with a queue of {ROOM} views, {streams} streams and as many evaluations of {IN_A_STREAM} images each wait "
        "for space: no image is refused, and the queue never exceeds its limit by more than a quarter",
        {"room": ROOM, "streams": streams, "in_a_stream": IN_A_STREAM},
        10,
        partial(_streams, bed, streams),
    )
    calls = bed.reduced(BURST, 600)
    yield claim(
        "overload, bursts",
        f"{calls} concurrent calls on one channel through grpc.aio, our client and tritonclient: each is answered or "
        "refused with RESOURCE_EXHAUSTED and RetryInfo",
        {"calls": calls},
        20,
        partial(_bursts, bed, calls),
    )


async def _overload(bed: ServerTestBed, waiting: int, more: int, bound: str, protocol: str) -> Json:
    image = bed.pictures[0].data
    views = waiting * PROTOCOLS[protocol]
    each = {"views": PROTOCOLS[protocol], "bytes": len(image), "calls": 1}[bound]
    room = waiting * each
    fit = 0 if bound == "calls" else room // RESERVE // each  # of the second client
    others = 0 if bound == "calls" else fit + SECOND_SURPLUS
    option = "--max-calls" if bound == "calls" else f"--queue-{bound}"
    control = bed.control()
    with bed.serve(option, str(room), "--max-streams", "512", control=control) as server:  # all calls arrive at once
        good = CheckedCall(server.address, image, protocol if PROTOCOLS[protocol] <= views else "center")
        count = bed.reduced(GOOD_CALLS, 10)
        await good.times(10)
        before = percentiles(await good.times(count))
        replies, second, before_any_answer = await _overloaded(
            server, control, partial(_reply, server, image, protocol), (waiting, more), (fit, others - fit)
        )
        after = percentiles(await good.times(count))
        metrics, _ = await wait_until_settled(server, server.open_files())
        counted = metrics("refusals_total", reason=bound)
    refused, others_refused = (
        [reply for reply in some if reply.status == "RESOURCE_EXHAUSTED"] for some in (replies, second)
    )
    answered, others_answered = (sum(reply.status == "OK" for reply in some) for some in (replies, second))
    return verdict(
        {
            "exactly_the_surplus": len(refused) == more,
            "the_others_answered": answered == waiting,
            "another_client_admitted": others_answered == fit and len(others_refused) == others - fit,
            "each_has_a_retry_delay": all(
                reply.overloaded and reply.retry_after for reply in [*refused, *others_refused]
            ),
            "before_any_answer": before_any_answer,
            "at_once": all(reply.seconds < AT_ONCE for reply in [*refused, *others_refused]),
            "counted": counted == more + others - fit,
            "latency_kept": after["p50_ms"] <= SLOWER * before["p50_ms"] + 1000 * EXTRA_SECONDS,
            "good_calls_answered": not good.failures,
            "nothing_left": not metrics.in_flight(),
        },
        refused=len(refused),
        answered=answered,
        second_client_answered=others_answered,
        second_client_refused=len(others_refused),
        refusals=percentiles([reply.seconds for reply in refused]),
        retry_after_seconds=sorted({reply.retry_after for reply in refused if reply.retry_after is not None})[:5],
        before=before,
        after=after,
        failures=good.failures[:5],
    )


async def _streams(bed: ServerTestBed, count: int) -> Json:
    image = bed.pictures[0].data
    peak = 0.0
    with bed.serve("--queue-views", str(ROOM)) as server:
        calls = [asyncio.create_task(_of_many(server, image, number)) for number in range(2 * count)]
        while not all(call.done() for call in calls):
            peak = max(peak, server.metrics()("waiting_views", model=NAME))
            await asyncio.sleep(POLL_SECONDS)
        found = [call.result() for call in calls]
        metrics, _ = await wait_until_settled(server, server.open_files())
    return verdict(
        {
            "no_image_refused": found == [IN_A_STREAM] * len(found),
            "none_counted": metrics("refusals_total") == 0,
            "never_more_inside": 0 < peak <= ROOM + ROOM // RESERVE,
            "nothing_left": not metrics.in_flight(),
        },
        answered=sum(found),
        asked=IN_A_STREAM * len(found),
        most_views_inside=peak,
        refused=metrics("refusals_total"),
    )


async def _bursts(bed: ServerTestBed, count: int) -> Json:
    picture = bed.folder / "burst.jpg"
    picture.write_bytes(image := bed.pictures[0].data)
    found: dict[str, Counter[str]] = {}
    with bed.serve() as server:
        async with new_channel(server.address) as channel:
            replies = await asyncio.gather(*(_reply(server, image, "center", channel) for _ in range(count)))
            found["grpc_aio"] = Counter(REFUSED if reply.retry_after else reply.status for reply in replies)
        async with AsyncClient(server.address) as client:
            calls = (client.classify(image, protocol="center") for _ in range(count))
            answers = await asyncio.gather(*calls, return_exceptions=True)
            found["prelunet_client"] = Counter(map(_outcome, answers))
        # In a process of its own, because its messages have the same names as ours.
        process = await asyncio.create_subprocess_exec(
            sys.executable, TRITON_BURST, server.address, NAME, str(count), picture, stdout=subprocess.PIPE
        )
        found["tritonclient"] = Counter(json.loads((await process.communicate())[0]))
        metrics, _ = await wait_until_settled(server, server.open_files())
        ended = await asyncio.to_thread(server.stop)
    return verdict(
        {
            "answered_or_told_to_retry": all(outcomes.keys() <= {"OK", REFUSED} for outcomes in found.values()),
            "all_ended": all(outcomes.total() == count and outcomes["OK"] for outcomes in found.values()),
            "nothing_left": not metrics.in_flight(),
            "no_error_in_the_log": not ended.errors,
        },
        **{name: dict(outcomes) for name, outcomes in found.items()},
    )


def _outcome(answer: object) -> str:
    if isinstance(answer, Overloaded) and answer.retry_after:
        return REFUSED
    return f"{type(answer).__name__}: {answer}" if isinstance(answer, BaseException) else "OK"


async def _of_many(server: PreluNetServer, image: bytes, number: int) -> int:
    """Send many images over a stream or an evaluation; return how many were answered."""
    requests_of_images = [pb.ClassifyRequest(image=image, protocol="center")] * IN_A_STREAM
    async with new_channel(server.address) as channel:
        stub = pb_grpc.PreluNetServiceStub(channel)
        if number % 2:
            requests = (
                pb.ClassifyStreamRequest(id=str(place), request=one) for place, one in enumerate(requests_of_images)
            )
            return sum([answer.HasField("response") async for answer in stub.ClassifyStream(requests)])
        start = pb.EvaluateRequest(start=pb.EvaluateStart(dataset="overload", protocol="center"))
        images = (pb.LabelledImage(file=str(place), data=image, label=1) for place in range(IN_A_STREAM))
        messages = [start, *(pb.EvaluateRequest(image=one) for one in images)]
        return sum([answer.report.evaluated async for answer in stub.Evaluate(messages) if answer.HasField("report")])


async def _overloaded(
    server: PreluNetServer,
    control: Path,
    call: Callable[[grpc.aio.Channel], Coroutine[Any, Any, Reply]],
    first: tuple[int, int],
    second: tuple[int, int],
) -> tuple[list[Reply], list[Reply], bool]:
    """Hold the device while two clients call, one after the other; each pair: calls to be admitted and refused.

    Returns their replies, and whether the expected numbers were refused and waited while the device was held.
    """

    async def started(
        channel: grpc.aio.Channel, admitted: int, refused: int, waiting: int
    ) -> tuple[list[asyncio.Task[Reply]], bool]:
        await channel.channel_ready()
        calls = [asyncio.create_task(call(channel)) for _ in range(admitted + refused)]
        enough = await wait_until(lambda: sum(one.done() for one in calls) >= refused, REFUSAL_TIMEOUT)
        inside = await wait_until(lambda: server.metrics()("waiting_images", model=NAME) == waiting, REFUSAL_TIMEOUT)
        return calls, enough and inside

    write_control(control, hold=True)
    async with new_channel(server.address) as one, new_channel(server.address) as other:
        calls, in_time = await started(one, *first, first[0])
        others, others_in_time = await started(other, *second, first[0] + second[0])
        write_control(control)
        return await asyncio.gather(*calls), await asyncio.gather(*others), in_time and others_in_time


async def _reply(server: PreluNetServer, image: bytes, protocol: str, channel: grpc.aio.Channel) -> Reply:
    begun = time.monotonic()
    try:
        await classify(channel, image, protocol)
    except grpc.aio.AioRpcError as failed:
        error = error_from(failed, server.address)
        retry_after = error.retry_after if isinstance(error, Overloaded) else None
        seconds = time.monotonic() - begun
        return Reply(failed.code().name, seconds, retry_after, isinstance(error, Overloaded))
    return Reply("OK", time.monotonic() - begun)
