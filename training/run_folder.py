"""The folder of a training run: `training.json` says what is trained, on what; nothing else may be trained there.

training.json       recipe, dataset, classes; written first
state.pt            how far the run is (training/state.py)
last.safetensors    the checkpoint of that state
best.safetensors    the checkpoint with the lowest top-1 error on val/ so far
metrics.jsonl       loss, rate, speed; errors on val/
"""

import json
from pathlib import Path
from typing import Any

from evaluator.differences import differences, shown
from evaluator.errors import RunFolderError, UsageError
from evaluator.files import write_atomically

RUN_VERSION = 1
TRAINING_FILE, STATE_FILE, METRICS_FILE = "training.json", "state.pt", "metrics.jsonl"
LAST_FILE, BEST_FILE = "last.safetensors", "best.safetensors"
FILES = (STATE_FILE, LAST_FILE, BEST_FILE, METRICS_FILE, TRAINING_FILE)  # training.json goes last: it is the sign


def open_run_folder(folder: Path, description: dict[str, Any], *, fresh: bool) -> None:
    """Make the folder, or check that it is of the same run.

    description: plain JSON data, all that decides the results. fresh: remove an earlier run's files (and no others).
    Raises RunFolderError that shows the difference when the folder is of another run, or holds other things.
    """
    path = folder / TRAINING_FILE
    wanted = {"version": RUN_VERSION, **description}
    if fresh:
        for name in FILES:
            (folder / name).unlink(missing_ok=True)
    if not path.exists():
        _check_unused(folder)
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(path, json.dumps(wanted, indent=1, sort_keys=True).encode() + b"\n")
        return
    found = differences(_read(path), json.loads(json.dumps(wanted)))
    if found:
        raise RunFolderError(
            f"{folder}: holds another training:\n{shown(found)}\n"
            "Choose another folder with --out, or begin anew here with --fresh"
        )


def _check_unused(folder: Path) -> None:
    """Refuse a folder that holds files of a training but not its description, or that is a file."""
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"{folder}: a file of that name exists. Choose another folder with --out")
    strangers = [name for name in FILES if (folder / name).exists()]
    if strangers:
        raise RunFolderError(
            f"{folder}: has {', '.join(strangers)} but no {TRAINING_FILE}, so nobody knows what was trained. "
            "Choose another folder with --out, or begin anew here with --fresh"
        )


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise RunFolderError(f"{path}: damaged ({error}). Begin anew with --fresh") from error
    if not isinstance(found, dict):
        raise RunFolderError(f"{path}: damaged, not an object. Begin anew with --fresh")
    return found
