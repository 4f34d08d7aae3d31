"""Mutation tests: each deliberate mistake must be caught, by the oracle and by the parity check of the export.

| mistake                                   | how it is made                                                     |
|-------------------------------------------|--------------------------------------------------------------------|
| bin rule                                  | bins end at floor((i+1)·a/n) instead of ceil                       |
| maxima start at 0, not at -inf            | a rectifier before the pyramid                                     |
| level order                               | fc1's blocks read coarse level first                               |
| order inside a level                      | fc1's blocks taken as (row, column, channel)                       |
| slope axis                                | conv2_1's slopes laid along the columns (a test of its own, below) |
| order of the slopes                       | fc1's slopes reversed                                              |
| slopes per channel                        | conv2_1's slopes all replaced by their mean                        |
| one mask                                  | the tensor before one convolution is left as it is                 |
| one bias                                  | the bias of conv2_2 is dropped                                     |
| direction of the mean                     | the mean image mirrored                                            |
| mean of the canvas                        | the mean image warped to the canvas instead of the image           |
| mean over the canvas                      | windows of the padding counted in the average                      |
"""

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec import structs
from onnx import ModelProto, NodeProto, helper, numpy_helper

import prelunet.export.dense.build
import prelunet.export.dense.export
import prelunet.export.dense.pyramid
from prelunet.evaluator.engine.load import open_session
from prelunet.evaluator.engine.verify import garbage_canvas
from prelunet.evaluator.errors import CheckFailed
from prelunet.export.dense.export import export_checkpoint
from tests.conftest import ExportedNet
from tests.helpers import reference
from tests.helpers.discriminating_nets import noise

Patch = Callable[[pytest.MonkeyPatch], None]


def change_graph(patch: pytest.MonkeyPatch, change: Callable[[ModelProto], None]) -> None:
    """Let the export change each model after it is built."""
    right = prelunet.export.dense.export.build_model

    def wrong(*arguments: Any) -> ModelProto:
        model = right(*arguments)
        change(model)
        return model

    patch.setattr(prelunet.export.dense.export, "build_model", wrong)


def change_constant(patch: pytest.MonkeyPatch, name: str, change: Callable[[np.ndarray], np.ndarray]) -> None:
    def changed(model: ModelProto) -> None:
        (tensor,) = [tensor for tensor in model.graph.initializer if tensor.name == name]
        value = np.ascontiguousarray(change(numpy_helper.to_array(tensor)))
        tensor.CopyFrom(numpy_helper.from_array(value, name))

    change_graph(patch, changed)


def insert_before(model: ModelProto, reader: str, name: str, *nodes: NodeProto) -> None:
    """Insert nodes before the node `reader`, which with all later ones then reads their output instead of `name`."""
    place = next(place for place, node in enumerate(model.graph.node) if node.name == reader)
    later = list(model.graph.node)[place:]
    for node in later:
        node.input[:] = [nodes[-1].output[0] if read == name else read for read in node.input]
    del model.graph.node[place:]
    model.graph.node.extend([*nodes, *later])


def bins_rounded_down(patch: pytest.MonkeyPatch) -> None:
    def bins(side: int, count: int) -> list[tuple[int, int]]:
        edges = [i * side // count for i in range(count + 1)]
        return [(start, end - start) for start, end in pairwise(edges)]

    patch.setattr(prelunet.export.dense.pyramid, "axis_bins", bins)


def maxima_from_zero(patch: pytest.MonkeyPatch) -> None:
    rectified = helper.make_node("Relu", ["conv3_2.activation"], ["rectified"])
    change_graph(patch, lambda model: insert_before(model, "pool_2x2", "conv3_2.activation", rectified))


def coarse_level_first(patch: pytest.MonkeyPatch) -> None:
    right = prelunet.export.dense.build.fc1_channel_last

    def wrong(weight: np.ndarray, architecture: Any) -> np.ndarray:
        return right(weight, structs.replace(architecture, spp_levels=architecture.spp_levels[::-1]))

    patch.setattr(prelunet.export.dense.build, "fc1_channel_last", wrong)


def channel_order_unchanged(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(prelunet.export.dense.build, "fc1_channel_last", lambda weight, _architecture: weight.T)


def slopes_reversed(patch: pytest.MonkeyPatch) -> None:
    change_constant(patch, "fc1.slope", lambda slope: slope[..., ::-1])


def one_slope_for_all_channels(patch: pytest.MonkeyPatch) -> None:
    change_constant(patch, "conv2_1.slope", lambda slope: np.full_like(slope, slope.mean()))


def one_mask_missing(patch: pytest.MonkeyPatch) -> None:
    def change(model: ModelProto) -> None:
        (node,) = [node for node in model.graph.node if node.name == "conv2_2.masked"]
        node.CopyFrom(helper.make_node("Identity", [node.input[0]], list(node.output), name=node.name))

    change_graph(patch, change)


def one_bias_missing(patch: pytest.MonkeyPatch) -> None:
    change_constant(patch, "conv2_2.bias", np.zeros_like)


def mean_mirrored(patch: pytest.MonkeyPatch) -> None:
    change_constant(patch, "mean", lambda planes: planes[..., ::-1])


def mean_warped_to_the_canvas(patch: pytest.MonkeyPatch) -> None:
    def change(model: ModelProto) -> None:
        model.graph.initializer.append(numpy_helper.from_array(np.array([0], np.int64), "axis"))
        for axis in ("rows", "columns"):
            wide = helper.make_node("Unsqueeze", [f"canvas.{axis}", "axis"], [f"{axis}.2d"])
            insert_before(model, f"mean.{axis}.own_side", f"side.{axis}", wide)

    change_graph(patch, change)


def padding_counted(patch: pytest.MonkeyPatch) -> None:
    def change(model: ModelProto) -> None:
        for name in ("window.valid_rows", "window.valid_columns"):
            none = helper.make_node("Mul", [name, "zero"], [f"{name}.0"])
            ones = helper.make_node("Add", [f"{name}.0", "one"], [f"{name}.1"])
            insert_before(model, f"{name}.4d", name, none, ones)

    change_graph(patch, change)


MISTAKES: list[Patch] = [
    bins_rounded_down,
    maxima_from_zero,
    coarse_level_first,
    channel_order_unchanged,
    slopes_reversed,
    one_slope_for_all_channels,
    one_mask_missing,
    one_bias_missing,
    mean_mirrored,
    mean_warped_to_the_canvas,
    padding_counted,
]


def test_the_oracle_catches_slopes_along_the_columns(
    exported: dict[str, ExportedNet], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The mutated graph runs only if a map has as many columns as channels: 48 at conv2_1, for 96 px of width."""
    right = exported["demo-image"]
    change_constant(monkeypatch, "conv2_1.slope", lambda slope: slope.reshape(1, 1, -1))
    monkeypatch.setattr(prelunet.export.dense.export, "check_parity", lambda *_: [])
    export_checkpoint(right.checkpoint_path, tmp_path / "wrong.onnx")
    image = noise(31, 96, seed=0)
    outputs = open_session(tmp_path / "wrong.onnx", "cpu").run(image[None], np.array([[31, 96]]))
    answer = reference.evaluate("demo", right.checkpoint.tensors, right.checkpoint.mean, image)
    assert np.abs(outputs.scores[0] - answer.scores).max() > 1e-4, "ten times the tolerance of test_dense_scores.py"


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda m: m.__name__)
def test_export_catches_the_mistake_and_leaves_no_file(
    exported: dict[str, ExportedNet], mistake: Patch, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    checkpoint = exported["demo-image"].checkpoint_path
    mistake(monkeypatch)
    with pytest.raises(CheckFailed, match="not written"):
        export_checkpoint(checkpoint, tmp_path / "wrong.onnx")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda m: m.__name__)
def test_the_oracle_catches_the_mistake(
    exported: dict[str, ExportedNet], mistake: Patch, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    right = exported["demo-image"]
    mistake(monkeypatch)
    monkeypatch.setattr(prelunet.export.dense.export, "check_parity", lambda *_: [])  # let the wrong file pass
    export_checkpoint(right.checkpoint_path, tmp_path / "wrong.onnx")
    session = open_session(tmp_path / "wrong.onnx", "cpu")
    images = [noise(h, w, seed=i) for i, (h, w) in enumerate([(28, 41), (39, 30)])]
    outputs = session.run(*garbage_canvas(session.contract, images))
    wrong = 0.0
    for index, image in enumerate(images):
        answer = reference.evaluate("demo", right.checkpoint.tensors, right.checkpoint.mean, image)
        wrong = max(wrong, float(np.abs(outputs.scores[index] - answer.scores).max()))
    assert wrong > 1e-4, "ten times the tolerance of test_dense_scores.py"
