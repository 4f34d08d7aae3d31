"""The speed of HTTP and of TLS, compared with gRPC without TLS: the same calls to the same model."""

from collections.abc import Iterator
from functools import partial

from benchmarks.common.runner import Case
from benchmarks.serving.bench import Json, LoadTarget, ServingBench, best_in_process, check_answers
from benchmarks.serving.cases import measured, turn_lengths

NET = "demo"  # small, so that the cost of a call shows
PROTOCOLS = ("center", "multi-scale")
CLIENTS = (1, 4, 16)
TURN = (1.0, 9, 16)  # seconds of one turn, rounds, and the minimum number of calls of a turn
NULL_CLIENTS = 16
DOORS = {  # name → how the server is called
    "gRPC": ("Classify", False),
    "HTTP": ("HTTP", False),
    "gRPC, TLS": ("Classify", True),
    "HTTP, TLS": ("HTTP", True),
}
GOALS = {"HTTP": 0.9, "gRPC, TLS": 0.9}  # of the calls/s of gRPC without TLS


def cases(bench: ServingBench) -> Iterator[Case]:
    """Yield a case for each protocol and number of clients, and one of a model that computes nothing."""
    seconds, rounds, _ = TURN
    duration = seconds * (rounds + 2) * len(DOORS) + 10
    for protocol in PROTOCOLS[:1] if bench.rig.tiny else PROTOCOLS:
        for clients in CLIENTS[1:2] if bench.rig.tiny else CLIENTS:
            settings = {"part": "speed", "net": NET, "protocol": protocol, "clients": clients}
            yield Case(settings, partial(_compared, bench, protocol, clients, null=False), duration)
    if bench.rig.tiny:  # benchmarks/serving rehearses the model that computes nothing
        return
    settings = {"part": "speed", "net": "null", "protocol": PROTOCOLS[0], "clients": NULL_CLIENTS}
    yield Case(settings, partial(_compared, bench, PROTOCOLS[0], NULL_CLIENTS, null=True), duration)


def _compared(bench: ServingBench, protocol: str, clients: int, *, null: bool) -> Json:
    images = bench.pictures.smallest if null else bench.pictures.mixed
    targets = {
        door: LoadTarget((bench.ours(NET, null=null, http=True, tls=tls),), api, NET, protocol, images, clients)
        for door, (api, tls) in DOORS.items()
    }
    off = {}
    if not null:
        expected = best_in_process(bench.engine(NET), protocol, images)
        off = {door: check_answers(door, one.best(bench.clients()[0]), expected) for door, one in targets.items()}
    contenders = {door: partial(target.run_turn, bench.clients()) for door, target in targets.items()}
    return {**measured(contenders, *turn_lengths(bench, contenders, TURN, clients)), "off": off}
