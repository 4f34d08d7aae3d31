"""Trend of the slopes of the negative side with depth. In the paper, conv1's are large and those above smaller.

PReLU-nets, section 2.1 "Comparison Experiments": conv1 preserves both signs of edges; deeper layers become more
nonlinear.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

TREND_THRESHOLD = 0.5  # rank correlations from here on are called a trend; the number is printed as well
# Ranks ignore magnitudes: slopes of an untrained net would be ordered by their sixth digit. The demo's net has a range
# of 0.001 after 20 steps and of 0.11 after training, the paper's has 0.52 (Table 1, channel-wise).
MIN_RANGE = 0.01


@dataclass(frozen=True)
class SlopeTrend:
    """How the layers' mean slopes depend on depth.

    layer, first: name and mean slope of the first layer; others: average over the layers above it.
    range: the largest mean slope minus the smallest.
    rank_correlation: Spearman's, between mean slope and depth, -1 (each smaller than the one below) to 1; None if the
    range is below 0.01, as before training, when the slopes are alike.
    """

    layer: str
    first: float
    others: float
    range: float
    rank_correlation: float | None

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "text": str(self)}

    def __str__(self) -> str:
        compared = f"{self.layer} {self.first:.3f}, the layers above it {self.others:.3f} on average"
        if self.rank_correlation is None:
            return f"alike at every depth (range below {MIN_RANGE}); {compared}"
        word = "no clear order with depth"
        if abs(self.rank_correlation) >= TREND_THRESHOLD:
            word = f"{'smaller' if self.rank_correlation < 0 else 'larger'} with depth"
        return f"{word} (rank correlation {self.rank_correlation:+.2f}, range {self.range:.3f}); {compared}"


def slope_trend(means: Mapping[str, float]) -> SlopeTrend | None:
    """Return the trend of layer → mean slope, given in the order of depth; None for fewer than two layers."""
    if len(means) < 2:
        return None
    first, *others = means.values()
    span = round(max(means.values()) - min(means.values()), 6)  # so that 0.31 and 0.3 are 0.01 apart
    correlation = None
    if span >= MIN_RANGE:  # Spearman's, where ties get the mean of their ranks; importing scipy for it would take long
        values = np.array(list(means.values()))
        ranks = [(values < value).sum() + (values == value).sum() / 2 for value in values]
        correlation = round(float(np.corrcoef(range(len(values)), ranks)[0, 1]), 4)
    return SlopeTrend(next(iter(means)), round(first, 6), round(sum(others) / len(others), 6), span, correlation)
