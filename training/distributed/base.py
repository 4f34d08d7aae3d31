"""One step of training on one or many processes: `gradients` gives each the gradient of the whole batch's mean loss.

    ddp      every process has the whole net and some rows of the batch; gradients are summed (data parallel)
    hybrid   the paper's scheme (training/distributed/hybrid.py)

However many processes there are, and however many rows each has, the gradients are those of one process with the same
batch, but for the order of the sums.
"""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, TypeAlias, get_args

import torch
from torch import Tensor, nn

from prelunet.evaluator.arrays import Float32Array
from prelunet.evaluator.errors import UsageError
from prelunet.training.distributed.process_group import ProcessGroup
from prelunet.training.net.network import Factors, PreluNet
from prelunet.training.recipe import TrainingPrecision

ParallelMode = Literal["ddp", "hybrid"]
PARALLEL_MODES: tuple[ParallelMode, ...] = get_args(ParallelMode)

# Called with places in the step's global batch: what dropout multiplies fc1's and fc2's outputs by in these rows,
# (rows, hidden) each; None for no dropout. A process asks once a step, for the rows whose head it computes.
DropoutFactors: TypeAlias = Callable[[range], tuple[Float32Array, Float32Array]] | None


@dataclass(frozen=True)
class StepOptions:
    """How a step is computed.

    precision: bf16 computes most of the forward and backward in bfloat16, with weights and gradients in float32;
    channels_last: convolutions' weights and images have their channels last in memory; compile: torch.compile of trunk
    and head; accumulate: parts of a process's rows that go through the net one after the other, which takes less
    memory.
    """

    precision: TrainingPrecision = "fp32"
    channels_last: bool = False
    compile: bool = False
    accumulate: int = 1


@dataclass(frozen=True)
class StepResult:
    """What all processes know after a step. loss: mean over the global batch; stop: whether any of them wants to."""

    loss: float
    stop: bool


class ParallelNet(ABC):
    """A net that is trained by a group of processes.

    net: on the group's device, with the parameters that this process has; traffic: bytes that this process sent in the
    last step, by purpose.
    """

    def __init__(self, net: PreluNet, group: ProcessGroup, options: StepOptions) -> None:
        self.group, self.options = group, options
        self.classes = net.get_parameter("fc3.bias").numel()
        self.net = net.to(group.device)
        if options.channels_last:
            self.net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        # Two graphs, not one: backward then gives the head's gradients, most of the net's, before the trunk's begin.
        self._features = torch.compile(net.features) if options.compile else net.features
        self._head = torch.compile(net.head) if options.compile else net.head
        self.traffic: Counter[str] = Counter()

    def rows(self, batch: int) -> range:
        """Return which rows of a global batch are this process's; none where there are fewer rows than processes."""
        return split_evenly(range(batch), self.group.size)[self.group.rank]

    def gradients(
        self, images: Tensor, labels: Tensor, factors: DropoutFactors, total: int, *, stop: bool = False
    ) -> StepResult:
        """Leave in every parameter's `.grad` the gradient of the mean loss over the global batch. Collective.

        images: float32 (n, 3, crop, crop), mean subtracted; labels: int64 (n,); both of the rows `rows(total)`, on any
        device; total: rows of the global batch; stop: whether this process wants to.
        """
        own = self.rows(total)
        assert len(images) == len(labels) == len(own), f"{len(images)} images, {len(labels)} labels for rows {own}"
        before = self.group.bytes_sent.copy()
        step = self._gradients(self._to_device(images), labels.to(self.group.device), factors, total, stop)
        self.traffic = self.group.bytes_sent - before
        return step

    @abstractmethod
    def _gradients(
        self, images: Tensor, labels: Tensor, factors: DropoutFactors, total: int, stop: bool
    ) -> StepResult: ...

    @abstractmethod
    def logits(self, images: Tensor) -> Tensor:
        """Return the logits float32 (n, K) of this process's own images, as in `gradients`; n may be 0. Collective."""

    @property
    def shared_parameters(self) -> list[nn.Parameter]:
        """Return the parameters that every process has."""
        return list(self.net.parameters())

    def _to_device(self, images: Tensor) -> Tensor:
        layout = torch.channels_last if self.options.channels_last else torch.contiguous_format
        return images.to(self.group.device, memory_format=layout)

    def _autocast(self) -> torch.autocast:
        return torch.autocast(self.group.device.type, torch.bfloat16, enabled=self.options.precision == "bf16")

    def _dropout_tensors(self, factors: DropoutFactors, rows: range) -> Factors | None:
        """Return the factors of all rows of a step that this process needs, on the device."""
        if factors is None:
            return None
        of_fc1, of_fc2 = factors(rows)
        return torch.from_numpy(of_fc1).to(self.group.device), torch.from_numpy(of_fc2).to(self.group.device)


def select_rows(factors: Factors | None, rows: slice | list[int]) -> Factors | None:
    """Return the factors of some of the rows."""
    return None if factors is None else (factors[0][rows], factors[1][rows])


def check_batch(batch: int, group: ProcessGroup, options: StepOptions) -> None:
    """Raise UsageError for a batch that leaves a process, or one of its parts, without rows."""
    parts = group.size * options.accumulate
    if batch < parts:
        raise UsageError(
            f"a batch of {batch} cannot be split into {parts} parts ({group.size} processes, accumulate "
            f"{options.accumulate}): start fewer processes, or raise the batch or lower accumulate in the recipe"
        )


def split_evenly(rows: range, parts: int) -> list[range]:
    """Cut rows into consecutive ranges whose lengths differ by at most one."""
    edges = [rows.start + len(rows) * part // parts for part in range(parts + 1)]
    return [range(start, stop) for start, stop in pairwise(edges)]
