"""What resuming needs: `state.pt`, and the checkpoints that follow from it.

state.pt alone says how far a run is, and is replaced whole or not at all. The checkpoints are written after it and can
be made from it again: what a crash leaves out in between, the next start mends. There is no random state in it: every
random number is a function of (seed, step) or of (seed, epoch, image). Nor is there anything of the processes that
wrote it: tensors stand under their names, so that any number of processes can go on from it.
"""

import errno
import io
import math
import warnings
import zipfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.serialization import get_crc32_options, set_crc32_options

from prelunet.evaluator.arrays import Float32Array
from prelunet.evaluator.errors import EnvironmentFault, RunFolderError
from prelunet.evaluator.files import open_atomically
from prelunet.evaluator.json_checks import require_int, require_object, require_str
from prelunet.training.net.checkpoints import is_finite
from prelunet.training.net.network import PreluNet
from prelunet.training.run_state.metrics_log import ErrorRates

STATE_VERSION = 2
_MOMENTUM = "momentum_buffer"  # of torch's SGD


@dataclass
class TrainingProgress:
    """How far a run is; it changes only together with the net and the optimizer.

    mean: float32 (crop, crop, 3) or (3,); axes: float32 (3, 3), of the colour change; refused: `train` and `val` → file
    → reason, as found before the training; lost: the same for images of train/ that broke since; step: finished steps;
    loss_sum over loss_steps: steps that are not logged yet; measured: all measurements so far, in their order.
    """

    mean: Float32Array
    axes: Float32Array
    refused: Mapping[str, Mapping[str, str]]
    unreadable: dict[str, str] = field(default_factory=dict)
    step: int = 0
    loss_sum: float = 0.0
    loss_steps: int = 0
    evaluations: list[ErrorRates] = field(default_factory=list)

    @property
    def latest_errors(self) -> ErrorRates | None:
        """Return the last measurement."""
        return self.evaluations[-1] if self.evaluations else None

    @property
    def best(self) -> ErrorRates | None:
        """Return the measurement with the lowest top-1 error, the first of several."""
        return min(self.evaluations, key=lambda errors: errors.top1_error, default=None)

    @property
    def is_evaluated(self) -> bool:
        """Return whether the net as it is now has been measured."""
        return self.latest_errors is not None and self.latest_errors.step == self.step


@dataclass(frozen=True)
class ResumeState:
    """What state.pt holds. tensors, momentum: name in a checkpoint → tensor; no momentum before the first step."""

    progress: TrainingProgress
    tensors: Mapping[str, Tensor]
    momentum: Mapping[str, Tensor]

    def restore(self, net: PreluNet, optimizer: Optimizer) -> None:
        """Put the tensors into a net, and the momenta into its optimizer; of both what this process has."""
        with torch.no_grad():
            for name, parameter in net.named_parameters():
                parameter.copy_(self.tensors[name])
                if name in self.momentum:
                    held = torch.empty_like(parameter)  # which keeps the parameter's device and order in memory
                    optimizer.state[parameter][_MOMENTUM] = held.copy_(self.momentum[name])


def momentum_of(net: PreluNet, optimizer: Optimizer) -> dict[str, Tensor]:
    """Return what an SGD optimizer remembers of each parameter of a net; nothing before the first step."""
    found = {name: optimizer.state[value].get(_MOMENTUM) for name, value in net.named_parameters()}
    return {name: momentum for name, momentum in found.items() if momentum is not None}


def write_state(path: Path, net: PreluNet, momentum: Mapping[str, Tensor], progress: TrainingProgress) -> None:
    """Write state.pt, whole or not at all."""
    state = {
        "version": STATE_VERSION,
        "net": net.state_dict(),
        "momentum": dict(momentum),
        "mean": torch.from_numpy(progress.mean),
        "axes": torch.from_numpy(progress.axes),
        "refused": {split: dict(files) for split, files in progress.refused.items()},
        "lost": dict(progress.unreadable),
        "step": progress.step,
        "loss": [progress.loss_sum, progress.loss_steps],
        "measured": [errors.to_json() for errors in progress.evaluations],
    }
    # Not straight into the file: torch hides the system's error there, and "disk full" would read as our own mistake.
    buffer = io.BytesIO()
    _save(state, buffer)
    with open_atomically(path) as file:
        file.write(buffer.getbuffer())


def _save(state: dict[str, Any], buffer: io.BytesIO) -> None:
    """Save with the records' CRCs, which `read_state` checks: torch leaves them out if somebody has told it to."""
    before = get_crc32_options()
    set_crc32_options(True)
    try:
        torch.save(state, buffer)
    finally:
        set_crc32_options(before)


def read_state(path: Path, net: PreluNet) -> ResumeState:
    """Read state.pt of a training of such a net; no code in the file is ever run.

    net: with all its layers. Raises RunFolderError for a file that is damaged, or not of this net.
    """
    try:
        _check_records(path)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's, of what is refused below
            # Mapped, so that the processes of a machine share what they read.
            found: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        if type(found) is not dict:
            raise ValueError("no state")
        version = require_int(found["version"], "version", 1)
        if version == STATE_VERSION:
            return _parse_state(found, net)
    except OSError as error:
        if error.errno != errno.EINVAL:  # which is what torch makes of a very short file
            raise
        raise damaged_state_error(path) from error
    except Exception as error:  # on damaged bytes torch raises far more than its own classes, with advice of its own
        if isinstance(error, MemoryError) or "allocate memory" in str(error):  # the file may be sound
            fault = f"{path}: too little memory to read it. Free memory, or start fewer processes"
            raise EnvironmentFault(fault) from error
        raise damaged_state_error(path) from error
    raise RunFolderError(
        f"{path}: version {version}, but this prelunet reads version {STATE_VERSION}. "
        "Go on with the prelunet that wrote it, or begin anew with --fresh"
    )


def damaged_state_error(path: Path) -> RunFolderError:
    """Return the error of a state.pt that nobody can go on from."""
    return RunFolderError(
        f"{path}: damaged, or of another net, so it cannot be resumed from. "
        "Restore the file from a copy, or begin anew with --fresh"
    )


def _check_records(path: Path) -> None:
    """Check the CRC of every record: a mapping torch checks none. Takes a second a gigabyte, and 1 MiB of memory."""
    with zipfile.ZipFile(path) as file:
        if (name := file.testzip()) is not None:
            raise ValueError(f"the CRC of {name}")


def _parse_state(found: dict[str, Any], net: PreluNet) -> ResumeState:
    """Return what the file says; any exception where it cannot be meant, as torch has its own for odd tensors."""
    shapes = {name: tuple(value.shape) for name, value in net.state_dict().items()}
    tensors, momentum = found["net"], found["momentum"]
    if tensors.keys() != shapes.keys() or momentum.keys() not in (set(), shapes.keys()):
        raise ValueError("tensors of another net")
    for name, value in (*tensors.items(), *momentum.items()):
        _array(value, name, shapes[name])
    return ResumeState(_parse_progress(found, net.architecture.crop), tensors, momentum)


def _array(value: Any, what: str, *shapes: tuple[int, ...]) -> Float32Array:
    """Return a tensor of finite float32 of one of these shapes.

    For what has no values in rows (sparse, nested, on `meta`) torch raises TypeError or RuntimeError.
    """
    array: Float32Array = value.numpy()
    if array.dtype != np.float32 or array.shape not in shapes or not is_finite(array):
        raise ValueError(f"{what}: {array.dtype} of shape {array.shape}, or not finite")
    return array


def _parse_progress(found: dict[str, Any], crop: int) -> TrainingProgress:
    step = require_int(found["step"], "step", 0)
    loss_sum, loss_steps = found["loss"]
    if type(loss_sum) is not float or not math.isfinite(loss_sum):
        raise ValueError("a loss that is no number")
    return TrainingProgress(
        mean=_array(found["mean"], "mean", (crop, crop, 3), (3,)),
        axes=_array(found["axes"], "axes", (3, 3)),
        refused={split: _parse_reasons(found["refused"][split]) for split in ("train", "val")},
        unreadable=_parse_reasons(found["lost"]),
        step=step,
        loss_sum=loss_sum,
        loss_steps=require_int(loss_steps, "steps of the loss", 0, step),
        evaluations=_parse_evaluations(found["measured"], step),
    )


def _parse_reasons(files: Any) -> dict[str, str]:
    """Return file → reason."""
    return {
        require_str(file, "a file"): require_str(reason, "a reason")
        for file, reason in require_object(files, "files").items()
    }


def _parse_evaluations(entries: Iterable[dict[str, Any]], step: int) -> list[ErrorRates]:
    """Return the measurements of a run that has come to this step."""
    evaluations = [ErrorRates(**entry) for entry in entries]
    before = 0
    for errors in evaluations:
        before = require_int(errors.step, "step of a measurement", before + 1, step)
        top1, top5 = errors.top1_error, errors.top5_error
        if type(top1) is not float or type(top5) is not float or not 0 <= top5 <= top1 <= 100:
            raise ValueError(f"errors of {top1} and {top5} percent")
    return evaluations
