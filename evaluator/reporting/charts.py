"""The charts of the report as Vega-Lite specifications: pure functions of report.json.

Colors are CSS variables of base.css, so that one chart works for light mode, dark mode and print.
"""

from typing import Any

from .tables import worst_first

FEW_CLASSES = 40  # up to this many classes are named along an axis; more become a curve
TOP1, TOP5 = "top-1", "top-5"

Spec = dict[str, Any]

_COLORS = {"domain": [TOP1, TOP5], "range": ["var(--accent)", "var(--second)"]}
_FONT = "Inter, system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', sans-serif"
_CONFIG = {
    "background": "transparent",
    "font": _FONT,
    "view": {"stroke": None},
    "axis": {
        "domainColor": "var(--line)",
        "gridColor": "var(--grid)",
        "tickColor": "var(--line)",
        "labelColor": "var(--muted)",
        "titleColor": "var(--muted)",
        "titleFontWeight": "normal",
        "labelFontSize": 12,
        "titleFontSize": 12,
        "titlePadding": 10,
    },
    "legend": {
        "labelColor": "var(--ink)",
        "labelFontSize": 13,
        "title": None,
        "orient": "top",
        "offset": 12,
        "symbolType": "circle",
        "symbolStrokeWidth": 0,
        "symbolSize": 90,
        "symbolOpacity": 1,
        "columnPadding": 24,
    },
}
_TOOLTIP = [
    {"field": "name", "title": "class"},
    {"field": "wnid", "title": "wnid"},
    {"field": "top1", "title": "top-1 error"},
    {"field": "top5", "title": "top-5 error"},
    {"field": "images", "title": "images"},
]


def error_chart(report: dict[str, Any]) -> Spec | None:
    """Return the chart of the paper's Fig. 6: the sorted top-1 and top-5 errors of all classes; None without images.

    Up to 40 classes are named, with their intervals; more become two curves, each sorted by its own error.
    """
    classes = [entry for entry in report["classes"] if entry["evaluated"]]
    if not classes:
        return None
    return _named_classes(classes) if len(classes) <= FEW_CLASSES else _sorted_curves(classes, report)


def _rows(classes: list[dict[str, Any]], key: str, metric: str) -> list[dict[str, Any]]:
    """Return one row per class with the values of one metric."""
    return [
        {
            "index": entry["index"],
            "name": entry["name"],
            "wnid": entry["wnid"],
            "images": entry["evaluated"],
            "metric": metric,
            "error": round(entry[f"{key}_error"], 2),
            "low": round(entry[f"{key}_interval"][0], 2),
            "high": round(entry[f"{key}_interval"][1], 2),
            "top1": _with_interval(entry, "top1"),
            "top5": _with_interval(entry, "top5"),
        }
        for entry in classes
    ]


def _with_interval(entry: dict[str, Any], key: str) -> str:
    low, high = entry[f"{key}_interval"]
    return f"{entry[f'{key}_error']:.1f} % ({low:.1f} – {high:.1f})"


def class_axis(indices: list[int]) -> Spec:
    """Return a y axis of classes in this order; its labels come from the specification's parameter `names`."""
    return {
        "field": "index",
        "type": "nominal",
        "sort": indices,
        "title": None,
        "axis": {
            "labelExpr": "names[datum.value]",
            "labelLimit": 130,
            "labelColor": "var(--ink)",
            "labelFontSize": 13,
            "labelPadding": 8,
            "ticks": False,
            "domain": False,
        },
    }


def chart_spec(values: list[dict[str, Any]], **rest: Any) -> Spec:
    """Return a Vega-Lite specification of these rows in the page's style, as wide as its container."""
    return {
        "config": _CONFIG,
        "width": "container",
        "autosize": {"type": "fit-x", "contains": "padding"},
        "data": {"values": values},
        **rest,
    }


def _named_classes(classes: list[dict[str, Any]]) -> Spec:
    """Return a row per class, worst first; the axis identifies classes by index because names may not be unique."""
    values = _rows(classes, "top1", TOP1) + _rows(classes, "top5", TOP5)
    names = {str(entry["index"]): entry["name"] for entry in classes}
    y = class_axis([entry["index"] for entry in sorted(classes, key=worst_first)])
    y["scale"] = {"paddingInner": 0.45, "paddingOuter": 0.3}
    offset = {"field": "metric", "sort": [TOP1, TOP5]}
    color = {"field": "metric", "type": "nominal", "scale": _COLORS}
    x = {"type": "quantitative", "title": "error (percent), with 95 % interval", "axis": {"tickCount": 6}}
    return chart_spec(
        values,
        params=[{"name": "names", "value": names}],
        height=round(26 * (len(classes) + 0.15)),  # 26 pixels per class; with a step, vega-lite would warn
        encoding={"y": y, "yOffset": offset, "color": color, "tooltip": _TOOLTIP},
        layer=[
            {
                "mark": {"type": "rule", "strokeWidth": 5, "opacity": 0.22, "strokeCap": "round"},
                "encoding": {"x": {"field": "low", **x}, "x2": {"field": "high"}},
            },
            {
                "mark": {"type": "point", "filled": True, "size": 75, "opacity": 1},
                "encoding": {"x": {"field": "error", **x}},
            },
        ],
    )


def _sorted_curves(classes: list[dict[str, Any]], report: dict[str, Any]) -> Spec:
    """Return two ascending curves over the classes, with the class under the pointer marked on both."""
    values = []
    for key, metric in (("top1", TOP1), ("top5", TOP5)):
        ascending = sorted(_rows(classes, key, metric), key=lambda row: (row["error"], row["index"]))
        values += [{**row, "place": place} for place, row in enumerate(ascending, start=1)]
    overall = [{"metric": metric, "error": report[f"{key}_error"]} for key, metric in (("top1", TOP1), ("top5", TOP5))]
    labels = {row["metric"]: f"{row['metric']}, {row['error']:.2f} % over all images (dashed)" for row in overall}
    legend = {"labelExpr": "labels[datum.value]", "labelLimit": 320, "columns": {"expr": "width < 560 ? 1 : 2"}}
    x = place_axis(len(classes), "classes, from best to worst for each curve")
    # The axis ends slightly above the worst error, ignoring intervals.
    highest = min(100.0, max(5.0, 1.08 * max(row["error"] for row in values)))
    y = {
        "type": "quantitative",
        "scale": {"domain": [0, highest], "nice": False},
        "title": "error (percent)",
        "axis": {"tickCount": 6, "domain": False},
    }
    return chart_spec(
        values,
        params=[{"name": "labels", "value": labels}],
        height=340,
        encoding={"color": {"field": "metric", "type": "nominal", "scale": _COLORS, "legend": legend}},
        layer=[
            {
                "mark": {"type": "area", "opacity": 0.13, "clip": True, "interpolate": "step"},
                "encoding": {"x": x, "y": {"field": "low", **y}, "y2": {"field": "high"}},
            },
            {
                "mark": {"type": "line", "strokeWidth": 2.25, "interpolate": "step"},
                "encoding": {"x": x, "y": {"field": "error", **y}},
            },
            {
                "data": {"values": overall},
                "mark": {"type": "rule", "strokeDash": [3, 4], "opacity": 0.8},
                "encoding": {"y": {"field": "error", **y}},
            },
            row_under_pointer("near", _TOOLTIP, x=x, y={"field": "error", **y}),
        ],
    )


def place_axis(classes: int, title: str) -> Spec:
    """Return the x axis of a curve over sorted classes."""
    return {
        "field": "place",
        "type": "quantitative",
        "scale": {"domain": [1, classes], "nice": False},
        "title": title,
        "axis": {"grid": False, "tickCount": 8, "format": ",d"},
    }


def row_under_pointer(param: str, tooltip: list[dict[str, str]], *, field: str = "index", **encoding: Spec) -> Spec:
    """Return the layer that marks the rows with the field's value nearest to the pointer, by default those of a class.

    param: name of the selection, unique on a page.
    """
    select = {"type": "point", "fields": [field], "nearest": True, "on": "pointermove", "clear": "pointerout"}
    opacity = {"condition": {"param": param, "empty": False, "value": 1}, "value": 0}
    return {
        "params": [{"name": param, "select": select}],
        "mark": {"type": "point", "filled": True, "size": 85, "stroke": "var(--paper)", "strokeWidth": 1.5},
        "encoding": {**encoding, "opacity": opacity, "tooltip": tooltip},
    }
