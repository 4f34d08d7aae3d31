"""The pyramid's bins and the plan of its pools, compared with plain definitions."""

import numpy as np
import pytest
import torch

from prelunet.export.dense.pyramid import axis_bins, plan_pools, pyramid_bins

NETS = [(14, (7, 3, 2, 1)), (18, (6, 3, 2, 1)), (7, (3, 2, 1)), (13, (5, 4, 3, 1)), (20, (3, 2, 1))]


def test_bins_of_14_cells_are_those_of_sppnets_appendix() -> None:
    assert axis_bins(14, 3) == [(0, 5), (4, 6), (9, 5)]
    assert axis_bins(14, 7) == [(2 * i, 2) for i in range(7)]
    assert axis_bins(14, 1) == [(0, 14)]


@pytest.mark.parametrize(("window", "levels"), NETS)
def test_bins_hold_the_cells_of_adaptive_max_pooling(window: int, levels: tuple[int, ...]) -> None:
    cells = torch.rand(1, 1, window, window)
    expected = torch.cat([torch.nn.functional.adaptive_max_pool2d(cells, n).flatten() for n in levels])
    bins = pyramid_bins(window, levels)
    actual = [float(cells[0, 0, b.row : b.row + b.height, b.column : b.column + b.width].max()) for b in bins]
    np.testing.assert_array_equal(actual, expected)


@pytest.mark.parametrize(("window", "levels"), NETS)
def test_planned_pools_equal_direct_pools(window: int, levels: tuple[int, ...]) -> None:
    cells = torch.randn(1, 2, window + 5, window + 2) - 5  # all negative, to reveal a pool that starts at 0
    sizes = {(b.height, b.width) for b in pyramid_bins(window, levels)}
    pools = {(1, 1): cells}
    for step in plan_pools(sizes):
        pools[step.size] = torch.nn.functional.max_pool2d(pools[step.base], step.kernel, 1)
    assert sizes <= set(pools)
    for size in sizes:
        direct = torch.nn.functional.max_pool2d(cells, size, 1)
        torch.testing.assert_close(pools[size], direct, rtol=0, atol=0)  # maxima only select, so results are equal


def test_the_plan_for_model_a_reads_each_cell_a_fourth_as_often_as_direct_pools() -> None:
    steps = plan_pools({(b.height, b.width) for b in pyramid_bins(14, (7, 3, 2, 1))})
    reads = sum(step.kernel[0] * step.kernel[1] for step in steps)
    assert reads <= (4 + 25 + 30 + 30 + 36 + 49 + 196) / 4
