"""Nets of timm with random weights, with the config.json that timm writes, read through timm's own transforms."""

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import timm
import torch
from PIL import Image
from timm.models._hub import save_config_for_hf

from benchmarks.parity.makers.net import CLASSES, MakerNet, Pixels
from benchmarks.parity.makers.torch_export import discriminating, export, runner, stacked

# Name, what differs from the published preprocessing, what is to be seen; and wrong options.
WRONG = {
    "test_vit": ("--interpolation bilinear", "--mean 0.4"),
    "test_convnext": ("--resize shorter",),
    "test_byobnet": ("--pad-color 0",),
    "test_mambaout": ("--interpolation bilinear",),
}
NETS: tuple[tuple[str, dict[str, Any], str], ...] = (
    ("mobilenetv3_small_050", {}, "as published: bicubic, crop_pct 0.875"),
    ("test_vit", {}, "as published: bicubic, mean 0.5, crop_pct 0.95, 160 pixels"),
    ("test_resnet", {}, "as published: bilinear, mean 0.5, crop_pct 0.95, 160 pixels"),
    ("resnet10t", {}, "as published: 176 pixels, and other values for tests"),
    ("test_convnext", {"crop_mode": "squash", "crop_pct": 1.0}, "squash, as ConvNeXt at 384"),
    ("test_efficientnet", {"crop_mode": "squash", "crop_pct": 0.9}, "squash to more than the crop"),
    ("test_byobnet", {"crop_mode": "border", "crop_pct": 1.0}, "border, filled with the mean"),
    ("test_nfnet", {"crop_mode": "border", "crop_pct": 0.9}, "border and crop, which no published net of timm has"),
    ("test_mambaout", {"interpolation": "nearest"}, "nearest filter"),
    ("test_vit2", {"input_size": (1, 160, 160), "mean": (0.5,), "std": (0.5,)}, "one channel"),
)


def nets(folder: Path, images: Sequence[Path]) -> Iterator[MakerNet]:
    for name, changed, origin in NETS:
        config = {**vars(timm.models.get_pretrained_cfg(name)), **changed}
        channels = config["input_size"][0]
        torch.manual_seed(1)
        net = timm.create_model(name, num_classes=len(CLASSES), in_chans=channels).eval()
        data = timm.data.resolve_data_config(changed, model=net)
        read = partial(_read, timm.data.create_transform(**data), "L" if channels == 1 else "RGB")
        discriminating(net, stacked(read, images), net)
        place = folder / f"{name}-files"
        place.mkdir(exist_ok=True)
        export(net, read(images[0]), place / "model.onnx")
        save_config_for_hf(net, place / "config.json", {"label_names": CLASSES}, data_config=changed)
        yield MakerNet(
            f"timm {name}",
            origin,
            place,
            runner(net, read),
            wrong=WRONG.get(name, ()),
            refused="'crop_mode' is border" if name == "test_nfnet" else "",
            pixels=Pixels(data["mean"], data["std"], channels="gray" if channels == 1 else "rgb"),
        )


def _read(transform: Any, mode: str, image: Path) -> torch.Tensor:
    values: torch.Tensor = transform(Image.open(image).convert(mode))
    return values[None]
