"""Export of a checkpoint to a model file, checked against the PyTorch net before it is put in place."""

import importlib.metadata
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from onnx import checker

from ...evaluator.contract import Canvas, FilePrecision, ModelContract, Tolerance, golden_image, golden_sizes
from ...evaluator.datasets import DatasetSpec
from ...evaluator.engine.load import open_session
from ...evaluator.engine.verify import Deviation
from ...evaluator.errors import CheckFailed, CheckpointError, UsageError
from ...evaluator.files import check_not_input, open_atomically, sha256_of
from ...training.inspection.describe_file import summarize_slopes
from ...training.net.checkpoints import UNCHECKED, Checkpoint, read_checkpoint
from ...training.net.dense_reference import dense_windows
from ...training.net.network import network_from_checkpoint
from ..parity import WindowArrays, check_parity, golden_answers
from .build import build_contract, build_model
from .calibration import (
    ACCEPTED_LOSS,
    CalibrationImages,
    Int8Cost,
    calibration_of,
    int8_golden,
    measure_cost,
    measure_ranges,
    open_images,
)
from .half_precision import (
    check_magnitudes,
    magnitude_warnings,
    measure_magnitudes,
    round_to_half,
)


@dataclass(frozen=True)
class ExportResult:
    """The checks of an exported file.

    deviations: of every run from the float64 PyTorch net; for half precision also magnitudes: layer → largest absolute
    value on test images; for int8 also its cost; warnings: messages for the user.
    """

    deviations: list[Deviation]
    magnitudes: Mapping[str, float] = field(default_factory=dict)
    cost: Int8Cost | None = None
    warnings: list[str] = field(default_factory=list)


def export_checkpoint(
    path: Path,
    output: Path,
    canvas: Canvas = "ragged",
    precision: FilePrecision = "fp32",
    calibrate: DatasetSpec | None = None,
) -> ExportResult:
    """Write the model file of a checkpoint and return its deviations from the float64 PyTorch net.

    calibrate: images for int8 (`export.dense.calibration`), whose files have exact canvases.

    The file is written under a temporary name, run in onnxruntime on the golden images (alone and on a shared canvas)
    and renamed if every window agrees. Otherwise raises CheckFailed with the deviations and leaves no file.
    Raises UsageError or EnvironmentFault, before any work, if `output` cannot be written or is the checkpoint itself;
    UsageError if the net does not fit into fp16 (`export.dense.half_precision`), or has activations without a range for
    int8; for int8 also the errors of the calibration images.
    """
    if (precision == "int8") != (calibrate is not None):
        raise UsageError(
            "--precision int8 needs images, from which it takes the ranges of the activations: add --calibrate DATA"
            if calibrate is None
            else f"--calibrate is for --precision int8, not for {precision}. Remove one of them"
        )
    if precision == "int8" and canvas != "exact":
        raise UsageError(f"--precision int8 --canvas {canvas}: int8 files have no masks. Use --canvas exact")
    checkpoint = read_checkpoint(path)
    unchecked = [f"{path}: {UNCHECKED}"] if checkpoint.unchecked else []
    os.path.realpath(output).encode("utf-8")  # UnicodeEncodeError for a path that the runtime could not open
    check_not_input(output, [path])
    with open_atomically(output) as file:  # first, so that an unwritable path is refused before the work
        for name, tensor in checkpoint.tensors.items() if precision == "fp16" else ():
            round_to_half(name, tensor)  # so that a number out of range is refused before the work, too
        windows = _oracle(checkpoint)
        try:
            contract = _contract(checkpoint, sha256_of(path), canvas, "fp32" if calibrate else precision, windows)
        except ValueError as error:
            raise CheckpointError(f"{path}: cannot be exported: {error}. Rename its classes") from error
        written = Path(file.name)
        if calibrate is not None:
            images = open_images(calibrate, contract)
            result = _export_int8(checkpoint, contract, images, written, windows, output)
            return replace(result, warnings=[*unchecked, *result.warnings])
        write_model(written, checkpoint, contract)
        checker.check_model(written, full_check=True)
        magnitudes = measure_magnitudes(written, checkpoint.architecture, contract) if precision == "fp16" else {}
        check_magnitudes(magnitudes)
        deviations = _checked_parity(written, windows, output, precision)
    return ExportResult(deviations, magnitudes, warnings=[*unchecked, *magnitude_warnings(magnitudes)])


def write_model(
    path: Path, checkpoint: Checkpoint, contract: ModelContract, ranges: Mapping[str, float] | None = None
) -> None:
    """Write the model file of a checkpoint, without any check. ranges: see `build_model`."""
    version = importlib.metadata.version("prelunet")
    model = build_model(checkpoint.architecture, checkpoint.tensors, checkpoint.mean, contract, version, ranges)
    path.write_bytes(model.SerializeToString(deterministic=True))


def _export_int8(
    checkpoint: Checkpoint,
    contract: ModelContract,
    images: CalibrationImages,
    written: Path,
    windows: list[WindowArrays],
    output: Path,
) -> ExportResult:
    """Write the int8 file, and compare it with the float32 net on the golden images and on the held-out ones.

    contract: of the float32 file with exact canvases; windows: of the golden images in the unrounded net; written: the
    file to write; output: its name for errors.
    """
    with tempfile.TemporaryDirectory(dir=written.parent, prefix=".float32-") as folder:
        exact = Path(folder) / "exact.onnx"
        write_model(exact, checkpoint, contract)
        ranges = measure_ranges(exact, checkpoint.architecture, images)
        golden = int8_golden(checkpoint, ranges, windows)
        int8 = replace(
            contract,
            precision="int8",
            calibration=calibration_of(images, golden.tolerance, golden.cost),
            golden=golden_answers(contract.crop, golden.windows),
        )
        write_model(written, checkpoint, int8, ranges)
        checker.check_model(written, full_check=True)
        deviations = _checked_parity(written, golden.windows, output, "int8", golden.window_tolerance)
        cost = measure_cost(open_session(exact, "cpu"), open_session(written, "cpu"), images)
    warnings = []
    if cost.loss > ACCEPTED_LOSS:
        warnings.append(
            f"int8 costs this net more than {ACCEPTED_LOSS:g} point: {cost}. Calibrate on more images, or on images "
            "closer to those to be classified; check the cost with prelunet compare; or export with --precision fp32"
        )
    return ExportResult(deviations, cost=cost, warnings=warnings)


def _checked_parity(
    written: Path,
    windows: list[WindowArrays],
    output: Path,
    precision: FilePrecision,
    tolerance: Tolerance | None = None,
) -> list[Deviation]:
    deviations = check_parity(written, windows, tolerance)
    if failed := [d for d in deviations if not d.passed]:
        raise CheckFailed(_parity_message(output, failed, precision))
    return deviations


def _oracle(checkpoint: Checkpoint) -> list[WindowArrays]:
    """Return (scores, logits) of each window of each golden image, float64 (rows, columns, K), of the PyTorch net."""
    net = network_from_checkpoint(checkpoint).double()
    sizes = golden_sizes(net.architecture.crop)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the order of summation, and so the last bits, depends on the number of threads
    try:
        return [dense_windows(net, golden_image(*size), checkpoint.mean) for size in sizes]
    finally:
        torch.set_num_threads(threads)


def _contract(
    checkpoint: Checkpoint, sha256: str, canvas: Canvas, precision: FilePrecision, windows: list[WindowArrays]
) -> ModelContract:
    """Build the complete contract of the file."""
    architecture = checkpoint.architecture
    scales = (checkpoint.recipe or {}).get("scales")
    contract = build_contract(
        architecture,
        checkpoint.classes,
        canvas,
        precision,
        mean_kind="channel" if checkpoint.mean.ndim == 1 else "image",
        trained_scales=scales and (scales[0], scales[1]),
        checkpoint_sha256=sha256,
    )
    training = {
        "recipe": checkpoint.recipe,
        "dataset": checkpoint.dataset,
        "metrics": checkpoint.metrics,
        "slopes": summarize_slopes(checkpoint.tensors),
        **({} if checkpoint.provenance is None else {"provenance": checkpoint.provenance}),
    }
    golden = golden_answers(architecture.crop, windows)
    return replace(contract, training=training, golden=golden)


def _parity_message(output: Path, failed: list[Deviation], precision: FilePrecision) -> str:
    """Format the error for images whose deviation exceeds the tolerance."""
    lines = [
        f"  {d.height}x{d.width} {d.case}: scores {d.scores:.1e}, logits {d.logits:.1e} of the largest" for d in failed
    ]
    advice = "This is a bug in prelunet or the installed onnxruntime, not a fault of the checkpoint. Please report it."
    if precision != "fp32":
        advice = (
            f"{precision} may be too coarse for this net: export it with --precision fp32. If that fails too, "
            "it is a bug in prelunet or the installed onnxruntime. Please report it."
        )
    return (
        f"{output}: not written, because its scores differ from the PyTorch net's by more than "
        f"{failed[0].tolerance.scores:g}:\n" + "\n".join(lines) + f"\n{advice}"
    )
