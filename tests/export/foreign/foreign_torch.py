"""A third-party PyTorch implementation of one of our architectures, and the import of its state dict."""

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from msgspec.structs import replace
from torch import Tensor, nn

from prelunet.evaluator.architectures import Activation, Architecture, Conv, parameter_shapes
from prelunet.evaluator.contract import ClassEntry
from prelunet.training.importing.import_net import ImportResult, import_net
from prelunet.training.importing.preprocessing import Preprocessing
from tests.helpers.tiny_nets import CLASSES, TINY

ENTRIES = tuple(ClassEntry(f"n{index:08}", f"thing {index}") for index in range(CLASSES))
PLAIN = Preprocessing((123.0, 117.0, 104.0), (1.0, 1.0, 1.0), pixel_range=255)


class ForeignNet(nn.Module):
    """A third-party implementation of our architecture: Sequentials, nn.PReLU, other parameter names."""

    def __init__(self, net: Architecture = TINY, classes: int = CLASSES, slopes: str = "channel") -> None:
        super().__init__()
        torch.manual_seed(3)
        self.levels = net.spp_levels

        def activation(width: int) -> nn.Module:
            return nn.ReLU() if slopes == "none" else nn.PReLU(1 if slopes == "shared" else width)

        layers: list[nn.Module] = []
        channels = 3
        for layer in net.trunk:
            if isinstance(layer, Conv):
                conv = nn.Conv2d(channels, layer.channels, layer.kernel, layer.stride, layer.pad)
                layers += [conv, activation(layer.channels)]
                channels = layer.channels
            else:
                layers.append(nn.MaxPool2d(layer.kernel, layer.stride))
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Sequential(
            *(nn.Linear(net.bins * net.channels, net.hidden), activation(net.hidden)),
            *(nn.Linear(net.hidden, net.hidden), activation(net.hidden)),
            nn.Linear(net.hidden, classes),
        )
        for name, parameter in self.named_parameters():  # all different, with slopes that differ between channels
            low = 0.05 if "weight" in name and parameter.ndim == 1 else -0.3
            nn.init.uniform_(parameter, low, 0.5)

    def forward(self, x: Tensor) -> Tensor:
        maps = self.features(x)
        pooled = [F.adaptive_max_pool2d(maps, level).flatten(1) for level in self.levels]
        result = self.classifier(torch.cat(pooled, 1))
        assert isinstance(result, Tensor)
        return result


def tiny_import(path: Path, activation: Activation = "prelu", **options: Any) -> ImportResult:
    return import_net(path, replace(TINY, activation=activation), ENTRIES, PLAIN, **options)


def our_names(net: Architecture = TINY, classes: int = CLASSES) -> dict[str, Tensor]:
    """Return a foreign net's tensors under our names."""
    return dict(zip(parameter_shapes(net, classes), ForeignNet(net, classes).state_dict().values(), strict=True))
