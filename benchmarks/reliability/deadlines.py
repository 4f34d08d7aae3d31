"""Expired and cancelled calls in the queue are never computed."""

import asyncio
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import grpc.aio

from benchmarks.common.runner import Case
from benchmarks.common.server_process import PreluNetServer
from benchmarks.reliability.cases import NAME, Json, ServerTestBed, claim, verdict
from benchmarks.reliability.fault_injection import GPU_PIXELS, write_control
from benchmarks.reliability.traffic.clients import classify, new_channel, status_of, wait_until, wait_until_settled
from prelunet.evaluator.pb.prelunet.v1 import prelunet_pb2 as pb
from prelunet.evaluator.pb.prelunet.v1 import prelunet_pb2_grpc as pb_grpc

GONE = 2.0  # deadline of the expiring calls, in seconds; all calls arrive well before
ROUNDS = 15
OF_A_KIND = 10  # calls of each kind per round
VIEWS = {"center": 1, "ten-crop": 10}


def cases(bed: ServerTestBed) -> Iterator[Case]:
    """Yield one case with the batching rules of a CPU and one with those of a GPU, where batches are staged ahead."""
    rounds = bed.reduced(ROUNDS, 2)
    for rules in ("cpu", "gpu"):
        yield claim(
            f"deadlines and cancellation, rules of a {rules.upper()}",
            "calls that expire or are cancelled while waiting are never computed, all others are, and nothing is left "
            "behind",
            {"rounds": rounds, "of_a_kind": OF_A_KIND, "seed": bed.seed, "rules": rules},
            rounds * 1.5 * GONE + (20 if rules == "gpu" else 5),
            partial(_deadlines, bed, rounds, rules),
        )


async def _deadlines(bed: ServerTestBed, rounds: int, rules: str) -> Json:
    rng = random.Random(bed.seed)
    control = bed.control(**({"gpu": GPU_PIXELS} if rules == "gpu" else {}))
    dropped = answered = computed = in_time = 0
    statuses: Counter[str] = Counter()
    with bed.serve("--threads", "1", control=control) as server:
        files = server.open_files()
        for _ in range(rounds):
            plan = _planned(bed, rng)
            reached, found = await _round(server, control, plan)
            in_time += reached
            statuses.update(found)
            dropped += sum(call.views for call in plan if call.kind != "good")
            answered += sum(call.kind == "good" for call in plan)
            computed += sum(call.views for call in plan if call.kind == "good")
        metrics, more_files = await wait_until_settled(server, files)
    lost = sum(metrics("dropped_views_total", model=NAME, reason=reason) for reason in ("expired", "cancelled"))
    views = metrics("batch_views_sum", model=NAME)
    return verdict(
        {
            "all_waited_when_they_were_gone": in_time == rounds,
            "no_view_computed_late": metrics("late_views_total", model=NAME) == 0,
            "exactly_those_dropped": lost == dropped,
            "exactly_the_others_computed": views == computed,
            "the_others_answered": statuses["OK"] == answered,
            "nothing_left": not metrics.in_flight(),
            "no_file_left_open": more_files <= 0,
        },
        calls=sum(statuses.values()),
        statuses=dict(statuses),
        late_views=metrics("late_views_total", model=NAME),
        dropped_views=lost,
        expected_dropped_views=dropped,
        computed_views=views,
        expected_computed_views=computed,
        left=metrics.in_flight(),
        more_open_files=more_files,
    )


@dataclass(frozen=True)
class _Call:
    """One call. kind: good, expires, cancelled, or stream (which is cancelled)."""

    kind: str
    image: bytes
    protocol: str

    @property
    def images(self) -> int:
        return OF_A_KIND if self.kind == "stream" else 1

    @property
    def views(self) -> int:
        return self.images * VIEWS[self.protocol]


def _planned(bed: ServerTestBed, rng: random.Random) -> list[_Call]:
    """Return the calls of a round; all others wait behind the first one."""
    kinds = ["good", "expires", "cancelled"] * OF_A_KIND + ["stream"]
    rng.shuffle(kinds)
    waiting = [_Call(kind, rng.choice(bed.pictures).data, rng.choice(list(VIEWS))) for kind in kinds]
    return [_Call("good", bed.pictures[0].data, "center"), *waiting]


async def _round(server: PreluNetServer, control: Path, plan: Sequence[_Call]) -> tuple[bool, list[str]]:
    """Hold one call until the impatient ones behind it are gone; return whether all arrived in time, and statuses."""
    before = server.metrics()("batch_views_count", model=NAME)
    write_control(control, hold=True)
    gone = asyncio.Event()
    async with new_channel(server.address) as channel:
        calls = [asyncio.create_task(_make(channel, plan[0], gone))]
        await wait_until(lambda: server.metrics()("batch_views_count", model=NAME) > before)
        calls += [asyncio.create_task(_make(channel, call, gone)) for call in plan[1:]]
        images, good = sum(call.images for call in plan), sum(call.kind == "good" for call in plan)
        in_time = await wait_until(lambda: server.metrics()("waiting_images", model=NAME) == images, 0.9 * GONE)
        gone.set()
        in_time &= await wait_until(lambda: server.metrics()("waiting_images", model=NAME) == good)
        write_control(control)
        return in_time, await asyncio.gather(*calls)


async def _make(channel: grpc.aio.Channel, planned: _Call, gone: asyncio.Event) -> str:
    """Make a call; one that is not good ends before its turn. gone: set when calls are to be cancelled."""
    if planned.kind == "stream":
        request = pb.ClassifyRequest(image=planned.image, protocol=planned.protocol)
        requests = [pb.ClassifyStreamRequest(id=str(number), request=request) for number in range(OF_A_KIND)]
        call = pb_grpc.PreluNetServiceStub(channel).ClassifyStream(requests)
    else:
        options: dict[str, Any] = {"timeout": GONE} if planned.kind == "expires" else {}
        call = classify(channel, planned.image, planned.protocol, **options)
    if planned.kind in {"good", "expires"}:
        return await status_of(call)
    answer = asyncio.create_task(status_of(call.read() if planned.kind == "stream" else call))
    await gone.wait()
    call.cancel()
    return await answer
