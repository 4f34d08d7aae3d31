"""Show where the model sees a class: the window scores of all views, mapped back onto the image.

A map is a plain interpolation of the window scores; no gradient and no second model is involved.
"""

import io
from collections.abc import Sequence

import numpy as np
from msgspec.structs import replace
from PIL import Image, ImageDraw, ImageFont

from ..answer import ClassMap
from ..arrays import Float64Array, UInt8Array
from ..contract import ModelContract
from ..imaging.resize import placed
from ..imaging.views import crop_origin
from ..protocols import EvaluationProtocol
from .classify import Classification, ViewResult
from .scores import restrict

HEAT_MAP_CLASSES = 5
# Points of a map along the longer side of its image. At scale 480, a 4:3 image has 640 pixels there, so one point every
# 23; the windows, 224 pixels wide, are 16 apart and hardly differ from their neighbors.
LONGER_SIDE = 28


def window_centers(contract: ModelContract, count: int) -> Float64Array:
    """Return the centers of `count` neighboring windows along one axis, in pixels of the view, float64 (count,).

    The center of a pixel is its index. A layer of kernel k, stride s and pad p computes its cell i from the inputs
    s·i − p … s·i − p + k − 1, whose center is s·i + (k − 1)/2 − p. Through the trunk this adds up to
        cell i ↦ start + jump·i,   start += ((k − 1)/2 − p)·jump,   jump *= s   from start 0, jump 1,
    and a window of w cells from cell i on is centered (w − 1)/2 cells further. Models A, B, C: conv1 adds
    (3 − 3)·1 = 0, the pools of 2x2 add 1, 2 and 4 (half a cell at jumps of 2, 4 and 8), so start = 7, jump = 16, and
    the first window of 14 cells is centered at 7 + 6.5·16 = 111: half a pixel off the middle of its 224 pixels.
    """
    start, jump = 0.0, 1
    for layer in contract.trunk:
        start += ((layer.kernel - 1) / 2 - layer.pad) * jump
        jump *= layer.stride
    return start + jump * (np.arange(count, dtype=np.float64) + (contract.window - 1) / 2)


def why_flat(contract: ModelContract, protocol: EvaluationProtocol) -> str | None:
    """Return why a heat map of this protocol could not show a place, and what to do; None if it can."""
    if protocol.crop is None:
        return None
    dense = "adopt the net with `prelunet adopt --dense`, then use" if contract.fixed_size else "use"
    return (
        f"protocol {protocol.name} has one window per view, so a heat map would not show where in it a class is seen. "
        f"To see that, {dense} --protocol multi-scale or dense-S"
    )


def heat_maps(
    classified: Classification,
    classes: Sequence[int],
    image_size: tuple[int, int],
    map_size: tuple[int, int],
    contract: ModelContract,
    protocol: EvaluationProtocol,
) -> Float64Array:
    """Return where each of the given classes is seen, float64 (classes, rows, columns) in 0..1.

    classified: made with keep_windows; image_size: height and width of the image in pixels; map_size: those of the
    maps, which cover the whole image.
    Each point is interpolated between the scores of the windows around it. Beyond the outermost centers it takes the
    nearest window's score, and a crop has only one window. Mirrored views are flipped back. At each point the views of
    a scale that show it are averaged, then the scales, whatever the protocol's weights and averaging. For `spp-18` all
    windows are shown, not only the nine that count. NaN where no view covers the image (outside the crops, or cut off
    by the cap).
    """
    by_scale: dict[int, list[Float64Array]] = {}
    for view in classified.views:
        assert view.window_scores is not None, "classify_images was called without keep_windows"
        shape = view.window_scores.shape
        windows = restrict(view.window_scores.reshape(-1, shape[-1]), classified.candidates).reshape(shape)
        maps = _view_maps(replace(view, window_scores=windows), classes, image_size, map_size, contract, protocol)
        by_scale.setdefault(view.view.scale, []).append(maps)
    return _mean_where_seen([_mean_where_seen(pair) for pair in by_scale.values()])


def grid_size(image_size: tuple[int, int]) -> tuple[int, int]:
    """Return rows and columns of a map with LONGER_SIDE points. image_size: height and width in pixels."""
    height, width = (max(1, round(LONGER_SIDE * side / max(image_size))) for side in image_size)
    return height, width


def class_maps(
    classified: Classification, image_size: tuple[int, int], contract: ModelContract, protocol: EvaluationProtocol
) -> tuple[ClassMap, ...]:
    """Return the maps of the five best classes as numbers, -1 where no view looked. Arguments as of `heat_maps`."""
    best, (rows, columns) = [index for index, _ in classified.top(HEAT_MAP_CLASSES)], grid_size(image_size)
    maps = heat_maps(classified, best, image_size, (rows, columns), contract, protocol)
    return tuple(
        ClassMap(index, rows, columns, tuple(np.nan_to_num(of_class, nan=-1.0).ravel().tolist()), *image_size)
        for index, of_class in zip(best, maps, strict=True)
    )


def _view_maps(
    view: ViewResult,
    classes: Sequence[int],
    image_size: tuple[int, int],
    map_size: tuple[int, int],
    contract: ModelContract,
    protocol: EvaluationProtocol,
) -> Float64Array:
    """Map the window scores of one view onto the image; NaN where the view does not cover it."""
    assert view.window_scores is not None
    full, first, kept = placed(*image_size, view.view.scale, protocol.long_side_cap, protocol.preparation)
    shown = (view.height, view.width)
    origin = (
        (0, 0)
        if protocol.crop is None
        else crop_origin(*kept, view.view.part, protocol.crop, protocol.preparation.rounding)
    )
    weights = []
    for axis in (0, 1):
        offset = first[axis] + origin[axis]  # of the view, and of the crop within it
        point = np.arange(map_size[axis])
        positions = (point + 0.5) * full[axis] / map_size[axis] - 0.5 - offset
        # A point of the map is a square, from `point` to `point + 1`. It counts as seen if any part of it is, so that
        # no view vanishes between two points. Computed in integers, because edges often meet exactly.
        begin, end = offset * map_size[axis], (offset + shown[axis]) * map_size[axis]
        seen = ((point + 1) * full[axis] > begin) & (point * full[axis] < end)
        if axis == 1 and view.view.mirrored:
            positions = shown[axis] - 1 - positions
        centers = window_centers(contract, view.window_scores.shape[axis])
        # The weight of each window at each position in linear interpolation, (positions, windows).
        of_axis = np.stack([np.interp(positions, centers, unit) for unit in np.eye(len(centers))], axis=1)
        weights.append(np.where(seen[:, None], of_axis, np.nan))
    scores = view.window_scores[:, :, list(classes)].astype(np.float64)
    return np.asarray(np.einsum("hr,rck,wc->khw", weights[0], scores, weights[1], optimize=True))


def _mean_where_seen(maps: Sequence[Float64Array]) -> Float64Array:
    """Average maps point by point, ignoring NaN."""
    stack = np.stack(maps)
    seen = ~np.isnan(stack)
    count = seen.sum(axis=0)
    total = np.where(seen, stack, 0).sum(axis=0)
    return np.where(count > 0, total / np.maximum(count, 1), np.nan)


# Drawing: one picture with the heat maps of the best classes over the image.


LABEL_WIDTH = 220  # pixels at least for a panel's text
MARGIN, LINE, FONT_SIZE = 12, 21, 16  # pixels
OPACITY = 0.6  # of the colors over the gray image
UNSEEN = 0.7  # of white over the gray image where no view looked: unlike any color of the map
INK, PAPER = (20, 20, 20), (255, 255, 255)

# The color map "inferno" of matplotlib (CC0) at nine points. Its lightness rises evenly from black to pale yellow, so
# equal steps of score look equal, also in gray print and to color-blind readers.
_COLORS = np.array(
    [(0, 0, 4), (31, 12, 72), (85, 15, 109), (136, 34, 106), (186, 54, 85),
     (227, 89, 51), (249, 140, 10), (249, 201, 50), (252, 255, 164)],
    np.float64,
)  # fmt: skip


def apply_color_map(values: Float64Array) -> Float64Array:
    """Map values in 0..1, of any shape, to RGB colors in 0..255 along a new last axis."""
    places = np.linspace(0, 1, len(_COLORS))
    return np.stack([np.interp(values, places, _COLORS[:, channel]) for channel in range(3)], axis=-1)


def draw_heat_maps(
    picture: UInt8Array,
    image_size: tuple[int, int],
    classified: Classification,
    contract: ModelContract,
    protocol: EvaluationProtocol,
) -> UInt8Array:
    """Draw the image beside the heat maps of its five best classes, uint8 (H, W, 3).

    picture: of the image, from `panel_picture`; image_size: height and width of the image; classified: its result, made
    with keep_windows.
    Each map is colored from 0 to its own maximum, which is printed above it as its peak: the highest window score of
    the class, averaged over scales. The range is at least a tenth of the highest peak of all maps, so that a barely
    visible class stays dark. Where no view looked, the image is faint and gray.
    """
    best = classified.top(HEAT_MAP_CLASSES)
    height, width = picture.shape[:2]
    maps = heat_maps(
        classified, [index for index, _ in best], image_size, (height, width), contract, protocol
    )  # at the size of the panels: a map of 64 Mpixel would take gigabytes and show nothing more
    views = f"{len(classified.views)} view" + "s" * (len(classified.views) != 1)
    panels = [_panel(picture, f"{image_size[1]}x{image_size[0]} px", f"{protocol.name}, {views}")]
    min_range = float(np.nanmax(maps)) / 10
    for place, ((index, score), of_class) in enumerate(zip(best, maps, strict=True), start=1):
        peak = float(np.nanmax(of_class))
        title = f"{place}. {contract.classes[index].name}"
        panels.append(
            _panel(_blend_map(picture, of_class, max(peak, min_range)), title, f"score {score:.1%}, peak {peak:.1%}")
        )
    legend = "peak of the class, or a tenth of the highest peak if larger" + (
        ", faint: not covered by a view" if np.isnan(maps).any() else ""
    )
    return _sheet(panels, legend, columns=6 if height > width else 3)


def png_bytes(picture: UInt8Array) -> bytes:
    """Encode a picture, uint8 (H, W, 3), as a PNG file."""
    buffer = io.BytesIO()
    Image.fromarray(picture).save(buffer, format="PNG")
    return buffer.getvalue()


def _blend_map(picture: UInt8Array, of_class: Float64Array, brightest: float) -> UInt8Array:
    """Blend the colors of one map with the gray image; `brightest` is the value of the last color."""
    gray = (picture.astype(np.float64) @ (0.299, 0.587, 0.114))[:, :, None]  # luma of ITU-R BT.601
    seen = ~np.isnan(of_class)
    colored = apply_color_map(np.where(seen, of_class, 0) / (brightest or 1))
    blended = np.where(seen[:, :, None], (1 - OPACITY) * gray + OPACITY * colored, (1 - UNSEEN) * gray + UNSEEN * 255)
    return np.asarray(np.round(blended), np.uint8)


def _panel(picture: UInt8Array, title: str, detail: str) -> Image.Image:
    """Return a picture with two lines of text above it, which are cut where it ends."""
    height, width = picture.shape[:2]
    panel = Image.new("RGB", (max(width, LABEL_WIDTH), height + 2 * LINE), PAPER)
    draw, font = ImageDraw.Draw(panel), ImageFont.load_default(FONT_SIZE)
    draw.text((0, 0), title, INK, font)
    draw.text((0, LINE), detail, INK, font)
    panel.paste(Image.fromarray(picture), (0, 2 * LINE))
    return panel


def _sheet(panels: Sequence[Image.Image], legend: str, columns: int) -> UInt8Array:
    """Arrange panels in rows, above a legend of the colors."""
    width, height = panels[0].width + MARGIN, panels[0].height + 2 * MARGIN
    rows = -(-len(panels) // columns)
    size = (min(columns, len(panels)) * width + MARGIN, rows * height + LINE + 2 * MARGIN)
    sheet = Image.new("RGB", size, PAPER)
    for place, panel in enumerate(panels):
        sheet.paste(panel, (MARGIN + place % columns * width, MARGIN + place // columns * height))
    draw, font, top = ImageDraw.Draw(sheet), ImageFont.load_default(FONT_SIZE), size[1] - MARGIN - LINE
    strip = OPACITY * apply_color_map(np.tile(np.linspace(0, 1, 120), (LINE - 4, 1))) + (1 - OPACITY) * 128
    sheet.paste(Image.fromarray(np.asarray(np.round(strip), np.uint8)), (MARGIN + 20, top))
    draw.text((MARGIN, top - 1), "0", INK, font)
    draw.text((MARGIN + 148, top - 1), legend, INK, font)
    return np.array(sheet)
