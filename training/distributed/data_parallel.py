"""Data parallelism (DDP), and the choice between it and the paper's hybrid scheme."""

import torch
import torch.nn.functional as F
from torch import Tensor

from ..net.network import PreluNet
from .base import (
    DropoutFactors,
    ParallelMode,
    ParallelNet,
    StepOptions,
    StepResult,
    add_to_totals,
    select_rows,
    split_evenly,
)
from .gradient_buckets import GradientBuckets
from .hybrid import HybridParallel
from .process_group import ProcessGroup


class DataParallel(ParallelNet):
    """The full net in every process, with summed gradients; also used for a single process."""

    def __init__(self, net: PreluNet, group: ProcessGroup, options: StepOptions) -> None:
        super().__init__(net, group, options)
        self.buckets = None if group.size == 1 else GradientBuckets(self.net.parameters(), group)

    def _gradients(self, images: Tensor, labels: Tensor, factors: DropoutFactors, total: int, stop: bool) -> StepResult:
        own = self.rows(total)
        totals = torch.zeros(2, device=self.group.device)
        dropout = self._dropout_tensors(factors, own)
        if self.buckets is None:
            self.net.zero_grad()
        else:
            self.buckets.begin()
        for part, rows in enumerate(split_evenly(own, self.options.accumulate), start=1):
            local = slice(rows.start - own.start, rows.stop - own.start)
            with self._autocast():
                logits = self._head(self._features(images[local]), select_rows(dropout, local))
            loss = F.cross_entropy(logits.float(), labels[local], reduction="sum") / total
            add_to_totals(totals, loss, logits, labels[local], total)
            if self.buckets is not None and part == self.options.accumulate:
                self.buckets.arm(totals, stop)
            torch.autograd.backward(loss)
        if self.buckets is not None:
            return self.buckets.finish()
        mean_loss, error = totals.tolist()
        return StepResult(mean_loss, error, stop)

    @torch.no_grad()
    def logits(self, images: Tensor) -> Tensor:
        """Return the logits, float32 (n, K), of images; see ParallelNet."""
        if not len(images):
            return torch.zeros(0, self.classes, device=self.group.device)
        with self._autocast():
            logits: Tensor = self._head(self._features(self._to_device(images)))
        return logits.float()


def build_parallel(
    kind: ParallelMode, net: PreluNet, group: ProcessGroup, options: StepOptions = StepOptions()
) -> ParallelNet:
    """Distribute a net, identical in every process, over a group.

    The net is modified: it moves to the group's device, and hybrid training removes the fully connected layers from all
    processes but the first. Create the optimizer afterwards. With one process, `kind` has no effect.
    """
    if kind == "ddp" or group.size == 1:
        return DataParallel(net, group, options)
    return HybridParallel(net, group, options)
