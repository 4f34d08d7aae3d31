"""A failing device or decoder: other images are answered. A lost device ends the server, which reports it first."""

import asyncio
import itertools
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from benchmarks.common.runner import Case
from benchmarks.common.server_process import PreluNetServer
from benchmarks.reliability.cases import NAME, Json, ServerTestBed, claim, verdict
from benchmarks.reliability.fault_injection import GPU_PIXELS, MARK, write_control
from benchmarks.reliability.traffic.clients import (
    NOT_SERVING,
    SERVING,
    CheckedCall,
    classify,
    new_channel,
    same_scores,
    scores_of,
    status_of,
    wait_until,
    wait_until_settled,
)
from benchmarks.reliability.traffic.pictures import encoded, marked_picture, pixels

DECODING = 0.3  # seconds until all waiting images are decoded and can share a batch
NEIGHBORS = 15
ROUNDS = 5
EXIT = 5  # exit code after the loss of the device
# fault → status of the image that triggers it; None: every image is answered
SPLIT = {
    "error": "INTERNAL", "memory": "RESOURCE_EXHAUSTED", "nan": "FAILED_PRECONDITION", "too many rows": None,
}  # fmt: skip
KILLING = 30.0  # seconds in which decoding processes are killed
CLIENTS, EXPENSIVE = 16, 0.3  # clients meanwhile, and their share of images that are decoded in these processes
ROWS = 4  # canvases that fit into memory in the case "too many rows"


def cases(bed: ServerTestBed) -> Iterator[Case]:
    """Yield a case for each fault."""
    rounds = bed.reduced(ROUNDS, 1)
    for rules, (fault, status) in itertools.product(("cpu", "gpu"), SPLIT.items()):
        yield claim(
            f"fault: {fault}" + ", rules of a GPU" * (rules == "gpu"),
            f"{fault} in a batch: "
            + (f"only the picture that triggers it fails, with {status}" if status else "it is split until it fits"),
            {"fault": fault, "rounds": rounds, "rules": rules},
            rounds + (10 if rules == "gpu" else 5),
            partial(_split, bed, fault, status, rounds, rules),
        )
    for fault in ("lost", "sticky"):
        yield claim(
            f"fault: {fault}",
            f"{fault} device: health reports NOT_SERVING, calls get UNAVAILABLE, the process exits with {EXIT}",
            {"fault": fault},
            10,
            partial(_lost, bed, fault),
        )
    seconds = 3.0 if bed.tiny else KILLING
    yield claim(
        "fault: killed decoders",
        f"SIGKILL to random decoding processes, every 50 to 200 ms, under {CLIENTS} clients: images that are easy to "
        "decode are answered, the others too or refused with INVALID_ARGUMENT, and nothing is left behind",
        {"fault": "killed decoders", "seconds": seconds, "seed": bed.seed},
        seconds + 5,
        partial(_killed_decoders, bed, seconds),
    )


async def _split(bed: ServerTestBed, fault: str, expected: str | None, rounds: int, rules: str) -> Json:
    """Let batches of good pictures and a marked one fail."""
    images = [picture.data for picture in bed.pictures]
    control = bed.control(**({"gpu": GPU_PIXELS} if rules == "gpu" else {}))
    found: list[str] = []
    wrong = 0
    with bed.serve(control=control) as server:
        async with new_channel(server.address) as channel:
            right = [scores_of(await classify(channel, image, top_k=10)) for image in images]
            broken = {"rows": ROWS} if expected is None else {"fault": fault}
            for _ in range(rounds):
                marked, answers = await _together(server, channel, control, broken, images)
                found.append(marked)
                wrong += sum(
                    isinstance(answer, str) or not same_scores(answer, right[number % len(right)])
                    for number, answer in enumerate(answers)
                )
        metrics, _ = await wait_until_settled(server, server.open_files())
        state = await CheckedCall(server.address, images[0]).state()
        failures = sum(metrics("batch_failures_total", model=NAME, reason=reason) for reason in ("error", "memory"))
    return verdict(
        {
            "neighbors_answered_correctly": wrong == 0,
            "expected_status": set(found) == {expected or "OK"},
            # The marked picture also fails once alone.
            "a_shared_batch_failed": fault == "nan" or failures >= rounds * (1 if expected is None else 2),
            "healthy_afterwards": state == "good",
            "nothing_left": not metrics.in_flight(),
        },
        neighbours=rounds * (NEIGHBORS + 1),
        neighbours_failed=wrong,
        status_of_the_one=sorted(set(found)),
        failed_batches=failures,
        mean_batch=round(metrics("batch_views_sum", model=NAME) / metrics("batch_views_count", model=NAME), 2),
        state=state,
    )


async def _together(
    server: PreluNetServer, channel: grpc.aio.Channel, control: Path, broken: Json, images: list[bytes]
) -> tuple[str, list[dict[int, float] | str]]:
    """Classify good pictures and the marked one in one batch; return the marked one's status and the other answers."""

    async def scores_or_status(image: bytes) -> dict[int, float] | str:
        try:
            return scores_of(await classify(channel, image, top_k=10))
        except grpc.aio.AioRpcError as error:
            return error.code().name

    before = server.metrics()("batch_views_count", model=NAME)
    write_control(control, hold=True)
    calls = [asyncio.create_task(scores_or_status(images[0]))]
    await wait_until(lambda: server.metrics()("batch_views_count", model=NAME) > before)
    neighbors = [images[number % len(images)] for number in range(1, NEIGHBORS + 1)]
    images_of_batch = [marked_picture(MARK), *neighbors]  # first: lanes leave the last one a batch of its own
    calls += [asyncio.create_task(scores_or_status(image)) for image in images_of_batch]
    await wait_until(lambda: server.metrics()("waiting_images", model=NAME) == len(calls))
    await asyncio.sleep(DECODING)
    write_control(control, **broken)
    first, marked, *answers = await asyncio.gather(*calls)
    return marked if isinstance(marked, str) else "OK", [first, *answers]


async def _lost(bed: ServerTestBed, fault: str) -> Json:
    """Lose the device while calls wait, and check how the process ends."""
    control = bed.control()
    with bed.serve("--lame-duck", "30", control=control) as server:
        async with new_channel(server.address) as channel:
            await classify(channel, bed.pictures[0].data)
            watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
            first = (await watch.read()).status
            write_control(control, delay=0.3, fault=fault)  # so that most calls wait when it happens
            images = [marked_picture(MARK), *(picture.data for picture in bed.pictures)]
            calls = [asyncio.create_task(status_of(classify(channel, image))) for image in images]
            then = (await watch.read()).status
            statuses = await asyncio.gather(*calls)
        ended = await asyncio.to_thread(server.wait)
    return verdict(
        {
            "health_reports_it": (first, then) == (SERVING, NOT_SERVING),
            "calls_get_unavailable": set(statuses) <= {"UNAVAILABLE", "OK"} and "UNAVAILABLE" in statuses,
            "exit_code": ended.code == EXIT,
        },
        exit_code=ended.code,
        statuses={status: statuses.count(status) for status in sorted(set(statuses))},
    )


async def _killed_decoders(bed: ServerTestBed, seconds: float) -> Json:
    rng = random.Random(bed.seed)
    easy = bed.easy_pictures
    expensive = [encoded(pixels(side, side, side), "WEBP") for side in (50, 1000, 2500)]
    statuses: dict[str, Counter[str]] = {"easy": Counter(), "expensive": Counter()}
    kills = 0

    async def client(address: str) -> None:
        async with new_channel(address) as channel:
            while time.monotonic() < end:
                kind, images = ("expensive", expensive) if rng.random() < EXPENSIVE else ("easy", easy)
                statuses[kind][await status_of(classify(channel, rng.choice(images)))] += 1

    with bed.serve() as server:
        files, good, end = server.open_files(), CheckedCall(server.address, expensive[0]), time.monotonic() + seconds
        clients = [asyncio.create_task(client(server.address)) for _ in range(CLIENTS)]
        while time.monotonic() < end:
            await asyncio.sleep(rng.uniform(0.05, 0.2))
            if children := server.children():
                os.kill(rng.choice(children), signal.SIGKILL)
                kills += 1
        await asyncio.gather(*clients)
        state = await good.state()
        metrics, more_files = await wait_until_settled(server, files)
        zombies = sum("\nState:\tZ" in Path(f"/proc/{pid}/status").read_text() for pid in server.children())
        stopped = await asyncio.to_thread(server.stop)
    return verdict(
        {
            "easy_images_answered": statuses["easy"].keys() == {"OK"},
            "the_others_answered_or_refused": statuses["expensive"].keys() <= {"OK", "INVALID_ARGUMENT"},
            "processes_killed": kills > seconds / 2,
            "healthy_afterwards": state == "good",
            "nothing_left": not (metrics.in_flight() or more_files or zombies),
            "no_error_in_the_log": not stopped.errors,
        },
        kills=kills,
        easy=dict(statuses["easy"]),
        expensive=dict(statuses["expensive"]),
        state=state,
        zombies=zombies,
        more_open_files=more_files,
        log=stopped.errors[:5],
    )
