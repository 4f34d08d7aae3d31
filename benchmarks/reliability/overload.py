"""More calls than may wait: exactly the surplus is refused, at once, and told when to come again.

That holds for the calls of one client, which is a connection. Where it has filled the queue, another one is still let
in, until a quarter more than may wait does.
"""

import asyncio
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import grpc.aio

from benchmarks.common.server_process import ServerProcess
from benchmarks.reliability.cases import NAME, Case, Json, ServerTestBed, verdict
from benchmarks.reliability.clients import (
    CheckedCall,
    classify,
    new_channel,
    percentiles,
    wait_until,
    wait_until_settled,
)
from benchmarks.reliability.fault_injection import write_control
from prelunet.evaluator.errors import Overloaded
from prelunet.evaluator.pb.prelunet.v1 import prelunet_pb2 as pb
from prelunet.evaluator.pb.prelunet.v1 import prelunet_pb2_grpc as pb_grpc
from prelunet.evaluator.rpc.status import error_from

AT_ONCE = 0.5  # seconds in which a refusal has to be there, with all the calls that come at the same moment
REFUSAL_TIMEOUT = 10.0  # seconds for all of them; the others are held until then
SIZES = ((1, 1), (8, 5), (64, 32), (150, 100))  # q and k; all calls go over one connection, which takes 256
PROTOCOLS = {"center": 1, "ten-crop": 10}  # name → views
RESERVE = 4  # one part in so many of what may wait is kept for clients that have less than their share
MORE_THAN_FIT = 2  # calls of the second client beyond those for which there is such room
ROOM, STREAMS, IN_A_STREAM = 8, 6, 40  # views, of each kind, images
GLANCE = 0.005  # seconds
GOOD_CALLS = 100  # one after the other, before and after
SLOWER = 2.0  # times as long may the median of good calls be afterwards, and
MORE = 0.003  # so many seconds more


@dataclass(frozen=True)
class Reply:
    """What became of a call. seconds: until then; retry_after: seconds, None where nothing is said of it."""

    status: str
    seconds: float
    retry_after: float | None = None
    overloaded: bool = False


def cases(bed: ServerTestBed) -> Iterator[Case]:
    """Return a case for each bound of the queue, size and protocol, and one for streams, which wait instead."""
    bounds = (("views", "center"), ("views", "ten-crop"), ("bytes", "center"), ("calls", "center"))
    for waiting, more in SIZES[1:2] if bed.tiny else SIZES:
        for bound, protocol in bounds:
            if bound == "calls" and waiting == 1:  # a call counts until gRPC has done with it, after its answer
                continue
            yield Case(
                f"overload, {bound}, {waiting} + {more}, {protocol}",
                f"with room for {waiting} calls ({bound}), {waiting} + {more} calls of one client give exactly {more} "
                "refusals, at once, "
                + ("" if bound == "calls" else "a second client is let in up to a quarter more, ")
                + "and good calls keep their latency afterwards",
                {"bound": bound, "waiting": waiting, "more": more, "protocol": protocol},
                8,
                lambda waiting=waiting, more=more, bound=bound, protocol=protocol: asyncio.run(
                    _overload(bed, waiting, more, bound, protocol)
                ),
            )
    streams = bed.reduced(STREAMS, 3)
    yield Case(
        "overload, streams",
        f"with room for {ROOM} views, {streams} streams and as many evaluations of {IN_A_STREAM} images each wait for "
        "room: no image is refused, and never more than the room and a quarter are inside",
        {"room": ROOM, "streams": streams, "in_a_stream": IN_A_STREAM},
        10,
        lambda: asyncio.run(_streams(bed, streams)),
    )


async def _overload(bed: ServerTestBed, waiting: int, more: int, bound: str, protocol: str) -> Json:
    image = bed.pictures[0].data
    views = waiting * PROTOCOLS[protocol]
    each = {"views": PROTOCOLS[protocol], "bytes": len(image), "calls": 1}[bound]
    room = waiting * each
    fit = 0 if bound == "calls" else room // RESERVE // each  # of the second client
    others = 0 if bound == "calls" else fit + MORE_THAN_FIT
    option = "--max-calls" if bound == "calls" else f"--queue-{bound}"
    control = bed.control()
    with bed.serve_with_faults(control, option, str(room)) as server:
        good = CheckedCall(server.address, image, protocol if PROTOCOLS[protocol] <= views else "center")
        count = bed.reduced(GOOD_CALLS, 10)
        await good.times(10)
        before = percentiles(await good.times(count))
        held = _HeldServer(server, control, (image, protocol))
        replies, second, before_any_answer = await held.ask((waiting, more), (fit, others - fit))
        after = percentiles(await good.times(count))
        metrics, _ = await wait_until_settled(server, server.open_files())
        counted = metrics("refusals_total", reason=bound)
    refused, others_refused = _refused(replies), _refused(second)
    return verdict(
        {
            "exactly_the_surplus": len(refused) == more,
            "the_others_answered": _answered(replies) == waiting,
            "another_client_let_in": _answered(second) == fit and len(others_refused) == others - fit,
            "each_says_when_to_come_again": all(
                reply.overloaded and reply.retry_after for reply in [*refused, *others_refused]
            ),
            "before_any_answer": before_any_answer,
            "at_once": all(reply.seconds < AT_ONCE for reply in [*refused, *others_refused]),
            "counted": counted == more + others - fit,
            "latency_kept": after["p50_ms"] <= SLOWER * before["p50_ms"] + 1000 * MORE,
            "good_calls_answered": not good.failures,
            "nothing_left": not metrics.in_flight(),
        },
        refused=len(refused),
        answered=_answered(replies),
        second_client_answered=_answered(second),
        second_client_refused=len(others_refused),
        refusals=percentiles([reply.seconds for reply in refused]),
        retry_after_seconds=sorted({reply.retry_after for reply in refused if reply.retry_after is not None})[:5],
        before=before,
        after=after,
        failures=good.failures[:5],
    )


async def _streams(bed: ServerTestBed, count: int) -> Json:
    image = bed.pictures[0].data
    most = 0.0
    with bed.serve("--queue-views", str(ROOM)) as server:
        calls = [asyncio.create_task(_of_many(server, image, number)) for number in range(2 * count)]
        while not all(call.done() for call in calls):
            most = max(most, server.metrics()("waiting_views", model=NAME))
            await asyncio.sleep(GLANCE)
        found = [call.result() for call in calls]
        metrics, _ = await wait_until_settled(server, server.open_files())
    return verdict(
        {
            "no_image_refused": found == [IN_A_STREAM] * len(found),
            "none_counted": metrics("refusals_total") == 0,
            "never_more_inside": 0 < most <= ROOM + ROOM // RESERVE,
            "nothing_left": not metrics.in_flight(),
        },
        answered=sum(found),
        asked=IN_A_STREAM * len(found),
        most_views_inside=most,
        refused=metrics("refusals_total"),
    )


async def _of_many(server: ServerProcess, image: bytes, number: int) -> int:
    """Ask for many images by a stream, or by an evaluation; returns how many have their answer."""
    asked = [pb.ClassifyRequest(image=image, protocol="center")] * IN_A_STREAM
    async with new_channel(server.address) as channel:
        stub = pb_grpc.PreluNetServiceStub(channel)
        if number % 2:
            requests = (pb.ClassifyStreamRequest(id=str(place), request=one) for place, one in enumerate(asked))
            return sum([answer.HasField("response") async for answer in stub.ClassifyStream(requests)])
        start = pb.EvaluateRequest(start=pb.EvaluateStart(dataset="overload", protocol="center"))
        images = (pb.LabelledImage(file=str(place), data=image, label=1) for place in range(IN_A_STREAM))
        messages = [start, *(pb.EvaluateRequest(image=one) for one in images)]
        return sum([answer.report.evaluated async for answer in stub.Evaluate(messages) if answer.HasField("report")])


def _refused(replies: Sequence[Reply]) -> list[Reply]:
    return [reply for reply in replies if reply.status == "RESOURCE_EXHAUSTED"]


def _answered(replies: Sequence[Reply]) -> int:
    return sum(reply.status == "OK" for reply in replies)


@dataclass(frozen=True)
class _HeldServer:
    """A server whose device is held while calls come. asked: image and protocol of each."""

    server: ServerProcess
    control: Path
    asked: tuple[bytes, str]

    async def ask(self, first: tuple[int, int], second: tuple[int, int]) -> tuple[list[Reply], list[Reply], bool]:
        """Make the calls of two clients, one after the other; each pair: how many should be let in, and refused.

        Returns their replies, and whether all refusals came while the device was held.
        """
        write_control(self.control, hold=True)
        async with new_channel(self.server.address) as one, new_channel(self.server.address) as other:
            calls, came = await self._wait(one, first, first[0])
            more, too = await self._wait(other, second, first[0] + second[0])
            write_control(self.control)
            return await asyncio.gather(*calls), await asyncio.gather(*more), came and too

    async def _wait(
        self, channel: grpc.aio.Channel, wanted: tuple[int, int], waiting: int
    ) -> tuple[list["asyncio.Task[Reply]"], bool]:
        """Begin the calls of one client; returns them, and whether as many were refused, and waited, as should."""
        await channel.channel_ready()
        calls = [asyncio.create_task(_reply(self.server, channel, *self.asked)) for _ in range(sum(wanted))]
        came = await wait_until(lambda: sum(call.done() for call in calls) >= wanted[1], REFUSAL_TIMEOUT)
        inside = await wait_until(
            lambda: self.server.metrics()("waiting_images", model=NAME) == waiting, REFUSAL_TIMEOUT
        )
        return calls, came and inside


async def _reply(server: ServerProcess, channel: grpc.aio.Channel, image: bytes, protocol: str) -> Reply:
    begun = time.monotonic()
    try:
        await classify(channel, image, protocol)
    except grpc.aio.AioRpcError as failed:
        error = error_from(failed, server.address)
        retry_after = error.retry_after if isinstance(error, Overloaded) else None
        seconds = time.monotonic() - begun
        return Reply(failed.code().name, seconds, retry_after, isinstance(error, Overloaded))
    return Reply("OK", time.monotonic() - begun)
