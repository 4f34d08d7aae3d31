"""The slow, plain oracle of the protocols: Pillow, slices, and the windows of reference.py, each classified alone.

It imports nothing of ours but that. A protocol is described as what is seen, in order: `dense`, `nine` or `crops`;
`average` combines them to one answer. All arithmetic is float64.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import floor

import numpy as np
from PIL import Image

from tests.helpers import reference

CORNERS_AND_CENTER = ("top-left", "top-right", "bottom-left", "bottom-right", "center")


@dataclass(frozen=True)
class OracleView:
    """One view. probabilities, logits: (windows, K), of the windows that count."""

    scale: int
    probabilities: np.ndarray
    logits: np.ndarray


class Oracle:
    """Shows images to one net, and caches its answer for each array of pixels."""

    def __init__(self, net: str, tensors: Mapping[str, np.ndarray], mean: np.ndarray, crop: int) -> None:
        self._net, self._tensors, self._mean, self._crop = net, tensors, mean, crop
        self._answers: dict[tuple[tuple[int, ...], bytes], reference.OracleScores] = {}

    def dense(self, image: np.ndarray, scales: Sequence[int], mirror: bool = True) -> list[OracleView]:
        """See every window of the whole image."""
        return [
            self._seen(scale, self._answer(view))
            for scale in scales
            for view in plain_and_mirrored(resized(image, scale), mirror)
        ]

    def nine(self, image: np.ndarray, scales: Sequence[int], mirror: bool = True) -> list[OracleView]:
        """See the windows at the corners, the middles of the sides and the center."""
        seen = []
        for scale in scales:
            for view in plain_and_mirrored(resized(image, scale), mirror):
                answer = self._answer(view)
                rows, columns = answer.window_scores.shape[:2]
                chosen = [(row, column) for row in first_middle_last(rows) for column in first_middle_last(columns)]
                seen.append(
                    OracleView(
                        scale,
                        np.array([answer.window_scores[place] for place in chosen]),
                        np.array([answer.window_logits[place] for place in chosen]),
                    )
                )
        return seen

    def crops(
        self, image: np.ndarray, scales: Sequence[int], places: Sequence[str], mirror: bool = True
    ) -> list[OracleView]:
        """See crops of the whole resized image."""
        return [
            self._seen(scale, self._answer(view))
            for scale in scales
            for place in places
            for view in plain_and_mirrored(cropped(resized(image, scale), place, self._crop), mirror)
        ]

    def _answer(self, view: np.ndarray) -> reference.OracleScores:
        key = (view.shape, view.tobytes())
        if key not in self._answers:
            self._answers[key] = reference.evaluate(self._net, self._tensors, self._mean, view)
        return self._answers[key]

    @staticmethod
    def _seen(scale: int, answer: reference.OracleScores) -> OracleView:
        classes = answer.window_scores.shape[2]
        return OracleView(scale, answer.window_scores.reshape(-1, classes), answer.window_logits.reshape(-1, classes))


def average(seen: Sequence[OracleView], averaging: str = "softmax", weights: str = "scale") -> np.ndarray:
    """Return one answer, (K,): over all windows equally (`view`), or windows → views → scales → image (`scale`)."""
    of_views = [view.probabilities if averaging == "softmax" else view.logits for view in seen]
    if weights == "view":
        total = np.concatenate(of_views).mean(axis=0)
    else:
        of_scales: dict[int, list[np.ndarray]] = {}
        for view, windows in zip(seen, of_views, strict=True):
            of_scales.setdefault(view.scale, []).append(windows.mean(axis=0))
        total = np.mean([np.mean(views, axis=0) for views in of_scales.values()], axis=0)
    return total if averaging == "softmax" else softmax(total)


def softmax(logits: np.ndarray) -> np.ndarray:
    powers = np.exp(logits - logits.max())
    return powers / powers.sum()


def resized(image: np.ndarray, scale: int, cap: int = 4, filter_: Image.Resampling = Image.Resampling.BILINEAR):
    """Resize the whole image, then cut the center out of what is longer than `cap` scales."""
    short = min(image.shape[:2])
    height, width = (floor(Fraction(side * scale, short) + Fraction(1, 2)) for side in image.shape[:2])
    whole = np.asarray(Image.fromarray(image).resize((width, height), filter_))
    top, left = (max(0, side - cap * scale) // 2 for side in (height, width))
    return whole[top : top + cap * scale, left : left + cap * scale]


def plain_and_mirrored(image: np.ndarray, mirror: bool) -> list[np.ndarray]:
    return [image, np.flip(image, axis=1)] if mirror else [image]


def cropped(image: np.ndarray, place: str, crop: int) -> np.ndarray:
    height, width = image.shape[:2]
    over, beside = (height - crop) // 2, (width - crop) // 2
    return {
        "top-left": image[:crop, :crop],
        "top-right": image[:crop, -crop:],
        "bottom-left": image[-crop:, :crop],
        "bottom-right": image[-crop:, -crop:],
        "center": image[over : over + crop, beside : beside + crop],
    }[place]


def first_middle_last(count: int) -> list[int]:
    """Return the first, the middle (with as many before as behind, or one less) and the last of `count`, once each."""
    return [place for place in range(count) if place in {0, count - 1} or count - 1 - 2 * place in {0, 1}]
