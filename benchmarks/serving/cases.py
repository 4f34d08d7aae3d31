"""The three parts of run.py: the contenders of each case and their calls."""

import math
import statistics
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from benchmarks.common.runner import Case, Runner
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
from benchmarks.serving.engine import DECODING, IN_FLIGHT, WAYS
from benchmarks.serving.peers import STARTERS
from prelunet.evaluator.engine.load import open_session
from prelunet.evaluator.protocols import EvaluationProtocol, build_protocol

OUR_APIS = ("Classify", "ClassifyStream", "OIP")
SERVED = (("A", "center"), ("demo", "multi-scale"))  # net and protocol of the first part
NET = "demo"  # of the other parts: small, so that they end in time and the server's own cost shows
PEER_PROTOCOLS = {"center": "center", "dense": "dense-64"}  # name of a peer's model → its protocol
NULL_PROTOCOL = "center"
PICTURES = ("equal", "mixed")
CLIENTS = (1, 4, 16)
SHARE = 0.7  # rate of calls at random moments, as a share of the slowest server's throughput

# Seconds of one turn, rounds, and the minimum number of calls of a turn.
SERVED_TURN = {"A": (10.0, 5, 32), "demo": (3.0, 7, 64)}
PEER_TURN, OPEN_TURN = (1.5, 3, 48), (4.0, 2, 48)
OVERHEAD_TURN = {1: (200, 5), 16: (960, 5)}  # number of clients → calls of a turn, rounds
TINY_CALLS = 8


def throughput(bench: ServingBench, runner: Runner) -> None:
    """Compare our server with 16 clients to the engine in process."""
    for net, protocol in SERVED[-1:] if bench.rig.tiny else SERVED:
        settings = {"part": "throughput", "net": net, "protocol": protocol, "clients": IN_FLIGHT, "pictures": "mixed"}
        seconds, rounds, _ = SERVED_TURN[net]
        contenders = len(OUR_APIS) + len(WAYS)
        duration = seconds * (rounds + 1) * contenders + 20
        runner.measure(Case(settings, partial(_served, bench, net, protocol), duration))
        if not bench.rig.tiny:
            bench.stop()


def _served(bench: ServingBench, net: str, protocol: str) -> Json:
    images, engine = bench.pictures.mixed, bench.engine(net)
    server = bench.ours(net)
    ours = {api: LoadTarget((server,), api, net, protocol, images, IN_FLIGHT) for api in OUR_APIS}
    off = _check(bench, ours, best_in_process(engine, protocol, images))
    contenders: dict[str, Turn] = {way: partial(in_process, engine, way, protocol, images) for way in WAYS}
    contenders |= {api: partial(target.run_turn, bench.clients()) for api, target in ours.items()}
    turn = turn_lengths(bench, contenders, SERVED_TURN[net], IN_FLIGHT)
    return {**measured(contenders, *turn), "off": off}


def peers(bench: ServingBench, runner: Runner) -> None:
    """Measure three servers of the same model file under the same load."""
    given = [name for name in STARTERS if bench.pythons[name] is not None]
    for name, protocol in list(PEER_PROTOCOLS.items())[-1 if bench.rig.tiny else 0 :]:
        for pictures in PICTURES[-1:] if bench.rig.tiny else PICTURES:
            common = {"part": "peers", "net": NET, "protocol": protocol, "pictures": pictures, "peers": given}
            case = partial(_beside_peers, bench, name, pictures)
            found: Json | None = None
            for clients in CLIENTS[-1:] if bench.rig.tiny else CLIENTS:
                settings = {**common, "load": "closed", "clients": clients}
                seconds, rounds, _ = PEER_TURN
                found = runner.measure(Case(settings, partial(case, clients, None), seconds * (rounds + 2) * 4 + 5))
            if found and "contenders" in found:
                slowest = min(statistics.median(one["rates"]) for one in found["contenders"].values())
                seconds, rounds, _ = OPEN_TURN
                settings = {**common, "load": "open", "clients": CLIENTS[-1]}
                work = partial(case, CLIENTS[-1], SHARE * slowest)
                runner.measure(Case(settings, work, seconds * (rounds + 1) * 4 + 5))


def _beside_peers(bench: ServingBench, name: str, pictures: str, clients: int, rate: float | None) -> Json:
    images, protocol = getattr(bench.pictures, pictures), PEER_PROTOCOLS[name]
    targets = {
        "prelunet": LoadTarget((bench.ours(NET),), "Classify", NET, protocol, images, clients, rate),
        "prelunet, OIP": LoadTarget((bench.ours(NET),), "OIP", NET, protocol, images, clients, rate),
    }
    if clients > 1:
        targets["prelunet, two servers"] = LoadTarget(bench.pair(NET), "Classify", NET, protocol, images, clients, rate)
    for peer, server in bench.peers(NET, _of_peers(bench)).items():
        targets[peer] = LoadTarget((server,), "OIP of a peer", name, protocol, images, clients, rate)
    off = _check(bench, targets, best_in_process(bench.engine(NET), protocol, images))
    contenders = {one: partial(target.run_turn, bench.clients()) for one, target in targets.items()}
    if rate is None:
        turn = turn_lengths(bench, contenders, PEER_TURN, clients)
    else:
        seconds, rounds, minimum = OPEN_TURN
        turn = (TINY_CALLS, 1) if bench.rig.tiny else (max(minimum, round(seconds * rate)), rounds)
    rates = {} if rate is None else {"calls_per_second": round(rate, 2)}
    return {**measured(contenders, *turn), "off": off, **rates}


def overhead(bench: ServingBench, runner: Runner) -> None:
    """Measure calls to models that compute nothing, one after the other and under load."""
    given = [name for name in STARTERS if bench.pythons[name] is not None]
    for clients, lengths in list(OVERHEAD_TURN.items())[-1 if bench.rig.tiny else 0 :]:
        settings = {"part": "overhead", "clients": clients, "peers": given}
        runner.measure(Case(settings, partial(_overhead, bench, clients, *lengths), 90))


def _overhead(bench: ServingBench, clients: int, calls: int, rounds: int) -> Json:
    images = bench.pictures.smallest
    server = bench.ours(NET, null=True)
    apis = (*OUR_APIS, "ServerLive")
    targets = {f"prelunet, {api}": LoadTarget((server,), api, NET, NULL_PROTOCOL, images, clients) for api in apis}
    picture = sorted(bench.pictures.folder.iterdir())[images[0]].read_bytes()
    echo = bench.echo(targets["prelunet, Classify"].answer(picture))
    targets["echo, Classify"] = LoadTarget((echo,), "Classify", NET, NULL_PROTOCOL, images, clients)
    for peer, there in bench.peers(NET, _of_peers(bench)).items():
        targets[f"{peer}, OIP"] = LoadTarget((there,), "OIP of a peer", "null", "", images, clients)
        targets[f"{peer}, ServerLive"] = LoadTarget((there,), "ServerLive", "null", "", images, clients)
    contenders: dict[str, Turn] = {name: partial(one.run_turn, bench.clients()) for name, one in targets.items()}
    contenders[DECODING] = partial(in_process, bench.engine(NET), DECODING, NULL_PROTOCOL, images)
    turn = (TINY_CALLS, 1) if bench.rig.tiny else (calls, rounds)
    interleave(contenders, turn[0], 1)  # untimed
    return measured(contenders, *turn)


def _of_peers(bench: ServingBench) -> Mapping[str, EvaluationProtocol]:
    """Return the protocols of the peers' models, by the name of the model."""
    contract = open_session(bench.rig.model_file(NET), "cpu").contract
    names = {**PEER_PROTOCOLS, "null": NULL_PROTOCOL}
    return {model: build_protocol(name, contract) for model, name in names.items()}


def _check(bench: ServingBench, targets: Mapping[str, LoadTarget], expected: Sequence[Any]) -> dict[str, float]:
    client = bench.clients()[0]
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


def measured(contenders: Mapping[str, Turn], calls: int, rounds: int) -> Json:
    """Run a case and return its entry of the result file."""
    return {"calls_of_a_turn": calls, "rounds": rounds, "contenders": interleave(contenders, calls, rounds)}
