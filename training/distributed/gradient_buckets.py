"""Gradients summed over all processes while backward still goes on, as in Li et al. 2020, "PyTorch Distributed".

Own rather than torch's DistributedDataParallel: a process may have no rows at all, in hybrid training the first process
has more parameters than the others, and the loss and the wish to stop travel with the gradients instead of in a
collective of their own.
"""

from collections.abc import Iterable, Iterator
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor, nn

from prelunet.training.distributed.process_group import Pending, ProcessGroup


class Bucket:
    """Some parameters whose gradients lie in one piece of memory, and are sent together.

    flat: the gradients one after the other, then `extra` more values.
    """

    def __init__(self, parameters: list[nn.Parameter], extra: int) -> None:
        self.parameters = parameters
        count = sum(parameter.numel() for parameter in parameters)
        self.flat = torch.zeros(count + extra, device=parameters[0].device)
        self.extra = self.flat[count:]
        self.views: list[Tensor] = []
        place = 0
        for parameter in parameters:  # strides too: a weight with channels last gets its gradient in that order
            self.views.append(self.flat[place:].as_strided(parameter.shape, parameter.stride()))
            place += parameter.numel()
        self.missing = 0  # gradients that backward still owes
        self.pending: Pending | None = None

    def clear(self) -> None:
        """Set all gradients to zero, and have backward add to them here."""
        self.flat.zero_()
        for parameter, view in zip(self.parameters, self.views, strict=True):
            parameter.grad = view
        self.missing, self.pending = len(self.parameters), None


class GradientBuckets:
    """The gradients of parameters that every process of a group has, in buckets.

    A step: `begin`, backward of all micro-batches but the last, `arm`, backward of the last, `finish`.
    """

    capacity: ClassVar[int] = 25 * 2**20  # bytes: enough for a network's full speed, small enough to begin early (Li)

    def __init__(self, parameters: Iterable[nn.Parameter], group: ProcessGroup, extra: int) -> None:
        """Put the parameters into buckets. extra: how many values travel along, in the first."""
        self.group = group
        full = _in_buckets(parameters, self.capacity)
        self.buckets = [Bucket(some, 0 if place else extra) for place, some in enumerate(full)]
        self._armed = False
        self._sent = 0
        for bucket in self.buckets:
            for parameter in bucket.parameters:
                hook = partial(self._arrived, bucket)
                parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]

    def begin(self) -> None:
        """Forget the last step."""
        self._armed, self._sent = False, 0
        for bucket in self.buckets:
            bucket.clear()

    def arm(self, *extra: Tensor | float) -> None:
        """Send each bucket, from now on, as soon as backward has given all of its gradients."""
        with torch.no_grad():
            for place, value in enumerate(extra):
                self.buckets[0].extra[place] = value
        self._armed = True

    def finish(self) -> list[float]:
        """Send what backward did not give (a process without rows adds zeros), wait, and return the sums of `extra`."""
        for bucket in self.buckets:
            bucket.missing = 0
        self._send_ready()
        self._armed = False
        for bucket in self.buckets:
            assert bucket.pending is not None
            bucket.pending.wait()
        return [float(value) for value in self.buckets[0].extra.tolist()]

    def _arrived(self, bucket: Bucket, _parameter: Tensor) -> None:
        if self._armed:
            bucket.missing -= 1
            self._send_ready()

    def _send_ready(self) -> None:
        """Send complete buckets in order: all processes must add up the same ones, whichever is ready first in each."""
        while self._sent < len(self.buckets) and self.buckets[self._sent].missing == 0:
            bucket = self.buckets[self._sent]
            bucket.pending = self.group.all_reduce(bucket.flat, "gradients")
            self._sent += 1


def _in_buckets(parameters: Iterable[nn.Parameter], capacity: int) -> Iterator[list[nn.Parameter]]:
    """Yield the parameters of each bucket, from the net's end: backward's order."""
    some: list[nn.Parameter] = []
    size = 0
    for parameter in reversed(list(parameters)):
        if some and size + parameter.nbytes > capacity:
            yield some
            some, size = [], 0
        some.append(parameter)
        size += parameter.nbytes
    yield some
