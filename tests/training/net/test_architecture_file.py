"""Architectures of one's own: read from TOML or refused with the fix, trained, resumed, printed."""

import json
import os
import re
import shlex
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from msgspec import structs

from prelunet.evaluator.architectures import ARCHITECTURES, MAX_PARAMETERS, architecture, architecture_from_json
from prelunet.evaluator.cli import run
from prelunet.evaluator.errors import RunFolderError, UsageError
from prelunet.training.loop.train import train
from prelunet.training.loop.trainer import Trainer
from prelunet.training.net.architecture_file import find_architecture, read_architecture
from prelunet.training.net.checkpoints import Checkpoint, read_checkpoint, write_checkpoint
from prelunet.training.net.initialization import CHANNEL_MEAN, initial_tensors, parse_classes
from prelunet.training.recipe import read_recipe
from prelunet.training.verbs.train import requested_recipe
from tests.training.training_folders import RECIPE, write_recipe

MODEL_A = """
name = "like-A"
crop = 224
trunk = [
    { conv = 96, kernel = 7, stride = 2, pad = 3 },
    { pool = 2, stride = 2 },
    { conv = 256, kernel = 3, pad = 1, repeat = 5 },
    { pool = 2, stride = 2 },
    { conv = 512, kernel = 3, pad = 1, repeat = 5 },
    { pool = 2, stride = 2 },
    { conv = 512, kernel = 3, pad = 1, repeat = 2 },
    { conv = 512, kernel = 3, pad = 1, repeat = 3 },
]
spp_levels = [7, 3, 2, 1]
hidden = 4096
"""
MINE = """
crop = 12
trunk = [
    { conv = 4, kernel = 3, stride = 2, pad = 1 },
    { pool = 2, stride = 2 },
    { conv = 5, kernel = 2, pad = 1 },
]
spp_levels = [3, 1]
hidden = [7, 6]
"""
TRUNK = MINE.partition("trunk = ")[2].partition("spp_levels")[0]


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    path = tmp_path / "mine.toml"
    path.write_text(MINE)
    return path


def test_model_a_as_a_file_is_the_built_in_one_with_the_same_names_of_layers(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text(MODEL_A)
    assert structs.replace(read_architecture(tmp_path / "a.toml"), name="A") == ARCHITECTURES["A"]


def test_a_file_without_names_is_named_after_itself_and_its_pools_count_stages(mine: Path) -> None:
    net = read_architecture(mine)
    assert [layer.name for layer in net.trunk] == ["conv1", "pool1", "conv2"]
    assert (net.name, net.window, net.widths, net.activation) == ("mine", 4, (7, 6), "prelu")


def test_an_architecture_with_two_widths_survives_json(mine: Path) -> None:
    net = read_architecture(mine)
    assert architecture_from_json(json.loads(json.dumps(net.to_json()))) == net
    assert "hidden2" not in ARCHITECTURES["A"].to_json()


def test_two_equal_widths_are_one_width_for_both(mine: Path) -> None:
    mine.write_text(MINE.replace("[7, 6]", "[7, 7]"))
    twice = read_architecture(mine)
    mine.write_text(MINE.replace("[7, 6]", "7"))
    assert read_architecture(mine) == twice


HUGE = "0x1" + 5000 * "0"  # TOML allows it; Python does not print it in decimal


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("crop = 12", "crop = 2", r"crop of 2 px is too small: .* vanishes at pool1 \(2 px, conv1 1, pool1 0\)"),
        ("[3, 1]", "[5, 1]", r"crop of 12 px gives a 4x4 feature map, too small for 5x5 bins\. Use a larger crop"),
        ("stride = 2 }", "strid = 2 }", r"layer 2 of the trunk: unknown key 'strid'\. Valid keys: pool, stride, name"),
        ("spp_levels", "levels", r"unknown key 'levels'\. Valid keys: crop, trunk, spp_levels, hidden, name"),
        ("crop = 12", 'activation = "relu"', r"'activation'; set it with --activation or in the recipe\. Valid keys"),
        ("crop = 12", "", r"no value for crop\. Add the missing keys"),
        ("kernel = 2, ", "", r"layer 3 of the trunk: no value for kernel"),
        ("conv = 5, ", "", r"layer 3 of the trunk: it needs the key conv, its number of channels, or pool"),
        ("pool = 2,", "pool = 2, pad = 1,", r"layer 2 of the trunk: unknown key 'pad'"),
        ("kernel = 2, pad = 1", "kernel = 2, pad = 2", r"the pad of conv2, 2, should be less than its kernel, 2"),
        ("kernel = 2", "kernel = '2'", r"layer 3 of the trunk: Expected `int`, got `str` - at `\$\.kernel`"),
        ("kernel = 2", f"kernel = {HUGE}", r"layer 3 of the trunk: Expected `int` <= 4096 - at `\$\.kernel`"),
        ("conv = 5", "conv = 1" + 5000 * "0", r"invalid TOML .*digits"),
        ("conv = 5", "conv = true", r"layer 3 of the trunk: Expected `int`, got `bool` - at `\$\.channels`"),
        ("pad = 1 },\n]", "pad = 1, repeat = 10000 },\n]", r"layer 3 of the trunk: repeat should be .* from 1 to 1000"),
        ("pad = 1 },\n]", 'pad = 1, name = "conv1" },\n]', r"layers need unique names such as conv2_1"),
        ("pad = 1 },\n]", 'pad = 1, name = "last" },\n]', r"layers need unique names such as conv2_1"),
        ("    { conv = 4, kernel = 3, stride = 2, pad = 1 },", "7,", r"layer 1 .*: Expected `object`, got `int`"),
        (TRUNK, "[]\n", r"has no convolution"),
        (TRUNK, "[{ pool = 2, stride = 2 }]\n", r"has no convolution"),
        ("[7, 6]", "[7, 6, 5]", r"hidden should be one width for both fc1 and fc2, or a list of two"),
        ("[7, 6]", "2024-01-01", r"Expected `int`, got `.*` - at `\$\.hidden`"),
        ("[7, 6]", "0", r"Expected `int` >= 1 - at `\$\.hidden`"),
        ("[7, 6]", "60000", rf"3,60\d,\d+,\d+ parameters .* at most {MAX_PARAMETERS:,}"),
        (
            "crop = 12",
            'crop = 12\nname = "demo"',
            r"the name 'demo' is a built-in .* Set another with the key",
        ),
        ("crop = 12", 'crop = 12\nname = "\\u001b[2J"', r"the name '\\x1b\[2J' is .* not 1 to 100 letters"),
        ("stride = 2 }", "stride = 4000 }", r"the strides multiply to more than 4096 px"),
        ("crop = 12", "crop = 12 12", r"invalid TOML \(.*line 2"),
    ],
)
def test_a_file_of_no_possible_net_is_refused_with_the_key_and_nothing_is_written(
    mine: Path, capsys: pytest.CaptureFixture[str], old: str, new: str, message: str
) -> None:
    assert old in MINE
    mine.write_text(MINE.replace(old, new))
    assert run(["init", "--arch", str(mine), "--classes", "3", "-o", str(mine.with_name("net"))]) == 2
    printed = " ".join(capsys.readouterr().err.split())
    assert str(mine) in printed
    assert re.search(message, printed), printed
    assert list(mine.parent.iterdir()) == [mine]


def test_a_missing_file_a_folder_a_pipe_and_other_bytes_are_refused(tmp_path: Path) -> None:
    (tmp_path / "folder.toml").mkdir()
    os.mkfifo(tmp_path / "pipe.toml")
    (tmp_path / "bytes.toml").write_bytes(b"\xff\xfe")
    for name, message in (
        ("missing", r"missing\.toml: cannot be read \(No such file or directory\).*RUN/last\.safetensors"),
        ("folder", r"folder\.toml: cannot be read \(Is a directory\)"),
        ("bytes", r"bytes\.toml: cannot be read \(.*utf-8"),
        ("pipe", r"pipe\.toml: cannot be read \(not a regular file"),
    ):
        with pytest.raises(UsageError, match=message):
            read_architecture(tmp_path / f"{name}.toml")


def test_an_existing_file_with_another_ending_is_refused_with_the_endings_that_are_read(mine: Path) -> None:
    other = mine.rename(mine.with_suffix(".txt"))
    with pytest.raises(UsageError, match=r"mine\.txt: .* must end in \.toml, and a checkpoint in \.safetensors"):
        find_architecture(str(other))
    assert find_architecture("demo", mine.parent) == "demo"


def test_a_net_that_only_its_classes_make_too_large_for_a_file_is_refused(mine: Path) -> None:
    mine.write_text(MINE.replace("[7, 6]", "[1, 60000]"))
    net = read_architecture(mine)
    with pytest.raises(UsageError, match=r"architecture mine: 6\d\d,\d+,\d+ parameters with 10,000 classes"):
        initial_tensors(net, 10_000, 0)


def test_weights_trained_elsewhere_are_imported_into_an_architecture_of_a_file(mine: Path, tmp_path: Path) -> None:
    tensors, net = initial_tensors(read_architecture(mine), 3, seed=4), tmp_path / "net.safetensors"
    torch.save({name: torch.from_numpy(tensor) for name, tensor in tensors.items()}, tmp_path / "net.pt")
    arguments = ["--arch", str(mine), "--classes", "3", "--mean", "99", "--range", "255", "-o", str(net)]
    assert run(["import", str(tmp_path / "net.pt"), *arguments]) == 0
    imported = read_checkpoint(net)
    assert imported.architecture == read_architecture(mine)
    np.testing.assert_array_equal(imported.tensors["fc2.weight"], tensors["fc2.weight"])


# Training


def test_a_recipe_names_a_file_relative_to_its_own_folder(
    mine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = write_recipe(tmp_path / "recipe.toml", RECIPE)
    recipe.write_text(recipe.read_text().replace('"demo"', '"mine.toml"'))
    monkeypatch.chdir("/")
    net = read_recipe(str(recipe)).build_architecture()
    assert net == read_architecture(mine)


def test_activation_and_crop_are_those_of_the_recipe(mine: Path, tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path / "recipe.toml", replace(RECIPE, activation="lrelu"))
    keys = {"architecture": str(mine)}
    requested = requested_recipe(str(recipe), "16", keys, None)
    net = requested.build_architecture()
    assert (net.name, net.crop, net.activation) == ("mine", 16, "lrelu")
    assert requested.to_json()["architecture"] == net.to_json()


def test_a_run_contains_its_architecture_and_resumes_without_the_file(
    mine: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = write_recipe(tmp_path / "recipe.toml", RECIPE)

    def run_with(file: Path, out: Path) -> None:
        train(requested_recipe(str(recipe), None, {"architecture": str(file)}, None), data, out)

    run_with(mine, tmp_path / "whole")
    with monkeypatch.context() as patch:
        step, steps = Trainer.step, iter(range(7))  # a state is saved after every third step
        patch.setattr(Trainer, "step", lambda *given: step(*given) if next(steps, None) is not None else fail("killed"))
        with pytest.raises(RuntimeError, match="killed"):
            run_with(mine, tmp_path / "run")
    assert json.loads((tmp_path / "run/training.json").read_text())["recipe"]["architecture"] == {
        **read_architecture(mine).to_json()
    }
    mine.write_text(MINE.replace("conv = 5", "conv = 6"))
    with pytest.raises(RunFolderError, match=r"recipe\.architecture\.trunk\.2\.channels: 5 in the folder, 6 now"):
        run_with(mine, tmp_path / "run")
    mine.unlink()
    run_with(tmp_path / "run/last.safetensors", tmp_path / "run")
    whole, resumed = ((tmp_path / name / "last.safetensors").read_bytes() for name in ("whole", "run"))
    assert resumed == whole


def fail(text: str) -> bool:
    raise RuntimeError(text)


def test_a_checkpoint_stands_for_its_architecture(tmp_path: Path) -> None:
    path = tmp_path / "net.safetensors"
    net = architecture("demo", activation="relu", crop=20)
    mean = np.array(CHANNEL_MEAN, np.float32)
    write_checkpoint(path, Checkpoint(net, parse_classes("3"), mean, initial_tensors(net, 3, 0)))
    assert find_architecture(str(path)) == net


# Tables and docs


def test_init_and_inspect_print_the_same_table_of_maps_bins_and_parameters(
    mine: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, model = tmp_path / "net.safetensors", tmp_path / "net.onnx"
    assert run(["init", "--arch", str(mine), "--classes", "3", "-o", str(path)]) == 0
    printed = capsys.readouterr().out
    assert run(["export", str(path), "-o", str(model)]) == 0
    capsys.readouterr()
    tables = [printed]
    for file in (path, model):
        assert run(["inspect", str(file)]) == 0
        tables.append(capsys.readouterr().out)
    rows = [
        re.findall(r"^(?:Layers of .*|(?:conv|pool|pyramid|fc)\S*  .*\d)$", table, re.MULTILINE)[:9] for table in tables
    ]
    assert [line.split() for line in rows[0]] == [
        ["Layers", "of", "mine,", "for", "a", "crop", "of", "12x12", "pixels"],
        ["conv1", "3x3,", "stride", "2,", "pad", "1", "6x6x4", "116"],  # 4·3·3·3 weights, 4 biases, 4 slopes
        ["pool1", "2x2,", "stride", "2", "3x3x4", "0"],
        ["conv2", "2x2,", "stride", "1,", "pad", "1", "4x4x5", "90"],
        ["pyramid", "3x3,", "1x1", "bins", "of", "the", "4x4", "window", "10x5", "0"],
        ["fc1", "7", "364"],
        ["fc2", "6", "54"],  # 7·6 weights, 6 biases, 6 slopes
        ["fc3", "3", "21"],
    ]
    assert rows[1][:8] == rows[2][:8] == rows[0]


def test_the_architecture_of_the_documentation_is_accepted_by_init_and_train(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = (Path(__file__).parents[3] / "docs" / "training.md").read_text()
    section = page.partition("## Your own architecture")[2].partition("\n## ")[0]
    (toml_kind, toml), (_, commands) = re.findall(r"^```(\w*)\n(.*?)^```", section, re.DOTALL | re.MULTILINE)
    assert toml_kind == "toml"
    (tmp_path / "mine.toml").write_text(toml)
    monkeypatch.chdir(tmp_path)
    init, training = commands.splitlines()
    assert run(shlex.split(init)[1:]) == 0
    assert read_checkpoint(Path("mine.safetensors")).architecture.window == 9  # 36 px, stride 4
    more = ["--data", str(data), "--steps", "2", "--device", "cpu"]
    assert run([*shlex.split(training)[1:], *more]) == 0
    assert read_checkpoint(Path("runs/mine/last.safetensors")).architecture.widths == (128, 64)
