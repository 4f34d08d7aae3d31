"""Plan which images share a call of the session. A pure function of shapes: equal shapes give equal plans.

A CPU computes every pixel of a canvas, so only images of equal shape share one there (`canvas_step` 1). The CUDA
provider rebuilds the plan of each convolution (36 ms in total for net A) whenever the shape of its input changes, even
to a shape that it has seen before, and OpenVINO takes a few milliseconds, in which a small net computes several images.
So on CUDA, and for small nets in OpenVINO, sides are rounded up, and images of different shapes share a canvas as long
as the change that this saves costs more than the padding that it adds. The graph ignores pixels outside each image.

Quality of a plan: its cost is its canvas pixels plus `switch_pixels` for each change of shape. The cost never exceeds
that of one canvas per rounded shape. Where one side is common (all images of one scale and orientation), it never
exceeds that of any plan that groups neighboring lengths, and is optimal if each canvas needs only one batch. For other
shapes only the first bound holds: among all partitions of seven random shapes the plan was the cheapest in 241 of 250
cases, and at most 6 % above the cheapest.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Annotated, Any, TypeAlias

import numpy as np
from msgspec import Meta, Struct

from ..json_checks import read_stored
from .shape_buckets import ShapeBuckets

# The two largest uses of memory, for the largest net (C: 896 channels, 63 bins; conv1 has 96 channels at stride 2):
# 63·896·4 bytes of pooled features per window, and 96·4/4 bytes per pixel for each of about three live maps at conv1.
MAX_WINDOWS = 2048  # · 226 kB = 0.46 GB
MAX_PIXELS = 2**21  # · 0.3 kB = 0.60 GB

MAX_RULE_VALUE = 2**40  # of any rule: beyond every machine, while sums of such numbers stay below 2**63
_FORBIDDEN_COST = 2**61  # the cost of a forbidden choice
_ROUNDS, _NEW_CANVASES = 8, 2  # of `_local_search`: three rounds and one new canvas sufficed in all trials

_Limit: TypeAlias = Annotated[int, Meta(ge=1, le=MAX_RULE_VALUE)]


@dataclass(frozen=True)
class BatchRules:
    """How batches are planned on a device.

    canvas_step: sides of canvases are multiples of it; 1 means exactly the images' shapes (CPUs, and files for exact
    canvases);
    max_windows, max_pixels: limits of a whole batch, counted on its canvases;
    switch_pixels: cost of a change of canvas, as the canvas pixels that could be computed in that time.
    """

    canvas_step: _Limit = 1
    max_windows: _Limit = MAX_WINDOWS
    max_pixels: _Limit = MAX_PIXELS
    switch_pixels: Annotated[int, Meta(ge=0, le=MAX_RULE_VALUE)] = 0

    def max_rows(self, pixels: int, windows: int) -> int:
        """Return how many canvases of `pixels` and `windows` a batch may have, at least 1."""
        return max(1, min(self.max_pixels // pixels, self.max_windows // max(1, windows)))

    def to_json(self) -> dict[str, int]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: Any) -> "BatchRules":
        """Read the output of `to_json`; raises ValueError for anything else."""
        try:
            return read_stored(data, cls)
        except ValueError as error:
            raise ValueError(f"the rules of batches: {error}") from error


class Batch(Struct, frozen=True):
    """Images that share one canvas size and one call.

    indices: into the given shapes; height, width: of the canvas in pixels; rows: number of computed canvases; those
    after the images are blank.
    """

    indices: tuple[int, ...]
    height: int
    width: int
    rows: int


class BatchPlan(Struct, frozen=True):
    """Batches in the order in which they run. images_pixels: of all images together."""

    batches: tuple[Batch, ...]
    images_pixels: int

    @property
    def canvas_pixels(self) -> int:
        return sum(batch.rows * batch.height * batch.width for batch in self.batches)

    @property
    def padding(self) -> float:
        """Return the fraction of computed pixels that belong to no image, 0 to 1."""
        return 1 - self.images_pixels / self.canvas_pixels if self.batches else 0.0

    @property
    def canvas_changes(self) -> int:
        """Return how often the shape of the session's input changes, including the first batch."""
        shapes = [(batch.rows, batch.height, batch.width) for batch in self.batches]
        return bool(shapes) + sum(before != after for before, after in pairwise(shapes))


def plan_batches(
    shapes: Sequence[tuple[int, int]],
    window_grid: Callable[[int, int], tuple[int, int]],
    rules: BatchRules,
    *,
    max_side: int,
    shape_buckets: ShapeBuckets | None = None,
) -> BatchPlan:
    """Plan batches so that each image is in exactly one.

    shapes: (height, width) of each image in pixels, none beyond max_side;
    window_grid: (height, width) of a canvas → its grid of windows, each side by itself (`ModelContract.window_grid`);
    max_side: the largest canvas side that the model accepts; no side is rounded up beyond it;
    shape_buckets: the canvases and rows to use for images that fit.
    An image that alone exceeds the rules' limits gets batches of its own shape, one image each. The first batch holds
    the first image, batches of one canvas are adjacent, and images keep their order within a canvas. Which images share
    a canvas does not depend on their order.
    """
    step = rules.canvas_step
    canonical = [(_round_up(height, step, max_side), _round_up(width, step, max_side)) for height, width in shapes]
    if shape_buckets is not None:
        canonical = [shape_buckets.canvas(*shape) or shape for shape in canonical]
    canvas_of: Mapping[tuple[int, int], tuple[int, int]] = {}
    if step > 1 and rules.switch_pixels:
        costs = _Costs(rules, window_grid, {side for shape in canonical for side in shape}, shape_buckets)
        canvas_of = _shared_canvases(Counter(canonical), costs)
    members: dict[tuple[int, int], list[int]] = {}
    for index, shape in enumerate(canonical):
        members.setdefault(canvas_of.get(shape, shape), []).append(index)
    batches = [
        batch
        for (height, width), indices in members.items()
        for batch in _batches_of(
            indices,
            height,
            width,
            rules.max_rows(height * width, math.prod(window_grid(height, width))),
            rules.switch_pixels,
            shape_buckets,
        )
    ]
    return BatchPlan(tuple(batches), sum(height * width for height, width in shapes))


def _round_up(side: int, step: int, largest: int) -> int:
    return min(-(-side // step) * step, max(side, largest))


def _batches_of(
    indices: list[int],
    height: int,
    width: int,
    max_rows: int,
    switch_pixels: int,
    shape_buckets: ShapeBuckets | None,
) -> Iterator[Batch]:
    """Yield the batches of one canvas; with shape buckets their rows are rounded up to a bucket."""
    if shape_buckets is None or (height, width) != shape_buckets.canvas(height, width):
        yield from _cut(indices, height, width, max_rows, switch_pixels)
        return
    for start in range(0, len(indices), shape_buckets.round_down_rows(max_rows)):
        batch = tuple(indices[start : start + shape_buckets.round_down_rows(max_rows)])
        yield Batch(batch, height, width, shape_buckets.round_up_rows(len(batch)))


def _cut(indices: list[int], height: int, width: int, max_rows: int, switch_pixels: int) -> Iterator[Batch]:
    """Yield the batches of one canvas, of at most `max_rows` rows: as few as possible.

    All get the same number of rows if the blank rows that this takes, fewer than there are batches, cost less than a
    change of shape; otherwise all but the last have `max_rows`.
    """
    count = -(-len(indices) // max_rows)
    even = -(-len(indices) // count)
    blank = count * even - len(indices)
    same = blank * height * width < switch_pixels
    rows = even if same else max_rows
    for start in range(0, len(indices), rows):
        batch = tuple(indices[start : start + rows])
        yield Batch(batch, height, width, rows if same else len(batch))


class _Costs:
    """Costs of canvases in pixels, for single numbers and for arrays alike."""

    def __init__(
        self,
        rules: BatchRules,
        window_grid: Callable[[int, int], tuple[int, int]],
        sides: set[int],
        shape_buckets: ShapeBuckets | None = None,
    ) -> None:
        self._rules = rules
        self._max_short_side = shape_buckets.max_short_side if shape_buckets is not None else MAX_RULE_VALUE
        self._windows = np.zeros(max(sides, default=0) + 1, np.int64)  # indexed by the side of a canvas
        for side in sides:
            self._windows[side] = max(0, window_grid(side, side)[0])

    def max_rows(self, height: Any, width: Any) -> Any:
        """Return how many canvases of a size the limits allow, at least 1."""
        windows, area = np.maximum(1, self._windows[height] * self._windows[width]), np.maximum(1, height * width)
        return np.maximum(1, np.minimum(self._rules.max_windows // windows, self._rules.max_pixels // area))

    def of(self, images: Any, height: Any, width: Any, shapes: Any) -> Any:
        """Return the cost of `images` images on canvases of a size, cut as `_cut` does.

        shapes: number of different shapes. A canvas beyond the limits or outside the shape buckets may hold images of
        exactly one shape.
        """
        area, switch = np.maximum(1, height * width), self._rules.switch_pixels
        count = -(-images // self.max_rows(height, width))
        blank = count * -(-images // np.maximum(count, 1)) - images
        cost = images * area + np.minimum(blank * area, switch) + switch * (images > 0)
        too_large = (area > self._rules.max_pixels) | (
            self._windows[height] * self._windows[width] > self._rules.max_windows
        )
        too_large |= np.minimum(height, width) > self._max_short_side
        return np.where(too_large & (shapes > 1), _FORBIDDEN_COST, cost)


_Shape = tuple[int, int, int]  # height, width, number of images


def _size(shapes: Sequence[_Shape]) -> tuple[int, int, int, int]:
    """Return images, height, width and number of shapes of one canvas, for `_Costs.of`; zeros for no shapes."""
    heights, widths, images = zip(*shapes, strict=True) if shapes else ((0,), (0,), (0,))
    return sum(images), max(heights), max(widths), len(shapes)


def _shared_canvases(images: Mapping[tuple[int, int], int], costs: _Costs) -> dict[tuple[int, int], tuple[int, int]]:
    """Return the canvas of each shape; images: number of images per shape."""
    shapes = [(*shape, images[shape]) for shape in sorted(images)]
    orders = (
        shapes,
        sorted(shapes, key=lambda shape: (shape[1], shape[0])),
        sorted(shapes, key=lambda shape: (shape[0] < shape[1], min(shape[:2]), max(shape[:2]))),  # scale by scale
    )
    cuts = [_intervals(order, costs) for order in orders]
    cheapest = min(cuts, key=lambda groups: sum(int(costs.of(*_size(group))) for group in groups))
    groups = _local_search(cheapest, costs)
    return {(height, width): _size(group)[1:3] for group in groups for height, width, _ in group}


def _intervals(shapes: Sequence[_Shape], costs: _Costs) -> list[list[_Shape]]:
    """Cut a sequence of shapes into intervals at the least cost.

    least[end], for the first `end` shapes, is the minimum over begin of least[begin] + cost of shapes begin to end − 1.
    """
    backwards = np.array(shapes[::-1], np.int64).reshape(-1, 3)
    least, begins = np.zeros(len(shapes) + 1, np.int64), [0]
    for end in range(1, len(shapes) + 1):
        height, width, images = backwards[len(shapes) - end :].T
        sizes = np.cumsum(images), np.maximum.accumulate(height), np.maximum.accumulate(width), np.arange(1, end + 1)
        cost = least[end - 1 :: -1] + costs.of(*sizes)
        begins.append(end - 1 - int(cost.argmin()))
        least[end] = cost.min()
    groups, end = [], len(shapes)
    while end:
        groups.append(list(shapes[begins[end] : end]))
        end = begins[end]
    return groups[::-1]


def _local_search(groups: list[list[_Shape]], costs: _Costs) -> list[list[_Shape]]:
    """Move each shape to the canvas where it adds the least cost, or to a new one, until nothing improves."""
    groups = [*groups, *([] for _ in range(_NEW_CANVASES))]
    sizes = np.array([_size(group) for group in groups])
    cost = costs.of(*sizes.T)
    for _ in range(_ROUNDS):
        moved = False
        for shape, source in [(shape, source) for source, group in enumerate(groups) for shape in group]:
            without = _size([other for other in groups[source] if other != shape])
            cost_without = costs.of(*without)
            height, width, images = shape
            joined = np.maximum(sizes, (0, height, width, 0)) + np.array((images, 0, 0, 1))
            cost_joined = costs.of(*joined.T)
            added = cost_joined - cost
            added[source] = cost[source] - cost_without  # what staying costs
            target = int(added.argmin())
            if added[target] < added[source]:
                groups[source].remove(shape)
                groups[target].append(shape)
                sizes[source], sizes[target] = without, joined[target]
                cost[source], cost[target] = cost_without, cost_joined[target]
                moved = True
        if not moved:
            break
    return groups
