"""Error rates, metrics.jsonl, and `prelunet train`."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from prelunet.evaluator.cli import run as run_program
from prelunet.evaluator.errors import DatasetError, RunFolderError, UsageError
from prelunet.training.data.splits import open_splits
from prelunet.training.loop.train import train
from prelunet.training.loop.trainer import Trainer
from prelunet.training.run_state.metrics_log import MetricsLog
from prelunet.training.verbs import train as train_verb
from tests.training.training_folders import RECIPE, make_dataset, write_image, write_recipe


def test_errors_are_percent_of_all_images_not_means_of_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("prelunet.training.loop.trainer.EVALUATION_BATCH", 4)  # the last batch has one image
    data = make_dataset(tmp_path / "data", train=1, val=3, classes=tuple("abcdefg"))
    (tmp_path / "run").mkdir()
    trainer = Trainer(RECIPE, open_splits(data), tmp_path / "run")
    with torch.no_grad():
        for parameter in trainer.net.parameters():
            parameter.zero_()
        trainer.net.get_parameter("fc3.bias").copy_(torch.arange(7, 0, -1))  # class a has rank 1, class g rank 7
    errors, images = trainer.evaluate()
    assert images == 21
    assert errors.top1_error == pytest.approx(100 * 6 / 7, abs=1e-4)  # rounded to 4 decimals
    assert errors.top5_error == pytest.approx(100 * 2 / 7, abs=1e-4)
    assert str(replace(errors, top1_error=15.8, top5_error=0.45)) == "top-1 error 15.80 % top-5 error 0.45 %"


def test_truncating_a_log_removes_later_and_incomplete_lines_but_refuses_damaged_ones(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path / "metrics.jsonl")
    lines = [
        '{"step": 5, "loss": 1}\n',
        '{"step": 5, "top1_error": 1}\n',
        '{"step": 6, "loss": 1}\n',
        '{"step": 7, "lo',
    ]
    log.path.write_text("".join(lines))
    log.truncate_after(6, evaluated=False)
    assert log.path.read_text() == "".join(lines[:3])
    log.truncate_after(5, evaluated=True)
    assert log.path.read_text() == "".join(lines[:2])
    log.truncate_after(5, evaluated=False)
    assert log.path.read_text() == lines[0]
    log.path.write_text(lines[0] + lines[2].removesuffix("\n"))  # truncated before the newline
    log.truncate_after(6, evaluated=True)
    assert log.path.read_text() == lines[0]
    log.path.write_text("{broken\n" + lines[0])
    with pytest.raises(RunFolderError, match="line 1 is damaged"):
        log.truncate_after(5, evaluated=True)
    for line in ('{"step": true}\n', '{"step": "5"}\n', '{"step": 5, "loss": NaN}\n'):
        log.path.write_text(lines[0] + line)
        with pytest.raises(RunFolderError, match="line 2 is damaged"):
            log.truncate_after(5, evaluated=True)


@pytest.fixture
def recipe_file(tmp_path: Path) -> Path:
    return write_recipe(tmp_path / "small.toml", RECIPE)


def test_the_last_line_of_the_verb_is_the_two_errors(
    data: Path, tmp_path: Path, recipe_file: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    code = run_program(["train", "--recipe", str(recipe_file), "--data", str(data), "--out", str(out), "--steps", "2"])
    captured = capfd.readouterr()
    assert code == 0, captured.err
    assert re.fullmatch(r"top-1 error \d+\.\d\d % top-5 error \d+\.\d\d %", captured.out.splitlines()[-1])
    assert f"prelunet export {out / 'last.safetensors'} -o {out / 'model.onnx'}" in captured.err
    assert f"--data {data} --protocol multi-scale" in captured.err
    assert json.loads((out / "training.json").read_text())["recipe"]["steps"] == 2


def test_the_automatic_crop_follows_the_images(tmp_path: Path, recipe_file: Path) -> None:
    large, out = tmp_path / "large", tmp_path / "run"
    for name in ("train", "val"):
        for place in range(9):
            write_image(large / name / "ab"[place % 2] / f"{place}.png", place, (40, 30), 40 * place % 99)
    arguments = ["--recipe", str(recipe_file), "--data", str(large), "--out", str(out), "--steps", "1", "--seed", "0"]
    assert run_program(["train", *arguments, "--crop", "auto"]) == 0
    recipe = json.loads((out / "training.json").read_text())["recipe"]
    # 30·7/8 = 26.25 → 28; everything grew by 28/12
    assert (recipe["crop"], recipe["scales"], recipe["batch"]) == (28, [28, 37], 2)
    assert recipe["seed"] == 0


def test_another_crop_does_not_change_keys_given_as_options(
    data: Path, tmp_path: Path, recipe_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    arguments = ["--recipe", str(recipe_file), "--data", str(data), "--out", str(out), "--steps", "1", "--crop", "24"]
    assert run_program(["train", *arguments, "--batch", "3"]) == 0
    recipe = json.loads((out / "training.json").read_text())["recipe"]
    assert (recipe["crop"], recipe["scales"], recipe["batch"], recipe["rate"]) == (24, [24, 32], 3, RECIPE.rate)
    assert "crop 24, scales 24 to 32, batch 3, rate 0.003" in capsys.readouterr().err


def test_the_automatic_crop_is_a_multiple_of_the_stride_of_the_requested_net(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train_verb, "median_shorter_side", lambda _: 250.0)
    with pytest.raises(UsageError, match="unknown architecture 'Z'"):
        train_verb.requested_recipe("small", "auto", {"architecture": "Z"}, None)
    # 7/8 of 250 is 218.75: 55 times 4, or 14 times 16
    assert train_verb.requested_recipe("small", "auto", {}, None).crop == 220
    assert train_verb.requested_recipe("small", "auto", {"architecture": "A"}, None).crop == 224


def test_a_crop_may_fit_only_the_requested_architecture_or_scales() -> None:
    recipe = train_verb.requested_recipe("A", "28", {"architecture": "demo"}, None)
    assert (recipe.architecture, recipe.crop, recipe.scales, recipe.batch) == ("demo", 28, (32, 64), 1024)
    recipe = train_verb.requested_recipe("small", "4000", {"scales": "4000,4096"}, None)
    assert (recipe.crop, recipe.scales) == (4000, (4000, 4096))


@pytest.mark.parametrize("crop", [None, "56"])
def test_the_plateau_policy_removes_the_rate_drops_of_the_recipe(crop: str | None) -> None:
    recipe = train_verb.requested_recipe("small", crop, {"rate_policy": "plateau"}, None)
    assert (recipe.rate_policy, recipe.rate_drops) == ("plateau", ())
    assert (recipe.patience, recipe.most_drops) == (4, 2)  # which the recipe leaves to the paper's
    recipe = train_verb.requested_recipe("A", None, {"rate_policy": "at", "rate_drops": "0.5,0.8"}, None)
    assert (recipe.rate_policy, recipe.rate_drops) == ("at", (0.5, 0.8))
    assert train_verb.requested_recipe("small", crop, {"rate_policy": "at"}, None).rate_drops == (0.4, 0.6, 0.75, 0.88)


def test_rate_drops_with_the_plateau_policy_are_refused() -> None:
    keys = {"rate_policy": "plateau", "rate_drops": "0.5"}
    for name, given in (("small", keys), ("A", {"rate_drops": "0.5"})):
        with pytest.raises(UsageError, match=r"rate_drops \[0\.5\] apply to .* remove them .*--rate-drops"):
            train_verb.requested_recipe(name, None, given, None)


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--recipe", "nonesuch"], 2, "Choose one of "),
        (["--recipe", "demo", "--crop", "big"], 2, "side in pixels, 1 to 4096, or auto"),
        (["--recipe", "demo", "--crop", "3"], 2, "too small"),
        (["--recipe", "demo", "--crop", "1" * 5000], 2, "side in pixels, 1 to 4096, or auto"),
        (["--recipe", "demo", "--data", "nowhere"], 2, "no such file or folder"),
        (["--recipe", "demo", "--steps", "0"], 2, "steps"),
        (["--recipe", "demo", "--steps", "3", "--epochs", "2"], 2, "exclude each other"),
    ],
)
def test_invalid_options_are_refused_with_advice(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], arguments: list[str], code: int, message: str
) -> None:
    assert run_program(["train", *arguments, "--out", str(tmp_path / "run")]) == code
    assert message in capfd.readouterr().err
    assert not (tmp_path / "run").exists()


def test_out_may_not_be_a_file(data: Path, tmp_path: Path) -> None:
    (tmp_path / "run").write_text("")
    with pytest.raises(UsageError, match=r"there is a file in the place of a folder.*--out"):
        train(RECIPE, data, tmp_path / "run")


def test_nothing_is_written_if_the_data_cannot_be_used(data: Path, tmp_path: Path) -> None:
    with pytest.raises(DatasetError):
        train(RECIPE, data / "train", tmp_path / "run")
    assert not (tmp_path / "run").exists()
