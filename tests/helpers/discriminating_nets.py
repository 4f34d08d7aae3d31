"""Checkpoints on which every mistake shows, and images for them.

An untrained net scores each class about 1/K and hides a wrong bin or bias. These have biases up to ±0.5, slopes from
−0.3 to 1.2, logits of standard deviation 3, and, on request, a mean image without any symmetry.
"""

from dataclasses import replace

import numpy as np
from msgspec import structs

from prelunet.evaluator.architectures import Activation, Architecture, Conv, architecture
from prelunet.evaluator.contract import ClassEntry
from prelunet.training.net.checkpoints import Checkpoint
from prelunet.training.net.initialization import initial_tensors
from tests.helpers import reference

CHANNEL_MEAN = np.array([123.68, 116.78, 103.94], np.float32)
# The layers of a net with a part of its channels, for which the oracle takes a fraction of the time.
NARROW = {"narrow": ("demo", 4), "slimA": ("A", 4), "slimE": ("E", 4)}


def discriminating_checkpoint(
    name: str, *, classes: int = 23, mean: str = "channel", activation: Activation = "prelu", seed: int = 3
) -> Checkpoint:
    """Return a discriminating checkpoint of an architecture, or of one in `NARROW`."""
    whole, part = NARROW.get(name, (name, 1))
    net = architecture(whole, activation=activation)
    if part > 1:
        trunk = tuple(
            structs.replace(one, channels=one.channels // part) if isinstance(one, Conv) else one for one in net.trunk
        )
        net = structs.replace(net, name=name, trunk=trunk, hidden=min(net.hidden, 1024))
    rng = np.random.default_rng(seed)
    tensors = dict(initial_tensors(net, classes, seed))
    for key, tensor in tensors.items():
        if key.endswith(".bias"):
            tensors[key] = rng.uniform(-0.5, 0.5, tensor.shape).astype(np.float32)
        elif key.endswith(".slope"):
            tensors[key] = rng.uniform(-0.3, 1.2, tensor.shape).astype(np.float32)
    mean_values = CHANNEL_MEAN if mean == "channel" else asymmetric_mean(net)
    # fc3 is scaled on a small piece of noise, so one window is enough to measure the logits' spread.
    logits = reference.evaluate(name, tensors, mean_values, noise(net.crop, net.crop, seed), activation).window_logits
    tensors["fc3.weight"] = (tensors["fc3.weight"] * (3 / logits.std())).astype(np.float32)
    entries = tuple(ClassEntry(f"n{i:08d}", f"thing {i}") for i in range(classes))
    return Checkpoint(net, entries, mean_values, tensors, recipe=None, dataset=None, metrics=None)


def asymmetric_mean(net: Architecture) -> np.ndarray:
    """Return a mean image (crop, crop, 3) that differs under every flip, transposition and change of channels."""
    y, x = np.mgrid[0 : net.crop, 0 : net.crop] / net.crop
    planes = [90 + 60 * y + 25 * x * x, 140 - 50 * x + 30 * y * x, 70 + 80 * np.sin(2 * y + 3 * x)]
    return np.stack(planes, axis=-1).astype(np.float32)


def noise(height: int, width: int, seed: int) -> np.ndarray:
    """Return an image of smooth noise, uint8 (height, width, 3), different in every place, direction and channel."""
    rng = np.random.default_rng(seed)
    coarse = rng.integers(0, 256, (height // 9 + 2, width // 7 + 2, 3))
    large = coarse.repeat(9, axis=0).repeat(7, axis=1)[:height, :width]
    fine = rng.integers(-40, 41, (height, width, 3))
    return np.clip(large + fine, 0, 255).astype(np.uint8)


def with_tensors(checkpoint: Checkpoint, **tensors: np.ndarray) -> Checkpoint:
    """Return the checkpoint with some tensors replaced; `__` in a keyword stands for the dot of a name."""
    return replace(checkpoint, tensors={**checkpoint.tensors, **{k.replace("__", "."): v for k, v in tensors.items()}})
