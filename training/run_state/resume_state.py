"""`state.pt`: everything needed to resume a run.

state.pt alone defines the progress of a run and is replaced atomically. The checkpoints are written after it and can be
derived from it: if a crash prevents that, the next start repairs them. It contains no random state, since every random
number is a function of (seed, step) or of (seed, epoch, image). Tensors are stored by name, so any number of processes
can resume from it.
"""

import errno
import io
import warnings
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ...evaluator.arrays import Float32Array
from ...evaluator.contract import parse_environments
from ...evaluator.errors import EnvironmentFault, RunFolderError
from ...evaluator.files import open_atomically
from ...evaluator.json_checks import differences, require_int
from ..net.network import PreluNet
from .metrics_log import ErrorRates

STATE_VERSION = 2
_MOMENTUM = "momentum_buffer"  # of torch's SGD


@dataclass
class TrainingProgress:
    """Progress of a run; changes only together with the net and the optimizer.

    mean: float32 (crop, crop, 3) or (3,); axes: float32 (3, 3), of the color augmentation; refused: `train` and `val` →
    file → reason, from before the run; unreadable: file → reason for images of train/ that became unreadable since;
    step: completed steps; loss_sum, error_sum, loss_steps: over the steps not logged yet; evaluations: all so far,
    in order; environments: those of `provenance` (evaluator/contract.md).
    """

    mean: Float32Array
    axes: Float32Array
    refused: Mapping[str, Mapping[str, str]]
    unreadable: dict[str, str] = field(default_factory=dict)
    step: int = 0
    loss_sum: float = 0.0
    error_sum: float = 0.0
    loss_steps: int = 0
    evaluations: list[ErrorRates] = field(default_factory=list)
    environments: list[dict[str, Any]] = field(default_factory=list)

    @property
    def latest_errors(self) -> ErrorRates | None:
        return self.evaluations[-1] if self.evaluations else None

    @property
    def best(self) -> ErrorRates | None:
        """Return the evaluation with the lowest top-1 error, the first in case of ties."""
        return min(self.evaluations, key=lambda errors: errors.top1_error, default=None)

    @property
    def is_evaluated(self) -> bool:
        return self.latest_errors is not None and self.latest_errors.step == self.step

    def enter_environment(self, environment: Mapping[str, Any]) -> list[str]:
        """Record the environment of the steps to come; return its differences from that of the steps before."""
        used = self.used_environments
        last = used[-1] if used else {}
        changes = differences(last, environment, ignored={("from_step",)}, places=("before", "now"))
        self.environments = [*used, {"from_step": self.step, **environment}] if changes else used
        return changes if last else []

    @property
    def used_environments(self) -> list[dict[str, Any]]:
        return [environment for environment in self.environments if environment["from_step"] < self.step]


@dataclass(frozen=True)
class ResumeState:
    """The content of state.pt. tensors, momentum: name in a checkpoint → tensor; no momentum before the first step."""

    progress: TrainingProgress
    tensors: Mapping[str, Tensor]
    momentum: Mapping[str, Tensor]

    def restore(self, net: PreluNet, optimizer: Optimizer) -> None:
        """Copy the tensors to a net and the momenta to its optimizer, for the parameters that this process has."""
        with torch.no_grad():
            for name, parameter in net.named_parameters():
                parameter.copy_(self.tensors[name])
                if name in self.momentum:
                    buffer = torch.empty_like(parameter)  # keeps the parameter's device and memory format
                    optimizer.state[parameter][_MOMENTUM] = buffer.copy_(self.momentum[name])


def momentum_of(net: PreluNet, optimizer: Optimizer) -> dict[str, Tensor]:
    """Return the momentum buffer of each parameter of a net; empty before the first step."""
    buffers = {name: optimizer.state[value].get(_MOMENTUM) for name, value in net.named_parameters()}
    return {name: momentum for name, momentum in buffers.items() if momentum is not None}


def write_state(path: Path, net: PreluNet, momentum: Mapping[str, Tensor], progress: TrainingProgress) -> None:
    """Write state.pt atomically."""
    state = {
        "version": STATE_VERSION,
        "net": net.state_dict(),
        "momentum": dict(momentum),
        "mean": torch.from_numpy(progress.mean),
        "axes": torch.from_numpy(progress.axes),
        "refused": {split: dict(files) for split, files in progress.refused.items()},
        "lost": dict(progress.unreadable),
        "step": progress.step,
        "loss": [progress.loss_sum, progress.loss_steps, progress.error_sum],
        "measured": [errors.to_json() for errors in progress.evaluations],
        "environments": progress.environments,
    }
    # Via a buffer: writing to a file, torch hides the system's error, so a full disk would look like an internal error.
    buffer = io.BytesIO()
    torch.save(state, buffer)  # with CRCs, which `read_state` checks
    with open_atomically(path) as file:
        file.write(buffer.getbuffer())


def read_state(path: Path, net: PreluNet) -> ResumeState:
    """Read the state.pt of a run that trains this net; code in the file is never run.

    net: with all its layers. Raises RunFolderError if the file is damaged or belongs to another net.
    """
    try:
        with zipfile.ZipFile(path) as file:  # torch does not check CRCs with mmap; takes 1 s per GB and 1 MiB of memory
            if (name := file.testzip()) is not None:
                raise ValueError(f"the CRC of {name}")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # from torch, about files that are rejected below
            # Mapped, so that the processes of a machine share the memory.
            state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        if type(state) is not dict:
            raise ValueError("no state")
        version = require_int(state["version"], "version", 1)
        if version == STATE_VERSION:
            return _parse_state(state, net)
    except OSError as error:
        if error.errno != errno.EINVAL:  # EINVAL: torch's error for a very short file
            raise
        raise _damaged_state_error(path) from error
    except Exception as error:  # for damaged files torch raises many other exceptions than its own
        if isinstance(error, MemoryError) or "allocate memory" in str(error):  # the file may be intact
            fault = f"{path}: not enough memory to read it. Free memory, or start fewer processes"
            raise EnvironmentFault(fault) from error
        raise _damaged_state_error(path) from error
    raise RunFolderError(
        f"{path}: version {version}, but this prelunet reads version {STATE_VERSION}. "
        "Resume with the prelunet that wrote it, or start over with --fresh"
    )


def _damaged_state_error(path: Path) -> RunFolderError:
    """Return the error for a state.pt from which a run cannot resume."""
    return RunFolderError(
        f"{path}: damaged, or belongs to another net, so the run cannot resume from it. "
        "Restore the file from a copy, or start over with --fresh"
    )


def _parse_state(state: dict[str, Any], net: PreluNet) -> ResumeState:
    """Return the content of the file. Another content than `write_state`'s raises various exceptions."""
    tensors: dict[str, Tensor] = state["net"]
    if {name: value.shape for name, value in tensors.items()} != {k: v.shape for k, v in net.state_dict().items()}:
        raise ValueError("tensors of another net")
    loss_sum, loss_steps, error_sum = state["loss"]
    progress = TrainingProgress(
        mean=state["mean"].numpy(),
        axes=state["axes"].numpy(),
        refused=state["refused"],
        unreadable=state["lost"],
        step=state["step"],
        loss_sum=loss_sum,
        error_sum=error_sum,
        loss_steps=loss_steps,
        evaluations=[ErrorRates(**entry) for entry in state["measured"]],
        environments=parse_environments(state["environments"]),
    )
    return ResumeState(progress, tensors, state["momentum"])
