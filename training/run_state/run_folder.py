"""The folder of a training run. `training.json` describes the run; no other run may use the folder.

training.json       recipe, dataset and classes; written once, at the start. A run may resume with other values of the
                    recipe's EXECUTION_KEYS; each checkpoint records the values with which it was written
state.pt            progress of the run (training/run_state/resume_state.py)
last.safetensors    the checkpoint of that state
best.safetensors    the checkpoint with the lowest top-1 error on val/ so far
step-N.safetensors  checkpoints kept permanently (`keep_every`)
metrics.jsonl       loss, learning rate, throughput; errors on val/
diagnosis.jsonl     responses of the layers at every evaluation (--diagnose)
tensorboard/        the content of metrics.jsonl for TensorBoard
"""

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ...evaluator.errors import RunFolderError
from ...evaluator.files import create_folder, locked_folder, remove_leftovers, write_atomically
from ...evaluator.json_checks import differences, format_differences, parse_json, require_object
from ..recipe import EXECUTION_KEYS, with_newer_keys

RUN_VERSION = 1
TRAINING_FILE, STATE_FILE, METRICS_FILE = "training.json", "state.pt", "metrics.jsonl"
LAST_FILE, BEST_FILE = "last.safetensors", "best.safetensors"
DIAGNOSIS_FILE, EVENTS_FOLDER = "diagnosis.jsonl", "tensorboard"
KEPT_FILE, KEPT_FILES = "step-{:07}.safetensors", "step-*.safetensors"  # the name of a step, and a pattern for all
FILES = (STATE_FILE, LAST_FILE, BEST_FILE, METRICS_FILE, DIAGNOSIS_FILE)  # beside training.json, which marks the folder


@contextmanager
def open_run_folder(folder: Path, description: dict[str, Any], *, fresh: bool) -> Iterator[Callable[[], None] | None]:
    """Create the run folder, or check that it belongs to the same run, and lock it for this process.

    description: everything that determines the results, as plain JSON data, including the recipe's EXECUTION_KEYS,
    which do not and may differ on resume; fresh: replace an earlier run.
    Yields None to resume a run with this description; otherwise a function that removes the files of an earlier run
    (and nothing else) and writes the description. Nothing is removed before that call, so a run that fails to start
    does not destroy the earlier one. Files left half-written by a killed process are removed.
    Raises RunFolderError if the folder belongs to another run (with the differences), contains other files, or is in
    use by another process.
    """
    try:
        str(folder).encode()
    except UnicodeEncodeError as error:  # torch could not load the state from there
        raise RunFolderError(f"{folder}: the name is not valid UTF-8. Choose another folder with --out") from error
    create_folder(folder, "--out")
    with locked_folder(folder, "--out"):
        remove_leftovers(folder, (TRAINING_FILE, *FILES, KEPT_FILES))
        requested = {"version": RUN_VERSION, **description}
        if not (folder / TRAINING_FILE).exists():
            if others := sorted(path.name for path in folder.iterdir()):
                raise RunFolderError(
                    f"{folder}: not empty ({', '.join(others[:3])}{', ...' if len(others) > 3 else ''}) and not a run "
                    "folder. Choose an empty or new folder with --out"
                )
        elif not fresh and any((folder / name).exists() for name in FILES):
            _compare(folder, requested)
            yield None
            return

        def reset_folder() -> None:
            for kept in folder.glob(KEPT_FILES):
                kept.unlink()
            if (folder / EVENTS_FOLDER).is_dir():
                shutil.rmtree(folder / EVENTS_FOLDER)
            for name in FILES:
                (folder / name).unlink(missing_ok=True)
            write_atomically(folder / TRAINING_FILE, json.dumps(requested, indent=1, sort_keys=True).encode() + b"\n")

        yield reset_folder


def _compare(folder: Path, requested: dict[str, Any]) -> None:
    """Raise RunFolderError if the run in the folder differs from the requested one or has no state to resume from."""
    path = folder / TRAINING_FILE
    try:
        description = require_object(parse_json(path.read_bytes()), "it")
        description["recipe"] = with_newer_keys(require_object(description.get("recipe"), "recipe"))
    except ValueError as error:
        raise RunFolderError(f"{path}: damaged ({error}). Restore the file, or start over with --fresh") from error
    requested = json.loads(json.dumps(requested))
    nets = [side["recipe"].get("architecture") for side in (description, requested)]
    names = [net.get("name") if isinstance(net, dict) else net for net in nets]
    for side, name in zip((description, requested), names, strict=True):
        side["--from"] = side.pop("start", "none")
        if names[0] != names[1]:  # such nets differ in dozens of layers; the names are enough
            side["recipe"]["architecture"] = name
    may_differ = [("recipe", key) for key in EXECUTION_KEYS]
    if found := differences(description, requested, ignored=may_differ):
        dataset_differs = any(line.startswith("dataset.") for line in found)
        hint = " (A fingerprint covers names, sizes and labels of a split's images: restore those that changed.)"
        raise RunFolderError(
            f"{folder}: contains another run:\n{format_differences(found)}\n"
            f"Choose another folder with --out, or start over with --fresh.{hint if dataset_differs else ''}"
        )
    if not (folder / STATE_FILE).exists():
        raise RunFolderError(
            f"{folder}: {STATE_FILE} is missing, so the run cannot resume. Restore the file from a copy, or start over "
            "with --fresh"
        )
