"""The folder of a training run: `training.json` says what is trained, on what; nothing else may be trained there.

training.json       recipe, dataset, classes; written first
state.pt            how far the run is (training/state.py)
last.safetensors    the checkpoint of that state
best.safetensors    the checkpoint with the lowest top-1 error on val/ so far
step-N.safetensors  checkpoints that `keep_every` keeps
metrics.jsonl       loss, rate, speed; errors on val/
diagnosis.jsonl     responses of the layers at every evaluation (--diagnose)
tensorboard/        the same as metrics.jsonl for TensorBoard
"""

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from evaluator.differences import differences, shown
from evaluator.errors import RunFolderError, UsageError
from evaluator.files import locked_folder, remove_leftovers, write_atomically
from evaluator.strict import an_object, check_plain, parse_json

RUN_VERSION = 1
TRAINING_FILE, STATE_FILE, METRICS_FILE = "training.json", "state.pt", "metrics.jsonl"
LAST_FILE, BEST_FILE = "last.safetensors", "best.safetensors"
DIAGNOSIS_FILE, EVENTS_FOLDER, KEPT_FILES = "diagnosis.jsonl", "tensorboard", "step-*.safetensors"
FILES = (STATE_FILE, LAST_FILE, BEST_FILE, METRICS_FILE, DIAGNOSIS_FILE, TRAINING_FILE)  # the last one is the sign


@contextmanager
def open_run_folder(folder: Path, description: dict[str, Any], *, fresh: bool) -> Iterator[None]:
    """Make the folder, or check that it is of the same run, and hold it for this process alone.

    description: plain JSON data, all that decides the results. fresh: remove an earlier run's files (and no others).
    What a killed process left half-written is removed. Raises RunFolderError that shows the difference when the folder
    is of another run, holds other things, or is being written by another process.
    """
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"{folder}: a file of that name exists. Choose another folder with --out")
    folder.mkdir(parents=True, exist_ok=True)
    with locked_folder(folder, "--out"):
        remove_leftovers(folder, (*FILES, KEPT_FILES))
        if not (folder / TRAINING_FILE).exists():
            _check_unused(folder)
        elif fresh:
            _remove(folder)
        _describe_or_compare(folder, {"version": RUN_VERSION, **description})
        yield


def kept_name(step: int) -> str:
    """Return the name of a checkpoint that `keep_every` keeps."""
    return f"step-{step:07}.safetensors"


def _remove(folder: Path) -> None:
    """Remove the files of a run and no others."""
    for kept in folder.glob(KEPT_FILES):
        kept.unlink()
    if (folder / EVENTS_FOLDER).is_dir():
        shutil.rmtree(folder / EVENTS_FOLDER)
    for name in FILES:
        (folder / name).unlink(missing_ok=True)


def _describe_or_compare(folder: Path, wanted: dict[str, Any]) -> None:
    path = folder / TRAINING_FILE
    if not path.exists():
        write_atomically(path, json.dumps(wanted, indent=1, sort_keys=True).encode() + b"\n")
    elif found := differences(_read(path), json.loads(json.dumps(wanted))):
        raise RunFolderError(
            f"{folder}: holds another training:\n{shown(found)}\n"
            "Choose another folder with --out, or begin anew here with --fresh"
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
        found = an_object(parse_json(path.read_bytes()), "it")
        check_plain(found)
    except ValueError as error:
        raise RunFolderError(f"{path}: damaged ({error}). Restore the file, or begin anew with --fresh") from error
    return found
