"""Parts of the cards that notebooks show. Their text has the notebook's own color, and what lies behind it is
translucent, so that they suit light and dark ones. Styles are inline: viewers of notebooks drop style sheets.
"""

from collections.abc import Iterable
from html import escape

BLUE, ORANGE = "#4a86c8", "#d0742a"
_LINE = "1px solid rgba(128,128,128,.4)"
_FLAT = "border:0;background:none"  # without the lines and stripes of the notebook's own tables


def card(title: str, note: str, *parts: str) -> str:
    """Return a card. title, note: text; parts: HTML, left out if empty."""
    html = (
        f"<div style='border:{_LINE};border-radius:6px;padding:10px 14px;max-width:780px;overflow-x:auto'>"
        f"<div style='font-weight:bold;font-size:1.1em'>{escape(title)}</div>{line(note)}{''.join(parts)}</div>"
    )
    return html.encode(errors="backslashreplace").decode()  # names of files may not be valid UTF-8


def line(text: str) -> str:
    return f"<div style='opacity:.75'>{escape(text)}</div>" if text else ""


def heading(text: str) -> str:
    return f"<div style='font-weight:bold;margin-top:10px'>{escape(text)}</div>"


def table(rows: Iterable[Iterable[str]]) -> str:
    """Return a table. rows: their cells, HTML; the first of each is its name. Numbers do not break."""
    style = f"{_FLAT};text-align:left;vertical-align:middle;padding:2px 16px 2px 0;font-weight:normal"
    lines = ""
    for name, *cells in rows:
        whole = ";white-space:nowrap" if len(cells) > 1 else ""  # a single cell is text
        others = "".join(f"<td style='{style}{whole}'>{cell}</td>" for cell in cells)
        lines += f"<tr style='{_FLAT}'><th scope='row' style='{style}'>{name}</th>{others}</tr>"
    return f"<table style='{_FLAT};margin:4px 0'><tbody>{lines}</tbody></table>" if lines else ""


def bar(end: float, *, start: float = 0.0, interval: tuple[float, float] | None = None, color: str = BLUE) -> str:
    """Return a bar from `start` to `end`, and a thin line over an interval; all as shares of the width, 0 to 1."""

    def part(low: float, high: float, style: str) -> str:
        return f"<div style='position:absolute;left:{low:.1%};width:{high - low:.1%};{style}'></div>"

    parts = part(min(start, end), max(start, end), f"top:0;height:100%;background:{color}")
    if start:
        parts += part(start, start, "top:-3px;bottom:-3px;border-left:1px solid")
    if interval is not None:
        parts += part(*interval, "top:40%;height:20%;background:currentColor")
    frame = "position:relative;width:min(200px,20vw);height:12px;background:rgba(128,128,128,.18)"
    return f"<div aria-hidden='true' style='{frame}'>{parts}</div>"


def side_by_side(*parts: str) -> str:
    return f"<div style='display:flex;flex-wrap:wrap;gap:10px;margin-top:6px'>{''.join(parts)}</div>"


def pictures(tiles: Iterable[tuple[str | None, str, str]]) -> str:
    """Return pictures side by side. tiles: `data:` URL, None if it cannot be read; name; text below it."""
    parts = []
    for url, name, text in tiles:
        size = "display:block;width:112px;height:112px;object-fit:contain;background:rgba(128,128,128,.18)"
        smooth = ";image-rendering:pixelated" if url and url.startswith("data:image/png") else ""  # a tiny one
        picture = f"<img src='{url}' alt='' style='{size};margin:0{smooth}'>" if url else f"<div style='{size}'></div>"
        parts.append(
            f"<div style='width:112px;font-size:.85em;line-height:1.3;overflow-wrap:anywhere' title='{escape(name)}'>"
            f"{picture}{escape(text)}</div>"
        )
    return side_by_side(*parts) if parts else ""
