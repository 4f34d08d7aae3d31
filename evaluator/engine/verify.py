"""By how much scores may be off in each precision, and by how much they are."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from prelunet.evaluator.contract import GoldenImage, ModelContract, golden_image
from prelunet.evaluator.engine.session import Outputs, Session
from prelunet.evaluator.errors import ContractError
from prelunet.evaluator.imaging.canvas import pack

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


# Does a model file give the right scores on this machine? Needs no torch: the file carries its golden answers.


# Significant digits of golden scores and logits: as many as tell all float32 numbers apart. Rounding moves a number by
# 5e-9 of its size at most, 2,000 times less than any tolerance. With other instruction sets (MKL_CBWR) 25 of 12,000
# numbers of demo and E differed in 12 digits, none in 9.
GOLDEN_DIGITS = 9


def golden_answer(
    height: int, width: int, scores: npt.NDArray[np.floating], logits: npt.NDArray[np.floating]
) -> GoldenImage:
    """Return what a model file says of a golden image, rounded to `GOLDEN_DIGITS`. scores, logits: (K,)."""
    rounded = (tuple(float(f"{number:.{GOLDEN_DIGITS}g}") for number in numbers) for numbers in (scores, logits))
    return GoldenImage(height, width, *rounded)


def tolerance_precision(session: Session) -> str:
    """Return the precision whose tolerance a session is held to: the coarser of its file's and its own.

    A file of half weights stays as coarse as these are, also where a runtime computes with them in float32.
    """
    precisions = (session.contract.precision, session.circumstances.precision)
    return max(precisions, key=lambda precision: tolerance_of(precision).scores)


def verify(session: Session) -> list[Deviation]:
    """Run the golden images alone and, where the file allows it, together on one canvas full of rubbish.

    Raises ContractError when the file carries no golden images.
    """
    contract = session.contract
    if not contract.golden:
        raise ContractError(
            "the model carries no golden images. Export its checkpoint again with: prelunet export (an adopted net: "
            "with prelunet adopt)"
        )
    deviations, precision = [], tolerance_precision(session)
    for case, outputs, index in run_cases(session, [golden_image(g.height, g.width) for g in contract.golden]):
        golden, row = contract.golden[index], output_row(case, index)
        size = (golden.height, golden.width)
        found = deviation(case, size, outputs, row, golden.scores, golden.logits, precision=precision)
        if tuple(outputs.windows[row]) != contract.window_grid(golden.height, golden.width):
            found = replace(found, scores=math.inf)  # the trunk that the file states is not the one it has
        deviations.append(found)
    return deviations


def output_row(case: str, index: int) -> int:
    """Return the row of an image in the outputs of a case."""
    return index if case == "together" else 0


def run_cases(session: Session, images: Sequence[npt.NDArray[np.uint8]]) -> list[tuple[str, Outputs, int]]:
    """Run each image alone and, in a ragged file, all on one canvas; return (case, outputs, image index)."""
    cases = []
    for index, image in enumerate(images):
        sizes = np.array([image.shape[:2]], np.int64)
        cases.append(("alone", session.run(image[None], sizes), index))
    if session.contract.canvas == "ragged":
        outputs = session.run(*garbage_canvas(session.contract, images))
        cases += [("together", outputs, index) for index in range(len(images))]
    return cases


def garbage_canvas(
    contract: ModelContract, images: Sequence[npt.NDArray[np.uint8]], fill: int = 77
) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]:
    """Put images on one canvas, a little larger than needed, whose unused part holds `fill`."""
    height, width = (max(image.shape[axis] for image in images) + contract.trunk_stride + 3 for axis in (0, 1))
    return pack(images, height, width, fill=fill)
