"""The training loop of a run, in one or several processes.

Each of several processes computes its rows of every batch, and `training.distributed` combines their gradients. The
first process writes the files and reports to the user.
"""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ...evaluator.arrays import Float32Array
from ...evaluator.engine.scores import ranks_of
from ...evaluator.errors import DatasetError, DivergenceError, Interrupted
from ...evaluator.terminal import Advance, progress
from ..data.augmentation import dropout_factors
from ..data.dataset_statistics import compute_statistics
from ..data.image_cache import ImageCache
from ..data.loader import Batch, Loader
from ..data.splits import Splits
from ..distributed.base import StepOptions, check_batch
from ..distributed.data_parallel import build_parallel
from ..distributed.process_group import ProcessGroup
from ..inspection.layer_log import LayerResponse
from ..inspection.layer_statistics import measure_layers, sample_views
from ..net.dense_reference import subtract_mean
from ..net.initialization import initial_tensors
from ..net.network import PreluNet, load_tensors, parameter_groups
from ..recipe import Recipe
from ..run_state.checkpoint_manager import CheckpointManager, is_kept
from ..run_state.metrics_log import ErrorRates
from ..run_state.resume_state import TrainingProgress, momentum_of, read_state
from ..run_state.run_folder import STATE_FILE
from .environment import current_environment
from .execution import Execution
from .fine_tune import load_pretrained
from .signals import StopSignals, deferred_signals
from .tracking import RunLogs
from .unreadable_images import UnreadableImages

LOG_EVERY = 20  # steps
EVALUATION_BATCH = 256  # crops at once, over all processes
SINGLE_PROCESS = ProcessGroup(0, 1, torch.device("cpu"))


class Trainer:
    """A run: net, optimizer, images and progress. A step changes all of them or none."""

    def __init__(  # noqa: PLR0913 - what the run consists of
        self,
        recipe: Recipe,
        splits: Splits,
        folder: Path,
        group: ProcessGroup = SINGLE_PROCESS,
        execution: Execution = Execution(),
        start: Path | None = None,
        *,
        parent_sha256: str | None = None,
        reset_folder: Callable[[], None] | None = None,
        report: Callable[[str], None] = lambda _text: None,
    ) -> None:
        """Start or resume a run; files that a crash left at different steps are brought to the same step.

        start: initial checkpoint, None for random weights; parent_sha256: its digest; reset_folder: removes an earlier
        run from the folder, None to resume; report: receives messages to the user.
        """
        self.recipe = recipe.in_steps(len(splits.train.samples))
        self.splits, self.folder, self.group = splits, folder, group
        self.signals = StopSignals()
        options = StepOptions(recipe.precision, recipe.channels_last, recipe.compile, recipe.accumulate)
        check_batch(recipe.batch, group, options)
        self.checkpoint_manager = CheckpointManager(folder, recipe, splits, parent_sha256)
        self.logs = RunLogs(folder, events=execution.events, diagnose=execution.diagnose, report=report)
        self.note = ""  # shown on the progress line
        self.net = PreluNet(recipe.build_architecture(), len(splits.classes))
        if group.is_first and (reset_folder is not None or not (folder / STATE_FILE).exists()):
            tensors, initial = _initial_state(self.recipe, splits, start, report)
            load_tensors(self.net, tensors)
            if reset_folder is not None:
                reset_folder()
            self.checkpoint_manager.write(self.net, {}, initial)
        group.wait()
        state = read_state(folder / STATE_FILE, self.net)
        self.progress = state.progress
        changes = self.progress.enter_environment(current_environment(group, recipe.precision))
        if group.device.type == "cpu":  # where these two change nothing
            changes = [change for change in changes if not change.startswith(("deterministic:", "cudnn_benchmark:"))]
        self.environment_changes = changes
        self.parallel = build_parallel(execution.parallel or "ddp", self.net, group, options)  # may remove parameters
        self.optimizer = _optimizer(self.net, recipe)
        state.restore(self.net, self.optimizer)
        # Images that were unreadable may have been repaired in the meantime.
        self.unreadable_before, self.progress.unreadable = self.progress.unreadable, {}
        if group.is_first:
            self.logs.resume(self.progress.step, evaluated=self.progress.is_evaluated)
            self.checkpoint_manager.repair(self.net, self.progress)
        self.mean = torch.from_numpy(self.progress.mean).to(group.device)
        load = partial(
            Loader,
            recipe=self.recipe,
            workers=execution.workers,
            pin_memory=group.device.type == "cuda",
            local_processes=group.local_processes,
        )
        self.train_loader = load(ImageCache(splits.train, self.progress.refused["train"]), axes=self.progress.axes)
        self.val_loader = load(ImageCache(splits.val, self.progress.refused["val"]))
        self.unreadable = UnreadableImages(splits.train, "train/", self.progress.unreadable, report)
        self.unreadable_val = UnreadableImages(splits.val, "val/", {}, report)

    def status_messages(self) -> Iterator[str]:
        """Yield messages on unreadable images, and on the step from which the run resumes."""
        for split, files in self.progress.refused.items():
            if files:
                yield f"{split}/: {len(files)} images cannot be decoded and are skipped:"
                yield from (f"  {file}: {reason}" for file, reason in files.items())
        if unreadable := self.unreadable_before:
            yield f"train/: {len(unreadable)} images became unreadable earlier in this run and were substituted:"
            yield from (f"  {file}: {reason}" for file, reason in unreadable.items())
        step, steps = self.progress.step, self.recipe.total_steps
        if step == steps and self.progress.is_evaluated:
            yield f"{self.folder}: all {steps} steps are complete; to start over, use --fresh"
        elif step:
            yield f"{self.folder}: resuming after step {step} of {steps}"
            if self.environment_changes:
                yield (
                    f"the environment has changed ({'; '.join(self.environment_changes)}): the net may differ from "
                    "that of an uninterrupted run by rounding"
                )

    def run(self) -> tuple[ErrorRates, ErrorRates]:
        """Train to the end of the recipe, and return the last and the best evaluation.

        A signal stops the run between two steps, with the state saved.
        """
        try:
            with deferred_signals() as self.signals:
                self._run()
                self.signals.received = False  # nothing is left to stop
        except KeyboardInterrupt:
            raise Interrupted(
                f"{self.folder}: interrupted twice, so stopped immediately; the same command resumes from the last "
                "saved state"
            ) from None
        finally:
            self.logs.close()
        last, best = self.progress.latest_errors, self.progress.best
        assert last is not None, "a run ends with an evaluation"
        assert best is not None
        return last, best

    def _run(self) -> None:
        now, recipe = self.progress, self.recipe
        rows = self.parallel.rows(recipe.batch)
        batches = self.train_loader.training_batches(now.step, rows)
        no_progress: nullcontext[Advance] = nullcontext(lambda _count=1, _note="": None)
        shown = progress("training", recipe.total_steps, "steps", done=now.step) if self.group.is_first else no_progress
        with shown as advance:
            self._evaluate_if_due()  # an earlier process may have stopped just before it
            first, begun = now.step, time.monotonic()  # of the steps since the last log entry
            for batch in batches:
                stop = self.step(batch)
                if now.step % LOG_EVERY == 0 or now.step == recipe.total_steps:
                    self._log_steps((now.step - first) * recipe.batch / max(time.monotonic() - begun, 1e-9))
                    first, begun = now.step, time.monotonic()
                advance(1, self.note)
                if self._evaluate_if_due():
                    first, begun = now.step, time.monotonic()  # exclude the time of the evaluation
                elif stop:
                    self.save()
                    raise self._interrupted()
                elif now.step % recipe.save_every == 0 or is_kept(recipe, now.step):
                    self.save()
                    self._stop_if_signaled()

    def step(self, batch: Batch) -> bool:
        """Take one step of stochastic gradient descent; return whether any process received a stop signal."""
        now, recipe = self.progress, self.recipe
        plateaus = count_plateaus([errors.top1_error for errors in now.evaluations], recipe.patience)
        for group in self.optimizer.param_groups:
            group["lr"] = rate_at(recipe, now.step, plateaus) * group["rate_factor"]
        widths = self.net.architecture.widths
        dropout = partial(dropout_factors, recipe.seed, now.step, widths=widths, rate=recipe.dropout)
        images, labels = self.preprocess(batch), torch.from_numpy(batch.labels).to(self.group.device)
        result = self.parallel.gradients(
            images, labels, dropout if recipe.dropout else None, recipe.batch, stop=self.signals.received
        )
        if not math.isfinite(result.loss):
            raise self._diverged("the loss")
        self.optimizer.step()
        now.step += 1
        now.loss_sum += result.loss
        now.error_sum += result.error
        now.loss_steps += 1
        self.unreadable.add(batch.unreadable)
        return result.stop

    def preprocess(self, batch: Batch) -> Tensor:
        """Return float32 (N, 3, crop, crop), mean subtracted; channels stay last in memory, twice as fast on a CPU."""
        images = subtract_mean(torch.from_numpy(batch.images).to(self.group.device, non_blocking=True), self.mean)
        if batch.shift is None:
            return images
        return images + torch.from_numpy(batch.shift).to(self.group.device)[:, :, None, None]

    def _log_steps(self, speed: float) -> None:
        """Log the mean loss and error since the last entry, and reset them. speed: images per second."""
        now = self.progress
        loss = now.loss_sum / now.loss_steps
        self.note = f"loss {loss:.3f}, {speed:,.0f} images/s"
        rate = self.optimizer.param_groups[0]["lr"]
        if self.group.is_first:
            error = round(100 * now.error_sum / now.loss_steps, 4)
            speeds = {"rate": rate, "images_per_second": round(speed, 1)}
            self.logs.write({"step": now.step, "loss": loss, "training_error": error, **speeds})
        now.loss_sum, now.error_sum, now.loss_steps = 0.0, 0.0, 0

    def _evaluate_if_due(self) -> bool:
        """Evaluate on val/ and save, every `evaluate_every` steps and at the end; return whether it was due."""
        now, recipe = self.progress, self.recipe
        due = now.step > 0 and (now.step % recipe.evaluate_every == 0 or now.step == recipe.total_steps)
        if not due or now.is_evaluated:
            return False
        errors, images = self.evaluate()
        now.evaluations.append(errors)
        if self.group.is_first:
            refused = len(self.splits.val.samples) - images
            self.logs.write({**errors.to_json(), "evaluated": images, "refused": refused})
            self.logs.write_layers(now.step, self._measure_layers)
        self.save()
        self._stop_if_signaled()
        return True

    @torch.inference_mode()
    def evaluate(self) -> tuple[ErrorRates, int]:
        """Return the errors on val/ with the `center` protocol, and the number of images; each process does a part.

        Saves and raises Interrupted if any process received a stop signal.
        """
        counts = np.zeros(4)  # images, their loss, wrong at top-1, at top-5
        part = self.group.rank, self.group.size
        size = max(1, EVALUATION_BATCH // self.group.size)
        self.unreadable_val.reset()
        for batch in self.val_loader.evaluation_batches(size, part):
            logits = self.parallel.logits(self.preprocess(batch)).cpu().numpy()
            if not np.isfinite(logits).all():  # comparisons with NaN are false, so it would count as correct
                counts[0] = math.nan  # so that all processes notice
            ranks = ranks_of(logits, batch.labels)
            losses = F.cross_entropy(torch.from_numpy(logits).double(), torch.from_numpy(batch.labels), reduction="sum")
            counts += (len(ranks), float(losses), (ranks > 1).sum(), (ranks > 5).sum())
            self.unreadable_val.add(batch.unreadable)
            if self.group.any(self.signals.received):
                self.save()
                raise self._interrupted()
        images, loss, *wrong = self.group.total(*counts)
        if math.isnan(images):
            raise self._diverged("a logit on val/")
        self.unreadable_val.gather(self.group)
        self.unreadable_val.check(self.recipe.max_refused)
        if not images:
            raise DatasetError(f"{self.splits.val.location}: no image of val/ is readable any more. Restore the images")
        top1, top5 = (round(100 * count / images, 4) for count in wrong)
        return ErrorRates(self.progress.step, top1, top5, round(loss / images, 6)), int(images)

    def _measure_layers(self) -> tuple[LayerResponse, ...]:
        """Measure the layers on images of val/; return () if none of these is readable any more."""
        views = sample_views(self.val_loader.image_cache, self.recipe.central_scale, self.recipe.crop)
        if not len(views.labels):
            return ()
        labels = torch.from_numpy(views.labels).to(self.group.device)
        return measure_layers(self.net, self.preprocess(Batch(views.images, views.labels)), labels)

    def save(self) -> None:
        """Save the state and its checkpoints."""
        finite = all(bool(torch.isfinite(parameter).all()) for parameter in self.net.parameters())
        if self.group.any(not finite):
            raise self._diverged("a parameter")
        self.unreadable.gather(self.group)
        if self.group.is_first:
            self.checkpoint_manager.write(self.net, momentum_of(self.net, self.optimizer), self.progress)
        self.group.wait()  # if another process ended now, torchrun would stop the first one in the middle of a write
        self.unreadable.check(self.recipe.max_refused)

    def _stop_if_signaled(self) -> None:
        """Stop the run, which has just been saved, if any process received a stop signal and steps remain."""
        if self.group.any(self.signals.received) and self.progress.step < self.recipe.total_steps:
            raise self._interrupted()

    def _interrupted(self) -> Interrupted:
        if not self.group.is_first:
            return Interrupted("")  # only the first process reports it
        return Interrupted(
            f"{self.folder}: interrupted after step {self.progress.step} of {self.recipe.total_steps}; "
            "the state is saved, and the same command resumes from there"
        )

    def _diverged(self, what: str) -> DivergenceError:
        return DivergenceError(
            f"{self.folder}: training has diverged: after step {self.progress.step} {what} is no longer finite. The "
            f"last saved state is kept. Lower `rate` in the recipe (currently {self.recipe.rate}) and train in another "
            "folder, or in this one with --fresh"
        )


def _initial_state(
    recipe: Recipe, splits: Splits, start: Path | None, report: Callable[[str], None]
) -> tuple[Mapping[str, Float32Array], TrainingProgress]:
    """Compute the statistics of all images, and draw the initial weights or load them from a checkpoint.

    Raises DatasetError if too many images cannot be decoded, and what `load_pretrained` raises.
    """
    compute = partial(compute_statistics, scale=recipe.central_scale, crop=recipe.crop)
    of_train, of_val = compute(splits.train, "train/"), compute(splits.val, "val/")
    mean = of_train.mean_image if recipe.mean == "image" else of_train.mean_channels
    net, initialization = recipe.build_architecture(), recipe.initialization()
    if start is None:
        tensors = initial_tensors(net, len(splits.classes), recipe.seed, initialization)
    else:
        classes, shape = splits.classes, mean.shape
        tensors, mean = load_pretrained(start, net, classes, recipe.seed, initialization, shape, report=report)
    return tensors, TrainingProgress(mean, of_train.axes, {"train": of_train.refused, "val": of_val.refused})


def _optimizer(net: PreluNet, recipe: Recipe) -> torch.optim.SGD:
    groups = parameter_groups(
        net,
        recipe.weight_decay,
        decay_biases=recipe.decay_biases,
        decay_slopes=recipe.decay_slopes,
        bias_rate=recipe.bias_rate,
    )
    return torch.optim.SGD(groups, lr=recipe.rate, momentum=recipe.momentum)


# The learning rate: fixed drops, or a drop whenever the error on val/ stops falling.


def rate_at(recipe: Recipe, step: int, drops: int = 0) -> float:
    """Return the learning rate of a step, counted from 0.

    drops: number of plateaus so far (`count_plateaus`), used by the rate_policy `plateau` only. The paper divides the
    rate by ten twice, "when the error plateaus" (PReLU-nets, section 4). The policy `at` drops it at fixed steps.
    """
    if recipe.rate_policy == "at":
        drops = sum(step >= part * recipe.total_steps for part in recipe.rate_drops)
    else:
        drops = min(drops, recipe.most_drops)
    return recipe.rate * recipe.rate_factor**drops


def count_plateaus(errors: Sequence[float], patience: int) -> int:
    """Count the plateaus of the error on val/, given all evaluations in order.

    A plateau is `patience` consecutive evaluations none of which is below the lowest one before them. After a plateau,
    counting restarts with the next evaluation.
    """
    plateaus, lowest, waited = 0, float("inf"), 0
    for error in errors:
        if error < lowest:
            lowest, waited = error, 0
        else:
            waited += 1
        if waited == patience:
            plateaus, lowest, waited = plateaus + 1, float("inf"), 0
    return plateaus
