"""The canvases and batch sizes that a server uses on a GPU: few enough to run each canvas before it is ready.

For new canvases a GPU loads kernels, allocates memory, and page-locks as much on the host. A batch job pays this once;
a server's callers would pay it now and then, for days. So a server rounds its batches to buckets: sides that fit the
usual photos at the model's own scales, and rows of 1, 2, 3, 4, 6, 8, 12 …
"""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass

# Long side over short side: square, cameras (4:3, 3:2), screens, panoramas up to the long-side cap of protocols.
ASPECT_RATIOS = (1.0, 4 / 3, 1.5, 16 / 9, 2.0, 3.0, 4.0)
MAX_ROWS = 256


@dataclass(frozen=True)
class ShapeBuckets:
    """The allowed sides of canvases in pixels and the allowed rows of a batch; both ascending, the rows from 1.

    max_short_side: limit, in pixels, for the shorter side of canvases that images of several shapes share. A canvas as
    high as a tall panorama and as wide as a wide one would be mostly padding.
    """

    sides: tuple[int, ...]
    rows: tuple[int, ...]
    max_short_side: int

    def canvas(self, height: int, width: int) -> tuple[int, int] | None:
        """Return the smallest canvas for an image of these sides; None if no canvas fits."""
        places = [bisect_left(self.sides, side) for side in (height, width)]
        if max(places) >= len(self.sides):
            return None
        high, wide = (self.sides[place] for place in places)
        return (high, wide) if min(high, wide) <= self.max_short_side else None

    def round_up_rows(self, rows: int) -> int:
        """Return the smallest allowed number of rows that is at least `rows`, which must not exceed the largest."""
        return self.rows[bisect_left(self.rows, rows)]

    def round_down_rows(self, limit: int) -> int:
        """Return the largest allowed number of rows that is at most `limit`, which must be at least 1."""
        return self.rows[bisect_right(self.rows, limit) - 1]

    def warm_up_shapes(self, max_rows: Callable[[int, int], int]) -> list[tuple[int, int, int]]:
        """Return the largest and the smallest batch of every canvas: rows, height, width; the most pixels first.

        Those between are assumed to need no kernels and no memory that these do not.
        max_rows: (height, width) of a canvas → the rows that the batch rules allow, at least 1.
        """
        shapes = {
            (rows, height, width)
            for height in self.sides
            for width in self.sides
            if min(height, width) <= self.max_short_side
            for rows in (self.round_down_rows(max_rows(height, width)), 1)
        }
        return sorted(shapes, key=lambda shape: (-shape[0] * shape[1] * shape[2], shape))


def build_shape_buckets(crop: int, scales: Sequence[int], step: int, max_side: int) -> ShapeBuckets:
    """Return the shape buckets of a model.

    crop, scales: pixels; step: all sides but the crop's are multiples of it; max_side: the largest allowed side.
    """
    wanted = {crop, *(round(scale * aspect) for scale in scales for aspect in ASPECT_RATIOS)}
    sides = {crop} | {min(-(-side // step) * step, max_side) for side in wanted}
    rows = sorted(count << doublings for count in (1, 3) for doublings in range(MAX_ROWS.bit_length()))
    widest = max((-(-round(scale * ASPECT_RATIOS[1]) // step) * step for scale in scales), default=crop)
    return ShapeBuckets(
        tuple(sorted(sides)), tuple(count for count in rows if count <= MAX_ROWS), min(widest, max_side)
    )
