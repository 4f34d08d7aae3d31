"""Checks before training starts: different commands, run folders inside the dataset, likely mistakes."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec import structs

from prelunet.evaluator.errors import UsageError
from prelunet.training.data.splits import Splits, open_splits
from prelunet.training.distributed.process_group import ProcessGroup
from prelunet.training.loop import train
from prelunet.training.loop.train import require_same_command
from prelunet.training.loop.trainer import SINGLE_PROCESS
from tests.training.training_folders import RECIPE, make_dataset


def fake_group(first: Any, third: Any) -> ProcessGroup:
    """Return the second of three processes, given the values of the others."""

    class FakeProcessGroup(ProcessGroup):
        def all_gather(self, value: Any) -> list[Any]:
            return [first, value, third]

    return FakeProcessGroup(1, 3, torch.device("cpu"))


def test_processes_started_with_different_commands_are_refused_with_the_difference() -> None:
    same = {"recipe": {"rate": 0.01, "batch": 8}, "parallel": None}
    require_same_command(fake_group(same, same), same)
    require_same_command(SINGLE_PROCESS, same)
    other = {"recipe": {"rate": 0.02, "batch": 8}, "parallel": "ddp"}
    with pytest.raises(UsageError, match=r"recipe\.rate: 0\.01 in process 0, 0\.02 in process 2") as caught:
        require_same_command(fake_group(same, other), same)
    assert "parallel: None in process 0, ddp in process 2" in str(caught.value)
    with pytest.raises(UsageError, match=r"0\.02 in process 1"):  # each process reports it, also the one that differs
        require_same_command(fake_group(same, same), other)


@pytest.mark.parametrize("split", ["train", "val"])
def test_a_run_among_the_class_folders_is_refused(data: Path, split: str) -> None:
    with pytest.raises(UsageError, match=r"--out .*, where it would be taken for a class"):
        train.train(RECIPE, data, data / split / "run")
    assert not (data / split / "run").exists()


@pytest.fixture
def splits(tmp_path: Path) -> Splits:
    return open_splits(make_dataset(tmp_path / "data", classes=("0", "7", "12")))


def messages(splits: Splits, precision: Any = "fp32") -> list[str]:
    return list(train.setup_messages(replace(RECIPE, precision=precision), splits, SINGLE_PROCESS, None))


def test_emulated_bf16_is_reported(splits: Splits, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train, "device_supports_bf16", lambda _device: False)
    assert messages(splits, "bf16")[0] == "training on cpu, bf16"
    assert "this cpu does not support bfloat16" in messages(splits, "bf16")[-1]
    assert len(messages(splits)) == 2  # nothing more for fp32
    monkeypatch.setattr(train, "device_supports_bf16", lambda _device: True)
    assert len(messages(splits, "bf16")) == 2


def test_a_crop_that_replaces_the_one_of_an_own_architecture_is_reported(splits: Splits) -> None:
    mine = structs.replace(RECIPE.build_architecture(), name="mine", crop=16)
    for recipe, expected in (
        (replace(RECIPE, architecture=mine), "crop 12 (instead of 16, that of the architecture mine), scales"),
        (replace(RECIPE, architecture=structs.replace(mine, crop=12)), "crop 12, scales"),
    ):
        assert list(train.setup_messages(recipe, splits, SINGLE_PROCESS, None))[1].startswith(expected)


def test_the_choice_of_the_validation_images_is_reported(tmp_path: Path) -> None:
    root = make_dataset(tmp_path / "data")
    (root / "val").rename(root / "valid")
    expected = f"validation images: {root}: contains train, valid; the images are those in 'valid'"
    assert expected in messages(open_splits(root))


def test_remarks_on_the_training_images_are_reported(splits: Splits) -> None:
    slow = replace(splits, train=replace(splits.train, remarks=("slow in parquet",)))
    assert "training images: slow in parquet" in messages(slow)
