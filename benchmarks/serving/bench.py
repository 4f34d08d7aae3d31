"""Shared by the parts of run.py: the processes, a contender's turn, and its summary."""

import json
import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import grpc
import numpy as np

from benchmarks.common.results import shuffled, significant
from benchmarks.common.rig import Rig
from benchmarks.serving.load import CALL_SECONDS, Workload, classify_request, open_channel
from benchmarks.serving.peers import STARTERS, Contender, Spec, start_echo, start_ours
from benchmarks.serving.worker import Worker
from prelunet.evaluator.errors import EnvironmentFault
from prelunet.evaluator.machine import cores
from prelunet.evaluator.pb.prelunet.v1 import prelunet_pb2_grpc as pb_grpc
from prelunet.evaluator.protocols import EvaluationProtocol

PROCESSES = max(2, cores() // 4)  # of clients: one alone would take a third of the time of the demo model
TOLERANCE = 1e-4  # of a score: another order of summation, and six digits where scores are sent as text
Json = dict[str, Any]
Turn = Callable[[int, int], "TurnResult"]  # (number of calls, number of the round) → result


@dataclass(frozen=True)
class Pictures:
    """Encoded pictures in a folder, and the indices of those that a case uses."""

    folder: Path
    mixed: tuple[int, ...]
    equal: tuple[int, ...]
    smallest: tuple[int, ...]


@dataclass(frozen=True)
class TurnResult:
    """One contender's turn. Times in seconds; cpu, client_cpu: total CPU time of all calls.

    threads: CPU time of the server's threads by name.
    """

    calls: int
    seconds: float
    cpu: float
    client_cpu: float = 0.0
    latencies: tuple[float, ...] = ()
    errors: tuple[str, ...] = ()
    threads: Mapping[str, float] = field(default_factory=dict)


@dataclass
class ServingBench:
    """The processes, started on first use.

    processes: of our servers beside the peers, if several; clients: of a case; now: circumstances of this run in the
    result file; servers, and peers that are unavailable, are added to it.
    """

    rig: Rig
    folder: Path
    pictures: Pictures
    threads: int
    processes: Sequence[int]
    clients: Sequence[int]
    pythons: Mapping[str, Path | None]
    now: Json
    _servers: dict[str, Contender] = field(default_factory=dict)
    _workers: dict[str, Worker] = field(default_factory=dict)
    _started: int = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _kind: type[BaseException] | None, _error: object, _trace: TracebackType | None) -> None:
        self.stop()
        for worker in self._workers.values():
            worker.close()

    def stop(self) -> None:
        """Stop servers and engines; clients keep running."""
        for server in self._servers.values():
            server.stop()
        self._servers.clear()
        for name in [name for name in self._workers if name.startswith("engine")]:
            self._workers.pop(name).close()

    def ours(
        self, net: str, *, processes: int = 1, null: bool = False, http: bool = False, tls: bool = False
    ) -> Contender:
        """Return our server of a net; null: one that computes nothing; http: with an HTTP port; tls: over TLS."""
        models = {net: self.rig.model_file(net)}
        start = partial(start_ours, models, self.threads, processes=processes, null=null, http=http, tls=tls)
        several = f", {processes} processes" * (processes > 1)
        return self._server(f"prelunet {net}{several}{', null' * null}{', HTTP' * http}{', TLS' * tls}", start, [net])

    def echo(self, answer: bytes) -> Contender:
        """Return a bare grpc.aio server that gives this answer to every Classify."""
        return self._server("echo", partial(start_echo, answer), [])

    def peers(self, net: str, protocols: Mapping[str, EvaluationProtocol]) -> dict[str, Contender]:
        """Return the available peers, each with a model for each protocol, by name of the model."""
        specs = {
            name: Spec(self.rig.model_file(net), p.scales[0], p.crop, p.mirror, self.threads, null=name == "null")
            for name, p in protocols.items()
        }
        found: dict[str, Contender] = {}
        for name, start in STARTERS.items():
            python = self.pythons[name]
            if name in self.now["not_measured"]:
                continue
            if python is None:
                self.now["not_measured"][name] = f"--{name}-python is not set"
                continue
            try:
                found[name] = self._server(name, partial(start, python.absolute(), specs), list(specs))
            except EnvironmentFault as error:
                self.now["not_measured"][name] = str(error)
        return found

    def _server(self, name: str, start: Callable[[Path], Contender], models: Sequence[str]) -> Contender:
        if name not in self._servers:
            self._started += 1
            folder = self.folder / f"server-{self._started}"
            folder.mkdir()
            begun = time.monotonic()
            server = start(folder)
            try:
                server.wait(models)
            except BaseException:
                server.stop()
                raise
            server.settings["ready after seconds"] = round(time.monotonic() - begun, 1)
            self._servers[name] = server
            self.now["servers"][name] = server.settings
        return self._servers[name]

    def engine(self, net: str) -> Worker:
        """Return the engine process of a net."""
        model, folder = self.rig.model_file(net), self.pictures.folder
        settings = {"model": str(model), "threads": self.threads, "folder": str(folder)}
        return self._worker(f"engine {net}", "benchmarks.serving.engine", json.dumps(settings))

    def callers(self) -> list[Worker]:
        """Return the client processes."""
        return [
            self._worker(f"clients {number}", "benchmarks.serving.load", str(self.pictures.folder))
            for number in range(PROCESSES)
        ]

    def _worker(self, name: str, script: str, argument: str) -> Worker:
        if name not in self._workers:
            self._workers[name] = Worker(script, argument)
        return self._workers[name]


@dataclass(frozen=True)
class LoadTarget:
    """How a server is called. model: its name there; clients: calls in flight; one_connection: for all of them.

    rate: of calls at random moments, in calls/s, over as many connections; 0: each client calls after its answer.
    """

    server: Contender
    api: str
    model: str
    protocol: str
    images: tuple[int, ...]
    clients: int
    one_connection: bool = False
    rate: float = 0.0

    def best(self, client: Worker) -> list[Any]:
        """Return the best classes of each picture from the server."""
        load = self._load(clients=1, calls=0, first=0, begin_at=0.0)
        client.send({"best": load, "images": self.images})
        best: list[Any] = client.receive()["best"]
        return best

    def answer(self, image: bytes) -> bytes:
        """Return the serialized answer of Classify to a picture."""
        server = self.server
        load = Workload(**self._load(clients=1, calls=1, first=0, begin_at=0.0))
        with open_channel(grpc, server.address, server.tls_ca) as channel:
            stub = pb_grpc.PreluNetServiceStub(channel)
            found: bytes = stub.Classify(classify_request(load, image), timeout=CALL_SECONDS).SerializeToString()
        return found

    def run_turn(self, workers: Sequence[Worker], calls: int, _number: int) -> TurnResult:
        """Make `calls` calls, spread over the client processes."""
        workers = workers[: 1 if self.one_connection else self.clients]
        share = math.ceil(calls / len(workers))
        cpu, threads = self._cpu_seconds()
        begin_at = time.monotonic() + 0.1
        for place, worker in enumerate(workers):
            own = {"clients": self.clients // len(workers), "calls": share, "rate": self.rate / len(workers)}
            load = self._load(**own, first=place * share, begin_at=begin_at)
            worker.send({"load": load, "images": self.images})
        results = [worker.receive() for worker in workers]
        cpu_after, threads_after = self._cpu_seconds()
        return TurnResult(
            share * len(workers),
            max(one["ended"] for one in results) - min(one["begun"] for one in results),
            cpu_after - cpu,
            sum(one["cpu_seconds"] for one in results),
            tuple(latency for one in results for latency in one["latencies"]),
            tuple(error for one in results for error in one["errors"]),
            dict(threads_after - threads),
        )

    def _cpu_seconds(self) -> tuple[float, Counter[str]]:
        """Return the CPU time of the server so far, and that of its threads by name."""
        return self.server.process.cpu_seconds(), Counter(self.server.process.thread_seconds())

    def _load(self, **call: Any) -> Json:
        server, tls_ca = self.server, self.server.tls_ca
        return {
            "address": server.http if self.api == "HTTP" else server.address,
            "api": self.api,
            "model": self.model,
            "protocol": self.protocol,
            "tls_ca": None if tls_ca is None else str(tls_ca),
            "one_connection": self.one_connection,
            **call,
        }


def in_process(engine: Worker, protocol: str, images: Sequence[int], calls: int, _number: int) -> TurnResult:
    """Let the engine classify `calls` pictures."""
    engine.send({"protocol": protocol, "images": images, "calls": calls})
    result = engine.receive()
    return TurnResult(calls, result["seconds"], result["cpu_seconds"])


def best_in_process(engine: Worker, protocol: str, images: Sequence[int]) -> list[Any]:
    """Return the best classes of each picture from the engine."""
    engine.send({"best": protocol, "images": images})
    best: list[Any] = engine.receive()["best"]
    return best


def check_answers(name: str, found: Sequence[Any], expected: Sequence[Any]) -> float:
    """Return the largest deviation of a score; raises SystemExit if classes differ, or scores beyond rounding."""
    classes = [[index for index, _ in best] for best in found]
    off = math.inf
    if classes == [[index for index, _ in best] for best in expected]:
        scores, right = (np.array([[score for _, score in best] for best in one]) for one in (found, expected))
        off = float(np.abs(scores - right).max())
    if not off <= TOLERANCE:  # NaN is never within
        raise SystemExit(
            f"{name}: its answers differ from the engine's (off by {off:.1e}). Its speed would mean nothing"
        )
    return off


def interleave(contenders: Mapping[str, Turn], calls: int, rounds: int, first: int = 0) -> Json:
    """Let all take turns in rounds from number `first` on; return the summary of each by name.

    The order is shuffled for every even round and reversed for the next, so that no one is always early or late. If
    calls of a contender fail, its summary has the first error, and its numbers mean nothing.
    """
    turns: dict[str, list[TurnResult]] = {name: [] for name in contenders}
    for number in range(first, first + rounds):
        for name in shuffled(contenders, number // 2)[:: -1 if number % 2 else 1]:
            turns[name].append(contenders[name](calls, number))
    return {name: summary(of_one) for name, of_one in turns.items()}


def summary(turns: Sequence[TurnResult]) -> Json:
    """Summarize one contender for the result file.

    ms: per call, over the calls of all rounds.
    """
    calls = sum(turn.calls for turn in turns)
    latencies = sorted(latency for turn in turns for latency in turn.latencies)
    errors = [error for turn in turns for error in turn.errors]
    return {
        "rates": [significant(turn.calls / turn.seconds) for turn in turns],
        "calls": calls,
        "cpu_ms": significant(1000 * sum(turn.cpu for turn in turns) / calls),
        "threads_ms": _threads(turns),
        "client_cpu_ms": significant(1000 * sum(turn.client_cpu for turn in turns) / calls),
        **{f"p{share}_ms": significant(1000 * percentile(latencies, share)) for share in (50, 99) if latencies},
        "failed": len(errors),
        **({"first_error": errors[0][:200]} if errors else {}),
    }


def _threads(turns: Sequence[TurnResult]) -> Mapping[str, float]:
    """Return the CPU time per call in ms by thread, without threads that take next to nothing."""
    total: Counter[str] = Counter()
    for turn in turns:
        total.update(turn.threads)
    each = {name: significant(1000 * seconds / sum(turn.calls for turn in turns)) for name, seconds in total.items()}
    return {name: milliseconds for name, milliseconds in each.items() if milliseconds > 1e-3}


def percentile(values: Sequence[float], share: float) -> float:
    """Return the smallest of the sorted values that `share` percent do not exceed."""
    return values[max(0, math.ceil(len(values) * share / 100) - 1)]
