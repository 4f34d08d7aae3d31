"""The net of the rehearsal, adopted as a user would: MobileNet of a quarter of the width for crops of 128 pixels.

Howard et al. 2017, table 1, with 14 million multiply-adds and the batch norms folded into the convolutions. It was
never trained: the convolutions are random, and the score of a class grows with the nearness of the features to those of
the class's first picture. So the answers differ between images, and the error is neither 0 nor 100 %.
"""

import subprocess
import warnings
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import nn

from benchmarks.common.nets import CLASSES, SPREAD
from benchmarks.common.results import environment
from benchmarks.common.server_process import PRELUNET
from benchmarks.rehearsal.images import pixels
from prelunet.training.importing.preprocessing import PRESETS

CROP = 128
WIDTH = 256  # channels of the last feature map
BORDER = (1 - 224 / 256) / 2  # share that protocol `center` cuts off at each side
# Channels and stride of the depthwise separable convolutions.
BLOCKS = ((16, 1), (32, 2), (32, 1), (64, 2), (64, 1), (128, 2), *5 * [(128, 1)], (WIDTH, 2), (WIDTH, 1))


def write_model(folder: Path, seed: int) -> Path:
    """Write the net as ONNX, adopt it, and return the model file."""
    net = _net(_first_pictures(seed), seed)
    exported, model = folder / "mobilenet.onnx", folder / "mobilenet-adopted.onnx"
    with warnings.catch_warnings(action="ignore"):  # about the older exporter
        torch.onnx.export(
            net, (torch.zeros(2, 3, CROP, CROP),), str(exported), dynamo=False, input_names=["images"],
            output_names=["logits"], dynamic_axes={"images": {0: "batch"}, "logits": {0: "batch"}},
        )  # fmt: skip
    words = ["adopt", str(exported), "--preset", "torchvision", "--classes", "imagenet-1k", "-o", str(model)]
    subprocess.run([*PRELUNET, *words], check=True, env=environment(), stdout=subprocess.DEVNULL)
    return model


def _first_pictures(seed: int) -> torch.Tensor:
    """Return the central crops of the first picture of each class, preprocessed, float32 (1000, 3, CROP, CROP)."""
    crops = []
    for number in range(CLASSES):
        picture = Image.fromarray(pixels(number, seed))
        crop = ImageOps.fit(picture, (CROP, CROP), Image.Resampling.BILINEAR, BORDER)
        crops.append(PRESETS["torchvision"].apply(np.asarray(crop)).transpose(2, 0, 1))
    return torch.from_numpy(np.stack(crops))


def _net(pictures: torch.Tensor, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    layers, channels = [*_convolution(3, 8, 2)], 8
    for out, stride in BLOCKS:
        layers += [*_convolution(channels, channels, stride, groups=channels), *_convolution(channels, out, 1, side=1)]
        channels = out
    trunk = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())
    head = nn.Linear(WIDTH, CLASSES)
    with torch.inference_mode():
        features = torch.cat([trunk(part) for part in (pictures[n : n + 100] for n in range(0, CLASSES, 100))])
    deviation, mean = torch.std_mean(features, 0)
    centers = (features - mean) / (deviation + 1e-9)  # (classes, WIDTH)
    offsets = (centers**2).sum(1) / 2  # with them the logit is largest where the distance is smallest
    scale = SPREAD / (centers @ centers.T - offsets).std()
    with torch.no_grad():
        head.weight.copy_(scale * centers / (deviation + 1e-9))
        head.bias.copy_(-scale * (centers @ (mean / (deviation + 1e-9)) + offsets))
    return nn.Sequential(trunk, head).eval()


def _convolution(into: int, out: int, stride: int, *, side: int = 3, groups: int = 1) -> tuple[nn.Module, ...]:
    convolution = nn.Conv2d(into, out, side, stride, side // 2, groups=groups)
    nn.init.kaiming_normal_(convolution.weight, nonlinearity="relu")
    return convolution, nn.ReLU()
