"""Checkpoints are read as they were written; any other file is refused."""

import errno
import json
import os
from collections.abc import Callable
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import safetensors.numpy

import prelunet.evaluator.files
from prelunet.evaluator import cli
from prelunet.evaluator.architectures import ACTIVATIONS, Activation
from prelunet.evaluator.errors import CheckpointError, EnvironmentFault, UsageError
from prelunet.evaluator.files import sha256_of
from prelunet.training.importing.name_map import read_name_map
from prelunet.training.importing.state_dicts import read_state_dict
from prelunet.training.inspection.describe_file import inspect_file
from prelunet.training.loop.fine_tune import load_pretrained
from prelunet.training.net.checkpoints import Checkpoint, read_checkpoint, write_checkpoint
from prelunet.training.net.initialization import Initialization
from tests.helpers.tiny_nets import CLASSES, mean_image, tiny_checkpoint


def assert_same(actual: Checkpoint, expected: Checkpoint) -> None:
    assert (actual.architecture, actual.classes) == (expected.architecture, expected.classes)
    assert (actual.recipe, actual.dataset, actual.metrics) == (expected.recipe, expected.dataset, expected.metrics)
    np.testing.assert_array_equal(actual.mean, expected.mean, strict=True)
    assert list(actual.tensors) == list(expected.tensors)
    for name, tensor in expected.tensors.items():
        np.testing.assert_array_equal(actual.tensors[name], tensor, strict=True)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_a_checkpoint_is_read_as_it_was_written(tmp_path: Path, activation: Activation) -> None:
    checkpoint = tiny_checkpoint(
        activation,
        recipe={"name": "demo", "steps": 2000, "rates": [0.02, 0.002]},
        dataset={"fingerprint": "ab" * 32, "images": 6000},
        metrics={"step": 2000, "top1_error": 18.25, "top5_error": 0.5},
    )
    write_checkpoint(tmp_path / "net", checkpoint)
    assert_same(read_checkpoint(tmp_path / "net"), checkpoint)


def test_a_mean_image_is_read_as_it_was_written(tmp_path: Path) -> None:
    checkpoint = tiny_checkpoint(mean=mean_image())
    write_checkpoint(tmp_path / "net", checkpoint)
    assert_same(read_checkpoint(tmp_path / "net"), checkpoint)
    assert safetensors.numpy.load_file(tmp_path / "net")["mean"].shape == (24, 24, 3)


def test_the_file_follows_the_contract(tmp_path: Path) -> None:
    checkpoint = tiny_checkpoint()
    write_checkpoint(tmp_path / "net", checkpoint)
    with safetensors.safe_open(tmp_path / "net", "numpy") as file:
        metadata = {key: json.loads(value) for key, value in file.metadata().items()}
        assert set(file.keys()) == set(checkpoint.tensors)
        for name, tensor in checkpoint.tensors.items():
            np.testing.assert_array_equal(file.get_tensor(name), tensor, strict=True)
        digest = sha256()
        for key, text in sorted(file.metadata().items()):
            if key != "prelunet.sha256":
                digest.update(f"{key} {text}\n".encode())
        for name, tensor in sorted(checkpoint.tensors.items()):
            digest.update(f"{name} F32 {list(tensor.shape)}\n".encode() + tensor.tobytes())
    assert metadata == {
        "prelunet.version": 1,
        "prelunet.architecture": checkpoint.architecture.to_json(),
        "prelunet.classes": [{"wnid": f"n0000000{i}", "name": f"thing {i}"} for i in range(CLASSES)],
        "prelunet.mean": [123.68, 116.78, 103.94],
        "prelunet.recipe": None,
        "prelunet.dataset": None,
        "prelunet.metrics": None,
        "prelunet.sha256": digest.hexdigest(),
    }


def test_equal_checkpoints_give_equal_bytes_in_any_order_of_their_parts(tmp_path: Path) -> None:
    checkpoint = tiny_checkpoint(recipe={"name": "demo", "steps": 2000, "seed": 1, "batch": 64})
    assert checkpoint.recipe is not None
    turned = replace(
        checkpoint,
        tensors=dict(reversed(checkpoint.tensors.items())),
        recipe=dict(reversed(checkpoint.recipe.items())),
    )
    for name, some in (("a", checkpoint), ("b", checkpoint), ("c", turned)):
        write_checkpoint(tmp_path / name, some)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes() == (tmp_path / "c").read_bytes()
    assert sha256_of(tmp_path / "a") == sha256_of(tmp_path / "c")


def test_a_tensor_that_is_not_contiguous_is_written_in_its_logical_order(tmp_path: Path) -> None:
    checkpoint = tiny_checkpoint()
    weight = checkpoint.tensors["conv1.weight"]
    channels_last = np.ascontiguousarray(weight.transpose(0, 2, 3, 1)).transpose(0, 3, 1, 2)
    write_checkpoint(
        tmp_path / "net", replace(checkpoint, tensors={**checkpoint.tensors, "conv1.weight": channels_last})
    )
    np.testing.assert_array_equal(read_checkpoint(tmp_path / "net").tensors["conv1.weight"], weight)


def test_tensors_can_be_changed_after_loading_without_changing_the_file(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "net", tiny_checkpoint())
    before = sha256_of(tmp_path / "net")
    read_checkpoint(tmp_path / "net").tensors["fc1.weight"][:] = 0
    assert sha256_of(tmp_path / "net") == before


def test_a_checkpoint_truncated_anywhere_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "net.safetensors"
    write_checkpoint(path, tiny_checkpoint())
    data = path.read_bytes()
    for length in [0, 1, 7, 8, 9, 500, *range(1000, len(data), 997), len(data) - 1]:
        path.write_bytes(data[:length])
        with pytest.raises(CheckpointError, match=r"net\.safetensors: (damaged|not a checkpoint)"):
            read_checkpoint(path)


def test_a_truncated_checkpoint_is_reported_as_an_interrupted_copy(tmp_path: Path) -> None:
    path = tmp_path / "net.safetensors"
    write_checkpoint(path, tiny_checkpoint(mean=mean_image()))
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])
    with pytest.raises(CheckpointError, match=rf"its {len(data) // 2} bytes .* interrupted copy .*\. Copy it again"):
        read_checkpoint(path)


def test_a_missing_file_and_a_folder_are_refused(tmp_path: Path) -> None:
    for path in (tmp_path / "nowhere", tmp_path):
        with pytest.raises(UsageError, match="Give the path of a checkpoint"):
            read_checkpoint(path)
        with pytest.raises(UsageError, match="cannot be read"):
            sha256_of(path)


@pytest.mark.parametrize("read", [read_checkpoint, read_state_dict, read_name_map, inspect_file])
def test_a_pipe_is_refused_without_waiting(tmp_path: Path, read: Callable[[Path], object]) -> None:
    os.mkfifo(tmp_path / "net.safetensors")
    with pytest.raises(UsageError, match=r"net\.safetensors: .*not a regular file"):
        read(tmp_path / "net.safetensors")


def test_a_file_of_another_format_is_refused(tmp_path: Path) -> None:
    (tmp_path / "net.pt").write_bytes(b"PK\x03\x04" + bytes(range(256)) * 20)
    with pytest.raises(CheckpointError, match=r"net\.pt: not a checkpoint: not a safetensors file"):
        read_checkpoint(tmp_path / "net.pt")


def test_a_safetensors_file_without_our_metadata_is_refused(tmp_path: Path) -> None:
    for metadata in (None, {"format": "pt"}):
        safetensors.numpy.save_file({"conv1.weight": np.zeros(3, np.float32)}, tmp_path / "net", metadata)
        with pytest.raises(CheckpointError, match="not a prelunet checkpoint"):
            read_checkpoint(tmp_path / "net")


def rewrite(
    path: Path,
    tensors: Callable[[dict[str, Any]], Any] = lambda _: None,
    metadata: Callable[[dict[str, str]], Any] = lambda _: None,
) -> None:
    """Write a valid checkpoint, changed, with the library's own writer and without its sha256."""
    write_checkpoint(path, tiny_checkpoint())
    with safetensors.safe_open(path, "numpy") as file:
        texts = file.metadata()
    del texts["prelunet.sha256"]
    arrays = safetensors.numpy.load_file(path)
    tensors(arrays)
    metadata(texts)
    safetensors.numpy.save_file(arrays, path, texts)


def test_a_file_of_another_writer_is_read_unchecked(tmp_path: Path) -> None:
    rewrite(tmp_path / "net")
    assert_same(read_checkpoint(tmp_path / "net"), tiny_checkpoint())
    assert read_checkpoint(tmp_path / "net").unchecked
    write_checkpoint(tmp_path / "ours", tiny_checkpoint())
    assert not read_checkpoint(tmp_path / "ours").unchecked


def test_export_inspect_and_fine_tuning_say_that_a_file_without_sha256_is_unchecked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, model = tmp_path / "net.safetensors", tmp_path / "net.onnx"
    for said, prepare in ((True, rewrite), (False, lambda path: write_checkpoint(path, tiny_checkpoint()))):
        prepare(path)
        assert cli.run(["export", str(path), "-o", str(model), "--force"]) == 0
        assert cli.run(["inspect", str(path)]) == 0
        checkpoint, lines = tiny_checkpoint(), []
        start = path, checkpoint.architecture, checkpoint.classes, 0, Initialization(), (3,)
        load_pretrained(*start, report=lines.append)
        printed = capsys.readouterr()
        for text in (printed.out, printed.err, "".join(lines)):
            assert ("has no prelunet.sha256" in " ".join(text.split())) == said


def test_a_flipped_bit_in_any_tensor_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "net"
    write_checkpoint(path, tiny_checkpoint(mean=mean_image()))
    data = path.read_bytes()
    header = json.loads(data[8 : (start := 8 + int.from_bytes(data[:8], "little"))])
    for name in header.keys() - {"__metadata__"}:
        place = start + header[name]["data_offsets"][1] - 4  # the lowest bit of the last number
        path.write_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
        with pytest.raises(CheckpointError, match="damaged: tensors or metadata do not have the sha256"):
            read_checkpoint(path)


def test_a_flipped_bit_anywhere_in_the_header_is_refused_or_reported(tmp_path: Path) -> None:
    path = tmp_path / "net"
    write_checkpoint(path, tiny_checkpoint())
    data = bytearray(path.read_bytes())
    place_of_key = data.index(b"prelunet.sha256")
    for place in (*range(16), *range(16, 8 + int.from_bytes(data[:8], "little"), 5)):
        data[place] ^= (bit := 1 << place % 8)
        path.write_bytes(data)
        data[place] ^= bit
        try:
            assert read_checkpoint(path).unchecked, place
            assert place_of_key <= place < place_of_key + len("prelunet.sha256"), place
        except CheckpointError:
            pass


def test_tensors_of_one_shape_that_changed_places_are_refused(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "net", tiny_checkpoint())
    data = (tmp_path / "net").read_bytes()
    swapped = data.replace(b'"fc1.bias"', b'"fc0.bias"').replace(b'"fc2.bias"', b'"fc1.bias"')
    (tmp_path / "net").write_bytes(swapped.replace(b'"fc0.bias"', b'"fc2.bias"'))
    with pytest.raises(CheckpointError, match="do not have the sha256"):
        read_checkpoint(tmp_path / "net")


@pytest.mark.parametrize(
    ("change", "messages"),
    [
        (lambda t: t.pop("conv2.slope"), ["missing conv2.slope"]),
        (lambda t: t.update(extra=np.zeros(2, np.float32)), ["unexpected extra"]),
        (
            lambda t: t.update({"fc2.weight": t["fc2.weight"][:, :5].copy()}),
            [r"fc2.weight is \[6, 5\], should be \[6, 6\]"],
        ),
        (lambda t: t.update({"fc1.bias": t["fc1.bias"].astype(np.float64)}), ["fc1.bias is F64, should be F32"]),
        (lambda t: t.update({"fc1.bias": t["fc1.bias"].astype(np.float16)}), ["fc1.bias is F16, should be F32"]),
        (
            lambda t: (t.pop("conv1.bias"), t.update(mean=np.zeros((24, 24, 3), np.float32))),
            ["missing conv1.bias", "unexpected mean"],
        ),
    ],
)
def test_tensors_that_do_not_fit_the_architecture_are_listed(
    tmp_path: Path, change: Callable[[dict[str, Any]], Any], messages: list[str]
) -> None:
    rewrite(tmp_path / "net", tensors=change)
    for message in messages:
        with pytest.raises(CheckpointError, match=message):
            read_checkpoint(tmp_path / "net")


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_non_finite_value_is_neither_read_nor_written(tmp_path: Path, value: float) -> None:
    def make_non_finite(tensors: dict[str, Any]) -> None:
        tensors["fc2.weight"][2, 3] = value

    rewrite(tmp_path / "net", tensors=make_non_finite)
    with pytest.raises(CheckpointError, match=r"fc2\.weight contains values that are not finite"):
        read_checkpoint(tmp_path / "net")
    diverged = tiny_checkpoint()
    make_non_finite(dict(diverged.tensors))
    with pytest.raises(CheckpointError, match="training has diverged"):
        write_checkpoint(tmp_path / "other", diverged)
    assert not (tmp_path / "other").exists()


def changed_architecture(**changes: Any) -> Callable[[dict[str, str]], None]:
    def change(texts: dict[str, str]) -> None:
        data = json.loads(texts["prelunet.architecture"])
        texts["prelunet.architecture"] = json.dumps({**data, **changes})

    return change


PROVENANCE: dict[str, Any] = {
    "parent_sha256": "ab" * 32,
    "environments": [
        {
            "from_step": 0,
            "versions": {"torch": "2.11.0"},
            "device": "a CPU",
            "processes": 1,
            "threads": 2,
            "precision": "fp32",
            "deterministic": False,
            "cudnn_benchmark": True,
        }
    ],
    "step": 3,
    "total_steps": 7,
    "dataset_fingerprint": "cd" * 32,
}
CONV = {"kind": "conv", "name": "conv1", "channels": 5, "kernel": 3, "stride": 2, "pad": 1}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: m.update({"prelunet.version": "2"}), "checkpoint version 2, .* Install a newer prelunet"),
        (lambda m: m.update({"prelunet.version": '"1"'}), "'prelunet.version' is malformed"),
        (lambda m: m.pop("prelunet.classes"), "no 'prelunet.classes' in the metadata"),
        (lambda m: m.update({"prelunet.classes": "[1, 2"}), "'prelunet.classes' is malformed"),
        (lambda m: m.update({"prelunet.classes": "[]"}), "'prelunet.classes' is malformed"),
        (lambda m: m.update({"prelunet.classes": "7"}), "'prelunet.classes' is malformed"),
        (lambda m: m.update({"prelunet.classes": '[{"wnid": "a"}]'}), "'prelunet.classes' is malformed"),
        (
            lambda m: m.update({"prelunet.classes": '[{"wnid": "a", "name": ""}]'}),
            r"fc3.bias is \[3\], should be \[1\]",
        ),
        (
            lambda m: m.update({"prelunet.classes": '[{"wnid": "a", "name": "b"}, {"wnid": "a", "name": "c"}]'}),
            "a duplicate wnid",
        ),
        (lambda m: m.update({"prelunet.mean": "[1, 2, NaN]"}), "'prelunet.mean' is malformed"),
        *(
            (
                lambda m, text=text: m.update({"prelunet.mean": text}),
                r"'prelunet\.mean' is malformed \(neither three numbers from 0 to 255 nor 'image'\)",
            )
            for text in (
                "[1, 2]",
                "[1, 2, 3, 4]",
                "[[1, 2, 3]]",
                "7",
                "null",
                '"images"',
                '{"0": 1, "1": 2, "2": 3}',
                '[1, 2, "x"]',
                '["1", "2", "3"]',
                "[true, false, true]",
                "[1, null, 3]",
                "[-1e38, 1e38, 2]",
                "[1e39, 1, 2]",
                f"[1, 2, {10**400}]",
                "[1, -0.25, 3]",
                "[255.5, 1, 2]",
            )
        ),
        (lambda m: m.update({"prelunet.mean": '"image"'}), "missing mean"),
        (lambda m: m.update({"prelunet.recipe": "[]"}), "'prelunet.recipe' is malformed"),
        (lambda m: m.update({"prelunet.architecture": "[" * 100_000}), "'prelunet.architecture' is malformed"),
        (lambda m: m.update({"prelunet.architecture": "[]"}), "'prelunet.architecture' is malformed"),
        (lambda m: m.update({"prelunet.version": "true"}), "'prelunet.version' is malformed"),
        (lambda m: m.update({"prelunet.version": "0"}), "'prelunet.version' is malformed"),
        *(
            (lambda m, name=name: m.update({"prelunet.classes": name}), "'prelunet.classes' is malformed")
            for name in (
                '[{"wnid": 1, "name": "a"}]',
                '[{"wnid": "a", "name": null}]',
                '[{"wnid": "a", "name": "\\ud800"}]',
                '[{"wnid": "a", "name": "b", "more": 1}]',
                '{"wnid": "a", "name": "b"}',
            )
        ),
        *(
            (lambda m, key=key, text=text: m.update({key: text}), f"'{key}' is malformed")
            for key in ("prelunet.recipe", "prelunet.dataset", "prelunet.metrics")
            for text in ('{"a": NaN}', '{"a": [-Infinity]}', '{"a": 1e999}', '{"a":' * 9000, '{"\\udfff": 1}')
        ),
        *(
            (
                lambda m, change=change: m.update({"prelunet.provenance": json.dumps({**PROVENANCE, **change})}),
                f"'prelunet.provenance' is malformed .*{fault}",
            )
            for change, fault in (
                ({"parent_sha256": "AB" * 32}, r"regex .* - at `\$\.parent_sha256`"),
                ({"parent": None}, "unknown field `parent`"),
                ({"step": 1.5}, r"got `float` - at `\$\.step`"),
                ({"total_steps": -1}, r"`int` >= 0 - at `\$\.total_steps`"),
                ({"dataset_fingerprint": "ab"}, r"regex .* - at `\$\.dataset_fingerprint`"),
                ({"environments": {}}, "Expected `array`, got `object`"),
                ({"environments": [{"device": "a CPU"}]}, "missing required field `from_step`"),
                *(
                    ({"environments": [{**PROVENANCE["environments"][0], **one}]}, fault)
                    for one, fault in (
                        ({"device": "\x1b[2J"}, "without control characters"),
                        (
                            {"versions": {"torch": 2}},
                            r"Expected `str`, got `int` - at `\$\.environments\[0\]\.versions",
                        ),
                        ({"versions": []}, "Expected `object`, got `array`"),
                        ({"from_step": -1}, r"`int` >= 0 - at .*\.from_step`"),
                        ({"threads": 10**12}, r"`int` <= 1000000000 - at .*\.threads`"),
                        ({"deterministic": 1}, r"Expected `bool`, got `int` - at .*\.deterministic`"),
                    )
                ),
            )
        ),
        *(
            (lambda m, text=text: m.update({"prelunet.recipe": f'{{"scales": {text}}}'}), r"'prelunet.recipe' .*scales")
            for text in (
                "5",
                "null",
                "[]",
                '["a", "b"]',
                "[28]",
                "[28, 36, 40]",
                "[28.0, 36.0]",
                "[28, true]",
                "[-5, -1]",
                "[36, 28]",
                "[23, 36]",
                "[1000000, 10000000]",
                "[28, 4097]",
            )
        ),
        (changed_architecture(crop=10**7), "from 1 to 4096 px, not 10000000"),
        (changed_architecture(crop=28.5), r"Expected `int`, got `float` - at `\$\.crop`"),
        (changed_architecture(crop=True), r"Expected `int`, got `bool` - at `\$\.crop`"),
        (changed_architecture(crop=-28), "from 1 to 4096 px, not -28"),
        (changed_architecture(name=[1]), r"Expected `str`, got `array` - at `\$\.name`"),
        (changed_architecture(name="\ud800"), "'prelunet.architecture' is malformed"),
        (changed_architecture(hidden="6"), r"Expected `int`, got `str` - at `\$\.hidden`"),
        (changed_architecture(activation="elu"), r"Invalid enum value 'elu' - at `\$\.activation`"),
        (changed_architecture(crop=4), "too small for 3x3 bins"),
        (changed_architecture(crop="24"), "'prelunet.architecture' is malformed"),
        (changed_architecture(spp_levels=[]), "'prelunet.architecture' is malformed"),
        (changed_architecture(trunk=[]), "'prelunet.architecture' is malformed"),
        (changed_architecture(trunk=[{**CONV, "stride": 0}]), "'prelunet.architecture' is malformed"),
        (changed_architecture(trunk=[{**CONV, "kind": "warp"}]), "'prelunet.architecture' is malformed"),
        (changed_architecture(trunk=[{**CONV, "dilation": 2}]), "'prelunet.architecture' is malformed"),
        (changed_architecture(hidden=7), r"fc2.weight is \[6, 6\], should be \[7, 7\]"),
    ],
)
def test_invalid_metadata_is_refused_with_the_key(
    tmp_path: Path, change: Callable[[dict[str, str]], Any], message: str
) -> None:
    rewrite(tmp_path / "net", metadata=change)
    with pytest.raises(CheckpointError, match=message):
        read_checkpoint(tmp_path / "net")


def test_provenance_is_read_as_it_was_written_and_may_be_absent(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "with", replace(tiny_checkpoint(), provenance=PROVENANCE))
    assert read_checkpoint(tmp_path / "with").provenance == PROVENANCE
    write_checkpoint(tmp_path / "without", tiny_checkpoint())
    assert read_checkpoint(tmp_path / "without").provenance is None
    assert b"provenance" not in (tmp_path / "without").read_bytes()
    first_version = {key: PROVENANCE[key] for key in ("parent_sha256", "environments")}
    write_checkpoint(tmp_path / "first version", replace(tiny_checkpoint(), provenance=first_version))
    unknown = {"step": None, "total_steps": None, "dataset_fingerprint": None}
    assert read_checkpoint(tmp_path / "first version").provenance == {**first_version, **unknown}


@pytest.mark.parametrize("scales", [[24, 24], [24, 4096], [30, 36]])
def test_scales_from_the_crop_to_the_limit_are_read(tmp_path: Path, scales: list[int]) -> None:
    write_checkpoint(tmp_path / "net", tiny_checkpoint(recipe={"scales": scales}))
    assert read_checkpoint(tmp_path / "net").recipe == {"scales": scales}


def test_a_mean_may_have_the_range_of_pixels(tmp_path: Path) -> None:
    for mean in ([0, 0, 0], [255, 254.99998, 0.1]):
        write_checkpoint(tmp_path / "net", tiny_checkpoint(mean=np.array(mean, np.float32)))
        np.testing.assert_array_equal(read_checkpoint(tmp_path / "net").mean, np.array(mean, np.float32), strict=True)


def test_a_checkpoint_that_could_not_be_read_again_is_not_written(tmp_path: Path) -> None:
    good = tiny_checkpoint()
    for bad in (
        replace(good, classes=good.classes[:2]),
        replace(good, mean=np.zeros(4, np.float32)),
        replace(good, mean=np.array([1, np.nan, 3], np.float32)),
        replace(good, mean=np.array([1, -0.25, 3], np.float32)),
        replace(good, mean=np.array([1, 2, 255.5], np.float32)),
        replace(good, mean=np.zeros((24, 23, 3), np.float32)),
        replace(good, tensors={**good.tensors, "fc1.bias": good.tensors["fc1.bias"].astype(np.float64)}),
        replace(good, tensors={name: t for name, t in good.tensors.items() if name != "conv1.slope"}),
    ):
        with pytest.raises(CheckpointError):
            write_checkpoint(tmp_path / "net", bad)
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_keeps_the_last_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "net"
    write_checkpoint(path, tiny_checkpoint(metrics={"step": 1}))

    def full(_descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(prelunet.evaluator.files.os, "fsync", full)
    with pytest.raises(EnvironmentFault, match="the disk is full"):
        write_checkpoint(path, tiny_checkpoint(metrics={"step": 2}))
    assert list(tmp_path.iterdir()) == [path]
    assert read_checkpoint(path).metrics == {"step": 1}
