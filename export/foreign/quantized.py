"""Finds how a foreign net is quantized, and how far its scores in int8 are from those of the same net in float32."""

import re
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np
import onnx
from onnx import ModelProto, TensorProto

from ...evaluator.arrays import Float64Array
from ...evaluator.contract import Calibration, ModelContract, Tolerance
from ...evaluator.engine.runtimes.onnx import RawOnnxModel
from ...evaluator.engine.verify import SMALL_LOGIT, tolerance_for
from .read_net import all_nodes

# qdq: float operators between QuantizeLinear and DequantizeLinear, which also run in float32; operators: of integers.
Form = Literal["qdq", "operators"]

# A sum that lies between two levels gets the one or the other by its last bit in float32, or by a kernel's rounding. If
# one in 200 of the activations does, with 255 levels, their mean error is that of rounding all of them to 11 bits.
_FEW_LEVELS = "fp16"
MARGIN = 2.0  # since a few pictures do not show the largest possible deviation

_KERNELS = re.compile("^Q(Linear|Gemm|Attention)|Integer|NBits|^DynamicQuantize(?!Linear)")


def loader(path: Path, net: ModelProto) -> Callable[..., RawOnnxModel]:
    """Return a function that loads the net of a file, given `quantized` and `optimized`; see `RawOnnxModel`.

    Gives each operator of the net its own int8 constants: onnxruntime does not load it where it would have to make a
    shared zero point unsigned (`_choose_kernels`).
    """
    readers = Counter(name for node in net.graph.node for name in node.input)
    shared = {t.name: t for t in net.graph.initializer if t.data_type == TensorProto.INT8 and readers[t.name] > 1}
    for number, node in enumerate(net.graph.node):
        for place, name in enumerate(node.input):
            if name in shared:
                copy = net.graph.initializer.add()
                copy.CopyFrom(shared[name])
                copy.name = node.input[place] = f"{name}/{number}.{place}"
    content = net.SerializeToString() if shared else None
    return partial(RawOnnxModel, path, content, threads=1)  # the last bits of sums depend on the number of threads


def find_form(load: Callable[..., RawOnnxModel], net: ModelProto) -> Form | None:
    """Return how a net is quantized, by the operators with which onnxruntime really computes it; None if in float.

    load: from `loader`.
    """
    if not any("uantize" in node.op_type or _KERNELS.search(node.op_type) for node in all_nodes(net)):
        return None
    if _runs_in_int8(load, quantized=False):
        return "operators"
    return "qdq" if _runs_in_int8(load, quantized=True) else None


def _runs_in_int8(load: Callable[..., RawOnnxModel], *, quantized: bool) -> bool:
    with tempfile.TemporaryDirectory() as folder:
        optimized = Path(folder) / "optimized.onnx"
        load(quantized=quantized, optimized=optimized)
        return any(_KERNELS.search(node.op_type) for node in all_nodes(onnx.load(optimized)))


def difference(fp32: tuple[Float64Array, Float64Array], int8: tuple[Float64Array, Float64Array]) -> Tolerance:
    """Return the largest differences. fp32, int8: scores and logits of some pictures, each (pictures, K)."""
    (scores, logits), (other_scores, other_logits) = fp32, int8
    largest = np.maximum(np.abs(logits).max(axis=1), SMALL_LOGIT)
    moved = np.abs(other_logits - logits).max(axis=1) / largest
    return Tolerance(float(np.abs(other_scores - scores).max()), float(moved.max()))


def int8_tolerance(logits: Float64Array, spread: Tolerance) -> Tolerance:
    """Return how far golden images may deviate in either precision. spread: `difference` of the two."""
    least = tolerance_for(_FEW_LEVELS, logits)
    scores, logit = (float(f"{MARGIN * number:.2g}") for number in (spread.scores, spread.logits))
    return Tolerance(max(least.scores, scores), max(least.logits, logit))


def in_int8(contract: ModelContract, form: Form, tolerance: Tolerance) -> ModelContract:
    """Return the contract of a quantized net, from that of the same net in float32."""
    return replace(
        contract,
        precision="int8",
        training={"adopted": {**contract.training["adopted"], "quantized": form}},
        calibration=Calibration(None, None, None, None, tolerance, None),
    )
