"""The int8 files of a benchmarked net: ours, and the plain export quantized by onnxruntime."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static
from PIL import Image

from prelunet.evaluator.contract import Tolerance, golden_image
from prelunet.evaluator.datasets import DatasetSpec
from prelunet.evaluator.engine.load import open_session
from prelunet.export.dense.calibration import calibration_of, measure_ranges, open_images
from prelunet.export.dense.export import export_checkpoint, write_model
from prelunet.training.net.checkpoints import read_checkpoint

SIZES = ((375, 500), (500, 333))  # height and width of the pictures of the calibration; only the first gives ranges


def write_int8_files(folder: Path) -> None:
    """Write `int8.onnx` and `plain-int8.onnx` beside the files of `nets.write_files`.

    Without the checks of the export, which take an hour for model C: the benchmark compares the scores itself.
    """
    _write_ours(folder)
    quantize_static(  # as onnxruntime's guide does, with signed symmetric numbers as in our file
        folder / "plain.onnx",
        folder / "plain-int8.onnx",
        _OnePicture(),
        quant_format=QuantFormat.QDQ,
        per_channel=True,
        activation_type=QuantType.QInt8,
        weight_type=QuantType.QInt8,
        extra_options={"ActivationSymmetric": True, "WeightSymmetric": True},
    )


def _write_ours(folder: Path) -> None:
    exact, pictures = folder / "exact.onnx", folder / "pictures"
    export_checkpoint(folder / "net.safetensors", exact, "exact")
    contract = open_session(exact, "cpu").contract
    pictures.mkdir()
    for number, size in enumerate(SIZES):
        Image.fromarray(golden_image(*size)).save(pictures / f"{number}.png")
    images = open_images(DatasetSpec(pictures, no_labels=True), contract)
    checkpoint = read_checkpoint(folder / "net.safetensors")
    ranges = measure_ranges(exact, checkpoint.architecture, images)
    exact.unlink()
    int8 = replace(
        contract, precision="int8", calibration=calibration_of(images, Tolerance(1.0, 1.0), Tolerance(1.0, 1.0))
    )
    write_model(folder / "int8.onnx", checkpoint, int8, ranges)


class _OnePicture(CalibrationDataReader):  # type: ignore[misc]
    def __init__(self) -> None:
        self._left = [{"images": golden_image(*SIZES[0])[None].transpose(0, 3, 1, 2).astype(np.float32)}]

    def get_next(self) -> dict[str, npt.NDArray[np.float32]] | None:
        return self._left.pop() if self._left else None
