"""From visits to rows, tables and verdicts. Pure functions."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from competitors import COMPETITORS
from interleaved import SAMPLED_CROPS, Visit

Row = dict[str, Any]
Goal = dict[str, Any]

HEADS = (
    "competitor",
    "precision",
    "images/s",
    "x naive",
    "x fastest",
    "GFLOP/s",
    "lowest to highest",
    "peak MB",
    "ready s",
    "scores off by",
)
NOTES = (
    "Resizing and mirroring are part of every competitor's time, decoding of none. All of one precision take turns on "
    "each picture; the other precision follows on the same pictures, since all at once would take 20 GB for model C. "
    "*images/s*: pictures over their seconds. *x naive*: as many times the naive way's GFLOP/s. *x fastest*: times as "
    "fast as the fastest competitor of the same precision that is not ours, the median over pictures of the ratio on "
    "the same one. *GFLOP/s*: two per multiply-add of the dense evaluation, median over pictures, then the lowest and "
    "the highest. *peak MB*, *ready s*: the competitor alone in a new process; imports, loading and compiling, then "
    "one picture at the largest scale. *scores off by*: the largest difference from torch eager. *openvino, our file*: "
    "bare calls of the runtime, on the compiled model that *ours* uses."
)
ENOUGH = 0.95  # of the fastest competitor's speed
TIMES_NAIVE = 10


def rows_of(visits: Sequence[Visit], alone: Mapping[str, Mapping[str, Any]]) -> list[Row]:
    """Return a row per competitor, in the order of COMPETITORS.

    alone: by competitor, what `benchmarks/alone.py` says, or {"not_available": why}; who is not in it was not chosen.
    """
    names = {name for visit in visits for name in visit.seconds}
    fastest = {
        precision: min(
            (n for n in names if COMPETITORS[n].precision == precision and not COMPETITORS[n].ours and n != "naive"),
            key=lambda name: sum(_of(visits, name)),
            default=None,
        )
        for precision in ("fp32", "bf16")
    }
    rows = []
    for name, competitor in COMPETITORS.items():
        row: Row = {"competitor": name, "precision": competitor.precision, "ours": competitor.ours}
        known = dict(alone.get(name, {"not_available": "not chosen"}))
        if name in names:
            row |= _measured(visits, name, fastest[competitor.precision]) | known
        else:
            row |= {"not_available": "not measured yet"} | known
        rows.append(row)
    return rows


def _measured(visits: Sequence[Visit], name: str, fastest: str | None) -> Row:
    seconds, rates = _of(visits, name), _rates(visits, name)
    naive = _rates(visits, "naive")
    row: Row = {
        "images": len(seconds),
        "images_per_second": _significant(len(seconds) / sum(seconds)),
        "times_naive": _significant(statistics.median(rates) / statistics.median(naive)) if naive else None,
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


def _of(visits: Sequence[Visit], name: str) -> list[float]:
    return [visit.seconds[name] for visit in visits if name in visit.seconds]


def _rates(visits: Sequence[Visit], name: str) -> list[float]:
    """Return GFLOP/s on each picture."""
    return [visit.gflop / visit.seconds[name] for visit in visits if name in visit.seconds]


def _ratio(visits: Sequence[Visit], other: str, name: str) -> float | None:
    """Return how many times as fast as another competitor one is: the median over the visits that both took part in."""
    ratios = [v.seconds[other] / v.seconds[name] for v in visits if other in v.seconds and name in v.seconds]
    return _significant(statistics.median(ratios)) if ratios else None


def _significant(value: float, digits: int = 4) -> float:
    return float(f"{value:.{digits}g}")


def goals_of(results: Sequence[Mapping[str, Any]]) -> list[Goal]:
    """Return what the project wants to hold, and whether it does, for each net and protocol that was measured."""
    goals: list[Goal] = []
    for result in results:
        where, rows = f"{result['net']}, {result['protocol']['name']}", result["rows"]
        for precision in ("fp32", "bf16"):
            ratio = _best(rows, precision, "times_fastest")
            if ratio is not None:
                text = f"{where}: ours in {precision} at least {ENOUGH} of the fastest {precision} competitor"
                goals.append({"goal": text, "measured": ratio, "met": ratio >= ENOUGH})
        times = _best(rows, "fp32", "times_naive")
        if times is not None and len(result["protocol"]["scales"]) > 1:
            text = f"{where}: ours in fp32 at least {TIMES_NAIVE} times as fast as naive"
            goals.append({"goal": text, "measured": times, "met": times >= TIMES_NAIVE})
    return goals


def _best(rows: Sequence[Row], precision: str, key: str) -> float | None:
    values = [row[key] for row in rows if row["ours"] and row["precision"] == precision and row.get(key) is not None]
    return max(values, default=None)


def tables(result: Mapping[str, Any]) -> str:
    """Return the whole result in Markdown."""
    machine = result["machine"]
    lines = [
        "# Dense evaluation side by side",
        "",
        f"{result['date']}, {machine['cpu']}, {result['threads']} threads, {machine['memory_gb']} GB "
        f"({', '.join(machine['instructions'])}). Command: `{result['command']}`. {NOTES}",
    ]
    for one in result["results"]:
        lines += ["", f"## {one['net']}, {one['protocol']['name']}", "", _pictures(one), "", *_table(one["rows"])]
        lines += ["", *_asides(one["rows"])]
    lines += ["", "## Goals", ""]
    for goal in result["goals"]:
        lines.append(f"- {'met' if goal['met'] else 'NOT met'}: {goal['goal']}; measured {goal['measured']:g}")
    return "\n".join(lines) + "\n"


def _pictures(result: Mapping[str, Any]) -> str:
    pictures = {visit["name"]: visit for visit in result["visits"]}.values()
    sizes = ", ".join(f"{picture['height']}x{picture['width']}" for picture in pictures)
    gflop = statistics.mean(picture["gflop"] for picture in pictures)
    least, most = (extreme(picture["largest_score"] for picture in pictures) for extreme in (min, max))
    return (
        f"{len(pictures)} picture{'s' * (len(pictures) > 1)}: {sizes}; {gflop:.0f} GFLOP on average. "
        f"The largest score of each: {least:.2f} to {most:.2f}."
    )


def _table(rows: Sequence[Row]) -> list[str]:
    cells = [HEADS, *(_cells(row) for row in rows if "not_available" not in row)]
    widths = [max(len(line[column]) for line in cells) for column in range(len(HEADS))]
    padded = [
        " | ".join(cell.ljust(width) if column < 2 else cell.rjust(width) for column, (cell, width) in enumerate(pairs))
        for pairs in (list(zip(line, widths, strict=True)) for line in cells)
    ]
    rule = "|".join("-" * (width + 2) if column < 2 else "-" * (width + 1) + ":" for column, width in enumerate(widths))
    return [f"| {padded[0]} |", f"|{rule}|", *(f"| {line} |" for line in padded[1:])]


def _cells(row: Row) -> tuple[str, ...]:
    rate, deviation = row["gflop_per_second"], row["largest_deviation"]
    return (
        row["competitor"],
        row["precision"],
        f"{row['images_per_second']:.3g}",
        "" if row["times_naive"] is None else f"{row['times_naive']:.1f}",
        "" if row["times_fastest"] is None else f"{row['times_fastest']:.2f}",
        f"{rate['median']:.0f}",
        f"{rate['lowest']:.0f} to {rate['highest']:.0f}",
        str(row.get("peak_memory_mb", "")),
        f"{row['load_seconds']:.1f}" if "load_seconds" in row else "",
        "" if deviation is None else f"{deviation:.0e}",
    )


def _asides(rows: Sequence[Row]) -> list[str]:
    """Return what the table cannot hold: the naive sample, and who was not there."""
    lines = []
    for row in rows:
        if crops := row.get("crops"):
            whole = crops["of the picture"] == crops["classified"]
            how = "all of them" if whole else f"a random sample of {crops['classified']}, and scaled"
            lines.append(f"- naive: on one picture only, with {crops['of the picture']} crops; classified were {how}.")
        if "not_available" in row:
            lines.append(f"- {row['competitor']}: not available: {row['not_available']}")
    return lines
