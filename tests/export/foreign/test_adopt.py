"""An adopted classifier gives the scores of the original net in every protocol and verb."""

import io
import json
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from PIL import Image

from prelunet.evaluator.architectures import OpaqueNet
from prelunet.evaluator.cli import run
from prelunet.evaluator.client import Client
from prelunet.evaluator.contract import golden_image
from prelunet.evaluator.engine.classify import classify_images
from prelunet.evaluator.engine.heatmap import heat_maps
from prelunet.evaluator.engine.load import open_session
from prelunet.evaluator.engine.runtimes.onnx import RawOnnxModel
from prelunet.evaluator.engine.verify import verify
from prelunet.evaluator.errors import ContractError, UsageError
from prelunet.evaluator.imaging.decode import decode_rgb
from prelunet.evaluator.preparation import Preparation
from prelunet.evaluator.protocols import build_protocol, default_protocol_name, protocol_from_json
from prelunet.evaluator.serving.options import HttpOptions
from prelunet.export.foreign.adopt import AdoptOptions, adopt
from prelunet.training.importing.preprocessing import PRESETS, Preprocessing, Preset
from tests.conftest import with_contract
from tests.export.foreign.foreign_nets import (
    BYTES,
    CLASSES,
    CROP,
    HALF,
    MEAN,
    RGB,
    STD,
    Build,
    NetBuilder,
    ReferenceNet,
    adopted,
    certain,
    channels_last,
    class_list,
    features,
    from_bytes,
    mixing,
    net,
    never_negative,
    of_one,
    of_two,
    ours,
    photo,
    softmax_end,
    spatial,
    transposed,
    write_classes,
)
from tests.serving.serving_harness import running_server

PHOTOS = (photo(61, 83, "PNG"), photo(97, 52, "JPEG", seed=1), photo(40, 40, "PNG", seed=2))

# The graph preprocesses pixels in float32 in the same order as numpy, so only the order of sums inside the net may
# differ in a batch: 1e-7 of a logit of up to 10.
TOLERANCE = 1e-6


CAFFE = Preprocessing((104.0, 116.7, 122.7), (51.0, 57.0, 64.0), 255, channels="bgr")
CAFFE_PLAIN: dict[str, Any] = {"mean": CAFFE.mean, "std": CAFFE.std, "pixel_range": 255, "bgr": True}
BICUBIC = {"resample": Image.Resampling.BICUBIC}

# name → how the net is built and written, the options of adopt, how to run it without prelunet
NETS: dict[str, tuple[Build, dict[str, Any], Preprocessing, dict[str, Any]]] = {
    "residual": (features, {}, RGB, {}),
    "opset 7": (features, {"opset": 7}, RGB, {}),
    "opset 21": (features, {"opset": 21}, RGB, {}),
    "softmax": (softmax_end, {}, RGB, {"probabilities": True}),
    "logits of 0 and above": (never_negative, {}, RGB, {}),
    "bicubic": (features, {}, Preprocessing(MEAN, STD, interpolation="bicubic"), BICUBIC),
    "channels last, BGR": (channels_last, {"layout": "NHWC"}, CAFFE, {**CAFFE_PLAIN, "nhwc": True}),
    "BGR": (features, {}, CAFFE, CAFFE_PLAIN),
    "any size": (features, {"side": "S"}, RGB, {}),
    "batch of 1": (features, {"batch": 1}, RGB, {}),
    "batch of 1 inside": (of_one, {"batch": 1}, RGB, {}),
    "batch of 1 inside, opset 9": (of_one, {"batch": 1, "opset": 9}, RGB, {}),
    "batch of 2 inside": (of_two, {"batch": 2}, RGB, {"batch": 2}),
    "mixes its batch": (mixing, {}, RGB, {}),
    "spatial output": (spatial, {}, RGB, {}),
    "half": (features, HALF, RGB, {"dtype": np.float16}),
    "bytes": (from_bytes, BYTES, Preprocessing(None, None), {"dtype": np.uint8}),
}
ONE_BY_ONE = {"batch of 1 inside", "batch of 1 inside, opset 9", "batch of 2 inside", "mixes its batch"}


@pytest.mark.parametrize("name", NETS)
def test_an_adopted_net_gives_the_scores_of_plain_onnxruntime_with_plain_pillow(name: str, tmp_path: Path) -> None:
    build, written, preprocessing, asked = NETS[name]
    path = net(tmp_path, build, **written)
    session, found = adopted(tmp_path, path, preprocessing)
    plain = ReferenceNet(path, **asked)
    assert bool(found.sequential_reason) == (name in ONE_BY_ONE), found.sequential_reason
    if "inside" in name:
        assert found.sequential_reason == "together: its Reshape node fails"
    images = [decode_rgb(data) for data in PHOTOS]
    for protocol, expected in (("center", plain.center), ("ten-crop", plain.ten_crop)):
        results = classify_images(session, images, build_protocol(protocol, session.contract))
        wanted = np.stack([expected(data) for data in PHOTOS])
        assert np.abs(wanted[0] - wanted[1]).max() > 0.01, "a net that says the same of all images shows nothing"
        # Half: in a batch, a logit of up to 4 may round to the neighboring float16, 4e-3 away.
        tolerance = 1e-3 if name == "half" else TOLERANCE
        np.testing.assert_allclose([r.scores for r in results], wanted, rtol=0, atol=tolerance)


def test_a_net_that_torch_exported_with_a_batch_of_one_is_adopted_with_batches(tmp_path: Path) -> None:
    import torch

    torch.manual_seed(0)
    parts = [torch.nn.Conv2d(3, 6, 5, 2), torch.nn.BatchNorm2d(6), torch.nn.ReLU(), torch.nn.AdaptiveAvgPool2d(1)]
    module = torch.nn.Sequential(*parts, torch.nn.Flatten(), torch.nn.Linear(6, CLASSES)).eval()
    module[-1].weight.data *= 20
    path = tmp_path / "net.onnx"
    torch.onnx.export(module, (torch.zeros(1, 3, CROP, CROP),), path, dynamo=False)
    session, found = adopted(tmp_path, path)
    assert not found.sequential_reason
    results = classify_images(session, [decode_rgb(d) for d in PHOTOS], build_protocol("ten-crop", session.contract))
    wanted = [ReferenceNet(path).ten_crop(data) for data in PHOTOS]
    np.testing.assert_allclose([r.scores for r in results], wanted, rtol=0, atol=TOLERANCE)


def test_logits_of_a_softmax_net_are_logarithms_and_finite_where_a_score_is_zero(tmp_path: Path) -> None:
    session, _ = adopted(tmp_path, net(tmp_path, certain))
    images = np.stack([golden_image(CROP, CROP), 255 - golden_image(CROP, CROP)])
    outputs = session.run(images, np.full((2, 2), CROP, np.int64))
    assert (outputs.scores == 0).any()
    np.testing.assert_allclose(outputs.logits, np.log(np.maximum(outputs.scores, np.finfo(np.float32).tiny)), atol=1e-5)
    np.testing.assert_array_equal(outputs.windows, [[1, 1], [1, 1]])
    np.testing.assert_array_equal(outputs.window_scores[:, 0, 0], outputs.scores)


def test_a_score_of_zero_in_half_precision_has_the_logarithm_of_the_smallest_half(tmp_path: Path) -> None:
    session, found = adopted(tmp_path, net(tmp_path, certain, **HALF))
    assert found.probabilities
    outputs = session.run(golden_image(CROP, CROP)[None], np.full((1, 2), CROP, np.int64))
    zero = outputs.scores == 0
    assert zero.any()
    np.testing.assert_allclose(outputs.logits[zero], np.log(np.finfo(np.float16).smallest_subnormal.astype(float)))
    (golden,) = session.contract.golden
    np.testing.assert_allclose(np.array(golden.logits)[zero[0]], outputs.logits[zero])


def test_outputs_above_one_are_logits_even_if_none_is_negative(tmp_path: Path) -> None:
    path = net(tmp_path, never_negative)
    raw = RawOnnxModel(path).run({"x": RGB.apply(golden_image(CROP, CROP)).transpose(2, 0, 1)[None]}, "v13")
    assert raw.min() == 0
    assert 1.1 < raw.max() < 10, "near to 1, where a sigmoid might be suspected"
    assert not adopted(tmp_path, path)[1].probabilities


def one_score(*end: str) -> Build:
    """Return a net that ends in one number for each image, after further operators."""

    def build(n: NetBuilder, x: str) -> str:
        axis = n.constant(np.array([1], np.int64))
        value = n.add("ReduceSum", features(n, x), axis, keepdims=0 if end[-1:] == ("squeezed",) else 1)
        for op in end:
            value = value if op == "squeezed" else n.add(op, value)
        return value

    return build


@pytest.mark.parametrize("options", [{}, {"batch": 1}, {"opset": 13, "side": "S"}], ids=["", "batch of 1", "any size"])
@pytest.mark.parametrize(
    ("end", "probability"), [((), False), (("Sigmoid",), True), (("Sigmoid", "squeezed"), True), (("squeezed",), False)]
)
def test_one_score_is_that_of_the_second_of_two_classes(
    end: tuple[str, ...], probability: bool, options: dict[str, Any], tmp_path: Path
) -> None:
    path = net(tmp_path, one_score(*end), **options)
    output = tmp_path / "adopted.onnx"
    found = adopt(path, output, class_list(tmp_path, 2), AdoptOptions(RGB, crop=CROP))
    assert found.interface.one_score
    assert found.probabilities == probability
    session, plain = open_session(output, "cpu"), ReferenceNet(path, probabilities=True)
    protocol = build_protocol("center", session.contract)
    for result, data in zip(
        classify_images(session, [decode_rgb(each) for each in PHOTOS], protocol), PHOTOS, strict=True
    ):
        (score,) = plain.center(data)
        second = score if probability else 1 / (1 + np.exp(-score))
        np.testing.assert_allclose(result.scores, [1 - second, second], rtol=0, atol=TOLERANCE)
        assert result.top(1)[0][0] == int(score >= (0.5 if probability else 0))


def test_what_kind_of_score_it_is_and_which_class_it_is_for_is_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    classes = tmp_path / "classes"
    classes.write_text("cat\ndog\n")
    options = ["--classes", str(classes), "--preset", "torchvision", "--crop", str(CROP), "-o"]
    for end, text in (
        (("Sigmoid",), "one probability, of 'dog' (from 0.5 on; else 'cat'), detected by running the net"),
        ((), "one logit, of 'dog' (from 0 on; else 'cat'), detected by running the net"),
    ):
        path = net(tmp_path, one_score(*end), name=f"net{len(end)}")
        assert run(["adopt", str(path), *options, str(tmp_path / f"{len(end)}.onnx")]) == 0
        printed = capsys.readouterr()
        assert text in printed.out
        assert "warning" not in printed.err


def test_a_net_that_scores_all_images_alike_is_adopted_with_a_warning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def constant(n: NetBuilder, x: str) -> str:
        nothing = n.add("Mul", features(n, x), n.constant(np.zeros(1, np.float32)))
        return n.add("Add", nothing, n.constant(np.arange(CLASSES, dtype=np.float32)))

    path = net(tmp_path, constant)
    classes = str(write_classes(tmp_path))
    options = ["--classes", classes, "--preset", "torchvision", "-o", str(tmp_path / "o.onnx")]
    assert run(["adopt", str(path), *options]) == 0
    assert "warning: the net gives the same scores to all test images" in capsys.readouterr().err


# 3x3 convolutions to 20x20x8, 20x20x8 and 10x10x12, and 12 features to 7 classes
COUNT = 400 * 8 * 27 + 400 * 8 * 72 + 100 * 12 * 72 + 12 * 7


@pytest.mark.parametrize(("build", "batch"), [(features, "N"), (features, 4), (transposed, "N"), (transposed, 4)])
def test_the_multiply_adds_are_those_of_one_image_however_the_net_is_written(
    build: Build, batch: int | str, tmp_path: Path
) -> None:
    session, _ = adopted(tmp_path, net(tmp_path, build, batch=batch))
    assert session.contract.architecture.multiply_adds == COUNT


def test_the_multiply_adds_are_unknown_if_a_convolution_has_a_shape_that_only_running_it_shows(tmp_path: Path) -> None:
    def computed_shape(n: NetBuilder, x: str) -> str:
        sides = n.add("Shape", x)
        positive = n.add("Greater", sides, n.constant(np.array(0, np.int64)))
        x = n.add("Reshape", x, n.add("Compress", sides, positive))
        return features(n, x, lambda n, x: n.add("Reshape", x, n.constant(np.array([1, 12], np.int64))))

    session, _ = adopted(tmp_path, net(tmp_path, computed_shape))
    assert session.contract.architecture.multiply_adds is None


def test_the_contract_states_one_window_of_fixed_size_and_how_the_net_was_adopted(tmp_path: Path) -> None:
    path = net(tmp_path, name="ResNet-tiny")
    session, _ = adopted(tmp_path, path, replace(RGB, interpolation="bicubic"))
    contract = session.contract
    assert contract.fixed_size
    assert (contract.crop, contract.min_side, contract.max_side, contract.trunk_stride) == (CROP,) * 4
    assert (contract.window, contract.spp_levels, contract.default_scales) == (1, (1,), (CROP,))
    assert (contract.canvas, contract.precision, contract.interpolation) == ("exact", "fp32", "bicubic")
    assert contract.window_grid(CROP, CROP) == (1, 1)
    assert contract.architecture == OpaqueNet("ResNet-tiny", "unknown", COUNT)
    assert contract.classes[6].to_json() == {"wnid": "n00000006", "name": "thing 6"}
    assert contract.training["adopted"] == {
        "input": "x", "layout": "NCHW", "output": "v12", "mean": list(MEAN), "std": list(STD), "range": 1,
        "channels": "rgb",
    }  # fmt: skip
    assert default_protocol_name(contract) == "center"
    for protocol in ("multi-scale", "dense-46", "spp-18"):
        with pytest.raises(UsageError, match=r"only crops of 40x40 pixels.*It supports: center, ten-crop"):
            build_protocol(protocol, contract)


def test_golden_scores_are_those_of_the_net_itself_and_verify_compares_them(tmp_path: Path) -> None:
    path = net(tmp_path)
    session, _ = adopted(tmp_path, path)
    (golden,) = session.contract.golden
    np.testing.assert_allclose(
        golden.scores, ReferenceNet(path).scores(golden_image(CROP, CROP)), rtol=0, atol=TOLERANCE
    )
    assert [d.passed for d in verify(session)] == [True]
    swapped = replace(golden, scores=golden.scores[::-1])
    other = with_contract(session, replace(session.contract, golden=(swapped,)))
    assert [d.passed for d in verify(other)] == [False]


def test_the_file_has_no_trace_of_the_exporter_and_the_same_bytes_each_time(tmp_path: Path) -> None:
    path = net(tmp_path, ours, input_name="images")
    model = onnx.load(path)
    branch = model.graph.node[-1].attribute[0].g
    for graph in (model.graph, branch):
        graph.node[0].doc_string = "/home/me/train.py(12)"
        graph.node[0].metadata_props.add(key="stack", value="/home/me/model.py")
        graph.metadata_props.add(key="where", value="/home/me")
        graph.value_info.add(name="/home/me")
    model.graph.initializer[0].doc_string = "/home/me"
    model.metadata_props.add(key="author", value="/home/me")
    model.doc_string = "/home/me"
    onnx.save(model, path)
    adopted(tmp_path, path)
    first = (tmp_path / "adopted.onnx").read_bytes()
    adopted(tmp_path, path)
    assert (tmp_path / "adopted.onnx").read_bytes() == first
    assert b"/home/me" not in first
    assert str(tmp_path).encode() not in first


def test_golden_scores_are_those_of_one_thread_however_many_the_machine_has(tmp_path: Path) -> None:
    def wide(n: NetBuilder, x: str) -> str:
        """End in a convolution with so many channels that onnxruntime's order of summation depends on its threads."""
        x = n.add("AveragePool", x, kernel_shape=[8, 8], strides=[8, 8])
        x = n.add("Conv", x, n.weights(513, 3, 1, 1), kernel_shape=[1, 1])
        x = n.add("Conv", x, n.weights(CLASSES, 513, 5, 5, low=-0.02, high=0.02), kernel_shape=[5, 5], pads=[2] * 4)
        return n.add("Flatten", n.add("GlobalAveragePool", x), axis=1)

    path = net(tmp_path, wide)
    session, _ = adopted(tmp_path, path)
    (golden,) = session.contract.golden
    pixels = RGB.apply(golden_image(CROP, CROP)).transpose(2, 0, 1)[None]
    (logits,) = RawOnnxModel(path, threads=1).run({"x": pixels}, "v4")
    np.testing.assert_array_equal(np.float32(golden.logits), logits)  # nine digits determine a float32


def test_weights_in_another_file_are_taken_into_the_model(tmp_path: Path) -> None:
    path = net(tmp_path)
    expected = ReferenceNet(path).center(PHOTOS[0])
    onnx.save(onnx.load(path), path, save_as_external_data=True, location="weights.bin", size_threshold=0)
    session, _ = adopted(tmp_path, path)
    (tmp_path / "weights.bin").rename(tmp_path / "blob")
    (tmp_path / "weights.bin").symlink_to(tmp_path / "blob")  # as in Hugging Face's cache
    with pytest.raises(ContractError, match=r"which cannot be read .*Copy the folder without links: cp -rL"):
        adopted(tmp_path, path)
    (tmp_path / "weights.bin").unlink()
    session = open_session(tmp_path / "adopted.onnx", "cpu")
    (result,) = classify_images(session, [decode_rgb(PHOTOS[0])], build_protocol("center", session.contract))
    np.testing.assert_allclose(result.scores, expected, rtol=0, atol=TOLERANCE)
    with pytest.raises(ContractError, match=r"net\.onnx: its weights are in other files.*Put them in the same folder"):
        adopted(tmp_path, path)


def test_nets_with_other_weights_or_fed_in_another_way_are_other_nets(tmp_path: Path) -> None:
    """The net's own file is the same if its weights are elsewhere, as torch exports them."""
    path, digests = net(tmp_path), []
    model = onnx.load(path)
    for factor in (1, 1, 2):
        changed = onnx.ModelProto.FromString(model.SerializeToString())
        weights = next(each for each in changed.graph.initializer if len(each.dims) == 4)
        weights.CopyFrom(onnx.numpy_helper.from_array(factor * onnx.numpy_helper.to_array(weights), weights.name))
        (tmp_path / "weights.bin").unlink(missing_ok=True)  # onnx would append to it
        onnx.save(changed, path, save_as_external_data=True, location="weights.bin", size_threshold=0)
        digests.append(adopted(tmp_path, path)[0].contract.checkpoint_sha256)
    other = adopt(
        path, tmp_path / "b.onnx", class_list(tmp_path), AdoptOptions(replace(RGB, channels="bgr"), crop=CROP)
    )
    digests.append(other.contract.checkpoint_sha256)
    assert digests[0] == digests[1]
    assert len(set(digests)) == 3
    onnx.save(onnx.load(path), path)  # in one file
    same = adopted(tmp_path, path, Preprocessing(tuple(map(float, MEAN)), STD), center_scale=CROP + 1)[0].contract
    assert same.checkpoint_sha256 == digests[2]


def test_a_net_with_our_own_names_inside_and_with_a_branch_that_reads_weights_from_outside_works(
    tmp_path: Path,
) -> None:
    path = net(tmp_path, ours, input_name="images")
    session, _ = adopted(tmp_path, path)
    (result,) = classify_images(session, [decode_rgb(PHOTOS[1])], build_protocol("center", session.contract))
    np.testing.assert_allclose(result.scores, ReferenceNet(path).center(PHOTOS[1]), rtol=0, atol=TOLERANCE)
    assert session.contract.architecture.multiply_adds is None, "what a branch multiplies is not counted"


@pytest.mark.parametrize("batch", ["N", 1])
def test_sparse_weights_stay_where_the_net_reads_them(batch: str | int, tmp_path: Path) -> None:
    build = features if batch == "N" else of_one
    path = net(tmp_path, build, batch=batch)
    model = onnx.load(path)
    bias = model.graph.initializer.pop()  # the constant that was added last
    assert list(bias.dims) == [CLASSES]
    values = helper.make_tensor(bias.name, TensorProto.FLOAT, [2], [1.5, -2.0])
    places = helper.make_tensor("places", TensorProto.INT64, [2], [1, 4])
    model.graph.sparse_initializer.append(helper.make_sparse_tensor(values, places, [CLASSES]))
    onnx.save(model, path)
    output = tmp_path / "adopted.onnx"
    adopt(path, output, class_list(tmp_path), AdoptOptions(RGB))
    session = open_session(output, "cpu")
    (result,) = classify_images(session, [decode_rgb(PHOTOS[1])], build_protocol("center", session.contract))
    np.testing.assert_allclose(result.scores, ReferenceNet(path).center(PHOTOS[1]), rtol=0, atol=TOLERANCE)


def test_one_of_several_outputs_is_taken_when_it_is_named(tmp_path: Path) -> None:
    path = net(tmp_path, softmax_end)
    model = onnx.load(path)
    model.graph.output.append(helper.make_tensor_value_info("v12", TensorProto.FLOAT, None))
    onnx.save(model, path)
    with pytest.raises(UsageError, match=r"outputs: 'v13', 'v12'\. Select the one with the scores: --net-output NAME"):
        adopted(tmp_path, path)
    with pytest.raises(UsageError, match=r"no output 'v3'\. The outputs are: 'v13', 'v12'"):
        adopted(tmp_path, path, net_output="v3")
    for name, probabilities in (("v12", False), ("v13", True)):
        session, found = adopted(tmp_path, path, net_output=name)
        assert found.probabilities == probabilities
        (result,) = classify_images(session, [decode_rgb(PHOTOS[0])], build_protocol("center", session.contract))
        expected = ReferenceNet(path, output=name, probabilities=probabilities).center(PHOTOS[0])
        np.testing.assert_allclose(result.scores, expected, rtol=0, atol=TOLERANCE)


# The command line


def test_an_adopted_net_is_classified_validated_reported_and_served(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, classes, model = net(tmp_path), write_classes(tmp_path), tmp_path / "model.onnx"
    numbers = ["--mean", ",".join(map(str, MEAN)), "--std", ",".join(map(str, STD))]
    command = ["adopt", str(path), "--crop", str(CROP), *numbers, "--classes", str(classes), "-o", str(model)]
    assert run(command) == 0
    output = capsys.readouterr().out
    for words in (
        "'x': NCHW",
        "R (x - 0.485) / 0.229",
        "logits of 7 classes, detected by",
        "net together",
        "18 runs agree",
    ):
        assert words in output
    assert run(command) == 2
    assert "already exists" in capsys.readouterr().err
    assert run([*command, "--force", "--name", "ours"]) == 0
    assert run(["verify", str(model), "--device", "cpu"]) == 0

    data = tmp_path / "data"
    for index, (wnid, encoding) in enumerate([("n00000001", "PNG"), ("n00000004", "JPEG"), ("n00000004", "PNG")]):
        (data / wnid).mkdir(parents=True, exist_ok=True)
        (data / wnid / f"{index}.{encoding.lower()}").write_bytes(photo(50 + 9 * index, 64, encoding, seed=index))
    files = sorted(data.rglob("*.*"))
    plain = ReferenceNet(path)
    for name, ask in (("center", plain.center), ("ten-crop", plain.ten_crop)):
        folder = str(tmp_path / name)
        extra = [] if name == "center" else ["--protocol", name]  # the default of an adopted net
        assert run(["validate", "--model", str(model), "--data", str(data), "--run", folder, *extra]) == 0
        stored = np.load(tmp_path / name / "scores.f32.npy")
        np.testing.assert_allclose(stored, [ask(file.read_bytes()) for file in files], rtol=0, atol=TOLERANCE)
        assert run(["report", folder]) == 0
    assert json.loads((tmp_path / "center" / "report" / "report.json").read_text())["images"] == 3
    assert run(["classify", str(files[0]), "--model", str(model), "--protocol", "multi-scale"]) == 2
    assert "no windows in a larger image" in capsys.readouterr().err

    with running_server(ours=open_session(model, "cpu")) as server, Client(server.address) as client:
        answer = client.classify(files[1].read_bytes(), protocol="center-44")
        expected = plain.center(files[1].read_bytes(), scale=44)
        assert answer.predictions[0].class_index == expected.argmax()
        assert abs(answer.predictions[0].score - expected.max()) < TOLERANCE


def test_a_net_that_squashes_its_images_gets_them_squashed_and_says_so_everywhere(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, model = net(tmp_path), tmp_path / "squashing.onnx"
    options = ["--classes", str(write_classes(tmp_path)), "--preset", "torchvision", "--resize", "squash"]
    assert run(["adopt", str(path), *options, "-o", str(model)]) == 0
    assert "squashed with the bilinear filter" in capsys.readouterr().out
    session, plain = open_session(model, "cpu"), ReferenceNet(path)
    protocol = build_protocol(default_protocol_name(session.contract), session.contract)
    results = classify_images(session, [decode_rgb(data) for data in PHOTOS], protocol)
    wanted = [
        plain.scores(np.asarray(Image.open(io.BytesIO(data)).convert("RGB").resize((CROP, CROP), plain.resample)))
        for data in PHOTOS
    ]
    np.testing.assert_allclose([result.scores for result in results], wanted, rtol=0, atol=TOLERANCE)
    cropped = [plain.center(data) for data in PHOTOS]
    assert np.abs(np.array(cropped) - wanted).max() > 0.01, "crops would give other scores"

    assert protocol.to_json()["preparation"]["resize"] == "squash"
    assert session.contract.to_metadata()["prelunet.contract_version"] == "3", "older readers would not squash"
    assert protocol_from_json(protocol.to_json()) == protocol
    for name in ("ten-crop", "center-46", "dense-40", "multi-scale"):
        with pytest.raises(UsageError, match=r"takes whole images, squashed to 40x40 pixels.* It supports: center"):
            build_protocol(name, session.contract)

    with running_server(ours=session, http=HttpOptions(port=0)) as server, Client(server.address) as client:
        answer = client.classify(PHOTOS[0])
        assert answer.protocol == protocol.to_json()
        over_http = httpx.post(f"http://{server.http}/v1/classify", content=PHOTOS[0]).json()
        assert over_http["protocol"] == protocol.to_json()
        assert abs(answer.predictions[0].score - wanted[0].max()) < TOLERANCE

    data = tmp_path / "data"
    for index, photo_bytes in enumerate(PHOTOS):
        (data / f"n{index:08}").mkdir(parents=True)
        (data / f"n{index:08}" / "photo.png").write_bytes(photo_bytes)
    assert run(["validate", "--model", str(model), "--data", str(data), "--run", str(tmp_path / "run")]) == 0
    assert run(["report", str(tmp_path / "run")]) == 0
    report = json.loads((tmp_path / "run" / "report" / "report.json").read_text())
    assert report["protocol"] == protocol.to_json()
    assert "whole images squashed to 40x40" in (tmp_path / "run" / "report" / "report.html").read_text()


def test_a_heat_map_of_a_squashed_image_covers_all_of_it(tmp_path: Path) -> None:
    session, _ = adopted(tmp_path, net(tmp_path), replace(RGB, preparation=Preparation(resize="squash")))
    protocol = build_protocol("center", session.contract)
    (result,) = classify_images(session, [decode_rgb(PHOTOS[0])], protocol, keep_windows=True)
    (found,) = heat_maps(result, [2], (61, 83), (10, 14), session.contract, protocol)
    np.testing.assert_allclose(found, np.full((10, 14), result.scores[2]), rtol=1e-6)


def test_squashing_and_dense_windows_exclude_each_other(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--resize squash with --dense: a net that takes whole images"):
        adopted(tmp_path, net(tmp_path), replace(RGB, preparation=Preparation(resize="squash")), dense=True)


CLIP_MEAN, CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)

# What each preset does with a pixel x from 0 to 255, R, G, B, as the libraries document it.
PRESET_FORMULAS: dict[str, tuple[str, Callable[[np.ndarray], np.ndarray]]] = {
    "torchvision": ("bilinear", lambda x: (x / 255 - MEAN) / STD),
    "timm": ("bicubic", lambda x: (x / 255 - MEAN) / STD),
    "timm-inception": ("bicubic", lambda x: (x / 255 - 0.5) / 0.5),
    "keras-tf": ("bilinear", lambda x: x / 127.5 - 1),
    "keras-caffe": ("bilinear", lambda x: x[..., ::-1] - [103.939, 116.779, 123.68]),
    "ultralytics": ("bilinear", lambda x: x / 255),
    "clip": ("bicubic", lambda x: (x / 255 - CLIP_MEAN) / CLIP_STD),
    "hf-vit": ("bilinear", lambda x: (x / 255 - 0.5) / 0.5),
}


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_the_preprocessing_of_its_library(name: Preset) -> None:
    interpolation, formula = PRESET_FORMULAS[name]
    image = golden_image(5, 9)
    # float32: numbers of up to 255 are rounded to 2e-5
    np.testing.assert_allclose(PRESETS[name].apply(image), formula(image.astype(float)), rtol=1e-5, atol=3e-5)
    assert PRESETS[name].interpolation == interpolation


def test_options_override_single_values_of_a_preset(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, model = net(tmp_path), tmp_path / "model.onnx"
    command = ["adopt", str(path), "--classes", str(write_classes(tmp_path)), "-o", str(model), "--preset"]
    assert run([*command, "timm-inception", "--std", "0.25,0.3,0.2", "--channels", "bgr"]) == 0
    session = open_session(model, "cpu")
    plain = ReferenceNet(path, mean=(0.5,) * 3, std=(0.25, 0.3, 0.2), bgr=True, **BICUBIC)
    (result,) = classify_images(session, [decode_rgb(PHOTOS[0])], build_protocol("center", session.contract))
    np.testing.assert_allclose(result.scores, plain.center(PHOTOS[0]), rtol=0, atol=TOLERANCE)
    model.unlink()
    capsys.readouterr()
    for words, message in (
        (["torchvision", "--range", "255"], "almost 0 for pixels from 0 to 255.*omit --range 255"),
        (["keras-caffe", "--range", "1"], "above 1, but pixels range from 0 to 1.*add --range 255"),
    ):
        assert run([*command, *words]) == 2
        assert re.search(message, capsys.readouterr().err)
        assert not model.exists()


def test_a_preset_for_a_net_that_takes_bytes_is_refused_and_nothing_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, model = net(tmp_path, from_bytes, **BYTES), tmp_path / "model.onnx"
    command = ["adopt", str(path), "--classes", str(write_classes(tmp_path)), "-o", str(model)]
    assert run([*command, "--preset", "torchvision"]) == 2
    assert "takes bytes, so the net subtracts the mean itself. Omit --preset" in capsys.readouterr().err
    assert not model.exists()
    assert run(command) == 0


def test_adopting_needs_neither_torch_nor_safetensors(tmp_path: Path) -> None:
    model = tmp_path / "model.onnx"
    code = (
        "import sys; sys.modules.update(torch=None, safetensors=None)\n"  # whose import then fails
        "from prelunet.evaluator.cli import main; main()"
    )
    files = [str(net(tmp_path)), "--classes", str(write_classes(tmp_path)), "-o", str(model)]
    command = [sys.executable, "-c", code, "adopt", *files, "--preset", "torchvision"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert open_session(model, "cpu").contract.classes[3].name == "thing 3"


def test_a_path_that_is_no_utf8_is_refused_by_its_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, classes = net(tmp_path), write_classes(tmp_path)
    odd = tmp_path / "\udcff.onnx"
    numbers = ["--mean", "0.5", "--std", "0.2", "--classes", str(classes)]
    assert run(["adopt", str(path), *numbers, "-o", str(odd)]) == 2
    path.rename(odd)
    assert run(["adopt", str(odd), *numbers, "-o", str(tmp_path / "o.onnx")]) == 2
    assert capsys.readouterr().err.count("cannot be encoded as utf-8") == 2


def test_inspect_prints_what_is_known_of_an_adopted_net_and_nothing_more(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    adopted(tmp_path, net(tmp_path))
    model = str(tmp_path / "adopted.onnx")
    assert run(["inspect", model, "--json"]) == 0
    output = json.loads(capsys.readouterr().out)
    assert (output["kind"], output["crop"], output["interpolation"]) == ("adopted", CROP, "bilinear")
    assert output["adopted"]["mean"] == list(MEAN)
    assert len(output["classes"]) == CLASSES
    assert "slopes" not in output
    assert run(["inspect", model]) == 0
    assert f"{CROP}x{CROP} px only" in capsys.readouterr().out
