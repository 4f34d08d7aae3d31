"""Do the slopes of the negative side fall with depth? The paper: large at conv1, smaller in the layers above.

PReLU-nets, section 2.1 "Comparison Experiments": conv1 keeps both signs of the edges; deeper layers become more
nonlinear.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

TREND_THRESHOLD = 0.5  # a rank correlation beyond it is called a trend; the number stands beside the word
# Ranks see no sizes: a net that has learned nothing yet would have an order by its sixth digit. The demo's net has a
# range of 0.001 after 20 steps and of 0.11 when it is trained, the paper's of 0.52 (Table 1, channel-wise).
MIN_RANGE = 0.01


@dataclass(frozen=True)
class SlopeTrend:
    """How mean slopes go with depth.

    first: of the first layer; others: mean over the layers above it, each counting once.
    range: the largest of the layers' mean slopes minus the smallest.
    rank_correlation: Spearman's, of the mean slope with the place of the layer, -1 (each smaller than the one below)
    to 1; None where the range is below 0.01, as before training: the slopes are alike.
    """

    layer: str
    first: float
    others: float
    range: float
    rank_correlation: float | None

    def to_json(self) -> dict[str, Any]:
        """Return plain data, with the sentence as `text`."""
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
    """Return the trend of layer → mean slope, in the order of depth; None for fewer than two layers."""
    if len(means) < 2:
        return None
    first, *others = means.values()
    span = round(max(means.values()) - min(means.values()), 6)  # so that 0.31 and 0.3 are 0.01 apart
    correlation = None
    if span >= MIN_RANGE:
        correlation = round(_rank_correlation(np.array(list(means.values()))), 4)
    return SlopeTrend(next(iter(means)), round(first, 6), round(sum(others) / len(others), 6), span, correlation)


def _rank_correlation(values: npt.NDArray[np.float64]) -> float:
    """Return Spearman's rank correlation of values with their places; ties get the mean of their ranks.

    Not scipy's: to load it takes longer than all the rest of `inspect`.
    """
    ranks = [(values < value).sum() + (values == value).sum() / 2 for value in values]
    return float(np.corrcoef(range(len(values)), ranks)[0, 1])
