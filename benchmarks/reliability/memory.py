"""Memory does not grow with the number of calls; the same check detects a server that leaks."""

import asyncio
import itertools
import statistics
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path

import grpc.aio

from benchmarks.common.runner import Case
from benchmarks.common.server_process import PreluNetServer
from benchmarks.reliability.cases import NAME, Json, ServerTestBed, claim, verdict
from benchmarks.reliability.traffic.clients import CheckedCall, new_channel, peaks_of, wait_until_settled
from benchmarks.reliability.traffic.mixed import ROOMY, Mix
from prelunet.evaluator.pb.prelunet.v1 import prelunet_pb2 as pb
from prelunet.evaluator.pb.prelunet.v1 import prelunet_pb2_grpc as pb_grpc

CALLS = 10_000
LIMIT = 100.0  # MB of growth from the middle of a run to its end, as in Triton's L0_memory_growth
CONCURRENCY = 16  # calls in flight
CONNECTIONS = 4
SAMPLES = 200  # number of samples of the resident memory
MEMORY = ("growth_below_the_limit", "within_the_memory_of_the_start_line")  # conditions that a leak breaks
WINDOW = 0.1  # share of a run over whose samples a median is taken


EVALUATED = 60_000  # images of an evaluation that are all refused
LONG_NAME = 1000 * "\U0001d535"  # of 4 bytes each; a name may have 1024 characters
TEXTS_MB = 4 * 64  # memory limit of 64 MiB of names and refusals: held twice, and copied while they grow


def cases(bed: ServerTestBed) -> Iterator[Case]:
    """Yield a case for each device, the leaking control, and one for the texts of an evaluation."""
    calls = bed.reduced(CALLS, 120)
    for device in ("cpu", "openvino"):
        yield claim(
            f"memory, {device}",
            f"{calls} mixed calls: resident memory grows by less than {LIMIT:g} MB from the middle to the end",
            {"device": device, "calls": calls, "seed": bed.seed},
            calls / 150 + 10,
            partial(_memory, bed, calls, device),
        )
    leak = 100 if bed.tiny else 1
    yield claim(
        "memory, a server that leaks",
        f"the same check detects a server that keeps every picture ({leak} times)",
        {"calls": calls, "seed": bed.seed, "leak": leak},
        calls / 150 + 10,
        partial(_caught, bed, calls, leak),
    )
    yield claim(
        "memory, names of an evaluation",
        f"an evaluation of {EVALUATED} refused images with names of 4 kB ends with INVALID_ARGUMENT, and "
        f"memory grows by less than {TEXTS_MB} MB",
        {"images": EVALUATED},
        15,
        partial(_names, bed),
    )


async def _memory(bed: ServerTestBed, calls: int, device: str = "cpu", control: Path | None = None) -> Json:
    mix = Mix(bed.seed, NAME)
    with bed.serve(*ROOMY, device=device, control=control) as server:
        files = server.open_files()
        samples = await _sampled(server, mix, calls)
        metrics, more_files = await wait_until_settled(server, files)
        alive, promised = server.is_alive(), server.promised_mb
    growth = growth_of(samples)
    return verdict(
        {
            "growth_below_the_limit": growth < LIMIT,
            "within_the_memory_of_the_start_line": max(samples) <= promised,
            "every_call_ended_as_it_should": not mix.wrong,
            "no_view_computed_late": metrics("late_views_total", model=NAME) == 0,
            "nothing_left": not metrics.in_flight() and more_files == 0,
            "alive": alive,
        },
        growth_mb=round(growth, 1),
        at_begin_mb=round(samples[0]),
        at_middle_mb=round(samples[len(samples) // 2]),
        at_end_mb=round(samples[-1]),
        most_mb=round(max(samples)),
        start_line_mb=round(promised),
        calls=sum(mix.counts.values()),
        kinds=dict(mix.counts),
        statuses=dict(mix.statuses),
        wrong=mix.wrong[:10],
        more_open_files=more_files,
    )


async def _sampled(server: PreluNetServer, mix: Mix, calls: int) -> list[float]:
    """Make the calls; return samples of the server's resident memory in MB, evenly spaced over the calls."""
    every = max(1, calls // SAMPLES)
    samples = [server.rss_mb()]
    numbers = iter(range(calls))

    async def client(channel: grpc.aio.Channel) -> None:
        for number in numbers:
            await mix.call(channel)
            if number % every == 0:
                samples.append(server.rss_mb())

    async with AsyncExitStack() as stack:
        channels = [await stack.enter_async_context(new_channel(server.address)) for _ in range(CONNECTIONS)]
        await asyncio.gather(*(client(one) for one in itertools.islice(itertools.cycle(channels), CONCURRENCY)))
    return samples


def growth_of(samples: Sequence[float]) -> float:
    """Return the growth from the middle to the end; each is the median over a tenth of the run."""
    width = max(1, round(WINDOW * len(samples)))
    middle = len(samples) // 2
    return statistics.median(samples[-width:]) - statistics.median(samples[middle : middle + width])


async def _caught(bed: ServerTestBed, calls: int, leak: int) -> Json:
    """Return the result of the control: it holds if the memory conditions failed and no others."""
    result = await _memory(bed, calls, control=bed.control(leak=leak))
    broken = {*result.get("broken", ())}
    caught = "growth_below_the_limit" in broken and broken <= {*MEMORY}
    return {**{key: value for key, value in result.items() if key != "broken"}, "held": caught}


async def _names(bed: ServerTestBed) -> Json:
    def requests() -> Iterator[pb.EvaluateRequest]:
        yield pb.EvaluateRequest(start=pb.EvaluateStart(dataset="names", protocol="center"))
        for number in range(EVALUATED):
            image = pb.LabelledImage(file=LONG_NAME + str(number), data=b"no image", label=1)
            yield pb.EvaluateRequest(image=image)

    status, details = "OK", ""
    with bed.serve() as server:
        files, before = server.open_files(), server.tree_mb()
        async with peaks_of(server) as peaks, new_channel(server.address) as channel:
            try:
                async for _ in pb_grpc.PreluNetServiceStub(channel).Evaluate(requests(), timeout=120):
                    pass
            except grpc.aio.AioRpcError as error:
                status, details = error.code().name, error.details() or ""
        metrics, more_files = await wait_until_settled(server, files)
        state = await CheckedCall(server.address, bed.pictures[0].data).state()
    return verdict(
        {
            "refused_with_the_reason": status == "INVALID_ARGUMENT" and "names and refusals" in details,
            "growth_below_the_limit": peaks["mb"] - before < TEXTS_MB,
            "healthy_afterwards": state == "good",
            "nothing_left": not metrics.in_flight() and more_files == 0,
        },
        status=status,
        error=details[:200],
        most_mb=round(peaks["mb"]),
        at_begin_mb=round(before),
        state=state,
    )
