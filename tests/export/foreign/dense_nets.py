"""Miniatures of the usual convnets in torch, with all in which they differ for a dense head, and their windows."""

import warnings
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from prelunet.evaluator.contract import golden_image
from prelunet.training.importing.preprocessing import Preprocessing
from tests.export.foreign.foreign_nets import CLASSES, RGB

CROP = 48
Exporter = Literal["torchscript", "dynamo"]


class Residual(nn.Module):
    def __init__(self, into: int, out: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            *(nn.Conv2d(into, out, 3, stride, 1, bias=False), nn.BatchNorm2d(out), nn.ReLU()),
            *(nn.Conv2d(out, out, 3, 1, 1, bias=False), nn.BatchNorm2d(out)),
        )
        self.shortcut = nn.Sequential(nn.Conv2d(into, out, 1, stride, bias=False), nn.BatchNorm2d(out))

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.body(x) + self.shortcut(x))


class SqueezeExcite(nn.Module):
    """A depthwise convolution with a gate that sees the mean of the whole map."""

    def __init__(self, into: int, out: int, stride: int) -> None:
        super().__init__()
        self.expand = nn.Sequential(nn.Conv2d(into, 2 * into, 1, bias=False), nn.BatchNorm2d(2 * into), nn.SiLU())
        self.depthwise = nn.Conv2d(2 * into, 2 * into, 5, stride, 2, groups=2 * into)
        self.reduce, self.restore = nn.Conv2d(2 * into, 4, 1), nn.Conv2d(4, 2 * into, 1)
        self.project = nn.Conv2d(2 * into, out, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.nn.functional.silu(self.depthwise(self.expand(x)))
        gate = self.restore(torch.nn.functional.silu(self.reduce(x.mean((2, 3), keepdim=True))))
        projected = self.project(torch.sigmoid(gate) * x)  # the gate first
        assert isinstance(projected, Tensor)
        return projected


class ConvNext(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(width, width, 7, 1, 3, groups=width)
        self.mix = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        mixed = self.mix(self.depthwise(x).permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        assert isinstance(mixed, Tensor)
        return x + mixed


class ChannelNorm(nn.LayerNorm):
    """Layer normalization of (N, C, rows, columns) over C."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class Shuffle(nn.Module):
    """Mixes the channels of two groups, with the sides of the map in a reshape."""

    def forward(self, x: Tensor) -> Tensor:
        batch, channels, height, width = x.shape
        return x.view(batch, 2, channels // 2, height, width).transpose(1, 2).reshape(batch, channels, height, width)


def _resnet() -> tuple[nn.Module, nn.Module]:
    stem = (nn.Conv2d(3, 12, 7, 2, 3, bias=False), nn.BatchNorm2d(12), nn.ReLU(), nn.MaxPool2d(3, 2, 1))
    trunk = nn.Sequential(*stem, Residual(12, 12, 1), Residual(12, 20, 2))
    return trunk, nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(20, CLASSES))


def _efficientnet() -> tuple[nn.Module, nn.Module]:
    trunk = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), nn.SiLU(), SqueezeExcite(8, 12, 2), SqueezeExcite(12, 16, 2))
    return trunk, nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.2), nn.Linear(16, CLASSES))


def _vgg() -> tuple[nn.Module, nn.Module]:
    layers = [(3, 8), (8, 12), (12, 16)]
    trunk = nn.Sequential(
        *(part for into, out in layers for part in (nn.Conv2d(into, out, 3, 1, 1), nn.ReLU(), nn.MaxPool2d(2)))
    )
    hidden = (nn.Linear(16 * 36, 24), nn.ReLU(), nn.Dropout(), nn.Linear(24, 24), nn.ReLU(), nn.Dropout())
    return trunk, nn.Sequential(nn.AdaptiveAvgPool2d(6), nn.Flatten(), *hidden, nn.Linear(24, CLASSES))


def _convnext() -> tuple[nn.Module, nn.Module]:
    patches = (nn.Conv2d(3, 12, 4, 4), ChannelNorm(12), ConvNext(12))
    trunk = nn.Sequential(*patches, ChannelNorm(12), nn.Conv2d(12, 20, 2, 2), ConvNext(20))
    head = (nn.AdaptiveAvgPool2d(1), ChannelNorm(20), nn.Flatten(), nn.Linear(20, CLASSES))
    return trunk, nn.Sequential(*head)


def _shufflenet() -> tuple[nn.Module, nn.Module]:
    layers = (nn.Conv2d(3, 12, 4, 4), nn.ReLU(), Shuffle(), nn.Conv2d(12, 16, 2, 2, groups=2), nn.ReLU(), Shuffle())
    return nn.Sequential(*layers), nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, CLASSES))


KINDS = {"resnet": _resnet, "efficientnet": _efficientnet, "vgg": _vgg, "convnext": _convnext}
OF_ANY_SIZE = {**KINDS, "shufflenet": _shufflenet}  # those that an exporter must be given with dynamic sides


class Convnet(nn.Module):
    """trunk: image → feature map; head: one window of it → logits."""

    def __init__(self, trunk: nn.Module, head: nn.Module, window: int) -> None:
        super().__init__()
        self.trunk, self.head, self.window = trunk, head, window

    def forward(self, x: Tensor) -> Tensor:
        logits = self.head(self.trunk(x))
        assert isinstance(logits, Tensor)
        return logits

    def windows(self, pixels: np.ndarray, preprocessing: Preprocessing) -> np.ndarray:
        """Return the logits of each window of uint8 (H, W, 3), float64 (rows, columns, K), one window at a time."""
        x = torch.from_numpy(preprocessing.apply(pixels).transpose(2, 0, 1)[None].astype(np.float64))
        double, side = self.double(), self.window
        with torch.no_grad():
            cells = double.trunk(x)
            rows, columns = (length - side + 1 for length in cells.shape[2:])
            logits = [
                [double.head(cells[:, :, r : r + side, c : c + side])[0].numpy() for c in range(columns)]
                for r in range(rows)
            ]
        self.float()
        return np.array(logits)


def convnet(kind: str) -> Convnet:
    """Return a net in evaluation mode, with weights and statistics that differ between channels."""
    torch.manual_seed(7)
    net = Convnet(*OF_ANY_SIZE[kind](), window=6).eval()
    for name, values in net.state_dict().items():
        if name.endswith("running_mean"):
            nn.init.uniform_(values, -0.3, 0.3)
        elif name.endswith("running_var"):
            nn.init.uniform_(values, 0.5, 2)
        elif values.ndim == 1:
            nn.init.uniform_(values, 0.4 if "norm" in name or name.endswith("weight") else -0.3, 1.2)
    last = list(net.head.modules())[-1]
    assert isinstance(last, nn.Linear)
    logits = net.windows(golden_image(97, 83), RGB)
    spread, mean = (torch.from_numpy(each).float() for each in (logits.std((0, 1)), logits.mean((0, 1))))
    with torch.no_grad():  # logits of each class that differ by about 1/4 between windows
        last.weight /= 4 * spread[:, None]
        last.bias.copy_((last.bias - mean) / (4 * spread))
    return net


def export(net: nn.Module, path: Path, exporter: Exporter, *, images: int = 1, **options: Any) -> Path:
    """Export a net as its users do: by default one image of a fixed size."""
    with warnings.catch_warnings(action="ignore"):  # about the older exporter, and of both about our nets
        torch.onnx.export(
            net, (torch.zeros(images, 3, CROP, CROP),), str(path), input_names=["x"], output_names=["y"],
            dynamo=exporter == "dynamo", **({"verbose": False, "external_data": False} if exporter == "dynamo" else {}),
            **options,
        )  # fmt: skip
    return path
