"""Nets of torchvision with random weights and the transforms of their published weights, on Pillow images."""

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torchvision import models

from benchmarks.parity.makers.net import CLASSES, MakerNet, Pixels, stated
from benchmarks.parity.makers.torch_export import discriminating, export, runner, stacked

# Name, weights whose transforms are used, options beside --preset torchvision, wrong options. Deeper nets with random
# weights, such as regnet_y_400mf, are left out: torch's own float32 differs from its float64 by more than 1e-5 there.
NETS: tuple[tuple[str, str, str, tuple[str, ...]], ...] = (
    (
        "resnet18", "IMAGENET1K_V1", "",
        (
            *("--interpolation bicubic", "--antialias none", "--channels bgr"),
            *("--resize squash", "--scale 232", "--mean 0.5"),
        ),
    ),
    ("mobilenet_v3_small", "IMAGENET1K_V1", "", ()),
    ("mobilenet_v3_large", "IMAGENET1K_V2", "--scale 232", ("--scale 256",)),
    ("efficientnet_b0", "IMAGENET1K_V1", "--interpolation bicubic", ("--interpolation bilinear",)),
    ("efficientnet_b1", "IMAGENET1K_V2", "--scale 255", ()),
    ("swin_t", "IMAGENET1K_V1", "--interpolation bicubic --scale 232", ()),
)  # fmt: skip


def nets(folder: Path, images: Sequence[Path]) -> Iterator[MakerNet]:
    for name, weights, words, wrong in NETS:
        transforms = models.get_model_weights(name)[weights].transforms()
        net = models.get_model(name, weights=None, num_classes=len(CLASSES)).eval()
        read = partial(_read, transforms)
        discriminating(net, stacked(read, images), net)
        file = folder / f"{name}.onnx"
        export(net, read(images[0]), file)
        size, filter_ = transforms.resize_size[0], transforms.interpolation.value
        yield MakerNet(
            f"torchvision {name}",
            f"{name}, {weights}: {filter_}, shorter side {size}, crop of {transforms.crop_size[0]}",
            file,
            runner(net, read),
            stated(f"--preset torchvision {words}", CLASSES, folder / "classes.txt"),
            pixels=Pixels(transforms.mean, transforms.std),
            wrong=wrong,
        )


def _read(transforms: Any, image: Path) -> torch.Tensor:
    values: torch.Tensor = transforms(Image.open(image).convert("RGB"))
    return values[None]
