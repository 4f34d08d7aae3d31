"""The parts of run.py: the cases of one start of the servers, their contenders and calls."""

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

from benchmarks.common.runner import Case
from benchmarks.common.server_process import PreluNetServer, free_port
from benchmarks.serving.bench import (
    Json,
    LoadTarget,
    ServingBench,
    Turn,
    best_in_process,
    check_answers,
    in_process,
    interleave,
)
from benchmarks.serving.peers import STARTERS
from prelunet.evaluator.client import Client
from prelunet.evaluator.engine.load import open_session
from prelunet.evaluator.protocols import EvaluationProtocol, build_protocol

# Net and protocol of the first part → clients, and calls of a turn: 26, 6 and 3 s.
SERVED = {("A", "multi-scale"): (4, 4), ("A", "center"): (16, 32), ("demo", "multi-scale"): (16, 192)}
NET = "demo"  # of the other parts: small, so that they end in time and the server's own cost shows
PROTOCOL = "center"  # of models that compute nothing, of HTTP and TLS, and of the restarts
PEER_PROTOCOLS = {"center": "center", "dense": "dense-64"}  # name of a peer's model → its protocol
PICTURES = ("equal", "mixed")
CLIENTS = (1, 4, 16)
ARRIVALS = 0.7  # of the calls/s that Triton answers to so many clients
ON_ONE_CONNECTION = 32  # clients that share a connection, and so one of several processes
APIS = {  # of our server → as load.py calls it, and whether over TLS
    "Classify": ("Classify", False),
    "OIP": ("OIP", False),
    "HTTP": ("HTTP", False),
    "Classify, TLS": ("Classify", True),
    "HTTP, TLS": ("HTTP", True),
}

# Seconds of one turn, turns after each start, and the minimum number of calls of a turn.
PEER_TURN, API_TURN = (1.5, 1, 48), (1.0, 1, 32)
NULL_CALLS = 960  # of a turn
TINY_CALLS = 8
CALLERS, CALLS, RESTARTS = 16, 2000, 3


def throughput(bench: ServingBench, start: int) -> Iterator[Case]:
    """Compare our server to the engine in process."""
    for (net, protocol), (clients, calls) in list(SERVED.items())[-1 if bench.rig.tiny else 0 :]:
        settings = {"part": "throughput", "net": net, "protocol": protocol, "clients": clients, "pictures": "mixed"}
        yield Case({**settings, "start": start}, partial(_served, bench, net, protocol, clients, calls, start), 120)


def _served(bench: ServingBench, net: str, protocol: str, clients: int, calls: int, start: int) -> Json:
    images, engine = bench.pictures.mixed[:clients], bench.engine(net)
    target = LoadTarget(bench.ours(net), "Classify", net, protocol, images, clients)
    off = _check(bench, {"Classify": target}, best_in_process(engine, protocol, images))  # warms both up
    contenders: dict[str, Turn] = {
        "validate": partial(in_process, engine, protocol, images),
        "Classify": partial(target.run_turn, bench.callers()),
    }
    return {**measured(contenders, TINY_CALLS if bench.rig.tiny else calls, 1, start), "off": off}


def peers(bench: ServingBench, start: int) -> Iterator[Case]:
    """Compare servers of the same model file under the same load."""
    for name, protocol in list(PEER_PROTOCOLS.items())[-1 if bench.rig.tiny else 0 :]:
        for pictures in PICTURES[-1:] if bench.rig.tiny else PICTURES:
            for clients in (*bench.clients, ON_ONE_CONNECTION)[-1 if bench.rig.tiny else 0 :]:
                settings: Json = {"part": "peers", "net": NET, "protocol": protocol, "pictures": pictures}
                settings |= {"clients": clients, "peers": _given(bench), "processes": list(bench.processes)}
                work = partial(_beside_peers, bench, name, pictures, clients, start)
                yield Case({**settings, "start": start}, work)
            if bench.pythons["triton"] is not None:
                settings |= {"part": "arrivals", "clients": CLIENTS[-1], "share": ARRIVALS}
                yield Case({**settings, "start": start}, partial(_arrivals, bench, name, pictures, start))


def _beside_peers(bench: ServingBench, name: str, pictures: str, clients: int, start: int) -> Json:
    targets, off = _peer_targets(bench, name, pictures, clients)
    contenders = {one: partial(target.run_turn, bench.callers()) for one, target in targets.items()}
    return {**measured(contenders, *turn_lengths(bench, contenders, PEER_TURN, clients), start), "off": off}


def _arrivals(bench: ServingBench, name: str, pictures: str, start: int) -> Json:
    """Measure latencies when calls come at random moments, at a share of the rate that Triton answers."""
    targets, off = _peer_targets(bench, name, pictures, CLIENTS[-1])
    triton = partial(targets["triton"].run_turn, bench.callers())
    calls, _ = turn_lengths(bench, {"triton": triton}, PEER_TURN, CLIENTS[-1])
    full = triton(calls, start)
    rate = ARRIVALS * full.calls / full.seconds
    contenders = {one: partial(replace(target, rate=rate).run_turn, bench.callers()) for one, target in targets.items()}
    return {**measured(contenders, 2 * calls, 1, start), "off": off}


def _peer_targets(
    bench: ServingBench, name: str, pictures: str, clients: int
) -> tuple[dict[str, LoadTarget], dict[str, float]]:
    """Return how each contender is called, and by how much its scores differ from the engine's."""
    images, protocol, one = getattr(bench.pictures, pictures), PEER_PROTOCOLS[name], clients == ON_ONE_CONNECTION
    targets = {}
    for processes in (1, *bench.processes):
        ours = f"prelunet, {processes} processes" if processes > 1 else "prelunet"
        server = bench.ours(NET, processes=processes)
        targets[ours] = LoadTarget(server, "Classify", NET, protocol, images, clients, one)
    for peer, server in bench.peers(NET, _of_peers(bench)).items():
        targets[peer] = LoadTarget(server, "OIP of a peer", name, protocol, images, clients, one)
    return targets, _check(bench, targets, best_in_process(bench.engine(NET), protocol, images))


def apis(bench: ServingBench, start: int) -> Iterator[Case]:
    """Compare gRPC, HTTP and TLS, on the demo net and on a model that computes nothing, there also with peers."""
    for clients in CLIENTS[-1:] if bench.rig.tiny else CLIENTS:
        settings = {"part": "apis", "net": NET, "protocol": PROTOCOL, "pictures": "mixed", "clients": clients}
        yield Case({**settings, "start": start}, partial(_apis, bench, clients, start))
    settings = {"part": "overhead", "clients": CLIENTS[-1], "peers": _given(bench)}
    yield Case({**settings, "start": start}, partial(_overhead, bench, CLIENTS[-1], start), 60)


def _apis(bench: ServingBench, clients: int, start: int) -> Json:
    images = bench.pictures.mixed
    targets = _of_ours(bench, images, clients, null=False)
    off = _check(bench, targets, best_in_process(bench.engine(NET), PROTOCOL, images))
    contenders = {name: partial(one.run_turn, bench.callers()) for name, one in targets.items()}
    return {**measured(contenders, *turn_lengths(bench, contenders, API_TURN, clients), start), "off": off}


def _overhead(bench: ServingBench, clients: int, start: int) -> Json:
    images = bench.pictures.smallest
    targets = _of_ours(bench, images, clients, null=True)
    picture = sorted(bench.pictures.folder.iterdir())[images[0]].read_bytes()
    echo = bench.echo(targets["prelunet, Classify"].answer(picture))
    targets["echo, Classify"] = LoadTarget(echo, "Classify", NET, PROTOCOL, images, clients)
    for peer, there in bench.peers(NET, _of_peers(bench)).items():
        targets[f"{peer}, OIP"] = LoadTarget(there, "OIP of a peer", "null", "", images, clients)
    contenders = {name: partial(one.run_turn, bench.callers()) for name, one in targets.items()}
    calls = TINY_CALLS if bench.rig.tiny else NULL_CALLS
    interleave(contenders, calls, 1)  # untimed
    return measured(contenders, calls, 1, start)


def _of_ours(bench: ServingBench, images: tuple[int, ...], clients: int, *, null: bool) -> dict[str, LoadTarget]:
    return {
        f"prelunet, {name}": LoadTarget(
            bench.ours(NET, null=null, http=True, tls=tls), api, NET, PROTOCOL, images, clients
        )
        for name, (api, tls) in APIS.items()
    }


def restarts(bench: ServingBench, start: int) -> Iterator[Case]:
    """Stop our server and start it again on its port, three times, under the calls of our client; only once."""
    if start == 0:
        settings = {"part": "restarts", "net": NET, "protocol": PROTOCOL, "pictures": "mixed", "clients": CALLERS}
        calls = CALLS // 10 if bench.rig.tiny else CALLS
        yield Case({**settings, "calls": calls, "restarts": RESTARTS}, partial(_restarted, bench, calls), 60)


def _restarted(bench: ServingBench, calls: int) -> Json:
    files = sorted(bench.pictures.folder.iterdir())
    images = [files[index].read_bytes() for index in bench.pictures.mixed]
    port = free_port()
    options = ["--device", "cpu", "--threads", str(bench.threads), "--lame-duck", "0", "--port", str(port)]
    took: list[float] = []
    errors: list[str] = []
    codes = []

    def call(number: int) -> None:
        begun = time.monotonic()
        try:
            client.classify(images[number % len(images)], protocol=PROTOCOL)
        except Exception as error:  # whatever it is, the call is lost
            errors.append(f"{type(error).__name__}: {error}")
        took.append(time.monotonic() - begun)

    with ThreadPoolExecutor(CALLERS) as pool, Client(f"127.0.0.1:{port}") as client:
        for life in range(RESTARTS + 1):
            log = bench.folder / f"restarted-{life}.log"
            with PreluNetServer({NET: bench.rig.model_file(NET)}, *options, log=log) as server:
                if life == 0:
                    pool.map(call, range(calls))
                while len(took) < (life + 1) * calls // (RESTARTS + 1):
                    time.sleep(0.01)
                codes.append(server.stop().code)
    return {"lost": len(errors), "errors": errors[:3], "slowest_seconds": round(max(took), 2), "exit_codes": codes}


def _given(bench: ServingBench) -> list[str]:
    return [name for name in STARTERS if bench.pythons[name] is not None]


def _of_peers(bench: ServingBench) -> Mapping[str, EvaluationProtocol]:
    """Return the protocols of the peers' models, by the name of the model."""
    contract = open_session(bench.rig.model_file(NET), "cpu").contract
    names = {**PEER_PROTOCOLS, "null": PROTOCOL}
    return {model: build_protocol(name, contract) for model, name in names.items()}


def _check(bench: ServingBench, targets: Mapping[str, LoadTarget], expected: Sequence[Any]) -> dict[str, float]:
    client = bench.callers()[0]
    return {name: check_answers(name, target.best(client), expected) for name, target in targets.items()}


def turn_lengths(
    bench: ServingBench, contenders: Mapping[str, Turn], lengths: tuple[float, int, int], clients: int
) -> tuple[int, int]:
    """Give each contender an untimed turn; return calls per turn, judged by the slowest, and rounds.

    lengths: seconds of a turn, rounds, and the minimum number of calls; the calls are a multiple of `clients`.
    """
    if bench.rig.tiny:
        return TINY_CALLS, 1
    seconds, rounds, minimum = lengths
    warm = max(2 * clients, 4)
    slowest = max((contender(warm, 0) for contender in contenders.values()), key=lambda turn: turn.seconds)
    wanted = max(minimum, seconds * slowest.calls / slowest.seconds)
    return math.ceil(wanted / clients) * clients, rounds


def measured(contenders: Mapping[str, Turn], calls: int, rounds: int, first: int = 0) -> Json:
    """Run a case and return its entry of the result file. first: number of the first round."""
    return {"calls_of_a_turn": calls, "rounds": rounds, "contenders": interleave(contenders, calls, rounds, first)}
