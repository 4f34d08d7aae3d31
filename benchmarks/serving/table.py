"""Tables and verdicts from the cases of run.py. Pure functions."""

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from benchmarks.common.results import markdown
from benchmarks.serving.engine import WAYS

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

Json = Mapping[str, Any]
_HEADER = ("images/s", "lowest to highest", "ratio", "p50 ms", "p99 ms", "CPU ms", "clients' CPU ms", "off by")


def tables(data: Json) -> str:
    """Return the whole result in Markdown."""
    lines = ["# The server compared with its engine and with other servers", ""]
    for run in data["runs"]:
        lines += [_circumstances(run), ""]
    lines += [NOTES, ""]
    for part in (_throughput, _closed, _open, _overhead):
        lines += part(data["cases"])
    settings = [line for run in data["runs"] for line in _servers(run)]
    lines += ["## Settings", "", *dict.fromkeys(settings), ""] if settings else []
    missing = [
        f"- {name}: not measured: {' '.join(why.split())}"
        for run in data["runs"]
        for name, why in run["not_measured"].items()
    ]
    lines += ["## Not measured", "", *dict.fromkeys(missing), ""] if missing else []
    return "\n".join([*lines, "## Goals", "", *goals_of(data)]) + "\n"


def _circumstances(run: Json) -> str:
    machine = run["machine"]
    versions = ", ".join(f"{name} {version}" for name, version in run["versions"].items())
    rehearsal = "A rehearsal: the numbers mean nothing. " if run["tiny"] else ""
    return (
        f"{rehearsal}{run['date']}, {machine['cpu']}, {run['threads']} threads, {machine['memory_gb']} GB "
        f"({', '.join(machine['instructions'])}); {versions}. Command: `{run['command']}`."
    )


def _servers(run: Json) -> Iterator[str]:
    for name, settings in run["servers"].items():
        yield f"- {name}: " + ", ".join(
            f"{key} {value}" for key, value in settings.items() if key != "ready after seconds"
        )


def _cases(cases: Sequence[Json], **settings: Any) -> list[Json]:
    """Return the measured cases with these settings."""
    return [
        case
        for case in cases
        if "contenders" in case["result"] and all(case["settings"].get(key) == value for key, value in settings.items())
    ]


def ratio(rates: Sequence[float], others: Sequence[float]) -> tuple[float, float | None]:
    """Return the median over rounds of the ratio in the same round, and its standard error; None for one round."""
    ratios = [one / other for one, other in zip(rates, others, strict=True)]
    error = math.sqrt(math.pi / 2 / len(ratios)) * statistics.stdev(ratios) if len(ratios) > 1 else None
    return statistics.median(ratios), error


def _ratio_text(rates: Sequence[float], others: Sequence[float]) -> str:
    median, error = ratio(rates, others)
    return f"{median:.2f}" if error is None else f"{median:.2f} ± {error:.2f}"


def fastest_way(contenders: Json) -> str:
    """Return the faster way in process."""
    return max(WAYS, key=lambda way: statistics.median(contenders[way]["rates"]))


def _row(name: str, one: Json, others: Json, off: Json) -> tuple[Any, ...]:
    rates = one["rates"]
    failed = f" (failed calls: {one['failed']}, {one.get('first_error')})" if one["failed"] else ""
    return (
        f"{name}{failed}",
        float(statistics.median(rates)),
        f"{min(rates):.3g} to {max(rates):.3g}",
        _ratio_text(rates, others["rates"]),
        one.get("p50_ms"),
        one.get("p99_ms"),
        one["cpu_ms"],
        one["client_cpu_ms"] or None,
        off.get(name),
    )


def _turns(result: Json) -> str:
    rounds = result["rounds"]
    return f"{rounds} round{'s' * (rounds > 1)}, {result['calls_of_a_turn']} calls a turn"


def _throughput(cases: Sequence[Json]) -> list[str]:
    lines = []
    for case in _cases(cases, part="throughput"):
        settings, result = case["settings"], case["result"]
        contenders = result["contenders"]
        way = fastest_way(contenders)
        lines += [
            f"## {settings['net']}, {settings['protocol']}: compared with the engine in process",
            "",
            f"{settings['clients']} clients, photos of mixed sizes; {_turns(result)}. *ratio*: to {way} in process.",
            "",
            markdown(
                ("", *_HEADER),
                [
                    _row(f"{name}{' in process' * (name in WAYS)}", one, contenders[way], result["off"])
                    for name, one in contenders.items()
                ],
            ),
            "",
        ]
    return lines


def _closed(cases: Sequence[Json]) -> list[str]:
    lines = []
    for case in _cases(cases, part="peers", load="closed"):
        settings, result = case["settings"], case["result"]
        contenders, clients = result["contenders"], settings["clients"]
        lines += [
            f"## {settings['net']}, {settings['protocol']}, {settings['pictures']} pictures: {clients} "
            f"client{'s' * (clients > 1)}",
            "",
            f"Each client calls again after its answer; {_turns(result)}. *ratio*: to {OURS}, Classify.",
            "",
            markdown(
                ("", *_HEADER),
                [_row(name, one, contenders[OURS], result["off"]) for name, one in contenders.items()],
            ),
            "",
        ]
    return lines


def _open(cases: Sequence[Json]) -> list[str]:
    lines = []
    for case in _cases(cases, part="peers", load="open"):
        settings, result = case["settings"], case["result"]
        lines += [
            f"## {settings['net']}, {settings['protocol']}, {settings['pictures']} pictures: "
            f"{result['calls_per_second']:g} calls/s at random moments",
            "",
            f"70 % of the slowest server's throughput with {settings['clients']} clients; the same moments for all; "
            f"{_turns(result)}.",
            "",
            markdown(
                ("", "p50 ms", "p99 ms", "x p50", "x p99", "CPU ms"),
                [_latency_row(name, one, result["contenders"][OURS]) for name, one in result["contenders"].items()],
            ),
            "",
        ]
    return lines


def _overhead(cases: Sequence[Json]) -> list[str]:
    lines = []
    for case in _cases(cases, part="overhead"):
        result = case["result"]
        lines += [
            "## Calls to a model that computes nothing",
            "",
            "Sequential calls with a picture of 32x32 pixels that every server decodes and resizes; "
            f"{_turns(result)}. *x*: relative to our Classify.",
            "",
            markdown(
                ("", "p50 ms", "p99 ms", "x p50", "x p99", "CPU ms"),
                [
                    _latency_row(name, one, result["contenders"][f"{OURS}, {GOAL_API}"])
                    for name, one in result["contenders"].items()
                ],
            ),
            "",
        ]
    return lines


def _latency_row(name: str, one: Json, other: Json) -> tuple[Any, ...]:
    failed = f" (failed calls: {one['failed']}, {one.get('first_error')})" if one["failed"] else ""
    return (
        f"{name}{failed}",
        one["p50_ms"],
        one["p99_ms"],
        one["p50_ms"] / other["p50_ms"],
        one["p99_ms"] / other["p99_ms"],
        one["cpu_ms"],
    )


def goals_of(data: Json) -> list[str]:
    """Return a verdict for each measured goal; rehearsals have none."""
    lines = []
    for case in _cases(data["cases"], part="throughput"):
        if data["runs"][case["run"]]["tiny"]:
            continue
        settings, contenders = case["settings"], case["result"]["contenders"]
        goal = GOALS[settings["net"], settings["protocol"]]
        way = fastest_way(contenders)
        found, error = ratio(contenders[GOAL_API]["rates"], contenders[way]["rates"])
        spread = "" if error is None else f" ± {error:.2g}"
        sure = "" if error is not None and abs(found - goal) > 2 * error else ", not significant"
        lines.append(
            f"- {'met' if found >= goal else 'NOT met'}: {settings['net']}, {settings['protocol']}: {GOAL_API} with "
            f"{settings['clients']} clients at least {goal} of the faster way in process ({way}); measured "
            f"{found:.3f}{spread}{sure}"
        )
    return lines or ["- none measured"]
