"""The charts of a comparison, as in the paper's Fig. 7, as Vega-Lite specifications: pure functions of compare.json."""

from collections.abc import Mapping
from typing import Any

from .charts import (
    FEW_CLASSES,
    Spec,
    chart_spec,
    class_axis,
    place_axis,
    row_under_pointer,
)
from .compare import Comparison
from .html import signed

ROW = 24  # pixels per named class
CHANGES = ("improved", "unchanged", "worse")
_COLORS = ("var(--accent)", "var(--second)", "var(--worse)")
# The page's class counts use the same colors, so there is no legend.
_COLOR = {"field": "change", "type": "nominal", "scale": {"domain": CHANGES, "range": _COLORS}, "legend": None}
_SIGNED = "format(datum.value, datum.value ? '+~f' : '~f')"
_TOOLTIP = [
    {"field": "name", "title": "class"},
    {"field": "wnid", "title": "wnid"},
    {"field": "a", "title": "error of A"},
    {"field": "b", "title": "error of B"},
    {"field": "summary", "title": "difference"},
    {"field": "images", "title": "images"},
]


def change_of(difference: float) -> str:
    """Return whether a class with this difference, B - A, improved, is unchanged or got worse."""
    return CHANGES[0] if difference < 0 else CHANGES[2] if difference > 0 else CHANGES[1]


def difference_chart(comparison: Comparison, key: str) -> Spec | None:
    """Chart the difference in error of every class by `key` (top1 or top5), most improved first; None without images.

    Up to 40 classes are named, with their intervals; more become a sorted curve.
    """
    seen = [entry for entry in comparison["classes"] if entry["evaluated"]]
    if not seen:
        return None
    seen.sort(key=lambda entry: (entry[key]["difference"], entry[key]["interval"], entry["index"]))
    values = [_row(entry, key, place) for place, entry in enumerate(seen, start=1)]
    return _named_classes(values, key) if len(seen) <= FEW_CLASSES else _sorted_curve(values, key)


def _row(entry: Mapping[str, Any], key: str, place: int) -> dict[str, Any]:
    metric = entry[key]
    low, high = metric["interval"]
    return {
        "index": entry["index"],
        "name": entry["name"],
        "wnid": entry["wnid"],
        "images": entry["evaluated"],
        "place": place,
        "change": change_of(metric["difference"]),
        "difference": round(metric["difference"], 2),
        "low": round(low, 2),
        "high": round(high, 2),
        "a": f"{metric['a_error']:.1f} %",
        "b": f"{metric['b_error']:.1f} %",
        "summary": f"{signed(metric['difference'], 1)} points ({signed(low, 1)} to {signed(high, 1)})",
    }


def _named_classes(values: list[dict[str, Any]], key: str) -> Spec:
    """Return a row per class, most improved first; the axis identifies classes by index: names may not be unique."""
    y = class_axis([row["index"] for row in values])
    title = [f"top-{key.removeprefix('top')} error, B − A (points)", "B is better left of 0"]  # lines, for a phone
    x = {"type": "quantitative", "title": title, "axis": {"tickCount": 6, "labelExpr": _SIGNED}}
    rest = {"y": y, "color": _COLOR, "tooltip": _TOOLTIP}
    return chart_spec(
        values,
        params=[{"name": "names", "value": {str(row["index"]): row["name"] for row in values}}],
        height=ROW * len(values),
        layer=[
            _zero("x"),
            {
                "mark": {"type": "rule", "strokeWidth": 5, "opacity": 0.25, "strokeCap": "round"},
                "encoding": {"x": {"field": "low", **x}, "x2": {"field": "high"}, **rest},
            },
            {
                "mark": {"type": "point", "filled": True, "size": 75, "opacity": 1},
                "encoding": {"x": {"field": "difference", **x}, **rest},
            },
        ],
    )


def _sorted_curve(values: list[dict[str, Any]], key: str) -> Spec:
    """Return the ascending curve of differences with their intervals as a band; marks the class under the pointer."""
    reach = min(100.0, max(5.0, 1.15 * max(abs(row["difference"]) for row in values)))
    x = place_axis(len(values), "classes, from most improved to most worsened")
    y = {
        "type": "quantitative",
        "scale": {"domain": [-reach, reach], "nice": False},
        "title": f"top-{key.removeprefix('top')} error, B − A (points)",
        "axis": {"tickCount": 6, "domain": False, "labelExpr": _SIGNED},
    }
    difference = {"field": "difference", **y}
    return chart_spec(
        values,
        height=300,
        layer=[
            {
                "mark": {"type": "area", "opacity": 0.16, "clip": True, "interpolate": "step", "color": _COLORS[1]},
                "encoding": {"x": x, "y": {"field": "low", **y}, "y2": {"field": "high"}},
            },
            {
                "mark": {"type": "area", "opacity": 0.9, "interpolate": "step"},
                "encoding": {"x": x, "y": difference, "y2": {"datum": 0}, "color": _COLOR},
            },
            _zero("y"),
            row_under_pointer(f"near_{key}", _TOOLTIP, x=x, y=difference, color=_COLOR),
        ],
    )


def _zero(axis: str) -> Spec:
    """Return the layer with the line at 0."""
    return {
        "data": {"values": [{}]},
        "mark": {"type": "rule", "color": "var(--muted)", "opacity": 0.7},
        "encoding": {axis: {"datum": 0, "type": "quantitative"}},
    }
