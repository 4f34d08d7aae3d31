"""A training step in one or several processes: `gradients` gives each process the gradient of the batch's mean loss.

    ddp      every process has the full net and some rows of the batch; gradients are summed (data parallel)
    hybrid   the paper's scheme (training/distributed/hybrid.py)

For any number of processes and any distribution of rows, the gradients equal those of one process with the same batch,
except for the order of sums.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from ...evaluator.arrays import Float32Array
from ...evaluator.errors import UsageError
from ..net.network import Factors, PreluNet
from ..recipe import TrainingPrecision
from .process_group import ProcessGroup

ParallelMode = Literal["ddp", "hybrid"]

# Returns the dropout factors of fc1's and fc2's outputs, (rows, width) each, for rows of the step's global batch; None
# for no dropout. A process calls it once per step, for the rows whose head it computes.
DropoutFactors: TypeAlias = Callable[[range], tuple[Float32Array, Float32Array]] | None


@dataclass(frozen=True)
class StepOptions:
    """How a step is computed.

    precision: bf16 computes most of the forward and backward pass in bfloat16, with weights and gradients in float32;
    tf32 is a setting of torch (`training.loop.environment.torch_settings`);
    channels_last: store images and convolution weights with channels last; compile: torch.compile for trunk and head;
    accumulate: number of micro-batches of a process's rows, computed one after another to save memory.
    """

    precision: TrainingPrecision = "fp32"
    channels_last: bool = False
    compile: bool = False
    accumulate: int = 1


@dataclass(frozen=True)
class StepResult:
    """The result of a step, equal in all processes.

    loss: mean over the global batch; error: the fraction of it that is misclassified, with dropout; stop: whether any
    process requests it.
    """

    loss: float
    error: float
    stop: bool


def add_to_totals(totals: Tensor, loss: Tensor, logits: Tensor, labels: Tensor, total: int) -> None:
    """Add the loss and the error of some rows to those of a step, float32 (2,). total: rows of the global batch."""
    totals[0] += loss.detach()
    totals[1] += (logits.detach().argmax(dim=1) != labels).sum() / total


class ParallelNet(ABC):
    """A net trained by a group of processes. net: on the group's device, with the parameters of this process."""

    def __init__(self, net: PreluNet, group: ProcessGroup, options: StepOptions) -> None:
        self.group, self.options = group, options
        self.classes = net.get_parameter("fc3.bias").numel()
        self.net = net.to(group.device)
        if options.channels_last:
            self.net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        # Two graphs, so that backward yields the head's gradients, most of the net's, before it enters the trunk.
        self._features = torch.compile(net.features) if options.compile else net.features
        self._head = torch.compile(net.head) if options.compile else net.head

    def rows(self, batch: int) -> range:
        """Return this process's rows of a global batch."""
        return split_evenly(range(batch), self.group.size)[self.group.rank]

    def gradients(
        self, images: Tensor, labels: Tensor, factors: DropoutFactors, total: int, *, stop: bool = False
    ) -> StepResult:
        """Set every parameter's `.grad` to the gradient of the mean loss over the global batch. Collective.

        images: float32 (n, 3, crop, crop), mean subtracted; labels: int64 (n,), both for the rows `rows(total)` and on
        any device; total: rows of the global batch, at least one for each process and micro-batch (`check_batch`);
        stop: whether this process requests a stop.
        """
        own = self.rows(total)
        assert len(images) == len(labels) == len(own), f"{len(images)} images, {len(labels)} labels for rows {own}"
        return self._gradients(self._to_device(images), labels.to(self.group.device), factors, total, stop)

    @abstractmethod
    def _gradients(
        self, images: Tensor, labels: Tensor, factors: DropoutFactors, total: int, stop: bool
    ) -> StepResult: ...

    @abstractmethod
    def logits(self, images: Tensor) -> Tensor:
        """Return the logits, float32 (n, K), of this process's images (as in `gradients`); n may be 0. Collective."""

    def _to_device(self, images: Tensor) -> Tensor:
        layout = torch.channels_last if self.options.channels_last else torch.contiguous_format
        return images.to(self.group.device, memory_format=layout)

    def _autocast(self) -> torch.autocast:
        return torch.autocast(self.group.device.type, torch.bfloat16, enabled=self.options.precision == "bf16")

    def _dropout_tensors(self, factors: DropoutFactors, rows: range) -> Factors | None:
        """Return the dropout factors of these rows of a step, on the device."""
        if factors is None:
            return None
        of_fc1, of_fc2 = factors(rows)
        return torch.from_numpy(of_fc1).to(self.group.device), torch.from_numpy(of_fc2).to(self.group.device)


def select_rows(factors: Factors | None, rows: slice | list[int]) -> Factors | None:
    return None if factors is None else (factors[0][rows], factors[1][rows])


def check_batch(batch: int, group: ProcessGroup, options: StepOptions) -> None:
    """Raise UsageError for a batch that leaves a process or micro-batch without rows."""
    parts = group.size * options.accumulate
    if batch < parts:
        raise UsageError(
            f"a batch of {batch} cannot be split into {parts} parts ({group.size} processes, accumulate "
            f"{options.accumulate}). Start fewer processes, or raise batch or lower accumulate in the recipe"
        )


def split_evenly(rows: range, parts: int) -> list[range]:
    """Split rows into consecutive ranges whose lengths differ by at most one."""
    edges = [rows.start + len(rows) * part // parts for part in range(parts + 1)]
    return [range(start, stop) for start, stop in pairwise(edges)]
