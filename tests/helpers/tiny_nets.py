"""A net small enough for loops in Python, in which no two sizes are equal, so that a swapped axis fails."""

from dataclasses import replace
from typing import Any

import numpy as np
from msgspec import structs

from prelunet.evaluator.architectures import Activation, Architecture, Conv, Pool, parameter_shapes
from prelunet.evaluator.contract import ClassEntry
from prelunet.training.net.checkpoints import Checkpoint

# crop 24 → 12 → 6 → 7: a window of 7x7 cells, stride 4; level 3 has bins that overlap
TINY = Architecture(
    "tiny",
    (Conv("conv1", 5, kernel=3, stride=2, pad=1), Pool("pool1", kernel=2, stride=2), Conv("conv2", 4, kernel=2, pad=1)),
    spp_levels=(3, 1, 2),
    hidden=6,
    crop=24,
)
CLASSES = 3


def tiny_checkpoint(activation: Activation = "prelu", **changes: Any) -> Checkpoint:
    """Return a checkpoint of TINY: random weights, biases up to ±0.5, slopes from −0.3 to 1.2."""
    net = structs.replace(TINY, activation=activation)
    rng = np.random.default_rng(5)
    ranges = {"weight": (-0.3, 0.3), "bias": (-0.5, 0.5), "slope": (-0.3, 1.2)}
    tensors = {
        name: rng.uniform(*ranges[name.split(".")[1]], shape).astype(np.float32)
        for name, shape in parameter_shapes(net, CLASSES).items()
    }
    classes = tuple(ClassEntry(f"n{index:08}", f"thing {index}") for index in range(CLASSES))
    mean = np.array([123.68, 116.78, 103.94], np.float32)
    return replace(Checkpoint(net, classes, mean, tensors), **changes)


def mean_image() -> np.ndarray:
    """Return a mean image for TINY without any symmetry, float32 (24, 24, 3)."""
    return np.random.default_rng(6).uniform(60, 190, (24, 24, 3)).astype(np.float32)
