"""The fastest dense evaluation in torch that we know: the engine's competitor on CPUs and GPUs.

The convolutions run once over the whole image. Every bin of the pyramid is one stride-1 max pool for all windows; each
pool is computed from a smaller one (`export.dense.pyramid`). The bins of each window are gathered, channels last, and
multiplied by fc1, fc2 and fc3 as three matrix products. Other exact forms were slower: milliseconds of pyramid and fc1
alone, model A, float32, two views, torch 2.13 on 2 AVX-512 cores that were not idle (2026-11-20; minimum of four,
channels first and last):

    view       gathered, oneDNN's product   dilated convolutions   gathered, 1x1 convolution   gathered, F.linear (MKL)
    256x341    35, 44                       183, 192               178, 179                    81, 86
    384x512    253, 271                     430, 434               381, 407                    523, 542
    480x640    562, 606                     740, 771               657, 693                    1109, 1176

`tests/benchmarks/test_engine.py` compares it with `training.net.dense_reference`, window by window, in float64.
"""

import warnings
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from prelunet.evaluator.architectures import Architecture, Pool
from prelunet.export.dense.build import fc1_channel_last
from prelunet.export.dense.pyramid import plan_pools, pyramid_bins
from prelunet.training.net.network import Layer, PreluNet, activate


class DenseNet(nn.Module):
    """A net over whole images: from pixels to the mean score of all windows.

    net: source of the weights, whose memory is shared where dtype and layout allow it;
    mean: float (3,), R, G, B, subtracted in float32 (float64 for dtype float64) before pixels become `dtype`;
    dtype: of the arithmetic, except mean, softmax and average; channels_last: layout of the feature maps;
    onednn: use oneDNN's matrix products instead of MKL's, which take twice as long in float32 on CPUs other than
    Intel's; only for float32 on a CPU.
    """

    def __init__(
        self,
        net: PreluNet,
        mean: np.ndarray,
        *,
        dtype: torch.dtype = torch.float32,
        channels_last: bool = False,
        onednn: bool = False,
    ) -> None:
        super().__init__()
        assert mean.shape == (3,), f"mean must have one value per channel, not shape {mean.shape}"
        self.architecture = net.architecture
        self.dtype = dtype
        self.layout = torch.channels_last if channels_last else torch.contiguous_format
        exact = torch.float64 if dtype == torch.float64 else torch.float32
        self.mean: Tensor
        self.register_buffer("mean", torch.as_tensor(mean, dtype=exact).reshape(1, 3, 1, 1))
        self.trunk = nn.Sequential(*self._trunk_of(net))
        self.head = nn.Sequential(*self._head_of(net, onednn=onednn))

    def keep_from_compiler(self) -> None:
        """Let torch.compile leave out what it would slow down. Imports the compiler, which takes a while."""
        # The pyramid's 63 slices would become 63 kernels and take minutes to compile; one copy is enough.
        # Instead of oneDNN's products it would use MKL's, at half the speed.
        slower = [(self, "pyramid"), *((layer, "forward") for layer in self.head if isinstance(layer, _Product))]
        for module, method in slower:
            setattr(module, method, torch.compiler.disable(getattr(module, method)))  # type: ignore[no-untyped-call]

    @torch.inference_mode()
    def scores(self, images: np.ndarray) -> np.ndarray:
        """Return the scores, (N, K), of images of one size, uint8 (N, H, W, 3), on the net's device."""
        scores: np.ndarray = self(torch.from_numpy(images).to(self.mean.device)).cpu().numpy()
        return scores

    def forward(self, images: Tensor) -> Tensor:
        """Return mean scores, (N, K), of uint8 (N, H, W, 3) or float (N, 3, H, W) pixels, RGB, 0-255, at any size.

        The scores are float32, or float64 for dtype float64.
        """
        pixels = images.permute(0, 3, 1, 2) if images.dtype == torch.uint8 else images
        centered = (pixels - self.mean).to(self.dtype).contiguous(memory_format=self.layout)
        windows = self.pyramid(self.trunk(centered))
        logits = self.head(windows.flatten(0, 2)).to(self.mean.dtype)
        scores: Tensor = logits.softmax(1).reshape(images.shape[0], -1, logits.shape[1]).mean(1)
        return scores

    def pyramid(self, feature_map: Tensor) -> Tensor:
        """Return every window's bins, (N, rows, columns, bins·C), of a feature map (N, C, h, w).

        Uses the fastest form of each runtime: torch pools channels last in a fifteenth of the time, and two dilated
        cells in two thirds of the time of a full kernel; OpenVINO takes 15 times as long for dilated cells.
        """
        window = self.architecture.window
        bins = pyramid_bins(window, self.architecture.spp_levels)
        pools = {(1, 1): feature_map.contiguous(memory_format=torch.channels_last)}
        exported = torch.onnx.is_in_onnx_export()
        for step in plan_pools({(b.height, b.width) for b in bins}):
            height, width = step.kernel
            kernel, dilation = (height, width), (1, 1)
            if not exported:
                kernel, dilation = (min(2, height), min(2, width)), (max(1, height - 1), max(1, width - 1))
            pools[step.size] = F.max_pool2d(pools[step.base], kernel, stride=1, dilation=dilation)
        last = {size: pool.permute(0, 2, 3, 1) for size, pool in pools.items()}
        parts = []
        for b in bins:
            pool = last[b.height, b.width]
            rows, columns = pool.shape[1] - window + b.height, pool.shape[2] - window + b.width
            parts.append(pool[:, b.row : b.row + rows, b.column : b.column + columns])
        return torch.cat(parts, dim=3)

    def _trunk_of(self, net: PreluNet) -> list[nn.Module]:
        layers: list[nn.Module] = []
        for layer in net.architecture.trunk:
            if isinstance(layer, Pool):
                layers.append(nn.MaxPool2d(layer.kernel, layer.stride))
                continue
            own = _layer(net, layer.name)
            out, into = own.weight.shape[:2]
            conv = nn.Conv2d(into, out, layer.kernel, layer.stride, layer.pad, device="meta")
            weight = own.weight.to(self.dtype).contiguous(memory_format=self.layout)
            conv.weight, conv.bias = _fixed(weight), _fixed(own.bias.to(self.dtype))
            layers += [conv, _Activation(net.architecture, own, self.dtype)]
        return layers

    def _head_of(self, net: PreluNet, *, onednn: bool) -> list[nn.Module]:
        layers: list[nn.Module] = []
        for name in ("fc1", "fc2", "fc3"):
            own = _layer(net, name)
            weight = own.weight.detach()
            if name == "fc1":
                weight = torch.from_numpy(fc1_channel_last(weight.cpu().numpy(), net.architecture)).t()
            layers.append(_Product(weight.to(self.dtype).contiguous(), own.bias.to(self.dtype), onednn=onednn))
            if name != "fc3":
                layers.append(_Activation(net.architecture, own, self.dtype))
        return layers


class _Product(nn.Module):
    """A fully connected layer on rows (M, in) → (M, out)."""

    def __init__(self, weight: Tensor, bias: Tensor, *, onednn: bool) -> None:
        super().__init__()
        self.weight, self.bias = _fixed(weight), _fixed(bias)
        self.onednn = onednn

    def forward(self, rows: Tensor) -> Tensor:
        if self.onednn:
            product: Tensor = _onednn_product(rows, self.weight, self.bias)
            return product
        return F.linear(rows, self.weight, self.bias)


def _onednn_product(rows: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    product: Tensor = torch.ops.mkldnn._linear_pointwise(rows, weight, bias, "none", [], "")
    return product


class _Activation(nn.Module):
    """The activation of a layer; axis 1 holds the channels."""

    def __init__(self, architecture: Architecture, layer: Layer, dtype: torch.dtype) -> None:
        super().__init__()
        self.activation = architecture.activation
        self.slope = None if layer.slope is None else _fixed(layer.slope.to(dtype))

    def forward(self, values: Tensor) -> Tensor:
        return activate(values, self.activation, self.slope)


def _layer(net: PreluNet, name: str) -> Layer:
    layer = net.get_submodule(name)
    assert isinstance(layer, Layer)
    return layer


def _fixed(values: Tensor) -> nn.Parameter:
    return nn.Parameter(values.detach(), requires_grad=False)


def export_plain(net: DenseNet, path: Path) -> None:
    """Export the net to ONNX as one would without this project: input float (N, 3, H, W), dynamic sizes, no masks."""
    side = net.architecture.crop + 3 * net.architecture.trunk_stride
    pixels = torch.zeros(2, 3, side, side + net.architecture.trunk_stride)
    axes = {"images": {0: "N", 2: "H", 3: "W"}, "scores": {0: "N"}}
    with warnings.catch_warnings(), torch.inference_mode():
        warnings.simplefilter("ignore")  # this exporter is deprecated, but it needs no further package
        torch.onnx.export(net, (pixels,), str(path), dynamo=False, opset_version=18, dynamic_axes=axes,
                          input_names=["images"], output_names=["scores"])  # fmt: skip
