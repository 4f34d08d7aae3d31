"""Train a net from start to finish: `train` is the table of contents."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prelunet.training.data.splits import Splits, embedded_dataset_path, open_splits
from prelunet.training.distributed.process_group import open_group
from prelunet.training.loop.fine_tune import sha256_of_start
from prelunet.training.loop.setup import check_alike, check_place, first_words, held_folder
from prelunet.training.loop.trainer import Execution, Trainer, _say_nothing
from prelunet.training.recipe import Recipe
from prelunet.training.run_state.metrics_log import Errors
from prelunet.training.run_state.run_folder import LAST_FILE


@dataclass(frozen=True)
class Training:
    """A finished training. checkpoint: of the last step; dataset: where the images lie.

    errors, best: the last and the best measurement on val/; is_first: whether this process talks to the user.
    """

    checkpoint: Path
    dataset: Path
    errors: Errors
    best: Errors
    is_first: bool


def train(
    recipe: Recipe,
    dataset_path: Path | None,
    run_folder: Path,
    *,
    start: Path | None = None,
    fresh: bool = False,
    execution: Execution = Execution(),
    announce: Callable[[str], None] | None = None,
) -> Training:
    """Train a net by a recipe, or go on where an earlier call stopped; a finished run is left as it is.

    dataset_path: folder or archive with train/ and val/; None for the embedded one. run_folder: see
    training/run_state/run_folder.py. start: a checkpoint to begin with, None for random weights. fresh: throw an
    earlier run in that folder away. announce: told what a user should know. Raises DatasetError for unusable data;
    UsageError for a folder inside the data, and for processes that were asked for different things; RunFolderError for
    a folder of another training, or where another process is at work; Interrupted after Ctrl-C or SIGTERM (the state is
    saved; without a text in all processes but the first); DivergenceError when a number is no longer finite (the last
    good state is kept); EnvironmentFault when another process of the training has died.
    """
    path = dataset_path or embedded_dataset_path()
    splits = open_splits(path)
    check_place(run_folder, path)
    wanted = describe(recipe, splits, start)
    with open_group(execution.device) as group:
        check_alike(group, {**wanted, "parallel": execution.parallel, "diagnose": execution.diagnose})
        with held_folder(group, run_folder, wanted, fresh=fresh) as make_room:
            tell = announce if announce is not None and group.is_first else _say_nothing
            for text in first_words(recipe, splits, group, execution.parallel):
                tell(text)
            trainer = Trainer(recipe, splits, run_folder, group, execution, start, make_room=make_room, announce=tell)
            for text in trainer.news():
                tell(text)
            trainer.run()
    errors, best = trainer.progress.evaluated, trainer.progress.best
    assert errors is not None, "a run ends with an evaluation"
    assert best is not None
    return Training(run_folder / LAST_FILE, path, errors, best, group.is_first)


def describe(recipe: Recipe, splits: Splits, start: Path | None = None) -> dict[str, Any]:
    """Return all that decides the results of a training, as plain data."""
    classes = [entry.to_json() for entry in splits.classes]
    begun = {} if start is None else {"start": sha256_of_start(start)}
    return {"recipe": recipe.to_json(), "dataset": splits.to_json(), "classes": classes, **begun}
