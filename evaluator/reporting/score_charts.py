"""The charts of the answers' scores as Vega-Lite specifications: calibration, histogram, risk against coverage."""

from typing import Any

from .charts import Spec, chart_spec, row_under_pointer
from .html import threshold_text

RIGHT, WRONG = "right answers", "wrong answers"
_BIN_TOOLTIP = [
    {"field": "confidence", "title": "mean confidence"},
    {"field": "accuracy", "title": "accuracy"},
    {"field": "images", "title": "images"},
]
_RISK_TOOLTIP = [
    {"field": "coverage", "title": "coverage", "format": ".1f"},
    {"field": "top1_error", "title": "top-1 error", "format": ".2f"},
    {"field": "score", "title": "score at least"},
    {"field": "images", "title": "images"},
]
_SIDE = {"domain": False, "ticks": False, "minExtent": 44, "maxExtent": 44}  # aligns the two charts


def reliability_chart(report: dict[str, Any]) -> Spec | None:
    """Return the reliability diagram: accuracy by confidence; None without images.

    Guo et al. 2017, Fig. 1. On the dashed diagonal accuracy equals confidence; below it the model is overconfident.
    """
    values = _bins(report)
    if not values:
        return None
    x, y = _confidence_axis(labels=False), {"type": "quantitative", "scale": {"domain": [0, 100]}}
    y |= {"title": "accuracy (percent)", "axis": {**_SIDE, "values": [0, 25, 50, 75, 100]}}
    diagonal = {"values": [{"confidence": 0, "accuracy": 0}, {"confidence": 100, "accuracy": 100}]}
    point = {"x": {"field": "confidence", **x}, "y": {"field": "accuracy", **y}}
    return chart_spec(
        values,
        height=230,
        layer=[
            {
                "mark": {"type": "bar", "color": "var(--accent)", "opacity": 0.16},
                "encoding": {
                    "x": {"field": "low", **x},
                    "x2": {"field": "high"},
                    "y": {"field": "accuracy", **y},
                    "y2": {"datum": 0},
                    "tooltip": _BIN_TOOLTIP,
                },
            },
            {
                "data": diagonal,
                "mark": {"type": "line", "strokeDash": [3, 4], "strokeWidth": 1.5, "color": "var(--second)"},
                "encoding": point,
            },
            {
                "mark": {"type": "point", "filled": True, "size": 60, "opacity": 1, "color": "var(--accent)"},
                "encoding": {**point, "tooltip": _BIN_TOOLTIP},
            },
        ],
    )


def bin_sizes_chart(report: dict[str, Any]) -> Spec | None:
    """Return the number of images per bin of the reliability diagram, for a chart below it on the same axis."""
    values = _bins(report)
    if not values:
        return None
    return chart_spec(
        values,
        height=64,
        mark={"type": "bar", "color": "var(--second)", "opacity": 0.75},
        encoding={
            "x": {"field": "low", **_confidence_axis(labels=True)},
            "x2": {"field": "high"},
            "y": {"field": "images", "type": "quantitative", "title": "images", "axis": {**_SIDE, "tickCount": 2}},
            "y2": {"datum": 0},
            "tooltip": _BIN_TOOLTIP,
        },
    )


def _bins(report: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a row per non-empty bin of the calibration, with its edges in percent."""
    calibration = report["calibration"]
    return [
        {
            "low": round(100 * entry["low"], 2),
            "high": round(100 * entry["high"], 2),
            "images": entry["images"],
            "confidence": round(entry["confidence"], 2),
            "accuracy": round(entry["accuracy"], 2),
        }
        for entry in (calibration["bins"] if calibration else ())
        if entry["images"]
    ]


def _confidence_axis(*, labels: bool) -> Spec:
    axis = {"grid": False, "values": [0, 25, 50, 75, 100], "labels": labels, "ticks": labels}
    title = "confidence: score of the answer (percent)" if labels else None
    return {"type": "quantitative", "scale": {"domain": [0, 100]}, "title": title, "axis": axis}


def histogram_chart(report: dict[str, Any]) -> Spec | None:
    """Return the histogram of the scores of right and of wrong answers, as shares of each group; None without images.

    Shares, because a few wrong answers would be invisible beside many right ones.
    """
    calibration = report["calibration"]
    if not calibration:
        return None
    values = []
    for place, (metric, key) in enumerate(((RIGHT, "right"), (WRONG, "wrong"))):
        total = sum(entry[key] for entry in calibration["histogram"])
        values += [
            {
                "metric": metric,
                "low": round(100 * entry["low"] + 2.5 * place, 1),  # side by side, half a bin each
                "high": round(100 * entry["low"] + 2.5 * place + 2.5, 1),
                "score": f"{entry['low']:.2f} – {entry['high']:.2f}",
                "share": round(100 * entry[key] / total, 2),
                "images": entry[key],
            }
            for entry in calibration["histogram"]
            if entry[key]
        ]
    y = {"type": "quantitative", "title": "share of these answers (percent)", "axis": {**_SIDE, "tickCount": 5}}
    colors = {"domain": [RIGHT, WRONG], "range": ["var(--accent)", "var(--second)"]}
    return chart_spec(
        values,
        height=230,
        mark={"type": "bar", "opacity": 0.85},
        encoding={
            "x": {"field": "low", **_confidence_axis(labels=True)},
            "x2": {"field": "high"},
            "y": {"field": "share", **y},
            "y2": {"datum": 0},
            "color": {"field": "metric", "type": "nominal", "scale": colors},
            "tooltip": [{"field": field} for field in ("score", "share", "images")],
        },
    )


def risk_chart(report: dict[str, Any]) -> Spec | None:
    """Return the top-1 error of the kept answers against the share of images that are kept; None without images."""
    if not report["risk_coverage"]:
        return None
    points = [{**point, "score": threshold_text(point["threshold"])} for point in report["risk_coverage"]["points"]]
    x = {"field": "coverage", "type": "quantitative", "scale": {"domain": [0, 100]}, "axis": {"grid": False}}
    x["title"] = "coverage: images answered (percent)"
    y = {"type": "quantitative", "title": "top-1 error of these (percent)", "axis": {**_SIDE, "tickCount": 5}}
    y["scale"] = {"domain": [0, min(100.0, max(1.0, 1.5 * max(point["top1_error"] for point in points)))], "nice": True}
    return chart_spec(
        points,
        height=230,
        encoding={"x": x},
        layer=[
            {
                "mark": {"type": "area", "color": "var(--accent)", "opacity": 0.13, "clip": True},
                "encoding": {"y": {"field": "top1_interval[0]", **y}, "y2": {"field": "top1_interval[1]"}},
            },
            {
                # A single point, where all scores are equal, would be an invisible line.
                "mark": {"type": "line", "color": "var(--accent)", "strokeWidth": 2.25, "point": len(points) == 1},
                "encoding": {"y": {"field": "top1_error", **y}},
            },
            row_under_pointer("near_coverage", _RISK_TOOLTIP, field="coverage", x=x, y={"field": "top1_error", **y}),
        ],
    )
