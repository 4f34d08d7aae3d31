"""How far is the Fisher matrix of a two-layer net from diagonal? ReLU compared with PReLU (row `fisher` of rows.py).

The claim, from the analysis of PReLU by He et al. 2015: PReLU pushes the off-diagonal blocks of the Fisher information
matrix closer to zero, so that plain gradient descent is closer to the natural gradient. The reason: these blocks grow
with the means of the units' outputs, which the negative side brings closer to 0.

Nets: 8x8 gray pixels → 20 units → 10 classes, in pairs with the same random draws and batches. The deviation of the
first weights follows Eq. 10 in its exact form for a first layer, that of the second Eq. 15. The matrix covers the
weights and biases, which both nets of a pair have (not the slopes), in float64:
    F = mean over images of the sum over classes c of p(c|image)·g_c·g_cᵀ,   g_c the gradient of log p(c|image),
with labels from the net's own distribution, summed exactly instead of sampled. Statistics, each smaller if F is closer
to diagonal:
    off-diagonal mass          ||F − diag F||² / ||F||²
    mass between the layers    the same for only the two blocks between the layers, 2·||F₁₂||² / ||F||²
    correlation …              root mean of F_ij²/(F_ii·F_jj) over the pairs i ≠ j of parameters of the first layer, of
        the second, and of one of each. Unlike the two above they are invariant to scaling of parameters, and show which
        blocks change.
And for the reason:
    mean output                root mean over units of (mean/standard deviation)² of a unit's output
Parameters with F_ii = 0 (dead units) belong to no pair.
"""

import io
import math
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from PIL import Image

from prelunet.evaluator.architectures import Activation
from prelunet.evaluator.arrays import Float64Array
from prelunet.evaluator.datasets import open_dataset, select
from prelunet.training.net.initialization import initial_slope
from prelunet.training.net.network import activate

STATISTICS = (
    "off-diagonal mass", "mass between the layers",
    "correlation in the first layer", "correlation in the second layer", "correlation between the layers",
    "mean output",
)  # fmt: skip
STAGES = ("before training", "after training")
SIDE, HIDDEN, CLASSES = 8, 20, 10
BATCH, MOMENTUM, STEPS = 64, 0.9, 600
IMAGES = 1000  # of val/, over which F is averaged


@dataclass(frozen=True)
class Images:
    """inputs: float64 (N, SIDE²), mean 0 per pixel and variance 1 over all pixels; labels: int64 (N,)."""

    inputs: Float64Array
    labels: npt.NDArray[np.int64]


@dataclass(frozen=True)
class TwoLayers:
    """A net z = W2·f(W1·x + b1) + b2, all float64. slope: (HIDDEN,), the a of f on the negative side; 0 is ReLU."""

    w1: Float64Array  # (HIDDEN, SIDE²)
    b1: Float64Array
    slope: Float64Array
    w2: Float64Array  # (CLASSES, HIDDEN)
    b2: Float64Array


@cache
def read_images(data: Path, split: str, limit: int | None) -> Images:
    """Return images of a dataset, resized to SIDE x SIDE gray pixels; each split has its own mean."""
    dataset = select(open_dataset(data, split=split), limit=limit, classes=())
    pixels = []
    for sample in dataset.samples:
        with Image.open(io.BytesIO(dataset.read(sample))) as image:
            pixels.append(np.asarray(image.convert("L").resize((SIDE, SIDE), Image.Resampling.BILINEAR), np.float64))
    inputs = np.stack(pixels).reshape(len(pixels), -1)
    inputs -= inputs.mean(axis=0)
    return Images(inputs / inputs.std(), np.array([sample.label for sample in dataset.samples]))


def measure(data: Path, activation: Activation, rate: float, seed: int) -> dict[str, Any]:
    """Train one net; return its STATISTICS in both STAGES, and its top-1 error in percent and loss on val/ of the data.

    The loss is None if the training diverged.
    """
    images, val = read_images(data, "train", None), read_images(data, "val", IMAGES)
    net = initial_net(seed, activation)
    figures: dict[str, float] = {}
    for stage in STAGES:
        if stage == STAGES[1]:
            net = trained(net, activation, images, rate, seed)
        values = statistics_of(fisher_matrix(net, val.inputs), net.w1.size + net.b1.size)
        values["mean output"] = mean_output(net, val.inputs)
        figures |= {f"{name}, {stage}": round(value, 6) for name, value in values.items()}
    _, _, probabilities = forward(net, val.inputs)
    loss = float(-np.log(probabilities[np.arange(len(val.labels)), val.labels]).mean())
    error = round(100 * float((probabilities.argmax(axis=1) != val.labels).mean()), 4)
    return {"top1_error": error, "loss": loss if math.isfinite(loss) else None, "figures": figures}


def mean_output(net: TwoLayers, inputs: Float64Array) -> float:
    """Return the root mean over the first layer's units of (mean/standard deviation)² of a unit's output."""
    _, hidden, _ = forward(net, inputs)
    ratio = hidden.mean(axis=0) / np.maximum(hidden.std(axis=0), 1e-12)  # the mean of a dead unit is 0 too
    return float(np.sqrt((ratio**2).mean()))


def initial_net(seed: int, activation: Activation) -> TwoLayers:
    """Draw a net; the activation changes only the slopes and the scale of W2 (PReLU-nets, Eq. 15)."""
    random = np.random.default_rng(seed)
    slope = initial_slope(activation)
    return TwoLayers(
        random.standard_normal((HIDDEN, SIDE * SIDE)) / SIDE,  # n·Var = 1: no activation before the first layer
        np.zeros(HIDDEN),
        np.full(HIDDEN, slope),
        random.standard_normal((CLASSES, HIDDEN)) * np.sqrt(2 / ((1 + slope**2) * HIDDEN)),
        np.zeros(CLASSES),
    )


def trained(net: TwoLayers, activation: Activation, images: Images, rate: float, seed: int) -> TwoLayers:
    """Return the net after STEPS of stochastic gradient descent without weight decay; slopes learn with PReLU only."""
    names = [name for name in ("w1", "b1", "slope", "w2", "b2") if name != "slope" or activation == "prelu"]
    values = {name: torch.tensor(getattr(net, name), requires_grad=True) for name in names}
    optimizer = torch.optim.SGD(values.values(), lr=rate, momentum=MOMENTUM)
    inputs, labels = torch.from_numpy(images.inputs), torch.from_numpy(images.labels)
    random = np.random.default_rng((seed, 1))
    for _ in range(STEPS):
        some = torch.from_numpy(random.choice(len(labels), BATCH, replace=False))
        hidden = activate(F.linear(inputs[some], values["w1"], values["b1"]), activation, values.get("slope"))
        loss = F.cross_entropy(F.linear(hidden, values["w2"], values["b2"]), labels[some])
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return replace(net, **{name: value.detach().numpy() for name, value in values.items()})


def forward(net: TwoLayers, inputs: Float64Array) -> tuple[Float64Array, Float64Array, Float64Array]:
    """Return the first layer's responses and outputs, (N, HIDDEN) each, and the probabilities (N, CLASSES)."""
    response = inputs @ net.w1.T + net.b1
    hidden = np.where(response > 0, response, net.slope * response)
    logits = hidden @ net.w2.T + net.b2
    exponentials = np.exp(logits - logits.max(axis=1, keepdims=True))
    return response, hidden, exponentials / exponentials.sum(axis=1, keepdims=True)


def fisher_matrix(net: TwoLayers, inputs: Float64Array) -> Float64Array:
    """Return F over (W1, b1, W2, b2), each flattened row by row, as defined in the module docstring.

    The gradient of log p(c) with respect to the logits is e_c − p, and Σ p_c (e_c − p)(e_c − p)ᵀ = diag p − p·pᵀ, which
    is A·Aᵀ with column c of A equal to √p_c·(e_c − p): one row of gradients for each image and class.
    """
    response, hidden, p = forward(net, inputs)
    roots = np.sqrt(p)[:, :, None] * (np.eye(p.shape[1])[None] - p[:, None, :])  # (N, class c, logit)
    back = (roots @ net.w2) * np.where(response > 0, 1.0, net.slope)[:, None, :]  # (N, c, HIDDEN)
    weights = [back[..., None] * inputs[:, None, None, :], roots[..., None] * hidden[:, None, None, :]]
    blocks = [weights[0], back, weights[1], roots]
    rows = np.concatenate([block.reshape(len(inputs) * p.shape[1], -1) for block in blocks], axis=1)
    matrix: Float64Array = rows.T @ rows / len(inputs)
    return matrix


def statistics_of(fisher: Float64Array, first: int) -> dict[str, float]:
    """Return the statistics described in the module docstring. first: number of parameters of the first layer."""
    squares = fisher**2
    diagonal = np.diag(fisher)
    mass = squares.sum()
    used = diagonal > 0
    correlations = squares[np.ix_(used, used)] / np.outer(diagonal[used], diagonal[used])
    of_first = int(used[:first].sum())
    return {
        "off-diagonal mass": float(1 - np.diag(squares).sum() / mass),
        "mass between the layers": float(2 * squares[:first, first:].sum() / mass),
        "correlation in the first layer": _root_mean_off_diagonal(correlations[:of_first, :of_first]),
        "correlation in the second layer": _root_mean_off_diagonal(correlations[of_first:, of_first:]),
        "correlation between the layers": float(np.sqrt(correlations[:of_first, of_first:].mean())),
    }


def _root_mean_off_diagonal(squares: Float64Array) -> float:
    """Return the root mean of squared correlations, without those of a parameter with itself, which are 1."""
    size = len(squares)
    return float(np.sqrt((squares.sum() - size) / (size * (size - 1))))
