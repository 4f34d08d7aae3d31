"""Hostile and careless input of `adopt`: overwritten inputs, nets that mix a batch, files that crash the parser."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from prelunet.evaluator.cli import run
from prelunet.evaluator.contract import golden_image
from prelunet.evaluator.engine.runtimes.onnx import RawOnnxModel
from prelunet.evaluator.errors import ContractError, UsageError
from prelunet.export.dense.export import export_checkpoint
from prelunet.training.importing.preprocessing import Preprocessing
from tests.export.foreign.foreign_nets import (
    CLASSES,
    CROP,
    HALF,
    RGB,
    Build,
    NetBuilder,
    adopted,
    features,
    net,
    photo,
    write_classes,
)

NUMBERS = ["--mean", "0.5", "--std", "0.2"]


# --- inputs are not overwritten


@pytest.mark.parametrize("target", ["net.onnx", "classes.txt", "a link", "a hard link"])
def test_no_input_file_is_overwritten_even_with_force(
    target: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, classes = net(tmp_path), write_classes(tmp_path)
    (tmp_path / "a link").symlink_to("net.onnx")
    os.link(classes, tmp_path / "a hard link")
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    command = ["adopt", str(path), "--classes", str(classes), "-o", str(tmp_path / target), *NUMBERS, "--force"]
    assert run(command) == 2
    assert f"{target}: is the input itself" in capsys.readouterr().err
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before
    assert (tmp_path / "a link").is_symlink()


def test_a_pipe_is_refused_without_waiting(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    classes = write_classes(tmp_path)
    os.mkfifo(tmp_path / "net.onnx")
    command = ["adopt", str(tmp_path / "net.onnx"), "--classes", str(classes), "-o", str(tmp_path / "m.onnx"), *NUMBERS]
    assert run(command) == 2
    assert "net.onnx: not a regular file, but a pipe" in capsys.readouterr().err


def test_export_does_not_replace_its_checkpoint(tmp_path: Path) -> None:
    from prelunet.training.net.checkpoints import write_checkpoint
    from tests.helpers.tiny_nets import tiny_checkpoint

    path = tmp_path / "net.safetensors"
    write_checkpoint(path, tiny_checkpoint())
    before = path.read_bytes()
    with pytest.raises(UsageError, match=r"is the input itself .*; choose another name"):
        export_checkpoint(path, path)
    assert path.read_bytes() == before


# --- nets that mix the images of a batch


def dynamic_range(n: NetBuilder, x: str) -> str:
    """Quantize by the range of the whole batch."""
    n.nodes.append(helper.make_node("DynamicQuantizeLinear", [x], ["q", "scale", "zero"]))
    return features(n, n.add("DequantizeLinear", "q", "scale", "zero"))


def stretched(n: NetBuilder, x: str) -> str:
    """Stretch the range of the whole batch to 0..1."""
    low, high = n.add("ReduceMin", x, keepdims=0), n.add("ReduceMax", x, keepdims=0)
    return features(n, n.add("Div", n.add("Sub", x, low), n.add("Sub", high, low)))


def other_beyond(images: int) -> Build:
    """Return different scores for batches larger than this."""

    def build(n: NetBuilder, x: str) -> str:
        y = features(n, x)
        size = n.add("Gather", n.add("Shape", x), n.constant(np.array(0, np.int64)))
        more = n.add("Greater", size, n.constant(np.array(images, np.int64)))
        branches = {
            name: helper.make_graph(
                [helper.make_node(op, [y], [op])],
                name,
                [],
                [helper.make_tensor_value_info(op, TensorProto.FLOAT, None)],
            )
            for name, op in (("then_branch", "Neg"), ("else_branch", "Identity"))
        }
        return n.add("If", more, **branches)

    return build


@pytest.mark.parametrize("build", [dynamic_range, stretched, other_beyond(4), other_beyond(8)])
def test_a_net_that_measures_its_batch_sees_one_image_at_a_time(build: Build, tmp_path: Path) -> None:
    session, found = adopted(tmp_path, net(tmp_path, build))
    assert "scores of the same image run together differ by" in found.sequential_reason
    golden = golden_image(CROP, CROP)
    pale = 128 + golden // 32
    images = np.stack([pale, *[np.roll(golden, step, 1) for step in range(11)]])
    sizes = np.full((len(images), 2), CROP, np.int64)
    alone = session.run(images[:1], sizes[:1]).scores[0]
    np.testing.assert_allclose(session.run(images, sizes).scores[0], alone, atol=1e-6)  # sums in another order


def not_in_the_dark(n: NetBuilder, x: str) -> str:
    """Take the square root of values that are negative for a dark picture."""
    light = n.add("ReduceMean", x, n.constant(np.array([1, 2, 3], np.int64)), keepdims=0)
    root = n.add("Sqrt", n.add("Add", light, n.constant(np.array(1.8, np.float32))))
    return n.add("Mul", features(n, x), n.add("Unsqueeze", root, n.constant(np.array([1], np.int64))))


def test_a_net_that_fails_on_dark_images_only_is_refused_and_the_image_named(tmp_path: Path) -> None:
    path = net(tmp_path, not_in_the_dark)
    bright = RawOnnxModel(path).run({"x": RGB.apply(golden_image(CROP, CROP)).transpose(2, 0, 1)[None]}, "v17")
    assert np.isfinite(bright).all(), "a net that fails on everything shows nothing"
    with pytest.raises(ContractError, match=r"NaN or infinity for an image \((a dark picture|all black)\)"):
        adopted(tmp_path, path)


def noisy(scale: float) -> Build:
    def build(n: NetBuilder, x: str) -> str:
        y = features(n, x)
        return n.add("Add", y, n.add("RandomNormalLike", y, scale=scale))

    return build


@pytest.mark.parametrize("scale", [1.0, 1e-4])
def test_a_net_that_draws_random_numbers_is_refused(scale: float, tmp_path: Path) -> None:
    with pytest.raises(ContractError, match=r"different scores for the same image on each run\. Export it in eval"):
        adopted(tmp_path, net(tmp_path, noisy(scale)))


def test_a_net_may_hold_random_operators_that_change_nothing(tmp_path: Path) -> None:
    def silenced(n: NetBuilder, x: str) -> str:
        y = features(n, x)
        drawn = n.add("RandomNormalLike", y)
        return n.add("Add", y, n.add("Mul", drawn, n.constant(np.array(0, np.float32))))

    _, found = adopted(tmp_path, net(tmp_path, silenced))
    assert not found.sequential_reason


# --- invalid means and standard deviations


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    ("mean", "std", "pixel_range", "message"),
    [
        (0.0, 58.0, 1, r"--std 58,58,58: above 1, .*add --range 255"),
        (0.5, 1.01, 1, r"--std 1\.01.*add --range 255"),
        (300.0, 58.0, 255, r"--mean 300,300,300: above 255"),
        (-0.1, 0.2, 1, r"--mean -0\.1.*: below 0"),
        (-5.0, 58.0, 255, r"--mean -5.*: below 0, but pixels range from 0 to 255"),
        (0.5, 0.0, 1, r"--std 0,0,0: should be above 0"),
    ],
)
def test_numbers_that_pixels_cannot_have_are_refused(mean: float, std: float, pixel_range: int, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Preprocessing((mean,) * 3, (std,) * 3, pixel_range)


@pytest.mark.parametrize(("mean", "std", "pixel_range"), [(1.0, 1.0, 1), (0.0, 1.0, 255), (255.0, 0.5, 255)])
def test_the_limits_of_the_range_are_within_it(mean: float, std: float, pixel_range: int) -> None:
    Preprocessing((mean,) * 3, (std,) * 3, pixel_range)


@pytest.mark.filterwarnings("error")
def test_numbers_beyond_half_precision_are_refused_without_a_warning(tmp_path: Path) -> None:
    with pytest.raises(ContractError, match="NaN or infinity"):
        adopted(tmp_path, net(tmp_path, **HALF), Preprocessing((0.0,) * 3, (1e-30,) * 3))


# --- sizes beyond memory, and files that were changed by hand


@pytest.mark.parametrize(
    ("written", "options", "message"),
    [
        ({"side": 40_000}, {"crop": None}, r"crops of 40000x40000 pixels, but the maximum is 4096"),
        ({"side": "S"}, {"crop": 4097}, r"crops of 4097x4097 pixels"),
    ],
)
def test_sizes_beyond_all_memory_are_refused_before_any_attempt(
    written: dict[str, Any], options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ContractError, match=message):
        adopted(tmp_path, net(tmp_path, **written), **options)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_side": 400}, "its graph takes images of 40x40 pixels and nothing else"),
        (
            {"crop": 30, "trunk": [[30, 30, 0]], "trunk_stride": 30, "min_side": 30, "max_side": 30, "golden": []}
            | {"default_scales": [30]},
            "states a crop of 30",
        ),
        ({"golden": [{"height": CROP, "width": CROP, "scores": [10**400] * CLASSES, "logits": [0] * CLASSES}]}, "malf"),
        (
            {"architecture": {"name": "n", "activation": "unknown", "multiply_adds": 10**400}},
            "multiply_adds should be at most",
        ),
    ],
)
def test_an_adopted_file_that_was_changed_by_hand_is_refused_with_the_fix(
    changes: dict[str, Any], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tampered = _tampered(tmp_path, changes)
    (tmp_path / "a.png").write_bytes(photo(61, 83, "PNG"))
    for command in (
        ["inspect"],
        ["verify"],
        ["classify", str(tmp_path / "a.png"), "--model"],
        ["protocols", "--model"],
    ):
        assert run([*command, str(tampered)]) == 3
        output = capsys.readouterr().err
        assert message in output
        assert "prelunet adopt" in output


@pytest.mark.parametrize("stated", ["many", 0, -5, 1.5, True])
def test_inspect_refuses_a_cost_that_is_no_count(
    stated: object, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tampered = _tampered(tmp_path, {"architecture": {"name": "n", "activation": "unknown", "multiply_adds": stated}})
    assert run(["inspect", str(tampered)]) == 3
    assert "at `$.multiply_adds`)" in capsys.readouterr().err


def test_a_file_with_a_key_twice_in_its_metadata_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tampered = _tampered(tmp_path, {}, architecture='{"name": "a", "activation": "relu", "name": "b"}')
    assert run(["inspect", str(tampered)]) == 3
    assert "'prelunet.architecture' is malformed (the key 'name' occurs more than once" in capsys.readouterr().err


def _tampered(folder: Path, changes: dict[str, Any], **texts: str) -> Path:
    """Adopt a net and change metadata in the file."""
    adopted(folder, net(folder))
    model = onnx.load(folder / "adopted.onnx")
    kept = {entry.key: entry.value for entry in model.metadata_props}
    texts |= {key: json.dumps(value) for key, value in changes.items()}
    assert {f"prelunet.{key}" for key in texts} <= kept.keys()
    helper.set_model_props(model, kept | {f"prelunet.{key}": text for key, text in texts.items()})
    onnx.save(model, folder / "tampered.onnx")
    return folder / "tampered.onnx"


# --- nets that never end, or take all memory


def test_constants_that_a_small_file_computes_do_not_stay_in_memory(tmp_path: Path) -> None:
    adopted(tmp_path, net(tmp_path))
    path = tmp_path / "adopted.onnx"
    model, more = onnx.load(path), NetBuilder()
    (last,) = (node for node in model.graph.node if "scores" in node.output)
    last.output[0] = "scores.before"
    peak = more.add("ReduceMax", "scores.before", keepdims=0)
    for size in range(3):
        large = more.add("ConstantOfShape", more.constant(np.array([50_000_000 + size], np.int64)))
        peak = more.add("ReduceMax", more.add("Add", large, peak), keepdims=0)  # of zeros and a score
    more.add("Add", "scores.before", peak, output="scores")
    model.graph.node.extend(more.nodes)
    model.graph.initializer.extend(more.constants)
    onnx.save(model, path)
    code = (
        "import sys\n"
        "from pathlib import Path\n"
        "from prelunet.evaluator.engine.runtimes import onnx\n"
        "megabytes = lambda: int(Path('/proc/self/statm').read_text().split()[1]) * 4096 // 10**6\n"
        "onnx.import_runtime()\n"
        "before = megabytes()\n"
        "loaded = onnx.load_on_cpu(Path(sys.argv[1]))\n"
        "print(megabytes() - before)\n"
    )
    command = [sys.executable, "-c", code, str(path)]
    grown = int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert grown < 150, "each constant alone takes 200 MB"


# --- messages


def test_an_error_does_not_repeat_all_of_a_long_name_in_a_file(tmp_path: Path) -> None:
    name = "first" + "x" * 70_000 + "last"
    with pytest.raises(ContractError, match=r"input 'firstx+…x+last' has rank 3") as refused:
        adopted(tmp_path, net(tmp_path, input_name=name, shape=["N", 3, CROP]))
    assert len(str(refused.value)) < 1000
    with pytest.raises(ContractError, match=r"input 'first\b.* … .* has rank 3") as refused:
        adopted(tmp_path, net(tmp_path, input_name="first " * 12_000, shape=["N", 3, CROP]))
    assert len(str(refused.value)) < 11_000


def test_half_a_character_in_a_name_is_refused_and_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, classes = net(tmp_path), write_classes(tmp_path)
    command = ["adopt", str(path), "--classes", str(classes), "-o", str(tmp_path / "o.onnx"), *NUMBERS]
    assert run([*command, "--name", "caf\udce9"]) == 2
    assert r"'caf\udce9' is not a valid name" in capsys.readouterr().err
    classes.write_text(json.dumps(["a\ud800", *(f"c{index}" for index in range(1, CLASSES))]))
    assert run(command) == 2
    assert r"a\ud800" in capsys.readouterr().err
    assert not (tmp_path / "o.onnx").exists()


def test_the_runtimes_error_is_shown_to_its_end_and_without_source_locations(tmp_path: Path) -> None:
    path = net(tmp_path)
    model = onnx.load(path)
    model.ir_version = 99
    onnx.save(model, path)
    with pytest.raises(
        ContractError, match=r"Unsupported model IR version: 99, max supported IR version: \d+\)"
    ) as refused:
        adopted(tmp_path, path)
    assert "::" not in str(refused.value)
    assert ".cc" not in str(refused.value)
