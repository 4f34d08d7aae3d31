"""The folder of a training run: `training.json` says what is trained, on what; nothing else may be trained there.

training.json       recipe, dataset, classes; written first, and never again: a run may go on with other values of the
                    recipe's keys EXECUTION_KEYS, and each checkpoint states those that it was written with
state.pt            how far the run is (training/run_state/resume_state.py)
last.safetensors    the checkpoint of that state
best.safetensors    the checkpoint with the lowest top-1 error on val/ so far
step-N.safetensors  checkpoints that `keep_every` keeps
metrics.jsonl       loss, rate, speed; errors on val/
diagnosis.jsonl     responses of the layers at every evaluation (--diagnose)
tensorboard/        the same as metrics.jsonl for TensorBoard
"""

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from prelunet.evaluator.errors import RunFolderError
from prelunet.evaluator.files import create_folder, locked_folder, remove_leftovers, write_atomically
from prelunet.evaluator.json_checks import check_plain, differences, format_differences, parse_json, require_object
from prelunet.training.recipe import EXECUTION_KEYS

RUN_VERSION = 1
TRAINING_FILE, STATE_FILE, METRICS_FILE = "training.json", "state.pt", "metrics.jsonl"
LAST_FILE, BEST_FILE = "last.safetensors", "best.safetensors"
DIAGNOSIS_FILE, EVENTS_FOLDER, KEPT_FILES = "diagnosis.jsonl", "tensorboard", "step-*.safetensors"
FILES = (STATE_FILE, LAST_FILE, BEST_FILE, METRICS_FILE, DIAGNOSIS_FILE, TRAINING_FILE)  # the last one is the sign


@contextmanager
def open_run_folder(folder: Path, description: dict[str, Any], *, fresh: bool) -> Iterator[Callable[[], None] | None]:
    """Make the folder, or check that it is of the same run, and hold it for this process alone.

    description: plain JSON data, all that decides the results, and the recipe's keys EXECUTION_KEYS, which do not and
    may be others when a run goes on. fresh: an earlier run there is thrown away.
    Yields None where a run of this description goes on; else a function that removes what an earlier run left there
    (and nothing else) and writes the description. Nothing is removed before: what keeps the new run from beginning
    should not cost the old one. What a killed process left half-written is removed. Raises RunFolderError that shows
    the difference when the folder is of another run, holds other things, or is being written by another process.
    """
    create_folder(folder, "--out")
    with locked_folder(folder, "--out"):
        remove_leftovers(folder, (*FILES, KEPT_FILES))
        requested = {"version": RUN_VERSION, **description}
        if not (folder / TRAINING_FILE).exists():
            _check_unused(folder)
        elif not fresh and _has_begun(folder):
            _compare(folder, requested)
            yield None
            return

        def reset_folder() -> None:
            _remove(folder)
            write_atomically(folder / TRAINING_FILE, json.dumps(requested, indent=1, sort_keys=True).encode() + b"\n")

        yield reset_folder


def _has_begun(folder: Path) -> bool:
    """Return whether there is anything of a run but its description."""
    return any((folder / name).exists() for name in FILES if name != TRAINING_FILE)


def checkpoint_file_name(step: int) -> str:
    """Return the name of a checkpoint that `keep_every` keeps."""
    return f"step-{step:07}.safetensors"


def _remove(folder: Path) -> None:
    """Remove the files of a run and no others."""
    for kept in folder.glob(KEPT_FILES):
        kept.unlink()
    if (folder / EVENTS_FOLDER).is_dir():
        shutil.rmtree(folder / EVENTS_FOLDER)
    for name in FILES:
        if name != TRAINING_FILE:  # which is the sign that the folder is ours, and is replaced whole
            (folder / name).unlink(missing_ok=True)


def _compare(folder: Path, requested: dict[str, Any]) -> None:
    """Refuse a run of another description, and one without a state to go on from."""
    may_differ = [("recipe", key) for key in EXECUTION_KEYS]
    if found := differences(_read(folder / TRAINING_FILE), json.loads(json.dumps(requested)), ignored=may_differ):
        of_images = any(line.startswith("dataset.") for line in found)
        hint = (
            " (A fingerprint is of names, lengths and labels of a split's images: put back what was moved or changed.)"
        )
        raise RunFolderError(
            f"{folder}: holds another training:\n{format_differences(found)}\n"
            f"Choose another folder with --out, or begin anew here with --fresh.{hint if of_images else ''}"
        )
    if not (folder / STATE_FILE).exists():
        raise RunFolderError(
            f"{folder}: {STATE_FILE} is not there, so the run cannot go on. Restore the file from a copy, or begin "
            "anew with --fresh"
        )


def _check_unused(folder: Path) -> None:
    """Refuse a folder that holds anything: without a description, nobody knows whose it is."""
    if others := sorted(path.name for path in folder.iterdir()):
        raise RunFolderError(
            f"{folder}: not empty ({', '.join(others[:3])}{', ...' if len(others) > 3 else ''}) and not a training. "
            "Choose an empty or new folder with --out"
        )


def _read(path: Path) -> dict[str, Any]:
    try:
        found = require_object(parse_json(path.read_bytes()), "it")
        check_plain(found)
    except ValueError as error:
        raise RunFolderError(f"{path}: damaged ({error}). Restore the file, or begin anew with --fresh") from error
    return found
