"""Tables and verdicts from the cases of run.py. Pure functions."""

import statistics
from collections.abc import Iterator, Mapping
from typing import Any

from benchmarks.common.intervals import differs, median_ratio
from benchmarks.common.results import described_run, latest, markdown
from benchmarks.serving.engine import DECODING, WAYS

NOTES = (
    "All contenders of a table take turns in rounds, in an order shuffled for each round; every turn makes the same "
    "calls on the same pictures. *images/s*: median over rounds, then the lowest and the highest; from the first call "
    "to the last answer, including decoding. *ratio*: median over rounds of the ratio in one round, ± its standard "
    "error. *ms*: of all calls of all rounds, measured by the client; *p99*: 99th percentile. *CPU ms*: CPU time per "
    "call, of the server's (or engine's) processes and of the clients', which share the cores. *off by*: the largest "
    "difference of a score from the engine in process; classes and their order were the same."
)
THREADS = ("main", "decode", "compute", "answer", "log")  # first words of the names of our server's threads

GOALS = {("A", "center"): 0.97, ("demo", "multi-scale"): 0.93}  # of the engine's throughput, server with 16 clients
DENSE_GOAL, CENTER_GOAL = 1.0, 0.9  # of Triton's throughput; dense protocols also at most its p50
NULL_GOAL = 1.1  # of Triton's p50, by a model that computes nothing
FRONT_GOAL = 2.0  # of the CPU time of the echo, without decoding
GOAL_API = "Classify"
OURS, TRITON = "prelunet", "triton"
ECHO = f"echo, {GOAL_API}"

Json = Mapping[str, Any]
KINDS = ("throughput", "closed", "open", "overhead")  # of cases, in the order of the tables
_LATENCY_HEADER = ("p50 ms", "p99 ms", "x p50", "x p99", "CPU ms")
_HEADER = ("images/s", "lowest to highest", "ratio", "p50 ms", "p99 ms", "CPU ms", "clients' CPU ms", "off by")


def tables(data: Json) -> str:
    """Return the whole result in Markdown."""
    lines = ["# The server compared with its engine and with other servers", ""]
    for run in data["runs"]:
        lines += [f"{described_run(run)} Threads of every engine: {run['threads']}.", ""]
    lines += [NOTES, ""]
    measured = [case for case in latest(data) if "contenders" in case["result"]]
    for case in sorted(measured, key=lambda case: KINDS.index(_kind(case))):
        lines += _section(case)
    settings = [
        f"- {name}: " + ", ".join(f"{key} {value}" for key, value in facts.items() if key != "ready after seconds")
        for run in data["runs"]
        for name, facts in run["servers"].items()
    ]
    lines += ["## Settings", "", *dict.fromkeys(settings), ""] if settings else []
    missing = [
        f"- {name}: not measured: {' '.join(why.split())}"
        for run in data["runs"]
        for name, why in run["not_measured"].items()
    ]
    lines += ["## Not measured", "", *dict.fromkeys(missing), ""] if missing else []
    return "\n".join([*lines, "## Goals", "", *goals_of(data)]) + "\n"


def fastest_way(contenders: Json) -> str:
    """Return the faster way in process."""
    return max(WAYS, key=lambda way: statistics.median(contenders[way]["rates"]))


def _title(case: Json) -> str:
    """Return the title of a case's table."""
    settings, kind, clients = case["settings"], _kind(case), _clients(case)
    name = f"{settings.get('net')}, {settings.get('protocol')}"
    load = f"{clients} client{'s' * (clients > 1)}"
    if kind == "throughput":
        return f"{name}: compared with the engine in process"
    if kind == "overhead":
        return f"Calls to a model that computes nothing: {load}"
    if kind == "open":
        load = f"{case['result']['calls_per_second']:g} calls/s at random moments"
    return f"{name}, {settings['pictures']} pictures: {load}"


def _section(case: Json) -> list[str]:
    """Return title, explanation and table of a case."""
    result, clients, kind = case["result"], _clients(case), _kind(case)
    contenders, off, rounds = result["contenders"], result.get("off", {}), result["rounds"]
    turns = f"{rounds} round{'s' * (rounds > 1)}, {result['calls_of_a_turn']} calls a turn"
    other = contenders.get(OURS)
    if kind == "throughput":
        way = fastest_way(contenders)
        text = f"{clients} clients, photos of mixed sizes; {turns}. *ratio*: to {way} in process."
        other = contenders[way]
    elif kind == "closed":
        text = (
            f"Each client calls again after its answer; {turns}. *ratio*: to {OURS}, Classify. *two servers*: each has "
            "half the threads and serves half the clients."
        )
    elif kind == "open":
        text = f"70 % of the slowest server's throughput with {clients} clients; the same moments for all; {turns}."
    else:
        text = (
            "Each client calls again after its answer, with a picture of 32x32 pixels that every server but the echo "
            f"decodes and resizes; {turns}. *x*: relative to our Classify. *x echo*: CPU time without *decoding* (of "
            "the same picture again and again in one thread) ÷ that of a bare grpc.aio server that parses the same "
            "messages and has the answer ready; median over rounds, ± its standard error. Then CPU ms by thread: "
            "*main* has the event loop, *others* are gRPC's."
        )
        other = contenders[f"{OURS}, {GOAL_API}"]
    row, header = (_rates, _HEADER) if kind in {"throughput", "closed"} else (_latencies, _LATENCY_HEADER)
    split = ("x echo", *THREADS, "others") if DECODING in contenders else ()
    rows = []
    for name, one in contenders.items():
        failed = f" (failed calls: {one['failed']}, {one.get('first_error')})" if one["failed"] else ""
        label = f"{name}{' in process' * (name in {*WAYS, DECODING})}{failed}"
        rows.append((label, *row(one, other, off.get(name)), *(_split(contenders, name) if split else ())))
    return [f"## {_title(case)}", "", text, "", markdown(("", *header, *split), rows), ""]


def _clients(case: Json) -> int:
    clients: int = case["settings"].get("clients", 1)
    return clients


def _kind(case: Json) -> str:
    """Return which of KINDS a case is."""
    settings = case["settings"]
    kind: str = settings.get("load", settings["part"])
    return kind


def _rates(one: Json, other: Json, off: float | None) -> tuple[Any, ...]:
    rates = one["rates"]
    ratio = _spread(*median_ratio(rates, other["rates"]))
    times = one.get("p50_ms"), one.get("p99_ms"), one["cpu_ms"], one["client_cpu_ms"] or None
    return float(statistics.median(rates)), f"{min(rates):.3g} to {max(rates):.3g}", ratio, *times, off


def _latencies(one: Json, other: Json, _off: float | None) -> tuple[Any, ...]:
    if "p50_ms" not in one:  # in process
        return None, None, None, None, one["cpu_ms"]
    ratios = (one[key] / other[key] for key in ("p50_ms", "p99_ms"))
    return one["p50_ms"], one["p99_ms"], *ratios, one["cpu_ms"]


def front_ratio(contenders: Json, name: str) -> tuple[float, float | None]:
    """Return the CPU time of a server's calls without decoding as a multiple of the echo's, and its standard error."""
    front, decoding, echo = (contenders[one]["cpus_ms"] for one in (name, DECODING, ECHO))
    return median_ratio([whole - part for whole, part in zip(front, decoding, strict=True)], echo)


def _split(contenders: Json, name: str) -> tuple[Any, ...]:
    """Return the cells that say where a server's CPU time goes; empty for others than ours and the echo."""
    if not name.startswith((OURS, "echo")):
        return (None,) * (len(THREADS) + 2)
    one = contenders[name]
    threads = [one["threads_ms"].get(thread) for thread in THREADS]
    decodes = name.startswith(OURS) and not name.endswith("ServerLive")
    ratio = _spread(*front_ratio(contenders, name)) if decodes else None
    return ratio, *threads, max(0.0, one["cpu_ms"] - sum(filter(None, threads)))


def _spread(median: float, error: float | None) -> str:
    return f"{median:.2f}" if error is None else f"{median:.2f} ± {error:.2f}"


def goals_of(data: Json) -> list[str]:
    """Return a verdict for each measured goal; rehearsals have none."""
    lines = []
    for case in latest(data):
        if "contenders" not in case["result"] or data["runs"][case["run"]]["tiny"]:
            continue
        failed = sum(one["failed"] for one in case["result"]["contenders"].values())
        for what, (found, error), limit in _goals(case):
            upper = what.endswith("at most")
            met = (found <= limit if upper else found >= limit) and not failed
            spread = "" if error is None else f" ± {error:.2g}"
            sure = "" if error is None or differs(found, limit, error) else ", not significant"
            lines.append(
                f"- {'met' if met else 'NOT met'}: {_title(case)}: {what} {limit}; measured {found:.3f}{spread}{sure}"
                + f"; {failed} calls of that table failed" * bool(failed)
            )
    return lines or ["- none measured"]


def _goals(case: Json) -> Iterator[tuple[str, tuple[float, float | None], float]]:
    """Iterate over the goals of a case: what is measured, the ratio and its standard error, and the limit."""
    settings, contenders, kind = case["settings"], case["result"]["contenders"], _kind(case)
    if kind == "throughput":
        way, goal = fastest_way(contenders), GOALS[settings["net"], settings["protocol"]]
        ratio = median_ratio(contenders[GOAL_API]["rates"], contenders[way]["rates"])
        yield f"{GOAL_API} ÷ {way} in process, images/s at least", ratio, goal
    elif kind == "overhead":
        ours, peer = contenders[f"{OURS}, {GOAL_API}"], contenders.get(f"{TRITON}, OIP")
        if _clients(case) == 1 and peer:
            yield f"{GOAL_API} ÷ Triton, p50 at most", (ours["p50_ms"] / peer["p50_ms"], None), NULL_GOAL
        if _clients(case) > 1:
            ratio = front_ratio(contenders, f"{OURS}, {GOAL_API}")
            yield f"{GOAL_API} without decoding ÷ echo, CPU at most", ratio, FRONT_GOAL
    elif peer := contenders.get(TRITON):
        ours, dense = contenders[OURS], settings["protocol"].startswith("dense")
        if kind == "closed":
            goal = DENSE_GOAL if dense else CENTER_GOAL
            yield f"{GOAL_API} ÷ Triton, images/s at least", median_ratio(ours["rates"], peer["rates"]), goal
        if dense:
            yield f"{GOAL_API} ÷ Triton, p50 at most", (ours["p50_ms"] / peer["p50_ms"], None), DENSE_GOAL
