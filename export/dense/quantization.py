"""The int8 parts of a model file: quantized weights, and the nodes around them.

All quantization is signed and symmetric, with zero point 0, because only that form is fast: with unsigned activations
and a zero point of 128, OpenVINO did not use AMX, and took 9.6 ms instead of 2.5 in a trial.

A layer's input is quantized once, right behind the activation before it, so that runtimes can fuse the two. Pools,
transposes, slices and the concatenation of the pyramid follow on int8 numbers: maxima and gathering give the same
numbers before and after rounding. The layer itself is written in float32 between DequantizeLinear nodes, the usual form
that runtimes replace by int8 arithmetic.
"""

from collections.abc import Mapping

import numpy as np

from ...evaluator.arrays import Float32Array, FloatArray, Int8Array
from ..onnx_graph import GraphBuilder

LEVELS = 127  # on either side of 0; -128 is not used, so that the range is symmetric


class LayerBuilder(GraphBuilder):
    """A graph builder that writes some layers in int8.

    ranges: layer → largest absolute value of its input; layers that it lacks are not quantized.
    """

    def __init__(self, ranges: Mapping[str, float]) -> None:
        super().__init__()
        self._ranges = ranges

    def quantize(self, value: str, layer: str) -> str:
        """Round the later input of a layer to int8, if the layer is quantized."""
        if layer not in self._ranges:
            return value
        scale = self.constant(f"{layer}.input.scale", activation_scale(self._ranges[layer]))
        zero = "int8_zero" if self.has("int8_zero") else self.constant("int8_zero", np.array(0, np.int8))
        return self.node("QuantizeLinear", [value, scale, zero], f"{layer}.input.int8")

    def dequantize(self, value: str, layer: str, part: str = "") -> str:
        """Return the input of a layer in float32, from `quantize` and what moved its numbers since.

        part: name of a part of the input, if the layer reads several.
        """
        if layer not in self._ranges:
            return value
        return self.node("DequantizeLinear", [value, f"{layer}.input.scale"], f"{layer}.input{part and '.' + part}")

    def weight(self, layer: str, tensor: FloatArray, *, channel_axis: int) -> str:
        """Add a layer's weights. channel_axis: of the outputs, each of which has a scale of its own."""
        name = f"{layer}.weight"
        if layer not in self._ranges:
            return self.constant(name, tensor)
        numbers, scales = quantize_weight(tensor, channel_axis)
        inputs = [self.constant(f"{name}.int8", numbers), self.constant(f"{name}.scale", scales)]
        return self.node("DequantizeLinear", inputs, name, axis=channel_axis)

    def weight_parts(self, layer: str, matrix: FloatArray, parts: Mapping[str, slice]) -> list[str]:
        """Add parts of the rows of a layer's weights, (inputs, outputs). parts: name → rows.

        The scales are those of the whole matrix, so a layer in parts has the same numbers as the whole one.
        """
        names = [f"{layer}.weight.{part}" for part in parts]
        if layer not in self._ranges:
            return [self.constant(name, matrix[rows]) for name, rows in zip(names, parts.values(), strict=True)]
        numbers, scales = quantize_weight(matrix, 1)
        scale = self.constant(f"{layer}.weight.scale", scales)
        return [
            self.node("DequantizeLinear", [self.constant(f"{name}.int8", numbers[rows]), scale], name, axis=1)
            for name, rows in zip(names, parts.values(), strict=True)
        ]


def activation_scale(largest: float) -> Float32Array:
    """Return the float32 scalar by which int8 numbers are multiplied to reach `largest` at most."""
    return np.array(largest / LEVELS or 1, np.float32)  # a layer whose input is always 0


def quantize_weight(tensor: FloatArray, channel_axis: int) -> tuple[Int8Array, Float32Array]:
    """Round a weight to int8, each output channel to its own scale: `int8 · scale` is the weight.

    Returns int8 of the same shape, and float32 (channels,).
    """
    others = tuple(axis for axis in range(tensor.ndim) if axis != channel_axis)
    scales = (np.abs(tensor).max(axis=others) / np.float32(LEVELS)).astype(np.float32)
    scales[scales == 0] = 1
    shape = [1] * tensor.ndim
    shape[channel_axis] = -1
    rounded = np.rint(tensor / scales.reshape(shape)).clip(-LEVELS, LEVELS).astype(np.int8)
    return rounded, scales
