"""Compares a new model file, window by window, with the windows that an independent computation gives."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from ..evaluator.arrays import FloatArray
from ..evaluator.contract import GoldenImage, Tolerance, golden_image, golden_sizes
from ..evaluator.engine.load import open_with_placement
from ..evaluator.engine.runtimes.base import Precision
from ..evaluator.engine.session import Outputs, Placement
from ..evaluator.engine.verify import (
    Deviation,
    deviation,
    golden_answer,
    run_cases,
    tolerance_for,
    tolerance_precision,
)

WindowArrays = tuple[FloatArray, FloatArray]  # scores and logits of an image, each (rows, columns, K)


def golden_answers(crop: int, windows: Sequence[WindowArrays]) -> tuple[GoldenImage, ...]:
    """Return the entries of the golden images of a file, from the windows of each."""
    return tuple(
        golden_answer(height, width, *(array.mean(axis=(0, 1)) for array in arrays))
        for (height, width), arrays in zip(golden_sizes(crop), windows, strict=True)
    )


def check_parity(
    path: Path,
    windows: Sequence[WindowArrays],
    tolerance: Tolerance | None = None,
    compute_in: Precision | None = None,
) -> list[Deviation]:
    """Compare the windows of the golden images between the file, in onnxruntime on the CPU, and the oracle.

    The score deviation of an image is that of its worst window. tolerance: None for that of the file's precision;
    compute_in: None for the default.
    """
    session = open_with_placement(path, Placement("cpu", compute_in), check=False)
    sizes = golden_sizes(session.contract.crop)
    deviations = []
    for case, outputs, row, index in run_cases(session, [golden_image(*size) for size in sizes]):
        scores, logits = windows[index]
        mean_scores, mean_logits = (array.mean(axis=(0, 1)) for array in (scores, logits))
        precision = tolerance_precision(session)
        allowed = tolerance or tolerance_for(precision, logits)
        image_deviation = deviation(
            case, sizes[index], outputs, row, mean_scores, mean_logits, precision=precision, tolerance=allowed
        )
        deviations.append(
            replace(image_deviation, scores=max(image_deviation.scores, _worst_window(outputs, row, scores)))
        )
    return deviations


def _worst_window(outputs: Outputs, row: int, expected: FloatArray) -> float:
    """Return the largest deviation of a window's score; infinite if the graph has a different grid of windows."""
    if tuple(outputs.windows[row]) != expected.shape[:2]:
        return float("inf")
    padded = np.zeros(outputs.window_scores.shape[1:])  # the graph must give zeros outside the image's grid
    padded[: expected.shape[0], : expected.shape[1]] = expected
    return float(np.abs(outputs.window_scores[row] - padded).max())
