"""The canvases and batch sizes that a server shows to a GPU: few enough that all of them run once before it is ready.

A GPU makes itself ready for each shape of batch that it has not seen: it loads kernels, takes memory, and page-locks
as much of the host's. A batch job pays that once; a server would let callers pay for it, now and then, for days. So its
batches keep to rungs: sides that fit the usual photos at the model's own scales, and rows of 1, 2, 3, 4, 6, 8, 12 …
"""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass

# Long sides in shorter sides: square, 4:3 and 3:2 as cameras have it, screens, panoramas up to what protocols keep.
ASPECT_RATIOS = (1.0, 4 / 3, 1.5, 16 / 9, 2.0, 3.0, 4.0)
MAX_ROWS = 256


@dataclass(frozen=True)
class ShapeBuckets:
    """The sides of canvases in pixels, and how many of them a batch has; both rising, the rows from 1 on.

    max_short_side: no canvas that images of several shapes share has a longer shorter side, in pixels: a canvas that is
    both as high as a tall panorama and as wide as a wide one would be mostly padding.
    """

    sides: tuple[int, ...]
    rows: tuple[int, ...]
    max_short_side: int

    def canvas(self, height: int, width: int) -> tuple[int, int] | None:
        """Return the smallest canvas for an image of these sides; None where the ladder has none."""
        places = [bisect_left(self.sides, side) for side in (height, width)]
        if max(places) >= len(self.sides):
            return None
        high, wide = (self.sides[place] for place in places)
        return (high, wide) if min(high, wide) <= self.max_short_side else None

    def round_up_rows(self, rows: int) -> int:
        """Return the smallest number of rows of a rung that is not below `rows`, which is at most the largest."""
        return self.rows[bisect_left(self.rows, rows)]

    def round_down_rows(self, limit: int) -> int:
        """Return the largest number of rows of a rung that is not above `limit`, which is at least 1."""
        return self.rows[bisect_right(self.rows, limit) - 1]

    def batch_shapes(self, max_rows: Callable[[int, int], int]) -> list[tuple[int, int, int]]:
        """Return every batch that can come: rows, height and width, those with the most pixels first.

        max_rows: (height, width) of a canvas → the rows that the batch rules allow, at least 1.
        """
        found = [
            (rows, height, width)
            for height in self.sides
            for width in self.sides
            if min(height, width) <= self.max_short_side
            for rows in self.rows
            if rows <= self.round_down_rows(max_rows(height, width))
        ]
        return sorted(found, key=lambda shape: (-shape[0] * shape[1] * shape[2], shape))


def build_shape_buckets(crop: int, scales: Sequence[int], step: int, max_side: int) -> ShapeBuckets:
    """Return the ladder of a model.

    crop, scales: pixels; step: sides are multiples of it, but for the crop's own; max_side: none is larger.
    """
    wanted = {crop, *(round(scale * aspect) for scale in scales for aspect in ASPECT_RATIOS)}
    sides = {crop} | {min(-(-side // step) * step, max_side) for side in wanted}
    rows = sorted(count << doublings for count in (1, 3) for doublings in range(MAX_ROWS.bit_length()))
    widest = max((-(-round(scale * ASPECT_RATIOS[1]) // step) * step for scale in scales), default=crop)
    return ShapeBuckets(
        tuple(sorted(sides)), tuple(count for count in rows if count <= MAX_ROWS), min(widest, max_side)
    )
