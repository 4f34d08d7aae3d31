"""Responses and gradients of a net on images, layer by layer (PReLU-nets, section 2.2).

The paper's initialization preserves Var[y_l] (Eq. 10) or the variance of its gradient (Eq. 14) from layer to layer.
This module measures both on any net, with its slopes and the channels that would be dead with ReLU.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from ...evaluator.contract import center_scale
from ...evaluator.datasets import DatasetSpec, open_from_spec
from ...evaluator.errors import DatasetError
from ...evaluator.terminal import progress
from ..data.image_cache import UNREADABLE, ImageCache
from ..net.checkpoints import Checkpoint
from ..net.dense_reference import subtract_mean
from ..net.network import PreluNet, network_from_checkpoint
from .layer_log import DEFAULT_IMAGES, LayerResponse

PIXELS_PER_BATCH = 2**19  # 10 crops of 224: their responses and gradients in model C take about 1.5 GB


@dataclass
class _Sums:
    """Running sums over a layer's responses in float64, whose 53 bits suffice for sums of float32 values."""

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
    """Measure each layer on these images, without dropout; return the layers in order.

    images: float (N, 3, crop, crop), mean subtracted; labels: int64 (N,); N > 0, on any device; advance: called with
    the number of images of each batch. The split into batches affects rounding only.
    Does not change the net: no random number is drawn, no `.grad` is written, its mode and response hook are kept.
    """
    assert len(images), "needs at least one image"
    sums: dict[str, _Sums] = {}
    parameter = next(net.parameters())
    size = max(1, PIXELS_PER_BATCH // (images.shape[2] * images.shape[3]))
    for batch, truth in zip(torch.split(images, size), torch.split(labels, size), strict=True):
        own = batch.to(parameter.device, parameter.dtype)
        responses, loss = _responses_and_loss(net, own, truth.to(parameter.device))
        gradients = torch.autograd.grad(loss, list(responses.values()))
        for (layer, response), gradient in zip(responses.items(), gradients, strict=True):
            sums.setdefault(layer, _Sums()).add(response.detach(), gradient)
        if advance is not None:
            advance(len(batch))
    parameters = dict(net.named_parameters())
    return tuple(layer_sums.summary(layer, parameters.get(f"{layer}.slope")) for layer, layer_sums in sums.items())


def _responses_and_loss(net: PreluNet, images: Tensor, labels: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """Return each layer's response to one batch and the sum of the images' losses, with their autograd graph.

    With a sum, the gradient with respect to an image's response does not depend on the number of images.
    """
    responses: dict[str, Tensor] = {}
    before, net.response_hook = net.response_hook, responses.__setitem__
    try:
        with torch.enable_grad():
            logits = net(images.detach().requires_grad_())  # so that frozen parameters do not cut off the graph
            return responses, F.cross_entropy(logits, labels, reduction="sum")
    finally:
        net.response_hook = before


def measure_checkpoint(
    checkpoint: Checkpoint, data: DatasetSpec, images: int
) -> tuple["SampledViews", tuple[LayerResponse, ...]]:
    """Measure a checkpoint on images of its classes, spread evenly over `data` (over its `val` folder if it has one).

    images: maximum number. Raises what `open_from_spec` raises, including DatasetError for labels that are not classes
    of the checkpoint and for no images; also DatasetError if fewer than two images can be decoded.
    """
    crop = checkpoint.architecture.crop
    image_cache = ImageCache(open_from_spec(data, checkpoint.classes), {}, memory=0)
    scale = (checkpoint.recipe or {}).get("evaluation_scale") or center_scale(crop)
    views = sample_views(image_cache, scale, crop, images)
    if len(views.labels) < 2:
        some = "".join(f"; {file}: {reason}" for file, reason in list(views.refused.items())[:3])
        raise DatasetError(
            f"{data.path}: only {len(views.labels)} of {len(views.labels) + len(views.refused)} images can be decoded, "
            f"but a variance needs two{some}. Provide more images, or request more with --images"
        )
    net = network_from_checkpoint(checkpoint)
    crops = subtract_mean(torch.from_numpy(views.images), checkpoint.mean)
    with progress("measuring", len(views.labels), "images") as advance:
        layers = measure_layers(net, crops, torch.from_numpy(views.labels), advance)
    return views, layers


@dataclass(frozen=True, eq=False)
class SampledViews:
    """images: uint8 (N, crop, crop, 3), mean not subtracted; labels: int64 (N,); refused: skipped file → reason."""

    images: npt.NDArray[np.uint8]
    labels: npt.NDArray[np.int64]
    refused: dict[str, str]


def sample_views(image_cache: ImageCache, scale: int, crop: int, images: int = DEFAULT_IMAGES) -> SampledViews:
    """Return central views of images spread evenly over a split, so that all classes are included.

    The choice is deterministic: of N images those at floor(i·N/images), or all if there are fewer. Unreadable images
    are skipped.
    """
    total = len(image_cache)
    count = min(images, total)
    views, labels, refused = list[npt.NDArray[np.uint8]](), list[int](), dict[str, str]()
    for index in (number * total // count for number in range(count)):
        try:
            views.append(image_cache.central_view(index, scale, crop))
            labels.append(image_cache.samples[index].label)
        except UNREADABLE as error:
            refused[image_cache.samples[index].file] = str(error)
    stacked = np.stack(views) if views else np.empty((0, crop, crop, 3), np.uint8)
    return SampledViews(stacked, np.array(labels, dtype=np.int64), refused)
