"""Part `parity`: deviation of every kind of file from the float64 torch net, window by window, on this device.

The oracle is `training.net.dense_reference.dense_windows` in float64, on the same GPU for speed. Every image is run
alone and, in ragged files, together with all others on one canvas filled with garbage, which must change nothing.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np

from benchmarks.common.nets import MEAN
from benchmarks.common.rig import Rig
from benchmarks.common.runner import Case
from benchmarks.gpu.table import FILES
from prelunet.evaluator.contract import Canvas, golden_image
from prelunet.evaluator.engine.runtimes.base import Precision
from prelunet.evaluator.engine.session import Outputs, Session
from prelunet.evaluator.engine.verify import garbage_canvas, tolerance_for, tolerance_precision
from prelunet.training.net.dense_reference import dense_windows

# Height and width for a crop of 224: one window, odd sides, both orientations, and the three scales of a 4:3 photo.
SIZES = ((224, 224), (231, 301), (367, 225), (256, 341), (384, 512), (480, 640))
ORACLE_SECONDS, CASE_SECONDS = 15, 10  # estimates, including writing the files
PLAN = (
    f"{len(FILES)} files: {', '.join(' '.join(file) for file in FILES)}",
    f"{len(SIZES)} images each ({', '.join(f'{h}x{w}' for h, w in SIZES)}), alone and together",
    "about 90 seconds, mostly for writing the files",
)

Windows = list[tuple[np.ndarray, np.ndarray]]  # scores and logits of each image, float64 (rows, columns, K)


def cases(rig: Rig) -> Iterator[Case]:
    """Yield the cases, those of a net one after the other: its oracle is computed once."""
    images = [golden_image(rig.px(height), rig.px(width)) for height, width in SIZES]
    oracle: dict[str, Windows] = {}

    def compared(name: str, canvas: Canvas, precision: Precision) -> dict[str, Any]:
        if name not in oracle:
            oracle.clear()  # one net at a time
            oracle[name] = oracle_windows(rig, name, images)
        return compare(rig.session(name, precision, canvas), images, oracle[name])

    for name, canvas, precision in FILES:
        if precision not in rig.precisions or (rig.tiny and name == "C"):  # C's stand-in is that of A
            continue
        settings = {"what": "parity", "net": name, "canvas": canvas, "precision": precision}
        seconds = CASE_SECONDS + (0 if name in oracle else ORACLE_SECONDS)
        yield Case(settings, partial(compared, name, canvas, precision), seconds)


def oracle_windows(rig: Rig, name: str, images: list[np.ndarray]) -> Windows:
    """Return scores and logits of every window of each image, computed window by window."""
    net = rig.torch_net(name).double()
    return [dense_windows(net, image, MEAN.astype(np.float64)) for image in images]


def compare(session: Session, images: list[np.ndarray], oracle: Windows) -> dict[str, Any]:
    """Run the images alone and together; return the largest deviations over all images."""
    alone = [session.run(image[None], np.array([image.shape[:2]], np.int64)) for image in images]
    rows: dict[str, list[dict[str, float]]] = {
        "alone": [_deviation(outputs, 0, *windows) for outputs, windows in zip(alone, oracle, strict=True)]
    }
    result: dict[str, Any] = {
        "provider": session.circumstances.provider,
        "computes_in": session.circumstances.precision,
        "largest_score": float(max(scores.max() for scores, _ in oracle)),
    }
    if session.contract.canvas == "ragged":
        outputs = session.run(*garbage_canvas(session.contract, images))
        rows["together"] = [_deviation(outputs, row, *windows) for row, windows in enumerate(oracle)]
        result["together_from_alone"] = max(_apart(outputs, row, alone[row]) for row in range(len(images)))
    for case, found in rows.items():
        # np.max propagates NaN, which Python's max may drop
        result |= {
            f"{case}_{key}": float(np.max([row[key] for row in found])) for key in ("scores", "logits", "windows")
        }
        result[f"{case}_other_classes"] = sum(int(row["other_class"]) for row in found)
    tolerance = tolerance_for(tolerance_precision(session), [np.abs(logits).max() for _, logits in oracle])
    result["passed"] = all(
        result[f"{case}_scores"] <= tolerance.scores
        and result[f"{case}_windows"] <= tolerance.scores
        and result[f"{case}_logits"] <= tolerance.logits
        for case in rows
    )
    return result


def _deviation(outputs: Outputs, row: int, scores: np.ndarray, logits: np.ndarray) -> dict[str, float]:
    """Compare one image with the oracle: mean scores, mean logits (as a share of the largest), every window's scores.

    Outside the grid there must be zeros. Raises ValueError if the grid differs from the oracle's.
    """
    mean_scores, mean_logits = (array.mean(axis=(0, 1)) for array in (scores, logits))
    window_scores = outputs.window_scores[row]
    padded = np.zeros(window_scores.shape)
    if tuple(outputs.windows[row]) != scores.shape[:2]:
        raise ValueError(f"a grid of {outputs.windows[row].tolist()} windows, but the oracle has {scores.shape[:2]}")
    padded[: scores.shape[0], : scores.shape[1]] = scores
    return {
        "scores": float(np.abs(outputs.scores[row] - mean_scores).max()),
        "logits": float(np.abs(outputs.logits[row] - mean_logits).max() / np.abs(mean_logits).max()),
        "windows": float(np.abs(window_scores - padded).max()),
        "other_class": float(outputs.scores[row].argmax() != mean_scores.argmax()),
    }


def _apart(outputs: Outputs, row: int, alone: Outputs) -> float:
    """Return the largest difference of an image's windows and scores between the shared canvas and its own."""
    rows, columns = alone.window_scores.shape[1:3]
    windows = np.abs(outputs.window_scores[row, :rows, :columns] - alone.window_scores[0]).max()
    return float(max(windows, np.abs(outputs.scores[row] - alone.scores[0]).max()))
