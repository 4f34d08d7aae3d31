"""The plots of growth.py as SVG files in the style of the report's charts, on white. Pure functions of its file."""

import re
import statistics
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import vl_convert

from evaluator.reporting.charts import chart_spec
from evaluator.reporting.html import VEGA_LITE

Json = dict[str, Any]
Row = dict[str, Any]

ORANGE, DARK = "#c2571a", "#2b2f36"  # beside the report's two; all four differ in lightness too
COLOURS = {
    "onnxruntime fp32": "var(--accent)",
    "OpenVINO fp32": ORANGE,
    "OpenVINO bf16": DARK,
    "trunk": "var(--accent)",
    "head": ORANGE,
    "measured": "var(--accent)",
}  # other lines are grey
DASHED = ("expected at most", "all windows' scores")
PEAK = "peak of "  # before an engine's name
WIDTH, HEIGHT = 300, 220
LABEL_SIZE = 12
LABEL_ROOM = 15  # pixels between two labels


def draw(data: Json, folder: Path) -> list[str]:
    """Draw every plot for which there are points; returns their names, that of each file without `.svg`."""
    folder.mkdir(parents=True, exist_ok=True)
    names = []
    for name, figure in FIGURES.items():
        panels = [panel for panel in figure(data) if panel is not None]
        if panels:
            svg = vl_convert.vegalite_to_svg(_in_a_row(panels), vl_version=VEGA_LITE)
            (folder / f"growth-{name}.svg").write_text(svg + "\n", encoding="utf-8")
            names.append(f"growth-{name}")
    return names


def points_of(data: Json, part: str) -> list[Row]:
    """Return settings and result of each point of a part that was measured; of the same settings the last one."""
    points: dict[str, Row] = {}
    for case in data["cases"]:
        if case["settings"]["part"] == part and "error" not in case["result"]:
            points[repr(sorted(case["settings"].items()))] = {**case["settings"], **case["result"]}
    return list(points.values())


def medians(point: Row) -> dict[str, float]:
    """Return the median of each engine's seconds at a point where engines were measured in turn."""
    return {name: statistics.median(taken) for name, taken in point["seconds"].items()}


def _area(data: Json) -> list[Json | None]:
    points = points_of(data, "area")
    seconds = [_row(point["pixels"] / 2e6, value, name) for point in points for name, value in medians(point).items()]
    parts = [
        _row(point["pixels"] / 2e6, value / 1000, name)
        for point in points
        for name, value in (("trunk", point["gflop"] - point["head_gflop"]), ("head", point["head_gflop"]))
    ]
    title = "pixels of one view (millions)"
    return [
        _lines(seconds, title, "seconds for a view and its mirror image"),
        _lines(parts, title, "operations of the two (TFLOP)"),
    ]


def _protocols(data: Json) -> list[Json | None]:
    longer = [
        _row(point["times"], value, name)
        for point in points_of(data, "elongation")
        for name, value in medians(point).items()
    ]
    more = [
        _row(len(point["scales"]), value, name)
        for point in points_of(data, "scales")
        for name, value in medians(point).items()
    ]
    return [
        _lines(longer, "longer side / shorter side", "seconds for a view and its mirror image"),
        _lines(more, "scales", "seconds for an image"),
    ]


def _memory(data: Json) -> list[Json | None]:
    points = points_of(data, "memory")
    panels = []
    for engine in _in_order(point["engine"] for point in points):
        rows = [
            _row(point["pixels"] / 2e6, point[key] / 1024, kind)
            for point in points
            if point["engine"] == engine
            for kind, key in (("measured", "peak_mb"), ("expected at most", "predicted_peak_mb"))
        ]
        panel = _lines(rows, "pixels of one view (millions)", "peak of the process (GB)", width=170)
        panels.append({"title": engine, **panel} if panel else None)
    return panels


def _classes(data: Json) -> list[Json | None]:
    points = points_of(data, "classes")
    seconds = [_row(point["classes"], statistics.median(point["seconds"]), point["engine"]) for point in points]
    sizes = [_row(point["classes"], point["peak_mb"] / 1024, PEAK + point["engine"]) for point in points]
    for point in {point["classes"]: point for point in points}.values():
        sizes += [
            _row(point["classes"], point["file_mb"] / 1024, "model file"),
            _row(point["classes"], point["window_scores_mb"] / 1024, "all windows' scores"),
        ]
    return [
        _lines(seconds, "classes", "seconds for a view and its mirror image", logarithmic=True),
        _lines(sizes, "classes", "size (GB)", logarithmic=True),
    ]


def _dataset(data: Json) -> list[Json | None]:
    points = points_of(data, "dataset")
    each = [_row(point["images"], 1000 * point["seconds"] / point["images"], point["engine"]) for point in points]
    peaks = [_row(point["images"], point["peak_mb"], point["engine"]) for point in points]
    return [
        _lines(each, "images of the dataset", "milliseconds for an image", logarithmic=True),
        _lines(peaks, "images of the dataset", "peak of the process (MB)", logarithmic=True),
    ]


FIGURES = {"area": _area, "protocols": _protocols, "memory": _memory, "classes": _classes, "dataset": _dataset}


def _row(x: float, y: float, series: str) -> Row:
    return {"x": x, "y": y, "series": series}


def _in_order(names: Any) -> list[str]:
    """Return each name once, in the order in which they come."""
    return list(dict.fromkeys(names))


def _lines(
    rows: Sequence[Row], x_title: str, y_title: str, *, logarithmic: bool = False, width: int = WIDTH
) -> Json | None:
    """Return a panel with a line for each series, named at its right end; None without any point."""
    if not rows:
        return None
    top = 1.05 * max(row["y"] for row in rows)
    x_axis: Json = {"grid": False, "labelFlush": False, "tickCount": 5}
    if logarithmic:
        x_axis |= {"values": sorted({row["x"] for row in rows}), "format": ",d", "labelOverlap": True}
    x_scale = {"type": "log", "nice": False} if logarithmic else {"zero": True, "nice": False}
    x = {"field": "x", "type": "quantitative", "title": x_title, "scale": x_scale, "axis": x_axis}
    y = {"type": "quantitative", "title": y_title, "scale": {"domain": [0, top], "nice": True}}
    y["axis"] = {"tickCount": 5, "domain": False}
    point = {"x": x, "y": {"field": "y", **y}}
    dash = {"condition": {"test": f"indexof({list(DASHED)}, datum.series) >= 0", "value": [4, 3]}, "value": [1, 0]}
    label = {"x": x, "y": {"field": "label_y", **y}, "text": {"field": "series"}}
    return {
        "width": width,
        "height": HEIGHT,
        "data": {"values": [{**row, "colour": _colour(row["series"])} for row in rows]},
        "encoding": {"color": {"field": "colour", "type": "nominal", "scale": None}, "detail": {"field": "series"}},
        "layer": [
            {"mark": {"type": "line", "strokeWidth": 2}, "encoding": {**point, "strokeDash": dash}},
            {"mark": {"type": "point", "filled": True, "size": 40, "opacity": 1}, "encoding": point},
            {
                "data": {"values": _labels(rows, top)},
                "mark": {"type": "text", "align": "left", "dx": 8, "fontSize": LABEL_SIZE},
                "encoding": label,
            },
        ],
    }


def _colour(series: str) -> str:
    return COLOURS.get(series.removeprefix(PEAK), "var(--second)")


def _labels(rows: Sequence[Row], top: float) -> list[Row]:
    """Return the rows that carry the names: the last of each series, as far from each other as text is high."""
    series = _in_order(row["series"] for row in rows)
    ends = [max((row for row in rows if row["series"] == name), key=lambda row: row["x"]) for name in series]
    places = apart([row["y"] for row in ends], top * LABEL_ROOM / HEIGHT)
    right = max(row["x"] for row in rows)
    return [
        {**row, "x": right, "label_y": place, "colour": _colour(row["series"])}
        for row, place in zip(ends, places, strict=True)
    ]


def apart(values: Sequence[float], least: float) -> list[float]:
    """Return places for labels at these values, none below 0 and no two nearer than `least`; order is kept.

    Those that are too near to each other are spread around their middle.
    """
    groups: list[tuple[list[int], float]] = []  # members from below, place of the lowest
    for index in sorted(range(len(values)), key=lambda index: values[index]):
        groups.append(([index], max(0.0, values[index])))
        while len(groups) > 1 and groups[-1][1] - groups[-2][1] < least * len(groups[-2][0]):
            members = groups[-2][0] + groups[-1][0]
            middle = statistics.mean(values[member] for member in members)
            groups[-2:] = [(members, max(0.0, middle - least * (len(members) - 1) / 2))]
    places = {member: lowest + least * place for members, lowest in groups for place, member in enumerate(members)}
    return [places[index] for index in range(len(values))]


def _in_a_row(panels: Sequence[Json]) -> Json:
    """Return one specification of panels side by side, in the light colours of the report, on white."""
    config = chart_spec([])["config"]
    title = {"color": "var(--ink)", "fontSize": 13, "fontWeight": "normal", "anchor": "start", "frame": "group"}
    config = {**config, "background": "white", "title": title}
    return _coloured({"config": config, "hconcat": list(panels), "spacing": 30, "padding": 12})


def _coloured(spec: Any) -> Any:
    """Replace CSS variables by the report's light colours: a file of its own has no style sheet."""
    if isinstance(spec, Mapping):
        return {key: _coloured(value) for key, value in spec.items()}
    if isinstance(spec, list | tuple):
        return [_coloured(value) for value in spec]
    return re.sub(r"var\((--[a-z-]+)\)", lambda found: _light()[found[1]], spec) if isinstance(spec, str) else spec


def _light() -> dict[str, str]:
    """Return the variables of the first rule of report.css."""
    css = (resources.files("evaluator.reporting") / "report.css").read_text(encoding="utf-8")
    rule = css[css.index("{") : css.index("}")]
    return dict(re.findall(r"(--[a-z-]+):\s*([^;]+);", rule))
