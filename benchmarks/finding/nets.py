"""Small nets trained on photos that were prepared in different ways, and the same with secrets in their first layer.

The photos are the squares of imagenette-128, cut to 128x96 and 96x128 in turn, so that the shorter side, squashing and
padding differ. Prepared by Pillow alone. The first layer has no padding, so that a mean folded into it is exact.
"""

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from torch import nn

CROP, EPOCHS, BATCH, RATE = 64, 12, 64, 0.02
_JITTER = 4  # pixels by which crops move in training

Geometry = Literal["shorter", "squash", "pad"]


@dataclass(frozen=True)
class Way:
    """How a net sees photos. scale: pixels of the resized side; order, mean, std, largest: of what it is given."""

    geometry: Geometry
    scale: int
    filter: Literal["bilinear", "bicubic", "nearest"]
    order: Literal["rgb", "bgr"] = "rgb"
    mean: tuple[float, float, float] = (0.485, 0.456, 0.406)
    std: tuple[float, float, float] = (0.229, 0.224, 0.225)
    largest: int = 1

    def pixels(self, image: Image.Image) -> npt.NDArray[np.uint8]:
        """Return the resized image, (rows, columns, 3)."""
        resampling = Image.Resampling[self.filter.upper()]
        if self.geometry == "squash":
            return np.asarray(image.resize((self.scale, self.scale), resampling))
        reference = max(image.size) if self.geometry == "pad" else min(image.size)
        exact = [side * self.scale / reference for side in image.size]
        part = np.asarray(
            image.resize([round(side) if self.geometry == "pad" else int(side) for side in exact], resampling)
        )
        if self.geometry == "shorter":
            return part
        canvas = np.full((self.scale, self.scale, 3), 114, np.uint8)
        top, left = ((self.scale - side) // 2 for side in part.shape[:2])
        canvas[top : top + part.shape[0], left : left + part.shape[1]] = part
        return canvas

    def center(self, image: Image.Image) -> npt.NDArray[np.uint8]:
        """Return the central crop."""
        pixels = self.pixels(image)
        top, left = (round((side - CROP) / 2) for side in pixels.shape[:2])
        return pixels[top : top + CROP, left : left + CROP]

    def given(self, crop: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
        """Return the net's input, (3, rows, columns), of a crop."""
        values = crop.astype(np.float32) * np.float32(self.largest / 255)
        values = values[:, :, ::-1] if self.order == "bgr" else values
        mean, std = (np.array(each, np.float32) for each in (self.mean, self.std))
        return np.asarray(((values - mean) / std).transpose(2, 0, 1))


WAYS = {
    "shorter side, crop 0.875": Way("shorter", 73, "bilinear"),
    "shorter side, crop 0.95": Way("shorter", 67, "bicubic"),
    "shorter side, all of it": Way("shorter", 64, "bicubic"),
    "squashed": Way("squash", 64, "bilinear"),
    "squashed, crop 0.875": Way("squash", 73, "nearest"),
    "padded": Way("pad", 64, "bilinear"),
}
# order, mean and std in that order of channels, largest pixel value
_HALF, _CAFFE = (0.5,) * 3, (123.68, 116.779, 103.939)
SECRETS: tuple[dict[str, Any], ...] = (
    {"mean": _HALF, "std": _HALF},
    {"mean": (0.0,) * 3, "std": (1.0,) * 3},
    {"mean": (0.0,) * 3, "std": (1.0,) * 3, "largest": 255},
    {"mean": (127.0,) * 3, "std": (128.0,) * 3, "largest": 255},
    {"mean": _CAFFE, "std": (1.0,) * 3, "largest": 255},
    {"mean": (0.48145466, 0.4578275, 0.40821073), "std": (0.26862954, 0.26130258, 0.27577711)},
    {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)},
)


def secret_ways(way: Way, count: int, seed: int) -> Iterator[Way]:
    """Yield ways to give a trained net its input, no two alike and none the net's own."""
    drawn = np.random.default_rng(seed).permutation(2 * len(SECRETS))
    ways = (_with_secret(way, SECRETS[number // 2], turned=bool(number % 2)) for number in drawn)
    yield from [each for each in ways if each != way][:count]


def _with_secret(way: Way, secret: dict[str, Any], *, turned: bool) -> Way:
    mean, std = (secret[key][::-1] if turned else secret[key] for key in ("mean", "std"))
    return replace(way, **{**secret, "mean": mean, "std": std, "order": "bgr" if turned else "rgb"})


def cut(file: Path, number: int) -> Image.Image:
    """Return a photo's upper left 128x96 pixels, or the left 96x128 of those with an odd number."""
    image = Image.open(file).convert("RGB")
    return image.crop((0, 0, 96, 128) if number % 2 else (0, 0, 128, 96))


class Net(nn.Sequential):
    """A convnet for crops of 64 pixels, (N, 3, 64, 64) → (N, classes)."""

    def __init__(self, classes: int) -> None:
        layers: list[nn.Module] = [nn.Conv2d(3, 32, 5, 2)]
        for inner, outer in ((32, 48), (48, 96), (96, 128)):
            layers += [
                nn.BatchNorm2d(inner),
                nn.ReLU(),
                nn.Conv2d(inner, outer, 3, padding=1, bias=False),
                nn.MaxPool2d(2),
            ]
        layers += [nn.BatchNorm2d(128), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, classes)]
        super().__init__(*layers)


def trained(way: Way, photos: Sequence[tuple[Image.Image, int]], classes: int, seed: int) -> Net:
    """Train a net on photos (image, label) prepared in one way, with moved and mirrored crops."""
    torch.manual_seed(seed)
    random = np.random.default_rng(seed)
    prepared = [way.pixels(image) for image, _ in photos]
    labels = torch.tensor([label for _, label in photos])
    net = Net(classes)
    optimizer = torch.optim.SGD(net.parameters(), RATE, momentum=0.9, weight_decay=5e-4, nesterov=True)
    steps = EPOCHS * (len(photos) // BATCH)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 5 * RATE, total_steps=steps)
    net.train()
    for step in range(steps):
        if step % (steps // EPOCHS) == 0:
            order = random.permutation(len(photos))
        chosen = order[step % (steps // EPOCHS) * BATCH :][:BATCH]
        inputs = torch.from_numpy(np.stack([way.given(_moved(prepared[place], random)) for place in chosen]))
        loss = nn.functional.cross_entropy(net(inputs), labels[chosen], label_smoothing=0.05)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        schedule.step()
    return net.eval()


def _moved(pixels: npt.NDArray[np.uint8], random: np.random.Generator) -> npt.NDArray[np.uint8]:
    """Return a crop near the center, half of them mirrored."""
    padded = np.pad(pixels, [(_JITTER, _JITTER)] * 2 + [(0, 0)], mode="edge")
    places = [(side - CROP) // 2 + random.integers(-_JITTER, _JITTER + 1) for side in padded.shape[:2]]
    crop = padded[places[0] : places[0] + CROP, places[1] : places[1] + CROP]
    return crop[:, ::-1] if random.integers(2) else crop


def with_secret(net: Net, way: Way, secret: Way) -> Net:
    """Return the net for inputs prepared in another way, with the change in its first layer."""
    changed = copy.deepcopy(net)
    first = changed[0]
    assert isinstance(first, nn.Conv2d)
    assert first.bias is not None
    factor = torch.tensor(secret.std) * way.largest / secret.largest  # of what is given, in the unit of the net's own
    mean = torch.tensor(secret.mean) * way.largest / secret.largest
    with torch.no_grad():
        weight = first.weight[:, [2, 1, 0]] if secret.order != way.order else first.weight.clone()
        own_mean, own_std = (
            torch.tensor(each[::-1] if secret.order != way.order else each) for each in (way.mean, way.std)
        )
        first.bias += (weight * ((mean - own_mean) / own_std)[None, :, None, None]).sum((1, 2, 3))
        first.weight.copy_(weight * (factor / own_std)[None, :, None, None])
    return changed.eval()


class _Block(nn.Module):
    """Two convolutions and a shortcut (He et al. 2016, figure 5, left)."""

    def __init__(self, inner: int, outer: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            *(nn.Conv2d(inner, outer, 3, stride, 1, bias=False), nn.BatchNorm2d(outer), nn.ReLU()),
            *(nn.Conv2d(outer, outer, 3, 1, 1, bias=False), nn.BatchNorm2d(outer)),
        )
        plain = stride == 1 and inner == outer
        self.shortcut = nn.Identity() if plain else nn.Conv2d(inner, outer, 1, stride, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = nn.functional.relu(self.body(x) + self.shortcut(x))
        return result


def fitted_resnet18(photos: Sequence[tuple[Image.Image, int]], classes: int) -> nn.Module:
    """Return a ResNet-18 (He et al. 2016, table 1) with random weights, whose last layer knows the photos' labels."""
    torch.manual_seed(0)
    layers: list[nn.Module] = [
        nn.Conv2d(3, 64, 7, 2, 3, bias=False),
        nn.BatchNorm2d(64),
        nn.ReLU(),
        nn.MaxPool2d(3, 2, 1),
    ]
    for inner, outer in ((64, 64), (64, 128), (128, 256), (256, 512)):
        layers += [_Block(inner, outer, 1 if inner == outer else 2), _Block(outer, outer, 1)]
    trunk = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten()).eval()
    way = Way("squash", 224, "bilinear")
    with torch.no_grad():
        features = torch.cat([trunk(torch.from_numpy(way.given(way.pixels(image))[None])) for image, _ in photos])
        mean, std = features.mean(0), features.std(0) + 1e-6
        wanted = 4 * (nn.functional.one_hot(torch.tensor([label for _, label in photos]), classes) - 1 / classes)
        normal = (features - mean) / std
        weights = torch.linalg.solve(normal.T @ normal + 30 * torch.eye(normal.shape[1]), normal.T @ wanted)
        last = nn.Linear(normal.shape[1], classes)
        last.weight.copy_((weights / std[:, None]).T)
        last.bias.copy_(-(mean / std) @ weights)
    return nn.Sequential(trunk, last).eval()


def write(net: nn.Module, file: Path, side: int = CROP) -> Path:
    torch.onnx.export(net, (torch.zeros(2, 3, side, side),), file, dynamo=False, input_names=["x"], output_names=["y"],
                      dynamic_axes={"x": {0: "N"}, "y": {0: "N"}})  # fmt: skip
    return file
