"""Train a net from start to finish."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prelunet.training.data.splits import Splits, embedded_dataset_path, open_splits
from prelunet.training.distributed.process_group import open_process_group
from prelunet.training.loop.fine_tune import sha256_of_checkpoint
from prelunet.training.loop.setup import check_folder_location, lock_run_folder, require_same_command, setup_messages
from prelunet.training.loop.trainer import Execution, Trainer, discard_report, report_each
from prelunet.training.recipe import Recipe
from prelunet.training.run_state.metrics_log import ErrorRates
from prelunet.training.run_state.run_folder import LAST_FILE


@dataclass(frozen=True)
class TrainingResult:
    """The result of a finished run.

    checkpoint: file of the last step; dataset: path of the images; errors, best: last and best evaluation on val/;
    is_first: whether this process reports to the user.
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
    """Train a net from a recipe, or resume an interrupted run. A finished run is left unchanged.

    dataset_path: folder or archive with train/ and val/, None for the embedded dataset; run_folder: see
    training/run_state/run_folder.py; start: initial checkpoint, None for random weights; fresh: delete an earlier run
    in run_folder; report: receives messages to the user.

    Raises DatasetError for unusable data; UsageError for a run folder inside the dataset, or processes started with
    different commands; RunFolderError for a folder that belongs to another run or is in use by another process;
    Interrupted after Ctrl-C or SIGTERM (the state is saved; the message is empty in all processes but the first);
    DivergenceError if a number is no longer finite (the last good state is kept); EnvironmentFault if another process
    of the run has died.
    """
    path = dataset_path or embedded_dataset_path()
    splits = open_splits(path)
    check_folder_location(run_folder, path)
    requested = describe_run(recipe, splits, start)
    with open_process_group(execution.device) as group:
        report = report if report is not None and group.is_first else discard_report
        require_same_command(group, {**requested, "parallel": execution.parallel, "diagnose": execution.diagnose})
        with lock_run_folder(group, run_folder, requested, fresh=fresh) as reset_folder:
            report_each(setup_messages(recipe, splits, group, execution.parallel), report)
            trainer = Trainer(
                recipe, splits, run_folder, group, execution, start, reset_folder=reset_folder, report=report
            )
            report_each(trainer.status_messages(), report)
            errors, best = trainer.run()
    return TrainingResult(run_folder / LAST_FILE, path, errors, best, group.is_first)


def describe_run(recipe: Recipe, splits: Splits, start: Path | None = None) -> dict[str, Any]:
    """Return everything that determines the results of a run, as plain data."""
    classes = [entry.to_json() for entry in splits.classes]
    initial = {} if start is None else {"start": sha256_of_checkpoint(start)}
    return {"recipe": recipe.to_json(), "dataset": splits.to_json(), "classes": classes, **initial}
