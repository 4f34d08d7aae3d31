"""report.html: one self-contained page, made from report.json and the gallery."""

from typing import Any

from evaluator.reporting.charts import FEW_CLASSES, error_chart
from evaluator.reporting.gallery import Gallery
from evaluator.reporting.html import render_html
from evaluator.reporting.report import Report, describe_protocol, headline, short_provider, wrong_images

WORST_CLASSES = 10
NAMED_OPENLY = 12  # more perfect classes than this are named when asked for
CONFUSIONS_SHOWN = 20
REFUSALS_SHOWN = 200
ACTIVATIONS = {"prelu": "PReLU", "prelu-shared": "PReLU, shared slopes", "relu": "ReLU", "lrelu": "leaky ReLU"}


def render_page(report: Report, gallery: Gallery) -> bytes:
    """Return report.html of a report; the same report and gallery give the same bytes."""
    classes = report["classes"]
    seen = [entry for entry in classes if entry["evaluated"]]
    return render_html(
        "report.html.j2",
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


def worst_classes(report: Report, key: str, limit: int) -> list[dict[str, Any]]:
    """Return the classes with the highest error (> 0) of `key` (top1 or top5), worst first, ties by index."""
    wrong = [entry for entry in report["classes"] if entry[f"{key}_error"]]
    return sorted(wrong, key=lambda entry: (-entry[f"{key}_error"], entry["index"]))[:limit]
