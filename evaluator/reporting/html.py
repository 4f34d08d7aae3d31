"""Self-contained HTML pages from templates: styles and scripts stand inside, and no network request is made.

Class and file names are hostile input: jinja2 escapes every text, `tojson` what stands in scripts, and each page's
content policy lets the browser load nothing.
"""

from functools import cache
from importlib import resources
from typing import TYPE_CHECKING, Any

from prelunet.evaluator.reporting.text import signed

if TYPE_CHECKING:
    import jinja2

VEGA_LITE = "6.1"  # 6.4 loses text in the tooltips of points that are chosen as the nearest to the pointer


def render_html(template: str, **values: Any) -> bytes:
    """Return the page of a template of this package; the same values give the same bytes.

    In a template `asset("report.css")` is the text of a file of this package, `vega` the charting library.
    """
    text = _environment().get_template(template).render(values)
    return text.encode("utf-8", errors="backslashreplace")  # file names may hold bytes that are no UTF-8


@cache
def _environment() -> "jinja2.Environment":
    """Load the templates' filters and the script that draws charts."""
    import jinja2  # here: these two are slow to load, and the verbs' --help needs neither
    import vl_convert

    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("prelunet.evaluator.reporting", "."),
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
    return (resources.files("prelunet.evaluator.reporting") / name).read_text(encoding="utf-8")


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
