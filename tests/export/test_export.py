"""The model file: metadata, determinism, no traces of the machine, clear errors."""

import json
import math
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from msgspec import structs
from PIL import Image

from prelunet.evaluator.cli import run
from prelunet.evaluator.contract import ModelContract, contract_from_metadata, golden_image
from prelunet.evaluator.engine.load import open_session
from prelunet.evaluator.engine.runtimes import Device
from prelunet.evaluator.engine.verify import Deviation, verify
from prelunet.evaluator.errors import ContractError, EnvironmentFault, UsageError
from prelunet.evaluator.protocols import build_protocol
from prelunet.export.dense.export import export_checkpoint
from prelunet.training.net.checkpoints import write_checkpoint
from prelunet.training.net.dense_reference import dense_windows
from tests.conftest import ExportedNet, with_contract
from tests.helpers.discriminating_nets import noise
from tests.helpers.fakes import fake_contract


def test_the_file_records_all_that_the_contract_lists(exported: dict[str, ExportedNet]) -> None:
    model = onnx.load(exported["demo-image"].path)
    metadata = {p.key: json.loads(p.value) for p in model.metadata_props}
    listed = Path(__file__).parents[2] / "docs" / "formats.md"
    for key in metadata:
        assert f"`{key.removeprefix('prelunet.')}`" in listed.read_text(), f"{key} is not in docs/formats.md"
    assert metadata["prelunet.crop"] == 28
    assert metadata["prelunet.window"] == 7
    assert metadata["prelunet.trunk_stride"] == 4
    assert metadata["prelunet.default_scales"] == [32, 48, 60]
    assert metadata["prelunet.spp_levels"] == [3, 2, 1]
    assert metadata["prelunet.mean_kind"] == "image"
    assert len(metadata["prelunet.golden"]) == 3
    assert [o.version for o in model.opset_import] == [18]
    assert model.ir_version <= 10


def test_the_file_explains_its_inputs_outputs_and_every_value_between_them(exported: dict[str, ExportedNet]) -> None:
    graph = onnx.load(exported["demo-image"].path).graph
    assert all(value.doc_string for value in (*graph.input, *graph.output))
    typed = {value.name: value.type.tensor_type for value in (*graph.value_info, *graph.output)}
    assert typed.keys() >= {name for node in graph.node for name in node.output}
    assert [axis.dim_value for axis in typed["conv2_1"].shape.dim][1] == 48


def test_the_contract_read_back_is_the_contract_written(exported: dict[str, ExportedNet]) -> None:
    contract = exported["demo-image"].session.contract
    assert contract_from_metadata(contract.to_metadata(), "x.onnx") == contract


def test_the_same_checkpoint_gives_the_same_bytes_in_another_process(
    exported: dict[str, ExportedNet], tmp_path: Path
) -> None:
    again = tmp_path / "again.onnx"
    command = [sys.executable, "-c", "import sys; from prelunet.evaluator.cli import run; sys.exit(run(sys.argv[1:]))"]
    subprocess.run([*command, "export", str(exported["demo-image"].checkpoint_path), "-o", str(again)], check=True)
    assert again.read_bytes() == exported["demo-image"].path.read_bytes()


def test_the_same_checkpoint_gives_the_same_bytes_with_any_number_of_threads(
    exported: dict[str, ExportedNet], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, before, files = exported["demo-image"].checkpoint_path, torch.get_num_threads(), []
    monkeypatch.setattr(
        "prelunet.evaluator.engine.verify.GOLDEN_DIGITS", 17
    )  # rounding must not hide the effect of threads
    try:
        for threads in (1, 2, 8):  # the oracle's float64 sums differ between these
            torch.set_num_threads(threads)
            export_checkpoint(path, tmp_path / "model.onnx")
            assert torch.get_num_threads() == threads, "whoever called it computes on as before"
            files.append((tmp_path / "model.onnx").read_bytes())
    finally:
        torch.set_num_threads(before)
    assert files[1:] == files[:1] * 2


def test_golden_scores_that_differ_in_their_last_bits_as_between_processors_give_the_same_bytes(
    exported: dict[str, ExportedNet], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def on_another_processor(*arguments: Any) -> tuple[Any, ...]:
        return tuple(np.nextafter(array, np.inf) for array in dense_windows(*arguments))

    monkeypatch.setattr("prelunet.export.dense.export.dense_windows", on_another_processor)
    export_checkpoint(exported["demo-image"].checkpoint_path, tmp_path / "model.onnx")
    assert (tmp_path / "model.onnx").read_bytes() == exported["demo-image"].path.read_bytes()


def test_the_file_holds_no_path_and_no_trace_of_this_machine(exported: dict[str, ExportedNet]) -> None:
    data = exported["demo-image"].path.read_bytes()
    assert str(Path(__file__).parents[2]).encode() not in data
    assert str(exported["demo-image"].path.parent).encode() not in data
    assert b"site-packages" not in data


def test_every_node_has_a_readable_name(exported: dict[str, ExportedNet]) -> None:
    names = [node.name for node in onnx.load(exported["slimE-image"].path).graph.node]
    assert all(names)
    assert len(set(names)) == len(names)
    assert {"conv1", "conv2_2.masked", "conv3_6.activation", "pool_9x9", "fc1", "window_scores"} <= set(names)


def test_only_padded_convolutions_are_masked(exported: dict[str, ExportedNet]) -> None:
    masked = {n.name for n in onnx.load(exported["slimE-image"].path).graph.node if n.name.endswith(".masked")}
    assert masked == {
        "images.masked",
        *(f"conv2_{i}.masked" for i in (2, 4)),
        *(f"conv3_{i}.masked" for i in (2, 4, 6)),
    }
    without = {n.name for n in onnx.load(exported["demo-exact"].path).graph.node if n.name.endswith(".masked")}
    assert without == set()


def test_no_operator_is_used_that_leaves_the_gpu(exported: dict[str, ExportedNet]) -> None:
    nodes = onnx.load(exported["slimE-image"].path).graph.node
    assert not {"Range", "GridSample", "If", "Loop", "NonZero", "Resize"} & {node.op_type for node in nodes}
    assert {tuple(node.input) for node in nodes if node.op_type == "Shape"} == {("images",)}


def test_golden_images_follow_the_stated_formula_in_integers() -> None:
    image = golden_image(31, 45)
    for row, column, channel in [(0, 0, 0), (3, 7, 1), (30, 44, 2), (17, 29, 0)]:
        t = (5 + 2 * channel) * row + (3 + 4 * channel) * column + 90 * channel + row * column // 23
        assert image[row, column, channel] == abs(t % 510 - 255)
    assert not np.array_equal(image[:, ::-1], image)
    assert not np.array_equal(image[..., 0], image[..., 1])


def test_verify_passes_on_this_machine_and_fails_on_changed_golden_scores(exported: dict[str, ExportedNet]) -> None:
    session = exported["demo-image"].session
    assert all(d.passed for d in verify(session))
    assert {d.case for d in verify(session)} == {"alone", "together"}
    golden = session.contract.golden
    changed = replace(golden[1], scores=(golden[1].scores[0] + 2e-5, *golden[1].scores[1:]))
    contract = replace(session.contract, golden=(golden[0], changed, golden[2]))
    assert [d.passed for d in verify(with_contract(session, contract))] == [True, False, True, True, False, True]


def test_the_verb_verify_exits_6_when_a_score_is_off(
    exported: dict[str, ExportedNet],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def closed(*_arguments: object) -> None:
        raise BrokenPipeError

    assert run(["verify", str(exported["demo-image"].path), "--device", "cpu", "--json"]) == 0
    output = json.loads(capsys.readouterr().out)
    assert output["passed"] is True
    assert output["tolerance"] == {"scores": 1e-5, "logits": 1e-4}
    assert run(["verify", str(exported["demo-image"].path), "--device", "cpu"]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert re.search(r"verified on CPUExecutionProvider, fp32 \(.*\): deviation at most 1e-05 \(scores\)", last)
    wrong = with_metadata(
        exported, tmp_path, golden=lambda golden: [{**g, "scores": g["scores"][::-1]} for g in golden]
    )
    with monkeypatch.context() as patch:
        patch.setattr("prelunet.evaluator.verbs.verify.echo", closed)
        assert run(["verify", str(wrong), "--device", "cpu", "--json"]) == 6, "also if nobody reads its output"
    assert run(["verify", str(wrong), "--device", "cpu"]) == 6
    assert "in fp32 on CPUExecutionProvider the scores of the golden image of " in (output := capsys.readouterr().err)
    assert "1e-05 and 0.0001 are allowed. Do not use this device or runtime version" in output


@pytest.mark.parametrize("deviation", [math.nan, math.inf])
def test_a_deviation_that_is_not_finite_is_null_in_json_and_not_passed(deviation: float) -> None:
    plain = Deviation("alone", 30, 41, deviation, 0.0).to_json()
    assert json.loads(json.dumps(plain, allow_nan=False))["scores"] is None
    assert (plain["logits"], plain["passed"]) == (0.0, False)


def test_a_file_without_golden_images_cannot_be_verified_and_the_error_gives_the_command(
    exported: dict[str, ExportedNet], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    without = with_metadata(exported, tmp_path, golden=[])
    with pytest.raises(ContractError, match=r"no golden images.*prelunet export"):
        verify(open_session(without, "cpu"))
    assert run(["verify", str(without), "--device", "cpu"]) == 3
    output = capsys.readouterr()
    assert "no golden images" in output.err
    assert "verified" not in output.out


def with_metadata(exported: dict[str, ExportedNet], folder: Path, drop: str = "", **changes: object) -> Path:
    """Write a copy of the demo model with some metadata changed or dropped."""
    model = onnx.load(exported["demo-image"].path)
    values = {p.key: json.loads(p.value) for p in model.metadata_props}
    for key, change in changes.items():
        value = values[f"prelunet.{key}"]
        values[f"prelunet.{key}"] = change(value) if callable(change) else change
    values.pop(f"prelunet.{drop}", None)
    onnx.helper.set_model_props(model, {key: json.dumps(value) for key, value in values.items()})
    path = folder / "changed.onnx"
    onnx.save(model, path)
    return path


def test_a_model_of_a_newer_contract_is_refused_naming_both_versions(
    exported: dict[str, ExportedNet], tmp_path: Path
) -> None:
    with pytest.raises(ContractError, match=r"version 99.*up to 3.*prelunet export"):
        open_session(with_metadata(exported, tmp_path, contract_version=99), "cpu")


@pytest.mark.parametrize("key", sorted(key.removeprefix("prelunet.") for key in fake_contract().to_metadata()), ids=str)
def test_a_model_without_one_of_the_keys_is_refused_naming_it(
    exported: dict[str, ExportedNet], tmp_path: Path, key: str
) -> None:
    with pytest.raises(ContractError, match=rf"no 'prelunet.{key}' in the ONNX metadata.*prelunet export"):
        open_session(with_metadata(exported, tmp_path, drop=key), "cpu")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"canvas": "round"}, "'round'"),
        ({"crop": "28"}, "'prelunet.crop' is malformed .Expected `int`, got `str`"),
        ({"trunk": [[3, 1]]}, "malformed"),
        ({"contract_version": 0}, "'prelunet.contract_version' is malformed .Expected `int` >= 1"),
        ({"min_side": 27}, "min_side' is 27, but should be 28"),
        ({"trunk_stride": 9}, "trunk_stride' is 9, but should be 4"),
        ({"spp_order": "channel first"}, 'spp_order\' is "channel first", but should be "level,row'),
        ({"bin_rule": "nonsense"}, 'bin_rule\' is "nonsense"'),
        ({"golden": lambda golden: golden * 6}, "at most 16 golden"),
        ({"architecture": {"name": "\x1b]0;title\x07", "activation": "prelu"}}, "without control characters"),
        ({"classes": lambda classes: [{**classes[0], "name": "a\nb"}, *classes[1:]]}, "without control characters"),
        ({"crop": -5}, "malformed"),
        ({"crop": 5}, "does not give a window of 7"),
        ({"window": 0}, "'prelunet.window' is malformed .Expected `int` >= 1"),
        ({"trunk": [[3, 0, 1]]}, r"'prelunet.trunk' .* `int` >= 1 - at `\$\[0\]\[1\]`"),
        ({"trunk": [[3, 1, 3]]}, "a trunk of valid layers"),
        ({"trunk": []}, "a trunk of valid layers"),
        ({"trunk": [[3, 1, 1]]}, "does not give a window"),
        ({"spp_levels": [3, 9]}, "spp_levels"),
        ({"max_side": 10**12}, "max_side"),
        ({"max_side": 20}, "max_side"),
        ({"default_scales": ["32"]}, r"'prelunet.default_scales' .* got `str` - at `\$\[0\]`"),
        ({"default_scales": [32, 32]}, "scales"),
        ({"default_scales": []}, "scales"),
        ({"default_scales": list(range(28, 428))}, "scales"),
        ({"default_scales": [20]}, "from crop"),
        ({"architecture": {}}, "missing required field `name`"),
        ({"architecture": lambda net: {**net, "crop": 32}}, "should be those of the architecture"),
        ({"architecture": lambda net: {**net, "trunk": net["trunk"][:-1]}}, "should be those of the architecture"),
        ({"architecture": lambda net: {**net, "hidden": 10**30}}, r"`int` <= 65536 - at `\$.hidden`"),
        ({"classes": []}, "different wnids"),
        ({"classes": [{"wnid": "a", "name": "a"}] * 23}, "different wnids"),
        ({"classes": [{"wnid": 1, "name": None}] * 23}, r"Expected `str`, got `int` - at `\$\[0\].wnid`"),
        ({"classes": [{"wnid": "\ud800", "name": "half a character"}]}, "lone surrogate"),
        ({"classes": lambda classes: classes[:-1]}, "one number per class"),
        ({"classes": lambda classes: classes[:-1], "golden": []}, "22 classes are listed, but the graph has 23"),
        ({"golden": [{"height": 10**9, "width": 30, "scores": [0] * 23, "logits": [0] * 23}]}, "golden: sides"),
        ({"golden": [{"height": 30, "width": 30, "scores": [0], "logits": [0] * 23}]}, "one number per class"),
        (
            {"golden": [{"height": 30, "width": 30, "scores": "x" * 23, "logits": [0] * 23}]},
            r"Expected `array`, got `str` - at `\$\[0\].scores`",
        ),
        ({"golden": [None]}, "malformed"),
        (
            {"training": {"provenance": {"parent_sha256": "x", "environments": []}}},
            r"regex .* - at `\$.provenance.parent_sha256`",
        ),
    ],
)
def test_a_model_with_a_malformed_value_is_refused(
    exported: dict[str, ExportedNet], tmp_path: Path, changes: dict[str, object], message: str
) -> None:
    with pytest.raises(ContractError, match=message):
        open_session(with_metadata(exported, tmp_path, **changes), "cpu")


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("27", "from crop"),
        ("500", "to 16 crops"),
        ("30.5", "Expected `int "),
        ('"30"', "Expected `int "),
        ("null", "unknown key"),
    ],
)
def test_a_scale_of_center_that_no_crop_has_is_refused(
    exported: dict[str, ExportedNet], value: str, message: str
) -> None:
    metadata = {**exported["demo-image"].session.contract.to_metadata(), "prelunet.center_scale": value}
    with pytest.raises(ContractError, match=message):
        contract_from_metadata(metadata, "other.onnx")


def test_metadata_nested_beyond_all_measure_is_refused(exported: dict[str, ExportedNet]) -> None:
    metadata = {**exported["demo-image"].session.contract.to_metadata(), "prelunet.training": "[" * 100_000}
    with pytest.raises(ContractError, match=r"'prelunet\.training' is malformed .nested too deeply"):
        contract_from_metadata(metadata, "deep.onnx")


def test_verify_fails_on_a_trunk_that_is_not_the_graphs(exported: dict[str, ExportedNet]) -> None:
    session = exported["demo-image"].session
    first, *others = session.contract.architecture.trunk
    # The same map for a crop of 28, one cell more for a side of 39.
    net = structs.replace(session.contract.architecture, trunk=(structs.replace(first, kernel=4, pad=2), *others))
    contract = replace(session.contract, architecture=net, trunk=net.layers)
    assert not all(d.passed for d in verify(with_contract(session, contract)))


@pytest.mark.parametrize("content", [b"", b"this is no model", b"\x08\x08" * 40])
def test_a_file_that_is_no_onnx_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "model.onnx"
    path.write_bytes(content)
    with pytest.raises(ContractError, match=r"model.onnx"):
        open_session(path, "cpu")


def test_half_a_model_file_is_refused(exported: dict[str, ExportedNet], tmp_path: Path) -> None:
    data = exported["demo-image"].path.read_bytes()
    (tmp_path / "half.onnx").write_bytes(data[: len(data) // 2])
    with pytest.raises(ContractError, match=r"half.onnx"):
        open_session(tmp_path / "half.onnx", "cpu")


@pytest.mark.parametrize(
    ("text", "bit", "device"),
    [
        *((text, 0x80, device) for text in (b"prelunet.classes", b"thing", b"PRelu") for device in ("cpu", "openvino")),
        (b"PRelu", 0x80, "ncnn"),
        (b'"conv1', 1, "ncnn"),  # in the architecture: a layer that the graph lacks
    ],
)
def test_a_flipped_bit_in_a_text_is_the_files_fault(
    exported: dict[str, ExportedNet], tmp_path: Path, text: bytes, bit: int, device: Device
) -> None:
    data = bytearray(exported["demo-image"].path.read_bytes())
    data[data.index(text) + len(text) - 1] ^= bit
    (tmp_path / "flipped.onnx").write_bytes(data)
    with pytest.raises(ContractError, match=r"flipped\.onnx: "):
        open_session(tmp_path / "flipped.onnx", device)


def test_every_command_exits_with_3_for_metadata_that_are_no_utf_8(
    exported: dict[str, ExportedNet], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, image, classes = (tmp_path / name for name in ("flipped.onnx", "image.png", "classes.txt"))
    path.write_bytes(exported["demo-image"].path.read_bytes().replace(b"prelunet.classes", b"prelunet.class\xe5s"))
    Image.new("RGB", (40, 30)).save(image)
    classes.write_text("a\nb\n")
    model = str(path)
    for command in (
        ["verify", model],
        ["inspect", model],
        ["classify", str(image), "--model", model],
        ["validate", model, str(tmp_path), "--no-labels", "--run", str(tmp_path / "run")],
        ["serve", "--model", f"m={model}", "--port", "0"],
        ["adopt", model, "--preset", "torchvision", "--classes", str(classes), "-o", str(tmp_path / "new.onnx")],
    ):
        assert run(command) == 3, command
        assert "flipped.onnx: damaged: its metadata are not UTF-8" in capsys.readouterr().err


def test_a_foreign_onnx_model_is_refused(tmp_path: Path) -> None:
    info = onnx.helper.make_tensor_value_info
    node = onnx.helper.make_node("Relu", ["x"], ["y"])
    graph = onnx.helper.make_graph([node], "g", [info("x", 1, [1])], [info("y", 1, [1])])
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 18)], ir_version=8)
    onnx.save(model, tmp_path / "foreign.onnx")
    with pytest.raises(ContractError, match=r"not a model file of prelunet.*prelunet adopt .*foreign.onnx"):
        open_session(tmp_path / "foreign.onnx", "cpu")


def test_requesting_cuda_where_it_is_unavailable_is_an_error_and_never_a_cpu_run(
    exported: dict[str, ExportedNet],
) -> None:
    with pytest.raises(EnvironmentFault, match=r"--device cuda"):
        open_session(exported["demo-image"].path, "cuda")


def canvas_of(height: int, width: int) -> np.ndarray:
    return noise(height, width, seed=0)[None]


@pytest.mark.parametrize(
    ("images", "sizes", "message"),
    [
        (canvas_of(40, 50), [[27, 50]], "below this model's crop of 28"),
        (canvas_of(40, 50), [[40, 51]], "exceed the canvas of 40x50"),
        (canvas_of(40, 50), [[40, 50], [40, 50]], "sizes should be int64"),
        (canvas_of(40, 50).astype(np.float32), [[40, 50]], "images should be uint8"),
        (np.zeros((1, 30, 4097, 3), np.uint8), [[30, 30]], "larger than this model's 4096"),
    ],
)
def test_a_canvas_that_the_graph_would_answer_with_nonsense_is_refused(
    exported: dict[str, ExportedNet], images: np.ndarray, sizes: list[list[int]], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        exported["demo-image"].session.run(images, np.array(sizes))


def test_a_file_without_masks_refuses_an_image_that_does_not_fill_its_canvas(exported: dict[str, ExportedNet]) -> None:
    with pytest.raises(UsageError, match=r"--canvas ragged"):
        exported["demo-exact"].session.run(canvas_of(40, 50), np.array([[40, 49]]))


def test_export_refuses_half_a_checkpoint_and_leaves_no_file(
    exported: dict[str, ExportedNet], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = exported["demo-image"].checkpoint_path.read_bytes()
    (tmp_path / "half.safetensors").write_bytes(data[: len(data) // 2])
    assert run(["export", str(tmp_path / "half.safetensors"), "-o", str(tmp_path / "out.onnx")]) == 3
    assert "half.safetensors" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["half.safetensors"]


def test_export_to_a_folder_that_does_not_exist_is_refused(
    exported: dict[str, ExportedNet], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["export", str(exported["demo-image"].checkpoint_path), "-o", str(tmp_path / "none" / "out.onnx")]
    assert run(arguments) == 2
    assert "does not exist" in capsys.readouterr().err


def test_a_contract_states_the_window_grid_that_the_graph_finds(exported: dict[str, ExportedNet]) -> None:
    for key, sizes in {"demo-image": [(28, 31), (45, 90)], "slimE-image": [(224, 239), (301, 260)]}.items():
        contract: ModelContract = exported[key].session.contract
        for height, width in sizes:
            outputs = exported[key].session.run(canvas_of(height, width), np.array([[height, width]]))
            assert outputs.windows[0].tolist() == list(contract.window_grid(height, width))


def test_exporting_without_masks_is_recorded(exported: dict[str, ExportedNet], tmp_path: Path) -> None:
    export_checkpoint(exported["demo-image"].checkpoint_path, tmp_path / "exact.onnx", "exact")
    assert open_session(tmp_path / "exact.onnx", "cpu").contract.canvas == "exact"


@pytest.mark.parametrize(
    ("trained", "scales", "center"), [([30, 46], (30, 38, 44), 32), ([36, 46], (36, 41, 45), 36), ([28, 28], (28,), 28)]
)
def test_a_trained_net_is_tested_at_scales_of_its_training(
    exported: dict[str, ExportedNet], tmp_path: Path, trained: list[int], scales: tuple[int, ...], center: int
) -> None:
    checkpoint = replace(exported["demo-image"].checkpoint, recipe={"scales": trained})
    write_checkpoint(tmp_path / "trained.safetensors", checkpoint)
    export_checkpoint(tmp_path / "trained.safetensors", tmp_path / "trained.onnx")
    contract = open_session(tmp_path / "trained.onnx", "cpu").contract
    assert contract.default_scales == scales
    assert build_protocol("center", contract).scales == build_protocol("ten-crop", contract).scales == (center,)


def test_a_file_of_a_net_of_unknown_training_keeps_the_scale_of_center_in_proportion(
    exported: dict[str, ExportedNet],
) -> None:
    contract = exported["demo-image"].session.contract
    assert "prelunet.center_scale" not in contract.to_metadata()
    assert build_protocol("center", contract).scales == (32,)
