"""Long runs: plateaus, kept checkpoints, unreadable images, logs, fine-tuning."""

import errno
import json
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import prelunet.training.loop.trainer
from prelunet.evaluator.errors import (
    CheckpointError,
    DatasetError,
    EnvironmentFault,
    Interrupted,
    RunFolderError,
)
from prelunet.evaluator.files import sha256_of
from prelunet.training.data.dataset_statistics import compute_statistics
from prelunet.training.data.image_cache import ImageCache
from prelunet.training.data.loader import Batch
from prelunet.training.data.splits import open_splits
from prelunet.training.distributed.process_group import ProcessGroup
from prelunet.training.inspection.layer_log import read_layer_log
from prelunet.training.loop.execution import Execution
from prelunet.training.loop.train import train
from prelunet.training.loop.trainer import Trainer
from prelunet.training.net.checkpoints import read_checkpoint
from prelunet.training.net.initialization import initial_tensors
from prelunet.training.run_state.checkpoint_manager import CheckpointManager
from prelunet.training.run_state.metrics_log import ErrorRates
from prelunet.training.run_state.resume_state import TrainingProgress
from tests.training.loop.killed_runs import train_until_killed
from tests.training.training_folders import RECIPE, lines_of, make_dataset

# Keys of the recipe


def test_the_rate_drops_when_the_error_on_val_stalls(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = replace(
        RECIPE,
        rate_policy="plateau",
        rate_drops=(),
        rate_factor=0.5,
        patience=2,
        most_drops=1,
        evaluate_every=1,
        steps=8,
    )
    errors = iter([50, 40, 40, 45, 39, 60, 60, 60])

    def measured(self: Trainer, *_: Any) -> tuple[ErrorRates, int]:
        return ErrorRates(self.progress.step, next(errors), 0.0, 1.0), 9

    rates = []
    step = Trainer.step

    def recording(self: Trainer, *arguments: Any) -> bool:
        stop = step(self, *arguments)
        rates.append(self.optimizer.param_groups[0]["lr"])
        return stop

    monkeypatch.setattr(Trainer, "evaluate", measured)
    monkeypatch.setattr(Trainer, "step", recording)
    train(recipe, data, tmp_path / "run")
    # A plateau ends after step 4 (40, 45); the second, after step 7, has no effect: most_drops is 1
    assert rates == [recipe.rate] * 4 + [recipe.rate * 0.5] * 4
    assert read_checkpoint(tmp_path / "run/best.safetensors").metrics == {
        "step": 5, "top1_error": 39, "top5_error": 0.0, "val_loss": 1.0
    }  # fmt: skip


def test_checkpoints_are_kept_every_keep_every_steps(data: Path, tmp_path: Path) -> None:
    train(replace(RECIPE, keep_every=4, save_every=100), data, tmp_path / "run")
    kept = sorted(path.name for path in (tmp_path / "run").glob("step-*"))
    assert kept == ["step-0000004.safetensors", "step-0000008.safetensors", "step-0000012.safetensors"]
    last = read_checkpoint(tmp_path / "run/last.safetensors")
    for name, tensor in read_checkpoint(tmp_path / "run" / kept[-1]).tensors.items():
        np.testing.assert_array_equal(tensor, last.tensors[name])
    train(replace(RECIPE, steps=1), data, tmp_path / "run", fresh=True)
    assert not list((tmp_path / "run").glob("step-*"))


def test_the_recipe_determines_initial_weights_mean_and_length(data: Path, tmp_path: Path) -> None:
    recipe = replace(
        RECIPE,
        steps=None,
        epochs=0.8,
        mean="channel",
        init="gaussian",
        init_std=0.05,
        fc_stds=(0.2, 0.1, 0.3),
        rate=1e-12,
    )
    train(recipe, data, tmp_path / "run")
    checkpoint = read_checkpoint(tmp_path / "run/last.safetensors")
    assert checkpoint.metrics is not None
    assert checkpoint.metrics["step"] == 3  # 0.8·21 images in batches of 5 are 3.4 steps
    np.testing.assert_array_equal(
        checkpoint.mean, compute_statistics(open_splits(data).train, "train/", scale=14, crop=12).mean_channels
    )
    expected = initial_tensors(recipe.build_architecture(), 3, recipe.seed, recipe.initialization())
    for name, tensor in checkpoint.tensors.items():
        np.testing.assert_allclose(tensor, expected[name], rtol=0, atol=1e-9)  # more than rate 1e-12 can change
    assert checkpoint.recipe == {**recipe.to_json(), "evaluation_scale": 14}


def test_the_color_shift_is_added_to_every_pixel_after_the_mean(data: Path, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    trainer = Trainer(RECIPE, open_splits(data), tmp_path / "run")
    images = np.random.default_rng(0).integers(0, 256, (2, 12, 12, 3), dtype=np.uint8)
    shift = np.array([[1, -2, 3], [0, 50, -300]], np.float32)
    plain = trainer.preprocess(Batch(images, np.array([1, 2])))
    shifted = trainer.preprocess(Batch(images, np.array([1, 2]), shift))
    torch.testing.assert_close(shifted - plain, torch.from_numpy(shift)[:, :, None, None].expand_as(plain))


def test_precision_accumulation_and_memory_format_affect_rounding_only(data: Path, tmp_path: Path) -> None:
    recipe = replace(RECIPE, steps=5, dropout=0.5)
    losses = {}
    for name, other in {
        "plain": {}, "parts": {"accumulate": 2}, "layout": {"channels_last": False}, "bf16": {"precision": "bf16"}
    }.items():  # fmt: skip
        train(replace(recipe, **other), data, tmp_path / name)
        losses[name] = [line["loss"] for line in lines_of(tmp_path / name) if "loss" in line]
    assert losses["parts"] == pytest.approx(losses["plain"], rel=1e-5)  # float32 sums in another order
    assert losses["layout"] == pytest.approx(losses["plain"], rel=1e-5)
    assert losses["bf16"] == pytest.approx(losses["plain"], rel=0.02)  # 8 bits of mantissa
    assert losses["bf16"] != losses["plain"]


# Exact resume

COLORFUL = replace(RECIPE, color=0.1, dropout=0.5, steps=14, save_every=7, evaluate_every=14)


def test_with_workers_and_color_a_killed_run_resumes_bit_for_bit(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prelunet.training.loop.trainer, "ImageCache", partial(ImageCache, memory=0))
    uninterrupted, folder = tmp_path / "uninterrupted", tmp_path / "run"
    train(COLORFUL, data, uninterrupted, execution=Execution(workers=3))
    train_until_killed(COLORFUL, data, folder, "loop.trainer.Trainer.step", 8, workers=2)
    assert torch.load(folder / "state.pt", weights_only=True)["step"] == 7
    train(COLORFUL, data, folder, execution=Execution(workers=1))
    for name in ("last.safetensors", "best.safetensors"):
        assert (folder / name).read_bytes() == (uninterrupted / name).read_bytes()
    without = tmp_path / "without"
    train(replace(COLORFUL, color=0.0), data, without, execution=Execution(workers=0))
    assert (without / "last.safetensors").read_bytes() != (uninterrupted / "last.safetensors").read_bytes()


# Images that become unreadable


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Return a dataset that a test may damage; the folder of the run exists."""
    (tmp_path / "run").mkdir()
    return make_dataset(tmp_path / "data")


def test_an_image_that_becomes_unreadable_is_substituted_named_and_counted(root: Path, tmp_path: Path) -> None:
    messages: list[str] = []
    trainer = Trainer(replace(RECIPE, steps=6), open_splits(root), tmp_path / "run", report=messages.append)
    broken = root / "train/dog/001.png"
    broken.write_bytes(b"x" * broken.stat().st_size)  # the same length, so the fingerprint is unchanged
    trainer.run()
    assert len(messages) == 1  # once, although it is due several times
    assert messages[0].startswith(
        "train/: 1 images have become unreadable; each is substituted by another image of train/:\n"
    )
    assert "\n  dog/001.png: " in messages[0]
    assert set(trainer.progress.unreadable) == {"dog/001.png"}
    again = Trainer(replace(RECIPE, steps=6), open_splits(root), tmp_path / "run")
    status = list(again.status_messages())
    assert status[0] == "train/: 1 images became unreadable earlier in this run and were substituted:"
    assert status[1].startswith("  dog/001.png: ")


def test_too_many_unreadable_images_stop_training_with_the_state_saved(root: Path, tmp_path: Path) -> None:
    recipe = replace(RECIPE, steps=6, max_refused=0.04)  # none of 21 images
    trainer = Trainer(recipe, open_splits(root), tmp_path / "run")
    broken = root / "train/dog/001.png"
    whole = broken.read_bytes()
    broken.write_bytes(b"x" * len(whole))
    with pytest.raises(
        DatasetError, match=r"1 images of train/ became unreadable.*more than max_refused \(4 % of 21\).*dog/001\.png"
    ):
        trainer.run()
    assert torch.load(tmp_path / "run/state.pt", weights_only=True)["step"] > 0
    broken.write_bytes(whole)
    Trainer(recipe, open_splits(root), tmp_path / "run").run()  # the repaired image is accepted


def test_unreadable_images_of_val_are_skipped_and_counted(root: Path, tmp_path: Path) -> None:
    recipe, messages = replace(RECIPE, steps=2, max_refused=0.12), list[str]()
    trainer = Trainer(recipe, open_splits(root), tmp_path / "run", report=messages.append)
    (root / "val/ox/002.png").unlink()
    trainer.run()
    assert messages[0].startswith("val/: 1 images have become unreadable; they are skipped:\n  ox/002.png: ")
    assert [(line["evaluated"], line["refused"]) for line in lines_of(tmp_path / "run") if "evaluated" in line] == [
        (8, 1)
    ]


def test_too_many_unreadable_images_of_val_stop_training_before_an_error_is_logged(root: Path, tmp_path: Path) -> None:
    trainer = Trainer(replace(RECIPE, steps=2), open_splits(root), tmp_path / "run")
    (root / "val/ox/002.png").unlink()
    with pytest.raises(
        DatasetError, match=r"1 images of val/ became unreadable.*more than max_refused \(10 % of 9\).*ox/002\.png"
    ):
        trainer.run()
    assert not any("top1_error" in line for line in lines_of(tmp_path / "run"))


def test_unreadable_images_of_val_are_named_once_and_count_again_when_repaired(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    messages: list[str] = []
    recipe = replace(RECIPE, steps=3, evaluate_every=1, max_refused=1.0)
    # Without memory for images, each evaluation reads the files
    monkeypatch.setattr(prelunet.training.loop.trainer, "ImageCache", partial(ImageCache, memory=0))
    trainer = Trainer(recipe, open_splits(root), tmp_path / "run", report=messages.append)
    files = {path: path.read_bytes() for path in (root / "val").rglob("*.png")}
    first, second = sorted(files)[:2]
    first.unlink()
    second.unlink()
    step = Trainer.step

    def stepped(self: Trainer, *arguments: Any) -> bool:
        if self.progress.step == 2:
            second.write_bytes(files[second])
        return step(self, *arguments)

    monkeypatch.setattr(Trainer, "step", stepped)
    trainer.run()
    assert len(messages) == 1
    assert messages[0].startswith("val/: 2 images have become unreadable")
    refused = [line["refused"] for line in lines_of(tmp_path / "run") if "refused" in line]
    assert refused == [2, 2, 1]


def test_a_val_without_readable_images_stops_training_with_any_max_refused(root: Path, tmp_path: Path) -> None:
    trainer = Trainer(replace(RECIPE, steps=2, max_refused=1.0), open_splits(root), tmp_path / "run")
    for path in (root / "val").rglob("*.png"):
        path.unlink()
    with pytest.raises(DatasetError, match="no image of val/ is readable any more"):
        trainer.run()


# Signals and writes


def after_each_write(monkeypatch: pytest.MonkeyPatch, action: Callable[[int], None]) -> None:
    """Call `action` with the step after each write of the state."""
    write = CheckpointManager.write

    def written(self: CheckpointManager, net: Any, momentum: Any, progress: TrainingProgress) -> None:
        write(self, net, momentum, progress)
        action(progress.step)

    monkeypatch.setattr(CheckpointManager, "write", written)


def test_a_signal_during_a_save_stops_after_it_without_saving_twice(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[int] = []

    def action(step: int) -> None:
        written.append(step)
        if step == 6:
            os.kill(os.getpid(), signal.SIGTERM)

    after_each_write(monkeypatch, action)
    with pytest.raises(Interrupted, match="interrupted after step 6 of 12"):
        train(replace(RECIPE, evaluate_every=12), data, tmp_path / "run")
    assert written == [0, 3, 6]


def test_a_signal_during_the_last_save_does_not_interrupt_a_finished_run(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    after_each_write(monkeypatch, lambda step: os.kill(os.getpid(), signal.SIGTERM) if step == 4 else None)
    assert train(replace(RECIPE, steps=4), data, tmp_path / "run").errors.step == 4


def test_no_process_continues_or_exits_before_the_first_has_written(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    wait = ProcessGroup.wait

    def waited(self: ProcessGroup) -> None:
        wait(self)
        calls.append("wait")

    after_each_write(monkeypatch, lambda _step: calls.append("write"))
    monkeypatch.setattr(ProcessGroup, "wait", waited)
    train(replace(RECIPE, steps=2, save_every=1, evaluate_every=2), data, tmp_path / "run")
    assert calls == ["write", "wait"] * 3  # at the start, after the first step and after the last


def test_insufficient_memory_for_a_state_is_not_reported_as_damage(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(replace(RECIPE, steps=1), data, tmp_path / "run")

    def full(*_: Any, **__: Any) -> None:
        raise RuntimeError("[enforce fail at alloc_cpu.cpp:121] DefaultCPUAllocator: can't allocate memory: you tried")

    monkeypatch.setattr(torch, "load", full)
    with pytest.raises(EnvironmentFault, match="not enough memory to read it"):
        train(replace(RECIPE, steps=1), data, tmp_path / "run")


# Starting over


@pytest.mark.parametrize("trouble", ["start", "images"])
def test_a_fresh_run_that_fails_to_start_keeps_the_earlier_run(tmp_path: Path, trouble: str) -> None:
    root, folder = make_dataset(tmp_path / "data"), tmp_path / "run"
    train(replace(RECIPE, steps=3), root, folder)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    start = None
    if trouble == "start":
        start = tmp_path / "other.safetensors"
        start.write_bytes(b"nonsense")
    else:
        for path in (root / "train/dog").iterdir():
            path.write_bytes(b"x")
    with pytest.raises((CheckpointError, DatasetError)):
        train(RECIPE, root, folder, start=start, fresh=True)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_a_fresh_run_may_start_from_the_checkpoint_that_it_replaces(data: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    train(replace(RECIPE, steps=3), data, folder)
    before = read_checkpoint(folder / "last.safetensors")
    train(replace(RECIPE, steps=1, rate=1e-12), data, folder, start=folder / "last.safetensors", fresh=True)
    after = read_checkpoint(folder / "last.safetensors")
    for name, tensor in before.tensors.items():
        np.testing.assert_allclose(after.tensors[name], tensor, rtol=0, atol=1e-9)  # more than rate 1e-12 can change


def test_a_run_that_fails_to_start_does_not_claim_the_folder(data: Path, tmp_path: Path) -> None:
    (tmp_path / "x.safetensors").write_bytes(b"nonsense")
    with pytest.raises(CheckpointError):
        train(RECIPE, data, tmp_path / "run", start=tmp_path / "x.safetensors")
    train(replace(RECIPE, steps=1, batch=3), data, tmp_path / "run")


def test_a_run_without_its_state_is_refused_instead_of_restarted(data: Path, tmp_path: Path) -> None:
    train(replace(RECIPE, steps=1), data, tmp_path / "run")
    (tmp_path / "run/state.pt").unlink()
    with pytest.raises(RunFolderError, match=r"state\.pt is missing.*--fresh"):
        train(replace(RECIPE, steps=1), data, tmp_path / "run")


# Logs


def _full_disk(*_: Any) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("cause", ["a file in the place of the folder", "a full disk"])
def test_training_continues_without_events_if_they_cannot_be_written(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cause: str
) -> None:
    (tmp_path / "run").mkdir()
    if cause == "a full disk":
        monkeypatch.setattr("tensorboard.summary.writer.record_writer.RecordWriter.write", _full_disk)
    else:
        (tmp_path / "run/tensorboard").write_text(cause)
    messages: list[str] = []
    trainer = Trainer(
        RECIPE, open_splits(data), tmp_path / "run", execution=Execution(events=True), report=messages.append
    )
    trainer.run()
    (text,) = messages
    assert "TensorBoard events can no longer be written" in text
    assert read_checkpoint(tmp_path / "run/last.safetensors").metrics is not None


def test_layers_and_events_are_logged_at_every_evaluation_and_truncated_on_resume(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder, execution = tmp_path / "run", Execution(diagnose=True, events=True)
    with monkeypatch.context() as patch:
        patch.setattr("prelunet.training.run_state.checkpoint_manager.write_state", _after(2, _full_disk))
        with pytest.raises(OSError, match="No space"):  # step 10 is evaluated and logged, but not saved
            train(replace(RECIPE, save_every=100), data, folder, execution=execution)
    assert [entry["step"] for entry in read_layer_log(folder)] == [5, 10]
    assert torch.load(folder / "state.pt", weights_only=True)["step"] == 5
    train(replace(RECIPE, save_every=100), data, folder, execution=execution)
    found = read_layer_log(folder)
    assert [entry["step"] for entry in found] == [5, 10, 12]
    assert [layer["layer"] for layer in found[0]["layers"]][-3:] == ["fc1", "fc2", "fc3"]
    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    assert [event.step for event in events.Scalars("val/top1_error")] == [5, 10, 12]
    assert events.Scalars("val/top1_error")[-1].value == pytest.approx(
        [line for line in lines_of(folder) if "top1_error" in line][-1]["top1_error"], abs=1e-3
    )
    assert {"train/loss", "train/rate", "train/images_per_second", "slope/conv1_1"} <= set(events.Tags()["scalars"])


def _after(calls: int, action: Any) -> Any:
    """Return a replacement for write_state that works for `calls` calls and then calls `action`."""
    from prelunet.training.run_state.resume_state import write_state

    left = iter(range(calls))
    return lambda *arguments: write_state(*arguments) if next(left, None) is not None else action()


def test_logging_layers_does_not_affect_training(data: Path, tmp_path: Path) -> None:
    for name, diagnose in (("with", True), ("without", False)):
        train(RECIPE, data, tmp_path / name, execution=Execution(diagnose=diagnose))
    assert (tmp_path / "with/last.safetensors").read_bytes() == (tmp_path / "without/last.safetensors").read_bytes()
    assert not (tmp_path / "without/diagnosis.jsonl").exists()


# Fine-tuning


def test_fine_tuning_on_other_classes_reinitializes_the_last_layer(data: Path, tmp_path: Path) -> None:
    train(replace(RECIPE, steps=3), data, tmp_path / "first")
    start = tmp_path / "first/last.safetensors"
    other = make_dataset(tmp_path / "other", classes=("big-cat", "emu"))
    messages: list[str] = []
    train(replace(RECIPE, steps=1, rate=1e-12), other, tmp_path / "second", start=start, report=messages.append)
    before, after = read_checkpoint(start), read_checkpoint(tmp_path / "second/last.safetensors")
    assert [entry.wnid for entry in after.classes] == ["big-cat", "emu"]
    for name, tensor in before.tensors.items():
        if not name.startswith("fc3"):
            np.testing.assert_allclose(
                after.tensors[name], tensor, rtol=0, atol=1e-9
            )  # more than rate 1e-12 can change
    np.testing.assert_array_equal(after.mean, before.mean)
    assert any("fc3, which is reinitialized: 1 of the 2 classes" in text for text in messages)
    assert json.loads((tmp_path / "second/training.json").read_text())["start"] == sha256_of(start)


def test_another_initial_checkpoint_is_another_run(data: Path, tmp_path: Path) -> None:
    train(replace(RECIPE, steps=3), data, tmp_path / "first")
    train(replace(RECIPE, steps=1), data, tmp_path / "run")
    with pytest.raises(RunFolderError, match="start"):
        train(replace(RECIPE, steps=1), data, tmp_path / "run", start=tmp_path / "first/last.safetensors")
