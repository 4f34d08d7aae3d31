"""The live page of a server: one file that loads nothing else and calls only its own server."""

import base64
import hashlib
import json

from ..validation.heatmaps import map_colors
from .html import asset, render_html

_STYLES = ("base.css", "heatmaps.css", "live.css")
_SCRIPTS = ("elements.js", "heatmap.js", "live_calls.js", "live.js")


def live_page(*, reports: bool, examples: bool = False) -> tuple[bytes, str]:
    """Return the page, which may list reports and examples, and its policy: only this script and this style."""
    style = "\n".join(map(asset, _STYLES))
    colors = f"const data = {json.dumps({'inferno': map_colors()}, separators=(',', ':'))};"
    script = "\n".join(['"use strict";', colors, *map(asset, _SCRIPTS)])
    policy = (
        f"default-src 'none'; script-src {_hash_of(script)}; style-src {_hash_of(style)}; img-src blob: data:; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return render_html("live.html.j2", style=style, script=script, reports=reports, examples=examples), policy


def _hash_of(text: str) -> str:
    digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
    return f"'sha256-{digest}'"
