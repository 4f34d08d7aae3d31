"""A run ends with the same net even if it is interrupted."""

import errno
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch._inductor.exc import InvalidCxxCompiler

from prelunet.evaluator.errors import EnvironmentFault, Interrupted, RunFolderError, UsageError
from prelunet.training.data.dataset_statistics import compute_statistics
from prelunet.training.data.image_cache import ImageCache
from prelunet.training.data.splits import open_splits
from prelunet.training.loop import signals
from prelunet.training.loop.signals import deferred_signals
from prelunet.training.loop.train import train
from prelunet.training.loop.trainer import Trainer
from prelunet.training.net.checkpoints import Checkpoint, read_checkpoint, write_checkpoint
from prelunet.training.net.network import network_from_checkpoint, tensors_of
from tests.training.loop.killed_runs import train_until_killed
from tests.training.training_folders import RECIPE, build_batch, lines_of, make_dataset

FILES = ("last.safetensors", "best.safetensors", "training.json")
SETUP_MESSAGES = ["training on cpu, fp32", "crop 12, scales 12 to 16, batch 5, rate 0.003, activation prelu"]


@pytest.fixture(scope="module")
def uninterrupted(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of an uninterrupted run."""
    folder = tmp_path_factory.mktemp("uninterrupted") / "run"
    train(RECIPE, data, folder)
    return folder


def metrics(folder: Path) -> list[dict[str, Any]]:
    """Read metrics.jsonl without the throughput, which depends on the machine."""
    return [{key: value for key, value in line.items() if key != "images_per_second"} for line in lines_of(folder)]


def assert_equal_runs(folder: Path, expected: Path) -> None:
    """Check that two runs have the same checkpoints, byte for byte, and the same metrics."""
    for name in FILES:
        assert (folder / name).read_bytes() == (expected / name).read_bytes(), name
    assert metrics(folder) == metrics(expected)


# A complete run


def test_a_run_writes_checkpoints_metrics_and_its_description(uninterrupted: Path, data: Path) -> None:
    checkpoint = read_checkpoint(uninterrupted / "last.safetensors")
    splits = open_splits(data)
    assert checkpoint.recipe == {**RECIPE.to_json(), "evaluation_scale": 14}
    assert checkpoint.dataset == {"fingerprint": splits.train.fingerprint, "images": 21}
    assert (checkpoint.classes[0].wnid, checkpoint.classes[0].name) == ("big-cat", "big cat")
    assert checkpoint.metrics is not None
    assert checkpoint.metrics["step"] == RECIPE.steps
    np.testing.assert_array_equal(
        checkpoint.mean, compute_statistics(splits.train, "train/", scale=14, crop=12).mean_image
    )
    measured = [line for line in metrics(uninterrupted) if "top1_error" in line]
    assert [line["step"] for line in measured] == [5, 10, 12]
    assert measured[-1]["top1_error"] == checkpoint.metrics["top1_error"]
    assert (measured[-1]["evaluated"], measured[-1]["refused"]) == (9, 0)
    best = read_checkpoint(uninterrupted / "best.safetensors").metrics
    assert best is not None
    assert best["top1_error"] == min(line["top1_error"] for line in measured)


def test_the_same_recipe_gives_the_same_run_and_another_seed_another(
    uninterrupted: Path, data: Path, tmp_path: Path
) -> None:
    train(RECIPE, data, tmp_path / "same")
    assert_equal_runs(tmp_path / "same", uninterrupted)
    train(replace(RECIPE, seed=4), data, tmp_path / "other")
    assert metrics(tmp_path / "other") != metrics(uninterrupted)


def test_the_net_learns_colors_and_the_reported_error_is_that_of_the_checkpoint(data: Path, tmp_path: Path) -> None:
    recipe = replace(RECIPE, steps=60, dropout=0.0, evaluate_every=60, save_every=60)
    result = train(recipe, data, tmp_path / "run")
    assert result.errors.top1_error == 0  # the classes differ in color; chance is 67
    losses = [line["loss"] for line in metrics(tmp_path / "run") if "loss" in line]
    assert losses[-1] < 0.1 < losses[0]
    checkpoint = read_checkpoint(result.checkpoint)
    net, splits = network_from_checkpoint(checkpoint), open_splits(data)
    image_cache, likelihoods = ImageCache(splits.val, {}), list[float]()
    for index, sample in enumerate(image_cache.samples):
        view = image_cache.central_view(index, 14, 12).astype(np.float32) - checkpoint.mean
        with torch.no_grad():
            logits = net(torch.from_numpy(view.transpose(2, 0, 1).copy())[None])
        assert int(logits.argmax()) == sample.label
        likelihoods.append(float(logits[0].double().log_softmax(0)[sample.label]))
    # Rounded to six decimals; the batch of nine and the single images differ in the order of float32 sums.
    assert result.errors.val_loss == pytest.approx(-np.mean(likelihoods), rel=1e-4, abs=6e-7)


def test_the_training_error_is_that_of_the_views_of_each_step(data: Path, tmp_path: Path) -> None:
    recipe = replace(RECIPE, rate=1e-12, dropout=0.0)  # the net stays the same, so each step can be repeated
    result = train(recipe, data, tmp_path / "run")
    checkpoint, splits = read_checkpoint(result.checkpoint), open_splits(data)
    net, wrong = network_from_checkpoint(checkpoint), 0
    for step in range(recipe.total_steps):
        batch = build_batch(ImageCache(splits.train, {}), recipe, step)
        pixels = (batch.images.astype(np.float32) - checkpoint.mean).transpose(0, 3, 1, 2).copy()
        with torch.no_grad():
            answers = net(torch.from_numpy(pixels)).argmax(dim=1).numpy()
        wrong += int((answers != batch.labels).sum())
    (logged,) = [line["training_error"] for line in metrics(tmp_path / "run") if "training_error" in line]
    assert 0 < wrong < recipe.total_steps * recipe.batch
    assert logged == pytest.approx(100 * wrong / (recipe.total_steps * recipe.batch), abs=1e-3)  # float32 sums


def test_weights_are_decayed_and_slopes_are_not(data: Path, tmp_path: Path) -> None:
    recipe = replace(RECIPE, steps=1, rate=1e-12, weight_decay=1e11, momentum=0.0)  # a step of decay only
    (tmp_path / "run").mkdir()
    trainer = Trainer(recipe, open_splits(data), tmp_path / "run")
    before = {name: tensor.clone() for name, tensor in trainer.net.state_dict().items()}
    trainer.run()
    for name, tensor in trainer.net.state_dict().items():
        kept = 1.0 if name.endswith(".slope") else 0.9  # 1 − rate·decay
        # 1e-6: gradients move by rate·gradient, about 1e-10
        torch.testing.assert_close(tensor, before[name] * kept, rtol=1e-6, atol=1e-6)


# Resuming


@pytest.mark.parametrize(
    ("function", "call"),
    [
        ("loop.trainer.Trainer.step", 8),  # between two saved states: step 7 is repeated
        ("run_state.checkpoint_manager.write_checkpoint", 4),  # state.pt is of step 6, last.safetensors of step 5
        ("loop.trainer.Trainer.evaluate", 3),  # at the very end
        ("run_state.checkpoint_manager.write_state", 1),  # before anything is saved
    ],
)
def test_a_killed_run_resumes_bit_for_bit(
    uninterrupted: Path, data: Path, tmp_path: Path, function: str, call: int
) -> None:
    folder = tmp_path / "run"
    train_until_killed(RECIPE, data, folder, function, call)
    last = folder / "last.safetensors"
    assert not last.exists() or (read_checkpoint(last).metrics or {}).get("step") != RECIPE.steps
    train(RECIPE, data, folder)
    assert_equal_runs(folder, uninterrupted)


class _Killed(BaseException):
    """Stop a run immediately, as if the machine had crashed."""


@pytest.mark.parametrize("call", [2, 3])  # after state.pt of step 5: before last.safetensors, before best.safetensors
def test_checkpoints_older_than_the_state_after_a_crash_are_repaired_at_the_next_start(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: int
) -> None:
    calls, folder = 0, tmp_path / "run"

    def killed(path: Path, checkpoint: Checkpoint) -> None:
        nonlocal calls
        calls += 1
        if calls == call:
            raise _Killed
        write_checkpoint(path, checkpoint)

    with monkeypatch.context() as patch:
        patch.setattr("prelunet.training.run_state.checkpoint_manager.write_checkpoint", killed)
        with pytest.raises(_Killed):
            train(RECIPE, data, folder)
    assert not (folder / "best.safetensors").exists()
    trainer = Trainer(RECIPE, open_splits(data), folder)
    assert trainer.progress.step == 5
    for name in ("last.safetensors", "best.safetensors"):
        checkpoint = read_checkpoint(folder / name)
        assert checkpoint.metrics is not None
        assert checkpoint.metrics["step"] == 5
        for tensor, own in zip(checkpoint.tensors.values(), tensors_of(trainer.net).values(), strict=True):
            np.testing.assert_array_equal(tensor, own)


def stop_at(monkeypatch: pytest.MonkeyPatch, method: str, call: int, action: Callable[[], None]) -> None:
    """Call `action` at the start of the given call of a Trainer's method."""
    original, calls = getattr(Trainer, method), 0

    def stopping(self: Trainer, *arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == call:
            action()
        return original(self, *arguments)

    monkeypatch.setattr(Trainer, method, stopping)


@pytest.mark.parametrize(
    ("number", "method", "call", "step"),
    [
        (signal.SIGINT, "step", 7, 7),  # the seventh step is finished first
        (signal.SIGTERM, "step", 1, 1),
        (signal.SIGTERM, "evaluate", 2, 10),
        (signal.SIGINT, "save", 1, 3),
    ],
)
def test_a_signal_saves_after_a_whole_step_and_the_same_command_resumes(  # noqa: PLR0917 - a table
    uninterrupted: Path,
    data: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    number: signal.Signals,
    method: str,
    call: int,
    step: int,
) -> None:
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)  # as the program does
    try:
        with monkeypatch.context() as patch:
            stop_at(patch, method, call, lambda: os.kill(os.getpid(), number))
            with pytest.raises(Interrupted, match=f"interrupted after step {step} of 12"):
                train(RECIPE, data, tmp_path / "run")
    finally:
        signal.signal(signal.SIGTERM, before)
    messages: list[str] = []
    train(RECIPE, data, tmp_path / "run", report=messages.append)
    assert messages == [*SETUP_MESSAGES, f"{tmp_path / 'run'}: resuming after step {step} of 12"]
    assert_equal_runs(tmp_path / "run", uninterrupted)


def test_a_signal_inside_the_block_is_recorded_and_raised_at_its_end() -> None:
    recorded = False
    with pytest.raises(KeyboardInterrupt), deferred_signals() as stop:  # noqa: PT012
        os.kill(os.getpid(), signal.SIGINT)
        recorded = stop.received
    assert recorded
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_two_signals_at_once_count_as_one_request() -> None:
    with pytest.raises(KeyboardInterrupt), deferred_signals():  # noqa: PT012
        os.kill(os.getpid(), signal.SIGTERM)  # from a scheduler
        os.kill(os.getpid(), signal.SIGTERM)  # from torchrun, which the scheduler signaled too
        saved = True
    assert saved


def test_a_later_second_signal_interrupts_immediately(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signals, "DEBOUNCE_SECONDS", -1.0)
    with pytest.raises(KeyboardInterrupt), deferred_signals():  # noqa: PT012
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)
        pytest.fail("the second signal was only recorded")


def test_a_finished_run_is_reported_and_left_unchanged(uninterrupted: Path, data: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in uninterrupted.iterdir() if path.name != "metrics.jsonl"}
    messages: list[str] = []
    result = train(RECIPE, data, uninterrupted, report=messages.append)
    assert messages == [*SETUP_MESSAGES, f"{uninterrupted}: all 12 steps are complete; to start over, use --fresh"]
    assert {path: path.stat().st_mtime_ns for path in before} == before
    assert result.errors.step == 12


# Faults during a run


def test_another_recipe_is_refused_with_the_difference_and_fresh_starts_over(
    uninterrupted: Path, data: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    train(replace(RECIPE, steps=2, rate=0.5e-3), data, folder)
    (folder / "notes.txt").write_text("mine")
    with pytest.raises(RunFolderError, match="another run") as caught:
        train(RECIPE, data, folder)
    assert "recipe.rate: 0.0005 in the folder, 0.003 now" in str(caught.value)
    assert "recipe.steps: 2 in the folder, 12 now" in str(caught.value)
    assert "--fresh" in str(caught.value)
    train(RECIPE, data, folder, fresh=True)
    assert_equal_runs(folder, uninterrupted)
    assert (folder / "notes.txt").read_text() == "mine"


def test_divergence_stops_training_and_keeps_the_last_good_state(data: Path, tmp_path: Path) -> None:
    recipe = replace(RECIPE, rate=1e6, save_every=1)
    with pytest.raises(UsageError, match=r"diverged: after step \d+ .*Lower `rate`"):
        train(recipe, data, tmp_path / "run")
    state = torch.load(tmp_path / "run/state.pt", weights_only=True)
    assert all(bool(torch.isfinite(tensor).all()) for tensor in state["net"].values())


def test_non_finite_logits_are_divergence_not_correct_answers(data: Path, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    trainer = Trainer(RECIPE, open_splits(data), tmp_path / "run")
    trainer.net.get_submodule("fc3").bias.data[1] = float("nan")
    with pytest.raises(UsageError, match="diverged"):
        trainer.evaluate()
    with pytest.raises(UsageError, match="diverged"):
        trainer.save()


def test_a_full_disk_keeps_the_last_good_files_and_the_same_command_resumes(
    uninterrupted: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, real, saves = tmp_path / "run", os.fsync, 0

    def full(descriptor: int) -> None:
        nonlocal saves
        saves += 1
        if saves > 12:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(descriptor)

    with monkeypatch.context() as patch:
        patch.setattr("prelunet.evaluator.files.os.fsync", full)
        with pytest.raises(EnvironmentFault, match="disk is full"):
            train(RECIPE, data, folder)
    assert [path.name for path in folder.iterdir() if path.name.startswith(".")] == []
    read_checkpoint(folder / "last.safetensors")
    train(RECIPE, data, folder)
    assert_equal_runs(folder, uninterrupted)


@pytest.mark.parametrize(
    ("raised", "fix"),
    [
        (torch.OutOfMemoryError("CUDA out of memory."), r"batch 5 \(CUDA out of memory\.\).*--accumulate 2"),
        (RuntimeError("CUDA error: out of memory"), r"batch 5 \(CUDA error: out of memory\)"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you"), r"not enough memory for a step with batch 5"),
        (InvalidCxxCompiler(), r"torch\.compile failed \(No working C.*Omit --compile"),
    ],
)
def test_what_torch_lacks_is_a_fault_of_the_environment_after_which_the_run_resumes(
    data: Path, tmp_path: Path, uninterrupted: Path, monkeypatch: pytest.MonkeyPatch, raised: Exception, fix: str
) -> None:
    compiled = replace(RECIPE, compile=True)
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "step", lambda *_: (_ for _ in ()).throw(raised))
        with pytest.raises(EnvironmentFault, match=fix):
            train(compiled, data, tmp_path / "run")
    train(RECIPE, data, tmp_path / "run")
    assert metrics(tmp_path / "run") == metrics(uninterrupted)


def test_undecodable_images_are_named_counted_and_skipped(tmp_path: Path) -> None:
    root = make_dataset(tmp_path / "data")
    (root / "train/dog/001.png").write_bytes(b"no image")
    messages: list[str] = []
    short = replace(RECIPE, steps=5)
    train(short, root, tmp_path / "run", report=messages.append)
    assert messages[:2] == SETUP_MESSAGES
    assert messages[2] == "train/: 1 images cannot be decoded and are skipped:"
    assert messages[3].startswith("  dog/001.png: ")
    again: list[str] = []
    train(short, root, tmp_path / "run", report=again.append)
    assert again[:4] == messages[:4]
