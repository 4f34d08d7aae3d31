"""Saving and restoring a run: state.pt, and the checkpoints derived from it."""

from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
from torch import Tensor

from ...evaluator.errors import CheckpointError, UsageError
from ..data.splits import Splits
from ..net.checkpoints import Checkpoint, read_checkpoint, write_checkpoint
from ..net.network import PreluNet, tensors_of
from ..recipe import Recipe
from .resume_state import (
    TrainingProgress,
    write_state,
)
from .run_folder import BEST_FILE, KEPT_FILE, LAST_FILE, STATE_FILE


class CheckpointManager:
    """Manages the state and checkpoint files of a run; with several processes, only the first one writes."""

    def __init__(self, folder: Path, recipe: Recipe, splits: Splits, parent_sha256: str | None = None) -> None:
        """parent_sha256: of the initial checkpoint, None for random weights."""
        self.folder, self.recipe, self.splits, self.parent_sha256 = folder, recipe, splits, parent_sha256

    def write(self, net: PreluNet, momentum: Mapping[str, Tensor], progress: TrainingProgress) -> None:
        """Write the state, then the checkpoints derived from it; there are none before the first step."""
        write_state(self.folder / STATE_FILE, net, momentum, progress)
        if progress.step:
            for name, checkpoint in self._checkpoints(net, progress):
                write_checkpoint(self.folder / name, checkpoint)

    def repair(self, net: PreluNet, progress: TrainingProgress) -> None:
        """Write the checkpoints that do not match the restored state, as after a crash between the two writes."""
        if progress.step:
            for name, checkpoint in self._checkpoints(net, progress):
                try:
                    stored = read_checkpoint(self.folder / name)
                except (CheckpointError, UsageError):  # damaged or missing
                    stored = None
                if (
                    stored is None
                    or stored.metrics != checkpoint.metrics
                    or not all(np.array_equal(stored.tensors[key], own) for key, own in checkpoint.tensors.items())
                ):
                    write_checkpoint(self.folder / name, checkpoint)

    def _checkpoints(self, net: PreluNet, now: TrainingProgress) -> Iterator[tuple[str, Checkpoint]]:
        """Yield file name and checkpoint of this state: last, best if it is the best, and one to keep if due."""
        dataset = self.splits.train
        provenance = {
            "parent_sha256": self.parent_sha256,
            "environments": now.used_environments,
            "step": now.step,
            "total_steps": self.recipe.in_steps(len(dataset.samples)).total_steps,
            "dataset_fingerprint": dataset.fingerprint,
        }
        checkpoint = Checkpoint(
            architecture=self.recipe.build_architecture(),
            classes=self.splits.classes,
            mean=now.mean,
            tensors=tensors_of(net),
            recipe=self.recipe.to_json(),
            dataset={"fingerprint": dataset.fingerprint, "images": len(dataset.samples)},
            metrics=now.latest_errors.to_json() if now.latest_errors else None,
            provenance=provenance,
        )
        yield LAST_FILE, checkpoint
        if now.best is not None and now.best.step == now.step:
            yield BEST_FILE, checkpoint
        if is_kept(self.recipe, now.step):
            yield KEPT_FILE.format(now.step), checkpoint


def is_kept(recipe: Recipe, step: int) -> bool:
    return recipe.keep_every is not None and step % recipe.keep_every == 0
