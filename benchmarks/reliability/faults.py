"""A failing device: the other images of a batch are answered. A lost device ends the server, which reports it first."""

import asyncio
import itertools
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
from benchmarks.reliability.traffic.pictures import marked_picture

DECODING = 0.3  # seconds until all waiting images are decoded and can share a batch
NEIGHBORS = 15
ROUNDS = 5
EXIT = 5  # exit code after the loss of the device
# fault → status of the image that triggers it; None: every image is answered
SPLIT = {
    "error": "INTERNAL", "memory": "RESOURCE_EXHAUSTED", "nan": "FAILED_PRECONDITION", "too many rows": None,
}  # fmt: skip
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
            rounds + (20 if rules == "gpu" else 5),
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
            "a_shared_batch_failed": failures > rounds or fault == "nan",
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
    images_of_batch = [*(images[number % len(images)] for number in range(1, NEIGHBORS + 1)), marked_picture(MARK)]
    calls += [asyncio.create_task(scores_or_status(image)) for image in images_of_batch]
    await wait_until(lambda: server.metrics()("waiting_images", model=NAME) == len(calls))
    await asyncio.sleep(DECODING)
    write_control(control, **broken)
    *answers, marked = await asyncio.gather(*calls)
    return marked if isinstance(marked, str) else "OK", answers


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
