"""Invalid state.pt: damaged bytes, and content that no run can produce."""

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


def first_of(key: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[ResumeState], ResumeState]:
    """Return a change of the first tensor of `net` or `momentum`."""

    def changed(state: ResumeState) -> ResumeState:
        name, value = next(iter(state[key].items()))
        return {**state, key: {**state[key], name: change(value)}}

    return changed


def measured(**change: Any) -> Callable[[ResumeState], ResumeState]:
    """Return a change of the second of two evaluations."""
    return lambda state: {**state, "measured": [state["measured"][0], {**state["measured"][1], **change}]}


def refused_all(split: str) -> Callable[[ResumeState], ResumeState]:
    """Return a change that refuses all images of a split of `make_dataset`."""
    files = {f"{name}/{number:03}.png": "x" for name in ("big-cat", "dog", "ox") for number in range(7)}
    return lambda state: {**state, "refused": {**state["refused"], split: files}}


def with_nan(value: torch.Tensor) -> torch.Tensor:
    return torch.where(torch.arange(value.numel()).view(value.shape) == 1, torch.nan, value)


def replaced(**change: Any) -> Callable[[ResumeState], ResumeState]:
    """Return a change of whole entries."""
    return lambda state: {**state, **change}


IMPOSSIBLE: dict[str, Callable[[ResumeState], Any]] = {
    "a bare tensor": lambda _: torch.zeros(3),
    "a list": lambda state: [state],
    **{
        f"an evaluation with {change}": measured(**change)
        for change in (
            {"top1_error": "50"},
            {"top5_error": None},
            {"top1_error": float("nan")},
            {"top5_error": float("nan")},
            {"top1_error": 101.0},
            {"top5_error": -1.0},
            {"top1_error": 1.0, "top5_error": 2.0},
            {"step": 1},  # that of the first one
            {"step": 3},
            {"step": "2"},
        )
    },
    "a version that is text": replaced(version="1"),
    "no tensors": replaced(net={}),
    "a negative step": replaced(step=-1),
    "a step that is a bool": replaced(step=True),
    "more steps than the recipe's": replaced(step=3),
    "a loss of NaN": replaced(loss=[float("nan"), 1]),
    "a loss of text": replaced(loss=["1", 1]),
    "a loss of -1 steps": replaced(loss=[0.5, -1]),
    "a loss of too many steps": replaced(loss=[0.5, 3]),
    "a mean of another crop": replaced(mean=torch.zeros(2, 2, 3)),
    "axes of another shape": replaced(axes=torch.zeros(3)),
    "no splits": replaced(refused={}),
    "an evaluation of another form": replaced(measured=[{"a": 1}]),
    "a number of unreadable images": replaced(lost=3),
    "no training image": refused_all("train"),
    "no validation image": refused_all("val"),
    "a reason that is not text": replaced(lost={"dog/001.png": 5}),
    "no momentum": replaced(momentum={}),
    "momentum of another shape": replaced(momentum={"conv1_1.weight": torch.zeros(2)}),
    "momentum of one tensor": lambda state: {**state, "momentum": dict(list(state["momentum"].items())[:1])},
    "NaN in the mean": lambda state: {**state, "mean": with_nan(state["mean"])},
    "NaN in the axes": lambda state: {**state, "axes": with_nan(state["axes"])},
    **{
        f"{kind} in {key}": first_of(key, change)
        for key in ("net", "momentum")
        for kind, change in {
            "NaN": with_nan,
            "infinity": lambda value: value / 0,
            "meta": lambda value: value.to("meta"),
            "sparse": lambda value: value.to_sparse(),
            "compressed sparse": lambda value: value.flatten(1).to_sparse_csr(),
            "nested": lambda value: torch.nested.nested_tensor(list(value)),
            "int": lambda value: value.int(),
            "complex": lambda value: value.to(torch.complex64),
            "half": lambda value: value.half(),
            "double": lambda value: value.double(),
        }.items()
    },
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


@pytest.mark.filterwarnings("ignore:.*(S|s)parse|.*nested")  # from creating them
@pytest.mark.parametrize("change", IMPOSSIBLE.values(), ids=IMPOSSIBLE)
def test_an_impossible_state_is_refused_and_nothing_is_overwritten(
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


def test_a_state_has_checksums_even_if_they_are_turned_off_in_torch(data: Path, tmp_path: Path) -> None:
    torch.serialization.set_crc32_options(False)
    try:
        train(FINISHED, data, tmp_path / "run")
        assert not torch.serialization.get_crc32_options()
    finally:
        torch.serialization.set_crc32_options(True)
    with zipfile.ZipFile(tmp_path / "run/state.pt") as file:
        assert file.testzip() is None
