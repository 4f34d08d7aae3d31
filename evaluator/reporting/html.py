"""Self-contained HTML pages from templates. Styles and scripts are inlined; pages make no network requests.

Class and file names are untrusted input: jinja2 escapes all text, `tojson` escapes data in scripts, and the content
security policy of each page blocks all loads.
"""

import json
import math
import os
import re
from functools import cache
from html import escape
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from ..contract import parse_calibration, provenance_lines
from ..errors import import_from_extra
from ..terminal import escape_unprintable
from .charts import Spec

if TYPE_CHECKING:
    import jinja2

VEGA_LITE = "6.1"  # 6.4 loses text in tooltips of points selected as nearest to the pointer


def render_html(template: str, **values: Any) -> bytes:
    """Render a template of this package; the same values give the same bytes.

    In a template, `asset("report.css")` is the text of a file in page_files/ and `vega()` the charting library.
    """
    text = _environment().get_template(template).render(values)
    return text.encode("utf-8", errors="backslashreplace")  # file names may not be valid UTF-8


@cache
def _environment() -> "jinja2.Environment":
    """Create the template environment with its filters."""
    import jinja2  # here: slow to import, and --help does not need it

    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("prelunet.evaluator.reporting", "page_files"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.policies["json.dumps_kwargs"] = {"separators": (",", ":")}  # keep the order of keys, no spaces
    environment.filters |= {
        "percent": _percent,
        "count": "{:,}".format,
        "signed": signed,
        "rank": _rank,
        "threshold": threshold_text,
        "own_wnid": _own_wnid,
    }
    environment.globals |= {
        "asset": asset,
        "vega": _vega,
        "provenance_lines": provenance_lines,
        "calibration_text": parse_calibration,
    }
    return environment


@cache
def _vega() -> str:
    """Return the charting library as a script."""
    vl_convert = import_from_extra("vl_convert")
    script: str = vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;", vl_version=VEGA_LITE)
    return script


def asset(name: str) -> str:
    return (resources.files("prelunet.evaluator.reporting") / "page_files" / name).read_text(encoding="utf-8")


def _percent(value: float | None, digits: int = 1) -> str:
    return "–" if value is None else f"{value:.{digits}f}"


def _rank(value: float) -> str:
    return f"{value:,.0f}" if value == int(value) else f"{value:,.1f}"


def threshold_text(score: float) -> str:
    """Return a threshold rounded down, so that it keeps every answer that the exact one keeps."""
    return f"{math.floor(1000 * score) / 1000:.3f}" if score >= 0.001 else f"{score:.1g}"


def _own_wnid(entry: dict[str, Any]) -> str:
    """Return the wnid unless it equals the name, as it often does for datasets of class folders."""
    wnid, name = (entry[key].replace("-", " ").replace("_", " ").lower() for key in ("wnid", "name"))
    return "" if wnid == name else str(entry["wnid"])


def draw_svg(spec: Spec) -> bytes:
    """Return the SVG of a Vega-Lite specification from `chart_spec`; the same specification gives the same bytes.

    CSS variables become the report's light colors, because an SVG file has no style sheet; the background is white.
    """
    vl_convert = import_from_extra("vl_convert")
    css = asset("base.css")
    light = dict(re.findall(r"(--[a-z-]+):\s*([^;]+);", css[css.index("{") : css.index("}")]))
    text = json.dumps({**spec, "config": {**spec.get("config", {}), "background": "white"}})
    text = re.sub(r"var\((--[a-z-]+)\)", lambda found: light[found[1]], text)
    svg: str = vl_convert.vegalite_to_svg(json.loads(text), vl_version=VEGA_LITE)
    return (svg + "\n").encode()


# Formatting shared by pages, charts and the terminal.


def json_bytes(report: dict[str, Any]) -> bytes:
    """Encode report.json or compare.json as ASCII, which is safe for file names that are not valid UTF-8."""
    return (json.dumps(report, indent=1, allow_nan=False) + "\n").encode("ascii")


def signed(value: float, digits: int = 2, minus: str = "−") -> str:
    """Format a difference with its sign, or without one if it rounds to 0: `+0.12`, `−3.00`, `0.00`.

    minus: the typographic sign, as wide as the plus, by default; "-" for machine-readable output.
    """
    text = f"{abs(value):.{digits}f}"
    if not float(text):
        return text
    return f"{minus if value < 0 else '+'}{text}"


def notebook_link(page: Path) -> str:
    """Return a link to a page for notebooks, relative if the path is: they open no file by its absolute path."""
    href = page.as_uri() if page.is_absolute() else quote(os.fsencode(page))
    return f'<p><a href="{escape(href)}" target="_blank">{escape(escape_unprintable(str(page)))}</a></p>'
