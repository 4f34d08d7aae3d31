"""Nets of transformers with random weights, with the files that `save_pretrained` writes, and no options.

Read as transformers' own loop for images does: `load_image`, then the folder's AutoImageProcessor, once with its
default backend, which resizes tensors, and once with Pillow. Of the first, the distance to the second is recorded.
"""

import re
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers as hf
from transformers.image_utils import load_image

from benchmarks.parity.makers.net import CLASSES, MakerNet, Pixels
from benchmarks.parity.makers.torch_export import Logits, discriminating, export, runner, stacked

SMALL: dict[str, Any] = {
    "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128
}  # fmt: skip
IMAGENET: dict[str, Any] = {"image_mean": [0.485, 0.456, 0.406], "image_std": [0.229, 0.224, 0.225]}
REFUSED = ("LeViT", "EfficientNet", "MobileViT")  # their processors do more than their files say
WRONG = {
    "ViT": ("--interpolation bicubic", "--resize shorter"),
    "ConvNeXT 384": ("--resize shorter",),
    "DeiT": ("--scale 224",),
    "CLIP": ("--scale 256", "--mean 0.5"),
}


def _described() -> Iterator[tuple[str, str, Any, Any, Any]]:
    """Yield name, what is to be seen, configuration, net and image processor of each."""
    yield ("ViT", "bilinear squash to 224", hf.ViTConfig(**SMALL), hf.ViTForImageClassification, hf.ViTImageProcessor())
    swin: dict[str, Any] = {"embed_dim": 24, "depths": [1, 1, 1, 1], "num_heads": [1, 2, 4, 8]}
    yield (
        "Swin", "bicubic squash to 224", hf.SwinConfig(**swin), hf.SwinForImageClassification,
        hf.ViTImageProcessor(resample=3, **IMAGENET),
    )  # fmt: skip
    for side, origin in ((224, "bicubic, crop_pct 0.875"), (384, "bicubic squash from 384 on")):
        convnext = hf.ConvNextConfig(hidden_sizes=[16, 32, 48, 64], depths=[1, 1, 1, 1], layer_scale_init_value=0.5)
        processor = hf.ConvNextImageProcessor(size={"shortest_edge": side}, **IMAGENET)
        yield f"ConvNeXT {side}", origin, convnext, hf.ConvNextForImageClassification, processor
    resnet = hf.ResNetConfig(embedding_size=16, hidden_sizes=[16, 32, 48, 64], depths=[1, 1, 1, 1], layer_type="basic")
    processor = hf.ConvNextImageProcessor(size={"shortest_edge": 224}, crop_pct=0.95, resample=2, **IMAGENET)
    yield "ResNet", "bilinear, crop_pct 0.95: 235 pixels", resnet, hf.ResNetForImageClassification, processor
    yield (
        "ResNet, MobileNetV2's processor", "bilinear, shorter side 256, crop of 224", resnet,
        hf.ResNetForImageClassification, hf.MobileNetV2ImageProcessor(),
    )  # fmt: skip
    yield (
        "BEiT",
        "bicubic squash to 224",
        hf.BeitConfig(**SMALL),
        hf.BeitForImageClassification,
        hf.BeitImageProcessor(),
    )
    yield (
        "DeiT", "bicubic squash to 256, crop of 224", hf.DeiTConfig(**SMALL), hf.DeiTForImageClassification,
        hf.DeiTImageProcessor(),
    )  # fmt: skip
    clip = hf.CLIPConfig(vision_config={**SMALL, "patch_size": 32}, text_config=SMALL)
    yield (
        "CLIP",
        "bicubic, shorter side 224, crop of 224",
        clip,
        hf.CLIPForImageClassification,
        hf.CLIPImageProcessor(),
    )
    levit = hf.LevitConfig(
        hidden_sizes=[32, 48, 64], num_attention_heads=[2, 3, 4], depths=[1, 1, 1], key_dim=[8, 8, 8]
    )
    yield (
        "LeViT", "its processor resizes to 256/224 of the size stated", levit, hf.LevitForImageClassification,
        hf.LevitImageProcessor(),
    )  # fmt: skip
    efficientnet = hf.EfficientNetConfig(width_coefficient=0.25, depth_coefficient=0.25, hidden_dim=320, image_size=224)
    yield (
        "EfficientNet", "its processor divides by the standard deviation twice (include_top)", efficientnet,
        hf.EfficientNetForImageClassification, hf.EfficientNetImageProcessor(size={"height": 224, "width": 224}),
    )  # fmt: skip
    mobilevit = hf.MobileViTConfig(
        hidden_sizes=[24, 32, 40], neck_hidden_sizes=[8, 12, 16, 24, 32, 40, 80], expand_ratio=2.0
    )
    yield (
        "MobileViT", "its processor flips the channels to BGR and does not normalize", mobilevit,
        hf.MobileViTForImageClassification, hf.MobileViTImageProcessor(),
    )  # fmt: skip


def nets(folder: Path, images: Sequence[Path]) -> Iterator[MakerNet]:
    for name, origin, config, build, processor in _described():
        config._attn_implementation = "eager"  # Swin's other one has no ONNX form
        config.id2label = dict(enumerate(CLASSES))
        config.label2id = {label: number for number, label in enumerate(CLASSES)}
        torch.manual_seed(1)
        net = Logits(build(config)).eval()
        place = folder / f"{re.sub(r'[^a-z0-9]+', '-', name.lower())}-files"
        processor.save_pretrained(place)
        config.architectures = [build.__name__]
        config.save_pretrained(place)
        first = partial(read, hf.AutoImageProcessor.from_pretrained(place))
        discriminating(net, stacked(first, images), net)
        export(net, first(images[0]), place / "model.onnx")
        plain = name != "MobileViT"
        pixels = Pixels(processor.image_mean, processor.image_std) if plain else Pixels(channels="bgr")
        tensors, pillow = (
            runner(net, partial(read, hf.AutoImageProcessor.from_pretrained(place, backend=backend)))
            for backend in ("torchvision", "pil")
        )
        if name in REFUSED:
            yield MakerNet(
                f"transformers {name}", origin, place, pillow, pixels=pixels, refused="'image_processor_type' is"
            )
            continue
        yield MakerNet(
            f"transformers {name}, tensors", origin, place, tensors, resizer="tensors", pixels=pixels, other=pillow
        )
        yield MakerNet(
            f"transformers {name}, Pillow", origin, place, pillow, ("--antialias", "pillow"), pixels=pixels,
            wrong=WRONG.get(name, ()),
        )  # fmt: skip


def read(processor: Any, image: Path) -> torch.Tensor:
    return torch.as_tensor(processor(load_image(str(image)), return_tensors="pt")["pixel_values"])
