"""Initial weights (PReLU-nets, section 2.2) and classes of a new net.

Does not import torch: the tensors are numpy arrays, drawn from generators whose streams numpy keeps stable.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from ...evaluator.architectures import LRELU_SLOPE, Activation, Architecture, parameter_shapes
from ...evaluator.arrays import Float32Array
from ...evaluator.contract import ClassEntry
from ...evaluator.datasets.labels.class_file import IMAGENET_1K, MAX_CLASSES, read_class_list
from ...evaluator.errors import UsageError

Rule = Literal["fan-out", "fan-in", "xavier", "xavier-all", "gaussian"]
FirstLayer = Literal["half", "exact"]
_UNIFORM_RULES: tuple[Rule, ...] = ("xavier", "xavier-all")
_RECTIFIER_RULES: tuple[Rule, ...] = ("fan-out", "fan-in")  # those of the paper's section 2.2

CHANNEL_MEAN = (123.68, 116.78, 103.94)  # R, G, B of ImageNet's training images, as published with VGG
INITIAL_SLOPE = 0.25  # PReLU-nets, section 2.1 "Optimization"
FC_LAYERS = ("fc1", "fc2", "fc3")
_DEVIATIONS = "from 1e-6 to 100"  # outside, float32 responses become 0 or infinite within a few layers


@dataclass(frozen=True)
class Initialization:
    """Distribution of the weights of an untrained net: PReLU-nets, section 2.2.

    rule: of the convolutions, with a the initial slope, n_in = k²·c and n_out = k²·d (k: kernel, c and d: channels of
    the input and output):

    - fan-out: ½(1 + a²)·n_out·Var = 1, preserves the variance of gradients (Eq. 14 and 15; the paper trains with it)
    - fan-in: ½(1 + a²)·n_in·Var = 1, preserves the variance of responses (Eq. 10 and 15)
    - xavier: uniform, n_in·Var = 1, Caffe's "xavier", to which the paper compares
    - xavier-all: the same in fc1, fc2, fc3 too, as in a Caffe net whose every layer has this filler
    - gaussian: the standard deviation `std` in every convolution

    first_layer: the input of the first convolution is the image, which no activation has halved. `exact` replaces
    ½(1 + a²) by 1 there, as Eq. 10 requires (under Eq. 14, where the activation after the layer counts, it is a
    convention). `half` does not, like the paper ("the factor 1/2 does not matter if it just exists on one layer").
    fc_stds: standard deviations of fc1, fc2, fc3, Gaussian under every rule but xavier-all, as in the paper. Scaled
    like the convolutions by Eq. 10 or 14, they would give one-hot scores before training, which hides mistakes.

    Raises UsageError for a deviation out of range, or `exact` with a rule that halves nothing.
    """

    rule: Rule = "fan-out"
    std: float = 0.01
    first_layer: FirstLayer = "half"
    fc_stds: tuple[float, float, float] = (0.01, 0.01, 0.001)

    def __post_init__(self) -> None:
        if self.first_layer == "exact" and self.rule not in _RECTIFIER_RULES:
            raise UsageError(
                f"first layer 'exact' drops the factor ½ of {', '.join(_RECTIFIER_RULES)}; '{self.rule}' has no such "
                "factor. Choose one of these rules, or first layer 'half'"
            )
        if not _is_deviation(self.std):
            raise UsageError(
                f"standard deviation of the weights {self.std}: should be {_DEVIATIONS}; the default is 0.01"
            )
        if len(self.fc_stds) != 3 or not all(_is_deviation(std) for std in self.fc_stds):
            raise UsageError(
                f"standard deviations of fc1, fc2, fc3 {list(self.fc_stds)}: should be three numbers {_DEVIATIONS}; "
                "the defaults are 0.01, 0.01, 0.001"
            )

    def convolution_variance(self, shape: tuple[int, ...], slope: float, *, first: bool = False) -> float:
        """Return the variance of a convolution's weights.

        shape: (d, c, k, k), as in a checkpoint; slope: a, of the activation; first: whether its input is the image.
        """
        outputs, inputs, rows, columns = shape
        fan_in, fan_out = rows * columns * inputs, rows * columns * outputs
        if self.rule == "gaussian":
            return self.std**2
        if self.rule in _UNIFORM_RULES:
            return 1 / fan_in
        doubled = 2.0 if first and self.first_layer == "exact" else 1 + slope**2  # twice the factor ½(1 + a²)
        return 2 / (doubled * (fan_out if self.rule == "fan-out" else fan_in))


def _is_deviation(std: float) -> bool:
    return 1e-6 <= std <= 100


def initial_slope(activation: Activation) -> float:
    return {"prelu": INITIAL_SLOPE, "prelu-shared": INITIAL_SLOPE, "relu": 0.0, "lrelu": LRELU_SLOPE}[activation]


def initial_tensors(
    architecture: Architecture, classes: int, seed: int, initialization: Initialization = Initialization()
) -> dict[str, Float32Array]:
    """Draw the tensors of an untrained net, with names and shapes of `parameter_shapes`; equal seeds give equal bytes.

    Biases are 0, learned slopes 0.25. Each layer's weights have their own random stream, selected by the layer's
    number. Changing the size of one layer leaves the others unchanged, and another activation or Gaussian rule only
    scales the weights. Raises UsageError if the net has too many parameters for a model file.
    """
    architecture.check_size(classes)
    slope = initial_slope(architecture.activation)
    fc_stds = dict(zip(FC_LAYERS, initialization.fc_stds, strict=True))
    tensors: dict[str, Float32Array] = {}
    layers = list(dict.fromkeys(name.split(".")[0] for name in parameter_shapes(architecture, classes)))
    for name, shape in parameter_shapes(architecture, classes).items():
        layer, kind = name.split(".")
        number = layers.index(layer)
        if kind != "weight":
            tensors[name] = np.full(shape, slope if kind == "slope" else 0.0, dtype=np.float32)
            continue
        # The factor 3 counts tensors as if every layer had a weight, a bias and a slope.
        random = np.random.default_rng((seed, 3 * number))
        if layer not in fc_stds:
            std = math.sqrt(initialization.convolution_variance(shape, slope, first=number == 0))
            uniform = initialization.rule in _UNIFORM_RULES
        elif initialization.rule == "xavier-all":
            std, uniform = shape[1] ** -0.5, True
        else:
            std, uniform = fc_stds[layer], False
        if uniform:  # on ±√3·std, which has this standard deviation
            weights = random.random(shape, dtype=np.float32)
            weights -= np.float32(0.5)
            weights *= np.float32(2 * math.sqrt(3) * std)
        else:
            weights = random.standard_normal(shape, dtype=np.float32)
            weights *= np.float32(std)
        tensors[name] = weights
    return tensors


def parse_classes(text: str) -> tuple[ClassEntry, ...]:
    """Parse `--classes`: a number N gives class0000, class0001, …; anything else is the path of a file, or
    `imagenet-1k`.

    Raises UsageError for a number out of range, and what `read_class_list` raises.
    """
    if not text.isdecimal():
        if text != IMAGENET_1K and not Path(text).exists():
            raise UsageError(f"--classes {text}: neither a number, nor an existing file, nor {IMAGENET_1K}")
        return read_class_list(Path(text))
    count = int(text[:20])
    if not 1 <= count <= MAX_CLASSES:
        raise UsageError(f"--classes {text}: should be from 1 to {MAX_CLASSES}")
    width = max(4, len(str(count - 1)))
    return tuple(ClassEntry(wnid, wnid) for wnid in (f"class{index:0{width}}" for index in range(count)))
