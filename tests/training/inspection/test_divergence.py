"""The first non-finite value in a net that diverges is named."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import prelunet.training.inspection.layer_statistics
from prelunet.training.inspection.layer_statistics import find_non_finite
from prelunet.training.net.network import PreluNet, network_from_checkpoint
from tests.helpers.tiny_nets import CLASSES, TINY, tiny_checkpoint

NAN, INFINITY = float("nan"), float("inf")


def net_with(changes: Mapping[str, Any] | None = None) -> PreluNet:
    """Return TINY in float32, with responses of order 1 before the changes."""
    checkpoint = tiny_checkpoint()
    tensors = {**checkpoint.tensors, "conv1.weight": checkpoint.tensors["conv1.weight"] / 1000}
    for name, value in (changes or {}).items():
        tensors[name] = np.broadcast_to(np.float32(value), tensors[name].shape).copy()
    return network_from_checkpoint(replace(checkpoint, tensors=tensors))


def some_images(count: int = 4) -> tuple[Tensor, Tensor]:
    random = np.random.default_rng(4)
    images = random.uniform(-120, 130, (count, 3, TINY.crop, TINY.crop)).astype(np.float32)
    return torch.from_numpy(images), torch.from_numpy(random.integers(0, CLASSES, count))


def with_value(net: PreluNet, name: str, value: float) -> PreluNet:
    with torch.no_grad():
        net.get_parameter(name).view(-1)[1] = value
    return net


def test_a_finite_net_is_reported_as_finite() -> None:
    assert (
        find_non_finite(net_with(), *some_images()) == "no layer: without dropout all values of this batch are finite"
    )


def test_without_images_only_the_parameters_are_checked() -> None:
    none = tuple(values[:0] for values in some_images())
    assert find_non_finite(net_with(), *none).startswith("no layer")
    net = with_value(net_with(), "fc1.slope", NAN)
    assert find_non_finite(net, *none) == "fc1.slope: the parameter is not finite"


@pytest.mark.parametrize("value", [NAN, INFINITY, -INFINITY])
def test_a_non_finite_pixel_is_named_before_its_consequences(value: float) -> None:
    images, labels = some_images()
    images[2, 1, 7, 3] = value
    assert find_non_finite(net_with(), images, labels) == "the images: a pixel is not finite"


@pytest.mark.parametrize("name", ["conv2.weight", "conv1.slope", "fc2.bias"])
@pytest.mark.parametrize("value", [NAN, INFINITY])
def test_a_non_finite_parameter_is_named(name: str, value: float) -> None:
    assert (
        find_non_finite(with_value(net_with(), name, value), *some_images()) == f"{name}: the parameter is not finite"
    )


def test_of_several_non_finite_parameters_that_of_the_first_layer_is_named() -> None:
    net = with_value(with_value(net_with(), "fc1.weight", NAN), "conv2.bias", NAN)
    assert find_non_finite(net, *some_images()) == "conv2.bias: the parameter is not finite"


@pytest.mark.parametrize(
    ("changes", "layer"),
    [
        ({"conv1.weight": 3e38}, "conv1"),
        ({"conv2.weight": 3e38, "fc1.weight": 3e38}, "conv2"),  # its infinity propagates through fc1
        ({"fc2.weight": 3e38}, "fc2"),
        ({"fc2.bias": 5.0, "fc3.weight": 3e38}, "fc3"),
    ],
)
def test_the_first_layer_whose_response_overflows_is_named(changes: dict[str, float], layer: str) -> None:
    assert find_non_finite(net_with(changes), *some_images()) == f"{layer}: its response is not finite"


@pytest.mark.parametrize("place", [0, 3])
def test_the_first_layer_is_named_wherever_in_the_batch_it_overflows(
    monkeypatch: pytest.MonkeyPatch, place: int
) -> None:
    monkeypatch.setattr(
        prelunet.training.inspection.layer_statistics, "PIXELS_PER_BATCH", TINY.crop**2
    )  # one image at a time
    images, labels = some_images()
    images[:, 0], images[place, 0] = 0.0, 1.0  # only one image overflows in conv1
    net = net_with({"fc2.weight": 3e38})  # where every image overflows
    with torch.no_grad():
        net.get_parameter("conv1.weight")[:, 0] = 3e38
    assert find_non_finite(net, images, labels) == "conv1: its response is not finite"


def test_a_loss_that_overflows_with_finite_logits_is_reported() -> None:
    images, labels = some_images()
    net = net_with({"fc3.weight": 0.0, "fc3.bias": np.array([3e38, -3e38, 0.0])})
    assert find_non_finite(net, images, torch.ones_like(labels)) == "the loss is not finite, though the logits are"


def test_the_search_leaves_no_gradient_and_no_hook() -> None:
    net = net_with()
    state = torch.get_rng_state()
    find_non_finite(net, *some_images())
    assert all(parameter.grad is None for parameter in net.parameters())
    assert net.response_hook is None
    assert torch.equal(torch.get_rng_state(), state)
