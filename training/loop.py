"""The training loop: `train` is the table of contents, `Trainer` what one run consists of."""

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from evaluator.engine.scores import ranks_of
from evaluator.errors import CheckpointError, Interrupted, UsageError
from evaluator.progress import progress
from training.augmentation import DROPOUT, Batch, evaluation_batches, random_stream, training_batches
from training.checkpoints import Checkpoint, read_checkpoint, write_checkpoint
from training.dense import subtract_mean
from training.embedded import embedded_dataset_path
from training.initialization import initial_tensors
from training.interrupts import uninterrupted
from training.metrics import Errors, MetricsLog, errors_of
from training.network import PreluNet, load_tensors, parameter_groups, tensors_of
from training.pictures import Pictures, survey
from training.recipe import Recipe
from training.run_folder import BEST_FILE, LAST_FILE, METRICS_FILE, STATE_FILE, open_run_folder
from training.schedule import rate_at
from training.splits import Splits, open_splits
from training.state import Progress, read_state, write_state

LOG_EVERY = 20  # steps
EVALUATION_BATCH = 256  # crops at once


@dataclass(frozen=True)
class Training:
    """A finished training. errors: on val/ at the end; checkpoint: of the last step; dataset: where the images lie."""

    checkpoint: Path
    dataset: Path
    errors: Errors


def train(
    recipe: Recipe,
    dataset_path: Path | None,
    run_folder: Path,
    *,
    fresh: bool = False,
    announce: Callable[[str], None] | None = None,
) -> Training:
    """Train a net by a recipe, or go on where an earlier call stopped; a finished run is left as it is.

    dataset_path: folder or archive with train/ and val/; None for the embedded one. run_folder: see
    training/run_folder.py. fresh: throw an earlier run in that folder away. announce: told what a user should know.
    Raises DatasetError for unusable data; RunFolderError for a folder of another training, or where another process is
    at work; Interrupted after Ctrl-C or SIGTERM (the state is saved); UsageError when the loss is no longer finite (the
    last good state is kept).
    """
    path = dataset_path or embedded_dataset_path()
    splits = open_splits(path)
    with open_run_folder(run_folder, describe(recipe, splits), fresh=fresh):
        trainer = Trainer(recipe, splits, run_folder)
        if announce is not None:
            for text in trainer.news():
                announce(text)
        trainer.run()
    errors = trainer.progress.evaluated
    assert errors is not None, "a run ends with an evaluation"
    return Training(run_folder / LAST_FILE, path, errors)


def describe(recipe: Recipe, splits: Splits) -> dict[str, Any]:
    """Return all that decides the results of a training, as plain data."""
    classes = [entry.to_json() for entry in splits.classes]
    return {"recipe": recipe.to_json(), "dataset": splits.to_json(), "classes": classes}


class Trainer:
    """One run: net, optimizer, images and progress. A step changes all of them or none."""

    def __init__(self, recipe: Recipe, splits: Splits, folder: Path) -> None:
        self.recipe, self.splits, self.folder = recipe, splits, folder
        self.note = ""  # what progress shows beside the rate
        self.net = PreluNet(recipe.net(), len(splits.classes), recipe.dropout)
        self.optimizer = torch.optim.SGD(
            parameter_groups(self.net, recipe.weight_decay), lr=recipe.rate, momentum=recipe.momentum
        )
        self.log = MetricsLog(folder / METRICS_FILE)
        self.progress = self._resume() if (folder / STATE_FILE).exists() else self._begin()
        self.mean = torch.from_numpy(self.progress.mean)
        self.train_pictures = Pictures(splits.train, self.progress.refused["train"])
        self.val_pictures = Pictures(splits.val, self.progress.refused["val"])

    def _begin(self) -> Progress:
        """Look at all images once, and draw the initial weights."""
        recipe = self.recipe
        scale, crop = recipe.evaluation_scale, recipe.crop
        train_survey = survey(self.splits.train, "train/", scale=scale, crop=crop)
        val_survey = survey(self.splits.val, "val/", scale=scale, crop=crop)
        load_tensors(self.net, initial_tensors(recipe.net(), len(self.splits.classes), recipe.seed))
        new = Progress(train_survey.mean, {"train": train_survey.refused, "val": val_survey.refused})
        write_state(self.folder / STATE_FILE, self.net, self.optimizer, new)
        return new

    def _resume(self) -> Progress:
        """Take up the saved state; bring what a crash may have left in between to the same step."""
        found = read_state(self.folder / STATE_FILE, self.net, self.optimizer)
        self.log.cut_after(found.step, evaluated=found.is_evaluated)
        for name, checkpoint in self._checkpoints(found):
            if not _holds(self.folder / name, checkpoint):
                write_checkpoint(self.folder / name, checkpoint)
        return found

    def news(self) -> Iterator[str]:
        """Yield what a user should know before the work begins."""
        for split, files in self.progress.refused.items():
            if files:
                yield f"{split}/: {len(files)} images cannot be decoded and are left out:"
                yield from (f"  {file}: {reason}" for file, reason in files.items())
        step, steps = self.progress.step, self.recipe.steps
        if step == steps and self.progress.is_evaluated:
            yield f"{self.folder}: all {steps} steps are done already; train anew with --fresh"
        elif step:
            yield f"{self.folder}: going on after step {step} of {steps}"

    def run(self) -> None:
        """Train to the recipe's end."""
        try:
            self._run()
        except KeyboardInterrupt:
            self._save()
            raise Interrupted(
                f"{self.folder}: interrupted after step {self.progress.step} of {self.recipe.steps}; "
                "the state is saved, and the same command goes on from there"
            ) from None

    def _run(self) -> None:
        steps, first = self.recipe.steps, self.progress.step
        with progress("training", steps, "steps", done=first) as advance:
            self._evaluate_if_due()  # an earlier call may have been stopped just here
            clock = Clock()
            for batch in training_batches(self.train_pictures, self.recipe, first):
                with uninterrupted():
                    self._step(batch)
                    clock.images += len(batch.labels)
                    if self.progress.step % LOG_EVERY == 0 or self.progress.step == steps:
                        self._log_steps(clock)
                advance(1, self.note)
                if self._evaluate_if_due():
                    clock = Clock()  # its time is not the training's
                elif self.progress.step % self.recipe.save_every == 0:
                    self._save()

    def _step(self, batch: Batch) -> None:
        """Take one step of stochastic gradient descent."""
        done = self.progress.step
        for group in self.optimizer.param_groups:
            group["lr"] = rate_at(self.recipe, done)
        torch.manual_seed(int(random_stream(self.recipe.seed, DROPOUT, done).integers(2**63)))
        self.net.train()
        loss = F.cross_entropy(self.net(self._input(batch)), torch.from_numpy(batch.labels))
        value = loss.item()
        if not math.isfinite(value):
            raise self._diverged()
        self.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.progress.step += 1
        self.progress.loss_sum += value
        self.progress.loss_steps += 1
        self.note = f"loss {self.progress.loss_sum / self.progress.loss_steps:.3f}"

    def _input(self, batch: Batch) -> Tensor:
        """Return (N, 3, crop, crop), mean subtracted; in memory the channels stay last, which halves a CPU's time."""
        return subtract_mean(torch.from_numpy(batch.images), self.mean)

    def _log_steps(self, clock: "Clock") -> None:
        """Write the mean loss since the last line, and begin the next."""
        now = self.progress
        entry = {"step": now.step, "loss": now.loss_sum / now.loss_steps, "rate": rate_at(self.recipe, now.step - 1)}
        self.log.write({**entry, "images_per_second": round(clock.lap(), 1)})
        now.loss_sum, now.loss_steps = 0.0, 0

    def _evaluate_if_due(self) -> bool:
        """Measure the errors on val/ at every `evaluate_every` steps and at the end, and save; True if it was due."""
        now, recipe = self.progress, self.recipe
        due = now.step > 0 and (now.step % recipe.evaluate_every == 0 or now.step == recipe.steps)
        if not due or now.is_evaluated:
            return False
        errors = self._evaluate()
        with uninterrupted():
            now.evaluated = errors
            if now.best is None or errors.top1_error < now.best.top1_error:
                now.best = errors
            counts = {"evaluated": len(self.val_pictures), "refused": len(self.val_pictures.refused)}
            self.log.write({**errors.to_json(), **counts})
        self._save()
        return True

    @torch.inference_mode()
    def _evaluate(self) -> Errors:
        """Return the errors on val/ in the view of the `center` protocol."""
        self.net.eval()
        all_ranks = []
        for batch in evaluation_batches(self.val_pictures, self.recipe, EVALUATION_BATCH):
            logits = self.net(self._input(batch)).numpy()
            if not np.isfinite(logits).all():  # every comparison with NaN is false: it would look like a hit
                raise self._diverged()
            all_ranks.append(ranks_of(logits, batch.labels))
        return errors_of(self.progress.step, all_ranks)

    def _save(self) -> None:
        """Write the state first, then the checkpoints that follow from it."""
        if not all(bool(torch.isfinite(parameter).all()) for parameter in self.net.parameters()):
            raise self._diverged()
        write_state(self.folder / STATE_FILE, self.net, self.optimizer, self.progress)
        for name, checkpoint in self._checkpoints(self.progress):
            write_checkpoint(self.folder / name, checkpoint)

    def _checkpoints(self, now: Progress) -> Iterator[tuple[str, Checkpoint]]:
        """Yield file name and checkpoint of this state: the last, and the best if this is it."""
        dataset = self.splits.train
        checkpoint = Checkpoint(
            architecture=self.recipe.net(),
            classes=self.splits.classes,
            mean=now.mean,
            tensors=tensors_of(self.net),
            recipe=self.recipe.to_json(),
            dataset={"fingerprint": dataset.fingerprint, "images": len(dataset.samples)},
            metrics=now.evaluated.to_json() if now.evaluated else None,
        )
        yield LAST_FILE, checkpoint
        if now.best is not None and now.best.step == now.step:
            yield BEST_FILE, checkpoint

    def _diverged(self) -> UsageError:
        return UsageError(
            f"{self.folder}: the training has diverged: after step {self.progress.step} the loss is no longer finite. "
            f"The last saved state is kept. Lower `rate` in the recipe (now {self.recipe.rate}) and train in another "
            "folder, or here with --fresh"
        )


class Clock:
    """Counts the images of a stretch of training and says how many there were a second."""

    def __init__(self) -> None:
        self.images, self.start = 0, time.monotonic()

    def lap(self) -> float:
        """Return images per second since the last lap, and begin the next."""
        now = time.monotonic()
        rate = self.images / max(now - self.start, 1e-9)
        self.images, self.start = 0, now
        return rate


def _holds(path: Path, checkpoint: Checkpoint) -> bool:
    """Whether the file is this checkpoint."""
    try:
        found = read_checkpoint(path)
    except (CheckpointError, UsageError):  # damaged, or not there
        return False
    same = all(np.array_equal(found.tensors[name], tensor) for name, tensor in checkpoint.tensors.items())
    return same and found.metrics == checkpoint.metrics
