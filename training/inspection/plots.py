"""The plots of `prelunet inspect`: pure functions of layer measurements (`LayerResponse.to_json`), as SVG."""

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from ...evaluator.reporting.charts import Spec, chart_spec
from ...evaluator.reporting.html import draw_svg
from .layer_log import std

Layers = Sequence[Mapping[str, Any]]

# panel → (title, whether its axis is logarithmic)
_PANELS = {
    "response": ("standard deviation of the response", True),
    "gradient": ("standard deviation of the gradient", True),
    "slope": ("mean slope of the negative side", False),
    "never_positive": ("channels never positive (percent)", False),
}
_NET_COLORS = ["var(--accent)", "#b3541e", "#3f8f6b", "#7a4fa0"]
_NET_DASHES = [[1, 0], [6, 3], [2, 2], [8, 3, 2, 3]]  # so that nets differ in gray print, too
_MIN_AXIS_END = {"slope": 0.25, "never_positive": 1.0}  # minimum upper end of a linear axis


def draw_layers(nets: Mapping[str, Layers]) -> bytes:
    """Return the SVG of measurements by depth, a line per net: responses, gradients, slopes, never-positive channels.

    nets: name → its layers.
    """
    names = sorted({layer["layer"] for layers in nets.values() for layer in layers}, key=_depth)
    x: Spec = {"field": "layer", "type": "nominal", "sort": names, "title": None, "scale": {"domain": names}}
    x["axis"] = {"labelAngle": -50, "domain": False, "ticks": False, "labelPadding": 6}
    mark = {"type": "line", "point": {"size": 45}, "strokeWidth": 2}
    legend = {"orient": "bottom", "symbolType": "stroke", "symbolStrokeWidth": 3, "labelLimit": 0}
    net = {"field": "net", "type": "nominal", "sort": list(nets), "legend": legend if len(nets) > 1 else None}
    color = {**net, "scale": {"domain": list(nets), "range": _NET_COLORS}}
    dash = {**net, "scale": {"domain": list(nets), "range": _NET_DASHES}}
    rows = [{**row, "net": name} for name, layers in nets.items() for row in _rows(layers, step=0)]
    return _panels(rows, {"mark": mark, "encoding": {"x": x, "color": color, "strokeDash": dash}})


def draw_history(entries: Sequence[Mapping[str, Any]]) -> bytes:
    """Return the SVG of a run's diagnosis.jsonl: the same panels over the steps, with one line per layer."""
    names = [layer["layer"] for layer in entries[0]["layers"]]
    rows = [row for entry in entries for row in _rows(entry["layers"], entry["step"])]
    x = {"field": "step", "type": "quantitative", "title": "step", "axis": {"grid": False, "format": ",d"}}
    legend = {"orient": "right", "symbolType": "stroke", "symbolStrokeWidth": 3, "columns": -(-len(names) // 20)}
    color = {"field": "layer", "type": "nominal", "sort": names, "legend": legend}
    color["scale"] = {"domain": names, "scheme": "viridis"}  # dark at conv1, light at fc3
    mark = {"type": "line", "point": {"size": 14}, "strokeWidth": 1.75}
    return _panels(rows, {"mark": mark, "encoding": {"x": x, "color": color}})


def _depth(layer: str) -> tuple[bool, list[int]]:
    """Return the sort key of `conv3_10` or `fc1` on an axis that nets of different depths share."""
    return layer.startswith("fc"), [int(number) for number in re.findall(r"\d+", layer)]


def _rows(layers: Layers, step: int) -> list[dict[str, Any]]:
    """Return a row for each value that can be drawn; a logarithmic axis cannot show 0."""
    rows = []
    for layer in layers:
        share = layer["never_positive"]
        values = {
            "response": std(layer, "variance"),
            "gradient": std(layer, "gradient_variance"),
            "slope": layer["slope"],
            "never_positive": None if share is None else 100 * share,
        }
        rows += [
            {"layer": layer["layer"], "step": step, "panel": panel, "value": value}
            for panel, value in values.items()
            if value is not None and not (_PANELS[panel][1] and value == 0)
        ]
    return rows


def _panels(rows: list[dict[str, Any]], layer_spec: Spec) -> bytes:
    """Return the SVG of the panels that have rows, in two columns. layer_spec: mark, and encoding without y."""
    base = chart_spec(rows)
    panels = []
    for panel, (title, logarithmic) in _PANELS.items():
        if values := [row["value"] for row in rows if row["panel"] == panel]:
            axis: Spec = {"domain": False, "tickCount": 5}
            scale: Spec = {"nice": not logarithmic}
            if logarithmic:  # with lines at powers of ten
                low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
                high = max(high, low + 1)
                step = -(-(high - low) // 6)
                axis |= {"format": "~g", "values": [10.0**power for power in range(low, high + 1, step)]}
                scale |= {"type": "log", "domain": [10.0**low, 10.0**high]}
            else:
                scale["domain"] = [min(0.0, *values), max(*values, _MIN_AXIS_END[panel])]
            filtered = {"transform": [{"filter": {"field": "panel", "equal": panel}}]}
            y = {"field": "value", "type": "quantitative", "title": title, "scale": scale, "axis": axis}
            encoding = {**layer_spec["encoding"], "y": y}
            panels.append({"width": 380, "height": 210, **filtered, "mark": layer_spec["mark"], "encoding": encoding})
    return draw_svg(
        {"config": base["config"], "data": base["data"], "concat": panels, "columns": 2, "spacing": 28, "padding": 12}
    )
