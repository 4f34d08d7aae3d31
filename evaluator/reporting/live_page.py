"""The live page of a server: one file that loads nothing else and calls only its own server."""

import base64
import hashlib
import json

from prelunet.evaluator.reporting.html import asset, render_html
from prelunet.evaluator.validation.heatmaps import map_colors

_STYLES = ("base.css", "heatmaps.css", "live.css")
_SCRIPTS = ("elements.js", "heatmap.js", "live_calls.js", "live.js")


# Of reports: their inline scripts run in an origin of their own, out of reach of the live page and its token.
REPORT_POLICY = (
    "sandbox allow-scripts allow-downloads; default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


def report_viewer() -> bytes:
    """Return the page that becomes the report which the live page sends: no link could carry a token."""
    return render_html("report_viewer.html.j2")


def live_page(*, reports: bool) -> tuple[bytes, str]:
    """Return the page and its content security policy, which allows this script and this style only.

    reports: whether the page lists reports.
    """
    style = "\n".join(map(asset, _STYLES))
    colors = f"const data = {json.dumps({'inferno': map_colors()}, separators=(',', ':'))};"
    script = "\n".join(['"use strict";', colors, *map(asset, _SCRIPTS)])
    policy = (
        f"default-src 'none'; script-src {_hash_of(script)}; style-src {_hash_of(style)}; img-src blob: data:; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return render_html("live.html.j2", style=style, script=script, reports=reports), policy


def _hash_of(text: str) -> str:
    digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
    return f"'sha256-{digest}'"
