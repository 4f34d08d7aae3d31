"""Self-contained HTML pages from templates: styles and scripts stand inside, and no network request is made.

Class and file names are hostile input: jinja2 escapes every text, `tojson` what stands in scripts, and each page's
content policy lets the browser load nothing.
"""

import json
import re
from collections.abc import Mapping
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING, Any

from prelunet.evaluator.reporting.charts import Spec

if TYPE_CHECKING:
    import jinja2

VEGA_LITE = "6.1"  # 6.4 loses text in the tooltips of points that are chosen as the nearest to the pointer


def render_html(template: str, **values: Any) -> bytes:
    """Return the page of a template of this package; the same values give the same bytes.

    In a template `asset("report.css")` is the text of a file in page_files/, `vega` the charting library.
    """
    text = _environment().get_template(template).render(values)
    return text.encode("utf-8", errors="backslashreplace")  # file names may hold bytes that are no UTF-8


@cache
def _environment() -> "jinja2.Environment":
    """Load the templates' filters and the script that draws charts."""
    import jinja2  # here: these two are slow to load, and the verbs' --help needs neither
    import vl_convert

    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("prelunet.evaluator.reporting", "page_files"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.policies["json.dumps_kwargs"] = {"separators": (",", ":")}  # in the order given, and no blanks
    environment.filters |= {
        "percent": _percent,
        "count": _count,
        "signed": signed,
        "rank": _rank,
        "own_wnid": _own_wnid,
    }
    environment.globals |= {
        "asset": _asset,
        "vega": vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;", vl_version=VEGA_LITE),
    }
    return environment


def _asset(name: str) -> str:
    return (resources.files("prelunet.evaluator.reporting") / "page_files" / name).read_text(encoding="utf-8")


def _percent(value: float | None, digits: int = 1) -> str:
    return "–" if value is None else f"{value:.{digits}f}"


def _rank(value: float) -> str:
    """Return a median rank, which may lie halfway between two."""
    return f"{value:,.0f}" if value == int(value) else f"{value:,.1f}"


def _count(value: int) -> str:
    return f"{value:,}"


def _own_wnid(entry: dict[str, Any]) -> str:
    """Return the wnid where it says more than the name; datasets of class folders often have one for both."""
    wnid, name = (entry[key].replace("-", " ").replace("_", " ").lower() for key in ("wnid", "name"))
    return "" if wnid == name else str(entry["wnid"])


# Charts as files of their own: the specifications of the pages, drawn as SVG in the light colours of the report.


_VARIABLE = re.compile(r"var\((--[a-z-]+)\)")


def draw_svg(spec: Spec) -> bytes:
    """Return the SVG of a Vega-Lite specification in the style of `chart_spec`; the same specification, the same bytes.

    CSS variables become the report's light colours, since a file of its own has no style sheet, and the ground white.
    """
    import vl_convert  # here: it is slow to load, and the verbs' --help does not need it

    config = {**spec.get("config", {}), "background": "white"}
    svg: str = vl_convert.vegalite_to_svg(_coloured({**spec, "config": config}), vl_version=VEGA_LITE)
    return (svg + "\n").encode()


def _coloured(spec: Any) -> Any:
    """Replace the CSS variables in all texts of a specification."""
    css = _asset("report.css")
    light = dict(re.findall(r"(--[a-z-]+):\s*([^;]+);", css[css.index("{") : css.index("}")]))

    def coloured(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {key: coloured(one) for key, one in value.items()}
        if isinstance(value, list | tuple):
            return [coloured(one) for one in value]
        return _VARIABLE.sub(lambda found: light[found[1]], value) if isinstance(value, str) else value

    return coloured(spec)


# How reports write their numbers and files: one way for pages, charts and the terminal.


def json_bytes(report: dict[str, Any]) -> bytes:
    """Return report.json or compare.json. ASCII only, so that no file name, however damaged, can spoil the encoding."""
    return (json.dumps(report, indent=1, allow_nan=False) + "\n").encode("ascii")


def signed(value: float, digits: int = 2, minus: str = "−") -> str:
    """Return a difference with its sign, and what rounds to 0 without any: `+0.12`, `−3.00`, `0.00`.

    minus: as wide as the plus, where the font has it; "-" for programs.
    """
    text = f"{abs(value):.{digits}f}"
    if not float(text):
        return text
    return f"{minus if value < 0 else '+'}{text}"
