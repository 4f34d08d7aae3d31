"""Tables and verdicts from the cases of run.py. Pure functions."""

import json
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from benchmarks.common.intervals import differs, median_ratio
from benchmarks.common.results import described_run, latest, markdown
from benchmarks.serving.cases import ON_ONE_CONNECTION

NOTES = (
    "All contenders of a table take turns in rounds, in shuffled orders; all turns after one start of the servers make "
    "the same calls on the same pictures. *images/s*: median over turns, then the lowest and the "
    "highest; from the first call to the last answer, including decoding. *ratio*: median over rounds of the ratio in "
    "one round, ± its standard error. *ms*: measured by the client, median over starts; *p99*: 99th percentile. *CPU "
    "ms*: CPU time per call, of the server's (or engine's) processes and of the clients', which share the cores; also "
    "medians over starts. *off by*: the largest difference of a score from the engine in process; classes and their "
    "order were the same."
)
THREADS = ("main", "compute", "log")  # first words of the names of our server's threads
MEDIANS = ("p50_ms", "p99_ms", "cpu_ms", "client_cpu_ms")  # of a contender, over starts

SERVED_GOAL = 0.97  # of the engine's throughput, for model A at multi-scale
PEER_GOAL, PEER_AIM = 0.7, 0.85  # of Triton's throughput, in every row
MEAN_GOAL, MEAN_AIM = 0.85, 0.95  # in the mean of these rows
NULL_GOAL, NULL_AIM = 0.95, 0.8  # ms of CPU of a call to a model that computes nothing
SEVERAL_GOAL, SEVERAL_AIM = 0.85, 0.95  # of Triton's throughput, for several processes
ARRIVALS_GOAL = 1.1  # of Triton's p50
ONE_CONNECTION_GOAL = 0.95  # of one process's throughput
API_GOAL = 0.9  # of the calls/s of gRPC without TLS
APIS = ("HTTP", "Classify, TLS", "HTTP, TLS")
OURS, TRITON, ENGINE = "prelunet", "triton", "validate"
GRPC = f"{OURS}, Classify"

Json = Mapping[str, Any]
Found = tuple[float, float | None]  # a number and its standard error
PARTS = ("throughput", "peers", "arrivals", "apis", "overhead", "restarts")  # in the order of the tables
_HEADER = ("images/s", "lowest to highest", "ratio", "p50 ms", "p99 ms", "CPU ms", "clients' CPU ms")


def tables(data: Json) -> str:
    """Return the whole result in Markdown."""
    lines = ["# The server compared with its engine and with other servers", ""]
    for run in data["runs"]:
        lines += [f"{described_run(run)} Threads of every engine: {run['threads']}.", ""]
    lines += [NOTES, ""]
    for case in joined(data):
        lines += [f"## {_title(case)}", "", *_section(case), ""]
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


def joined(data: Json) -> list[Json]:
    """Return the cases in the order of PARTS, each with the contenders of all starts joined."""
    found: dict[str, list[Json]] = {}
    for case in latest(data):
        if case["result"].keys() & {"contenders", "lost"}:
            settings = {key: value for key, value in case["settings"].items() if key != "start"}
            found.setdefault(json.dumps(settings, sort_keys=True), []).append({**case, "settings": settings})
    cases = [{**cases[-1], "result": _joined([case["result"] for case in cases])} for cases in found.values()]
    return sorted(cases, key=lambda case: PARTS.index(case["settings"]["part"]))


def _joined(results: Sequence[Json]) -> Json:
    if "contenders" not in results[0]:
        return results[-1]
    names = [name for name in results[0]["contenders"] if all(name in one["contenders"] for one in results)]
    return {
        "starts": len(results),
        "calls_of_a_turn": [one["calls_of_a_turn"] for one in results],
        "contenders": {name: _contender([one["contenders"][name] for one in results]) for name in names},
        "off": {name: max(one.get("off", {}).get(name, 0.0) for one in results) for name in results[0].get("off", {})},
    }


def _contender(ones: Sequence[Json]) -> Json:
    """Join the summaries of one contender; cpus_ms: of each start."""
    return {
        "rates": [rate for one in ones for rate in one["rates"]],
        "cpus_ms": [one["cpu_ms"] for one in ones],
        "threads_ms": {name: statistics.median(one["threads_ms"].get(name, 0.0) for one in ones) for name in THREADS},
        "failed": sum(one["failed"] for one in ones),
        "first_error": next((one["first_error"] for one in ones if one["failed"]), None),
        **{key: statistics.median(one[key] for one in ones) for key in MEDIANS if all(key in one for one in ones)},
    }


def _title(case: Json) -> str:
    """Return the title of a case's table."""
    settings = case["settings"]
    part, clients = settings["part"], settings["clients"]
    load = f"{clients} client{'s' * (clients > 1)}" + " on one connection" * (clients == ON_ONE_CONNECTION)
    if part == "arrivals":
        load = f"random arrivals at {100 * settings['share']:g} % of Triton's rate, {clients} connections"
    if part == "overhead":
        return f"Calls to a model that computes nothing: {load}"
    name = f"{settings['net']}, {settings['protocol']}"
    if part == "throughput":
        return f"{name}: compared with the engine in process"
    if part == "restarts":
        return f"{name}: {settings['restarts']} restarts of the server under {settings['calls']} calls of {load}"
    return f"{name}, {settings['pictures']} pictures: {'gRPC, HTTP and TLS, ' * (part == 'apis')}{load}"


def _section(case: Json) -> list[str]:
    """Return explanation and table of a case."""
    settings, result = case["settings"], case["result"]
    part = settings["part"]
    if part == "restarts":
        cells = (result["lost"], result["slowest_seconds"], ", ".join(map(str, result["exit_codes"])))
        text = "Our client, with its retries; the server is stopped with SIGTERM."
        return [text, "", markdown(("lost calls", "slowest call, s", "exit codes"), [cells])]
    contenders, calls = result["contenders"], result["calls_of_a_turn"]
    base = {"throughput": ENGINE, "peers": OURS, "arrivals": OURS}.get(part, GRPC)
    starts, turns = result["starts"], len(contenders[base]["rates"])
    text = f"Starts of the servers: {starts}, turns: {turns}, of {statistics.median(calls):g} calls."
    if part == "throughput":
        text += f" {settings['clients']} clients, photos of mixed sizes. *ratio*: to `validate` in process."
    elif part == "arrivals":
        text += f" Calls do not wait for answers; latencies count from the moment of arrival. *ratio*: to {base}."
    else:
        text += f" Each client calls again after its answer. *ratio*: to {base}."
    if part == "overhead":
        text += (
            " A picture of 32x32 pixels, which every server but the echo decodes and resizes. *echo*: a bare grpc.aio "
            "server that parses the same messages and has the answer ready. Then CPU ms by thread: *main* has the "
            "event loop, *others* are gRPC's."
        )
    rows = []
    for name, one in contenders.items():
        failed = f" (failed calls: {one['failed']}, {one['first_error']})" if one["failed"] else ""
        cells = _cells(one, contenders[base])
        last = _threads(name, one) if part == "overhead" else (result["off"].get(name),)
        rows.append((f"{name}{' in process' * (name == ENGINE)}{failed}", *cells, *last))
    last_header = (*THREADS, "others") if part == "overhead" else ("off by",)
    return [text, "", markdown(("", *_HEADER, *last_header), rows)]


def _cells(one: Json, base: Json) -> tuple[Any, ...]:
    rates, (ratio, error) = one["rates"], median_ratio(one["rates"], base["rates"])
    spread = "" if error is None else f" ± {error:.2f}"
    times = (one.get("p50_ms"), one.get("p99_ms"), one["cpu_ms"], one["client_cpu_ms"] or None)
    return float(statistics.median(rates)), f"{min(rates):.3g} to {max(rates):.3g}", f"{ratio:.2f}{spread}", *times


def _threads(name: str, one: Json) -> tuple[Any, ...]:
    """Return the CPU time by thread; empty for others than ours and the echo."""
    if not name.startswith((OURS, "echo")):
        return (None,) * (len(THREADS) + 1)
    threads = [one["threads_ms"][thread] or None for thread in THREADS]
    return *threads, max(0.0, one["cpu_ms"] - sum(filter(None, threads)))


def goals_of(data: Json) -> list[str]:
    """Return a verdict for each measured goal; rehearsals have none."""
    cases = [case for case in joined(data) if not data["runs"][case["run"]]["tiny"]]
    lines = [line for case in cases for line in _goals(case)]
    separate = [case for case in cases if case["settings"]["clients"] != ON_ONE_CONNECTION]
    rows = [ratio for case in separate if (ratio := _beside_triton(case)) is not None]
    if rows:
        errors = [math.nan if error is None else error for _, error in rows]
        error = math.hypot(*errors) / len(rows)
        found = statistics.mean(ratio for ratio, _ in rows), None if math.isnan(error) else error
        lines.append(_verdict(f"mean of {len(rows)} rows: images/s ÷ Triton's", found, MEAN_GOAL, aim=MEAN_AIM))
    return lines or ["- none measured"]


def _beside_triton(case: Json) -> Found | None:
    """Return the ratio of our images/s to Triton's, if the case has it."""
    contenders = case["result"].get("contenders", {})
    if case["settings"]["part"] != "peers" or TRITON not in contenders:
        return None
    return median_ratio(contenders[OURS]["rates"], contenders[TRITON]["rates"])


def _goals(case: Json) -> Iterator[str]:
    """Iterate over the verdicts of a case."""
    settings, title, part = case["settings"], _title(case), case["settings"]["part"]
    if part == "restarts":
        yield _verdict(f"{title}: lost calls", (case["result"]["lost"], None), 0, at_most=True)
        return
    contenders = case["result"]["contenders"]
    failed = sum(one["failed"] for one in contenders.values())
    if (settings.get("net"), settings.get("protocol"), part) == ("A", "multi-scale", "throughput"):
        ratio = median_ratio(contenders["Classify"]["rates"], contenders[ENGINE]["rates"])
        yield _verdict(f"{title}: images/s ÷ the engine's", ratio, SERVED_GOAL, failed=failed)
    if part == "peers":
        yield from _peer_goals(case, title, failed)
    for name in [name for name in contenders if part == "arrivals" and name.startswith(OURS)]:
        ratio = contenders[name]["p50_ms"] / contenders[TRITON]["p50_ms"], None
        yield _verdict(f"{title}: p50 of {name} ÷ triton's", ratio, ARRIVALS_GOAL, failed=failed, at_most=True)
    if part == "overhead" and settings["clients"] > 1:
        cpus = contenders[GRPC]["cpus_ms"]
        milliseconds = median_ratio(cpus, [1.0] * len(cpus))
        yield _verdict(f"{title}: CPU ms", milliseconds, NULL_GOAL, aim=NULL_AIM, failed=failed, at_most=True)
    for api in APIS:
        if other := contenders.get(f"{OURS}, {api}"):
            ratio = median_ratio(other["rates"], contenders[GRPC]["rates"])
            yield _verdict(f"{title}: calls/s of {api} ÷ Classify", ratio, API_GOAL, failed=failed)


def _peer_goals(case: Json, title: str, failed: int) -> Iterator[str]:
    contenders, one_connection = case["result"]["contenders"], case["settings"]["clients"] == ON_ONE_CONNECTION
    if (ratio_to_triton := _beside_triton(case)) is not None and not one_connection:
        yield _verdict(f"{title}: images/s ÷ Triton's", ratio_to_triton, PEER_GOAL, aim=PEER_AIM, failed=failed)
    for name in [name for name in contenders if name.endswith("processes")]:
        base, goal, aim = (OURS, ONE_CONNECTION_GOAL, None) if one_connection else (TRITON, SEVERAL_GOAL, SEVERAL_AIM)
        if base in contenders:
            ratio = median_ratio(contenders[name]["rates"], contenders[base]["rates"])
            yield _verdict(f"{title}: images/s of {name} ÷ {base}'s", ratio, goal, aim=aim, failed=failed)


def _verdict(
    what: str, found: Found, limit: float, *, aim: float | None = None, failed: int = 0, at_most: bool = False
) -> str:
    """Return one line. aim: more than the goal; failed: calls of the table, with which no goal is met."""
    value, error = found
    met = (value <= limit if at_most else value >= limit) and not failed
    spread = "" if error is None else f" ± {error:.2g}"
    sure = "" if error is None or differs(value, limit, error) else ", not significant"
    wanted = f"at {'most' if at_most else 'least'} {limit}{'' if aim is None else f' (aim {aim})'}"
    missed = f"; {failed} calls of that table failed" * bool(failed)
    return f"- {'met' if met else 'NOT met'}: {what} {wanted}; measured {value:.3f}{spread}{sure}{missed}"
