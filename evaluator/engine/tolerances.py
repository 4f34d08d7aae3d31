"""By how much scores may be off in each precision, and by how much they are."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:  # which itself compares, when it opens a file
    from prelunet.evaluator.engine.session import Outputs

FloatArray = npt.NDArray[np.floating]


@dataclass(frozen=True)
class Tolerance:
    """By how much a result may be off. Scores are probabilities, so theirs is absolute; logits have any size, so theirs
    is a share of the largest.
    """

    scores: float
    logits: float


# What rounding costs; a mask, slope or bin that is wrong leaves 2e-2 of the largest logit and more. For fp16 and bf16:
# the worst of six nets (A, E, demo; trained, or with logits up to 20), rounded after every operation.
TOLERANCES: Mapping[str, Tolerance] = {
    # 20 layers of sums of up to 32,256 terms leave about 3e-6.
    "fp32": Tolerance(1e-5, 1e-4),
    # Rounds to 11 bits like fp16, but only what is multiplied, not what comes out: never worse than fp16.
    "tf32": Tolerance(1e-2, 1e-2),
    # 11 bits: a window's score off by up to 4e-3, the mean of windows by 1e-3, logits by 2e-3 of the largest.
    "fp16": Tolerance(1e-2, 1e-2),
    # 8 bits: up to 2e-2, 1e-2 and 1.3e-2.
    "bf16": Tolerance(5e-2, 5e-2),
}


@dataclass(frozen=True)
class Deviation:
    """How far one run of one image is from the oracle.

    case: how it was run; scores: largest absolute difference of a score; logits: largest difference of a logit as a
    share of the largest logit; precision: whose tolerance it is held to.
    """

    case: str
    height: int
    width: int
    scores: float
    logits: float
    precision: str = "fp32"

    @property
    def passed(self) -> bool:
        """Return whether both are within the tolerance of the precision (False for NaN)."""
        tolerance = tolerance_of(self.precision)
        return self.scores <= tolerance.scores and self.logits <= tolerance.logits


def tolerance_of(precision: str) -> Tolerance:
    """Return by how much a run in this precision may be off."""
    return TOLERANCES[precision]


def deviation(
    case: str,
    size: tuple[int, int],
    outputs: "Outputs",
    row: int,
    scores: Sequence[float] | FloatArray,
    logits: Sequence[float] | FloatArray,
    *,
    precision: str = "fp32",
) -> Deviation:
    """Compare one row of the outputs with the oracle's scores and logits (K,)."""
    largest = max(float(np.abs(np.asarray(logits)).max()), np.finfo(np.float32).tiny)
    return Deviation(
        case,
        *size,
        scores=float(np.abs(outputs.scores[row].astype(np.float64) - np.asarray(scores)).max()),
        logits=float(np.abs(outputs.logits[row].astype(np.float64) - np.asarray(logits)).max() / largest),
        precision=precision,
    )
