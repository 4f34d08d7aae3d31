"""The naive competitor: crops every window out of the resized image and classifies the crops, in torch float32.

Its scores differ from dense ones by nature: at its border a crop sees zeros where a window sees its neighbors.
"""

import time
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from benchmarks.common.dense_torch import DenseNet
from prelunet.evaluator.arrays import UInt8Array
from prelunet.evaluator.imaging.views import ViewImage, make_views
from prelunet.evaluator.protocols import EvaluationProtocol

CROPS_AT_ONCE = 16
Corner = tuple[int, int, int]  # index of the view, row and column of the crop's upper left pixel


def classify_every_crop(net: DenseNet, image: UInt8Array, protocol: EvaluationProtocol) -> npt.NDArray[np.float64]:
    """Return the image's scores, (K,): crops → view → image, each a plain mean."""
    views = make_views(image, protocol)
    corners = _corners(net, views)
    scores = _classify(net, views, corners)
    owner = np.array([index for index, _, _ in corners])
    return np.mean([scores[owner == index].mean(axis=0) for index in range(len(views))], axis=0)


def seconds_of_sample(net: DenseNet, image: UInt8Array, protocol: EvaluationProtocol, crops: int) -> float:
    """Estimate the seconds for all crops of an image from a random sample of `crops` of them."""
    start = time.perf_counter()
    views = make_views(image, protocol)
    corners = _corners(net, views)
    begun = time.perf_counter()
    chosen = np.random.default_rng(0).choice(len(corners), min(crops, len(corners)), replace=False)
    _classify(net, views, [corners[index] for index in sorted(chosen)])
    return begun - start + (time.perf_counter() - begun) * len(corners) / len(chosen)


def _corners(net: DenseNet, views: Sequence[ViewImage]) -> list[Corner]:
    """Return the corner of each window's crop: spaced by the trunk's stride, the last ones moved inside the image."""
    crop, stride = net.architecture.crop, net.architecture.trunk_stride
    corners = []
    for index, view in enumerate(views):
        sides = view.image.shape[:2]
        counts = [net.architecture.feature_map_side(side) - net.architecture.window + 1 for side in sides]
        tops, lefts = (
            [min(stride * i, side - crop) for i in range(count)] for side, count in zip(sides, counts, strict=True)
        )
        corners += [(index, top, left) for top in tops for left in lefts]
    return corners


def _classify(net: DenseNet, views: Sequence[ViewImage], corners: Sequence[Corner]) -> npt.NDArray[np.float64]:
    crop, scores = net.architecture.crop, []
    for start in range(0, len(corners), CROPS_AT_ONCE):
        some = corners[start : start + CROPS_AT_ONCE]
        batch = np.stack([views[i].image[top : top + crop, left : left + crop] for i, top, left in some])
        scores.append(net.scores(batch))
    return np.concatenate(scores).astype(np.float64)
