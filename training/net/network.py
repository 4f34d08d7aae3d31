"""The torch net of an `Architecture`: trunk, spatial pyramid, fully connected head.

Its parameters have the names and shapes of a checkpoint (`evaluator.architectures.parameter_shapes`), so `state_dict()`
needs no renaming.
"""

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...evaluator.architectures import LRELU_SLOPE, Activation, Architecture, Pool, parameter_shapes
from ...evaluator.arrays import Float32Array
from .checkpoints import Checkpoint
from .initialization import FC_LAYERS

Factors: TypeAlias = tuple[Tensor, Tensor]  # dropout factors of the outputs of fc1 and fc2, (N, width) each


class Layer(nn.Module):
    """The parameters of one layer, named as in a checkpoint; slope is None if none is learned."""

    weight: Tensor
    bias: Tensor
    slope: Tensor | None

    def __init__(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        super().__init__()
        for name in ("weight", "bias", "slope"):
            self.register_parameter(name, nn.Parameter(torch.zeros(shapes[name])) if name in shapes else None)


class PreluNet(nn.Module):
    """A net of the paper; all parameters are zero until `load_tensors` or `load_state_dict` fills them.

    response_hook: called with the name of each layer (conv1, …, fc3) and its response before the activation, or None;
    input_hook: called with the name of each layer and its input, returns the input that the layer receives, or None.
    """

    response_hook: Callable[[str, Tensor], None] | None
    input_hook: Callable[[str, Tensor], Tensor] | None

    def __init__(self, architecture: Architecture, classes: int) -> None:
        super().__init__()
        self.architecture = architecture
        self.response_hook = self.input_hook = None
        layers: dict[str, dict[str, tuple[int, ...]]] = {}
        for name, shape in parameter_shapes(architecture, classes).items():
            layer, kind = name.split(".")
            layers.setdefault(layer, {})[kind] = shape
        for layer, shapes in layers.items():
            self.add_module(layer, Layer(shapes))

    def drop_head(self) -> None:
        """Remove the fully connected layers; in hybrid training only one process has them."""
        for name in FC_LAYERS:
            delattr(self, name)

    def forward(self, images: Tensor, factors: Factors | None = None) -> Tensor:
        """Return the logits (N, K) of training crops: float (N, 3, crop, crop), mean already subtracted.

        factors: dropout factors, as in `head`. The feature map must be exactly one window; for larger images use
        `training.net.dense_reference.dense_windows`.
        """
        return self.head(self.features(images), factors)

    def features(self, images: Tensor) -> Tensor:
        """Return the features (N, bins·C) of training crops in the form that `forward` takes."""
        feature_map = self.trunk(images)
        window = self.architecture.window
        assert feature_map.shape[2:] == (window, window), f"{tuple(images.shape)} is not one crop; see dense_windows"
        return self.pyramid(feature_map)

    def trunk(self, images: Tensor) -> Tensor:
        """Return the feature map (N, C, rows, columns) of float images (N, 3, height, width), mean subtracted."""
        maps = images
        for layer in self.architecture.trunk:
            if isinstance(layer, Pool):
                maps = F.max_pool2d(maps, layer.kernel, layer.stride)
            else:
                own = self._layer(layer.name)
                maps = F.conv2d(
                    self._received(layer.name, maps), own.weight, own.bias, stride=layer.stride, padding=layer.pad
                )
                self._call_hook(layer.name, maps)
                maps = activate(maps, self.architecture.activation, own.slope)
        return maps

    def pyramid(self, windows: Tensor) -> Tensor:
        """Pool windows (N, C, w, w) into features (N, bins·C): levels in order, each flattened (channel, row, column).

        Bin i of n over a cells is [floor(i·a/n), ceil((i+1)·a/n)), counted from 0 (SPP-net, appendix A), as in torch's
        adaptive pooling. Maxima start at −inf, since after a PReLU all values of a bin may be negative.
        """
        levels, cells = [], windows.flatten(2)
        for level in self.architecture.spp_levels:
            # Only the places of the maxima come from torch's pooling, as its backward pass adds in an undefined order
            # on CUDA. That of gather is deterministic there on request; on a CPU it gives the same bits as fast.
            _, places = F.adaptive_max_pool2d(windows.detach(), level, return_indices=True)
            levels.append(cells.gather(2, places.flatten(2)).flatten(1))
        return torch.cat(levels, dim=1)

    def head(self, features: Tensor, factors: Factors | None = None) -> Tensor:
        """Return the logits (N, K) of features (N, bins·C).

        factors: dropout factors (training/data/augmentation.py); None outside of training.
        """
        values = features
        for index, name in enumerate(FC_LAYERS):
            own = self._layer(name)
            values = F.linear(self._received(name, values), own.weight, own.bias)
            self._call_hook(name, values)
            if name != FC_LAYERS[-1]:
                values = activate(values, self.architecture.activation, own.slope)
                if factors is not None:
                    values = values * factors[index]
        return values

    def _received(self, name: str, values: Tensor) -> Tensor:
        return values if self.input_hook is None else self.input_hook(name, values)

    def _call_hook(self, name: str, response: Tensor) -> None:
        if self.response_hook is not None:
            self.response_hook(name, response)

    def _layer(self, name: str) -> Layer:
        layer = self.get_submodule(name)
        assert isinstance(layer, Layer)
        return layer


def activate(values: Tensor, activation: Activation, slope: Tensor | None) -> Tensor:
    """Apply max(0, y) + a·min(0, y) (PReLU-nets, Eq. 1); channels are axis 1.

    slope: (C,) one slope a per channel, (1,) one for all channels, None if the activation learns none.
    """
    if slope is not None:
        return F.prelu(values, slope)
    return F.relu(values) if activation == "relu" else F.leaky_relu(values, LRELU_SLOPE)


def parameter_groups(
    net: PreluNet,
    weight_decay: float,
    *,
    decay_biases: bool = True,
    decay_slopes: bool = False,
    bias_rate: float = 1.0,
) -> list[dict[str, Any]]:
    """Return the optimizer's parameter groups; `rate_factor` of a group multiplies the learning rate.

    Slopes are not decayed unless `decay_slopes`: decay would push them to zero, and so PReLU to ReLU (PReLU-nets,
    section 2.1 "Optimization").
    """
    settings = {
        "weight": (weight_decay, 1.0),
        "bias": (weight_decay if decay_biases else 0.0, bias_rate),
        "slope": (weight_decay if decay_slopes else 0.0, 1.0),
    }
    groups: dict[tuple[float, float], list[nn.Parameter]] = {}
    for name, parameter in net.named_parameters():
        groups.setdefault(settings[name.rpartition(".")[2]], []).append(parameter)
    return [
        {"params": parameters, "weight_decay": decay, "rate_factor": factor}
        for (decay, factor), parameters in groups.items()
    ]


def load_tensors(net: PreluNet, tensors: Mapping[str, Float32Array]) -> None:
    net.load_state_dict({name: torch.from_numpy(tensor) for name, tensor in tensors.items()})


def network_from_checkpoint(checkpoint: Checkpoint) -> PreluNet:
    """Return the net of a checkpoint in eval mode.

    The net shares the checkpoint's memory (1.3 GB for model C), so training it would change both.
    """
    with torch.device("meta"):  # shapes without memory
        net = PreluNet(checkpoint.architecture, len(checkpoint.classes))
    net.load_state_dict({name: torch.from_numpy(tensor) for name, tensor in checkpoint.tensors.items()}, assign=True)
    return net.eval()


def tensors_of(net: PreluNet) -> dict[str, Float32Array]:
    """Return the net's parameters as float32 arrays for a checkpoint; a net on the CPU shares memory with them."""
    return {name: value.detach().to("cpu", torch.float32).numpy() for name, value in net.state_dict().items()}
