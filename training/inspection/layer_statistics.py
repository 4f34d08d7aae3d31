"""What images do inside a net: responses and gradients, layer by layer (PReLU-nets, section 2.2).

The paper's initialisation keeps Var[y_l] (Eq. 10) or the variance of its gradient (Eq. 14) from layer to layer; here
both are measured on a net as it is, with its slopes and the channels that a ReLU would lose.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from prelunet.evaluator.contract import center_scale
from prelunet.evaluator.datasets import DatasetSpec, open_from_spec
from prelunet.evaluator.errors import DatasetError
from prelunet.evaluator.terminal import progress
from prelunet.training.data.image_cache import UNREADABLE, ImageCache
from prelunet.training.inspection.layer_log import DEFAULT_IMAGES, LayerResponse
from prelunet.training.net.checkpoints import Checkpoint
from prelunet.training.net.dense_reference import subtract_mean
from prelunet.training.net.network import PreluNet, network_from_checkpoint

PIXELS_PER_BATCH = 2**19  # 10 crops of 224: their responses and gradients in model C take about 1.5 GB


@dataclass(frozen=True)
class LayerStatistics:
    """What was measured in a checkpoint. images: how many took part; refused: file → why it could not be decoded."""

    images: int
    refused: dict[str, str]
    layers: tuple[LayerResponse, ...]


@dataclass
class _Sums:
    """Running sums over a layer's responses, in float64, whose 53 bits the sums of float32 values do not exhaust."""

    count: int = 0
    response: list[float] = field(default_factory=lambda: [0.0, 0.0])  # sum, sum of squares
    gradient: list[float] = field(default_factory=lambda: [0.0, 0.0])
    positive: Tensor | None = None  # bool (channels,): above 0 anywhere

    def add(self, response: Tensor, gradient: Tensor) -> None:
        self.count += response.numel()
        for sums, values in ((self.response, response.double()), (self.gradient, gradient.double())):
            sums[0] += values.sum().item()
            sums[1] += values.square().sum().item()
        positive = (response > 0).transpose(0, 1).flatten(1).any(dim=1)
        self.positive = positive if self.positive is None else self.positive | positive

    def summary(self, layer: str, slope: Tensor | None) -> LayerResponse:
        assert self.positive is not None, "an image was measured"
        mean, variance = self._moments(self.response)
        never_positive = None if layer == "fc3" else 1 - self.positive.double().mean().item()
        slope_mean = None if slope is None else slope.detach().double().mean().item()
        return LayerResponse(layer, mean, variance, self._moments(self.gradient)[1], never_positive, slope_mean)

    def _moments(self, sums: list[float]) -> tuple[float, float]:
        mean = sums[0] / self.count
        return mean, max(sums[1] / self.count - mean * mean, 0.0)


def measure_layers(
    net: PreluNet, images: Tensor, labels: Tensor, advance: Callable[[int], None] | None = None
) -> tuple[LayerResponse, ...]:
    """Return what each layer does on these images, in the order of layers, without dropout.

    images: float (N, 3, crop, crop), mean subtracted; labels: int64 (N,); N > 0, on any device; they are shown to the
    net in several batches, which changes nothing but rounding. advance: told how many more are done.
    Leaves the net as it is: no random number is drawn, no `.grad` is written, its mode and its observer stay.
    """
    assert len(images), "without images there is nothing to measure"
    sums: dict[str, _Sums] = {}
    for some, truth in batches(net, images, labels):
        responses, loss = responses_and_loss(net, some, truth)
        gradients = torch.autograd.grad(loss, list(responses.values()))
        for (layer, response), gradient in zip(responses.items(), gradients, strict=True):
            sums.setdefault(layer, _Sums()).add(response.detach(), gradient)
        if advance is not None:
            advance(len(some))
    slopes = dict(net.named_parameters())
    return tuple(found.summary(layer, slopes.get(f"{layer}.slope")) for layer, found in sums.items())


def batches(net: PreluNet, images: Tensor, labels: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the images and labels in parts that fit into memory, on the net's device and in its number format."""
    parameter = next(net.parameters())
    size = max(1, PIXELS_PER_BATCH // (images.shape[2] * images.shape[3]))
    for some, truth in zip(torch.split(images, size), torch.split(labels, size), strict=True):
        yield some.to(parameter.device, parameter.dtype), truth.to(parameter.device)


def responses_and_loss(net: PreluNet, images: Tensor, labels: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """Return each layer's response to one batch, and the sum of the images' losses, with the graph between them.

    The sum, because the gradient of an image's loss with respect to its own response then does not depend on how many
    images there are.
    """
    with torch.enable_grad(), _recorded_responses(net) as responses:
        logits = net(images.detach().requires_grad_())  # so that frozen parameters do not cut the graph off
        return responses, F.cross_entropy(logits, labels, reduction="sum")


@contextmanager
def _recorded_responses(net: PreluNet) -> Iterator[dict[str, Tensor]]:
    """Collect the responses of what runs in the block; an observer that is there already is left out meanwhile."""
    responses: dict[str, Tensor] = {}
    before, net.response_hook = net.response_hook, responses.__setitem__
    try:
        yield responses
    finally:
        net.response_hook = before


def measure_checkpoint(checkpoint: Checkpoint, data: DatasetSpec, images: int) -> LayerStatistics:
    """Measure a checkpoint on images of its classes, spread evenly over those of `data` (its `val` folder if any).

    images: at most so many; fewer where there are fewer. Raises what `open_from_spec` raises: DatasetError for labels
    that are no classes of the checkpoint, or no image at all; and DatasetError where fewer than two can be decoded.
    """
    crop = checkpoint.architecture.crop
    image_cache = ImageCache(open_from_spec(data, checkpoint.classes), {}, memory=0)
    views = sample_views(image_cache, center_scale(crop), crop, images)
    if len(views.labels) < 2:
        some = "".join(f"; {file}: {reason}" for file, reason in list(views.refused.items())[:3])
        raise DatasetError(
            f"{data.path}: {len(views.labels)} of {len(views.labels) + len(views.refused)} images can be decoded, and "
            f"a variance needs two{some}. Give more images, or ask for more with --images"
        )
    net = network_from_checkpoint(checkpoint)
    crops = subtract_mean(torch.from_numpy(views.images), checkpoint.mean)
    with progress("measuring", len(views.labels), "images") as advance:
        layers = measure_layers(net, crops, torch.from_numpy(views.labels), advance)
    return LayerStatistics(len(views.labels), views.refused, layers)


@dataclass(frozen=True, eq=False)
class SampledViews:
    """images: uint8 (N, crop, crop, 3), mean not subtracted; labels: int64 (N,); refused: file → why it is left out."""

    images: npt.NDArray[np.uint8]
    labels: npt.NDArray[np.int64]
    refused: dict[str, str]


def sample_views(image_cache: ImageCache, scale: int, crop: int, images: int = DEFAULT_IMAGES) -> SampledViews:
    """Return central views of images spread evenly over a split, so that all its classes take part; always the same.

    Of N images those at floor(i·N/images), or all where there are fewer; what cannot be read is left out.
    """
    total = len(image_cache)
    count = min(images, total)
    views, labels, refused = list[npt.NDArray[np.uint8]](), list[int](), dict[str, str]()
    for place in (number * total // count for number in range(count)):
        try:
            views.append(image_cache.central_view(place, scale, crop))
            labels.append(image_cache.samples[place].label)
        except UNREADABLE as error:
            refused[image_cache.samples[place].file] = str(error)
    stacked = np.stack(views) if views else np.empty((0, crop, crop, 3), np.uint8)
    return SampledViews(stacked, np.array(labels, dtype=np.int64), refused)


# Where a training that diverged lost its numbers: the first layer in which something is no longer finite.


def find_non_finite(net: PreluNet, images: Tensor, labels: Tensor) -> str:
    """Name the first thing that is not finite when a net sees a batch, as `conv2_1: its response is not finite`.

    images: float (N, 3, crop, crop), mean subtracted; labels: int64 (N,); N may be 0, then parameters are looked at.
    The order is that in which one spoils the next: images, parameters (in the order of layers), responses (forwards),
    loss, gradients of responses (backwards) and of parameters. There is no dropout; where all is finite without it,
    the text says so. No random number is drawn and no `.grad` is written.
    """
    return next(_non_finite_values(net, images, labels), "no layer: on these images all is finite without dropout")


def _non_finite_values(net: PreluNet, images: Tensor, labels: Tensor) -> Iterator[str]:
    if not _finite(images):
        yield "the images: a pixel is not finite"
    for name, parameter in net.named_parameters():
        if not _finite(parameter):
            yield f"{name}: the parameter is not finite"
    if not len(images):
        return
    yield from _non_finite_forward(net, images, labels)
    for some, truth in batches(net, images, labels):
        yield from _non_finite_backward(net, some, truth)


def _non_finite_forward(net: PreluNet, images: Tensor, labels: Tensor) -> Iterator[str]:
    """Yield the layers whose response is not finite, the first layer first, whatever part of the batch it is in."""
    finite: dict[str, bool] = {}
    for some, truth in batches(net, images, labels):
        responses, loss = responses_and_loss(net, some, truth)
        for name, value in (*responses.items(), ("", loss)):
            finite[name] = finite.get(name, True) and _finite(value)
    for name, good in finite.items():
        if not good:
            yield f"{name}: its response is not finite" if name else "the loss is not finite, though the logits are"


def _non_finite_backward(net: PreluNet, images: Tensor, labels: Tensor) -> Iterator[str]:
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
