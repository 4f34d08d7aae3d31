"""Pictures of different shapes share batches, and the first call of a shape is not slow."""

import asyncio
import itertools
import statistics
from collections.abc import Iterator
from functools import partial

import grpc.aio

from benchmarks.common.runner import Case
from benchmarks.common.server_process import PreluNetServer
from benchmarks.reliability.cases import NAME, Json, ServerTestBed, claim, verdict
from benchmarks.reliability.fault_injection import GPU_PIXELS
from benchmarks.reliability.traffic.clients import CALL_SECONDS, classify, new_channel
from benchmarks.reliability.traffic.pictures import encoded, pixels
from prelunet.evaluator.pb.prelunet.v1 import prelunet_pb2 as pb
from prelunet.evaluator.pb.prelunet.v1 import prelunet_pb2_grpc as pb_grpc

CLIENTS = 16
CALLS = 1000
ALTERNATING = ((40, 57), (57, 40), (33, 61), (96, 64))
PROTOCOL = "dense-40"  # the whole picture, so that each shape has its own canvases
FIRST_SHAPES = ((120, 160), (160, 120), (113, 200), (150, 150), (100, 300))
FIRST_PROTOCOLS = ("center", "ten-crop", "dense-56", "multi-scale")
STARTS = 5  # server starts, each with a first call of every shape
STEADY = 15  # later calls of a shape; the first is compared with their median
SLOWER = 2.0
NOISE = 0.002  # seconds; calls of a few milliseconds vary by as much


def cases(bed: ServerTestBed) -> Iterator[Case]:
    """Yield the cases."""
    calls = bed.reduced(CALLS, 100)
    for rules in ("cpu", "gpu"):
        yield claim(
            f"mixed shapes share batches, rules of a {rules.upper()}",
            f"{CLIENTS} clients with pictures of {len(ALTERNATING)} alternating shapes: mean batch above one view",
            {"rules": rules, "calls": calls},
            calls / 100 + 15,
            partial(_shared, bed, rules, calls),
        )
    starts = bed.reduced(STARTS, 1)
    yield claim(
        "first call of each shape",
        f"after READY the first call of a shape takes at most {SLOWER:g} times as long as later ones, plus "
        f"{1000 * NOISE:g} ms (CPU)",
        {"starts": starts, "steady": STEADY},
        starts * 8,
        partial(_first_calls, bed, starts),
    )


async def _shared(bed: ServerTestBed, rules: str, calls: int) -> Json:
    images = [encoded(pixels(*shape, number), "JPEG") for number, shape in enumerate(ALTERNATING)]
    faults = {"gpu": GPU_PIXELS} if rules == "gpu" else {}
    with bed.serve(control=bed.control(**faults)) as server:
        turns = itertools.islice(itertools.cycle(images), calls)
        failures: list[str] = []

        async def client(channel: grpc.aio.Channel) -> None:
            for image in turns:
                try:
                    await classify(channel, image, PROTOCOL)
                except grpc.aio.AioRpcError as error:
                    failures.append(f"{error.code().name}: {error.details()}")

        async with new_channel(server.address) as channel:
            await asyncio.gather(*(client(channel) for _ in range(CLIENTS)))
        metrics = server.metrics()
    views, batches = (metrics(f"batch_views_{what}", model=NAME) for what in ("sum", "count"))
    padding = 1 - metrics("view_pixels_total", model=NAME) / metrics("canvas_pixels_total", model=NAME)
    return verdict(
        {"more_than_one_view_in_a_batch": views / batches > 1, "no_call_failed": not failures},
        mean_batch=round(views / batches, 2),
        batches=batches,
        views=views,
        padding=round(padding, 3),
        canvas_changes=metrics("canvas_changes_total", model=NAME),
        failures=failures[:5],
    )


async def _first_calls(bed: ServerTestBed, starts: int) -> Json:
    """Compare on fresh servers; the median over the starts counts for each shape."""
    firsts: dict[str, list[float]] = {}
    steadies: dict[str, list[float]] = {}
    for start in range(starts):
        with bed.serve() as server:
            for name, first, steady in await _of_one_start(server, start):
                firsts.setdefault(name, []).append(first)
                steadies.setdefault(name, []).append(steady)
    found = {name: (statistics.median(firsts[name]), statistics.median(steadies[name])) for name in firsts}
    slow = {name: times for name, times in found.items() if times[0] > SLOWER * times[1] + NOISE}
    worst = max(found, key=lambda name: found[name][0] / found[name][1])
    return verdict(
        {"first_calls_are_not_slow": not slow},
        shapes=len(found),
        worst=worst,
        worst_ratio=round(found[worst][0] / found[worst][1], 2),
        median_ratio=round(statistics.median(first / steady for first, steady in found.values()), 2),
        slow={name: [round(1000 * one, 2) for one in times] for name, times in slow.items()},
        ms={name: [round(1000 * one, 2) for one in times] for name, times in found.items()},
    )


async def _of_one_start(server: PreluNetServer, start: int) -> list[tuple[str, float, float]]:
    """Return for each shape the seconds of the first call and of later ones, as the server reports them."""
    found = []
    shapes = [(shape, protocol) for protocol in FIRST_PROTOCOLS for shape in FIRST_SHAPES]
    shapes = shapes[start % len(shapes) :] + shapes[: start % len(shapes)]  # each start begins with another shape
    async with new_channel(server.address) as channel:
        await pb_grpc.PreluNetServiceStub(channel).GetModel(pb.GetModelRequest(), timeout=CALL_SECONDS)
        for (height, width), protocol in shapes:
            image = encoded(pixels(height, width, start), "JPEG")
            times = [(await classify(channel, image, protocol)).timings.total_seconds for _ in range(1 + STEADY)]
            found.append((f"{protocol} {height}x{width}", times[0], statistics.median(times[1:])))
    return found
