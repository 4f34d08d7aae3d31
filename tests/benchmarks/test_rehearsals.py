"""Rehearsals of benchmarks that write one result at their end: each in its smallest setting, without its numbers."""

import json
import zipfile
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from benchmarks.claims import activations, demo, depth
from benchmarks.reporting import imagenet_shape
from benchmarks.reporting import run as reporting
from benchmarks.training import step
from prelunet.evaluator.datasets import DatasetSpec
from prelunet.training.data.splits import embedded_dataset_path
from prelunet.training.inspection import slope_trend
from prelunet.training.loop.train import train
from prelunet.training.recipe import Recipe, read_recipe


@pytest.fixture
def rehearse(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    def run(benchmark: ModuleType, *words: str) -> dict[str, Any]:
        """Run a benchmark with a command line and return its result file."""
        output = tmp_path / "result.json"
        monkeypatch.setattr("sys.argv", ["benchmark", *words, "--output", str(output)])
        benchmark.main()
        result: dict[str, Any] = json.loads(output.read_text())
        assert {"date", "commit", "command", "machine", "versions"} <= result.keys()
        assert str(tmp_path) not in output.read_text()
        return result

    return run


@pytest.fixture(scope="module")
def few_images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write four training and two validation images of each embedded class."""
    path = tmp_path_factory.mktemp("data") / "few.zip"
    with zipfile.ZipFile(embedded_dataset_path()) as whole, zipfile.ZipFile(path, "w") as few:
        taken: Counter[str] = Counter()
        for name in sorted(name for name in whole.namelist() if name.endswith(".png")):
            folder = name.rpartition("/")[0]
            taken[folder] += 1
            if taken[folder] <= (4 if folder.startswith("train") else 2):
                few.writestr(name, whole.read(name))
    return path


def train_on(data: Path) -> Any:
    """Return `train` with another dataset."""
    return lambda recipe, _, folder, **options: train(recipe, data, folder, **options)


def short_recipe(name: str) -> Recipe:
    return replace(read_recipe(name), steps=5, epochs=None, evaluate_every=5, save_every=5)


def test_the_training_step_is_compared_with_the_loop(rehearse: Any) -> None:
    (case,) = rehearse(step, "--case", "demo:4:2")["cases"]
    assert case["interval"][0] <= case["ratio"] <= case["interval"][1]


def test_every_reporting_verb_is_measured(rehearse: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(imagenet_shape, "PER_CLASS", 1)
    monkeypatch.setattr(reporting, "LIMITS", {})  # for a machine that does nothing else
    rows = rehearse(reporting, "--repeats", "1")["results"]
    assert [row["verb"] for row in rows] == ["report", "compare", "ensemble of three", "report of the ensemble"]


def test_deep_nets_are_trained_and_drawn(
    rehearse: Any, few_images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(depth, "ARMS", depth.ARMS[:1])
    monkeypatch.setattr(depth, "train", train_on(few_images))
    plot = tmp_path / "depth.svg"
    words = ["--runs", str(tmp_path / "runs"), "--seeds", "2", "--steps", "1", "--plot", str(plot)]
    assert [net["seed"] for net in rehearse(depth, *words)["nets"]] == [0, 1]
    assert plot.read_text().startswith("<svg")


def test_activations_are_paired_by_seed(
    rehearse: Any, few_images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(activations, "ORDER", ("relu", "prelu"))
    monkeypatch.setattr(activations, "PAIRS", (("relu", "prelu"),))
    data = str(embedded_dataset_path())
    result = rehearse(activations, "--data", data, "--runs", str(tmp_path / "runs"), "--epochs", "0.01", "--seeds", "2")
    relu, prelu = (result["top1_error"][name] for name in ("relu", "prelu"))
    (difference,) = result["differences"]
    assert difference["by_seed"] == pytest.approx([b - a for a, b in zip(relu, prelu, strict=True)])


def test_protocols_and_slopes_of_several_seeds_are_averaged(
    rehearse: Any, few_images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "read_recipe", short_recipe)
    monkeypatch.setattr(demo, "train", train_on(few_images))
    monkeypatch.setattr(demo, "DatasetSpec", partial(DatasetSpec, limit=30))
    monkeypatch.setattr(slope_trend, "MIN_RANGE", 0.0)  # the slopes hardly differ after so few steps
    result = rehearse(demo, "--runs", str(tmp_path / "runs"), "--seeds", "2")
    errors = [seed["top1_error"]["center"] for seed in result["seeds"]]
    assert result["means"]["center"]["mean"] == pytest.approx(sum(errors) / 2, abs=1e-3)  # both are rounded
