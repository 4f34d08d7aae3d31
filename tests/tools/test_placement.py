"""What `make check-placement` demands of a final graph; the check itself needs the CUDA build of the runtime."""

import importlib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from onnx import GraphProto, ModelProto, NodeProto, helper

PLACEMENT = Path(__file__).parents[2] / "tools" / "placement"
NHWC = "com.ms.internal.nhwc"


@pytest.fixture
def verdict(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(PLACEMENT)
    return importlib.import_module("verdict")


@pytest.fixture
def model_variants(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(PLACEMENT)
    return importlib.import_module("model_variants")


def node(op: str, source: str, domain: str = "") -> NodeProto:
    return helper.make_node(op, [source], [f"{source}.{op}"], name=f"{op} of {source}", domain=domain)


def graph(*extra: NodeProto) -> GraphProto:
    sound = [node("Conv", "images.masked", NHWC), node("MaxPool", "conv1", NHWC), node("Transpose", "pool1.mask.fp16")]
    return helper.make_graph([*sound, *extra], "final", [], [])


def placed(nhwc: str = "1", **changes: Any) -> dict[str, Any]:
    copies = {"host to host": 0, "host to device": 1, "device to host": 4, "device to device": 9}
    run = {"shape": "2x250x341", "kernels": 139, "copies": copies}
    return {"nodes": {"CUDAExecutionProvider": 3}, "options": {"prefer_nhwc": nhwc}, "runs": [run], **changes}


def test_graph_that_lies_entirely_on_cuda_passes_and_is_counted(verdict: ModuleType) -> None:
    found = verdict.judge(placed(), graph(node("Transpose", "mean.warped")))
    assert found == verdict.Verdict((), nodes=4, convolutions=1, transposes=2, kernels=139, uploads=1)


@pytest.mark.parametrize(
    ("extra", "fault"),
    [
        (node("MemcpyToHost", "windows"), "MemcpyToHost of windows"),
        (node("MemcpyFromHost", "sizes"), "MemcpyFromHost of sizes"),
        (node("Conv", "conv1"), "Conv Conv of conv1 has the channel first"),
        (node("MaxPool", "conv2"), "MaxPool MaxPool of conv2 has the channel first"),
        (node("Transpose", "conv3_1.masked"), "an activation is transposed: conv3_1.masked"),
    ],
)
def test_each_fault_of_a_graph_is_reported_with_its_place(verdict: ModuleType, extra: NodeProto, fault: str) -> None:
    assert verdict.judge(placed(), graph(extra)).faults == (fault,)


def test_channel_first_is_no_fault_if_it_was_requested(verdict: ModuleType) -> None:
    assert verdict.judge(placed(nhwc="0"), graph(node("Conv", "conv1"), node("Transpose", "images"))).faults == ()


def test_nodes_on_another_provider_are_reported(verdict: ModuleType) -> None:
    nodes = {"CUDAExecutionProvider": 180, "CPUExecutionProvider": 2}
    assert verdict.judge(placed(nodes=nodes), graph()).faults == ("2 nodes on CPUExecutionProvider",)


def test_refused_file_is_reported_with_the_reason(verdict: ModuleType) -> None:
    assert verdict.judge({"refused": "no kernel"}, GraphProto()).faults == ("refused: no kernel",)


def test_more_copies_to_the_host_than_outputs_are_reported(verdict: ModuleType) -> None:
    run = placed()["runs"][0]
    run["copies"]["device to host"] = 5
    assert verdict.judge(placed(runs=[run]), graph()).faults == ("2x250x341: 5 copies to the host for 4 outputs",)


def test_every_precision_canvas_and_mean_of_each_net_is_checked(model_variants: ModuleType) -> None:
    names = [str(variant) for variant in model_variants.variants("AC")]
    assert len(set(names)) == 16
    assert {"A fp32 ragged, channel mean", "C fp16 exact, image mean"} <= set(names)


def test_variant_is_a_model_of_its_kind(model_variants: ModuleType) -> None:
    model: ModelProto = model_variants.build(model_variants.Variant("E", "fp16", "exact", "image"))
    stated = {entry.key: entry.value for entry in model.metadata_props}
    keys = ("precision", "canvas", "mean_kind")
    assert [stated[f"prelunet.{key}"] for key in keys] == ['"fp16"', '"exact"', '"image"']
