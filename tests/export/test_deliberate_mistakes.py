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
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

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


def bins_rounded_down(patch: pytest.MonkeyPatch) -> None:
    def bins(side: int, count: int) -> list[tuple[int, int]]:
        edges = [i * side // count for i in range(count + 1)]
        return [(start, end - start) for start, end in pairwise(edges)]

    patch.setattr(prelunet.export.dense.pyramid, "axis_bins", bins)


def maxima_from_zero(patch: pytest.MonkeyPatch) -> None:
    right = prelunet.export.dense.build._gathered_pyramid

    def wrong(graph: Any, architecture: Any, feature_map: str) -> str:
        return right(graph, architecture, graph.node("Relu", [feature_map], "rectified"))

    patch.setattr(prelunet.export.dense.build, "_gathered_pyramid", wrong)


def coarse_level_first(patch: pytest.MonkeyPatch) -> None:
    right = prelunet.export.dense.build.fc1_channel_last

    def wrong(weight: np.ndarray, architecture: Any) -> np.ndarray:
        return right(weight, replace(architecture, spp_levels=architecture.spp_levels[::-1]))

    patch.setattr(prelunet.export.dense.build, "fc1_channel_last", wrong)


def channel_order_unchanged(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(prelunet.export.dense.build, "fc1_channel_last", lambda weight, _architecture: weight.T)


def slopes_reversed(patch: pytest.MonkeyPatch) -> None:
    right = prelunet.export.dense.build._activation

    def wrong(graph: Any, kind: Any, tensors: Any, layer: str, value: str, *, slope_shape: tuple[int, ...]) -> str:
        flipped = {**tensors, f"{layer}.slope": np.ascontiguousarray(tensors[f"{layer}.slope"][::-1])}
        chosen = flipped if layer == "fc1" else tensors
        return right(graph, kind, chosen, layer, value, slope_shape=slope_shape)

    patch.setattr(prelunet.export.dense.build, "_activation", wrong)


def one_slope_for_all_channels(patch: pytest.MonkeyPatch) -> None:
    right = prelunet.export.dense.build._activation

    def wrong(graph: Any, kind: Any, tensors: Any, layer: str, value: str, **shape: Any) -> str:
        mean = {layer + ".slope": np.full_like(tensors[layer + ".slope"], tensors[layer + ".slope"].mean())}
        return right(graph, kind, {**tensors, **(mean if layer == "conv2_1" else {})}, layer, value, **shape)

    patch.setattr(prelunet.export.dense.build, "_activation", wrong)


def one_mask_missing(patch: pytest.MonkeyPatch) -> None:
    right = prelunet.export.dense.build._mask

    def wrong(graph: Any, value: str, valid: Any, output: str) -> str:
        return value if output == "conv2_2.masked" else right(graph, value, valid, output)

    patch.setattr(prelunet.export.dense.build, "_mask", wrong)


def one_bias_missing(patch: pytest.MonkeyPatch) -> None:
    right = prelunet.export.dense.build._convolution

    def wrong(graph: Any, layer: Any, tensors: Any, value: str) -> str:
        none = {"conv2_2.bias": np.zeros_like(tensors["conv2_2.bias"])}
        return right(graph, layer, {**tensors, **none}, value)

    patch.setattr(prelunet.export.dense.build, "_convolution", wrong)


def mean_mirrored(patch: pytest.MonkeyPatch) -> None:
    right = prelunet.export.dense.build._warped_mean
    patch.setattr(prelunet.export.dense.build, "_warped_mean", lambda g, mean, p, s: right(g, mean[:, ::-1], p, s))


def mean_warped_to_the_canvas(patch: pytest.MonkeyPatch) -> None:
    right = prelunet.export.dense.build._warped_mean

    def wrong(graph: Any, mean: np.ndarray, positions: Any, sides: Any) -> str:
        whole = {"rows": "canvas.rows", "columns": "canvas.columns"}
        return right(graph, mean, positions, {axis: graph.unsqueeze(whole[axis], f"{axis}.2d", 0) for axis in sides})

    patch.setattr(prelunet.export.dense.build, "_warped_mean", wrong)


def padding_counted(patch: pytest.MonkeyPatch) -> None:
    right = prelunet.export.dense.build._averages

    def wrong(graph: Any, logits: str, grid: Any) -> None:
        for vector in (grid.rows, grid.columns):
            graph.node("Add", [graph.node("Mul", [vector, "zero"], f"{vector}.0"), "one"], f"{vector}.1")
        ones = type(grid)(grid.layer)
        patch.setattr(
            prelunet.export.dense.build.ValidCells, "rows", property(lambda _self: f"{grid.layer}.valid_rows.1")
        )
        patch.setattr(
            prelunet.export.dense.build.ValidCells, "columns", property(lambda _self: f"{grid.layer}.valid_columns.1")
        )
        right(graph, logits, ones)

    patch.setattr(prelunet.export.dense.build, "_averages", wrong)


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
    right, activation = exported["demo-image"], prelunet.export.dense.build._activation

    def wrong(graph: Any, kind: Any, tensors: Any, layer: str, value: str, *, slope_shape: tuple[int, ...]) -> str:
        shape = (1, 1, -1) if layer == "conv2_1" else slope_shape
        return activation(graph, kind, tensors, layer, value, slope_shape=shape)

    monkeypatch.setattr(prelunet.export.dense.build, "_activation", wrong)
    monkeypatch.setattr(prelunet.export.dense.export, "check_parity", lambda _path, _windows: [])
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
    monkeypatch.setattr(
        prelunet.export.dense.export, "check_parity", lambda _path, _windows: []
    )  # let the wrong file pass
    export_checkpoint(right.checkpoint_path, tmp_path / "wrong.onnx")
    session = open_session(tmp_path / "wrong.onnx", "cpu")
    images = [noise(h, w, seed=i) for i, (h, w) in enumerate([(28, 41), (39, 30)])]
    outputs = session.run(*garbage_canvas(session.contract, images))
    wrong = 0.0
    for index, image in enumerate(images):
        answer = reference.evaluate("demo", right.checkpoint.tensors, right.checkpoint.mean, image)
        wrong = max(wrong, float(np.abs(outputs.scores[index] - answer.scores).max()))
    assert wrong > 1e-4, "ten times the tolerance of test_dense_scores.py"
