"""Weights before training, and `prelunet init`."""

import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import get_args

import numpy as np
import pytest

from prelunet.evaluator.architectures import (
    ACTIVATIONS,
    ARCHITECTURES,
    Activation,
    Architecture,
    architecture,
    parameter_shapes,
)
from prelunet.evaluator.cli import run
from prelunet.evaluator.contract import ClassEntry
from prelunet.evaluator.datasets.labels.class_file import read_class_list
from prelunet.evaluator.errors import UsageError
from prelunet.training.net.checkpoints import read_checkpoint
from prelunet.training.net.initialization import (
    Initialization,
    Rule,
    initial_slope,
    initial_tensors,
    parse_classes,
)

SHAPE = (48, 20, 3, 5)  # of a kernel that takes 20 channels to 48, and is not even square: n_in 300, n_out 720


@pytest.mark.parametrize(("channels", "std"), [(64, 0.059), (128, 0.042), (256, 0.029), (512, 0.021)])
def test_deviations_for_relu_are_those_of_the_paper_for_vgg_b(channels: int, std: float) -> None:
    variance = Initialization("fan-out").convolution_variance((channels, 7, 3, 3), slope=0.0)
    assert round(variance**0.5, 3) == std


def test_a_deviation_of_a_hundredth_shrinks_the_gradient_of_vgg_b_by_17000() -> None:
    # PReLU-nets, section 2.2: from conv10 to conv2 by 1/(5.9·4.2²·2.9²·2.1⁴) = 1/(1.7·10⁴), these being the deviations
    # of Eq. 14 in hundredths
    outputs = (64, 128, 128, 256, 256, 512, 512, 512, 512)  # of conv2 to conv10

    def deviation(initialization: Initialization, channels: int) -> float:
        return initialization.convolution_variance((channels, 7, 3, 3), slope=0.0) ** 0.5

    kept, fixed = Initialization("fan-out"), Initialization("gaussian", std=0.01)
    shrinks = math.prod(deviation(kept, channels) / deviation(fixed, channels) for channels in outputs)
    assert f"{shrinks:.1e}" == "1.7e+04"


@pytest.mark.parametrize(("rule", "fan"), [("fan-in", 300), ("fan-out", 720)])
@pytest.mark.parametrize("slope", [0.0, 0.25, 1.0, -0.5])
def test_rectifier_rules_divide_by_their_fan_and_the_slope_term(rule: Rule, fan: int, slope: float) -> None:
    variance = Initialization(rule).convolution_variance(SHAPE, slope)
    assert 0.5 * (1 + slope**2) * fan * variance == pytest.approx(1, rel=1e-12)  # rounding only


@pytest.mark.parametrize("slope", [0.0, 0.25])
def test_xavier_and_gaussian_do_not_depend_on_the_slope(slope: float) -> None:
    assert Initialization("xavier").convolution_variance(SHAPE, slope, first=True) == 1 / 300
    assert Initialization("gaussian", std=0.03).convolution_variance(SHAPE, slope) == pytest.approx(9e-4, rel=1e-12)


@pytest.mark.parametrize("rule", ["fan-out", "fan-in"])
def test_an_exact_first_layer_counts_no_activation_and_no_other_layer_changes(rule: Rule) -> None:
    half, exact = Initialization(rule), Initialization(rule, first_layer="exact")
    for slope in (0.0, 0.25):
        linear = half.convolution_variance(SHAPE, slope=1.0)
        assert exact.convolution_variance(SHAPE, slope, first=True) == linear
        assert half.convolution_variance(SHAPE, slope, first=True) == half.convolution_variance(SHAPE, slope)
        assert exact.convolution_variance(SHAPE, slope) == half.convolution_variance(SHAPE, slope)


def test_only_the_first_convolution_of_a_net_is_the_first_layer() -> None:
    net = architecture("demo")
    half, exact = (initial_tensors(net, 10, 0, Initialization(first_layer=first)) for first in ("half", "exact"))
    scaled = half["conv1_1.weight"] * np.float32((1.0625 / 2) ** 0.5)
    np.testing.assert_allclose(exact["conv1_1.weight"], scaled, rtol=1e-6)  # float32: one more rounding
    for name in set(half) - {"conv1_1.weight"}:
        assert half[name].tobytes() == exact[name].tobytes(), name


def drawn_by_hand(net: Architecture, initialization: Initialization) -> dict[str, float]:
    """Return the deviation that each layer's weights should have, from the equations as the paper prints them."""
    slope, stds, inputs = initial_slope(net.activation), {}, 3
    for conv in net.convs:
        fan_in, fan_out = conv.kernel**2 * inputs, conv.kernel**2 * conv.channels
        stds[conv.name] = {
            "fan-out": (2 / ((1 + slope**2) * fan_out)) ** 0.5,
            "fan-in": (2 / ((1 + slope**2) * fan_in)) ** 0.5,
            "xavier": fan_in**-0.5,
            "xavier-all": fan_in**-0.5,
            "gaussian": initialization.std,
        }[initialization.rule]
        inputs = conv.channels
    fc_stds = initialization.fc_stds
    if initialization.rule == "xavier-all":  # demo's fc1 reads 14 bins of 96 channels
        fc_stds = (14 * 96) ** -0.5, 256**-0.5, 256**-0.5
    return stds | dict(zip(("fc1", "fc2", "fc3"), fc_stds, strict=True))


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("rule", get_args(Rule))
def test_drawn_weights_have_the_deviation_and_the_distribution_of_their_rule(
    rule: Rule, activation: Activation
) -> None:
    net = architecture("demo", activation=activation)
    initialization = Initialization(rule, std=0.02, fc_stds=(0.011, 0.006, 0.002))
    tensors = initial_tensors(net, 300, seed=4, initialization=initialization)
    for layer, std in drawn_by_hand(net, initialization).items():
        weights = tensors[f"{layer}.weight"].astype(np.float64)
        # The deviation of n draws has a standard error of 1/sqrt(2n), their mean of 1/sqrt(n); five standard errors
        assert weights.std() == pytest.approx(std, rel=5 / (2 * weights.size) ** 0.5), layer
        assert abs(weights.mean()) < 5 * std / weights.size**0.5, layer
        if rule == "xavier-all" or (rule == "xavier" and layer.startswith("conv")):
            assert np.abs(weights).max() == pytest.approx(3**0.5 * std, rel=10 / weights.size), layer  # the edge
            assert np.abs(weights).max() <= 3**0.5 * std * (1 + 1e-6), layer
        else:  # 4.55 % of a normal distribution lie beyond two deviations
            assert (np.abs(weights) > 2 * std).mean() == pytest.approx(0.0455, abs=5 * (0.0455 / weights.size) ** 0.5)


def test_by_default_weights_are_numpy_normals_times_the_deviation_of_equation_14() -> None:
    assert Initialization() == Initialization("fan-out", 0.01, "half", (0.01, 0.01, 0.001))
    net = architecture("demo")
    stds, tensors = drawn_by_hand(net, Initialization()), initial_tensors(net, 10, seed=3)
    for index, (name, tensor) in enumerate(tensors.items()):
        layer, kind = name.split(".")
        if kind == "weight":  # exact bytes: runs and nets of earlier versions depend on them
            numbers = np.random.default_rng((3, index)).standard_normal(tensor.shape, dtype=np.float32)
            np.testing.assert_array_equal(tensor, numbers * np.float32(stds[layer]), err_msg=name)


@pytest.mark.parametrize("other", ["relu", "lrelu", "prelu-shared"])
def test_nets_that_differ_only_in_activation_start_from_the_same_random_numbers(other: Activation) -> None:
    tensors = initial_tensors(architecture("demo"), 10, seed=3)
    others = initial_tensors(architecture("demo", activation=other), 10, seed=3)
    factor = math.sqrt((1 + initial_slope("prelu") ** 2) / (1 + initial_slope(other) ** 2))  # Eq. 15
    for name, tensor in others.items():
        if name.endswith(".weight"):
            expected = tensors[name] * (1 if name.startswith("fc") else factor)
            np.testing.assert_allclose(tensor, expected, rtol=1e-6, err_msg=name)  # rounding to float32, twice


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (
            lambda: Initialization("xavier", first_layer="exact"),
            "'xavier' has no such factor. Choose one of these rules, or",
        ),
        (lambda: Initialization("gaussian", std=0.0), "weights 0.0: should be from 1e-6 to 100"),
        (lambda: Initialization("gaussian", std=-0.01), "weights -0.01: should be from"),
        (lambda: Initialization("gaussian", std=math.nan), "weights nan: should be from"),
        (lambda: Initialization("gaussian", std=math.inf), "weights inf: should be from"),
        (lambda: Initialization(fc_stds=(0.01, 0.0, 0.001)), r"fc1, fc2, fc3 \[0.01, 0.0, 0.001\]: should be three"),
        (lambda: Initialization(fc_stds=(0.01, 0.01)), r"\[0.01, 0.01\]: should be three numbers"),  # type: ignore[arg-type]
    ],
)
def test_an_invalid_initialization_cannot_exist(build: Callable[[], Initialization], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        build()


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


@pytest.mark.parametrize("rule", get_args(Rule))
def test_every_tensor_and_every_seed_has_its_own_random_numbers(rule: Rule) -> None:
    net = architecture("demo")
    first, again, other = (initial_tensors(net, 10, seed, Initialization(rule)) for seed in (0, 0, 1))
    weights = [name for name in first if name.endswith(".weight")]
    for name in weights:
        assert first[name].tobytes() == again[name].tobytes()
        assert not (first[name] == other[name]).any(), name
    heads = {tuple(np.sign(first[name].ravel()[:40])) for name in weights}
    assert len(heads) == len(weights)


def test_another_number_of_classes_does_not_change_the_other_layers() -> None:
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
def test_init_reads_class_lists_as_adopt_does(tmp_path: Path, names: list[str]) -> None:
    path = tmp_path / "classes.txt"
    path.write_text("\n".join(names))
    entries = parse_classes(str(path))
    assert entries == read_class_list(path)
    assert [entry.name for entry in entries] == ["great white shark", "tench"]
    assert parse_classes("imagenet-1k") == read_class_list(Path("imagenet-1k"))
    path.write_text("n00000001 tench\nn00000002 goldfish\nn00000001 shark\n")
    with pytest.raises(UsageError, match="class 2 repeats the wnid n00000001 of class 0"):
        parse_classes(str(path))


@pytest.mark.parametrize("text", ["0", "100001", "9" * 5000])
def test_a_number_of_classes_out_of_range_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="from 1 to 100000"):
        parse_classes(text)


@pytest.mark.parametrize("text", ["-3", "1.5", "nowhere.txt"])
def test_classes_that_are_neither_number_nor_file_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="neither a number, nor an existing file, nor imagenet-1k"):
        parse_classes(text)


INIT = ["init", "--arch", "demo", "--classes", "3"]


def test_init_writes_an_untrained_checkpoint_and_prints_its_size(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "net.safetensors"
    assert run([*INIT, "--activation", "prelu-shared", "--crop", "36", "--seed", "7", "-o", str(path)]) == 0
    checkpoint = read_checkpoint(path)
    net = architecture("demo", activation="prelu-shared", crop=36)
    assert checkpoint.architecture == net
    assert checkpoint.mean.tolist() == np.array([123.68, 116.78, 103.94], np.float32).tolist()
    assert checkpoint.recipe == {"init": "fan-out", "first_layer": "half", "seed": 7}
    assert checkpoint.dataset is checkpoint.metrics is None
    for name, tensor in initial_tensors(net, 3, seed=7).items():
        np.testing.assert_array_equal(checkpoint.tensors[name], tensor)
    out = capsys.readouterr().out
    parameters = sum(tensor.size for tensor in checkpoint.tensors.values())
    assert f"{parameters:,} parameters" in out
    assert "multiply-adds for one 36x36 crop" in out


@pytest.mark.parametrize(
    ("arguments", "initialization"),
    [
        (["--init", "fan-in"], Initialization("fan-in")),
        (["--init", "fan-in", "--first-layer", "exact"], Initialization("fan-in", first_layer="exact")),
        (["--init", "gaussian"], Initialization("gaussian", std=0.01)),
        (["--init", "gaussian", "--init-std", "0.03"], Initialization("gaussian", std=0.03)),
    ],
)
def test_init_draws_the_weights_by_the_requested_rule(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], initialization: Initialization
) -> None:
    path = tmp_path / "net.safetensors"
    assert run([*INIT, *arguments, "--seed", "5", "-o", str(path)]) == 0
    found = read_checkpoint(path).tensors
    for name, tensor in initial_tensors(architecture("demo"), 3, 5, initialization).items():
        np.testing.assert_array_equal(found[name], tensor)
    assert f"untrained ({initialization.rule}, seed 5)" in capsys.readouterr().out


def test_init_twice_with_one_seed_gives_the_same_bytes(tmp_path: Path) -> None:
    for name, seed in (("a", "1"), ("b", "1"), ("c", "2")):
        assert run([*INIT, "--seed", seed, "-o", str(tmp_path / name)]) == 0
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes() != (tmp_path / "c").read_bytes()


def test_inspect_shows_how_the_weights_were_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "net.safetensors"
    assert run([*INIT, "--init", "gaussian", "--init-std", "0.03", "--seed", "5", "-o", str(path)]) == 0
    assert run(["inspect", str(path)]) == 0
    assert "recipe first_layer half, init gaussian, init_std 0.03, seed 5" in " ".join(capsys.readouterr().out.split())


def test_init_replaces_an_existing_file_only_when_forced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "net.safetensors"
    path.write_bytes(b"weeks of work")
    assert run([*INIT, "-o", str(path)]) == 2
    assert "already exists" in capsys.readouterr().err
    assert path.read_bytes() == b"weeks of work"
    assert run([*INIT, "-o", str(path), "--force"]) == 0
    assert read_checkpoint(path).architecture.name == "demo"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--arch", "D"], f"Valid architectures: {', '.join(ARCHITECTURES)}"),
        (["--activation", "elu"], "'elu' is not one of 'prelu', 'prelu-shared', 'relu', 'lrelu'"),
        (["--crop", "9"], "too small for 3x3 bins"),
        (["--crop", "4097"], "4096"),
        (["--crop", "9" * 27], "4096"),
        (["--init", "he"], "'he' is not one of 'fan-out', 'fan-in', 'xavier', 'xavier-all', 'gaussian'"),
        (["--init", "gaussian", "--init-std", "-1"], "should be from 1e-6 to 100"),
        (["--init-std", "0.03"], "Add --init gaussian"),
        (["--first-layer", "whole"], "'whole' is not one of 'half', 'exact'"),
        (["--init", "xavier", "--first-layer", "exact"], "Choose one of these rules, or first layer 'half'"),
        (["--classes", "none.txt"], "neither a number, nor an existing file, nor imagenet-1k"),
    ],
)
def test_init_refuses_invalid_options_and_writes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert run([*INIT, *arguments, "-o", str(tmp_path / "net.safetensors")]) == 2
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_init_reports_a_missing_folder_before_drawing_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        "prelunet.training.verbs.init.initial_tensors", lambda *_arguments: pytest.fail("weights are drawn")
    )
    assert run([*INIT, "-o", str(tmp_path / "missing/net.safetensors")]) == 2
    assert f"the folder {tmp_path / 'missing'} does not exist" in capsys.readouterr().err


def test_init_needs_no_torch(tmp_path: Path) -> None:
    code = (
        "import sys; sys.modules['torch'] = sys.modules['onnx'] = None\n"
        f"from prelunet.evaluator.cli import run; sys.exit(run({[*INIT, '-o', str(tmp_path / 'net')]!r}))"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
