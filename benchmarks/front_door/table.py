"""Tables and verdicts from the cases of run.py. Pure functions."""

import statistics
from collections.abc import Mapping
from typing import Any

from benchmarks.common.intervals import differs, median_ratio
from benchmarks.common.results import described_run, latest, markdown
from benchmarks.front_door.speed import GOALS
from benchmarks.reliability.table import table

NOTES = (
    "All doors of a table take turns in rounds, in an order shuffled for each round; every turn makes the same calls "
    "on the same pictures, over connections that are open before. *calls/s*: median over rounds, then the lowest and "
    "the highest. *ratio*: to gRPC without TLS; median over rounds of the ratio in one round, ± its standard error. "
    "*ms*: measured by the client. *CPU ms*: CPU time per call of the server, of its main thread, which has the event "
    "loop, and of the clients, which share the cores."
)
_HEADER = ("calls/s", "lowest to highest", "ratio", "p50 ms", "p99 ms", "CPU ms", "main thread's", "clients'")

Json = Mapping[str, Any]


def tables(data: Json) -> str:
    """Return the whole result in Markdown."""
    claims = {**data, "cases": [case for case in data["cases"] if case["settings"].get("part") != "speed"]}
    lines = [table(claims, "The front door: rotation"), "# The front door: speed", ""]
    measured = [case for case in latest(data) if "contenders" in case["result"]]
    for number in sorted({case["run"] for case in measured}):
        lines += [described_run(data["runs"][number]), ""]
    lines += [NOTES, ""]
    for case in measured:
        result = case["result"]
        rows = [_row(door, one, result["contenders"]["gRPC"]) for door, one in result["contenders"].items()]
        lines += [f"## {_title(case)}", "", f"{result['rounds']} rounds, {result['calls_of_a_turn']} calls a turn.", ""]
        lines += [markdown(("", *_HEADER), rows), ""]
    return "\n".join([*lines, "## Goals", "", *goals_of(data)]) + "\n"


def _title(case: Json) -> str:
    settings = case["settings"]
    net = "a model that computes nothing" if settings["net"] == "null" else f"{settings['net']}, {settings['protocol']}"
    return f"{net}: {settings['clients']} client{'s' * (settings['clients'] > 1)}"


def _row(door: str, one: Json, grpc: Json) -> tuple[Any, ...]:
    rates = one["rates"]
    ratio, error = median_ratio(rates, grpc["rates"])
    failed = f" (failed calls: {one['failed']}, {one.get('first_error')})" if one["failed"] else ""
    return (
        f"{door}{failed}",
        float(statistics.median(rates)),
        f"{min(rates):.3g} to {max(rates):.3g}",
        f"{ratio:.2f}" if error is None else f"{ratio:.2f} ± {error:.2f}",
        one["p50_ms"],
        one["p99_ms"],
        one["cpu_ms"],
        one["threads_ms"].get("main"),
        one["client_cpu_ms"],
    )


def goals_of(data: Json) -> list[str]:
    """Return a verdict for each measured goal; rehearsals have none."""
    lines = []
    for case in latest(data):
        contenders = case["result"].get("contenders", {})
        if not contenders or data["runs"][case["run"]]["tiny"] or case["settings"]["net"] == "null":
            continue
        failed = sum(one["failed"] for one in contenders.values())
        for door, goal in GOALS.items():
            found, error = median_ratio(contenders[door]["rates"], contenders["gRPC"]["rates"])
            sure = "" if differs(found, goal, error) else ", not significant"
            lines.append(
                f"- {'met' if found >= goal and not failed else 'NOT met'}: {_title(case)}: {door} ÷ gRPC, calls/s at "
                f"least {goal}; measured {found:.3f}{'' if error is None else f' ± {error:.2g}'}{sure}"
                + f"; {failed} calls of that table failed"
                * bool(failed)
            )
    return lines or ["- none measured"]
