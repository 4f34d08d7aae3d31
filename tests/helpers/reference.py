"""The slow, plain oracle: a PReLU-net evaluated window by window in float64.

It imports nothing from prelunet and defines the nets from the paper alone; its only input is a checkpoint's tensors.
Every window is cropped from the feature map, pooled with torch's own `adaptive_max_pool2d`, and classified alone.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch.nn import functional as F

Trunk = tuple[tuple[str, int, int], ...]  # (conv name or "pool", stride, pad); a pool is 2x2 unless, say, "pool3"


def _stage(number: int, count: int) -> Trunk:
    return tuple((f"conv{number}_{index}", 1, 1) for index in range(1, count + 1))


def _two_by_two(number: int, count: int) -> Trunk:
    return tuple((f"conv{number}_{index + 1}", 1, index % 2) for index in range(count))


_POOL: Trunk = (("pool", 2, 0),)
_CONV1: Trunk = (("conv1", 2, 3),)
TRUNKS: dict[str, Trunk] = {  # Table 3 (A, C) and Table 1 (E) of the paper
    "A": (*_CONV1, *_POOL, *_stage(2, 5), *_POOL, *_stage(3, 5), *_POOL, *_stage(4, 5)),
    "C": (*_CONV1, *_POOL, *_stage(2, 6), *_POOL, *_stage(3, 6), *_POOL, *_stage(4, 6)),
    "E": (*_CONV1, ("pool3", 3, 0), *_two_by_two(2, 4), *_POOL, *_two_by_two(3, 6)),
    "demo": (*_stage(1, 2), *_POOL, *_stage(2, 2), *_POOL, *_stage(3, 2)),
}
# The numbers of channels are those of the tensors.
TRUNKS |= {"narrow": TRUNKS["demo"], "slimA": TRUNKS["A"], "slimE": TRUNKS["E"]}
WINDOW = {"A": 14, "C": 14, "E": 18, "demo": 7, "narrow": 7, "slimA": 14, "slimE": 18}
LEVELS = {"A": (7, 3, 2, 1), "C": (7, 3, 2, 1), "E": (6, 3, 2, 1), "demo": (3, 2, 1)}
LEVELS |= {"narrow": LEVELS["demo"], "slimA": LEVELS["A"], "slimE": LEVELS["E"]}
LRELU_SLOPE = 0.01


@dataclass(frozen=True)
class Net:
    """A net that is not the paper's; levels: bins per side."""

    trunk: Trunk
    crop: int
    levels: tuple[int, ...]


@dataclass(frozen=True)
class OracleScores:
    """The oracle's result for one image, float64: one row of classes per window."""

    window_scores: np.ndarray  # (rows, columns, K)
    window_logits: np.ndarray

    @property
    def scores(self) -> np.ndarray:
        return self.window_scores.mean(axis=(0, 1))

    @property
    def logits(self) -> np.ndarray:
        return self.window_logits.mean(axis=(0, 1))


def evaluate(
    net: str | Net, tensors: Mapping[str, np.ndarray], mean: np.ndarray, image: np.ndarray, activation: str = "prelu"
) -> OracleScores:
    """Classify every window of an image, uint8 (H, W, 3)."""
    with torch.no_grad():
        x = _subtract_mean(image, mean)
        if isinstance(net, str):
            return _classify_windows(
                WINDOW[net], LEVELS[net], tensors, _features(TRUNKS[net], tensors, x, activation), activation
            )
        crop = _features(net.trunk, tensors, torch.zeros(1, 3, net.crop, net.crop, dtype=torch.float64), activation)
        features = _features(net.trunk, tensors, x, activation)
        return _classify_windows(crop.shape[2], net.levels, tensors, features, activation)


def _features(trunk: Trunk, tensors: Mapping[str, np.ndarray], x: torch.Tensor, activation: str) -> torch.Tensor:
    for name, stride, pad in trunk:
        if name.startswith("pool"):
            x = F.max_pool2d(x, int(name.removeprefix("pool") or 2), stride)
        else:
            weight, bias = (_tensor(tensors[f"{name}.{part}"]) for part in ("weight", "bias"))
            x = _activate(F.conv2d(x, weight, bias, stride, pad), tensors, name, activation)
    return x


def _subtract_mean(image: np.ndarray, mean: np.ndarray) -> torch.Tensor:
    """Subtract the channel mean, or the mean image warped to the image's size."""
    x = _tensor(image).permute(2, 0, 1)[None]
    if mean.ndim == 1:
        return x - _tensor(mean).reshape(1, 3, 1, 1)
    planes = _tensor(mean).permute(2, 0, 1)[None]
    return x - F.interpolate(planes, size=image.shape[:2], mode="bilinear", align_corners=False)


def _activate(x: torch.Tensor, tensors: Mapping[str, np.ndarray], name: str, activation: str) -> torch.Tensor:
    """f(y) = max(0, y) + a·min(0, y), with a per channel (axis 1), one for the layer, fixed, or 0."""
    if activation in {"prelu", "prelu-shared"}:
        slope = _tensor(tensors[f"{name}.slope"]).reshape(1, -1, *[1] * (x.ndim - 2))
    else:
        slope = torch.tensor({"relu": 0.0, "lrelu": LRELU_SLOPE}[activation], dtype=torch.float64)
    return x.clamp(min=0) + slope * x.clamp(max=0)


def _classify_windows(
    side: int, levels: tuple[int, ...], tensors: Mapping[str, np.ndarray], x: torch.Tensor, activation: str
) -> OracleScores:
    rows, columns = x.shape[2] - side + 1, x.shape[3] - side + 1
    windows = torch.cat(
        [x[:, :, row : row + side, column : column + side] for row in range(rows) for column in range(columns)]
    )
    y = torch.cat([F.adaptive_max_pool2d(windows, n).flatten(1) for n in levels], dim=1)
    for name in ("fc1", "fc2", "fc3"):
        y = F.linear(y, _tensor(tensors[f"{name}.weight"]), _tensor(tensors[f"{name}.bias"]))
        if name != "fc3":
            y = _activate(y, tensors, name, activation)
    logits = y.reshape(rows, columns, -1)
    return OracleScores(logits.softmax(-1).numpy(), logits.numpy())


def _tensor(array: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.asarray(array, dtype=np.float64))
