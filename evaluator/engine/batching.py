"""Which images share a call of the session. A pure function of shapes: the same shapes give the same plan.

A CPU computes every pixel of a canvas, so there only equal shapes share one (`canvas_step` 1). The CUDA provider
rebuilds each convolution's plan (15-30 ms) whenever the shape of its input changes, so there sides are rounded up and
images of different shapes share a canvas; the graph ignores what lies outside of each image.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

# The two large things in memory, for the largest net (C: 896 channels, 63 bins; conv1 gives 96 channels at stride 2):
# 63·896·4 bytes of pooled features per window, and 96·4/4 bytes per pixel for each of about three maps alive at conv1.
MAX_WINDOWS = 2048  # · 226 kB = 0.46 GB
MAX_PIXELS = 2**21  # · 0.3 kB = 0.60 GB


@dataclass(frozen=True)
class Batch:
    """Images that share one canvas size. indices: into the shapes given; height, width: of the canvas in pixels."""

    indices: tuple[int, ...]
    height: int
    width: int


def plan_batches(
    shapes: Sequence[tuple[int, int]],
    windows_of: Callable[[int, int], tuple[int, int]],
    *,
    canvas_step: int,
    max_side: int,
    max_windows: int = MAX_WINDOWS,
    max_pixels: int = MAX_PIXELS,
) -> list[Batch]:
    """Plan batches so that each image is in exactly one.

    shapes: (height, width) of each image in pixels, none beyond max_side;
    windows_of: (height, width) of a canvas → its grid of windows (`ModelContract.window_grid`);
    canvas_step: 1 for canvases of exactly the images' shape, else sides are rounded up to its multiples, at most to
    max_side, the largest canvas that the model takes;
    max_windows, max_pixels: of a whole batch, counted on the canvas; an image that alone exceeds them gets a batch of
    its own.
    Batches of the same canvas follow each other, canvases come in the order of their first image, images in theirs.
    """
    groups: dict[tuple[int, int], list[int]] = {}
    for index, (height, width) in enumerate(shapes):
        canvas = (_round_up(height, canvas_step, max_side), _round_up(width, canvas_step, max_side))
        groups.setdefault(canvas, []).append(index)
    batches = []
    for (height, width), members in groups.items():
        rows, columns = windows_of(height, width)
        count = max(1, min(max_windows // max(1, rows * columns), max_pixels // (height * width)))
        for start in range(0, len(members), count):
            batches.append(Batch(tuple(members[start : start + count]), height, width))
    return batches


def _round_up(side: int, step: int, largest: int) -> int:
    return min(-(-side // step) * step, max(side, largest))
