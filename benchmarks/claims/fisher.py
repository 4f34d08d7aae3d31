"""How far is the Fisher matrix of a two-layer net from diagonal? ReLU compared with PReLU.

    python -m benchmarks.claims.fisher --output benchmarks/results/fisher.json --plot docs/images/fisher.svg

The claim, from the analysis of PReLU by He et al. 2015: PReLU pushes the off-diagonal blocks of the Fisher information
matrix closer to zero, so that plain gradient descent is closer to the natural gradient. The reason: these blocks grow
with the means of the units' outputs, which the negative side brings closer to 0.

Nets: 8x8 gray pixels of the embedded Fashion-MNIST → 20 units → 10 classes, in pairs with the same random draws and
batches. The deviation of the first weights follows Eq. 10 in its exact form for a first layer, that of the second
Eq. 15. The matrix covers the weights and biases, which both nets of a pair have (not the slopes), in float64:
    F = mean over images of the sum over classes c of p(c|image)·g_c·g_cᵀ,   g_c the gradient of log p(c|image),
with labels from the net's own distribution, summed exactly instead of sampled. Statistics, each smaller if F is closer
to diagonal:
    off_diagonal    ||F − diag F||² / ||F||²
    between_layers  the same for only the two blocks between the layers, 2·||F₁₂||² / ||F||²
    correlation_…   root mean of F_ij²/(F_ii·F_jj) over the pairs i ≠ j of parameters of the first layer, of the second,
        and of one of each. Unlike the two above they are invariant to scaling of parameters, and show which blocks
        change.
And for the reason:
    mean_output     root mean over units of (mean/standard deviation)² of a unit's output
Parameters with F_ii = 0 (dead units) belong to no pair. Intervals: Student's t over the differences of pairs, 95 % for
each row separately.
"""

import io
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from PIL import Image

from benchmarks.common.intervals import interval_of_mean
from benchmarks.common.results import circumstances, markdown, write_result
from benchmarks.common.runner import command_line, several
from prelunet.evaluator.architectures import Activation
from prelunet.evaluator.arrays import Float64Array
from prelunet.evaluator.datasets import open_dataset, select
from prelunet.evaluator.files import write_atomically
from prelunet.evaluator.reporting.charts import chart_spec
from prelunet.evaluator.reporting.html import draw_svg
from prelunet.training.data.splits import embedded_dataset_path
from prelunet.training.net.initialization import initial_slope
from prelunet.training.net.network import activate

ACTIVATIONS: tuple[Activation, Activation] = ("relu", "prelu")
STATISTICS = (
    "off_diagonal", "between_layers",
    "correlation_first_layer", "correlation_second_layer", "correlation_between_layers",
    "mean_output",
)  # fmt: skip
STAGES = ("at initialisation", "after training")
SIDE, HIDDEN, CLASSES = 8, 20, 10
BATCH, RATE, MOMENTUM = 64, 0.02, 0.9


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


def main() -> None:
    """Measure all pairs, print the table, write the result and the plot."""
    parser = command_line(__doc__)
    parser.add_argument("--seeds", type=several, default=12, help="number of pairs of nets, at least 2")
    parser.add_argument("--images", type=int, default=1000, help="number of images of val/ over which F is averaged")
    parser.add_argument("--steps", type=int, default=600, help="steps of training")
    parser.add_argument("--plot", type=Path, help="SVG file to draw")
    options = parser.parse_args()
    train, val = read_images("train", None), read_images("val", options.images)
    nets = [row for seed in range(options.seeds) for row in measure_pair(seed, train, val, options.steps)]
    comparisons = [compare(nets, stage, statistic) for stage in STAGES for statistic in STATISTICS]
    table = markdown(
        ("statistic", "stage", "ReLU", "PReLU", "PReLU − ReLU (95 %)", "verdict"), map(_cells, comparisons)
    )
    print(table)
    settings = {"side": SIDE, "hidden": HIDDEN, "classes": CLASSES, "batch": BATCH, "rate": RATE, "momentum": MOMENTUM}
    result = {
        **circumstances(__file__, options, ("prelunet", "torch", "numpy", "scipy", "pillow")),
        "cpu_seconds": round(time.process_time(), 1),
        "settings": {**settings, "seeds": options.seeds, "images": options.images, "steps": options.steps},
        "comparisons": comparisons,
        "nets": nets,
    }
    write_result(options.output, result, f"{table}\n")
    if options.plot is not None:
        write_atomically(options.plot, draw(nets))


def read_images(split: str, limit: int | None) -> Images:
    """Return images of the embedded dataset, resized to SIDE x SIDE gray pixels; each split has its own mean."""
    dataset = select(open_dataset(embedded_dataset_path(), split=split), limit=limit, classes=())
    pixels = []
    for sample in dataset.samples:
        with Image.open(io.BytesIO(dataset.read(sample))) as image:
            pixels.append(np.asarray(image.convert("L").resize((SIDE, SIDE), Image.Resampling.BILINEAR), np.float64))
    inputs = np.stack(pixels).reshape(len(pixels), -1)
    inputs -= inputs.mean(axis=0)
    return Images(inputs / inputs.std(), np.array([sample.label for sample in dataset.samples]))


def measure_pair(seed: int, train: Images, val: Images, steps: int) -> list[dict[str, Any]]:
    """Return the measurements of both nets of a pair, before and after training."""
    rows = []
    for activation in ACTIVATIONS:
        net = initial_net(seed, activation)
        for stage in STAGES:
            if stage == STAGES[1]:
                net = trained(net, activation, train, steps, seed)
            rows.append({"seed": seed, "activation": activation, "stage": stage, **measured(net, val)})
    return rows


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


def trained(net: TwoLayers, activation: Activation, images: Images, steps: int, seed: int) -> TwoLayers:
    """Return the net after steps of stochastic gradient descent without weight decay; slopes learn with PReLU only."""
    names = [name for name in ("w1", "b1", "slope", "w2", "b2") if name != "slope" or activation == "prelu"]
    values = {name: torch.tensor(getattr(net, name), requires_grad=True) for name in names}
    optimizer = torch.optim.SGD(values.values(), lr=RATE, momentum=MOMENTUM)
    inputs, labels = torch.from_numpy(images.inputs), torch.from_numpy(images.labels)
    random = np.random.default_rng((seed, 1))
    for _ in range(steps):
        some = torch.from_numpy(random.choice(len(labels), BATCH, replace=False))
        hidden = activate(F.linear(inputs[some], values["w1"], values["b1"]), activation, values.get("slope"))
        loss = F.cross_entropy(F.linear(hidden, values["w2"], values["b2"]), labels[some])
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return replace(net, **{name: value.detach().numpy() for name, value in values.items()})


def measured(net: TwoLayers, images: Images) -> dict[str, Any]:
    """Return the statistics of a net, its mean slope, and its top-1 error in percent on the images."""
    _, hidden, probabilities = forward(net, images.inputs)
    fisher = fisher_matrix(net, images.inputs)
    ratio = hidden.mean(axis=0) / np.maximum(hidden.std(axis=0), 1e-12)  # the mean of a dead unit is 0 too
    error = 100 * float((probabilities.argmax(axis=1) != images.labels).mean())
    return {
        **{name: round(value, 6) for name, value in statistics_of(fisher, net.w1.size + net.b1.size).items()},
        "mean_output": round(float(np.sqrt((ratio**2).mean())), 4),
        "mean_slope": round(float(net.slope.mean()), 4),
        "top1_error": round(error, 2),
    }


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
        "off_diagonal": float(1 - np.diag(squares).sum() / mass),
        "between_layers": float(2 * squares[:first, first:].sum() / mass),
        "correlation_first_layer": _root_mean_off_diagonal(correlations[:of_first, :of_first]),
        "correlation_second_layer": _root_mean_off_diagonal(correlations[of_first:, of_first:]),
        "correlation_between_layers": float(np.sqrt(correlations[:of_first, of_first:].mean())),
    }


def _root_mean_off_diagonal(squares: Float64Array) -> float:
    """Return the root mean of squared correlations, without those of a parameter with itself, which are 1."""
    size = len(squares)
    return float(np.sqrt((squares.sum() - size) / (size * (size - 1))))


def compare(nets: list[dict[str, Any]], stage: str, statistic: str) -> dict[str, Any]:
    """Return the means of a statistic, and the paired difference PReLU − ReLU with its interval and verdict."""
    relu, prelu = (
        np.array([net[statistic] for net in nets if (net["activation"], net["stage"]) == (activation, stage)])
        for activation in ACTIVATIONS
    )
    low, high = interval_of_mean(prelu - relu)
    verdict = "smaller with PReLU" if high < 0 else "larger with PReLU" if low > 0 else "no difference shown"
    return {
        "statistic": statistic,
        "stage": stage,
        "relu": round(float(relu.mean()), 5),
        "prelu": round(float(prelu.mean()), 5),
        "difference": round(float((prelu - relu).mean()), 5),
        "interval": [round(low, 5), round(high, 5)],
        "pairs": len(relu),
        "pairs_with_less": int((prelu < relu).sum()),
        "verdict": verdict,
    }


def _cells(row: Mapping[str, Any]) -> list[Any]:
    low, high = row["interval"]
    difference = f"{row['difference']:+.4f} ({low:+.4f} to {high:+.4f})"
    return [row["statistic"], row["stage"], f"{row['relu']:.4f}", f"{row['prelu']:.4f}", difference, row["verdict"]]


def draw(nets: list[dict[str, Any]]) -> bytes:
    """Return the SVG: each pair a line from ReLU to PReLU, a panel for each statistic and stage."""
    titles = {"relu": "ReLU", "prelu": "PReLU"}
    rows = [
        {"seed": net["seed"], "net": titles[net["activation"]], "stage": net["stage"], "name": name, "value": net[name]}
        for net in nets
        for name in STATISTICS
    ]
    base = chart_spec(rows)
    x = {"field": "net", "type": "nominal", "sort": list(titles.values()), "title": None, "axis": {"labelAngle": 0}}
    point = {"size": 30, "color": "var(--accent)"}
    panels = [
        {
            "width": 130,
            "height": 160,
            "title": {"text": stage, "fontWeight": "normal", "fontSize": 12, "color": "var(--muted)"},
            "transform": [{"filter": f"datum.name === '{name}' && datum.stage === '{stage}'"}],
            "mark": {"type": "line", "point": point, "color": "var(--accent)", "opacity": 0.7},
            "encoding": {
                "x": {**x, "scale": {"padding": 0.4}},
                "y": {"field": "value", "type": "quantitative", "title": name.replace("_", " "),
                      "scale": {"zero": False}, "axis": {"domain": False, "tickCount": 5}},
                "detail": {"field": "seed"},
            },
        }
        for stage in STAGES
        for name in STATISTICS
    ]  # fmt: skip
    return draw_svg(
        {"config": base["config"], "data": base["data"], "concat": panels, "columns": len(STATISTICS), "padding": 12}
    )


if __name__ == "__main__":
    main()
