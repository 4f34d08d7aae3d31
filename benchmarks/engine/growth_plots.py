"""Plots and tables of growth.py: pure functions of its result file. The plots are SVG, like the report's charts."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any

from benchmarks.common.results import cell, described_run, latest, markdown
from prelunet.evaluator.reporting.charts import chart_spec
from prelunet.evaluator.reporting.html import draw_svg

Json = dict[str, Any]
Row = dict[str, Any]

COLORS = ["var(--accent)", "#c2571a", "#2b2f36", "var(--second)"]  # they differ in lightness too


def points_of(data: Json, part: str) -> list[Row]:
    """Return settings and newest result of each measured point of a part."""
    points = ({**case["settings"], **case["result"]} for case in latest(data))
    return [point for point in points if point["part"] == part and "error" not in point]


def draw(data: Json, folder: Path) -> None:
    """Draw `growth-NAME.svg` for every plot that has points."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, (rows, x, y) in _plots(data).items():
        if rows:
            (folder / f"growth-{name}.svg").write_bytes(draw_svg(_lines(rows, x, y)))


def _plots(data: Json) -> dict[str, tuple[list[Row], str, str]]:
    """Return rows and axis titles of each plot; x is logarithmic if it spans more than two powers of ten."""
    seconds = "seconds for a view and its mirror image"
    area, elongation, memory = (points_of(data, part) for part in ("area", "elongation", "memory"))
    classes, dataset = points_of(data, "classes"), points_of(data, "dataset")
    kinds = {"measured": "peak_mb", "estimated maximum": "foretold_peak_mb"}
    return {
        "area": (
            [_row(p["pixels"] / 2e6, each, name) for p in area for name, each in medians(p).items()],
            "pixels of one view (millions)",
            seconds,
        ),
        "elongation": (
            [_row(p["times"], each, name) for p in elongation for name, each in medians(p).items()],
            "longer side / shorter side",
            seconds,
        ),
        "memory": (
            [_row(p["scale"], p[key] / 1024, p["engine"], kind) for p in memory for kind, key in kinds.items()],
            "scale (shorter side in pixels)",
            "peak after loading (GB)",
        ),
        "classes": ([_row(p["classes"], statistics.median(p["seconds"]), p["engine"]) for p in classes],
                    "classes", seconds),
        "dataset": ([_row(p["images"], p["peak_mb"], p["engine"]) for p in dataset],
                    "images of the dataset", "peak after loading (MB)"),
    }  # fmt: skip


def medians(point: Row) -> dict[str, float]:
    """Return each engine's median seconds at a point where engines were measured in turn."""
    return {name: statistics.median(taken) for name, taken in point["seconds"].items()}


def _row(x: float, y: float, series: str, kind: str = "measured") -> Row:
    return {"x": x, "y": y, "series": series, "kind": kind}


def _lines(rows: Sequence[Row], x_title: str, y_title: str) -> Json:
    """Return a specification with a line for each series and kind, in the report's light colors on white."""
    places = sorted({row["x"] for row in rows})
    logarithmic = places[-1] > 100 * places[0]
    axis = {"grid": False, **({"values": places, "format": ",d"} if logarithmic else {"format": ",~r"})}
    scale = {"type": "log", "nice": False} if logarithmic else {"zero": False, "nice": True}
    x = {"field": "x", "type": "quantitative", "title": x_title, "axis": axis, "scale": scale}
    series, kinds = (list(dict.fromkeys(row[key] for row in rows)) for key in ("series", "kind"))
    color = {"field": "series", "type": "nominal", "scale": {"domain": series, "range": COLORS[: len(series)]}}
    legend = {"symbolType": "stroke", "symbolStrokeWidth": 2, "symbolSize": 300} if len(kinds) > 1 else None
    dashes = {"domain": kinds, "range": [[1, 0], [4, 3]]}
    dash = {"field": "kind", "type": "nominal", "scale": dashes, "legend": legend}
    y = {"field": "y", "type": "quantitative", "title": y_title, "scale": {"zero": True}, "axis": {"domain": False}}
    spec = chart_spec(
        list(rows),
        height=240,
        mark={"type": "line", "strokeWidth": 2, "point": {"size": 40}},
        encoding={"x": x, "y": y, "color": color, "strokeDash": dash},
    )
    return {**spec, "width": 560, "autosize": "pad", "padding": 12}


def tables(data: Json) -> str:
    """Return the circumstances of the runs and a table of each measured part, as Markdown."""
    blocks = []
    for run in (data["runs"][index] for index in sorted({case["run"] for case in data["cases"]})):
        missing = [f" {name}: {reason}." for name, reason in run["engines"].items() if isinstance(reason, str)]
        blocks.append(described_run(run) + "".join(missing))
    for part, columns in _COLUMNS.items():
        points = sorted(points_of(data, part), key=lambda point: point.get("engine", ""))
        engines = list(points[0]["seconds"]) if points and "engine" not in points[0] else []
        header = [*columns, *(f"{engine}: s (GFLOP/s)" for engine in engines)]
        rows = []
        for point in points:
            taken = [medians(point)[engine] for engine in engines]
            rates = [f"{cell(seconds)} ({point['gflop'] / seconds:.0f})" for seconds in taken]
            rows.append([*(read(point) for read in columns.values()), *rates])
        blocks.append(f"{part}\n\n{markdown(header, rows)}" if rows else f"{part}: not measured")
    return "\n\n".join(blocks)


def _estimated(key: str) -> Callable[[Row], str]:
    return lambda point: f"{point[f'{key}_mb']:,} / {point[f'foretold_{key}_mb']:,}"


_WORK: Mapping[str, Callable[[Row], Any]] = {
    "view": lambda point: point["views"][0],
    "windows": lambda point: point["windows"] // 2,
    "GFLOP": itemgetter("gflop"),
}
_COLUMNS: Mapping[str, Mapping[str, Callable[[Row], Any]]] = {
    "area": {
        "scale": itemgetter("scale"),
        **_WORK,
        "of it head": lambda point: f"{100 * point['head_gflop'] / point['gflop']:.0f} %",
    },
    "elongation": {"long / short": itemgetter("times"), **_WORK},
    "scales": {
        "scales": lambda point: ", ".join(map(str, point["scales"])),
        "views": lambda point: len(point["views"]),
        "GFLOP": itemgetter("gflop"),
    },
    "memory": {
        "engine": itemgetter("engine"),
        "scale": itemgetter("scale"),
        "loading MB, measured / estimated": _estimated("loading"),
        "loaded": _estimated("settled"),
        "peak after loading": _estimated("peak"),
    },
    "classes": {
        "engine": itemgetter("engine"),
        "classes": lambda point: f"{point['classes']:,}",
        "GFLOP": itemgetter("gflop"),
        "file MB": itemgetter("file_mb"),
        "windows' scores MB": itemgetter("window_scores_mb"),
        "s": lambda point: statistics.median(point["seconds"]),
        "loading MB": itemgetter("loading_mb"),
        "peak after loading MB": itemgetter("peak_mb"),
    },
    "dataset": {
        "engine": itemgetter("engine"),
        "images": lambda point: f"{point['images']:,}",
        "s": itemgetter("seconds"),
        "ms per image": lambda point: 1000 * point["seconds"] / point["images"],
        "peak after loading MB, measured / estimated": _estimated("peak"),
        "list of samples, bytes per image": itemgetter("list_bytes_an_image"),
        "written, bytes per image": itemgetter("written_bytes_an_image"),
    },
}
