"""The spatial pyramid over all windows at once: its bins, and a plan that composes each pool from a smaller one.

SPP-net, Appendix A: bin i of n over `side` cells is [floor(i·side/n), ceil((i+1)·side/n)), the rule of adaptive max
pooling. The maximum of a bin over *all* windows is one stride-1 max pool of the bin's size, read at the bin's offset;
so a pyramid needs one pool per distinct bin size, and a large pool is composed of two or four small ones.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Bin:
    """One bin of a window: rows [row, row + height), columns [column, column + width), in cells."""

    row: int
    column: int
    height: int
    width: int


@dataclass(frozen=True)
class PoolStep:
    """A stride-1 max pool of `size`, computed from the pool of size `base`; (1, 1) is the feature map itself.

    A pool of b cells, pooled again over k − b + 1 cells, covers k cells. Reading two cells k − b apart (a dilated pool)
    would suffice, but few runtimes have fast code for dilation: OpenVINO took 50 ms instead of 3 (model A's pyramid,
    two views of 480x640, 2 cores), and onnxruntime's CUDA provider does not use cuDNN for it.
    """

    size: tuple[int, int]
    base: tuple[int, int]

    @property
    def kernel(self) -> tuple[int, int]:
        return (self.size[0] - self.base[0] + 1, self.size[1] - self.base[1] + 1)


def axis_bins(side: int, count: int) -> list[tuple[int, int]]:
    """Return (start, length) of `count` bins over `side` cells by the floor/ceil rule."""
    edges = [(i * side // count, -(-(i + 1) * side // count)) for i in range(count)]
    return [(start, end - start) for start, end in edges]


def pyramid_bins(window: int, levels: tuple[int, ...]) -> list[Bin]:
    """Return all bins of a window in the order of the file's fc1: level, row, column."""
    bins = []
    for level in levels:
        axis = axis_bins(window, level)
        bins += [Bin(row, column, height, width) for row, height in axis for column, width in axis]
    return bins


def plan_pools(sizes: set[tuple[int, int]]) -> list[PoolStep]:
    """Return steps, each based on an earlier one, that compute a max pool of every requested size.

    Sizes are computed in order of area, from the largest pool that is at least half as long on both axes. If there is
    none, a half-sized pool is added first.
    """
    planned: set[tuple[int, int]] = {(1, 1)}
    steps: list[PoolStep] = []

    def add(size: tuple[int, int]) -> None:
        if size in planned:
            return
        half = (-(-size[0] // 2), -(-size[1] // 2))
        usable = [m for m in planned if half[0] <= m[0] <= size[0] and half[1] <= m[1] <= size[1]]
        if not usable:
            add(half)
            usable = [half]
        steps.append(PoolStep(size, max(usable, key=lambda m: (m[0] * m[1], m))))
        planned.add(size)

    for size in sorted(sizes, key=lambda s: (s[0] * s[1], s)):
        add(size)
    return steps
