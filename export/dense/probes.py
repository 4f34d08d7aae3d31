"""Probes: the largest absolute values of a model's tensors, measured by running the model."""

import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import onnx
from onnx import ModelProto, TensorProto, helper

from ...evaluator.arrays import Int64Array, UInt8Array
from ...evaluator.engine.runtimes.onnx import RawOnnxModel


def largest_values(
    path: Path, names: Sequence[str], canvases: Iterable[tuple[UInt8Array, Int64Array]]
) -> dict[str, float]:
    """Run a model file with probes; return tensor → its largest absolute value over all canvases.

    canvases: `images` and `sizes` of each run, at least one. Infinite or NaN if a tensor is. The probes are in a
    temporary copy next to the file.
    """
    model = onnx.load(path)
    add_probes(model, names)
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=".probed-", suffix=".onnx") as file:
        onnx.save(model, file.name)
        net = RawOnnxModel(Path(file.name))
    largest = np.zeros(len(names))
    for images, sizes in canvases:
        measured = net.run({"images": images, "sizes": sizes}, "magnitudes").reshape(-1)
        largest = np.maximum(largest, measured)  # propagates NaN
    return dict(zip(names, largest.tolist(), strict=True))


def add_probes(model: ModelProto, names: Sequence[str]) -> None:
    """Add the output `magnitudes` to a model: float32 (tensors, 1, 1, 1), in the order of `names`.

    Each entry is the largest absolute value of one 4-D tensor between the layers. Nothing else changes.
    """
    graph, largest = model.graph, []
    for name in names:
        single, size, maximum = (f"probe.{name}.{what}" for what in ("single", "size", "largest"))
        graph.node.append(helper.make_node("Cast", [name], [single], to=TensorProto.FLOAT))
        graph.node.append(helper.make_node("Abs", [single], [size]))
        graph.node.append(helper.make_node("ReduceMax", [size], [maximum]))
        largest.append(maximum)
    graph.node.append(helper.make_node("Concat", largest, ["magnitudes"], axis=0))
    graph.output.append(helper.make_tensor_value_info("magnitudes", TensorProto.FLOAT, [len(largest), 1, 1, 1]))
