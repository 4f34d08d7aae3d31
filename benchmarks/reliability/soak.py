"""A long random mix of everything clients do, after Triton's L0_long_running_stress: no valid call fails."""

import asyncio
import random
import subprocess
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from functools import partial

from benchmarks.common.results import environment
from benchmarks.common.runner import Case
from benchmarks.common.server_process import PRELUNET, PreluNetServer
from benchmarks.reliability.cases import NAME, Json, ServerTestBed, claim, verdict
from benchmarks.reliability.memory import LIMIT, growth_of
from benchmarks.reliability.traffic.clients import (
    CheckedCall,
    kill_a_client,
    new_channel,
    percentiles,
    wait_until_settled,
)
from benchmarks.reliability.traffic.mixed import ROOMY, Mix

CLIENTS = 8
PICTURE = "soak.jpg"  # sent by killed clients
BURST = 20  # maximum number of calls of a scenario
DOCTOR_SECONDS = 120.0
SAMPLE = 0.5  # seconds between two samples of the resident memory


def cases(bed: ServerTestBed) -> Iterator[Case]:
    """Yield the one case."""
    seconds = min(bed.soak_seconds, 5.0) if bed.tiny else bed.soak_seconds
    yield claim(
        "soak",
        f"{seconds:g} s of a random mix (valid, odd, hostile, impatient, killed clients, streams, evaluations, "
        "doctor): no valid call fails, nothing is left behind",
        {"seconds": seconds, "clients": CLIENTS, "seed": bed.seed},
        seconds + 15,
        partial(_soak, bed, seconds),
    )


async def _soak(bed: ServerTestBed, seconds: float) -> Json:
    mix, counts, wrong = Mix(bed.seed, NAME), Counter[str](), list[str]()
    samples: list[float] = []
    (bed.folder / PICTURE).write_bytes(max(mix.good, key=len))
    with bed.serve(*ROOMY) as server:
        files = server.open_files()
        good = CheckedCall(server.address, bed.pictures[0].data)
        end = time.monotonic() + seconds

        async def client(number: int) -> None:
            rng = random.Random(f"{bed.seed} {number}")
            while time.monotonic() < end:
                name = rng.choices(list(SCENARIOS), [share for share, _ in SCENARIOS.values()])[0]
                counts[name] += 1
                await SCENARIOS[name][1](_ScenarioContext(server, bed, mix, rng, wrong))

        async def watch() -> None:
            while time.monotonic() < end:
                samples.append(server.rss_mb())
                await asyncio.sleep(SAMPLE)

        async with good.in_background(pause=0.1):
            await asyncio.gather(watch(), *(client(number) for number in range(CLIENTS)))
        metrics, more_files = await wait_until_settled(server, files)
        state = await good.state()
        ended = await asyncio.to_thread(server.stop)
    growth = growth_of(samples)
    return verdict(
        {
            "no_good_call_failed": not good.failures,
            "every_call_ended_as_it_should": not (wrong or mix.wrong),
            "healthy_afterwards": state == "good",
            "nothing_left": not metrics.in_flight() and not more_files,
            "no_view_computed_late": metrics("late_views_total", model=NAME) == 0,
            "memory_bounded": growth < LIMIT,
            "no_error_in_the_log": not ended.errors,
            "exit_code_0": ended.code == 0,
        },
        calls=sum(mix.counts.values()),
        scenarios=dict(counts),
        statuses=dict(mix.statuses),
        good_calls=len(good.latencies),
        good=percentiles(good.latencies),
        growth_mb=round(growth, 1),
        wrong=[*good.failures, *wrong, *mix.wrong][:10],
        state=state,
        more_open_files=more_files,
        log=ended.errors[:5],
    )


@dataclass(frozen=True)
class _ScenarioContext:
    """The context of a scenario. wrong: failures besides those of the mix."""

    server: PreluNetServer
    bed: ServerTestBed
    mix: Mix
    rng: random.Random
    wrong: list[str]

    async def calls(self, kind: str | None = None, times: int = BURST) -> None:
        """Make concurrent calls of one kind, or of any, on a new connection."""
        async with new_channel(self.server.address) as channel:
            await asyncio.gather(*(self.mix.call(channel, kind) for _ in range(self.rng.randint(1, times))))


async def _killed(scene: _ScenarioContext) -> None:
    """Start a client process and kill it during its calls."""
    kind = scene.rng.choice(("classify", "stream", "evaluate"))
    await kill_a_client(scene.server.address, kind, scene.bed.folder / PICTURE, scene.rng.uniform(0, 0.3))


async def _doctor(scene: _ScenarioContext) -> None:
    """Run `prelunet doctor` against the server, as an operator would."""
    process = await asyncio.create_subprocess_exec(
        *PRELUNET, "doctor", "--server", scene.server.address, "--port", "0", "--device", "cpu", "--timeout", "60",
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment(),
    )  # fmt: skip
    output, _ = await asyncio.wait_for(process.communicate(), DOCTOR_SECONDS)
    if process.returncode != 0:
        scene.wrong.append(f"doctor exited with {process.returncode}: {output.decode()[-300:]}")


async def _left_connection(scene: _ScenarioContext) -> None:
    """Close a connection during its calls."""
    channel = new_channel(scene.server.address)
    kinds = ("good", "stream", "evaluation")
    calls = [asyncio.create_task(scene.mix.cut_off(channel, scene.rng.choice(kinds))) for _ in range(BURST // 4)]
    await asyncio.sleep(scene.rng.uniform(0, 0.1))
    await channel.close()
    await asyncio.gather(*calls)


# name → share and function
SCENARIOS: dict[str, tuple[float, Callable[[_ScenarioContext], Awaitable[None]]]] = {
    "valid": (30, lambda scene: scene.calls("good")),
    "mixed": (25, lambda scene: scene.calls()),
    "odd": (10, lambda scene: scene.calls("odd")),
    "hostile images": (8, lambda scene: scene.calls("hostile image")),
    "impatient": (8, lambda scene: scene.calls("impatient")),
    "cancelled": (6, lambda scene: scene.calls("cancelled")),
    "streams": (6, lambda scene: scene.calls("stream", 4)),
    "evaluations": (4, lambda scene: scene.calls("evaluation", 4)),
    "heat maps": (2, lambda scene: scene.calls("heat map", 2)),
    "connection closed under calls": (4, _left_connection),
    "killed client": (2, _killed),
    "doctor": (1, _doctor),
}
