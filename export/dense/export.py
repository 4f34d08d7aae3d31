"""Checkpoint → model file, checked against the torch net before it gets its name."""

import importlib.metadata
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from onnx import checker

from prelunet.evaluator.contract import Canvas, FilePrecision, ModelContract, golden_image, golden_sizes
from prelunet.evaluator.engine.load import open_session
from prelunet.evaluator.engine.session import Outputs
from prelunet.evaluator.engine.verify import (
    Deviation,
    deviation,
    golden_answer,
    output_row,
    run_cases,
    tolerance_of,
    tolerance_precision,
)
from prelunet.evaluator.errors import CheckFailed, CheckpointError, UsageError
from prelunet.evaluator.files import check_not_input, open_atomically, sha256_of
from prelunet.export.dense.build import build_contract, build_model
from prelunet.export.dense.half_precision import (
    check_magnitudes,
    measure_magnitudes,
    precision_warnings,
    rounding_losses,
)
from prelunet.training.inspection.describe_file import summarise_slopes
from prelunet.training.net.checkpoints import Checkpoint, read_checkpoint
from prelunet.training.net.dense_reference import dense_windows
from prelunet.training.net.network import network_from_checkpoint

WindowArrays = tuple[npt.NDArray[np.floating], npt.NDArray[np.floating]]


@dataclass(frozen=True)
class ExportResult:
    """What an export found out about the file that it wrote.

    deviations: of every run from the float64 torch net; of a file in half precision also magnitudes, layer → largest
    |number| on test images, and warnings, a text each.
    """

    deviations: list[Deviation]
    magnitudes: Mapping[str, float] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)


def export_checkpoint(
    path: Path, output: Path, canvas: Canvas = "ragged", precision: FilePrecision = "fp32"
) -> ExportResult:
    """Write the model file of a checkpoint and return how far it is from the float64 torch net.

    The file is written under a temporary name, run in onnxruntime on the golden images (alone and on a shared canvas)
    and renamed when every window agrees. Raises CheckFailed with the numbers, and leaves no file, when one does not;
    UsageError or EnvironmentFault before the work when `output` cannot be written or is the checkpoint itself;
    UsageError for fp16 when the net does not fit into it (`export.dense.half_precision`).
    """
    checkpoint = read_checkpoint(path)
    _check_name(output)
    check_not_input(output, [path])
    with open_atomically(output) as file:  # first, so that a path that cannot be written is refused before the work
        losses = rounding_losses(checkpoint.tensors) if precision == "fp16" else {}
        windows = _oracle(checkpoint)
        try:
            contract = _contract(checkpoint, sha256_of(path), canvas, precision, windows)
        except ValueError as error:
            raise CheckpointError(f"{path}: no model can be made of it: {error}. Rename its classes") from error
        file.write(_model_bytes(checkpoint, contract))
        file.flush()
        written = Path(file.name)
        checker.check_model(written, full_check=True)
        magnitudes = measure_magnitudes(written, checkpoint.architecture, contract) if precision == "fp16" else {}
        check_magnitudes(magnitudes)
        deviations = check_parity(written, windows)
        if failed := [d for d in deviations if not d.passed]:
            raise CheckFailed(_parity_message(output, failed, precision))
    return ExportResult(deviations, magnitudes, precision_warnings(losses, magnitudes))


def _check_name(output: Path) -> None:
    """Refuse a path that is no text: onnx and onnxruntime could not open it."""
    try:
        os.path.realpath(output).encode("utf-8")
    except UnicodeEncodeError as error:
        raise UsageError(f"{os.fspath(output)!a}: the path is not UTF-8. Choose another name or folder") from error


def _oracle(checkpoint: Checkpoint) -> list[WindowArrays]:
    """Return (scores, logits) of every window of each golden image, float64 (rows, columns, K), from the torch net."""
    net = network_from_checkpoint(checkpoint).double()
    sizes = golden_sizes(net.architecture.crop)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the order of sums, and with it their last bits, depends on the number of threads
    try:
        return [dense_windows(net, golden_image(*size), checkpoint.mean) for size in sizes]
    finally:
        torch.set_num_threads(threads)


def _contract(
    checkpoint: Checkpoint, sha256: str, canvas: Canvas, precision: FilePrecision, windows: list[WindowArrays]
) -> ModelContract:
    """State everything the file must say of itself."""
    architecture = checkpoint.architecture
    contract = build_contract(
        architecture,
        checkpoint.classes,
        canvas,
        precision,
        mean_kind="channel" if checkpoint.mean.ndim == 1 else "image",
        trained_scales=_trained_scales(checkpoint),
        checkpoint_sha256=sha256,
    )
    training = {
        "recipe": checkpoint.recipe,
        "dataset": checkpoint.dataset,
        "metrics": checkpoint.metrics,
        "slopes": summarise_slopes(checkpoint.tensors),
    }
    golden = [
        golden_answer(height, width, *(array.mean(axis=(0, 1)) for array in arrays))
        for (height, width), arrays in zip(golden_sizes(architecture.crop), windows, strict=True)
    ]
    return replace(contract, training=training, golden=tuple(golden))


def _trained_scales(checkpoint: Checkpoint) -> tuple[int, int] | None:
    """Return the shorter sides between which the net was trained, where the checkpoint tells them."""
    scales = (checkpoint.recipe or {}).get("scales")
    return None if scales is None else (scales[0], scales[1])


def _model_bytes(checkpoint: Checkpoint, contract: ModelContract) -> bytes:
    """Build the model; the same checkpoint and versions give the same bytes, with any number of threads."""
    version = importlib.metadata.version("prelunet")
    model = build_model(checkpoint.architecture, checkpoint.tensors, checkpoint.mean, contract, version)
    data: bytes = model.SerializeToString(deterministic=True)
    return data


def check_parity(path: Path, windows: list[WindowArrays]) -> list[Deviation]:
    """Compare the file in onnxruntime, on the CPU, with the oracle's windows of the golden images, one by one.

    The deviation of an image's scores is that of its worst window.
    """
    session = open_session(path, "cpu")
    sizes = golden_sizes(session.contract.crop)
    deviations = []
    for case, outputs, index in run_cases(session, [golden_image(*size) for size in sizes]):
        row, (scores, logits) = output_row(case, index), windows[index]
        mean_scores, mean_logits = (array.mean(axis=(0, 1)) for array in (scores, logits))
        precision = tolerance_precision(session)
        whole = deviation(case, sizes[index], outputs, row, mean_scores, mean_logits, precision=precision)
        deviations.append(replace(whole, scores=max(whole.scores, _worst_window(outputs, row, scores))))
    return deviations


def _worst_window(outputs: Outputs, row: int, expected: npt.NDArray[np.floating]) -> float:
    """Return the largest deviation of a window's score; infinite when the graph sees another grid of windows."""
    if tuple(outputs.windows[row]) != expected.shape[:2]:
        return float("inf")
    padded = np.zeros(outputs.window_scores.shape[1:])  # outside its grid an image must have zeros
    padded[: expected.shape[0], : expected.shape[1]] = expected
    return float(np.abs(outputs.window_scores[row] - padded).max())


def _parity_message(output: Path, failed: list[Deviation], precision: FilePrecision) -> str:
    """Say by how much which image is off."""
    lines = [
        f"  {d.height}x{d.width} {d.case}: scores {d.scores:.1e}, logits {d.logits:.1e} of the largest" for d in failed
    ]
    why = "This is a fault of prelunet or of the installed onnxruntime, not of the checkpoint; please report it."
    if precision == "fp16":
        why = (
            "Half precision may be too coarse for this net: export it with --precision fp32. If that is refused too, "
            "it is a fault of prelunet or of the installed onnxruntime; please report it."
        )
    return (
        f"{output}: not written, because the graph does not give the torch net's scores within "
        f"{tolerance_of(precision).scores:g}:\n" + "\n".join(lines) + f"\n{why}"
    )
