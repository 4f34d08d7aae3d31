"""Draw docs/images/protocols.svg: the crops and windows that each protocol evaluates.

Run from the repository root:  python tools/draw_protocols.py

The positions come from the evaluator itself, for models A, B and C and an image of ImageNet's usual shape.
"""

from collections.abc import Sequence
from pathlib import Path

from prelunet.evaluator.engine.protocol_costs import paper_contract
from prelunet.evaluator.engine.scores import nine_places
from prelunet.evaluator.imaging.resize import resized_size
from prelunet.evaluator.imaging.views import crop_origin
from prelunet.evaluator.protocols import PARTS

PICTURE = Path("docs/images/protocols.svg")
IMAGE = (375, 500)  # height, width
CONTRACT = paper_contract()
COLUMNS, PANEL, GAP, CAPTION = 3, 260, 16, 52  # panels are PANEL wide, in units of the drawing, and 3/4 of that high
THINGS = "M60 150 a75 75 0 1 0 150 0 a75 75 0 1 0 -150 0 Z M300 320 L390 120 L470 320 Z"  # in pixels of IMAGE
STYLE = """<style>
text { font: 12px sans-serif; fill: #333 } .title { font-weight: bold; font-size: 14px; fill: #111 }
.image { fill: #eef1f4; stroke: #8a939c } .things { fill: #c3ccd5 }
.seen { fill: #d9480f; fill-opacity: 0.1; stroke: #d9480f; stroke-width: 1.2 } .centres { fill: #b02a08 }
</style>"""

Place = tuple[int, int]  # row and column of the origin of a crop or window, in pixels of the resized image


def windows(scale: int) -> list[list[Place]]:
    """Return the origin of each window of the grid, spaced by the stride."""
    rows, columns = CONTRACT.window_grid(*resized_size(*IMAGE, scale))
    stride = CONTRACT.trunk_stride
    return [[(row * stride, column * stride) for column in range(columns)] for row in range(rows)]


def crops(kind: str, scale: int) -> list[Place]:
    """Return the origins of the crops of a protocol."""
    parts = PARTS["ten-crop" if kind == "ten-crop" else "center"]
    return [crop_origin(*resized_size(*IMAGE, scale), part, CONTRACT.crop) for part in parts]


def panel(place: int, scale: int, *, squares: Sequence[Place], dots: Sequence[Place], title: str, text: str) -> str:
    """Draw the image at a scale, filling a panel.

    place: index of the panel, row by row; squares: crops and windows to outline; dots: windows to mark by their center.
    """
    height, width = resized_size(*IMAGE, scale)
    unit, side = PANEL / width, CONTRACT.crop
    left, top = GAP + place % COLUMNS * (PANEL + GAP), GAP + place // COLUMNS * (PANEL * 3 // 4 + CAPTION)
    outlined = [
        f'<rect x="{column * unit:.1f}" y="{row * unit:.1f}" width="{side * unit:.1f}" height="{side * unit:.1f}"/>'
        for row, column in squares
    ]
    marked = [
        f'<circle cx="{(column + side / 2) * unit:.1f}" cy="{(row + side / 2) * unit:.1f}" r="1.6"/>'
        for row, column in dots
    ]
    return "\n".join(
        [
            f'<g transform="translate({left} {top})">',
            f'<rect width="{PANEL}" height="{height * unit:.1f}" class="image"/>',
            f'<path d="{THINGS}" transform="scale({PANEL / IMAGE[1]})" class="things"/>',
            '<g class="seen">',
            *outlined,
            '</g><g class="centres">',
            *marked,
            f'</g><text y="{height * unit + 17:.1f}" class="title">{title}</text>',
            f'<text y="{height * unit + 33:.1f}">{text}</text></g>',
        ]
    )


def dense_panel(place: int, scale: int) -> str:
    """Draw all windows at a scale: the center of each, and the outlines of the first and the last."""
    all_windows = [window for row in windows(scale) for window in row]
    ends = [all_windows[0], all_windows[-1]]
    text = f"{len(all_windows)} windows, and mirrored too"
    return panel(place, scale, squares=ends, dots=all_windows, title=f"dense-{scale}", text=text)


def nine_panel(place: int, scale: int) -> str:
    """Draw the windows of spp-18 at a scale."""
    grid = windows(scale)
    nine = [grid[row][column] for row in nine_places(len(grid)) for column in nine_places(len(grid[0]))]
    text = "9 windows, and mirrored too"
    return panel(place, scale, squares=nine, dots=nine, title=f"spp-18 at {scale}", text=text)


def draw() -> str:
    """Return the drawing."""
    low, middle, high = CONTRACT.default_scales
    one, ten = crops("center", low), crops("ten-crop", low)
    panels = [
        panel(0, low, squares=one, dots=one, title="center", text=f"1 crop of scale {low}"),
        panel(1, low, squares=ten, dots=ten, title="ten-crop", text=f"5 crops of scale {low}, and mirrored too"),
        nine_panel(2, 360),
        dense_panel(3, low),
        dense_panel(4, middle),
        dense_panel(5, high),
    ]
    width, height = COLUMNS * (PANEL + GAP) + GAP, 2 * (PANEL * 3 // 4 + CAPTION) + GAP
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}">'
    return "\n".join([head, STYLE, f'<rect width="{width}" height="{height}" fill="#fff"/>', *panels, "</svg>\n"])


if __name__ == "__main__":
    PICTURE.write_text(draw(), encoding="utf-8")
