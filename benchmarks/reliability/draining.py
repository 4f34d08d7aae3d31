"""Stopping under load.

Health reports NOT_SERVING first. Calls still work in the lame-duck window. After it new calls are refused before the
port closes. Every accepted call is answered, and the exit code is 0.
"""

import asyncio
import random
import signal
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from itertools import cycle, islice
from typing import Any

import grpc.aio
import httpx
from grpc_health.v1 import health_pb2, health_pb2_grpc

from benchmarks.common.results import environment
from benchmarks.common.runner import Case
from benchmarks.common.server_process import PRELUNET, PreluNetServer, ProcessExit, ServerProcess, free_port
from benchmarks.reliability.cases import NAME, Json, ServerTestBed, claim, verdict
from benchmarks.reliability.traffic.clients import CALL_SECONDS, NOT_SERVING, SERVING, classify, new_channel
from prelunet.evaluator.client import Client
from prelunet.evaluator.errors import NotReady, PreluNetError
from prelunet.evaluator.pb.prelunet.v1 import prelunet_pb2 as pb
from prelunet.evaluator.pb.prelunet.v1 import prelunet_pb2_grpc as pb_grpc
from prelunet.evaluator.rpc.status import error_from, is_unreachable

DRAINS = 12
SIGNALS = ("SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2", "SIGINT")  # of the drains, in turn
KILLS, ROLLING = 20, 3
LATE = 0.5  # seconds after the server is ready in which a waiting call must be answered
SLOWEST = 1.0  # seconds of a call while one of two servers restarts
EARLY, EARLIEST, LATEST = 20, 0.05, 0.4  # starts; seconds after which SIGTERM comes; Python itself takes the first 0.03
WINDOW = 1.0  # seconds of lame duck
CLIENTS = 8
MAX_LOAD_SECONDS = 0.8  # the signal comes at a random moment of this load
BURST = 120  # calls just before the window ends: more than can be answered; their views fit into the queue
BEYOND = 0.7  # seconds by which an evaluation outlasts the window
CALL_TIMEOUT = 120.0  # seconds for a call, including a restart of the server


def cases(bed: ServerTestBed) -> Iterator[Case]:
    """Yield the cases."""
    drains, kills = bed.reduced(DRAINS, 1), bed.reduced(KILLS, 1)
    yield claim(
        "drain",
        f"a signal under load at {drains} random moments, {', '.join(SIGNALS[:drains])} in turn: health reports "
        "NOT_SERVING first, new calls and connections work in the lame-duck window, then new calls are refused with "
        "UNAVAILABLE before the port closes, every accepted call is answered, exit code 0",
        {"drains": drains, "clients": CLIENTS, "window": WINDOW, "seed": bed.seed},
        drains * 6,
        partial(_drains, bed, drains),
    )
    yield claim(
        "kill and restart",
        f"SIGKILL under load and a restart, {kills} times: no call of evaluator.client fails, and those that wait are "
        f"answered within {LATE:g} s of the server's start",
        {"kills": kills, "clients": CLIENTS, "seed": bed.seed},
        kills * 3,
        partial(_restarts, bed, kills, rolling=False),
    )
    rolling = bed.reduced(ROLLING, 1)
    yield claim(
        "rolling restarts",
        f"SIGTERM under load and a restart of each of two servers, {rolling} times: no call of evaluator.client fails "
        f"or takes more than {SLOWEST:g} s",
        {"restarts": rolling, "clients": CLIENTS, "seed": bed.seed},
        rolling * 12,
        partial(_restarts, bed, rolling, rolling=True),
    )
    early = bed.reduced(EARLY, 2)
    yield claim(
        "SIGTERM while starting",
        f"SIGTERM at {early} random moments {EARLIEST:g} to {LATEST:g} s after the start: exit code 0, no error",
        {"starts": early, "seed": bed.seed},
        early * 0.5,
        partial(_early, bed, early),
    )


@dataclass
class _DrainRecord:
    """Observations of one drain. Times: seconds after the signal.

    signalled: moment of the signal on the clock of time.monotonic(), 0 before it; refused: calls refused because the
    server stops; came_too_late: calls that found the port closed; failures: calls that ended in any other way without
    an answer.
    """

    signalled: float = 0.0
    calls: int = 0
    in_window: int = 0
    new_connections: int = 0
    refused: int = 0
    came_too_late: int = 0
    first_refusal: str = ""
    failures: list[str] = field(default_factory=list)
    health_after: float = -1.0
    after_closing: int = 0
    evaluated: int = -1
    took: float = 0.0
    exit: ProcessExit | None = None

    @property
    def window_over(self) -> bool:
        """Return whether calls may be refused."""
        return bool(self.signalled) and time.monotonic() >= self.signalled + WINDOW

    def answered(self, begun: float) -> None:
        """Count an answered call. begun: when it was made."""
        self.calls += 1
        self.in_window += bool(self.signalled) and self.signalled < begun < self.signalled + WINDOW
        self.after_closing += begun < self.signalled + WINDOW < time.monotonic()

    def note(self, who: str, error: grpc.aio.AioRpcError) -> str:
        """Count a call without an answer and return its outcome: refused, late, or lost.

        A server may refuse calls and close its port only after the window.
        """
        if self.window_over and isinstance(error_from(error, ""), NotReady):
            self.refused += 1
            return "refused"
        if self.window_over and is_unreachable(error):
            self.came_too_late += 1
            return "late"
        after = time.monotonic() - self.signalled if self.signalled else -1.0
        self.failures.append(f"{who}: {error.code().name} after {after:.2f} s: {error.details()}")
        return "lost"


async def _drains(bed: ServerTestBed, count: int) -> Json:
    rng = random.Random(bed.seed)
    seen = [await _drain(bed, rng, signal.Signals[name]) for name in islice(cycle(SIGNALS), count)]
    failures = [failure for one in seen for failure in one.failures]
    return verdict(
        {
            "no_call_lost": not failures,
            "none_cancelled": not any("CANCELLED" in failure for failure in failures),
            "health_first": all(0 <= one.health_after < WINDOW for one in seen),
            "new_calls_in_the_window": all(one.in_window and one.new_connections for one in seen),
            "refused_before_the_port_closes": all(one.first_refusal == "NotReady" for one in seen),
            "in_flight_finished": all(one.evaluated == 2 for one in seen) and any(one.after_closing for one in seen),
            "exit_code_0": all(one.exit is not None and one.exit.code == 0 for one in seen),
            "reports_that_no_call_was_lost": all("no call was lost" in one.exit.output for one in seen if one.exit),
        },
        drains=len(seen),
        calls=sum(one.calls for one in seen),
        calls_in_windows=sum(one.in_window for one in seen),
        answered_after_windows=sum(one.after_closing for one in seen),
        new_connections_in_windows=sum(one.new_connections for one in seen),
        refused_after_windows=sum(one.refused for one in seen),
        found_the_port_closed=sum(one.came_too_late for one in seen),
        lost_calls=len(failures),
        failures=failures[:10],
        exit_codes=sorted({one.exit.code for one in seen if one.exit is not None}),
        health_after_ms=[round(1000 * one.health_after, 1) for one in seen],
        seconds_to_the_end=[round(one.took, 2) for one in seen],
    )


async def _drain(bed: ServerTestBed, rng: random.Random, number: signal.Signals) -> _DrainRecord:
    """Let clients call until they are refused, and stop the server at a random moment by a signal."""
    seen = _DrainRecord()
    with bed.serve("--lame-duck", str(WINDOW), "--log-level", "info") as server:
        images = [picture.data for picture in bed.pictures]
        clients = [
            asyncio.create_task(_client(server.address, images[number % len(images)], seen, stubborn=number % 2 == 0))
            for number in range(CLIENTS)
        ]
        async with new_channel(server.address) as channel:
            watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
            first = (await watch.read()).status
            await asyncio.sleep(rng.uniform(0.05, MAX_LOAD_SECONDS))
            evaluation = asyncio.create_task(_evaluation(channel, bed, WINDOW + BEYOND, seen))
            await asyncio.sleep(0.05)
            seen.signalled = time.monotonic()
            server.process.send_signal(number)
            then = (await watch.read()).status
            if (first, then) == (SERVING, NOT_SERVING):
                seen.health_after = time.monotonic() - seen.signalled
            await asyncio.sleep(0.2)
            async with new_channel(server.address) as fresh:
                outcome = await _call(seen, "new connection", lambda: classify(fresh, images[0]))
                seen.new_connections += outcome == "answered"
            await asyncio.sleep(max(0.0, seen.signalled + 0.9 * WINDOW - time.monotonic()))
            lister = asyncio.create_task(_list_models(server.address, seen))
            largest = max(images, key=len)
            burst = (_call(seen, "burst", lambda: classify(channel, largest, "multi-scale")) for _ in range(BURST))
            await asyncio.gather(*burst)
            await asyncio.gather(*clients, lister, evaluation)
        seen.exit = await asyncio.to_thread(server.wait)
        seen.took = time.monotonic() - seen.signalled
    return seen


async def _client(address: str, image: bytes, seen: _DrainRecord, *, stubborn: bool) -> None:
    """Repeat a call until it is refused; a stubborn client continues until the port is closed."""
    async with new_channel(address) as channel:
        while True:
            outcome = await _call(seen, "client", lambda: classify(channel, image, "ten-crop"))
            if outcome not in ({"answered", "refused"} if stubborn else {"answered"}):
                return


async def _call(seen: _DrainRecord, who: str, make: Callable[[], Any]) -> str:
    """Make one call; return its outcome."""
    begun = time.monotonic()
    try:
        await make()
    except grpc.aio.AioRpcError as error:
        return seen.note(who, error)
    seen.answered(begun)
    return "answered"


async def _list_models(address: str, seen: _DrainRecord) -> None:
    """Repeat a small call without a pause until it is refused, to catch the very first refusal."""
    async with new_channel(address) as channel:
        stub = pb_grpc.PreluNetServiceStub(channel)
        while True:
            try:
                await stub.ListModels(pb.ListModelsRequest(), timeout=CALL_SECONDS)
            except grpc.aio.AioRpcError as error:
                seen.note("ListModels", error)
                seen.first_refusal = type(error_from(error, address)).__name__
                return


async def _evaluation(channel: grpc.aio.Channel, bed: ServerTestBed, seconds: float, seen: _DrainRecord) -> None:
    """Start an evaluation that is still running when the port closes."""
    images = [picture.data for picture in bed.pictures[:2]]

    async def requests() -> AsyncIterator[pb.EvaluateRequest]:
        yield pb.EvaluateRequest(start=pb.EvaluateStart(dataset="drain", protocol="center"))
        yield pb.EvaluateRequest(image=pb.LabelledImage(file="0", data=images[0], label=1))
        await asyncio.sleep(seconds)
        yield pb.EvaluateRequest(image=pb.LabelledImage(file="1", data=images[1], label=2))

    try:
        async for response in pb_grpc.PreluNetServiceStub(channel).Evaluate(requests(), timeout=CALL_SECONDS):
            if response.HasField("report"):
                seen.evaluated = response.report.evaluated
    except grpc.aio.AioRpcError as error:
        seen.note("evaluation", error)


# Restarts


@dataclass
class Callers:
    """Threads that call. calls: begin and end of each answered call."""

    calls: list[tuple[float, float]] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    stop: threading.Event = field(default_factory=threading.Event)

    def run(self, call: Callable[[], object], pause: float = 0.0) -> None:
        """Repeat a call until stopped, or until it fails. pause: in seconds between two calls."""
        while not self.stop.is_set():
            begun = time.monotonic()
            try:
                call()
            except (PreluNetError, grpc.RpcError, httpx.HTTPError) as error:
                self.failures.append(" ".join(f"{type(error).__name__}: {error}".split()))
                return
            self.calls.append((begun, time.monotonic()))
            self.stop.wait(pause)

    def wait_for_answers(self, clients: int = CLIENTS) -> bool:
        """Wait until each of so many threads got about two more answers; return whether they came."""
        wanted, end = len(self.calls) + 2 * clients, time.monotonic() + CALL_TIMEOUT
        while len(self.calls) < wanted and not self.failures and time.monotonic() < end:
            time.sleep(0.01)
        return len(self.calls) >= wanted


async def _restarts(bed: ServerTestBed, count: int, *, rolling: bool) -> Json:
    """Restart servers under calls. rolling: SIGTERM to one after the other of two, instead of SIGKILL to one."""
    rng, callers, ports = random.Random(bed.seed), Callers(), [free_port() for _ in range(1 + rolling)]
    ready: list[float] = []  # when each new server was
    codes: list[int] = []

    def start(port: int) -> PreluNetServer:
        return bed.serve("--port", str(port), "--lame-duck", str(WINDOW))

    servers = [start(port) for port in ports]
    address = "ipv4:" + ",".join(f"127.0.0.1:{port}" for port in ports)
    with Client(address, timeout=CALL_TIMEOUT) as client, ThreadPoolExecutor(CLIENTS) as pool:
        try:
            for picture in islice(cycle(bed.easy_pictures), CLIENTS):
                pool.submit(callers.run, partial(client.classify, picture, protocol="center"))
            answered_each = callers.wait_for_answers()
            for place in list(range(len(ports))) * count:
                time.sleep(rng.uniform(0.3, 1.5))
                if rolling:
                    codes.append(servers[place].stop().code)
                else:
                    servers[place].kill()
                servers[place] = start(ports[place])
                ready.append(time.monotonic())
                answered_each &= callers.wait_for_answers()
            callers.stop.set()
            pool.shutdown()
            codes += [server.stop().code for server in servers]
        finally:
            callers.stop.set()
            for server in servers:
                server.kill()
    late = [max((end - at for begun, end in callers.calls if begun < at < end), default=0.0) for at in ready]
    slowest = max((end - begun for begun, end in callers.calls), default=0.0)
    return verdict(
        {
            "no_call_failed": not callers.failures,
            "exit_code_0": set(codes) == {0},
            "calls_after_each": answered_each,
            "answered_in_time": slowest <= SLOWEST if rolling else max(late) <= LATE,
        },
        **{"restarts" if rolling else "kills": count},
        answers=len(callers.calls),
        failures=callers.failures[:10],
        late_seconds=[round(one, 2) for one in late],
        slowest_call_seconds=round(slowest, 2),
    )


async def _early(bed: ServerTestBed, count: int) -> Json:
    """Send SIGTERM to servers that start."""
    rng = random.Random(bed.seed)
    moments = [rng.uniform(EARLIEST, LATEST) for _ in range(count)]
    command = [*PRELUNET, "serve", "--model", f"{NAME}={bed.model}", "--port", "0", "--device", "cpu"]
    command += ["--log-level", "error"]
    ends = []
    for number, moment in enumerate(moments):
        log = bed.folder / f"early-{number}.log"
        with ServerProcess(command, log, env=environment(), read_stdout=True) as server:
            time.sleep(moment)
            ends.append(server.stop())
    wrong = {f"{moment:.2f} s": f"{end.code}: {end.log[-200:]}" for moment, end in zip(moments, ends, strict=True)
             if end.code or end.log}  # fmt: skip
    return verdict({"exit_code_0_and_no_error": not wrong}, starts=count, wrong=wrong)
