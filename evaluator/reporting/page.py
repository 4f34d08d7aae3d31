"""report.html: one self-contained page, made from report.json and the gallery. It makes no network request.

Class and file names are hostile input: jinja2 escapes every text, `tojson` what stands in scripts, and the page's
content policy lets the browser load nothing.
"""

from functools import cache
from importlib import resources
from typing import Any

import jinja2
import vl_convert

from evaluator.reporting.charts import FEW_CLASSES, error_chart
from evaluator.reporting.gallery import Gallery
from evaluator.reporting.report import Report, describe_protocol, headline, short_provider, wrong_images

VEGA_LITE = "6.1"  # 6.4 loses text in the tooltips of points that are chosen as the nearest to the pointer
WORST_CLASSES = 10
NAMED_OPENLY = 12  # more perfect classes than this are named when asked for
CONFUSIONS_SHOWN = 20
REFUSALS_SHOWN = 200
ACTIVATIONS = {"prelu": "PReLU", "prelu-shared": "PReLU, shared slopes", "relu": "ReLU", "lrelu": "leaky ReLU"}


def render_page(report: Report, gallery: Gallery) -> bytes:
    """Return report.html of a report; the same report and gallery give the same bytes."""
    classes = report["classes"]
    seen = [entry for entry in classes if entry["evaluated"]]
    text = _template().render(
        report=report,
        gallery=gallery,
        chart=error_chart(report),
        headline=headline(report),
        protocol=describe_protocol(report["protocol"]),
        provider=short_provider(report["circumstances"]),
        activation=ACTIVATIONS.get(report["model"]["activation"], report["model"]["activation"]),
        wrong={key: wrong_images(report, key) for key in ("top1", "top5")},
        classes=classes,
        seen=seen,
        few=len(seen) <= FEW_CLASSES,
        worst={key: worst_classes(report, key, min(WORST_CLASSES, (len(seen) + 1) // 2)) for key in ("top1", "top5")},
        perfect={key: [entry for entry in seen if entry[f"{key}_error"] == 0] for key in ("top1", "top5")},
        named_openly=NAMED_OPENLY,
        confusions=report["confusions"][:CONFUSIONS_SHOWN],
        refusals_shown=REFUSALS_SHOWN,
    )
    return text.encode("utf-8", errors="backslashreplace")  # file names may hold bytes that are no UTF-8


def worst_classes(report: Report, key: str, limit: int) -> list[dict[str, Any]]:
    """Return the classes with the highest error (> 0) of `key` (top1 or top5), worst first, ties by index."""
    wrong = [entry for entry in report["classes"] if entry[f"{key}_error"]]
    return sorted(wrong, key=lambda entry: (-entry[f"{key}_error"], entry["index"]))[:limit]


@cache
def _template() -> jinja2.Template:
    """Load the page's template with its filters and the scripts that stand in it."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("evaluator.reporting", "."),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"percent": _percent, "count": _count, "signed": _signed, "own_wnid": _own_wnid}
    files = resources.files("evaluator.reporting")
    environment.globals |= {
        "css": (files / "report.css").read_text(encoding="utf-8"),
        "js": (files / "report.js").read_text(encoding="utf-8"),
        "vega": vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;", vl_version=VEGA_LITE),
    }
    return environment.get_template("report.html.j2")


def _percent(value: float | None, digits: int = 1) -> str:
    return "–" if value is None else f"{value:.{digits}f}"


def _signed(value: float, digits: int = 2) -> str:
    """Return a difference with its sign; a true minus, as wide as the plus."""
    return f"{value:+.{digits}f}".replace("-", "−")


def _count(value: int) -> str:
    return f"{value:,}"


def _own_wnid(entry: dict[str, Any]) -> str:
    """Return the wnid where it says more than the name; datasets of class folders often have one for both."""
    same = entry["wnid"].replace("-", " ").replace("_", " ").lower() == entry["name"].lower()
    return "" if same else str(entry["wnid"])
