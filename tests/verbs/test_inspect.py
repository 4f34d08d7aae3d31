"""`prelunet inspect` describes a file, and shows its slopes beside the paper's."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import onnx
import pytest

from prelunet.evaluator.architectures import Activation, architecture
from prelunet.evaluator.cli import run
from prelunet.evaluator.errors import CheckpointError, ContractError, UsageError, install_hint
from prelunet.evaluator.files import sha256_of
from prelunet.training.inspection.describe_file import PAPER_SLOPES, add_paper_slopes, inspect_file, summarize_slopes
from prelunet.training.net.checkpoints import write_checkpoint
from tests.helpers.tiny_nets import mean_image, tiny_checkpoint

if TYPE_CHECKING:
    from tests.conftest import ExportedNet


def test_slopes_are_summarized_layer_by_layer() -> None:
    tensors = {
        "conv1.weight": np.full((3, 1, 1, 1), 9, np.float32),
        "conv1.slope": np.array([-0.5, 0.0, 1.0, 1.5], np.float32),
        "fc1.slope": np.array([0.25], np.float32),
    }
    assert summarize_slopes(tensors) == [
        {
            "layer": "conv1",
            "channels": 4,
            "mean": 0.5,
            "min": -0.5,
            "max": 1.5,
            "below_zero": 1,  # 0 itself is ReLU, and 1 itself is linear: neither is flagged
            "above_one": 1,
        },
        {"layer": "fc1", "channels": 1, "mean": 0.25, "min": 0.25, "max": 0.25, "below_zero": 0, "above_one": 0},
    ]
    assert summarize_slopes({"conv1.weight": tensors["conv1.weight"]}) == []


def untrained_slopes(name: str, activation: Activation) -> dict[str, np.ndarray]:
    net = architecture(name, activation=activation)
    layers = [*(conv.name for conv in net.convs), "fc1", "fc2"]
    return {f"{layer}.slope": np.array([0.25], np.float32) for layer in layers}


@pytest.mark.parametrize(("activation", "conv1", "fc2"), [("prelu-shared", 0.681, 0.031), ("prelu", 0.596, 0.075)])
def test_slopes_of_model_e_are_shown_beside_table_1(activation: Activation, conv1: float, fc2: float) -> None:
    slopes = add_paper_slopes(summarize_slopes(untrained_slopes("E", activation)), activation)
    assert [entry["layer"] for entry in slopes] == list(PAPER_SLOPES)
    assert (slopes[0]["paper"], slopes[-1]["paper"]) == (conv1, fc2)


@pytest.mark.parametrize("name", ["A", "E30", "demo"])
def test_slopes_of_another_net_are_not_compared_even_if_the_names_agree(name: str) -> None:
    slopes = add_paper_slopes(summarize_slopes(untrained_slopes(name, "prelu")), "prelu")
    assert {entry["paper"] for entry in slopes} == {None}


def test_a_checkpoint_is_described_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "net.onnx"  # the content decides, not the name
    checkpoint = tiny_checkpoint(
        mean=mean_image(), recipe={"name": "demo"}, dataset={"images": 6000}, metrics={"top1_error": 18.25}
    )
    write_checkpoint(path, checkpoint)
    assert run(["inspect", str(path), "--json"]) == 0
    described = json.loads(capsys.readouterr().out)
    assert described["kind"] == "checkpoint"
    assert described["file"] == "net.onnx"
    assert described["sha256"] == sha256_of(path)
    assert described["architecture"] == checkpoint.architecture.to_json()
    assert described["classes"][1] == {"wnid": "n00000001", "name": "thing 1"}
    assert described["parameters"] == sum(tensor.size for tensor in checkpoint.tensors.values())
    assert described["slope_parameters"] == 5 + 4 + 6 + 6
    assert described["mean"]["kind"] == "image"
    np.testing.assert_allclose(described["mean"]["channels"], mean_image().mean(axis=(0, 1)), atol=1e-3)  # four digits
    assert (described["recipe"], described["dataset"]) == ({"name": "demo"}, {"images": 6000})
    assert described["metrics"] == {"top1_error": 18.25}
    assert [entry["layer"] for entry in described["slopes"]] == ["conv1", "conv2", "fc1", "fc2"]


def test_without_json_the_facts_and_the_flagged_slopes_are_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint = tiny_checkpoint(metrics={"step": 2000, "top1_error": 18.25})
    slopes = {**checkpoint.tensors, "conv1.slope": np.array([-0.5, 0.25, 1.5, 1.25, 0.5], np.float32)}
    write_checkpoint(tmp_path / "net", replace(checkpoint, tensors=slopes))
    assert run(["inspect", str(tmp_path / "net")]) == 0
    out = capsys.readouterr().out
    assert "2 convolutions, 3 fully connected layers" in out
    assert "3: n00000000 thing 0, n00000001 thing 1" in out
    assert "channel (123.68, 116.78, 103.94)" in out
    assert "step 2000, top1_error 18.25" in out
    (_, line) = (line for line in out.splitlines() if line.startswith("conv1"))  # of the layers, and of the slopes
    assert line.split() == ["conv1", "5", "0.600", "-0.500", "1.500", "1", "!", "2", "!"]
    assert "not monotonic" in out


def test_for_a_net_without_slopes_that_is_stated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_checkpoint(tmp_path / "net", tiny_checkpoint("lrelu"))
    assert run(["inspect", str(tmp_path / "net")]) == 0
    assert "No slopes: lrelu learns none." in capsys.readouterr().out


def test_names_in_the_file_cannot_control_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint = tiny_checkpoint()
    classes = (replace(checkpoint.classes[0], name="\x1b[2Jowl [bold]loud[/]"), *checkpoint.classes[1:])
    write_checkpoint(tmp_path / "net", replace(checkpoint, classes=classes))
    assert run(["inspect", str(tmp_path / "net")]) == 0
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert "owl [bold]loud[/]" in " ".join(out.split())


def test_each_environment_of_a_run_has_a_line_of_its_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    counts = {"processes": 1, "threads": 2, "precision": "fp32", "deterministic": False, "cudnn_benchmark": False}
    environments = [
        {"from_step": step, "versions": {"torch": "2.11.0"}, "device": device, **counts}
        for step, device in ((0, "a CPU"), (7, "another CPU"))
    ]
    provenance = {"parent_sha256": None, "environments": environments}
    write_checkpoint(tmp_path / "net", replace(tiny_checkpoint(), provenance=provenance))
    assert run(["inspect", str(tmp_path / "net")]) == 0
    out = capsys.readouterr().out
    assert "x0a" not in out
    first, second = (line for line in out.splitlines() if "from step" in line)
    assert first.startswith("training")
    assert "from step 0: a CPU" in first
    assert "from step 7: another CPU" in second


def test_a_model_is_described_like_the_checkpoint_it_was_exported_from(exported: "dict[str, ExportedNet]") -> None:
    made = exported["demo-channel"]
    model, checkpoint = inspect_file(made.path), inspect_file(made.checkpoint_path)
    assert (model["kind"], model["checkpoint_sha256"]) == ("model", checkpoint["sha256"])
    assert (model["precision"], model["canvas"], model["default_scales"]) == ("fp32", "ragged", [32, 48, 60])
    for key in ("architecture", "classes", "parameters", "multiply_adds", "window", "recipe", "metrics", "slopes"):
        assert model[key] == checkpoint[key], key


SLOPE_KEYS = ("layer", "channels", "mean", "min", "max", "below_zero", "above_one")


def test_a_model_with_malformed_training_metadata_is_refused(
    exported: "dict[str, ExportedNet]", tmp_path: Path
) -> None:
    training = {"slopes": [{"layer": "conv1_1"}]}
    model = onnx.load(exported["demo-channel"].path)
    metadata = {**exported["demo-channel"].session.contract.to_metadata(), "prelunet.training": json.dumps(training)}
    onnx.helper.set_model_props(model, metadata)
    onnx.save(model, tmp_path / "odd.onnx")
    with pytest.raises(ContractError, match="malformed"):
        inspect_file(tmp_path / "odd.onnx")


def test_a_model_is_inspected_without_torch_onnx_and_safetensors(exported: "dict[str, ExportedNet]") -> None:
    blocked = "import sys\nfor name in ('torch', 'onnx', 'safetensors'): sys.modules[name] = None\n"
    inspect = f"sys.exit(run(['inspect', {str(exported['demo-channel'].path)!r}]))"
    code = f"{blocked}from prelunet.evaluator.cli import run; {inspect}"
    result = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert "32, 48, 60 px for multi-scale" in result.stdout
    assert "conv3_2" in result.stdout


def test_a_checkpoint_without_safetensors_installed_names_the_extra(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "net", tiny_checkpoint())
    code = (
        "import sys; sys.modules['safetensors'] = None\n"
        f"from prelunet.evaluator.cli import run; sys.exit(run(['inspect', {str(tmp_path / 'net')!r}]))"
    )
    result = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert result.returncode == 5
    assert install_hint("train") in result.stderr


@pytest.mark.parametrize("content", [b"", b"hello, world", bytes(100), b"PK\x03\x04" + bytes(50)])
def test_a_file_that_is_neither_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "net.safetensors").write_bytes(content)
    with pytest.raises(ContractError, match=r"neither a checkpoint .* nor a model"):
        inspect_file(tmp_path / "net.safetensors")


def test_a_missing_file_is_refused_with_its_name(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="nowhere"):
        inspect_file(tmp_path / "nowhere")


def test_truncated_files_are_refused_by_their_kind(tmp_path: Path, exported: "dict[str, ExportedNet]") -> None:
    made, half = exported["demo-channel"], tmp_path / "half"
    for path, error in ((made.path, ContractError), (made.checkpoint_path, CheckpointError)):
        data = path.read_bytes()
        half.write_bytes(data[: len(data) // 2])
        with pytest.raises(error, match="half"):
            inspect_file(half)
    assert run(["inspect", str(half), "--json"]) == 3
