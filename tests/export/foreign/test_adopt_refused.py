"""Nets that cannot be adopted are refused with the reason, and no file is left."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from prelunet.evaluator.datasets.labels.class_file import read_class_list
from prelunet.evaluator.errors import ContractError, EnvironmentFault, PreluNetError, UsageError
from prelunet.export.foreign.adopt import AdoptOptions, adopt
from prelunet.export.foreign.sidecars import ClassList
from prelunet.training.importing.preprocessing import Preprocessing, parse_channel_values
from tests.export.foreign.foreign_nets import (
    BYTES,
    CLASSES,
    CROP,
    MEAN,
    RGB,
    STD,
    Build,
    NetBuilder,
    adopted,
    class_list,
    features,
    from_bytes,
    net,
    of_one,
    of_two,
    softmax_end,
)


def sigmoid(n: NetBuilder, x: str) -> str:
    return n.add("Sigmoid", features(n, x))


def nan(n: NetBuilder, x: str) -> str:
    return n.add("Sqrt", features(n, x))


def random_dropout(n: NetBuilder, x: str) -> str:
    training = n.constant(np.array(True))
    return n.add("Dropout", features(n, x), n.constant(np.array(0.5, np.float32)), training)


def single(n: NetBuilder, x: str) -> str:
    return n.add("ReduceMax", features(n, x), n.constant(np.array([1], np.int64)), keepdims=1)


def best_class(n: NetBuilder, x: str) -> str:
    return n.add("ArgMax", features(n, x), axis=1)


def all_images(n: NetBuilder, x: str) -> str:
    return n.add("ReduceMax", features(n, x), n.constant(np.array([0], np.int64)), keepdims=0)


def mixing_with_attributes(n: NetBuilder, x: str) -> str:
    """Subtract the mean over the batch, in an old opset."""
    return features(n, n.add("Sub", x, n.add("ReduceMean", x, axes=[0], keepdims=1)))


def feature_map(n: NetBuilder, x: str) -> str:
    return n.add("Relu", x)


def repeats(n: NetBuilder, x: str) -> str:
    """Return two rows per image."""
    row = features(n, x)
    return n.add("Concat", row, row, axis=0)


BAD_NETS: dict[str, tuple[Build, dict[str, Any], dict[str, Any], type[PreluNetError], str]] = {
    "rank 2": (features, {"shape": ["N", 4800]}, {}, ContractError, "'x' has rank 2"),
    "no shape": (features, {"shape": ["N"]}, {}, ContractError, "'x' has rank 1"),
    "two channels": (features, {"shape": ["N", 2, CROP, CROP]}, {}, ContractError, "?x2x40x40 has no axis of 3 or 1"),
    "open axes": (features, {"shape": list("abcd")}, {}, UsageError, "specify its channel axis with --layout"),
    "wrong layout": (features, {}, {"layout": "NHWC"}, UsageError, "--layout NHWC would give 40 channels"),
    "not square": (features, {"shape": [1, 3, 40, 48]}, {}, ContractError, "40x48 pixels, but crops are square"),
    "another crop": (
        features,
        {},
        {"crop": 44},
        UsageError,
        "--crop 44, given or from the files beside it, but it takes images of 40x40",
    ),
    "no crop": (features, {"side": "S"}, {"crop": None}, UsageError, "images of any size. Specify"),
    "int8": (features, {"input_type": TensorProto.INT8}, {}, ContractError, "'x' is INT8, not FLOAT or"),
    "no mean": (
        features,
        {},
        {"preprocessing": Preprocessing(None, None)},
        UsageError,
        "Give --preset, or --mean and --std",
    ),
    "mean for bytes": (from_bytes, BYTES, {}, UsageError, "takes bytes, so the net subtracts the mean itself"),
    "opset 6": (features, {"opset": 6}, {}, ContractError, "opset 6, but the oldest opset supported by runtimes is 7"),
    "opset 8": (
        of_one,
        {"batch": 1, "opset": 8},
        {},
        ContractError,
        "does not run on several images together (its Reshape node fails), and opset 8 has no loop over images. "
        "Export the net with a dynamic batch size, or with opset 9 or newer",
    ),
    "opset 8, mixes its batch": (
        mixing_with_attributes,
        {"opset": 8},
        {},
        ContractError,
        "scores an image by the others in its batch, as with their mean or their range (scores of the same image run",
    ),
    "NaN": (nan, {}, {}, ContractError, "returns NaN or infinity"),
    "random": (random_dropout, {}, {}, ContractError, "returns different scores for the same image"),
    "one number": (single, {}, {}, UsageError, "lists 7 classes, but {} has 1 score, that of the second"),
    "best class": (
        best_class,
        {"output_type": TensorProto.INT64},
        {},
        ContractError,
        "the best class (argmax): export",
    ),
    "one row for all": (all_images, {"batch": 2}, {}, ContractError, "has shape (7,), but a classifier returns (2, "),
    "one score of many": (features, {}, {"kind": "sigmoid"}, UsageError, "--kind sigmoid, but it returns 7 scores"),
    "feature map": (feature_map, {}, {}, ContractError, "has shape (1, 3, 40, 40), but a classifier"),
    "two rows": (repeats, {}, {}, ContractError, "has shape (2, 7), but a classifier"),
    "sigmoid": (sigmoid, {}, {}, UsageError, "as after a sigmoid"),
    "logits as softmax": (features, {}, {"kind": "softmax"}, UsageError, "not probabilities (sums"),
    "softmax as logits": (softmax_end, {}, {"kind": "logits"}, UsageError, "are probabilities (sums"),
    "bad name": (features, {}, {"name": "a\x1bb"}, UsageError, "lone surrogates. Change --name"),
    "does not run": (of_two, {"batch": 1}, {}, ContractError, "onnxruntime cannot"),
}


@pytest.mark.parametrize("name", BAD_NETS)
def test_what_is_no_classifier_of_one_image_size_is_refused_and_an_old_file_stays(name: str, tmp_path: Path) -> None:
    build, written, options, error, message = BAD_NETS[name]
    path = net(tmp_path, build, **written)
    output = tmp_path / "adopted.onnx"
    output.write_bytes(b"old")
    with pytest.raises(error) as refused:
        adopted(tmp_path, path, **options)
    assert message.replace("{}", str(path)) in str(refused.value)
    assert output.read_bytes() == b"old"
    assert sorted(file.name for file in tmp_path.iterdir()) == ["adopted.onnx", "classes.txt", "net.onnx"]


def two_inputs(model: onnx.ModelProto) -> None:
    model.graph.input.append(helper.make_tensor_value_info("mask", TensorProto.FLOAT, [1]))


def a_sequence(model: onnx.ModelProto) -> None:
    model.graph.node.append(helper.make_node("SequenceConstruct", [model.graph.output[0].name], ["all"]))
    del model.graph.output[:]
    model.graph.output.append(helper.make_tensor_sequence_value_info("all", TensorProto.FLOAT, None))


def without_shape(model: onnx.ModelProto) -> None:
    model.graph.input[0].type.tensor_type.ClearField("shape")


def unknown_operator(model: onnx.ModelProto) -> None:
    model.graph.node[2].op_type = "Frobnicate"


def three_gigabytes(model: onnx.ModelProto) -> None:
    tensor = TensorProto(name="huge", data_type=TensorProto.FLOAT, dims=[3, 2**28], data_location=TensorProto.EXTERNAL)
    tensor.external_data.add(key="location", value="huge.bin")
    model.graph.initializer.append(tensor)


def declares(**kinds: int) -> Callable[[onnx.ModelProto], None]:
    def change(model: onnx.ModelProto) -> None:
        for place, kind in kinds.items():
            if place == "initializer":
                model.graph.initializer[0].data_type = kind
            else:
                getattr(model.graph, place)[0].type.tensor_type.elem_type = kind

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (two_inputs, r"inputs 'x', 'mask', but a classifier takes one"),
        (a_sequence, r"output 'all' is a sequence, not a tensor"),
        (without_shape, r"input 'x' has no declared shape"),
        (unknown_operator, r"onnxruntime cannot load this net .*Frobnicate"),
        (three_gigabytes, r"3\.22 GB of weights, but one ONNX file can hold less than 2\.13 GB"),
        (declares(initializer=99), r"weights 'c0' have an unknown type \(99\)"),
        (declares(input=99), r"input 'x' is of an unknown type \(99\), not FLOAT"),
        (declares(output=99), r"output 'v12' is of an unknown type \(99\), not FLOAT"),
        (declares(input=TensorProto.DOUBLE), r"is DOUBLE, not .* Convert the net to single or half precision"),
        (declares(input=TensorProto.BFLOAT16), r"is BFLOAT16, not .* Convert the net to single or half precision"),
    ],
)
def test_a_file_that_declares_what_no_classifier_has_is_refused(
    change: Callable[[onnx.ModelProto], None], message: str, tmp_path: Path
) -> None:
    path = net(tmp_path)
    model = onnx.load(path)
    change(model)
    onnx.save(model, path)
    with pytest.raises(ContractError, match=message):
        adopted(tmp_path, path)


@pytest.mark.parametrize("content", [b"", b"hello", b"\x08\x07\x12\x00", b"\x89PNG\r\n\x1a\n" + bytes(50)])
def test_bytes_that_are_no_onnx_are_refused(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "net.onnx"
    path.write_bytes(content)
    with pytest.raises(ContractError, match=r"net\.onnx: not an ONNX model"):
        adopted(tmp_path, path)


def test_a_class_list_of_another_length_is_refused_with_a_hint_for_a_background_class(tmp_path: Path) -> None:
    path = net(tmp_path)
    for count, message in (
        (CLASSES - 1, "lists 6 classes, but .* has 7. Nets with 1001"),
        (9, "lists 9 classes, .* has 7$"),
    ):
        with pytest.raises(UsageError, match=message):
            adopt(path, tmp_path / "o.onnx", class_list(tmp_path, count), AdoptOptions(RGB))
    imagenet = ClassList(read_class_list(Path("imagenet-1k")), "imagenet-1k")
    with pytest.raises(UsageError, match=r"^imagenet-1k: lists 1000 classes, but .* has 7$"):
        adopt(path, tmp_path / "o.onnx", imagenet, AdoptOptions(RGB))
    assert not (tmp_path / "o.onnx").exists()


def test_a_graph_that_deviates_from_the_net_never_becomes_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = net(tmp_path)
    plain = Preprocessing.apply
    monkeypatch.setattr(Preprocessing, "apply", lambda self, image: plain(self, image) + np.float32(0.01))
    with pytest.raises(
        ContractError,
        match=r"is computed otherwise behind its preprocessing \(scores of the same image run alone differ",
    ):
        adopted(tmp_path, path)
    assert not (tmp_path / "adopted.onnx").exists()


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ({"mean": (123.7, 116.8, 103.9), "std": (58.4, 57.1, 57.4)}, "pixels range from 0 to 1.*add --range 255"),
        ({"mean": MEAN, "std": STD, "pixel_range": 255}, "almost 0.*omit --range 255"),
        ({"mean": MEAN, "std": (0.2, 0, 0.2)}, "should be above 0"),
        ({"mean": (float("nan"), 0, 0), "std": STD}, "finite numbers"),
        ({"mean": MEAN, "std": None}, "require each other"),
        ({"mean": MEAN, "std": STD, "pixel_range": 127}, "should be 1 or 255"),
    ],
)
def test_preprocessing_that_contradicts_itself_is_refused(numbers: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Preprocessing(**numbers)


def test_one_number_stands_for_all_channels_and_anything_but_one_or_three_is_refused() -> None:
    assert parse_channel_values("0.5", "--mean") == (0.5, 0.5, 0.5)
    assert parse_channel_values("1,2,3", "--mean") == (1, 2, 3)
    for given in ("1,2", "a", "", "1,2,3,4"):
        with pytest.raises(UsageError, match=r"--mean .*three comma-separated numbers"):
            parse_channel_values(given, "--mean")


def test_a_machine_with_too_little_memory_is_not_the_nets_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: object, **options: object) -> None:
        raise MemoryError

    path = net(tmp_path)
    monkeypatch.setattr("onnxruntime.InferenceSession", full)
    with pytest.raises(EnvironmentFault, match=r"net\.onnx: too little memory left to load this net"):
        adopted(tmp_path, path)


def test_a_model_file_is_not_adopted_again(tmp_path: Path) -> None:
    adopted(tmp_path, net(tmp_path))
    with pytest.raises(UsageError, match="already a model file of prelunet"):
        adopt(tmp_path / "adopted.onnx", tmp_path / "twice.onnx", class_list(tmp_path), AdoptOptions(RGB))
    assert not (tmp_path / "twice.onnx").exists()
