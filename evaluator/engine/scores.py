"""Average the scores of views to the scores of an image. Pure functions; float64 inside, float32 out.

Sources: SPP-net, section 3.1.5 (softmax first, then the average); PReLU-nets, section 4 "Testing" (windows of several
scales, mirrored and not).
"""

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ..arrays import Float32Array, Float64Array, Int64Array
from ..errors import ContractError
from ..protocols import Averaging, View, Weighting

_FEW = 8  # classes for which as many searches for the best are faster than sorting


def view_weights(views: Sequence[View], windows: Sequence[tuple[int, int]], weights: Weighting) -> Float64Array:
    """Return the weight of each view in an image's score, float64 (views,), which sum to 1.

    windows: rows and columns of each view's grid.
    `scale`: every scale has the same weight, shared equally by its views: mirrored pair → scale → image.
    `view`: every window of every view has the same weight, so large scales count more (SPP-net's 96 views).
    """
    if weights == "view":
        counts = [rows * columns for rows, columns in windows]
        return np.array([count / sum(counts) for count in counts], np.float64)
    scales = [view.scale for view in views]
    return np.array([1 / (scales.count(scale) * len(set(scales))) for scale in scales], np.float64)


def nine_places(side: int) -> list[int]:
    """Return which of `side` windows along one axis are among the nine: the first, the middle, the last.

    For an even number the middle is the earlier of the two. Returns fewer than three where they coincide.
    """
    return sorted({0, (side - 1) // 2, side - 1})


def nine_windows(window_scores: Float32Array) -> tuple[tuple[int, int], Float32Array, Float32Array]:
    """Average the windows at the corners, the middles of the sides and the center.

    window_scores: float32 (rows, columns, classes). Returns rows and columns of the grid of the chosen windows, and
    the mean of their scores and of their logits, float32 (classes,). SPP-net, section 3.1.5: nine windows, but fewer
    where they coincide: three in one row ("when s = 224 there are 6 different views", with mirroring), one in a square.

    The logarithm of a window's scores stands in for its logits. The two differ by one constant per window, which the
    softmax of their average cancels. A score that is 0 in float32 counts as the smallest normal number.
    """
    rows, columns = (nine_places(side) for side in window_scores.shape[:2])
    chosen = window_scores[np.ix_(rows, columns)]
    scores = chosen.mean(axis=(0, 1), dtype=np.float64)
    logits = np.log(np.maximum(chosen, np.finfo(np.float32).tiny)).mean(axis=(0, 1), dtype=np.float64)
    return (len(rows), len(columns)), scores.astype(np.float32), logits.astype(np.float32)


def average_views(
    scores: npt.ArrayLike, logits: npt.ArrayLike, weights: Float64Array, averaging: Averaging
) -> Float32Array:
    """Average the views of one image to its scores, float32 (classes,), which sum to 1.

    scores, logits: (views, classes), each the mean over one view's windows; weights: (views,), which sum to 1.
    `softmax` averages the scores; `logit` averages the logits and returns the softmax of their mean.
    """
    if averaging == "logit":
        return softmax(_weighted_sum(logits, weights)).astype(np.float32)
    if len(weights) == 1:
        own: Float32Array = np.asarray(scores, np.float32)[0]  # what the sum below gives, sooner
        return own
    return _weighted_sum(scores, weights).astype(np.float32)


def softmax(logits: npt.ArrayLike) -> Float64Array:
    """Return the softmax over the last axis in float64."""
    values = np.asarray(logits, np.float64)
    powers = np.exp(values - values.max(axis=-1, keepdims=True))
    return np.asarray(powers / powers.sum(axis=-1, keepdims=True))


def restrict(scores: Float32Array, classes: Sequence[int] | None) -> Float32Array:
    """Return scores among some classes: divided by their sum, and -inf for all other classes, which are out.

    scores: float32 (rows, K), rows that sum to 1 over all classes; classes: indices, None for all, which changes
    nothing. For softmax scores this is the softmax over the logits of these classes alone. Where float32 holds 0 for
    each of them, all get the same score.
    """
    if classes is None:
        return scores
    chosen = np.take(scores, classes, axis=1).astype(np.float64)
    totals = chosen.sum(axis=1, keepdims=True)
    alike = np.full_like(chosen, 1 / len(classes))
    result = np.full_like(scores, -np.inf)
    result[:, classes] = np.divide(chosen, totals, out=alike, where=totals != 0)
    return result


def ranks_of(scores: Float32Array, labels: Int64Array) -> Int64Array:
    """Return the rank of one class per row, int64 (rows,): 1 + how many score higher, or equally at a lower index.

    scores: float32 (rows, classes); labels: int64 (rows,), the class index to rank in each row.
    """
    own = scores[np.arange(len(scores)), labels][:, None]
    ranks: Int64Array = 1 + np.count_nonzero(scores > own, axis=1)
    tied = np.flatnonzero(np.count_nonzero(scores == own, axis=1) > 1)  # rare, and slower
    lower = np.arange(scores.shape[1]) < labels[tied, None]
    ranks[tied] += np.count_nonzero((scores[tied] == own[tied]) & lower, axis=1)
    return ranks


def best_ranks(scores: Float32Array, truths: Sequence[tuple[int, ...]]) -> Int64Array:
    """Return the lowest rank of any true class per row, int64 (rows,). truths: class indices of each row, at least one.

    scores: float32 (rows, classes).
    """
    labels = np.array([truth[0] for truth in truths], np.int64)
    for row, truth in enumerate(truths):
        if len(truth) > 1:
            ascending = sorted(truth)
            labels[row] = ascending[int(np.argmax(scores[row, ascending]))]  # the lowest of equal ones
    return ranks_of(scores, labels)


def top_k(scores: Float32Array, k: int) -> list[tuple[int, float]]:
    """Return the k best classes as (class index, score), best first; ties go to the lower index.

    Classes with the score -inf are left out (`restrict`).
    """
    k = min(k, len(scores))
    if k <= _FEW:
        left, best = scores.copy(), []
        for _ in range(k):
            index = int(left.argmax())  # the first of equal ones
            if left[index] == -np.inf:
                break
            best.append((index, float(left[index])))
            left[index] = -np.inf
        return best
    candidates = np.flatnonzero(scores >= np.partition(scores, -k)[-k])  # more than k if the last ones are tied
    order = candidates[np.argsort(-scores[candidates], kind="stable")][:k]
    found = zip(order.tolist(), scores[order].tolist(), strict=True)
    return [(index, score) for index, score in found if score > -np.inf]


def shortest_decimal(score: float) -> float:
    """Return the shortest decimal number that is the same float32: 0.1 and not 0.10000000149011612."""
    return float(str(np.float32(score)))


def check_finite(scores: Float32Array, what: str) -> None:
    """Raise ContractError when a score is NaN or infinite.

    The fault is always the file's: every pixel is finite and the session checks every size, so either the weights are
    damaged or half-precision arithmetic overflows. what: the view, for the error.
    """
    if not math.isfinite(scores.sum()):  # scores are at most 1, so that finite ones have a finite sum
        raise ContractError(
            f"the model returned scores that are not finite (NaN) for {what}. Its weights are damaged or its "
            "arithmetic overflows: check it with `prelunet verify MODEL`, and export the checkpoint again as fp32"
        )


def _weighted_sum(values: npt.ArrayLike, weights: Float64Array) -> Float64Array:
    """Return the weighted sum over views, added in their order, so that it is the same on every machine."""
    total = np.zeros(np.shape(values)[1], np.float64)
    for weight, row in zip(weights, np.asarray(values, np.float64), strict=True):
        total += weight * row
    return total
