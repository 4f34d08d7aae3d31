"""The paper's scheme for many GPUs (PReLU-nets, section 4 "Multi-GPU implementation", after Krizhevsky 2014).

The convolutions are data parallel: every process has them, and some rows of the batch. The fully connected layers,
which have most of the parameters, are only in the first process. It receives all features before fc1, computes the head
forward and backward for all rows, and sends the features' gradients back. The fc gradients are never sent; those of the
convolutions are summed during backward.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ..net.initialization import FC_LAYERS
from ..net.network import Factors, PreluNet
from .base import (
    DropoutFactors,
    ParallelNet,
    StepOptions,
    StepResult,
    add_to_totals,
    select_rows,
    split_evenly,
)
from .gradient_buckets import GradientBuckets
from .process_group import Pending, ProcessGroup


class HybridParallel(ParallelNet):
    """The trunk in every process, the head in the first."""

    def __init__(self, net: PreluNet, group: ProcessGroup, options: StepOptions) -> None:
        super().__init__(net, group, options)
        if not group.is_first:
            net.drop_head()
        self.width = net.architecture.bins * net.architecture.channels
        # fc1's autocast would round features to this type anyway.
        self.transfer_dtype = torch.bfloat16 if options.precision == "bf16" else torch.float32
        trunk = [parameter for name, parameter in self.net.named_parameters() if name.split(".")[0] not in FC_LAYERS]
        self.buckets = GradientBuckets(trunk, group)
        self._pending_sends: list[Pending] = []  # of this step

    def _gradients(self, images: Tensor, labels: Tensor, factors: DropoutFactors, total: int, stop: bool) -> StepResult:
        self.net.zero_grad()
        self.buckets.begin()
        self._pending_sends.clear()
        # parts_of[rank][part] is a range of rows of the global batch
        parts_of = [split_evenly(rows, self.options.accumulate) for rows in split_evenly(range(total), self.group.size)]
        own = self.rows(total)
        dropout = self._dropout_tensors(factors, range(total)) if self.group.is_first else None
        totals = torch.zeros(2, device=self.group.device)
        for part, rows in enumerate(parts_of[self.group.rank], start=1):
            local = slice(rows.start - own.start, rows.stop - own.start)
            if self.group.is_first:
                shares = [parts[part - 1] for parts in parts_of]
                features, gradient = self._with_head(images[local], labels[local], shares, dropout, total, totals)
            else:
                features, gradient = self._without_head(images[local], labels[local])
            if part == self.options.accumulate:
                self.buckets.arm(totals, stop)
            torch.autograd.backward(features, gradient)
        for pending in self._pending_sends:
            pending.wait()
        return self.buckets.finish()

    def _with_head(
        self,
        images: Tensor,
        labels: Tensor,
        shares: list[range],
        factors: Factors | None,
        total: int,
        totals: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Compute the head for the rows of all processes, forward and backward, and send the features' gradients.

        shares: the rows of each process; factors: dropout factors of all rows of the step; totals: receives the loss
        and the error (`add_to_totals`). Returns own features, and the gradient of the loss with respect to them.
        """
        counts = [len(rows) for rows in shares]
        all_features, all_labels = self._empty_features(sum(counts)), labels.new_empty(sum(counts))
        pending_features = self.group.exchange([], self._of_others(torch.split(all_features, counts)))
        pending_labels = self.group.exchange([], self._of_others(torch.split(all_labels, counts)))
        features = self._trunk(images)  # overlaps with the transfers
        all_features[: counts[0]], all_labels[: counts[0]] = features.detach(), labels
        pending_features.wait()
        pending_labels.wait()
        dropout = select_rows(factors, [row for rows in shares for row in rows])
        with self._autocast():
            logits = self._head(all_features.requires_grad_(), dropout)
        loss = F.cross_entropy(logits.float(), all_labels, reduction="sum") / total
        add_to_totals(totals, loss, logits, all_labels, total)
        torch.autograd.backward(loss)
        assert all_features.grad is not None
        gradients = torch.split(all_features.grad, counts)
        self._pending_sends.append(self.group.exchange(self._of_others(gradients), []))
        return features, gradients[0]

    def _without_head(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Return own features, and the gradient of the loss with respect to them, received from the first process."""
        features = self._trunk(images)
        gradient = self._empty_features(len(images))
        self._pending_sends.append(self.group.exchange([(features.detach(), 0)], []))
        self._pending_sends.append(self.group.exchange([(labels.contiguous(), 0)], []))
        self.group.exchange([], [(gradient, 0)]).wait()
        return features, gradient

    @torch.no_grad()
    def logits(self, images: Tensor) -> Tensor:
        """Return the logits, float32 (n, K), of own images, computed by the first process; see ParallelNet."""
        rank, size = self.group.rank, self.group.size
        counts = [int(count) for count in self.group.total(*(len(images) * (rank == other) for other in range(size)))]
        features = self._trunk(self._to_device(images))
        if not self.group.is_first:
            logits = torch.empty(len(images), self.classes, device=self.group.device)
            pending = self.group.exchange([(features, 0)], [])
            self.group.exchange([], [(logits, 0)]).wait()
            pending.wait()
            return logits
        all_features = self._empty_features(sum(counts))
        pending = self.group.exchange([], self._of_others(torch.split(all_features, counts)))
        all_features[: counts[0]] = features
        pending.wait()
        with self._autocast():
            all_logits = self._head(all_features).float()
        self.group.exchange(self._of_others(torch.split(all_logits, counts)), []).wait()
        return all_logits[: counts[0]]

    def _trunk(self, images: Tensor) -> Tensor:
        if not len(images):
            return self._empty_features(0)
        with self._autocast():
            return self._features(images).to(self.transfer_dtype)

    def _empty_features(self, rows: int) -> Tensor:
        return torch.empty(rows, self.width, dtype=self.transfer_dtype, device=self.group.device)

    def _of_others(self, tensors: Sequence[Tensor]) -> list[tuple[Tensor, int]]:
        """Return each process's tensor with its rank, except the first, which is this process's own."""
        return list(zip(tensors, range(self.group.size), strict=True))[1:]
