"""Check the scores of a model file on this machine against its golden images. Needs no torch."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from ..arrays import FloatArray, Int64Array, UInt8Array
from ..contract import GoldenImage, ModelContract, Tolerance, golden_image
from ..errors import CheckFailed, ContractError
from ..imaging.views import pack
from .session import Outputs, Session

# Where all logits are smaller, the terms of their sums cancel, and rounding errors are relative to the terms: the
# tolerance stays that of logits of this size, which for fp32 is 1e-6 and changes no score.
SMALL_LOGIT = 0.01
# Rounding errors; a wrong mask, slope or bin changes logits by 2e-2 of the largest or more. For fp16 and bf16: the
# worst of six nets (A, E, demo; trained, or with logits up to 20), rounded after every operation.
TOLERANCES: Mapping[str, Tolerance] = {
    # 20 layers of sums of up to 32,256 terms leave about 3e-6.
    "fp32": Tolerance(1e-5, 1e-4),
    # Rounds to 11 bits like fp16, but only the factors, not the results: never worse than fp16.
    "tf32": Tolerance(1e-2, 1e-2),
    # 11 bits: a window's score off by up to 4e-3, the mean of windows by 1e-3, logits by 2e-3 of the largest.
    "fp16": Tolerance(1e-2, 1e-2),
    # 8 bits: up to 2e-2, 1e-2 and 1.3e-2.
    "bf16": Tolerance(5e-2, 5e-2),
}


@dataclass(frozen=True)
class Deviation:
    """Deviation of one run of one image from the oracle.

    case: how it was run; scores: largest absolute difference of a score; logits: largest difference of a logit,
    relative to the largest logit; precision: whose tolerance applies; tolerance: that tolerance.
    """

    case: str
    height: int
    width: int
    scores: float
    logits: float
    precision: str = "fp32"
    tolerance: Tolerance = TOLERANCES["fp32"]

    @property
    def passed(self) -> bool:
        """Return whether both deviations are within tolerance (False for NaN)."""
        return self.scores <= self.tolerance.scores and self.logits <= self.tolerance.logits

    def to_json(self) -> dict[str, Any]:
        """Return the deviation and the verdict as plain data; numbers that are not finite are None."""
        scores, logits = (number if math.isfinite(number) else None for number in (self.scores, self.logits))
        return {**asdict(self), "scores": scores, "logits": logits, "passed": self.passed}


def deviation(
    case: str,
    size: tuple[int, int],
    outputs: Outputs,
    row: int,
    scores: Sequence[float] | FloatArray,
    logits: Sequence[float] | FloatArray,
    *,
    precision: str = "fp32",
    tolerance: Tolerance | None = None,
) -> Deviation:
    """Compare one row of the outputs with the oracle's scores and logits (K,).

    tolerance: None for that of the precision and the logits' size.
    """
    largest = max(float(np.abs(np.asarray(logits)).max()), SMALL_LOGIT)
    return Deviation(
        case,
        *size,
        scores=float(np.abs(outputs.scores[row].astype(np.float64) - np.asarray(scores)).max()),
        logits=float(np.abs(outputs.logits[row].astype(np.float64) - np.asarray(logits)).max() / largest),
        precision=precision,
        tolerance=tolerance or tolerance_for(precision, logits),
    )


def tolerance_for(precision: str, logits: Sequence[float] | FloatArray) -> Tolerance:
    """Return the tolerance of a precision for logits of this size, an array of any shape.

    Rounding errors of logits are relative to the largest, and about a tenth of their tolerance. If they move by up to
    d, softmax moves a score by up to d/2. So scores may be off by a twentieth of the logits' tolerance.
    """
    usual = TOLERANCES[precision]
    return replace(
        usual, scores=max(usual.scores, usual.logits / 20 * float(np.abs(np.asarray(logits)).max(initial=0)))
    )


# Significant digits of golden scores and logits: enough to distinguish all float32 numbers. Rounding changes a number
# by at most 5e-9 of its size, 2,000 times less than any tolerance. With other instruction sets (MKL_CBWR) 25 of 12,000
# numbers of demo and E differed in 12 digits, none in 9.
GOLDEN_DIGITS = 9


def golden_answer(height: int, width: int, scores: FloatArray, logits: FloatArray) -> GoldenImage:
    """Return the entry of a golden image in a model file, rounded to `GOLDEN_DIGITS`. scores, logits: (K,)."""
    rounded = (tuple(float(f"{number:.{GOLDEN_DIGITS}g}") for number in numbers) for numbers in (scores, logits))
    return GoldenImage(height, width, *rounded)


def tolerance_precision(session: Session) -> str:
    """Return the precision whose tolerance applies to a session: the coarser of its file's and its own.

    A file with half-precision or int8 weights stays that coarse even where a runtime computes in float32.
    """
    precisions = (session.contract.precision, session.circumstances.precision)
    if "int8" in precisions:
        return "int8"
    return max(precisions, key=lambda precision: TOLERANCES[precision].scores)


def tolerance_of(session: Session) -> Tolerance:
    """Return the tolerance of a session: that of its precision, for int8 the one that the file states.

    There is no tolerance for int8 in general: what rounding to 8 bits costs depends on the net.
    """
    contract = session.contract
    if contract.calibration is not None:
        return contract.calibration.tolerance
    return tolerance_for(tolerance_precision(session), np.array([golden.logits for golden in contract.golden]))


def verify(session: Session, *, crop_only: bool = False) -> list[Deviation]:
    """Run the golden images alone and, if the file allows it, together on one canvas with garbage outside the images.

    crop_only: run only the first image, which is one crop.
    Raises ContractError when the file carries no golden images.
    """
    contract = session.contract
    if not contract.golden:
        raise ContractError(
            "the model carries no golden images. Export its checkpoint again with: prelunet export (for an adopted "
            "net: prelunet adopt)"
        )
    deviations, precision, tolerance = [], tolerance_precision(session), tolerance_of(session)
    chosen = contract.golden[:1] if crop_only else contract.golden
    images = [golden_image(golden.height, golden.width) for golden in chosen]
    for case, outputs, row, index in run_cases(session, images):
        golden = contract.golden[index]
        size = (golden.height, golden.width)
        measured = deviation(
            case, size, outputs, row, golden.scores, golden.logits, precision=precision, tolerance=tolerance
        )
        if tuple(outputs.windows[row]) != contract.window_grid(golden.height, golden.width):
            measured = replace(measured, scores=math.inf)  # the trunk stated in the file is not its actual trunk
        deviations.append(measured)
    return deviations


def require_verified(name: str, session: Session, deviations: Sequence[Deviation]) -> str:
    """Return the tolerance in words; raise CheckFailed if a deviation exceeds it. name: of the model, for the error."""
    if fault := describe_failure(name, session, deviations):
        raise CheckFailed(f"{fault}. Do not use this device or runtime version with this model")
    tolerance = tolerance_of(session)
    return f"{tolerance.scores:.2g} (scores) or {tolerance.logits:g} of the largest (logits)"


def describe_failure(name: str, session: Session, deviations: Sequence[Deviation]) -> str:
    """Return the largest of the deviations that exceed the tolerance, in words; empty if there is none."""
    failed = [each for each in deviations if not each.passed]
    if not failed:
        return ""
    worst, allowed, ran = max(failed, key=lambda each: each.scores), tolerance_of(session), session.circumstances
    return (
        f"{name}: in {ran.precision} on {ran.provider} the scores of the golden image of {worst.height}x{worst.width} "
        f"are off by {worst.scores:.1e} and the logits by {worst.logits:.1e} of the largest; {allowed.scores:.2g} and "
        f"{allowed.logits:g} are allowed"
    )


def run_cases(session: Session, images: Sequence[UInt8Array]) -> list[tuple[str, Outputs, int, int]]:
    """Run each image alone and, in a ragged file, all on one canvas; return (case, outputs, row, image index)."""
    cases = []
    for index, image in enumerate(images):
        sizes = np.array([image.shape[:2]], np.int64)
        cases.append(("alone", session.run(image[None], sizes), 0, index))
    if session.contract.canvas == "ragged":
        outputs = session.run(*garbage_canvas(session.contract, images))
        cases += [("together", outputs, index, index) for index in range(len(images))]
    return cases


def garbage_canvas(
    contract: ModelContract, images: Sequence[UInt8Array], fill: int = 77
) -> tuple[UInt8Array, Int64Array]:
    """Put images on one canvas, slightly larger than needed, filled with `fill` outside them."""
    height, width = (max(image.shape[axis] for image in images) + contract.trunk_stride + 3 for axis in (0, 1))
    return pack(images, height, width, fill=fill)
