"""The training loop of one run, for one process and for many.

With many processes each makes its rows of every batch, and `training.distributed.base` makes one gradient of them all;
the first one writes the files and talks to the user.
"""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from prelunet.evaluator.engine.scores import ranks_of
from prelunet.evaluator.errors import DatasetError, DivergenceError, Interrupted
from prelunet.evaluator.terminal import Advance, progress
from prelunet.training.data.augmentation import dropout_factors
from prelunet.training.data.image_cache import ImageCache
from prelunet.training.data.loader import Batch, evaluation_batches, training_batches
from prelunet.training.data.splits import Splits
from prelunet.training.distributed.base import DropoutFactors, ParallelMode, StepOptions, check_batch
from prelunet.training.distributed.data_parallel import build_parallel
from prelunet.training.distributed.process_group import ProcessGroup
from prelunet.training.inspection.layer_log import LayerResponse
from prelunet.training.inspection.layer_statistics import find_non_finite, measure_layers, sample_views
from prelunet.training.loop.setup import initial_state
from prelunet.training.loop.signals import StopSignals, deferred_signals
from prelunet.training.loop.tracking import RunLogs
from prelunet.training.loop.unreadable_images import UnreadableImages
from prelunet.training.net.dense_reference import subtract_mean
from prelunet.training.net.network import PreluNet, load_tensors, parameter_groups
from prelunet.training.recipe import Recipe, count_plateaus, rate_at
from prelunet.training.run_state.checkpoint_manager import CheckpointManager, is_kept
from prelunet.training.run_state.metrics_log import ErrorRates, count_errors, error_rates
from prelunet.training.run_state.resume_state import momentum_of

LOG_EVERY = 20  # steps
EVALUATION_BATCH = 256  # crops at once, over all processes
SINGLE_PROCESS = ProcessGroup(0, 1, torch.device("cpu"))


@dataclass(frozen=True)
class Execution:
    """How a training is carried out: nothing here changes what is learned, but for the order of sums.

    device: `cpu`, `cuda`, None for CUDA where there is any; parallel: how several processes share the work, None for
    `ddp`; workers: how many make batches ahead in each of them, 0 for nobody, None for one a core; diagnose: whether
    the layers are measured at every evaluation; events: whether events for TensorBoard are written; cache: folder in
    which what is known of the images is kept (training/data/dataset_statistics.py), None for nowhere.
    """

    device: str | None = None
    parallel: ParallelMode | None = None
    workers: int | None = None
    diagnose: bool = False
    events: bool = False
    cache: Path | None = None


def discard_report(_text: str) -> None:
    """Report to nobody."""


class Trainer:
    """One run: net, optimizer, images and progress. A step changes all of them or none."""

    def __init__(
        self,
        recipe: Recipe,
        splits: Splits,
        folder: Path,
        group: ProcessGroup = SINGLE_PROCESS,
        execution: Execution = Execution(),
        start: Path | None = None,
        *,
        reset_folder: Callable[[], None] | None = None,
        report: Callable[[str], None] = discard_report,
    ) -> None:
        """Begin a run or resume one. reset_folder: removes what an earlier run left, where a new one begins."""
        self.recipe = recipe.in_steps(len(splits.train.samples))
        self.splits, self.folder, self.group, self.start = splits, folder, group, start
        options = StepOptions(recipe.precision, recipe.channels_last, recipe.compile, recipe.accumulate)
        check_batch(recipe.batch, group, options)
        self.checkpoint_manager = CheckpointManager(folder, recipe, splits)
        self.logs = RunLogs(folder, events=execution.events, diagnose=execution.diagnose, report=report)
        self.workers, self.cache = execution.workers, execution.cache
        self.remarks: list[str] = []  # for the user, before the work begins
        self.reset_folder = reset_folder
        self.note = ""  # what progress shows beside the rate
        self.net = PreluNet(recipe.build_architecture(), len(splits.classes))
        self._start_or_resume(execution.parallel or "ddp", options)
        self.mean = torch.from_numpy(self.progress.mean).to(group.device)
        self.train_images = ImageCache(splits.train, self.progress.refused["train"])
        self.val_images = ImageCache(splits.val, self.progress.refused["val"])
        self.unreadable = UnreadableImages(splits.train, "train/", self.progress.unreadable, report)
        self.unreadable_val = UnreadableImages(splits.val, "val/", {}, report)

    def _start_or_resume(self, kind: ParallelMode, options: StepOptions) -> None:
        """Make net, optimizer and progress of the saved state, which the first process writes where there is none.

        Bring what a crash may have left in between to the same step.
        """
        if self.group.is_first and (self.reset_folder is not None or not self.checkpoint_manager.has_state):
            self._write_initial_state()
        self.group.wait()
        state = self.checkpoint_manager.read(self.net)
        self.progress = state.progress
        self.parallel = build_parallel(kind, self.net, self.group, options)  # which may take parameters away
        groups = parameter_groups(self.net, self.recipe.weight_decay)
        self.optimizer = torch.optim.SGD(groups, lr=self.recipe.rate, momentum=self.recipe.momentum)
        state.restore(self.net, self.optimizer)
        self.unreadable_before, self.progress.unreadable = (
            self.progress.unreadable,
            {},
        )  # they may have been mended since
        if self.group.is_first:
            self.logs.resume(self.progress.step, evaluated=self.progress.is_evaluated)
            self.checkpoint_manager.repair(self.net, self.progress)

    def _write_initial_state(self) -> None:
        """Save what the run begins with."""
        tensors, progress = initial_state(self.recipe, self.splits, self.start, self.cache, self.remarks.append)
        load_tensors(self.net, tensors)
        if self.reset_folder is not None:
            self.reset_folder()
        self.checkpoint_manager.write(self.net, {}, progress)

    def status_messages(self) -> Iterator[str]:
        """Yield what a user should know before the work begins."""
        yield from self.remarks
        for split, files in self.progress.refused.items():
            if files:
                yield f"{split}/: {len(files)} images cannot be decoded and are left out:"
                yield from (f"  {file}: {reason}" for file, reason in files.items())
        if unreadable := self.unreadable_before:
            yield f"train/: {len(unreadable)} images broke while the training ran before, and others took their places:"
            yield from (f"  {file}: {reason}" for file, reason in unreadable.items())
        step, steps = self.progress.step, self.recipe.total_steps
        if step == steps and self.progress.is_evaluated:
            yield f"{self.folder}: all {steps} steps are done already; train anew with --fresh"
        elif step:
            yield f"{self.folder}: going on after step {step} of {steps}"

    def run(self) -> None:
        """Train to the recipe's end; a signal ends it between two steps, with the state saved."""
        try:
            with deferred_signals() as signals:
                self._run(signals)
                signals.received = False  # nothing is left to stop
        except KeyboardInterrupt:
            raise Interrupted(
                f"{self.folder}: interrupted twice, so at once; the same command goes on from the last saved state"
            ) from None
        finally:
            self.logs.close()

    def _run(self, signals: StopSignals) -> None:
        steps, first, rows = self.recipe.total_steps, self.progress.step, self.parallel.rows(self.recipe.batch)
        axes = self.progress.axes
        batches = training_batches(
            self.train_images, self.recipe, first, rows=rows, axes=axes, **self._loader_options()
        )
        with progress("training", steps, "steps", done=first) if self.group.is_first else _no_progress() as advance:
            self._evaluate_if_due(signals)  # an earlier call may have been stopped just here
            clock = ThroughputMeter()
            for batch in batches:
                stop = self._step(batch, signals)
                clock.images += self.recipe.batch
                if self.progress.step % LOG_EVERY == 0 or self.progress.step == steps:
                    self._log_steps(clock)
                advance(1, self.note)
                if self._evaluate_if_due(signals):
                    clock = ThroughputMeter()  # its time is not the training's
                elif stop:
                    self._save()
                    raise self._interrupted()
                elif self._save_is_due():
                    self._save()
                    self._stop_if_signalled(signals)

    def _step(self, batch: Batch, signals: StopSignals) -> bool:
        """Take one step of stochastic gradient descent; return whether any process was told to stop."""
        for group in self.optimizer.param_groups:
            group["lr"] = self._rate()
        images, labels = self._input(batch), torch.from_numpy(batch.labels).to(self.group.device)
        step = self.parallel.gradients(images, labels, self._factors(), self.recipe.batch, stop=signals.received)
        if not math.isfinite(step.loss):
            raise self._diverged(find_non_finite(self.net, images, labels) if self.net.has_head else "")
        self.optimizer.step()
        self.progress.step += 1
        self.progress.loss_sum += step.loss
        self.progress.loss_steps += 1
        self.unreadable.add(batch.unreadable)
        return step.stop

    def _loader_options(self) -> dict[str, Any]:
        """Return how batches are made."""
        return {
            "workers": self.workers,
            "pin_memory": self.group.device.type == "cuda",
            "local_processes": self.group.local_processes,
        }

    def _factors(self) -> DropoutFactors:
        """Return what dropout does in the next step."""
        recipe, step, width = self.recipe, self.progress.step, self.recipe.build_architecture().hidden
        if not recipe.dropout:
            return None
        return lambda rows: dropout_factors(recipe.seed, step, rows, width, recipe.dropout)

    def _rate(self) -> float:
        """Return the learning rate of the next step."""
        errors = [errors.top1_error for errors in self.progress.evaluations]
        return rate_at(self.recipe, self.progress.step, count_plateaus(errors, self.recipe.patience))

    def _input(self, batch: Batch) -> Tensor:
        """Return (N, 3, crop, crop), mean subtracted; in memory the channels stay last, which halves a CPU's time."""
        images = subtract_mean(torch.from_numpy(batch.images).to(self.group.device, non_blocking=True), self.mean)
        if batch.shift is None:
            return images
        return images + torch.from_numpy(batch.shift).to(self.group.device)[:, :, None, None]

    def _log_steps(self, clock: "ThroughputMeter") -> None:
        """Write the mean loss since the last line, and begin the next."""
        now, speed = self.progress, clock.lap()
        loss = now.loss_sum / now.loss_steps
        self.note = f"loss {loss:.3f}, {speed:,.0f} images/s"
        rate = self.optimizer.param_groups[0]["lr"]
        if self.group.is_first:
            self.logs.write({"step": now.step, "loss": loss, "rate": rate, "images_per_second": round(speed, 1)})
        now.loss_sum, now.loss_steps = 0.0, 0

    def _evaluate_if_due(self, signals: StopSignals) -> bool:
        """Measure the errors on val/ at every `evaluate_every` steps and at the end, and save; True if it was due."""
        now, recipe = self.progress, self.recipe
        due = now.step > 0 and (now.step % recipe.evaluate_every == 0 or now.step == recipe.total_steps)
        if not due or now.is_evaluated:
            return False
        errors, images = self._evaluate(signals)
        now.evaluations.append(errors)
        if self.group.is_first:
            refused = len(self.splits.val.samples) - images
            self.logs.write({**errors.to_json(), "evaluated": images, "refused": refused})
            self.logs.write_layers(now.step, self._measure_layers)
        self._save()
        self._stop_if_signalled(signals)
        return True

    @torch.inference_mode()
    def _evaluate(self, signals: StopSignals) -> tuple[ErrorRates, int]:
        """Return the errors on val/ in the view of the `center` protocol, and of how many images.

        Every process looks at its part.
        """
        counts = np.zeros(3)  # images, wrong at top-1, at top-5
        size = max(1, EVALUATION_BATCH // self.group.size)
        rank, ranks = self.group.rank, self.group.size
        self.unreadable_val.reset()
        for batch in evaluation_batches(
            self.val_images, self.recipe, size, part=(rank, ranks), **self._loader_options()
        ):
            logits = self.parallel.logits(self._input(batch)).cpu().numpy()
            if not np.isfinite(logits).all():  # every comparison with NaN is false: it would look like a hit
                counts[0] = math.nan  # which the others must learn, too
            counts += (len(batch.labels), *count_errors(ranks_of(logits, batch.labels)))
            self.unreadable_val.add(batch.unreadable)
            self._save_and_stop_if_signalled(signals)
        images, *wrong = self.group.total(*counts)
        if math.isnan(images):
            raise self._diverged("an answer on val/ is not finite")
        self.unreadable_val.gather(self.group)
        self.unreadable_val.check(self.recipe.max_refused)
        if not images:
            raise DatasetError(f"{self.splits.val.location}: no image of val/ can be read any more. Put them back")
        return error_rates(self.progress.step, images, *wrong), int(images)

    def _measure_layers(self) -> tuple[LayerResponse, ...]:
        """Measure the layers on images of val/; none if not one of these can be read any more."""
        views = sample_views(self.val_images, self.recipe.evaluation_scale, self.recipe.crop)
        if not len(views.labels):
            return ()
        labels = torch.from_numpy(views.labels).to(self.group.device)
        return measure_layers(self.net, self._input(Batch(views.images, views.labels)), labels)

    def _save_is_due(self) -> bool:
        return self.progress.step % self.recipe.save_every == 0 or is_kept(self.recipe, self.progress.step)

    def _save(self) -> None:
        """Write the state and its checkpoints."""
        finite = all(bool(torch.isfinite(parameter).all()) for parameter in self.net.parameters())
        if self.group.any(not finite):
            raise self._diverged("a parameter is not finite")
        self.unreadable.gather(self.group)
        if self.group.is_first:
            self.checkpoint_manager.write(self.net, momentum_of(self.net, self.optimizer), self.progress)
        self.group.wait()  # torchrun would stop the first process in the middle when another one ends
        self.unreadable.check(self.recipe.max_refused)

    def _save_and_stop_if_signalled(self, signals: StopSignals) -> None:
        """End the run if any process was told to; what has been done since the last save is saved."""
        if self.group.any(signals.received):
            self._save()
            raise self._interrupted()

    def _stop_if_signalled(self, signals: StopSignals) -> None:
        """End the run, which has just been saved, if any process was told to and something is left to do."""
        if self.group.any(signals.received) and self.progress.step < self.recipe.total_steps:
            raise self._interrupted()

    def _interrupted(self) -> Interrupted:
        if not self.group.is_first:
            return Interrupted("")  # one of them says it
        return Interrupted(
            f"{self.folder}: interrupted after step {self.progress.step} of {self.recipe.total_steps}; "
            "the state is saved, and the same command goes on from there"
        )

    def _diverged(self, where: str) -> DivergenceError:
        return DivergenceError(
            f"{self.folder}: the training has diverged: after step {self.progress.step} a number is no longer finite "
            f"({where or 'the loss'}). The last saved state is kept. Lower `rate` in the recipe (now "
            f"{self.recipe.rate}) and train in another folder, or here with --fresh"
        )


@contextmanager
def _no_progress() -> Iterator[Advance]:
    yield lambda _count=1, _note="": None


class ThroughputMeter:
    """Counts the images of a stretch of training and says how many there were a second."""

    def __init__(self) -> None:
        self.images, self.start = 0, time.monotonic()

    def lap(self) -> float:
        """Return images per second since the last lap, and begin the next."""
        now = time.monotonic()
        rate = self.images / max(now - self.start, 1e-9)
        self.images, self.start = 0, now
        return rate
