"""Rehearsals of benchmarks that write one result at their end: each in its smallest setting, without its numbers."""

import json
import zipfile
from collections import Counter
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from benchmarks.training import step
from prelunet.training.data.splits import embedded_dataset_path


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


@pytest.fixture
def few_images(tmp_path: Path) -> Path:
    """Write four training and two validation images of each class."""
    path, taken = tmp_path / "few.zip", Counter[str]()
    with zipfile.ZipFile(embedded_dataset_path()) as whole, zipfile.ZipFile(path, "w") as few:
        for name in sorted(name for name in whole.namelist() if name.endswith(".png")):
            folder = name.rpartition("/")[0]
            taken[folder] += 1
            if taken[folder] <= (4 if folder.startswith("train") else 2):
                few.writestr(name, whole.read(name))
    return path


def test_the_training_step_is_compared_with_the_loop(
    rehearse: Any, few_images: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step, "embedded_dataset_path", lambda: few_images)
    (case,) = rehearse(step, "--case", "demo:4:2")["cases"]
    assert case["interval"][0] <= case["ratio"] <= case["interval"][1]
