"""Plain data parallelism (DDP), and the choice between it and the hybrid scheme of the paper."""

import torch
import torch.nn.functional as F
from torch import Tensor

from prelunet.evaluator.errors import UsageError
from prelunet.training.distributed.base import (
    PARALLEL_MODES,
    DropoutFactors,
    ParallelMode,
    ParallelNet,
    StepOptions,
    StepResult,
    select_rows,
    split_evenly,
)
from prelunet.training.distributed.gradient_buckets import GradientBuckets
from prelunet.training.distributed.process_group import ProcessGroup
from prelunet.training.net.network import Factors, PreluNet


class DataParallel(ParallelNet):
    """The whole net in every process, and the sum of their gradients; in one process there is nothing to sum up."""

    def __init__(self, net: PreluNet, group: ProcessGroup, options: StepOptions) -> None:
        super().__init__(net, group, options)
        self.buckets = None if group.size == 1 else GradientBuckets(self.shared_parameters, group, extra=2)

    def _gradients(self, images: Tensor, labels: Tensor, factors: DropoutFactors, total: int, stop: bool) -> StepResult:
        own = self.rows(total)
        loss = torch.zeros((), device=self.group.device)
        drawn = self._dropout_tensors(factors, own)
        self._forget_gradients()
        for part, rows in enumerate(split_evenly(own, self.options.accumulate), start=1):
            here = slice(rows.start - own.start, rows.stop - own.start)
            part_loss = self._loss(images[here], labels[here], select_rows(drawn, here), total) if rows else None
            if part_loss is not None:
                loss += part_loss.detach()
            if self.buckets is not None and part == self.options.accumulate:
                self.buckets.arm(loss, float(stop))
            if part_loss is not None:
                torch.autograd.backward(part_loss)
        if self.buckets is None:
            return StepResult(float(loss), stop)
        mean_loss, stops = self.buckets.finish()
        return StepResult(mean_loss, stops > 0)

    def _forget_gradients(self) -> None:
        if self.buckets is None:
            self.net.zero_grad()
        else:
            self.buckets.begin()

    def _loss(self, images: Tensor, labels: Tensor, factors: Factors | None, total: int) -> Tensor:
        """Return these rows' share of the mean loss."""
        with self._autocast():
            logits = self._head(self._features(images), factors)
        return F.cross_entropy(logits.float(), labels, reduction="sum") / total

    @torch.no_grad()
    def logits(self, images: Tensor) -> Tensor:
        """Return the logits float32 (n, K) of images; see Parallel."""
        if not len(images):
            return torch.zeros(0, self.classes, device=self.group.device)
        with self._autocast():
            logits: Tensor = self._head(self._features(self._to_device(images)))
        return logits.float()


def build_parallel(
    kind: ParallelMode, net: PreluNet, group: ProcessGroup, options: StepOptions = StepOptions()
) -> ParallelNet:
    """Distribute a net, the same in every process, over a group.

    The net is changed: it moves to the group's device, and in hybrid training loses its fully connected layers in all
    processes but the first. So make the optimizer afterwards. One process trains alone, whatever the kind. Raises
    UsageError for a kind that does not exist.
    """
    if kind not in PARALLEL_MODES:
        raise UsageError(f"no way to train in parallel '{kind}'. There are: {', '.join(PARALLEL_MODES)}")
    from prelunet.training.distributed.hybrid import HybridParallel

    if kind == "ddp" or group.size == 1:
        return DataParallel(net, group, options)
    return HybridParallel(net, group, options)
