"""Part of `sweep`: one CUDA graph per canvas, replayed in turn, compared with plain runs.

A replay needs no convolution plans, so that a change of shape should cost nothing. There are two dangers. In one
session a later capture replaces the plans that an earlier graph was captured from, and all graphs share the arena's
scratch memory; hence the inputs change before every replay, and its outputs are compared with a plain run of another
session. A Concat of more than 32 inputs, such as that of the 63 bins, uploads a table of addresses; the capture would
keep a host buffer that is reused later, hence the files in which the Concat is split. Graphs belong to the thread that
captured them, and nothing else may use CUDA during a capture.
"""

from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

from benchmarks.common.rig import Rig
from benchmarks.common.runner import Case
from benchmarks.gpu.device import noise_batch, raw_session
from prelunet.evaluator.contract import INPUTS, OUTPUTS
from prelunet.evaluator.engine.runtimes.onnx import import_runtime

# Images, height, width. Launching a hundred kernels costs most for a single crop.
SHAPES = ((1, 224, 224), (2, 256, 352), (2, 352, 256), (2, 384, 512), (2, 480, 640))
CAPTURES_ON = 3  # the run in which onnxruntime captures a graph
ROUNDS = 6

Shape = tuple[int, int, int]


def graphs_case(rig: Rig, net: str, *, split: bool) -> Case:
    """Return the case of a net. A rehearsal on a CPU runs without graphs.

    split: build the Concat of 63 bins from smaller ones, which need no table of addresses from the host.
    """
    settings = {"what": "graphs", "net": net, "precision": "fp16", "concat": "split" if split else "whole"}
    return Case(settings, partial(_measure, rig, net, split=split), 40)


class FixedBindings:
    """A session with one binding per shape, at fixed addresses."""

    def __init__(self, rig: Rig, net: str, path: Path, shapes: list[Shape], *, graphs: bool) -> None:
        runtime = import_runtime()
        self.rig, self.shapes = rig, shapes
        changes = {"enable_cuda_graph": "1"} if graphs else {}
        self.session = raw_session(rig, path, changes)
        self.inputs, self.outputs, self.bindings, self.options = [], [], [], []
        for number, shape in enumerate(shapes, start=1):
            binding = self.session.io_binding()
            inputs = [runtime.OrtValue.ortvalue_from_numpy(array, rig.device, 0) for array in noise_batch(*shape)]
            rows, grid = shape[0], rig.contract(net).window_grid(*shape[1:])
            scores = ((rows, rig.classes), np.float32)
            windows = (((rows, 2), np.int64), ((rows, *grid, rig.classes), np.float32))
            outputs = [
                runtime.OrtValue.ortvalue_from_shape_and_type(list(size), kind, rig.device, 0)
                for size, kind in (scores, scores, *windows)
            ]
            for name, value in zip(INPUTS, inputs, strict=True):
                binding.bind_ortvalue_input(name, value)
            for name, value in zip(OUTPUTS, outputs, strict=True):
                binding.bind_ortvalue_output(name, value)
            options = runtime.RunOptions()
            if graphs:
                options.add_run_config_entry("gpu_graph_id", str(number))
            self.inputs.append(inputs)
            self.outputs.append(outputs)
            self.bindings.append(binding)
            self.options.append(options)
            for _ in range(CAPTURES_ON):
                self.run(number - 1)

    def fill(self, index: int, seed: int) -> None:
        """Overwrite the inputs of a shape with other pixels."""
        self.inputs[index][0].update_inplace(noise_batch(*self.shapes[index], seed)[0])

    def run(self, index: int) -> None:
        """Run a shape on its current inputs."""
        self.session.run_with_iobinding(self.bindings[index], self.options[index])


def _measure(rig: Rig, net: str, *, split: bool) -> dict[str, Any]:
    used = SHAPES[: rig.reduced(len(SHAPES))]
    shapes = [(rows, rig.px(height), rig.px(width)) for rows, height, width in used]
    path = rig.model_file(net, "fp16")
    memory = [rig.used_memory_gb()]
    plain = FixedBindings(rig, net, path, shapes, graphs=False)
    memory.append(rig.used_memory_gb())
    changed = with_split_concats(path) if split else path
    captured = FixedBindings(rig, net, changed, shapes, graphs=rig.on_gpu)
    memory.append(rig.used_memory_gb())
    grown = [None if one is None or two is None else round(two - one, 2) for one, two in pairwise(memory)]
    deviations = []
    for turn in range(1, 1 + rig.reduced(ROUNDS)):  # the shapes in turn, on new pixels
        for index in range(len(shapes)):
            for one in (plain, captured):
                one.fill(index, turn)
                one.run(index)
            for place in (0, 3):  # scores and window scores
                pair = [one.outputs[index][place].numpy() for one in (plain, captured)]
                deviations.append(float(np.abs(pair[0] - pair[1]).max()))
    result: dict[str, Any] = {
        "graphs": rig.on_gpu,
        "replays_compared": len(deviations),
        "largest_deviation": float(np.max(deviations)),  # np.max propagates NaN
        "plain_memory_gb": grown[0],
        "graphs_memory_gb": grown[1],
    }
    for name, one in (("plain", plain), ("graphs", captured)):
        repeated = [rig.timed(partial(one.run, index), seconds=0.1)["ms"] for index in range(len(shapes))]

        def round_robin(one: FixedBindings = one) -> None:
            for index in range(len(shapes)):
                one.run(index)

        result[f"{name}_repeated_ms"] = sum(repeated)  # sum over one call of each shape
        result[f"{name}_alternating_ms"] = rig.timed(round_robin, seconds=0.2)["ms"]
        result[f"{name}_each_ms"] = [round(ms, 3) for ms in repeated]
    if split:
        changed.unlink()
    return {**result, "shapes": [list(shape) for shape in shapes]}


# Model files with one change in the graph that leaves every score unchanged.


CONCAT_INPUTS = 32  # onnxruntime passes up to 32 addresses to the kernel directly and uploads more from the host


def with_padded_conv1(path: Path, channels: int) -> Path:
    """Write a copy of a file with zeros appended to the image's channels and to conv1's weight."""
    model = onnx.load(str(path))
    graph = model.graph
    place, conv = next((index, node) for index, node in enumerate(graph.node) if node.op_type == "Conv")
    weight = next(tensor for tensor in graph.initializer if tensor.name == conv.input[1])
    values = numpy_helper.to_array(weight)
    extra = channels - values.shape[1]
    weight.CopyFrom(numpy_helper.from_array(np.pad(values, ((0, 0), (0, extra), (0, 0), (0, 0))), weight.name))
    pads = numpy_helper.from_array(np.array([0, 0, 0, 0, 0, extra, 0, 0], np.int64), "conv1.pads")
    graph.initializer.append(pads)
    graph.node.insert(place, helper.make_node("Pad", [conv.input[0], pads.name], ["conv1.padded"], name="conv1.padded"))
    conv.input[0] = "conv1.padded"
    return _saved(model, path, f"conv1-{channels}")


def with_split_concats(path: Path, limit: int = CONCAT_INPUTS) -> Path:
    """Write a copy of a file in which every Concat with more than `limit` inputs is split into several.

    A larger one uploads a table of addresses from the host in every run, and a CUDA graph would keep its address.
    """
    model = onnx.load(str(path))
    nodes = []
    for node in model.graph.node:
        if node.op_type == "Concat" and len(node.input) > limit:
            inputs, parts = list(node.input), []
            for number, start in enumerate(range(0, len(inputs), limit)):
                part = f"{node.name}.part{number}"
                copied = helper.make_node("Concat", inputs[start : start + limit], [part], name=part)
                copied.attribute.extend(node.attribute)
                nodes.append(copied)
                parts.append(part)
            node.ClearField("input")
            node.input.extend(parts)
        nodes.append(node)
    copies = [onnx.NodeProto.FromString(node.SerializeToString()) for node in nodes]
    model.graph.ClearField("node")
    model.graph.node.extend(copies)
    return _saved(model, path, "concats")


def _saved(model: Any, path: Path, kind: str) -> Path:
    new = path.with_name(f"{path.stem}-{kind}.onnx")
    onnx.save(model, str(new))
    return new
