"""Charts as files of their own: the specifications of the pages, drawn as SVG in the light colours of the report."""

import re
from collections.abc import Mapping
from importlib import resources
from typing import Any

from prelunet.evaluator.reporting.charts import Spec
from prelunet.evaluator.reporting.html import VEGA_LITE

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
    css = (resources.files("prelunet.evaluator.reporting") / "report.css").read_text(encoding="utf-8")
    light = dict(re.findall(r"(--[a-z-]+):\s*([^;]+);", css[css.index("{") : css.index("}")]))

    def coloured(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {key: coloured(one) for key, one in value.items()}
        if isinstance(value, list | tuple):
            return [coloured(one) for one in value]
        return _VARIABLE.sub(lambda found: light[found[1]], value) if isinstance(value, str) else value

    return coloured(spec)
