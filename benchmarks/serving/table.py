"""Tables and verdicts from the cases of run.py. Pure functions."""

import statistics
from collections.abc import Mapping
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
GOALS = {("A", "center"): 0.95, ("demo", "multi-scale"): 0.8}  # of the engine's throughput, server with 16 clients
GOAL_API = "Classify"
OURS = "prelunet"
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


def _section(case: Json) -> list[str]:
    """Return title, explanation and table of a case."""
    settings, result = case["settings"], case["result"]
    contenders, off, kind = result["contenders"], result.get("off", {}), _kind(case)
    rounds, clients = result["rounds"], settings.get("clients", 1)
    turns = f"{rounds} round{'s' * (rounds > 1)}, {result['calls_of_a_turn']} calls a turn"
    case_name = f"{settings.get('net')}, {settings.get('protocol')}"
    other = contenders.get(OURS)
    if kind == "throughput":
        way = fastest_way(contenders)
        title = f"{case_name}: compared with the engine in process"
        text = f"{clients} clients, photos of mixed sizes; {turns}. *ratio*: to {way} in process."
        other = contenders[way]
    elif kind == "closed":
        title = f"{case_name}, {settings['pictures']} pictures: {clients} client{'s' * (clients > 1)}"
        text = f"Each client calls again after its answer; {turns}. *ratio*: to {OURS}, Classify."
    elif kind == "open":
        rate = f"{result['calls_per_second']:g} calls/s at random moments"
        title = f"{case_name}, {settings['pictures']} pictures: {rate}"
        text = f"70 % of the slowest server's throughput with {clients} clients; the same moments for all; {turns}."
    else:
        title = f"Calls to a model that computes nothing: {clients} client{'s' * (clients > 1)}"
        text = (
            f"{'Sequential calls' if clients == 1 else f'{clients} clients'} with a picture of 32x32 pixels that every "
            "server but the echo decodes and resizes; "
            f"{turns}. *x*: relative to our Classify. *x echo*: CPU time without decoding ÷ that of {ECHO}."
        )
        other = contenders[f"{OURS}, {GOAL_API}"]
    row, header = (_rates, _HEADER) if kind in {"throughput", "closed"} else (_latencies, _LATENCY_HEADER)
    compared = kind == "overhead" and DECODING in contenders
    header += ("x echo",) * compared
    rows = []
    for name, one in contenders.items():
        failed = f" (failed calls: {one['failed']}, {one.get('first_error')})" if one["failed"] else ""
        values = row(one, other, off.get(name))
        if compared:
            ratio, error = front_ratio(contenders, name)
            answers = name.startswith((OURS, "echo")) and not name.endswith("ServerLive")
            values += (f"{ratio:.2f}" + ("" if error is None else f" ± {error:.2f}") if name.startswith(OURS) and answers else None,)
        rows.append((f"{name}{' in process' * (name in {*WAYS, DECODING})}{failed}", *values))
    return [f"## {title}", "", text, "", markdown(("", *header), rows), ""]


def _kind(case: Json) -> str:
    """Return which of KINDS a case is."""
    settings = case["settings"]
    kind: str = settings.get("load", settings["part"])
    return kind


def _rates(one: Json, other: Json, off: float | None) -> tuple[Any, ...]:
    rates = one["rates"]
    median, error = median_ratio(rates, other["rates"])
    ratio = f"{median:.2f}" if error is None else f"{median:.2f} ± {error:.2f}"
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


def goals_of(data: Json) -> list[str]:
    """Return a verdict for each measured goal; rehearsals have none."""
    lines = []
    for case in latest(data):
        if _kind(case) != "throughput" or "contenders" not in case["result"] or data["runs"][case["run"]]["tiny"]:
            continue
        settings, contenders = case["settings"], case["result"]["contenders"]
        goal = GOALS[settings["net"], settings["protocol"]]
        way = fastest_way(contenders)
        found, error = median_ratio(contenders[GOAL_API]["rates"], contenders[way]["rates"])
        spread = "" if error is None else f" ± {error:.2g}"
        sure = "" if differs(found, goal, error) else ", not significant"
        lines.append(
            f"- {'met' if found >= goal else 'NOT met'}: {settings['net']}, {settings['protocol']}: {GOAL_API} with "
            f"{settings['clients']} clients at least {goal} of the faster way in process ({way}); measured "
            f"{found:.3f}{spread}{sure}"
        )
    return lines or ["- none measured"]
