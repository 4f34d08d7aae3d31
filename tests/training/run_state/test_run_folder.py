"""The run folder: which run may use it, and what is refused."""

import json
import os
import re
import shutil
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec import structs

from prelunet.evaluator.errors import Interrupted, RunFolderError
from prelunet.evaluator.files import locked_folder
from prelunet.training.loop.train import train
from prelunet.training.loop.trainer import Trainer
from prelunet.training.net.checkpoints import Checkpoint, read_checkpoint
from prelunet.training.recipe import Recipe
from tests.training.training_folders import RECIPE, make_dataset

SHORT = replace(RECIPE, steps=1)


@pytest.fixture(scope="module")
def finished(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a finished run of one step."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    train(SHORT, data, folder)
    return folder


@pytest.fixture
def folder(finished: Path, tmp_path: Path) -> Path:
    """Return a copy of the finished run."""
    return shutil.copytree(finished, tmp_path / "run")


def test_another_dataset_is_refused_with_the_difference(folder: Path, tmp_path: Path) -> None:
    other = make_dataset(tmp_path / "other", val=4)
    with pytest.raises(RunFolderError, match=r"dataset\.val_images: 9 in the folder, 12 now") as refused:
        train(SHORT, other, folder)
    assert "A fingerprint covers names, sizes and labels" in str(refused.value)


def test_an_own_architecture_instead_of_a_built_in_one_is_refused_by_its_name_alone(folder: Path, data: Path) -> None:
    mine = structs.replace(SHORT.build_architecture(), name="mine")
    with pytest.raises(RunFolderError, match="contains another run") as refused:
        train(replace(SHORT, architecture=mine), data, folder)
    found = str(refused.value).splitlines()[1:-1]
    assert found == [f"  recipe.architecture: {SHORT.build_architecture().name} in the folder, mine now"]


def test_a_run_whose_recipe_lacks_newer_keys_resumes_with_their_defaults(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped_after_seven_steps(RECIPE, data, tmp_path / "run", monkeypatch)
    path = tmp_path / "run/training.json"
    description = json.loads(path.read_text())
    for key in ("decay_biases", "decay_slopes", "bias_rate"):
        del description["recipe"][key]
    path.write_text(json.dumps(description))
    train(RECIPE, data, tmp_path / "run")
    with pytest.raises(RunFolderError, match=r"recipe\.bias_rate: 1\.0 in the folder, 2\.0 now"):
        train(replace(RECIPE, bias_rate=2.0), data, tmp_path / "run")


@pytest.mark.parametrize("change", [{"steps": 2}, {"evaluate_every": 4}, {"precision": "bf16"}, {"rate_drops": ()}])
def test_another_recipe_is_refused_without_mentioning_the_images(
    data: Path, folder: Path, change: dict[str, Any]
) -> None:
    with pytest.raises(RunFolderError, match=f"contains another run:\n  recipe.{next(iter(change))}: ") as refused:
        train(replace(SHORT, **change, save_every=7), data, folder)
    assert "fingerprint" not in str(refused.value)
    assert "save_every" not in str(refused.value)  # not a reason by itself


def stopped_after_seven_steps(recipe: Recipe, data: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Train, and interrupt the run with SIGINT."""
    step = Trainer.step

    def stopping(self: Trainer, *arguments: Any) -> bool:
        if self.progress.step == 6:
            os.kill(os.getpid(), signal.SIGINT)
        return step(self, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "step", stopping)
        with pytest.raises(Interrupted, match="after step 7 of 12"):
            train(recipe, data, folder)


@pytest.fixture(scope="module")
def uninterrupted(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """Return the last checkpoint of an uninterrupted run."""
    return read_checkpoint(train(RECIPE, data, tmp_path_factory.mktemp("uninterrupted") / "run").checkpoint)


def test_a_run_resumed_with_other_save_intervals_ends_with_the_same_net(
    uninterrupted: Checkpoint, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, other = tmp_path / "run", replace(RECIPE, save_every=2, keep_every=4)
    stopped_after_seven_steps(RECIPE, data, folder, monkeypatch)
    description = (folder / "training.json").read_bytes()
    found = read_checkpoint(train(other, data, folder).checkpoint)
    for name, tensor in uninterrupted.tensors.items():
        np.testing.assert_array_equal(found.tensors[name], tensor, strict=True)
    np.testing.assert_array_equal(found.mean, uninterrupted.mean, strict=True)
    assert (found.metrics, found.dataset) == (uninterrupted.metrics, uninterrupted.dataset)
    assert found.recipe == {**other.to_json(), "evaluation_scale": 14}
    assert {path.name for path in folder.glob("step-*")} == {"step-0000008.safetensors", "step-0000012.safetensors"}
    assert (folder / "training.json").read_bytes() == description  # the recipe at the start


@pytest.mark.parametrize("change", [{"accumulate": 3}, {"channels_last": False}])
def test_a_run_can_be_resumed_with_sums_in_another_order(
    uninterrupted: Checkpoint, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: dict[str, Any]
) -> None:
    folder, messages = tmp_path / "run", list[str]()
    stopped_after_seven_steps(RECIPE, data, folder, monkeypatch)
    recipe = replace(RECIPE, **change, save_every=4)
    found = read_checkpoint(train(recipe, data, folder, report=messages.append).checkpoint)
    assert f"{folder}: resuming after step 7 of 12" in messages
    for name, tensor in uninterrupted.tensors.items():
        # Float32 sums in another order, accumulated over five steps
        np.testing.assert_allclose(found.tensors[name], tensor, rtol=0, atol=1e-5 * np.abs(tensor).max(), err_msg=name)


def test_a_folder_whose_name_torch_cannot_read_is_refused_before_it_exists(data: Path, tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match=r"not valid UTF-8\. Choose another folder with --out"):
        train(SHORT, data, tmp_path / "caf\udce9")
    assert not any(tmp_path.iterdir())


def test_a_finished_run_is_left_unchanged_with_other_execution_keys(data: Path, folder: Path) -> None:
    before = {path: path.read_bytes() for path in folder.iterdir()}
    train(replace(SHORT, save_every=7, compile=True), data, folder)
    assert {path: path.read_bytes() for path in folder.iterdir()} == before


def test_the_location_of_a_dataset_does_not_matter(folder: Path, tmp_path: Path) -> None:
    train(SHORT, make_dataset(tmp_path / "copy"), folder)


@pytest.mark.parametrize(
    "content", [None, b"[" * 100_000, b"null", b'{"version": NaN}', b"\xff", b'{"a":' * 900, b"PK"]
)  # None: a third of the file
@pytest.mark.parametrize("name", ["training.json", "metrics.jsonl", "state.pt"])
def test_any_damaged_file_of_a_run_is_refused_with_advice(
    data: Path, folder: Path, name: str, content: bytes | None
) -> None:
    path = folder / name
    content = path.read_bytes()[: path.stat().st_size // 3] if content is None else content
    path.write_bytes(content + (b"\n" if name == "metrics.jsonl" else b""))
    with pytest.raises(RunFolderError, match=rf"{name}: .*damaged.*--fresh") as caught:
        train(SHORT, data, folder)
    assert "torch" not in str(caught.value)
    assert len(str(caught.value)) < 400


def test_a_folder_in_use_by_another_process_is_left_unchanged(data: Path, folder: Path) -> None:
    before = {path: path.read_bytes() for path in folder.iterdir()}
    for fresh in (False, True):
        with locked_folder(folder, "--out"), pytest.raises(RunFolderError, match=r"another process.*with --out"):
            train(SHORT, data, folder, fresh=fresh)
    assert {path: path.read_bytes() for path in folder.iterdir()} == before


def test_a_folder_is_locked_during_training(data: Path, tmp_path: Path) -> None:
    folder, refused = tmp_path / "run", []

    def second(_message: str) -> None:
        with pytest.raises(RunFolderError, match="another process is writing this run"):
            train(RECIPE, data, folder)
        refused.append(True)

    train(replace(RECIPE, steps=1), data, folder)
    train(replace(RECIPE, steps=1), data, folder, report=second)
    assert refused  # once per message


def test_half_written_files_of_a_killed_run_are_removed_at_the_next_start(data: Path, folder: Path) -> None:
    files = sorted(folder.iterdir())
    for name in ("state.pt", "last.safetensors", "best.safetensors", "metrics.jsonl", "training.json"):
        (folder / f".{name}.0a1b2c3d.tmp").write_bytes(b"half")
    mine = folder / ".notes.0a1b2c3d.tmp"
    mine.write_text("mine")
    train(SHORT, data, folder)
    assert sorted(folder.iterdir()) == sorted([*files, mine])


@pytest.mark.parametrize("fresh", [False, True])
@pytest.mark.parametrize("name", ["last.safetensors", "run.json", "mine.txt"])
def test_a_folder_with_other_files_is_refused_and_left_unchanged(
    data: Path, tmp_path: Path, name: str, fresh: bool
) -> None:
    (tmp_path / name).write_bytes(b"precious")
    with pytest.raises(RunFolderError, match=rf"not empty \({re.escape(name)}\) and not a run folder"):
        train(RECIPE, data, tmp_path, fresh=fresh)
    assert [path.name for path in tmp_path.iterdir()] == [name]
    assert (tmp_path / name).read_bytes() == b"precious"
