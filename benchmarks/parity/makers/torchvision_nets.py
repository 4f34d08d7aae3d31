"""Nets of torchvision with random weights and the transforms of their published weights, on Pillow images."""

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torchvision import models

from benchmarks.parity.makers.net import MakerNet, Pixels
from benchmarks.parity.makers.torch_export import CLASSES, discriminating, export, runner, stacked, write_classes

# Name, weights whose transforms are used, options beside --preset torchvision, protocol.
NETS: tuple[tuple[str, str, tuple[str, ...], str | None], ...] = (
    ("resnet18", "IMAGENET1K_V1", (), None),
    ("mobilenet_v3_small", "IMAGENET1K_V1", (), None),
    ("efficientnet_b0", "IMAGENET1K_V1", ("--interpolation", "bicubic"), None),
    ("efficientnet_b1", "IMAGENET1K_V2", (), "center-255"),
    ("regnet_y_400mf", "IMAGENET1K_V2", (), "center-232"),
    ("swin_t", "IMAGENET1K_V1", ("--interpolation", "bicubic"), "center-232"),
)
CONTROLS = {
    "resnet18": {
        "bicubic": ("--interpolation", "bicubic"),
        "BGR": ("--channels", "bgr"),
        "squashed": ("--resize", "squash"),
        "mean 0.5": ("--mean", "0.5"),
    },
    "efficientnet_b0": {"bilinear": ("--interpolation", "bilinear")},
}


def nets(folder: Path, images: Sequence[Path]) -> Iterator[MakerNet]:
    for name, weights, words, protocol in NETS:
        transforms = models.get_model_weights(name)[weights].transforms()
        net = models.get_model(name, weights=None, num_classes=len(CLASSES)).eval()
        read = partial(_read, transforms)
        discriminating(net, stacked(read, images), net)
        file = folder / f"{name}.onnx"
        export(net, read(images[0]), file)
        options = ("--preset", "torchvision", *words, *write_classes(folder))
        size, filter_ = transforms.resize_size[0], transforms.interpolation.value
        yield MakerNet(
            f"torchvision {name}",
            f"{name}, {weights}: {filter_}, shorter side {size}, crop of {transforms.crop_size[0]}",
            file,
            runner(net, read),
            options,
            protocol=protocol,
            pixels=Pixels(transforms.mean, transforms.std),
            controls={wrong: (*options, *more) for wrong, more in CONTROLS.get(name, {}).items()},
        )


def _read(transforms: Any, image: Path) -> torch.Tensor:
    return transforms(Image.open(image).convert("RGB"))[None]
