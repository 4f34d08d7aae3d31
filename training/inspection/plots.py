"""The plots of `prelunet inspect`: pure functions of measured layers (`LayerResponse.to_json`), drawn as SVG."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from prelunet.evaluator.reporting.charts import Spec, chart_spec
from prelunet.evaluator.reporting.html import draw_svg
from prelunet.training.inspection.layer_log import std

Layers = Sequence[Mapping[str, Any]]

# What is drawn of a layer, and how: title, logarithmic or not.
_PANELS = {
    "response": ("standard deviation of the response", True),
    "gradient": ("standard deviation of the gradient", True),
    "slope": ("mean slope of the negative side", False),
    "never_positive": ("channels never positive (percent)", False),
}
_MIN_AXIS_END = {"slope": 0.25, "never_positive": 1.0}  # where a linear axis ends at the least


def draw_layers(layers: Layers) -> bytes:
    """Return the SVG of one measurement: responses, gradients, slopes and channels never positive, by depth."""
    names = [layer["layer"] for layer in layers]
    x: Spec = {"field": "layer", "type": "nominal", "sort": names, "title": None, "scale": {"domain": names}}
    x["axis"] = {"labelAngle": -50, "domain": False, "ticks": False, "labelPadding": 6}
    point = {"size": 45, "color": "var(--accent)"}
    mark = {"type": "line", "point": point, "color": "var(--accent)", "strokeWidth": 2}
    return _panels(_rows(layers, step=0), {"mark": mark, "encoding": {"x": x}})


def draw_history(entries: Sequence[Mapping[str, Any]]) -> bytes:
    """Return the SVG of a training's diagnosis.jsonl: the same panels over the steps, a line for each layer."""
    names = [layer["layer"] for layer in entries[0]["layers"]]
    rows = [row for entry in entries for row in _rows(entry["layers"], entry["step"])]
    x = {"field": "step", "type": "quantitative", "title": "step", "axis": {"grid": False, "format": ",d"}}
    legend = {"orient": "right", "symbolType": "stroke", "symbolStrokeWidth": 3, "columns": -(-len(names) // 20)}
    colour = {"field": "layer", "type": "nominal", "sort": names, "legend": legend}
    colour["scale"] = {"domain": names, "scheme": "viridis"}  # dark at conv1, light at fc3
    mark = {"type": "line", "point": {"size": 14}, "strokeWidth": 1.75}
    return _panels(rows, {"mark": mark, "encoding": {"x": x, "color": colour}})


def _rows(layers: Layers, step: int) -> list[dict[str, Any]]:
    """Return a row for each number that can be drawn: a logarithmic axis has no place for 0."""
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


def _y(panel: str, values: Sequence[float]) -> Spec:
    """Return the y axis of a panel for these values; a logarithmic one has a line at each power of ten, or at some."""
    title, logarithmic = _PANELS[panel]
    axis: Spec = {"domain": False, "tickCount": 5}
    if logarithmic:
        low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
        high = max(high, low + 1)
        step = -(-(high - low) // 6)
        axis |= {"format": "~g", "values": [10.0**power for power in range(low, high + 1, step)]}
        scale = {"type": "log", "domain": [10.0**low, 10.0**high], "nice": False}
    else:
        scale = {"domain": [min(0.0, *values), max(*values, _MIN_AXIS_END[panel])], "nice": True}
    return {"field": "value", "type": "quantitative", "title": title, "scale": scale, "axis": axis}


def _panels(rows: list[dict[str, Any]], drawn: Spec) -> bytes:
    """Return the SVG of the panels for which there are rows, two beside each other. drawn: mark and encoding but y."""
    base = chart_spec(rows)
    panels = []
    for panel in _PANELS:
        if values := [row["value"] for row in rows if row["panel"] == panel]:
            chosen = {"transform": [{"filter": {"field": "panel", "equal": panel}}]}
            encoding = {**drawn["encoding"], "y": _y(panel, values)}
            panels.append({"width": 380, "height": 210, **chosen, "mark": drawn["mark"], "encoding": encoding})
    return draw_svg(
        {"config": base["config"], "data": base["data"], "concat": panels, "columns": 2, "spacing": 28, "padding": 12}
    )
