"""The initialization preserves the size of responses and gradients through 30 layers (PReLU-nets, section 2.2).

The nets here are convolutions on circular maps, so that every cell has all of its k²·c inputs and k²·d outputs, as in
the paper's derivation; zero padding would reduce both. Widths alternate between 32 and 64, so that fan-in and fan-out
differ by a factor of 2 in every layer.

Expected values: given its input, the mean squared response of a layer is n_in·Var·mean(x²) on average over its weights.
Since a draw and its negative are equally likely, the activation passes the fraction ½(1 + a²) of it. So the factor from
layer to layer is exactly ½(1 + a²)·n_in·Var; for gradients, backward, it is ½(1 + a²)·n_out·Var (Eq. 9 and 13). Single
nets scatter around that, and more with every layer, so means over 20 nets are compared. Tolerances:

- ONE_LAYER: the factor of one layer has a standard error of at most 9 %; four standard errors
- ALL_LAYERS: the geometric mean of 29 such factors, 1.2 %; three standard errors, less than omitting a slope of 0.25
- DEEP: the product of 29 factors is approximately log-normal, single nets range from 0.01 to 10, and the mean of 20
  nets scatters by 40 %, more downward than upward; a factor of 3, whereas Xavier's 2^-29 is a factor of 5·10^8
"""

from dataclasses import dataclass
from functools import cache
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import prelunet.training.net.initialization
from prelunet.evaluator.architectures import Architecture, Conv
from prelunet.training.net.initialization import FirstLayer, Initialization, initial_tensors

ONE_LAYER, ALL_LAYERS, DEEP = 0.36, 0.04, 3.0
NETS = 20

WIDTHS = (32, 64) * 15
NET = Architecture(
    "deep",
    tuple(Conv(f"conv1_{index}", width, kernel=3, pad=1) for index, width in enumerate(WIDTHS, start=1)),
    spp_levels=(1,),
    hidden=1,
    crop=4,
)


@dataclass(frozen=True)
class MeanSquares:
    """Mean squares, by net: of the image (NETS,), and of each layer's y, before the activation, (NETS, 30)."""

    image: np.ndarray
    responses: np.ndarray
    gradients: np.ndarray  # of the last layer: noise of size 1

    def factors(self, kind: str) -> np.ndarray:
        """Return the factor by which each layer multiplies the mean square: (29,), means over nets.

        forward: layers 2 to 30, relative to layers 1 to 29; backward: layers 1 to 29, relative to layers 2 to 30.
        """
        if kind == "forward":
            return np.asarray((self.responses[:, 1:] / self.responses[:, :-1]).mean(0))
        return np.asarray((self.gradients[:, :-1] / self.gradients[:, 1:]).mean(0))

    def product(self, kind: str) -> float:
        """Return the factor by which all 29 layers together multiply it, the mean over nets."""
        if kind == "forward":
            return float((self.responses[:, -1] / self.responses[:, 0]).mean())
        return float((self.gradients[:, 0] / self.gradients[:, -1]).mean())


@cache
def sizes(initialization: Initialization, slope: float, depth: int = 30) -> MeanSquares:
    """Measure the first `depth` layers of NETS nets whose activations have this slope."""
    image, responses, gradients = [], [], []
    for seed in range(NETS):
        with patch.object(prelunet.training.net.initialization, "INITIAL_SLOPE", slope):
            tensors = initial_tensors(NET, 2, seed, initialization)
        random = torch.Generator().manual_seed(seed)
        maps = torch.randn(2, 3, NET.crop, NET.crop, generator=random)
        image.append(mean_square(maps))
        kept = []
        for conv in NET.convs[:depth]:
            weight = torch.from_numpy(tensors[f"{conv.name}.weight"])
            maps = F.conv2d(F.pad(maps, (1, 1, 1, 1), mode="circular"), weight).requires_grad_()
            kept.append(maps)
            maps = F.leaky_relu(maps, slope)
        found = torch.autograd.grad(kept[-1], kept, torch.randn(kept[-1].shape, generator=random))
        responses.append([mean_square(values) for values in kept])
        gradients.append([mean_square(values) for values in found])
    return MeanSquares(np.array(image), np.array(responses), np.array(gradients))


def mean_square(values: torch.Tensor) -> float:
    return values.detach().double().square().mean().item()


def assert_factors(measured: MeanSquares, kind: str, expected: np.ndarray) -> None:
    """Compare the measured factors of layers 2 to 30 with expected ones: each, their geometric mean, their product."""
    relative = measured.factors(kind) / expected
    np.testing.assert_allclose(relative, 1, rtol=0, atol=ONE_LAYER, err_msg=kind)
    assert np.exp(np.log(relative).mean()) == pytest.approx(1, abs=ALL_LAYERS), kind
    assert 1 / DEEP < measured.product(kind) / expected.prod() < DEEP, kind


N_IN, N_OUT = (9 * np.array(widths, dtype=float) for widths in (WIDTHS[:-1], WIDTHS[1:]))  # of layers 2 to 30


@pytest.mark.parametrize("slope", [0.0, 0.25, 1.0])
def test_fan_in_preserves_the_variance_of_responses_over_thirty_layers(slope: float) -> None:
    assert_factors(sizes(Initialization("fan-in"), slope), "forward", np.ones(29))


@pytest.mark.parametrize("slope", [0.0, 0.25, 1.0])
def test_fan_out_preserves_the_variance_of_gradients_over_thirty_layers(slope: float) -> None:
    assert_factors(sizes(Initialization("fan-out"), slope), "backward", np.ones(29))


def test_either_rule_scales_the_other_direction_only_by_the_widths_of_first_and_last_layer() -> None:
    # Section 2.2: initialized by Eq. 14, the forward product is a ratio of widths and does not diminish
    assert_factors(sizes(Initialization("fan-in"), 0.0), "backward", N_OUT / N_IN)
    assert_factors(sizes(Initialization("fan-out"), 0.0), "forward", N_IN / N_OUT)
    assert (N_OUT / N_IN).prod() == 2  # 64 of the last layer ÷ 32 of the first


def test_xavier_halves_responses_and_gradients_in_every_layer() -> None:
    measured = sizes(Initialization("xavier"), 0.0)
    assert_factors(measured, "forward", np.full(29, 0.5))  # 2^-29 in all
    assert_factors(measured, "backward", 0.5 * N_OUT / N_IN)


def test_a_fixed_deviation_scales_gradients_as_the_paper_states() -> None:
    # section 2.2: 0.01 instead of Eq. 14's deviation σ shrinks the gradient's deviation by σ / 0.01 in each layer
    sigma = (2 / N_OUT) ** 0.5
    assert_factors(sizes(Initialization("gaussian", std=0.01), 0.0), "backward", (0.01 / sigma) ** 2)


@pytest.mark.parametrize("slope", [0.0, 0.25])
@pytest.mark.parametrize("first_layer", ["exact", "half"])
def test_an_exact_first_layer_preserves_the_variance_of_the_image(first_layer: FirstLayer, slope: float) -> None:
    measured = sizes(Initialization("fan-in", first_layer=first_layer), slope, depth=1)
    expected = 1 if first_layer == "exact" else 2 / (1 + slope**2)
    # 20 nets with 32 random filters on 32 cells: a standard error of 4 %, times three
    assert (measured.responses[:, 0] / measured.image).mean() == pytest.approx(expected, rel=0.12)
