"""Rows, tables and verdicts from the timings. Pure functions."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any, get_args

from benchmarks.common.intervals import differs, median_ratio
from benchmarks.common.results import described_run, markdown, significant
from benchmarks.engine.competitors import BEFORE, COMPETITORS, CompetitorPrecision
from benchmarks.engine.interleaved import SAMPLED_CROPS, PhotoTimings

Row = dict[str, Any]
Goal = dict[str, Any]

HEADER = (
    *("competitor", "precision", "images", "images/s", "x naive", "x fastest", "GFLOP/s", "of the bound"),
    *("lowest to highest", "peak MB", "ready s", "scores off by"),
)
NOTES = (
    "The pictures are synthetic in photo sizes, unless --data names others; their contents do not affect the speed. "
    "Every competitor's time includes resizing and mirroring, but not decoding. All competitors of one precision take "
    "turns on each picture, in an order shuffled for each; the other precisions follow on the same pictures, since all "
    "together would take 20 GB for model C. *images/s*: pictures divided by seconds. *x naive*: GFLOP/s relative to "
    "naive. *x fastest*: speed relative to the fastest competitor of the same precision that is not ours: median over "
    "pictures of the ratio on the same picture, ± its standard error. *GFLOP/s*: two per multiply-add of the dense "
    "evaluation, median over pictures, then the lowest and the highest. "
    "*of the bound*: share of the GFLOP/s of a matrix product in this precision, measured at the start. "
    "*peak MB*, *ready s*: the competitor alone in "
    "a new process; imports, loading, compiling, one picture at the largest scale. *scores off by*: largest "
    "difference from torch eager, relative to the largest score. *openvino, our file*: bare runtime calls on the "
    "compiled model that *ours* uses; the difference between the two is the cost of planning, and noise."
)
ENOUGH = 0.97  # goal: share of the fastest competitor's speed
TIMES_BEFORE = 1.15  # goal: of bf16 at scale 480, relative to the file of --before
TIMES_NAIVE = 10
# Of int8, relative to ours in another precision, or to onnxruntime on the plain export. AMX computes bf16 fast too.
INT8_GOALS: Mapping[bool, Mapping[str, float]] = {
    True: {"ours, openvino bf16": 1.7, "onnxruntime, plain export": 10},
    False: {"ours, openvino": 1.8},
}


def rows_of(
    visits: Sequence[PhotoTimings], alone: Mapping[str, Mapping[str, Any]], bounds: Mapping[str, float]
) -> list[Row]:
    """Return a row per competitor, in the order of COMPETITORS.

    bounds: GFLOP/s of matrix products by precision; alone: result of isolated.py by competitor, or
    {"not_available": reason}; a missing competitor was not chosen.
    """
    names = {name for visit in visits for name in visit.seconds}
    fastest = {
        precision: max(
            (
                name
                for name in names - {"naive", BEFORE}
                if COMPETITORS[name].precision == precision and not COMPETITORS[name].ours
            ),
            key=lambda name: statistics.median(_rates(visits, name)),
            default=None,
        )
        for precision in get_args(CompetitorPrecision)
    }
    rows = []
    for name, competitor in COMPETITORS.items():
        row: Row = {"competitor": name, "precision": competitor.precision, "ours": competitor.ours}
        isolated = dict(alone.get(name, {"not_available": "not chosen"}))
        if name in names:
            row |= _measured(visits, name, fastest[competitor.precision]) | isolated
            bound = bounds.get(competitor.precision)
            row["share_of_bound"] = bound and round(row["gflop_per_second"]["median"] / bound, 3)
            row["times_before"] = _ratio(visits, BEFORE, name) if name != BEFORE else None
        else:
            row |= {"not_available": "not measured yet"} | isolated
        rows.append(row)
    return rows


def _measured(visits: Sequence[PhotoTimings], name: str, fastest: str | None) -> Row:
    seconds = [visit.seconds[name] for visit in visits if name in visit.seconds]
    rates = _rates(visits, name)
    naive = _rates(visits, "naive")
    row: Row = {
        "images": len(seconds),
        "images_per_second": significant(len(seconds) / sum(seconds)),
        "times_naive": significant(statistics.median(rates) / statistics.median(naive)) if naive else None,
        "times_fastest": None if fastest is None else _ratio(visits, fastest, name),
        "fastest": fastest,
        "gflop_per_second": {
            "median": round(statistics.median(rates), 1),
            "lowest": round(min(rates), 1),
            "highest": round(max(rates), 1),
        },
        "largest_deviation": max((v.deviations[name] for v in visits if name in v.deviations), default=None),
    }
    if name == "naive":
        crops = sum(visit.crops for visit in visits if visit.crops)
        row["crops"] = {"of the picture": crops, "classified": min(crops, SAMPLED_CROPS)}
    return row


def _rates(visits: Sequence[PhotoTimings], name: str) -> list[float]:
    """Return GFLOP/s on each picture."""
    return [visit.gflop / visit.seconds[name] for visit in visits if name in visit.seconds]


def _ratio(visits: Sequence[PhotoTimings], other: str, name: str) -> Row | None:
    """Return the speed relative to another competitor, from the pictures that both classified.

    error: standard error of the median, assuming normal ratios; None for a single one.
    """
    both = [visit.seconds for visit in visits if other in visit.seconds and name in visit.seconds]
    if not both:
        return None
    median, error = median_ratio([seconds[other] for seconds in both], [seconds[name] for seconds in both])
    return {
        "median": significant(median),
        "error": None if error is None else significant(error, 2),
        "pictures": len(both),
    }


def goals_of(results: Sequence[Mapping[str, Any]], *, amx: bool = False) -> list[Goal]:
    """Return the project's goals and whether they are met, for each measured net and protocol.

    amx: whether the processor has AMX, which int8's goals depend on;
    sure: whether the distance to the limit exceeds two standard errors.
    """
    goals: list[Goal] = []
    for result in results:
        where, rows = f"{result['net']}, {result['protocol']['name']}", result["rows"]
        for precision in ("fp32", "bf16"):
            ratio = max(_of_ours(rows, precision, "times_fastest"), key=lambda ratio: ratio["median"], default=None)
            if ratio is not None:
                measured, error = ratio["median"], ratio["error"]
                text = f"{where}: ours in {precision} at least {ENOUGH} of the fastest {precision} competitor"
                sure = differs(measured, ENOUGH, error)
                goals.append({"goal": text, "measured": measured, "met": measured >= ENOUGH, **ratio, "sure": sure})
        before = next(iter(_of_ours(rows, "bf16", "times_before")), None)
        if before is not None and result["protocol"]["scales"] == [480]:
            text = f"{where}: ours in bf16 at least {TIMES_BEFORE} times as fast as the file of --before"
            measured, sure = before["median"], differs(before["median"], TIMES_BEFORE, before["error"])
            goals.append({"goal": text, "measured": measured, "met": measured >= TIMES_BEFORE, **before, "sure": sure})
        times = max(_of_ours(rows, "fp32", "times_naive"), default=None)
        if times is not None and len(result["protocol"]["scales"]) > 1:
            text = f"{where}: ours in fp32 at least {TIMES_NAIVE} times as fast as naive"
            goals.append({"goal": text, "measured": times, "met": times >= TIMES_NAIVE})
        if len(result["protocol"]["scales"]) > 1:
            goals += _int8_goals(where, rows, amx=amx)
    return goals


def _int8_goals(where: str, rows: Sequence[Row], *, amx: bool) -> list[Goal]:
    rates = {row["competitor"]: row["gflop_per_second"]["median"] for row in rows if "gflop_per_second" in row}
    goals: list[Goal] = []
    for other, times in INT8_GOALS[amx].items():
        if {other, "ours, openvino int8"} <= rates.keys():
            measured = significant(rates["ours, openvino int8"] / rates[other])
            text = f"{where}: ours in int8 at least {times} times as fast as {other}"
            goals.append({"goal": text, "measured": measured, "met": measured >= times})
    return goals


def _of_ours(rows: Sequence[Row], precision: str, key: str) -> list[Any]:
    return [row[key] for row in rows if row["ours"] and row["precision"] == precision and row.get(key) is not None]


def tables(result: Mapping[str, Any]) -> str:
    """Return the whole result in Markdown."""
    threads = f"Threads of every competitor: {result['threads']}."
    lines = ["# Dense evaluation side by side", "", f"{described_run(result)} {threads} {NOTES}"]
    for one in result["results"]:
        there = [row for row in one["rows"] if "not_available" not in row]
        lines += ["", f"## {one['net']}, {one['protocol']['name']}", "", _pictures(one), ""]
        lines += [markdown(HEADER, map(_cells, there)), "", *_asides(one["rows"])]
    return "\n".join([*lines, "", "## Goals", "", *map(_verdict, result["goals"])]) + "\n"


def _verdict(goal: Goal) -> str:
    words = f"- {'met' if goal['met'] else 'NOT met'}: {goal['goal']}; measured {goal['measured']:g}"
    if "sure" not in goal:
        return words
    spread = "" if goal["error"] is None else f" ± {goal['error']:g}"
    close = "" if goal["sure"] else ", not significant"
    return f"{words}{spread} (pictures: {goal['pictures']}){close}"


def _pictures(result: Mapping[str, Any]) -> str:
    pictures = {visit["name"]: visit for visit in result["visits"]}.values()
    sizes = ", ".join(f"{picture['height']}x{picture['width']}" for picture in pictures)
    gflop = statistics.mean(picture["gflop"] for picture in pictures)
    return f"{len(pictures)} picture{'s' * (len(pictures) > 1)}: {sizes}; {gflop:.0f} GFLOP on average."


def _cells(row: Row) -> tuple[Any, ...]:
    rate, times = row["gflop_per_second"], row["times_fastest"]
    spread = "" if times is None or not times["error"] else f" ± {times['error']:.2f}"
    return (
        row["competitor"],
        row["precision"],
        row["images"],
        row["images_per_second"],
        row["times_naive"],
        None if times is None else f"{times['median']:.2f}{spread}",
        rate["median"],
        f"{row['share_of_bound']:.0%}" if row.get("share_of_bound") else None,
        f"{rate['lowest']:.0f} to {rate['highest']:.0f}",
        row.get("peak_memory_mb"),
        row.get("load_seconds"),
        row["largest_deviation"],
    )


def _asides(rows: Sequence[Row]) -> list[str]:
    """Return the notes below the table: the naive sample, and unavailable competitors."""
    lines = []
    for row in rows:
        if crops := row.get("crops"):
            whole = crops["of the picture"] == crops["classified"]
            how = "all of them" if whole else f"a random sample of {crops['classified']}, and scaled"
            lines.append(f"- naive: on one picture only, with {crops['of the picture']} crops; classified were {how}.")
        if "not_available" in row:
            lines.append(f"- {row['competitor']}: not available: {row['not_available']}")
    return lines
