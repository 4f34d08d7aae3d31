"""Run competitors in turn on the same images in one process, so that a slow minute of the machine affects all."""

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from benchmarks.common.nets import CLASSES
from benchmarks.common.photos import Photo
from benchmarks.common.results import shuffled
from benchmarks.engine.competitors import (
    COMPETITORS,
    REFERENCE,
    TOLERANCES,
    OpenedCompetitor,
    ScoreFunction,
    Scores,
)
from prelunet.evaluator.architectures import Architecture, multiply_adds
from prelunet.evaluator.imaging.resize import resized_size
from prelunet.evaluator.protocols import EvaluationProtocol

SAMPLED_CROPS = 16  # limit for the naive competitor on one image: one of its batches


@dataclass(frozen=True)
class PhotoTimings:
    """One image, classified once by each competitor of a group.

    gflop: of its dense evaluation, two per multiply-add; seconds, deviations: by competitor, the latter as of
    `Reference.deviation`; crops: the naive competitor's number of crops, if it took part.
    """

    photo: Photo
    gflop: float
    seconds: Mapping[str, float]
    deviations: Mapping[str, float]
    crops: int | None

    def to_json(self) -> dict[str, Any]:
        """Return the timings as plain data."""
        seconds = {name: round(value, 4) for name, value in self.seconds.items()}
        return {**self.photo.to_json(), "gflop": round(self.gflop, 2), "crops": self.crops, "seconds": seconds}


@dataclass
class Reference:
    """The reference scores, computed once by `answer`. scores: by the names of picture and protocol."""

    answer: ScoreFunction
    scores: dict[tuple[str, str], Scores] = field(default_factory=dict)

    def deviation(self, name: str, found: Scores, photo: Photo, protocol: EvaluationProtocol) -> float:
        """Return the largest deviation of a competitor's scores, relative to the largest score of the reference.

        Raises SystemExit beyond the tolerance of its precision.

        The naive competitor has no tolerance: its crops see other borders. Its net is that of the reference.
        """
        key = photo.name, protocol.name
        if key not in self.scores:
            self.scores[key] = self.answer(photo.pixels, protocol)
        expected = self.scores[key]
        off = float(np.abs(found - expected).max() / expected.max())
        if name != "naive" and not off <= TOLERANCES[COMPETITORS[name].precision]:  # NaN is never within
            raise SystemExit(
                f"{name}: wrong scores on {photo.name}: they deviate from those of {REFERENCE} by {off:.1e} of "
                "the largest, more than rounding explains. Its speed would mean nothing"
            )
        return off


@dataclass(frozen=True)
class StopRule:
    """When to stop measuring.

    min_images, max_images: limits; seconds: start no image beyond the minimum that would end later; patience: time
    limit in seconds for the minimum itself.
    """

    min_images: int
    max_images: int
    seconds: float
    patience: float = math.inf

    def reached(self, images: int, seconds: float) -> bool:
        """Return whether to stop after this many images and seconds."""
        if not images:
            return False
        end = seconds * (images + 1) / images  # of one more
        return images >= self.max_images or end > (self.seconds if images >= self.min_images else self.patience)


def warm_up(
    opened: Mapping[str, OpenedCompetitor], photo: Photo, protocol: EvaluationProtocol, reference: Reference
) -> None:
    """Run each competitor once, untimed; raises SystemExit for wrong scores."""
    for name, competitor in opened.items():
        if competitor.sample is None:
            reference.deviation(name, competitor.answer(photo.pixels, protocol), photo, protocol)


def measure(
    opened: Mapping[str, OpenedCompetitor],
    photos: Sequence[Photo],
    protocol: EvaluationProtocol,
    net: Architecture,
    limits: StopRule,
    reference: Reference,
) -> list[PhotoTimings]:
    """Time all competitors on picture after picture, in an order shuffled for each picture.

    Raises SystemExit if a competitor's scores are wrong.
    """
    timings: list[PhotoTimings] = []
    begun = time.perf_counter()
    while not limits.reached(number := len(timings), time.perf_counter() - begun):
        photo = photos[number % len(photos)]
        height, width = photo.pixels.shape[:2]
        sizes = [resized_size(height, width, view.scale, protocol.long_side_cap) for view in protocol.views]
        seconds: dict[str, float] = {}
        scores: dict[str, Scores] = {}
        crops = None
        for name in shuffled(opened, number):
            competitor = opened[name]
            if competitor.sample is not None:
                if number > 0:  # the competitor is too slow for more than one picture
                    continue
                crops = windows_of(net, sizes)
                if crops > SAMPLED_CROPS:
                    seconds[name] = competitor.sample(photo.pixels, protocol, SAMPLED_CROPS)
                    continue
            seconds[name], scores[name] = timed(partial(competitor.answer, photo.pixels, protocol))
        if REFERENCE in scores:
            reference.scores.setdefault((photo.name, protocol.name), scores[REFERENCE])
        deviations = {name: reference.deviation(name, found, photo, protocol) for name, found in scores.items()}
        gflop = sum(2 * multiply_adds(net, *size, CLASSES) for size in sizes) / 1e9
        timings.append(PhotoTimings(photo, gflop, seconds, deviations, crops))
        print(f"    {photo.name}: {time.perf_counter() - begun:.1f} s since the first", flush=True)
    return timings


def timed(answer: Callable[[], Scores]) -> tuple[float, Scores]:
    """Return the seconds of a call, and its scores."""
    start = time.perf_counter()
    scores = answer()
    return time.perf_counter() - start, scores


def windows_of(net: Architecture, sizes: Iterable[tuple[int, int]]) -> int:
    """Return the total number of windows of views of these heights and widths."""
    grids = [[net.feature_map_side(side) - net.window + 1 for side in size] for size in sizes]
    return sum(rows * columns for rows, columns in grids)
