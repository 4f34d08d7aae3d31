"""Where the model sees a class: the window scores of all views, laid back over the image.

A map is plain interpolation of what the model said of each window; no gradient and no second model is involved.
"""

import io
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageDraw, ImageFont

from prelunet.evaluator.arrays import Float64Array, UInt8Array
from prelunet.evaluator.contract import ModelContract
from prelunet.evaluator.engine.classify import Classification, ViewResult
from prelunet.evaluator.imaging.resize import resized_size
from prelunet.evaluator.imaging.views import crop_origin
from prelunet.evaluator.protocols import EvaluationProtocol

UNCAPPED = 2**31  # as a cap: no image is that elongated


def window_centres(contract: ModelContract, count: int) -> Float64Array:
    """Return the centres of `count` neighbouring windows along one axis, in pixels of the view, float64 (count,).

    A pixel's own centre is its index. A layer of kernel k, stride s and pad p puts its cell i over the inputs
    s·i − p … s·i − p + k − 1, of which s·i + (k − 1)/2 − p is the centre. Through the trunk this adds up to
        cell i ↦ start + jump·i,   start += ((k − 1)/2 − p)·jump,   jump *= s   from start 0, jump 1,
    and a window of w cells from cell i on is centred (w − 1)/2 cells further. Models A, B, C: conv1 adds
    (3 − 3)·1 = 0, the pools of 2x2 add 1, 2 and 4 (half a cell at jumps of 2, 4 and 8), so start = 7, jump = 16, and
    the first window of 14 cells lies at 7 + 6.5·16 = 111: the middle of its 224 pixels but for half a pixel.
    """
    start, jump = 0.0, 1
    for layer in contract.trunk:
        start += ((layer.kernel - 1) / 2 - layer.pad) * jump
        jump *= layer.stride
    return start + jump * (np.arange(count, dtype=np.float64) + (contract.window - 1) / 2)


def heat_maps(
    classified: Classification,
    classes: Sequence[int],
    image_size: tuple[int, int],
    map_size: tuple[int, int],
    contract: ModelContract,
    protocol: EvaluationProtocol,
) -> Float64Array:
    """Return where each of some classes is seen, float64 (classes, rows, columns) in 0..1.

    classified: made with keep_windows; image_size: height and width of the image in pixels; map_size: those of the
    maps, which cover the whole image.
    Each point is interpolated between the scores of the windows around it; beyond the outermost centres it is the
    nearest window's, and a crop has only one. Mirrored views are flipped back; the views of a scale that show the point
    are averaged, then the scales, whatever the protocol's weights and averaging; of `spp-18` every window is shown, not
    only the nine that count. NaN where no view looked (outside the crops, or cut off by the cap).
    """
    by_scale: dict[int, list[Float64Array]] = {}
    for view in classified.views:
        maps = _view_maps(view, classes, image_size, map_size, contract, protocol)
        by_scale.setdefault(view.view.scale, []).append(maps)
    return _mean_where_seen([_mean_where_seen(pair) for pair in by_scale.values()])


def _view_maps(
    view: ViewResult,
    classes: Sequence[int],
    image_size: tuple[int, int],
    map_size: tuple[int, int],
    contract: ModelContract,
    protocol: EvaluationProtocol,
) -> Float64Array:
    """Lay the window scores of one view over the image; NaN where the view did not look."""
    assert view.window_scores is not None, "classify_images was not asked to keep_windows"
    full = resized_size(*image_size, view.view.scale, UNCAPPED)
    kept = resized_size(*image_size, view.view.scale, protocol.long_side_cap)
    shown = (view.height, view.width)
    origin = (0, 0) if protocol.crop is None else crop_origin(*kept, view.view.part, protocol.crop)
    weights = []
    for axis in (0, 1):
        offset = (full[axis] - kept[axis]) // 2 + origin[axis]  # of the capped image, and of the crop in it
        point = np.arange(map_size[axis])
        positions = (point + 0.5) * full[axis] / map_size[axis] - 0.5 - offset
        # A point of the map is a square, from `point` to `point + 1`; it is seen when any of it is, so that no view
        # vanishes between two points. In whole numbers, since edges often meet exactly.
        begin, end = offset * map_size[axis], (offset + shown[axis]) * map_size[axis]
        seen = ((point + 1) * full[axis] > begin) & (point * full[axis] < end)
        if axis == 1 and view.view.mirrored:
            positions = shown[axis] - 1 - positions
        of_axis = _linear_weights(positions, window_centres(contract, view.window_scores.shape[axis]))
        weights.append(np.where(seen[:, None], of_axis, np.nan))
    scores = view.window_scores[:, :, list(classes)].astype(np.float64)
    return np.asarray(np.einsum("hr,rck,wc->khw", weights[0], scores, weights[1], optimize=True))


def _linear_weights(positions: Float64Array, centres: Float64Array) -> Float64Array:
    """Return (positions, centres): how much each centre counts at each position in linear interpolation."""
    weights = np.empty((len(positions), len(centres)))
    for index, unit in enumerate(np.eye(len(centres))):
        weights[:, index] = np.interp(positions, centres, unit)
    return weights


def _mean_where_seen(maps: Sequence[Float64Array]) -> Float64Array:
    """Average maps, point by point, over those that are not NaN there."""
    stack = np.stack(maps)
    seen = ~np.isnan(stack)
    count = seen.sum(axis=0)
    total = np.where(seen, stack, 0).sum(axis=0)
    return np.where(count > 0, total / np.maximum(count, 1), np.nan)


# Heat maps drawn over their image: one picture that shows where each of the best classes is seen.


HEAT_MAP_CLASSES = 5
LONG_SIDE = 320  # pixels of a panel, to which tiny images are enlarged and huge ones shrunk
SHORT_SIDE = 40  # pixels at least, so that a 1x20000 image is squeezed into something one can see
LABEL_WIDTH = 220  # pixels at least for the text of a panel
MARGIN, LINE, FONT_SIZE = 12, 21, 16  # pixels
OPACITY = 0.6  # of the colours over the grey image
UNSEEN = 0.7  # of white over the grey image where no view looked: unlike any colour of the map
INK, PAPER = (20, 20, 20), (255, 255, 255)

# The colour map "inferno" of matplotlib (CC0) at nine places: its lightness rises evenly from black to pale yellow, so
# that equal steps of score look equal, in grey print and to colour-blind readers too.
_COLOURS = np.array(
    [(0, 0, 4), (31, 12, 72), (85, 15, 109), (136, 34, 106), (186, 54, 85),
     (227, 89, 51), (249, 140, 10), (249, 201, 50), (252, 255, 164)],
    np.float64,
)  # fmt: skip


@dataclass(frozen=True)
class Panel:
    """One picture of the sheet with the two lines above it."""

    picture: UInt8Array
    title: str
    detail: str


def apply_colour_map(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Turn values in 0..1, of any shape, into RGB colours in 0..255 along a new last axis."""
    places = np.linspace(0, 1, len(_COLOURS))
    return np.stack([np.interp(values, places, _COLOURS[:, channel]) for channel in range(3)], axis=-1)


def draw_heat_maps(
    image: UInt8Array, classified: Classification, contract: ModelContract, protocol: EvaluationProtocol
) -> UInt8Array:
    """Draw the image beside its five best classes' heat maps, uint8 (H, W, 3).

    image: uint8 (h, w, 3); classified: of this image, made with keep_windows.
    Each map is coloured from 0 to its own highest value, which stands above it as its peak: the score of the window
    that is surest of the class, averaged over scales; but at least to a tenth of the highest peak of all, so that a
    class that is hardly seen stays dark. Where no view looked, the image is faint and grey.
    """
    best = classified.top(HEAT_MAP_CLASSES)
    height, width = _panel_size(*image.shape[:2])
    picture = np.asarray(Image.fromarray(image).resize((width, height), Image.Resampling.BICUBIC))
    maps = heat_maps(
        classified, [index for index, _ in best], image.shape[:2], (height, width), contract, protocol
    )  # at the size of the panels: a map of 64 Mpixel would take gigabytes and show no more
    views = f"{len(classified.views)} view" + "s" * (len(classified.views) != 1)
    panels = [Panel(picture, f"{image.shape[1]}x{image.shape[0]} px", f"{protocol.name}, {views}")]
    hardly = float(np.nanmax(maps)) / 10
    for place, ((index, score), of_class) in enumerate(zip(best, maps, strict=True), start=1):
        peak = float(np.nanmax(of_class))
        title = f"{place}. {contract.classes[index].name}"
        panels.append(
            Panel(_blend_map(picture, of_class, max(peak, hardly)), title, f"score {score:.1%}, peak {peak:.1%}")
        )
    legend = "peak of the class, or a tenth of the highest peak if that is more" + (
        ", faint: not looked at" if np.isnan(maps).any() else ""
    )
    return _sheet(panels, legend, columns=6 if height > width else 3)


def png_bytes(picture: UInt8Array) -> bytes:
    """Encode a picture, uint8 (H, W, 3), as a PNG file."""
    buffer = io.BytesIO()
    Image.fromarray(picture).save(buffer, format="PNG")
    return buffer.getvalue()


def _panel_size(height: int, width: int) -> tuple[int, int]:
    """Return height and width at which an image is shown: its longer side becomes LONG_SIDE."""
    factor = LONG_SIDE / max(height, width)
    return max(SHORT_SIDE, round(height * factor)), max(SHORT_SIDE, round(width * factor))


def _blend_map(picture: UInt8Array, of_class: npt.NDArray[np.float64], brightest: float) -> UInt8Array:
    """Lay the colours of one map over the grey image; `brightest` is the value of the last colour."""
    grey = (picture.astype(np.float64) @ (0.299, 0.587, 0.114))[:, :, None]  # luma of ITU-R BT.601
    seen = ~np.isnan(of_class)
    coloured = apply_colour_map(np.where(seen, of_class, 0) / (brightest or 1))
    blended = np.where(seen[:, :, None], (1 - OPACITY) * grey + OPACITY * coloured, (1 - UNSEEN) * grey + UNSEEN * 255)
    return np.asarray(np.round(blended), np.uint8)


def _sheet(panels: Sequence[Panel], legend: str, columns: int) -> UInt8Array:
    """Arrange panels in rows, with the meaning of the colours below."""
    height, width = panels[0].picture.shape[:2]
    cell_width, cell_height = max(width, LABEL_WIDTH) + MARGIN, height + 2 * LINE + 2 * MARGIN
    rows = -(-len(panels) // columns)
    columns = min(columns, len(panels))
    size = (columns * cell_width + MARGIN, rows * cell_height + LINE + 2 * MARGIN)
    sheet = Image.new("RGB", size, PAPER)
    draw = ImageDraw.Draw(sheet)
    font = ImageFont.load_default(FONT_SIZE)
    for place, panel in enumerate(panels):
        left = MARGIN + place % columns * cell_width
        top = MARGIN + place // columns * cell_height
        draw.text((left, top), _truncate_text(panel.title, cell_width - MARGIN, draw, font), INK, font)
        draw.text((left, top + LINE), _truncate_text(panel.detail, cell_width - MARGIN, draw, font), INK, font)
        sheet.paste(Image.fromarray(panel.picture), (left, top + 2 * LINE))
    top = size[1] - MARGIN - LINE
    strip = OPACITY * apply_colour_map(np.tile(np.linspace(0, 1, 120), (LINE - 4, 1))) + (1 - OPACITY) * 128
    sheet.paste(Image.fromarray(np.asarray(np.round(strip), np.uint8)), (MARGIN + 20, top))
    draw.text((MARGIN, top - 1), "0", INK, font)
    draw.text((MARGIN + 148, top - 1), legend, INK, font)
    return np.array(sheet)


def _truncate_text(
    text: str, width: int, draw: ImageDraw.ImageDraw, font: ImageFont.FreeTypeFont | ImageFont.ImageFont
) -> str:
    """Shorten a text to a width in pixels."""
    if draw.textlength(text, font) <= width:
        return text
    while text and draw.textlength(text + "...", font) > width:
        text = text[:-1]
    return text + "..."
