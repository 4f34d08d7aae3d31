"""Memory of a batch, against the values alive at once in the exported graph, and against measurements."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest

from prelunet.evaluator.architectures import TrunkLayer, architecture, parameter_shapes
from prelunet.evaluator.contract import ModelContract
from prelunet.evaluator.engine.memory import (
    BUFFER_COPIES,
    WORKSPACE_BYTES,
    batch_bytes,
    batch_bytes_bound,
    flops_per_pixel,
    weights_bytes,
    window_bytes,
)
from prelunet.evaluator.errors import ContractError
from prelunet.export.dense.export import export_checkpoint
from prelunet.training.net.checkpoints import write_checkpoint
from tests.engine.test_protocol_costs import build_contract
from tests.helpers.tiny_nets import CLASSES, TINY, tiny_checkpoint

ADOPTED = {"name": "resnet", "activation": "unknown"}


def adopted_contract(**architecture: object) -> ModelContract:
    return replace(build_contract("A"), architecture={**ADOPTED, **architecture}, canvas="exact", max_side=224,
                   crop=224, default_scales=(224,))  # fmt: skip


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, ModelContract]:
    folder = tmp_path_factory.mktemp("footprint")
    write_checkpoint(folder / "tiny.safetensors", tiny_checkpoint())
    export_checkpoint(folder / "tiny.safetensors", folder / "tiny.onnx")
    contract = replace(
        build_contract("A", CLASSES),
        architecture=TINY.to_json(),
        trunk=TINY.layers,
        window=TINY.window,
        spp_levels=TINY.spp_levels,
        crop=TINY.crop,
        default_scales=(TINY.crop,),
    )
    return folder / "tiny.onnx", contract


def most_alive(path: Path, height: int, width: int) -> int:
    """Run the graph node by node in its order and return the most bytes of results that somebody still needs."""
    model = onnx.load(path)
    nodes = list(model.graph.node)
    names = [name for node in nodes for name in node.output]
    last_use = {name: index for index, node in enumerate(nodes) for name in node.input}
    finals = {output.name for output in model.graph.output}
    model.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names if name not in finals)
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    feeds = {"images": np.ones((1, height, width, 3), np.uint8), "sizes": np.array([[height, width]], np.int64)}
    size = {name: value.nbytes for name, value in zip(names, session.run(names, feeds), strict=True)}
    alive, most = set[str](), 0
    for index, node in enumerate(nodes):
        alive |= set(node.output)
        most = max(most, sum(size[name] for name in alive))
        alive = {name for name in alive if name in finals or last_use.get(name, -1) > index}
    return most


# Small images, where the first layers take most; long ones, where the windows do.
@pytest.mark.parametrize("size", [(24, 24), (31, 47), (64, 200), (240, 33)])
def test_estimate_is_above_what_is_alive_in_the_graph_and_below_three_times_that(
    exported: tuple[Path, ModelContract], size: tuple[int, int]
) -> None:
    path, contract = exported
    estimate = (batch_bytes(contract, 1, *size) - WORKSPACE_BYTES) / BUFFER_COPIES["cpu"]
    assert most_alive(path, *size) <= estimate <= 3 * most_alive(path, *size)


# Peak resident memory in MB above that of the loaded model A (random weights, 1000 classes), in calls of one shape
# after another; onnxruntime 1.31.1, OpenVINO 2026.4.1, two threads, Linux, 2026-11-20. OpenVINO's 121 MB (f32) and 371
# MB (bf16) for weights in the first call of any size are not counted.
MEASURED = [
    ("cpu", 4, (2, 480, 640), 250),
    ("cpu", 4, (1, 480, 1920), 495),
    ("openvino", 4, (2, 480, 640), 561),
    ("openvino", 4, (1, 480, 1920), 1126),
    ("openvino", 2, (2, 480, 640), 320),
    ("openvino", 2, (1, 480, 1920), 628),
]


@pytest.mark.parametrize(("runtime", "value_bytes", "shape", "measured"), MEASURED)
def test_estimate_is_above_what_was_measured_and_below_one_and_a_half_times_that(
    runtime: str, value_bytes: int, shape: tuple[int, int, int], measured: int
) -> None:
    estimate = batch_bytes(build_contract("A"), *shape, value_bytes, "openvino" if runtime == "openvino" else "cpu")
    assert measured <= estimate / 1e6 <= 1.5 * measured


def test_a_window_of_model_a_takes_its_bins_twice_and_its_scores_twice() -> None:
    assert window_bytes(build_contract("A")) == 2 * 63 * 512 * 4 + 2 * 4 * 1000
    assert window_bytes(build_contract("A"), 2) == 2 * 63 * 512 * 2 + 2 * 4 * 1000


def test_a_window_of_many_classes_takes_what_its_layers_do() -> None:
    hidden = architecture("A").hidden
    assert window_bytes(build_contract("A", 50_000)) == 8 * 50_000 + 4 * (2 * hidden + 2 * 50_000)


def test_a_net_of_few_channels_takes_what_its_front_does() -> None:
    narrow = replace(
        build_contract("A", 1),
        architecture={**architecture("A").to_json(), "trunk": [{"kind": "conv", "channels": 1}], "hidden": 1},
        trunk=(TrunkLayer(16, 16, 0),),
        spp_levels=(1,),
    )
    # bytes a pixel: as they came and channels first; float32 of three channels as such, mean, centered, masked
    expected = WORKSPACE_BYTES + BUFFER_COPIES["cpu"] * 5 * 300 * 400 * (2 * 3 + 4 * 3 * 4)
    assert batch_bytes(narrow, 5, 300, 400) == batch_bytes_bound(narrow, 5 * 300 * 400, 5 * 5 * 12) == expected


def test_unpadded_layers_are_not_masked_and_grow_with_the_canvas() -> None:
    layers = [{"kind": "conv", "channels": 64}, {"kind": "conv", "channels": 1}]
    net = replace(
        build_contract("A", 1),
        architecture={**architecture("A").to_json(), "trunk": layers, "hidden": 1},
        trunk=(TrunkLayer(9, 1, 0), TrunkLayer(1, 1, 0)),
        spp_levels=(1,),
        crop=22,
        default_scales=(22,),
    )
    activation = 2 * 64 * 192 * 192  # its input and output; the layer after it has 64 + 1 channels
    assert batch_bytes(net, 1, 200, 200) == WORKSPACE_BYTES + BUFFER_COPIES["cpu"] * 4 * activation
    assert batch_bytes_bound(net, 200 * 200, 179 * 179) >= batch_bytes(net, 1, 200, 200)


def test_rows_of_a_batch_take_the_same_each() -> None:
    one, three = (batch_bytes(build_contract("A"), rows, 256, 341) - WORKSPACE_BYTES for rows in (1, 3))
    assert three == 3 * one


def test_an_exact_file_has_no_masked_copies() -> None:
    net = replace(build_contract("C"), spp_levels=(1,))  # so that the pools are small
    ragged, exact = (
        batch_bytes(replace(net, canvas=canvas), 1, 224, 224) - WORKSPACE_BYTES for canvas in ("ragged", "exact")
    )
    # conv2_2: 384 channels on 56x56 cells go in, masked in a ragged file, and out
    assert ragged == BUFFER_COPIES["cpu"] * 4 * 3 * 384 * 56 * 56
    assert exact == BUFFER_COPIES["cpu"] * 4 * 2 * 384 * 56 * 56


@pytest.mark.parametrize("name", ["A", "B", "C", "E", "demo"])
def test_weights_are_those_of_the_architecture(name: str) -> None:
    contract = build_contract(name, 77) if name in "ABC" else replace(
        build_contract("A", 77),
        architecture=architecture(name).to_json(),
        trunk=architecture(name).layers,
        window=architecture(name).window,
        spp_levels=architecture(name).spp_levels,
        crop=architecture(name).crop,
        default_scales=(architecture(name).crop,),
    )  # fmt: skip
    numbers = sum(int(np.prod(shape)) for shape in parameter_shapes(architecture(name), 77).values())
    assert weights_bytes(contract) == 4 * numbers
    assert weights_bytes(replace(contract, precision="fp16")) == 2 * numbers


def test_no_canvas_takes_more_than_its_pixels_and_windows_may() -> None:
    rng = np.random.default_rng(0)
    for name in ("A", "E", "demo"):
        net = architecture(name)
        contract = replace(build_contract("A"), architecture=net.to_json(), trunk=net.layers, window=net.window,
                           spp_levels=net.spp_levels, crop=net.crop, default_scales=(net.crop,))  # fmt: skip
        for height, width in rng.integers(net.crop, 8 * net.crop, (60, 2)).tolist():
            rows, columns = contract.window_grid(height, width)
            most = batch_bytes_bound(contract, height * width, rows * columns)
            assert batch_bytes(contract, 1, height, width) <= most <= 1.3 * batch_bytes(contract, 1, height, width)


def test_an_adopted_net_takes_three_wide_maps() -> None:
    contract = adopted_contract()
    assert batch_bytes(contract, 5, 224, 224) == batch_bytes_bound(contract, 5 * 224 * 224, 5)
    assert batch_bytes(contract, 5, 224, 224) == WORKSPACE_BYTES + BUFFER_COPIES["cpu"] * 5 * 224 * 224 * 3 * 64 * 4
    assert weights_bytes(contract) == 0


def test_operations_of_model_a_are_those_of_its_convolutions_and_some_for_its_windows() -> None:
    crop = 2 * 18.9e9 / 224**2  # the convolutions of one crop (Table 3 counts the fully connected layers too)
    assert crop < flops_per_pixel(build_contract("A")) < 1.5 * crop


def test_operations_of_an_adopted_net_are_what_its_file_states() -> None:
    assert flops_per_pixel(adopted_contract(multiply_adds=4_000_000_000)) == pytest.approx(8e9 / 224**2)
    assert flops_per_pixel(adopted_contract()) == float("inf")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"trunk": [{"kind": "conv", "channels": 0}]}, "channels of a layer"),
        ({"trunk": "none"}, "trunk should be a list"),
        ({"trunk": []}, "malformed"),
        ({"hidden": "many"}, "hidden"),
    ],
)
def test_a_malformed_architecture_is_refused(change: dict[str, object], message: str) -> None:
    contract = build_contract("A")
    with pytest.raises(ContractError, match=message):
        batch_bytes(replace(contract, architecture={**contract.architecture, **change}), 1, 224, 224)
