"""Invalid state.pt: damaged bytes, and the content of other files."""

import shutil
import warnings
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from prelunet.evaluator.errors import RunFolderError
from prelunet.training.loop.train import train
from tests.training.training_folders import RECIPE

ResumeState = dict[str, Any]
FINISHED = replace(RECIPE, steps=2, evaluate_every=1)


@pytest.fixture(scope="module")
def finished(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("finished") / "run"
    train(FINISHED, data, folder)
    return folder


@pytest.fixture
def folder(finished: Path, tmp_path: Path) -> Path:
    """Return a copy of the finished run."""
    return shutil.copytree(finished, tmp_path / "run")


def replaced(**change: Any) -> Callable[[ResumeState], ResumeState]:
    """Return a change of whole entries."""
    return lambda state: {**state, **change}


FOREIGN: dict[str, Callable[[ResumeState], Any]] = {
    "a bare tensor": lambda _: torch.zeros(3),
    "a list": lambda state: [state],
    "a version that is text": replaced(version="1"),
    "no tensors": replaced(net={}),
    "tensors of other shapes": lambda state: {
        **state,
        "net": {name: value[:1] for name, value in state["net"].items()},
    },
    "an evaluation of another form": replaced(measured=[{"a": 1}]),
}


def refused_untouched(data: Path, folder: Path) -> None:
    """Check that a run is refused because of its state, without warnings, and that no file changes."""
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    with warnings.catch_warnings(record=True) as recorded:
        warnings.simplefilter("always")
        with pytest.raises(RunFolderError, match=r"state\.pt: damaged"):
            train(FINISHED, data, folder)
    assert not recorded
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize("change", FOREIGN.values(), ids=FOREIGN)
def test_a_foreign_state_is_refused_and_nothing_is_overwritten(
    data: Path, folder: Path, change: Callable[[ResumeState], Any]
) -> None:
    torch.save(change(torch.load(folder / "state.pt", weights_only=True)), folder / "state.pt")
    refused_untouched(data, folder)


def test_a_state_of_a_newer_version_is_refused_with_both_versions(data: Path, folder: Path) -> None:
    torch.save({**torch.load(folder / "state.pt", weights_only=True), "version": 3}, folder / "state.pt")
    with pytest.raises(RunFolderError, match=r"state\.pt: version 3, but this prelunet reads version 2"):
        train(FINISHED, data, folder)


def test_a_state_with_damaged_bytes_in_a_tensor_is_refused_and_nothing_is_overwritten(data: Path, folder: Path) -> None:
    with zipfile.ZipFile(folder / "state.pt") as file:
        largest = max(file.infolist(), key=lambda record: record.file_size)
    with (folder / "state.pt").open("r+b") as file:
        file.seek(largest.header_offset + 2000)
        file.write(b"\x3f" * 4000)  # finite numbers, detected only by the CRC
    refused_untouched(data, folder)
