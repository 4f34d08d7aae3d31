"""Weights before training: PReLU-nets, section 2.2, and the classes of a new net.

Imports no torch: the tensors are numpy arrays, drawn from generators whose streams numpy keeps stable.
"""

import math
from pathlib import Path

import numpy as np

from evaluator.contract import ClassEntry
from evaluator.datasets.class_list import MAX_CLASSES, read_class_list
from evaluator.errors import UsageError
from training.architectures import LRELU_SLOPE, Activation, Architecture, parameter_shapes
from training.checkpoints import FloatArray

CHANNEL_MEAN = (123.68, 116.78, 103.94)  # R, G, B of ImageNet's training images, as VGG's release published them
INITIAL_SLOPE = 0.25  # PReLU-nets, section 2.1 "Optimization"
FC_STD = {"fc1": 0.01, "fc2": 0.01, "fc3": 0.001}  # the paper's practice; fc layers scaled by Eq. 14 would give
# one-hot scores before training, which hides mistakes


def initial_slope(activation: Activation) -> float:
    """Return the slope a of the negative side before training."""
    return {"prelu": INITIAL_SLOPE, "prelu-shared": INITIAL_SLOPE, "relu": 0.0, "lrelu": LRELU_SLOPE}[activation]


def convolution_std(kernel: int, channels: int, slope: float) -> float:
    """Return the standard deviation of a convolution's weights, which keeps the gradient's variance.

    channels: d, of the output. PReLU-nets, Eq. 14 with the slope term of Eq. 15: ½(1 + a²)·k²·d·Var = 1.
    """
    return math.sqrt(2 / ((1 + slope**2) * kernel**2 * channels))


def initial_tensors(architecture: Architecture, classes: int, seed: int) -> dict[str, FloatArray]:
    """Draw the tensors of an untrained net; names and shapes of `parameter_shapes`, same seed same bytes.

    Weights Gaussian, biases 0, slopes 0.25. Every tensor has its own random stream, so that a change of one layer
    leaves the others as they are.
    """
    slope = initial_slope(architecture.activation)
    tensors: dict[str, FloatArray] = {}
    for index, (name, shape) in enumerate(parameter_shapes(architecture, classes).items()):
        layer, kind = name.split(".")
        if kind == "weight":
            std = FC_STD[layer] if layer in FC_STD else convolution_std(shape[2], shape[0], slope)
            tensors[name] = np.random.default_rng((seed, index)).standard_normal(shape, dtype=np.float32)
            tensors[name] *= np.float32(std)
        else:
            tensors[name] = np.full(shape, slope if kind == "slope" else 0.0, dtype=np.float32)
    return tensors


def parse_classes(text: str) -> tuple[ClassEntry, ...]:
    """Return the classes of `--classes`: a number N gives class0000, class0001, …; anything else is a file's path.

    Raises UsageError for a number without sense, and what `read_class_list` raises.
    """
    if not text.isdecimal():
        if not Path(text).exists():
            raise UsageError(f"--classes {text}: neither a number of classes nor an existing file")
        return read_class_list(Path(text))
    count = int(text[:20])
    if not 1 <= count <= MAX_CLASSES:
        raise UsageError(f"--classes {text}: a net has 1 to {MAX_CLASSES} classes")
    width = max(4, len(str(count - 1)))
    return tuple(ClassEntry(wnid, wnid) for wnid in (f"class{index:0{width}}" for index in range(count)))
