"""Import: a third-party net gives the same logits as a checkpoint; all mismatches are reported at once."""

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import Tensor

from prelunet.evaluator.architectures import Activation, architecture, parameter_shapes
from prelunet.evaluator.cli import run
from prelunet.evaluator.errors import CheckpointError, UsageError
from prelunet.training.importing.import_net import import_net, parse_preprocessing
from prelunet.training.importing.name_map import NameMap, read_name_map
from prelunet.training.importing.preprocessing import Preprocessing
from prelunet.training.net.checkpoints import Checkpoint, read_checkpoint
from prelunet.training.net.network import network_from_checkpoint
from tests.export.foreign.foreign_torch import ENTRIES, PLAIN, ForeignNet, our_names, tiny_import
from tests.helpers.tiny_nets import CLASSES, TINY


def pixels(count: int = 2, side: int = TINY.crop) -> np.ndarray:
    """Return asymmetric RGB images, uint8 (N, H, W, 3), that contain 0 and 255."""
    images = np.random.default_rng(1).integers(0, 256, (count, side, side, 3), dtype=np.uint8)
    images[0, :5, :, 1] = 0
    images[1, :, -4:] = 255
    return images


def logits_of(imported: Checkpoint, images: np.ndarray) -> np.ndarray:
    """Return the logits of a checkpoint, as training and export compute them."""
    with torch.inference_mode():
        centred = torch.from_numpy(images.astype(np.float32) - imported.mean).permute(0, 3, 1, 2)
        return network_from_checkpoint(imported)(centred).numpy()


def logits_of_foreign(net: ForeignNet, prepared: np.ndarray) -> np.ndarray:
    with torch.inference_mode():
        return net(torch.from_numpy(prepared.astype(np.float32)).permute(0, 3, 1, 2)).numpy()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "net.pt"


# Logits of the imported net


def test_a_net_with_other_names_gives_the_same_logits_after_import_by_order(file: Path) -> None:
    foreign = ForeignNet()
    torch.save(foreign.state_dict(), file)
    imported = tiny_import(file)
    assert imported.method == "by order"
    assert imported.source["conv2.slope"] == "features.4.weight"
    expected = logits_of_foreign(foreign, pixels() - np.array([123, 117, 104], np.float32))
    np.testing.assert_array_equal(logits_of(imported.checkpoint, pixels()), expected)  # the same float32 operations


@pytest.mark.parametrize("channels", ["rgb", "bgr"])
@pytest.mark.parametrize("pixel_range", [1, 255])
def test_mean_std_range_and_channel_order_are_folded_into_the_mean_and_conv1(
    file: Path, channels: Any, pixel_range: int
) -> None:
    foreign = ForeignNet()
    torch.save(foreign.state_dict(), file)
    mean, std = np.array([0.485, 0.456, 0.306]) * pixel_range, np.array([0.229, 0.124, 0.425]) * pixel_range
    given = ",".join(map(str, mean)), ",".join(map(str, std))
    preprocessing, image = parse_preprocessing(*given, pixel_range, channels, TINY.crop)
    imported = import_net(file, TINY, ENTRIES, preprocessing, mean=image)
    assert foreign.features[0].padding == (1, 1)  # so that the borders are tested
    ordered = pixels()[..., ::-1] if channels == "bgr" else pixels()
    expected = logits_of_foreign(foreign, (ordered / 255 * pixel_range - mean) / std)
    # float32: the factors are multiplied in another order, and a dozen sums of up to 56 terms follow
    np.testing.assert_allclose(logits_of(imported.checkpoint, pixels()), expected, rtol=1e-5, atol=2e-5)
    assert np.ptp(expected, axis=0).min() > 0.01  # the logits depend on the image


@pytest.mark.parametrize("channels_first", [False, True])
def test_a_bgr_mean_image_is_converted_to_rgb(file: Path, channels_first: bool) -> None:
    foreign = ForeignNet()
    torch.save(foreign.state_dict(), file)
    mean = np.random.default_rng(2).uniform(60, 190, (24, 24, 3))
    np.save(file.with_name("mean.npy"), mean.transpose(2, 0, 1) if channels_first else mean)
    preprocessing, image = parse_preprocessing(str(file.with_name("mean.npy")), "1", 255, "bgr", 24)
    imported = import_net(file, TINY, ENTRIES, preprocessing, mean=image)
    assert imported.checkpoint.mean.shape == (24, 24, 3)
    expected = logits_of_foreign(foreign, pixels()[..., ::-1] - mean)
    np.testing.assert_allclose(logits_of(imported.checkpoint, pixels()), expected, rtol=1e-5, atol=1e-5 * 255)


def test_the_digest_of_the_file_is_recorded(file: Path) -> None:
    torch.save(ForeignNet().state_dict(), file)
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    assert tiny_import(file).checkpoint.provenance == {"parent_sha256": digest, "environments": []}


def test_weights_for_rgb_bytes_are_imported_unchanged(file: Path) -> None:
    tensors = our_names()
    torch.save(tensors, file)
    found = tiny_import(file).checkpoint
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(found.tensors[name], tensor.numpy(), strict=True)
    np.testing.assert_array_equal(found.mean, np.array([123, 117, 104], np.float32), strict=True)


@pytest.mark.parametrize(
    ("kind", "remark", "error"),
    [
        # of the largest number below 0.5: half a unit in the last place of 11, 8 and 24 bits
        (torch.float16, "14 tensors of float16 were converted to float32", 2.0**-12),
        (torch.bfloat16, "14 tensors of bfloat16 were converted to float32", 2.0**-9),
        (torch.float64, "14 tensors of float64 were rounded to float32", 0.0),
    ],
)
def test_other_types_are_converted_to_float32_with_a_remark(
    file: Path, kind: torch.dtype, remark: str, error: float
) -> None:
    tensors = our_names()
    torch.save({name: tensor.to(kind) for name, tensor in tensors.items()}, file)
    imported = tiny_import(file)
    assert imported.remarks == (remark,)
    for name, tensor in tensors.items():
        assert imported.checkpoint.tensors[name].dtype == np.float32
        np.testing.assert_allclose(imported.checkpoint.tensors[name], tensor.numpy(), rtol=0, atol=error)


def test_converted_tensors_are_counted_by_type(file: Path) -> None:
    tensors = {name: tensor.half() if "conv" in name else tensor for name, tensor in our_names().items()}
    torch.save(tensors, file)
    assert tiny_import(file).remarks == ("6 tensors of float16 were converted to float32",)


# Names


def test_a_map_of_exact_names_and_patterns_assigns_every_tensor(tmp_path: Path) -> None:
    foreign = ForeignNet()
    path = tmp_path / "net.safetensors"
    safetensors.torch.save_file({**foreign.state_dict(), "n_averaged": torch.tensor(7)}, path)
    (tmp_path / "map.toml").write_text(
        '"features.0.*" = "conv1.*"\n"features.1.weight" = "conv1.slope"\nfeatures.3 = { weight = "conv2.weight" }\n'
        '"features.3.bias" = "conv2.bias"\n"*.4.weight" = ""\n"features.4.weight" = "conv2.slope"\n'
        '"**.0.*" = "**.first.*"\n"n_averaged" = ""\n'
    )
    with pytest.raises(CheckpointError) as refused:
        tiny_import(path, name_map=read_name_map(tmp_path / "map.toml"))
    message = str(refused.value)
    assert "unexpected classifier.first.weight [6, 56] (classifier.0.weight in the file)" in message
    assert "missing fc1.weight [6, 56]" in message
    lines = {
        "features.0.*": "conv1.*",
        "features.1.weight": "conv1.slope",
        "features.3.*": "conv2.*",
        "features.4.weight": "conv2.slope",
        **{f"classifier.{place}.*": f"fc{number}.*" for place, number in ((0, 1), (2, 2), (4, 3))},
        **{f"classifier.{place}.weight": f"fc{number}.slope" for place, number in ((1, 1), (3, 2))},
        "n_*": "",
    }
    (tmp_path / "map.json").write_text(json.dumps(lines))
    imported = tiny_import(path, name_map=read_name_map(tmp_path / "map.json"))
    assert imported.method == "by the map"
    assert "omitted by the map: n_averaged" in imported.remarks
    expected = logits_of_foreign(foreign, pixels() - np.array([123, 117, 104], np.float32))
    np.testing.assert_array_equal(logits_of(imported.checkpoint, pixels()), expected)


def test_unused_lines_and_duplicate_results_of_a_map_are_faults(file: Path) -> None:
    tensors = our_names()
    tensors["copy.bias"] = torch.zeros(6)
    torch.save(tensors, file)
    with pytest.raises(CheckpointError) as refused:
        tiny_import(file, name_map=NameMap({"copy.*": "fc1.*", "conv9.*": "conv2.*"}))
    assert str(refused.value).splitlines()[1:] == [
        "  fc1.bias and copy.bias both become fc1.bias",
        '  no tensor matches "conv9.*" of the map',
    ]


def test_partly_matching_names_are_not_assigned_by_order(file: Path) -> None:
    names = list(our_names())
    turned = {
        "conv1.bias": "conv1.slope",
        "conv1.slope": "other",
    }  # equal shapes: by order, the mistake would go unnoticed
    torch.save({turned.get(name, name): tensor for name, tensor in our_names().items()}, file)
    assert [turned.get(name, name) for name in names].count("conv1.slope") == 1
    with pytest.raises(
        CheckpointError, match=r"or map the names .*:\n  missing conv1\.bias \[5\]\n  unexpected other \[5\]$"
    ):
        tiny_import(file)


def test_a_bias_in_the_position_of_slopes_is_not_assigned_by_order(file: Path) -> None:
    tensors = ForeignNet().state_dict()
    order = list(tensors)
    first, second = order.index("features.0.bias"), order.index("features.1.weight")
    order[first], order[second] = order[second], order[first]
    torch.save({name: tensors[name] for name in order}, file)
    with pytest.raises(CheckpointError, match=r"tensor 2 is features\.1\.weight, but conv1\.bias is expected"):
        tiny_import(file)


def test_safetensors_with_other_names_is_not_assigned_by_order(tmp_path: Path) -> None:
    names = {name: f"{place:03}" for place, name in enumerate(our_names())}  # their sorted order would even be right
    path = tmp_path / "net.safetensors"
    safetensors.torch.save_file({names[name]: tensor for name, tensor in our_names().items()}, path)
    with pytest.raises(CheckpointError, match=r"stores its tensors sorted, not in the order of the layers.*--map"):
        tiny_import(path)


# Mismatches


def test_missing_unexpected_and_misshaped_tensors_are_all_listed_at_once(file: Path) -> None:
    tensors = our_names()
    del tensors["conv1.bias"], tensors["fc2.slope"]
    tensors |= {"bn.num_batches_tracked": torch.tensor(3), "extra": torch.zeros(2, 3)}
    tensors["fc3.weight"], tensors["conv2.weight"] = torch.zeros(7, 6), tensors["conv2.weight"].permute(2, 3, 1, 0)
    tensors["fc2.bias"] = torch.zeros(6, dtype=torch.int64)
    tensors["fc3.bias"] = torch.zeros(1).expand(10**13)  # more than any memory
    torch.save(tensors, file)
    with pytest.raises(CheckpointError) as refused:
        tiny_import(file)
    assert set(str(refused.value).splitlines()[1:]) == {
        "  missing conv1.bias [5]",
        "  missing fc2.slope [6]",
        "  unexpected bn.num_batches_tracked [1]",
        "  unexpected extra [2, 3]",
        "  fc3.weight is [7, 6], should be [3, 6]",
        "  conv2.weight is [2, 2, 5, 4], should be [4, 5, 2, 2]",
        "  fc2.bias is int64, should be float",
        "  fc3.bias is [10000000000000], should be [3]",
    }


@pytest.mark.parametrize("names", ["foreign", "ours", "by the map"])
def test_a_different_number_of_classes_is_refused_with_any_names(file: Path, names: str) -> None:
    foreign, ours = ForeignNet(classes=5).state_dict(), our_names(classes=5)
    table = None
    if names == "by the map":  # which leaves one tensor out
        foreign["n_averaged"] = torch.tensor(7)
        table = NameMap({**dict(zip(foreign, ours, strict=False)), "n_averaged": ""})
    torch.save(ours if names == "ours" else foreign, file)
    with pytest.raises(CheckpointError) as refused:
        tiny_import(file, name_map=table)
    first, *lines = str(refused.value).splitlines()
    assert "Check --arch, --activation and --classes" in first
    if names == "foreign":
        assert "classifier.4.weight [5, 6], but fc3.weight [3, 6] is expected" in first
        return
    theirs = ["", ""] if names == "ours" else [f" (classifier.4.{kind} in the file)" for kind in ("weight", "bias")]
    assert lines == [
        f"  fc3.weight is [5, 6], should be [3, 6]{theirs[0]}",
        f"  fc3.bias is [5], should be [3]{theirs[1]}",
    ]


def test_the_list_of_mismatches_is_complete(file: Path) -> None:
    torch.save(ForeignNet(architecture("demo"), 5).state_dict(), file)
    with pytest.raises(CheckpointError) as refused:
        import_net(file, architecture("A"), ENTRIES, PLAIN)
    first, *lines = str(refused.value).splitlines()
    missing = parameter_shapes(architecture("A"), 3)
    assert f"there are 26 tensors, but the net has {len(missing)}. Check --arch, --activation and --classes" in first
    assert first.endswith("or map the names with a table: --map FILE (docs/importing.md). Mismatches:")
    assert lines[: len(missing)] == [f"  missing {name} {list(shape)}" for name, shape in missing.items()]
    assert len(lines) == len(missing) + 26


def test_no_map_is_suggested_if_all_names_match(file: Path) -> None:
    torch.save({**our_names(), "fc2.bias": torch.zeros(6, dtype=torch.int64)}, file)
    with pytest.raises(CheckpointError, match=r"fc2\.bias is int64, should be float") as refused:
        tiny_import(file)
    assert "--map" not in str(refused.value)


@pytest.mark.parametrize(
    ("slopes", "asked"),
    [("shared", "prelu"), ("channel", "prelu-shared"), ("none", "prelu"), ("channel", "relu")],
)
def test_slopes_of_another_kind_are_refused(file: Path, slopes: str, asked: Activation) -> None:
    torch.save(ForeignNet(architecture("demo"), CLASSES, slopes).state_dict(), file)
    with pytest.raises(CheckpointError, match="Check --arch, --activation and --classes"):
        import_net(file, architecture("demo", activation=asked), ENTRIES, PLAIN)


def test_a_shared_slope_may_be_a_scalar(file: Path) -> None:
    tensors = ForeignNet(slopes="shared").state_dict()
    torch.save({name: t.reshape(()) if t.shape == (1,) else t for name, t in tensors.items()}, file)
    found = tiny_import(file, "prelu-shared").checkpoint.tensors
    assert found["conv2.slope"].shape == (1,)
    np.testing.assert_array_equal(found["conv2.slope"], tensors["features.4.weight"].numpy())


def test_every_tensor_with_non_finite_values_is_named(file: Path) -> None:
    tensors: dict[str, Tensor] = {name: tensor.clone() for name, tensor in ForeignNet().state_dict().items()}
    tensors["features.3.bias"][2] = float("nan")
    tensors["classifier.4.weight"] = tensors["classifier.4.weight"].double()
    tensors["classifier.4.weight"][1, 1] = 1e300  # finite, but not in float32
    torch.save(tensors, file)
    with pytest.raises(CheckpointError, match=r"not finite in float32, in features\.3\.bias, classifier\.4\.weight:"):
        tiny_import(file)


def test_a_std_that_makes_weights_infinite_is_refused(file: Path) -> None:
    tiny_std = Preprocessing((0.0, 0.0, 0.0), (1e-36, 1.0, 1.0), pixel_range=255)
    torch.save({**our_names(), "conv1.weight": torch.full((5, 3, 3, 3), 1e3)}, file)
    with pytest.raises(CheckpointError, match=r"overflow float32\. Check --std"):
        import_net(file, TINY, ENTRIES, tiny_std)


# The mean


@pytest.mark.parametrize(
    ("mean", "std", "pixel_range", "fault"),
    [
        ("123.7,116.8,103.9", "1", 1, "add --range 255"),
        ("0.485,0.456,0.406", "1", 255, "omit --range 255"),
        ("0.5", "0", 1, "should be above 0"),
        ("0.5,0.5", "1", 1, "or one, not 2"),
        ("zero", "1", 1, "three comma-separated numbers"),
        ("nan", "1", 1, "finite numbers"),
    ],
)
def test_a_mean_inconsistent_with_the_range_is_refused(mean: str, std: str, pixel_range: int, fault: str) -> None:
    with pytest.raises(UsageError, match=fault):
        parse_preprocessing(mean, std, pixel_range, "rgb", 24)


def save_array(path: Path, array: Any) -> None:
    with path.open("wb") as to:  # numpy would add a suffix
        np.save(to, array, allow_pickle=True)


@pytest.mark.parametrize(
    ("array", "fault"),
    [
        (np.zeros((256, 256, 3)), r"\[256, 256, 3\] of float64, but a mean image should be \[24, 24, 3\]"),
        (np.zeros((24, 24, 3), complex), "complex128"),
        (np.array([{}]), "not a numpy array"),
        (np.full((24, 24, 3), 110.0), "add --range 255"),
        (np.full((24, 24, 3), np.nan), "finite numbers"),
    ],
)
def test_an_invalid_mean_image_is_refused(tmp_path: Path, array: Any, fault: str) -> None:
    save_array(tmp_path / "mean.npy", array)
    with pytest.raises(UsageError, match=fault):
        parse_preprocessing(str(tmp_path / "mean.npy"), "1", 1, "rgb", 24)


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 and nothing", b"\x93NUMPY\x01\x00", b"text"])
def test_a_damaged_mean_image_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "mean.npy").write_bytes(content)
    with pytest.raises(UsageError, match="not a numpy array"):
        parse_preprocessing(str(tmp_path / "mean.npy"), "1", 255, "rgb", 24)
    np.savez(tmp_path / "two.npz", a=np.zeros(2))
    (tmp_path / "two.npz").rename(tmp_path / "mean.npy")
    with pytest.raises(UsageError, match="several arrays"):
        parse_preprocessing(str(tmp_path / "mean.npy"), "1", 255, "rgb", 24)


# The verb


def test_the_verb_writes_a_checkpoint_and_prints_the_assignment_and_the_next_steps(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.save({"state_dict": ForeignNet(architecture("demo"), 4).half().state_dict()}, tmp_path / "net.pt")
    output = tmp_path / "net.safetensors"
    command = ["import", str(tmp_path / "net.pt"), "-o", str(output), "--arch", "demo", "--classes", "4"]
    options = ["--channels", "bgr", "--range", "255", "--mean", "103.939,116.779,123.68"]
    assert run([*command, *options]) == 0
    out = capsys.readouterr().out.splitlines()
    assert "the state dict was found under 'state_dict'" in out
    assert "26 tensors of float16 were converted to float32" in out
    assert "26 tensors, assigned by order because all shapes match; check the list:" in out
    assert "  features.0.weight -> conv1_1.weight" in out
    assert "  classifier.4.bias -> fc3.bias" in out
    assert any(line.startswith(f"{output}: demo, prelu, 4 classes, imported from") for line in out)
    assert "  mean 123.68, 116.78, 103.94 (R, G, B; 0 to 255)" in out
    assert out[-2:] == [f"  prelunet inspect {output}", f"  prelunet export {output} -o {tmp_path / 'net.onnx'}"]
    assert read_checkpoint(output).architecture == architecture("demo")
    assert run([*command, *options]) == 2
    assert "already exists" in capsys.readouterr().err
    assert run([*command, *options, "--force"]) == 0
    assert run(["inspect", str(output)]) == 0


def test_the_verb_writes_nothing_if_it_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.save(our_names(), tmp_path / "net.pt")
    output = tmp_path / "out.safetensors"
    command = ["import", str(tmp_path / "net.pt"), "-o", str(output), "--arch", "demo", "--classes", "3"]
    assert run([*command, "--mean", "0.5"]) == 3
    assert "missing conv1_1.weight [24, 3, 3, 3]" in capsys.readouterr().err
    assert run([*command, "--mean", "110"]) == 2
    assert run([*command]) == 2
    assert "--mean" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["net.pt"]
