"""Where a training that diverged lost its numbers: the first layer in which something is no longer finite."""

from collections.abc import Iterator

import torch
from torch import Tensor

from prelunet.training.diagnosis import batches, responses_and_loss
from prelunet.training.network import PreluNet


def where_not_finite(net: PreluNet, images: Tensor, labels: Tensor) -> str:
    """Name the first thing that is not finite when a net sees a batch, as `conv2_1: its response is not finite`.

    images: float (N, 3, crop, crop), mean subtracted; labels: int64 (N,); N may be 0, then parameters are looked at.
    The order is that in which one spoils the next: images, parameters (in the order of layers), responses (forwards),
    loss, gradients of responses (backwards) and of parameters. There is no dropout; where all is finite without it,
    the text says so. No random number is drawn and no `.grad` is written.
    """
    return next(_faults(net, images, labels), "no layer: on these images all is finite without dropout")


def _faults(net: PreluNet, images: Tensor, labels: Tensor) -> Iterator[str]:
    if not _finite(images):
        yield "the images: a pixel is not finite"
    for name, parameter in net.named_parameters():
        if not _finite(parameter):
            yield f"{name}: the parameter is not finite"
    if not len(images):
        return
    yield from _faults_forwards(net, images, labels)
    for some, truth in batches(net, images, labels):
        yield from _faults_backwards(net, some, truth)


def _faults_forwards(net: PreluNet, images: Tensor, labels: Tensor) -> Iterator[str]:
    """Yield the layers whose response is not finite, the first layer first, whatever part of the batch it is in."""
    finite: dict[str, bool] = {}
    for some, truth in batches(net, images, labels):
        responses, loss = responses_and_loss(net, some, truth)
        for name, value in (*responses.items(), ("", loss)):
            finite[name] = finite.get(name, True) and _finite(value)
    for name, good in finite.items():
        if not good:
            yield f"{name}: its response is not finite" if name else "the loss is not finite, though the logits are"


def _faults_backwards(net: PreluNet, images: Tensor, labels: Tensor) -> Iterator[str]:
    """Yield what is not finite on the way back: the gradient of a response, then those of the layer's parameters."""
    responses, loss = responses_and_loss(net, images, labels)
    parameters = {name: parameter for name, parameter in net.named_parameters() if parameter.requires_grad}
    gradients = torch.autograd.grad(loss, [*responses.values(), *parameters.values()])
    found = dict(zip([*responses, *parameters], gradients, strict=True))
    for layer in reversed(responses):
        if not _finite(found[layer]):
            yield f"{layer}: the gradient of its response is not finite"
        for name in parameters:
            if name.startswith(f"{layer}.") and not _finite(found[name]):
                yield f"{name}: its gradient is not finite"


def _finite(values: Tensor) -> bool:
    return bool(torch.isfinite(values).all())
