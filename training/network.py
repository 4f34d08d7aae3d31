"""The torch net of an `Architecture`: trunk, spatial pyramid, fully connected head.

Its parameters are exactly those of a checkpoint (`training.architectures.parameter_shapes`), so that `state_dict()`
needs no renaming anywhere.
"""

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from training.architectures import LRELU_SLOPE, Activation, Architecture, Pool, parameter_shapes
from training.checkpoints import Checkpoint, FloatArray


class Layer(nn.Module):
    """The parameters of one layer under their names in a checkpoint; slope is None where none is learned."""

    weight: Tensor
    bias: Tensor
    slope: Tensor | None

    def __init__(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        super().__init__()
        for name in ("weight", "bias", "slope"):
            self.register_parameter(name, nn.Parameter(torch.zeros(shapes[name])) if name in shapes else None)


class PreluNet(nn.Module):
    """A net of the paper; all parameters are zero until `load_tensors` or `load_state_dict` fills them.

    dropout: probability, on the outputs of fc1 and fc2, in training only (PReLU-nets, section 4 "Training").
    """

    def __init__(self, architecture: Architecture, classes: int, dropout: float = 0.5) -> None:
        super().__init__()
        self.architecture = architecture
        self.dropout = dropout
        layers: dict[str, dict[str, tuple[int, ...]]] = {}
        for name, shape in parameter_shapes(architecture, classes).items():
            layer, kind = name.split(".")
            layers.setdefault(layer, {})[kind] = shape
        for layer, shapes in layers.items():
            self.add_module(layer, Layer(shapes))

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits (N, K) of training crops: float (N, 3, crop, crop), mean already subtracted.

        The feature map must be exactly one window; larger images go through `training.dense.dense_windows`.
        """
        feature_map = self.trunk(images)
        window = self.architecture.window
        assert feature_map.shape[2:] == (window, window), f"{tuple(images.shape)} is not one crop; see dense_windows"
        return self.head(self.pyramid(feature_map))

    def trunk(self, images: Tensor) -> Tensor:
        """Return the feature map (N, C, rows, columns) of float images (N, 3, height, width), mean subtracted."""
        maps = images
        for layer in self.architecture.trunk:
            if isinstance(layer, Pool):
                maps = F.max_pool2d(maps, layer.kernel, layer.stride)
            else:
                own = self._layer(layer.name)
                maps = F.conv2d(maps, own.weight, own.bias, stride=layer.stride, padding=layer.pad)
                maps = activate(maps, self.architecture.activation, own.slope)
        return maps

    def pyramid(self, windows: Tensor) -> Tensor:
        """Pool windows (N, C, w, w) into features (N, bins·C): levels in order, each flattened (channel, row, column).

        Bin i of n over a cells is [floor(i·a/n), ceil((i+1)·a/n)), counted from 0 (SPP-net, appendix A), which is
        torch's adaptive pooling; maxima start at −inf, since after a PReLU a bin may be all negative.
        """
        levels = [F.adaptive_max_pool2d(windows, level).flatten(1) for level in self.architecture.spp_levels]
        return torch.cat(levels, dim=1)

    def head(self, features: Tensor) -> Tensor:
        """Return the logits (N, K) of features (N, bins·C)."""
        hidden = features
        for name in ("fc1", "fc2"):
            own = self._layer(name)
            hidden = activate(F.linear(hidden, own.weight, own.bias), self.architecture.activation, own.slope)
            hidden = F.dropout(hidden, self.dropout, self.training)
        fc3 = self._layer("fc3")
        return F.linear(hidden, fc3.weight, fc3.bias)

    def _layer(self, name: str) -> Layer:
        layer = self.get_submodule(name)
        assert isinstance(layer, Layer)
        return layer


def activate(values: Tensor, activation: Activation, slope: Tensor | None) -> Tensor:
    """Apply max(0, y) + a·min(0, y) (PReLU-nets, Eq. 1); channels are axis 1.

    slope: (C,) one a per channel, (1,) one for all, None for the activations that learn none.
    """
    if slope is not None:
        return F.prelu(values, slope)
    return F.relu(values) if activation == "relu" else F.leaky_relu(values, LRELU_SLOPE)


def parameter_groups(net: PreluNet, weight_decay: float) -> list[dict[str, Any]]:
    """Return the parameters in groups for an optimizer: slopes are never decayed.

    Decay would push slopes to zero and so PReLU to ReLU (PReLU-nets, section 2.1 "Optimization").
    """
    slopes = [parameter for name, parameter in net.named_parameters() if name.endswith(".slope")]
    others = [parameter for name, parameter in net.named_parameters() if not name.endswith(".slope")]
    groups = [{"params": others, "weight_decay": weight_decay}, {"params": slopes, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def load_tensors(net: PreluNet, tensors: Mapping[str, FloatArray]) -> None:
    """Copy a checkpoint's tensors into a net of the same architecture."""
    net.load_state_dict({name: torch.from_numpy(tensor) for name, tensor in tensors.items()})


def network_from_checkpoint(checkpoint: Checkpoint) -> PreluNet:
    """Return the net of a checkpoint in eval mode.

    The net uses the checkpoint's memory (model C has 1.3 GB of it): training it would change both.
    """
    with torch.device("meta"):  # shapes without memory
        net = PreluNet(checkpoint.architecture, len(checkpoint.classes))
    net.load_state_dict({name: torch.from_numpy(tensor) for name, tensor in checkpoint.tensors.items()}, assign=True)
    return net.eval()


def tensors_of(net: PreluNet) -> dict[str, FloatArray]:
    """Return the net's parameters as float32 arrays for a checkpoint; a net on the CPU shares its memory with them."""
    return {name: value.detach().to("cpu", torch.float32).numpy() for name, value in net.state_dict().items()}
