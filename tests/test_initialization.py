"""Weights before training, and `prelunet init`."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from evaluator.cli import run
from evaluator.contract import ClassEntry
from evaluator.datasets.class_list import read_class_list
from evaluator.errors import UsageError
from training.architectures import ACTIVATIONS, Activation, architecture, parameter_shapes
from training.checkpoints import read_checkpoint
from training.initialization import convolution_std, initial_tensors, parse_classes


@pytest.mark.parametrize(("channels", "std"), [(64, 0.059), (128, 0.042), (256, 0.029), (512, 0.021)])
def test_deviations_for_relu_are_those_that_the_paper_gives_for_vgg_b(channels: int, std: float) -> None:
    assert round(convolution_std(3, channels, slope=0.0), 3) == std


def test_a_linear_activation_halves_the_variance() -> None:
    assert convolution_std(3, 64, slope=1.0) ** 2 == pytest.approx(convolution_std(3, 64, slope=0.0) ** 2 / 2)


@pytest.mark.parametrize(
    ("activation", "slope"), [("prelu", 0.25), ("prelu-shared", 0.25), ("relu", 0.0), ("lrelu", 0.01)]
)
def test_drawn_weights_are_gaussian_with_the_deviation_of_equation_14(activation: Activation, slope: float) -> None:
    net = architecture("demo", activation=activation)
    tensors = initial_tensors(net, 300, seed=4)
    expected = {conv.name: (2 / ((1 + slope**2) * 9 * conv.channels)) ** 0.5 for conv in net.convs}
    expected |= {"fc1": 0.01, "fc2": 0.01, "fc3": 0.001}
    for layer, std in expected.items():
        weights = tensors[f"{layer}.weight"].astype(np.float64)
        # the deviation of n draws is off by 1/sqrt(2n), their mean by 1/sqrt(n): five times that is never seen
        assert weights.std() == pytest.approx(std, rel=5 / (2 * weights.size) ** 0.5), layer
        assert abs(weights.mean()) < 5 * std / weights.size**0.5, layer
        assert (np.abs(weights) > 2 * std).mean() == pytest.approx(0.0455, abs=5 * (0.0455 / weights.size) ** 0.5)


def test_fan_out_counts_not_fan_in() -> None:
    tensors = initial_tensors(architecture("demo"), 10, seed=0)
    narrow_in, narrow_out = tensors["conv2_1.weight"], tensors["conv1_2.weight"]
    assert (narrow_in.shape[:2], narrow_out.shape[:2]) == ((48, 24), (24, 24))
    assert narrow_out.std() / narrow_in.std() == pytest.approx(2**0.5, rel=0.05)  # 5,184 draws: 1 % each


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_biases_start_at_0_and_slopes_at_a_quarter(activation: Activation) -> None:
    net = architecture("demo", activation=activation)
    tensors = initial_tensors(net, 10, seed=0)
    assert {name: t.shape for name, t in tensors.items()} == parameter_shapes(net, 10)
    for name, tensor in tensors.items():
        assert tensor.dtype == np.float32
        if name.endswith(".bias"):
            assert (tensor == 0).all()
        if name.endswith(".slope"):
            assert (tensor == 0.25).all()


def test_every_tensor_and_every_seed_has_its_own_numbers() -> None:
    net = architecture("demo")
    first, again, other = (initial_tensors(net, 10, seed) for seed in (0, 0, 1))
    weights = [name for name in first if name.endswith(".weight")]
    for name in weights:
        assert first[name].tobytes() == again[name].tobytes()
        assert not (first[name] == other[name]).any(), name
    heads = {tuple(np.sign(first[name].ravel()[:40])) for name in weights}
    assert len(heads) == len(weights)


def test_another_number_of_classes_leaves_the_other_layers_alone() -> None:
    net = architecture("demo")
    few, many = initial_tensors(net, 10, seed=0), initial_tensors(net, 11, seed=0)
    for name in few:
        if not name.startswith("fc3"):
            np.testing.assert_array_equal(few[name], many[name])


def test_a_number_of_classes_gives_wnids_that_sort_in_order() -> None:
    assert parse_classes("3") == tuple(ClassEntry(w, w) for w in ("class0000", "class0001", "class0002"))
    wnids = [entry.wnid for entry in parse_classes("10001")]
    assert wnids == sorted(wnids)


@pytest.mark.parametrize(
    "names", [["great white shark", "tench"], ["n00000002\tgreat white shark", "n00000001\ttench"]]
)
def test_a_class_list_is_read_by_init_as_by_adopt(tmp_path: Path, names: list[str]) -> None:
    path = tmp_path / "classes.txt"
    path.write_text("\n".join(names))
    entries = parse_classes(str(path))
    assert entries == read_class_list(path)
    assert [entry.name for entry in entries] == ["great white shark", "tench"]
    path.write_text("n00000001 tench\nn00000002 goldfish\nn00000001 shark\n")
    with pytest.raises(UsageError, match="class 2 repeats the wnid n00000001 of class 0"):
        parse_classes(str(path))


@pytest.mark.parametrize("text", ["0", "100001", "9" * 5000])
def test_a_number_of_classes_without_sense_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="1 to 100000 classes"):
        parse_classes(text)


@pytest.mark.parametrize("text", ["-3", "1.5", "nowhere.txt"])
def test_classes_that_are_neither_number_nor_file_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="neither a number of classes nor an existing file"):
        parse_classes(text)


INIT = ["init", "--arch", "demo", "--classes", "3"]


def test_init_writes_an_untrained_checkpoint_and_says_what(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "net.safetensors"
    assert run([*INIT, "--activation", "prelu-shared", "--crop", "36", "--seed", "7", "-o", str(path)]) == 0
    checkpoint = read_checkpoint(path)
    net = architecture("demo", activation="prelu-shared", crop=36)
    assert checkpoint.architecture == net
    assert checkpoint.mean.tolist() == np.array([123.68, 116.78, 103.94], np.float32).tolist()
    assert checkpoint.recipe is checkpoint.dataset is checkpoint.metrics is None
    for name, tensor in initial_tensors(net, 3, seed=7).items():
        np.testing.assert_array_equal(checkpoint.tensors[name], tensor)
    out = capsys.readouterr().out
    parameters = sum(tensor.size for tensor in checkpoint.tensors.values())
    assert f"{parameters:,} parameters" in out
    assert "multiply-adds for one 36x36 crop" in out


def test_init_twice_with_one_seed_gives_the_same_bytes(tmp_path: Path) -> None:
    for name, seed in (("a", "1"), ("b", "1"), ("c", "2")):
        assert run([*INIT, "--seed", seed, "-o", str(tmp_path / name)]) == 0
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes() != (tmp_path / "c").read_bytes()


def test_init_replaces_an_existing_file_only_when_forced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "net.safetensors"
    path.write_bytes(b"weeks of work")
    assert run([*INIT, "-o", str(path)]) == 2
    assert "exists already" in capsys.readouterr().err
    assert path.read_bytes() == b"weeks of work"
    assert run([*INIT, "-o", str(path), "--force"]) == 0
    assert read_checkpoint(path).architecture.name == "demo"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--arch", "D"], "There are: A, B, C, E, E30, demo"),
        (["--activation", "elu"], "There are: prelu, prelu-shared, relu, lrelu"),
        (["--crop", "9"], "too small for 3x3 bins"),
        (["--crop", "4097"], "4096"),
        (["--crop", "9" * 27], "4096"),
        (["--classes", "none.txt"], "neither a number of classes nor an existing file"),
    ],
)
def test_init_refuses_what_it_cannot_build_and_writes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert run([*INIT, *arguments, "-o", str(tmp_path / "net.safetensors")]) == 2
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_init_needs_no_torch(tmp_path: Path) -> None:
    code = (
        "import sys; sys.modules['torch'] = sys.modules['onnx'] = None\n"
        f"from evaluator.cli import run; sys.exit(run({[*INIT, '-o', str(tmp_path / 'net')]!r}))"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
