"""Gradients summed over all processes during backward, as in Li et al. 2020, "PyTorch Distributed".

Used instead of torch's DistributedDataParallel because in hybrid training the first process has more parameters than
the others, and the step's totals and the stop request travel with the gradients instead of in a separate collective.
"""

from collections.abc import Iterable
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor, nn

from .base import StepResult
from .process_group import Pending, ProcessGroup


class Bucket:
    """Parameters whose gradients are contiguous in memory and sent together.

    flat: the gradients, followed by three values that only the first bucket uses: the two totals of the step
    (`add_to_totals`) and the stop request.
    """

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self.parameters = parameters
        self.flat = torch.zeros(sum(parameter.numel() for parameter in parameters) + 3, device=parameters[0].device)
        self.views: list[Tensor] = []
        offset = 0
        for parameter in parameters:  # with the parameter's strides, so channels-last weights get such gradients
            self.views.append(self.flat[offset:].as_strided(parameter.shape, parameter.stride()))
            offset += parameter.numel()
        self.missing = 0  # gradients that backward has not computed yet
        self.pending: Pending | None = None


class GradientBuckets:
    """The gradients of the parameters common to all processes of a group, in buckets.

    A step calls `begin`, backward for all micro-batches but the last, `arm`, backward for the last, `finish`.
    """

    capacity: ClassVar[int] = 25 * 2**20  # bytes: enough for full network throughput, small enough to start early (Li)

    def __init__(self, parameters: Iterable[nn.Parameter], group: ProcessGroup) -> None:
        """Assign the parameters to buckets, in backward's order, from the end of the net."""
        self.group = group
        contents: list[list[nn.Parameter]] = [[]]
        size = 0
        for parameter in reversed(list(parameters)):
            if contents[-1] and size + parameter.nbytes > self.capacity:
                contents.append([])
                size = 0
            contents[-1].append(parameter)
            size += parameter.nbytes
        self.buckets = list(map(Bucket, contents))
        self._armed = False
        self._sent = 0
        for bucket in self.buckets:
            for parameter in bucket.parameters:
                hook = partial(self._arrived, bucket)
                parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]

    def begin(self) -> None:
        """Set all gradients to zero, and make backward accumulate into the buckets."""
        self._armed, self._sent = False, 0
        for bucket in self.buckets:
            bucket.flat.zero_()
            for parameter, view in zip(bucket.parameters, bucket.views, strict=True):
                parameter.grad = view
            bucket.missing, bucket.pending = len(bucket.parameters), None

    def arm(self, totals: Tensor, stop: bool) -> None:
        """From now on, send each bucket as soon as backward has computed all of its gradients.

        totals: loss and error of this process's rows; stop: whether this process requests a stop.
        """
        flat = self.buckets[0].flat
        flat[-3:-1], flat[-1] = totals, float(stop)
        self._armed = True

    def finish(self) -> StepResult:
        """Wait for the buckets, and return the result of the step."""
        self._armed = False
        for bucket in self.buckets:
            assert bucket.pending is not None
            bucket.pending.wait()
        loss, error, stops = self.buckets[0].flat[-3:].tolist()
        return StepResult(loss, error, stops > 0)

    def _arrived(self, bucket: Bucket, _parameter: Tensor) -> None:
        if self._armed:
            bucket.missing -= 1
            self._send_ready()

    def _send_ready(self) -> None:
        """Send complete buckets in order, so that all processes sum the same ones even if others are ready first."""
        while self._sent < len(self.buckets) and self.buckets[self._sent].missing == 0:
            bucket = self.buckets[self._sent]
            bucket.pending = self.group.all_reduce(bucket.flat)
            self._sent += 1
