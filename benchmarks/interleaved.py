"""Competitors in turn on the same images, in one process: a slow minute of the machine meets all of them."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from competitors import COMPETITORS, REFERENCE, TOLERANCES, Answer, Opened, Scores
from evaluator.complexity import multiply_adds
from evaluator.imaging.resize import resized_size
from evaluator.protocols import Protocol
from nets import CLASSES
from photos import Photo
from training.architectures import Architecture

SAMPLED_CROPS = 64  # of the naive competitor, in images that have more


@dataclass(frozen=True)
class Visit:
    """One image, answered once by each competitor of a group.

    gflop: of its dense evaluation, two per multiply-add; seconds, deviations: by competitor, the latter the largest
    difference of a score from the reference's; largest_score: the reference's for it; crops: how many the naive
    competitor has of it, where it took part.
    """

    photo: Photo
    gflop: float
    seconds: Mapping[str, float]
    deviations: Mapping[str, float]
    largest_score: float
    crops: int | None

    def to_json(self) -> dict[str, Any]:
        """Return the visit as plain data."""
        seconds = {name: round(value, 4) for name, value in self.seconds.items()}
        facts = {"gflop": round(self.gflop, 2), "largest_score": round(self.largest_score, 4), "crops": self.crops}
        return {**self.photo.to_json(), **facts, "seconds": seconds}


class Reference:
    """The scores that others are compared with, computed once for each picture and protocol."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self._known: dict[tuple[str, str], Scores] = {}

    def scores(self, photo: Photo, protocol: Protocol) -> Scores:
        """Return the scores of a picture."""
        key = (photo.name, protocol.name)
        if key not in self._known:
            self._known[key] = self._answer(photo.pixels, protocol)
        return self._known[key]

    def learn(self, scores: Scores, photo: Photo, protocol: Protocol) -> None:
        """Keep the scores of a picture, unless they are known."""
        self._known.setdefault((photo.name, protocol.name), scores)

    def deviation(self, name: str, found: Scores, photo: Photo, protocol: Protocol) -> float:
        """Return the largest difference of a score; SystemExit beyond the tolerance of the competitor's precision.

        The naive competitor has no tolerance: its crops see other borders. Its net is the reference's own.
        """
        deviation = float(np.abs(found - self.scores(photo, protocol)).max())
        tolerance = TOLERANCES[COMPETITORS[name].precision]
        if name != "naive" and not deviation <= tolerance:  # NaN too
            raise SystemExit(
                f"{name}: wrong scores on {photo.name}: {deviation:.1e} from those of {REFERENCE}, where {tolerance:g} "
                "is what rounding can explain. Its speed would mean nothing"
            )
        return deviation


@dataclass(frozen=True)
class Limits:
    """How long to measure. images: at least so many; seconds: begin no further image that would end after them."""

    images: int
    seconds: float

    def reached(self, images: int, seconds: float) -> bool:
        """Say whether to stop after so many images and seconds."""
        return images >= self.images and seconds * (images + 1) / max(images, 1) > self.seconds


def warm_up(opened: Mapping[str, Opened], photo: Photo, protocol: Protocol, reference: Reference) -> None:
    """Let each competitor answer once, untimed, and stop at wrong scores."""
    for name, competitor in opened.items():
        if competitor.sample is None:
            reference.deviation(name, competitor.answer(photo.pixels, protocol), photo, protocol)


def measure(
    opened: Mapping[str, Opened],
    photos: Sequence[Photo],
    protocol: Protocol,
    net: Architecture,
    limits: Limits,
    reference: Reference,
) -> list[Visit]:
    """Visit picture after picture; at each visit another competitor begins.

    Raises SystemExit when a competitor's scores are wrong.
    """
    visits: list[Visit] = []
    begun = time.perf_counter()
    while not limits.reached(len(visits), time.perf_counter() - begun):
        photo = photos[len(visits) % len(photos)]
        visit = _visit(opened, photo, protocol, net, len(visits), reference)
        visits.append(visit)
        print(f"    {photo.name}: {sum(visit.seconds.values()):.1f} s", flush=True)
    return visits


def _visit(
    opened: Mapping[str, Opened],
    photo: Photo,
    protocol: Protocol,
    net: Architecture,
    number: int,
    reference: Reference,
) -> Visit:
    seconds: dict[str, float] = {}
    scores: dict[str, Scores] = {}
    crops = None
    names = list(opened)
    for name in names[number % len(names) :] + names[: number % len(names)]:
        competitor = opened[name]
        if competitor.sample is not None:
            if number > 0:  # too slow for more than one picture
                continue
            crops = _crops(photo, protocol, net)
            if crops > SAMPLED_CROPS:
                seconds[name] = competitor.sample(photo.pixels, protocol, SAMPLED_CROPS)
                continue
        start = time.perf_counter()
        scores[name] = competitor.answer(photo.pixels, protocol)
        seconds[name] = time.perf_counter() - start
    if REFERENCE in scores:
        reference.learn(scores[REFERENCE], photo, protocol)
    deviations = {name: reference.deviation(name, found, photo, protocol) for name, found in scores.items()}
    largest = float(reference.scores(photo, protocol).max())
    return Visit(photo, _gflop(photo, protocol, net), seconds, deviations, largest, crops)


def _sizes(photo: Photo, protocol: Protocol) -> list[tuple[int, int]]:
    """Return height and width of each view."""
    sides = photo.pixels.shape[:2]
    return [resized_size(*sides, view.scale, protocol.long_side_cap) for view in protocol.views]


def _crops(photo: Photo, protocol: Protocol, net: Architecture) -> int:
    grids = [[net.feature_map_side(side) - net.window + 1 for side in size] for size in _sizes(photo, protocol)]
    return sum(rows * columns for rows, columns in grids)


def _gflop(photo: Photo, protocol: Protocol, net: Architecture) -> float:
    data = net.to_json()
    return sum(2 * multiply_adds(data, *size, CLASSES) for size in _sizes(photo, protocol)) / 1e9
