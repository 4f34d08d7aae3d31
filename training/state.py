"""What resuming needs: `state.pt`, and the checkpoints that follow from it.

state.pt alone says how far a run is, and is replaced whole or not at all. The checkpoints are written after it and can
be made from it again: what a crash leaves out in between, the next start mends. There is no random state in it: every
random number is a function of (seed, step) or of (seed, epoch, image).
"""

import io
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.optim import Optimizer

from evaluator.errors import RunFolderError
from evaluator.files import open_atomically
from evaluator.strict import whole
from training.metrics import Errors
from training.network import PreluNet
from training.pictures import FloatArray

STATE_VERSION = 1


@dataclass
class Progress:
    """How far a run is; it changes only together with the net and the optimizer.

    step: finished steps; evaluated, best: the last and the best measurement; loss_sum over loss_steps: steps that are
    not logged yet; mean: float32 (crop, crop, 3); refused: `train` and `val` → file → reason.
    """

    mean: FloatArray
    refused: Mapping[str, Mapping[str, str]]
    step: int = 0
    loss_sum: float = 0.0
    loss_steps: int = 0
    evaluated: Errors | None = None
    best: Errors | None = None

    @property
    def is_evaluated(self) -> bool:
        """Return whether the net as it is now has been measured."""
        return self.evaluated is not None and self.evaluated.step == self.step


def write_state(path: Path, net: PreluNet, optimizer: Optimizer, progress: Progress) -> None:
    """Write state.pt, whole or not at all."""
    state = {
        "version": STATE_VERSION,
        "net": net.state_dict(),
        "optimizer": optimizer.state_dict(),
        "mean": torch.from_numpy(progress.mean),
        "refused": {split: dict(files) for split, files in progress.refused.items()},
        "step": progress.step,
        "loss": [progress.loss_sum, progress.loss_steps],
        "evaluated": progress.evaluated and progress.evaluated.to_json(),
        "best": progress.best and progress.best.to_json(),
    }
    # Not straight into the file: torch hides the system's error there, and "disk full" would read as our own mistake.
    buffer = io.BytesIO()
    torch.save(state, buffer)
    with open_atomically(path) as file:
        file.write(buffer.getbuffer())


def read_state(path: Path, net: PreluNet, optimizer: Optimizer) -> Progress:
    """Read state.pt into a net and an optimizer of the same recipe; no code in the file is ever run.

    Raises RunFolderError for a file that is damaged, or not of this net.
    """
    try:
        state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
        version = whole(state["version"], "version", 1)
        if version == STATE_VERSION:
            net.load_state_dict(state["net"])
            optimizer.load_state_dict(state["optimizer"])
            return _progress_of(state, net.architecture.crop)
    except OSError:
        raise
    except (
        Exception
    ) as error:  # on damaged bytes torch raises far more than its own classes, with advice we do not give
        raise RunFolderError(
            f"{path}: damaged, or of another net, so it cannot be resumed from. "
            "Restore the file from a copy, or begin anew with --fresh"
        ) from error
    raise RunFolderError(
        f"{path}: version {version}, but this prelunet reads version {STATE_VERSION}. "
        "Go on with the prelunet that wrote it, or begin anew with --fresh"
    )


def _progress_of(state: dict[str, Any], crop: int) -> Progress:
    """Return what the state says of the run; ValueError, TypeError or KeyError where it cannot be meant."""
    loss_sum, loss_steps = state["loss"]
    mean = state["mean"].numpy()
    if mean.dtype != np.float32 or mean.shape != (crop, crop, 3):
        raise ValueError(f"a mean of shape {mean.shape}")
    refused = {split: dict(state["refused"][split]) for split in ("train", "val")}
    return Progress(
        mean=mean,
        refused=refused,
        step=whole(state["step"], "step", 0),
        loss_sum=float(loss_sum),
        loss_steps=whole(loss_steps, "steps of the loss", 0),
        evaluated=state["evaluated"] and Errors(**state["evaluated"]),
        best=state["best"] and Errors(**state["best"]),
    )
