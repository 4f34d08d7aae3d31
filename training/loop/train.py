"""Train a net from start to finish: `train` is the table of contents."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prelunet.training.data.splits import Splits, embedded_dataset_path, open_splits
from prelunet.training.distributed.process_group import open_process_group
from prelunet.training.loop.fine_tune import sha256_of_checkpoint
from prelunet.training.loop.setup import check_folder_location, lock_run_folder, require_same_command, setup_messages
from prelunet.training.loop.trainer import Execution, Trainer, discard_report
from prelunet.training.recipe import Recipe
from prelunet.training.run_state.metrics_log import ErrorRates
from prelunet.training.run_state.run_folder import LAST_FILE


@dataclass(frozen=True)
class TrainingResult:
    """A finished training. checkpoint: of the last step; dataset: where the images lie.

    errors, best: the last and the best measurement on val/; is_first: whether this process talks to the user.
    """

    checkpoint: Path
    dataset: Path
    errors: ErrorRates
    best: ErrorRates
    is_first: bool


def train(
    recipe: Recipe,
    dataset_path: Path | None,
    run_folder: Path,
    *,
    start: Path | None = None,
    fresh: bool = False,
    execution: Execution = Execution(),
    report: Callable[[str], None] | None = None,
) -> TrainingResult:
    """Train a net by a recipe, or go on where an earlier call stopped; a finished run is left as it is.

    dataset_path: folder or archive with train/ and val/; None for the embedded one. run_folder: see
    training/run_state/run_folder.py. start: a checkpoint to begin with, None for random weights. fresh: throw an
    earlier run in that folder away. report: receives what a user should know. Raises DatasetError for unusable data;
    UsageError for a folder inside the data, and for processes that were asked for different things; RunFolderError for
    a folder of another training, or where another process is at work; Interrupted after Ctrl-C or SIGTERM (the state is
    saved; without a text in all processes but the first); DivergenceError when a number is no longer finite (the last
    good state is kept); EnvironmentFault when another process of the training has died.
    """
    path = dataset_path or embedded_dataset_path()
    splits = open_splits(path)
    check_folder_location(run_folder, path)
    requested = describe_run(recipe, splits, start)
    with open_process_group(execution.device) as group:
        require_same_command(group, {**requested, "parallel": execution.parallel, "diagnose": execution.diagnose})
        with lock_run_folder(group, run_folder, requested, fresh=fresh) as reset_folder:
            report = report if report is not None and group.is_first else discard_report
            for text in setup_messages(recipe, splits, group, execution.parallel):
                report(text)
            trainer = Trainer(
                recipe, splits, run_folder, group, execution, start, reset_folder=reset_folder, report=report
            )
            for text in trainer.status_messages():
                report(text)
            trainer.run()
    errors, best = trainer.progress.latest_errors, trainer.progress.best
    assert errors is not None, "a run ends with an evaluation"
    assert best is not None
    return TrainingResult(run_folder / LAST_FILE, path, errors, best, group.is_first)


def describe_run(recipe: Recipe, splits: Splits, start: Path | None = None) -> dict[str, Any]:
    """Return all that decides the results of a training, as plain data."""
    classes = [entry.to_json() for entry in splits.classes]
    begun = {} if start is None else {"start": sha256_of_checkpoint(start)}
    return {"recipe": recipe.to_json(), "dataset": splits.to_json(), "classes": classes, **begun}
