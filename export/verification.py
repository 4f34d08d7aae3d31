"""Does a model file give the right scores on this machine? Needs no torch: the file carries its golden answers."""

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from prelunet.evaluator.contract import GoldenImage, ModelContract, golden_image
from prelunet.evaluator.engine.session import Outputs, Session
from prelunet.evaluator.engine.tolerances import Deviation, deviation, tolerance_of
from prelunet.evaluator.errors import ContractError
from prelunet.evaluator.imaging.canvas import pack

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


def judged_as(session: Session) -> str:
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
    deviations, precision = [], judged_as(session)
    for case, outputs, index in run_cases(session, [golden_image(g.height, g.width) for g in contract.golden]):
        golden, row = contract.golden[index], index_in(case, index)
        size = (golden.height, golden.width)
        found = deviation(case, size, outputs, row, golden.scores, golden.logits, precision=precision)
        if tuple(outputs.windows[row]) != contract.window_grid(golden.height, golden.width):
            found = replace(found, scores=math.inf)  # the trunk that the file states is not the one it has
        deviations.append(found)
    return deviations


def index_in(case: str, index: int) -> int:
    """Return the row of an image in the outputs of a case."""
    return index if case == "together" else 0


def run_cases(session: Session, images: Sequence[npt.NDArray[np.uint8]]) -> list[tuple[str, Outputs, int]]:
    """Run each image alone and, in a ragged file, all on one canvas; return (case, outputs, image index)."""
    cases = []
    for index, image in enumerate(images):
        sizes = np.array([image.shape[:2]], np.int64)
        cases.append(("alone", session.run(image[None], sizes), index))
    if session.contract.canvas == "ragged":
        outputs = session.run(*rubbish_canvas(session.contract, images))
        cases += [("together", outputs, index) for index in range(len(images))]
    return cases


def rubbish_canvas(
    contract: ModelContract, images: Sequence[npt.NDArray[np.uint8]], rubbish: int = 77
) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]:
    """Put images on one canvas, a little larger than needed, whose unused part holds `rubbish`."""
    height, width = (max(image.shape[axis] for image in images) + contract.trunk_stride + 3 for axis in (0, 1))
    return pack(images, height, width, fill=rubbish)
