"""Writes the file of a foreign net, and compares its scores with those of the original."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import BinaryIO

import numpy as np
from onnx import ModelProto

from ...evaluator.arrays import Float64Array, UInt8Array
from ...evaluator.contract import Tolerance
from ...evaluator.engine.load import open_with_placement
from ...evaluator.engine.runtimes.base import Precision, error_summary
from ...evaluator.engine.session import Placement
from ...evaluator.engine.verify import Deviation, deviation, tolerance_for
from ...evaluator.errors import ContractError, EnvironmentFault
from ..parity import WindowArrays, check_parity

OLDEST_SCAN = 9  # the first opset with the current form of Scan
_DYNAMIC = "Export the net with a dynamic batch size"
_FIXES = {  # where the same kernels give other scores, by the precision of the file
    "fp32": "Its scores depend on the last bits of its sums, or this is a bug of prelunet: please report it",
    "fp16": "Export the net in single precision",
    "int8": "Adopt the net as it was before its quantization",
}


@dataclass(frozen=True)
class Reference:
    """One picture, uint8 (crop, crop, 3), and the original net's scores and logits for it, float64 (K,)."""

    picture: UInt8Array
    scores: Float64Array
    logits: Float64Array


References = Mapping[Precision, Sequence[Reference]]  # by the precision to compute in


@dataclass(frozen=True)
class _Fault:
    """Why a file was not accepted: short, as a sentence without its subject, and what the user can do."""

    short: str
    text: str
    fix: str


def write_checked(
    file: BinaryIO, path: Path, build: Callable[..., ModelProto], opset: int, references: References
) -> tuple[str, list[Deviation]]:
    """Write the file so that a batch runs together or, if the net does not support that, one image at a time.

    build: `wrap_net` with all but `one_by_one`; opset: of the net.
    Returns the reason for running one at a time (empty: together) and the deviations. Raises ContractError with the
    reasons if neither reproduces the net's scores.
    """
    deviations, together = _write(file, path, build(one_by_one=False), partial(_deviations, references))
    if together is None:
        return "", deviations
    if opset < OLDEST_SCAN:
        raise ContractError(
            f"{path}: {together.text}, and opset {opset} has no loop over images. "
            f"{together.fix}, or with opset {OLDEST_SCAN} or newer"
        )
    deviations, alone = _write(file, path, build(one_by_one=True), partial(_deviations, references))
    if alone is None:
        return f"together: {together.short}", deviations
    if alone.fix == _DYNAMIC:
        raise ContractError(
            f"{path}: {together.text}, nor in a loop over single images ({alone.short}). {together.fix}"
        )
    raise ContractError(f"{path}: {alone.text}. {alone.fix}")


def write_dense(
    file: BinaryIO,
    path: Path,
    build: Callable[..., ModelProto],
    references: References,
    windows: Sequence[WindowArrays],
    tolerance: Tolerance | None,
) -> list[Deviation]:
    """Write the file of a dense net. Raises ContractError unless crops and all windows have the net's scores.

    tolerance: of the windows, None for that of the file's precision.
    """

    def compare(file: Path) -> Iterator[Deviation]:
        for precision in references:
            yield from check_parity(file, windows, tolerance, precision)
        yield from _deviations(references, file, tolerance)

    deviations, fault = _write(file, path, build(one_by_one=False), compare)
    if fault is None:
        return deviations
    fix = f"{fault.fix}, or adopt" if fault.fix == _DYNAMIC else "Adopt"
    raise ContractError(f"{path}: cannot become dense: {fault.short}. {fix} it without --dense")


def _write(
    file: BinaryIO, path: Path, model: ModelProto, compare: Callable[[Path], Iterator[Deviation]]
) -> tuple[list[Deviation], _Fault | None]:
    """Write a file in the place of its last version, and compare it with the original. path: of that, for messages."""
    file.seek(0)
    file.truncate()
    file.write(model.SerializeToString(deterministic=True))
    file.flush()
    try:
        with np.errstate(all="ignore"):  # NaN and infinity count as deviations
            deviations = list(compare(Path(file.name)))
    except EnvironmentFault:  # insufficient memory, which another form would not fix
        raise
    except Exception as error:  # the runtime's exception classes, which only the session module imports
        text = summarize(error).replace(file.name, path.name)
        return [], _Fault(text, f"does not run on several images together ({text})", _DYNAMIC)
    failed = [d for d in deviations if not d.passed]
    if not failed:
        return deviations, None
    worst = max(failed, key=lambda d: (d.scores, d.logits))
    text = (
        f"scores of the same image run {worst.case} differ by {worst.scores:.1e}, logits by {worst.logits:.1e} of the "
        f"largest ({worst.height}x{worst.width} pixels)"
    )
    if all(d.case == "together" for d in failed):
        return deviations, _Fault(
            text,
            f"scores an image by the others in its batch, as with their mean or their range ({text})",
            "Export the net in evaluation mode, with constant ranges if it is quantized",
        )
    return deviations, _Fault(text, f"is computed otherwise behind its preprocessing ({text})", _FIXES[worst.precision])


def summarize(error: Exception) -> str:
    """Summarize the runtime's error for a failed run: the node if it names one, else the beginning of its text."""
    text = error_summary(error)
    if node := re.search(r"running (\w+) node\. Name:'(?:net/)?([^']*)'", text):
        return f"its {node[1]} node{' ' + node[2] if node[2] else ''} fails"
    return text


def _deviations(references: References, file: Path, tolerance: Tolerance | None = None) -> Iterator[Deviation]:
    """Compare a file, in onnxruntime on the CPU, with the original net: each picture alone and all together.

    tolerance: None for that of the file's precision, in int8 of the float32 around the same sums of integers.
    """
    for precision, expected in references.items():
        session = open_with_placement(file, Placement("cpu", precision), check=False)
        crop, stored = session.contract.crop, session.contract.precision
        sizes = np.full((len(expected), 2), crop, np.int64)
        together = session.run(np.stack([entry.picture for entry in expected]), sizes)
        for row, entry in enumerate(expected):
            allowed = tolerance or tolerance_for("fp32" if stored == "int8" else stored, entry.logits)
            alone = session.run(entry.picture[None], sizes[:1])
            for case, outputs, index in (("alone", alone, 0), ("together", together, row)):
                yield deviation(
                    case,
                    (crop, crop),
                    outputs,
                    index,
                    entry.scores,
                    entry.logits,
                    precision=stored,
                    tolerance=allowed,
                )
