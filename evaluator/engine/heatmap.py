"""Where the model sees a class: the window scores of all views, laid back over the image.

A map is plain interpolation of what the model said of each window; no gradient and no second model is involved.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from prelunet.evaluator.contract import ModelContract
from prelunet.evaluator.engine.classify import Classified, ViewResult
from prelunet.evaluator.imaging.resize import resized_size
from prelunet.evaluator.imaging.views import crop_origin
from prelunet.evaluator.protocols import Protocol

FloatArray = npt.NDArray[np.float64]

UNCAPPED = 2**31  # as a cap: no image is that elongated


def window_centres(contract: ModelContract, count: int) -> FloatArray:
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
    classified: Classified,
    classes: Sequence[int],
    image_size: tuple[int, int],
    map_size: tuple[int, int],
    contract: ModelContract,
    protocol: Protocol,
) -> FloatArray:
    """Return where each of some classes is seen, float64 (classes, rows, columns) in 0..1.

    classified: made with keep_windows; image_size: height and width of the image in pixels; map_size: those of the
    maps, which cover the whole image.
    Each point is interpolated between the scores of the windows around it; beyond the outermost centres it is the
    nearest window's, and a crop has only one. Mirrored views are flipped back; the views of a scale that show the point
    are averaged, then the scales, whatever the protocol's weights and averaging; of `spp-18` every window is shown, not
    only the nine that count. NaN where no view looked (outside the crops, or cut off by the cap).
    """
    by_scale: dict[int, list[FloatArray]] = {}
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
    protocol: Protocol,
) -> FloatArray:
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


def _linear_weights(positions: FloatArray, centres: FloatArray) -> FloatArray:
    """Return (positions, centres): how much each centre counts at each position in linear interpolation."""
    weights = np.empty((len(positions), len(centres)))
    for index, unit in enumerate(np.eye(len(centres))):
        weights[:, index] = np.interp(positions, centres, unit)
    return weights


def _mean_where_seen(maps: Sequence[FloatArray]) -> FloatArray:
    """Average maps, point by point, over those that are not NaN there."""
    stack = np.stack(maps)
    seen = ~np.isnan(stack)
    count = seen.sum(axis=0)
    total = np.where(seen, stack, 0).sum(axis=0)
    return np.where(count > 0, total / np.maximum(count, 1), np.nan)
