"""Competitors in turn on the same images, in one process: a slow minute of the machine meets all of them."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from competitors import COMPETITORS, REFERENCE, TOLERANCES, Answer, Opened
from evaluator.complexity import multiply_adds
from evaluator.imaging.resize import resized_size
from evaluator.progress import progress
from evaluator.protocols import Protocol
from nets import CLASSES
from photos import Photo
from training.architectures import Architecture

SAMPLED_CROPS = 64  # of the naive competitor, in images that have more


@dataclass(frozen=True)
class Visit:
    """One image, answered by each competitor once.

    gflop: of its dense evaluation, two per multiply-add; seconds, deviations: by competitor, the latter the largest
    difference of a score from the reference's; crops: of the naive competitor, (all, classified), where it took part.
    """

    photo: Photo
    gflop: float
    seconds: Mapping[str, float]
    deviations: Mapping[str, float]
    crops: tuple[int, int] | None


def warm_up(opened: Mapping[str, Opened], photo: Photo, protocol: Protocol) -> None:
    """Let each competitor answer once, untimed, and stop at wrong scores."""
    expected = opened[REFERENCE].answer(photo.pixels, protocol)
    with progress("warming up", len(opened), "competitors") as advance:
        for name, competitor in opened.items():
            if competitor.sample is None:
                check(name, photo, competitor.answer(photo.pixels, protocol), expected)
            advance(note=name)


def measure(
    opened: Mapping[str, Opened], photos: Sequence[Photo], protocol: Protocol, net: Architecture, limits: "Limits"
) -> list[Visit]:
    """Visit photo after photo, at least `limits.images` of them, and more while the time lasts.

    At each visit another competitor begins. Raises SystemExit when a competitor's scores are wrong.
    """
    visits: list[Visit] = []
    begun = time.perf_counter()
    with progress(f"{net.name}, {protocol.name}", limits.images, "images") as advance:
        while not limits.reached(len(visits), time.perf_counter() - begun):
            photo = photos[len(visits) % len(photos)]
            visits.append(_visit(opened, photo, protocol, net, len(visits)))
            advance()
    return visits


@dataclass(frozen=True)
class Limits:
    """How long to measure. images: at least so many; seconds: begin no further image that would end after them."""

    images: int
    seconds: float

    def reached(self, images: int, seconds: float) -> bool:
        """Say whether to stop after so many images and seconds."""
        return images >= self.images and seconds * (images + 1) / max(images, 1) > self.seconds


def _visit(opened: Mapping[str, Opened], photo: Photo, protocol: Protocol, net: Architecture, number: int) -> Visit:
    seconds: dict[str, float] = {}
    scores: dict[str, np.ndarray] = {}
    crops = None
    names = list(opened)
    first = number % len(names)
    for name in names[first:] + names[:first]:
        sample = opened[name].sample
        if sample is None:
            seconds[name], scores[name] = _timed(opened[name].answer, photo, protocol)
        elif number == 0:  # too slow for more than one image
            crops = _crops(photo, protocol, net)
            if crops <= SAMPLED_CROPS:
                seconds[name], scores[name] = _timed(opened[name].answer, photo, protocol)
            else:
                seconds[name], crops = sample(photo.pixels, protocol, SAMPLED_CROPS)
    deviations = {name: check(name, photo, found, scores[REFERENCE]) for name, found in scores.items()}
    known = None if crops is None else (crops, min(crops, SAMPLED_CROPS))
    return Visit(photo, _gflop(photo, protocol, net), seconds, deviations, known)


def _timed(answer: Answer, photo: Photo, protocol: Protocol) -> tuple[float, np.ndarray]:
    start = time.perf_counter()
    scores = answer(photo.pixels, protocol)
    return time.perf_counter() - start, scores


def check(name: str, photo: Photo, found: np.ndarray, expected: np.ndarray) -> float:
    """Return the largest difference of a score; SystemExit beyond the tolerance of the competitor's precision.

    The naive competitor has none: its crops see other borders. Its net is the reference's own.
    """
    deviation = float(np.abs(np.asarray(found, np.float64) - expected).max())
    tolerance = TOLERANCES[COMPETITORS[name].precision]
    if name != "naive" and not deviation <= tolerance:  # NaN too
        raise SystemExit(
            f"{name}: wrong scores on {photo.name}: {deviation:.1e} from those of {REFERENCE}, where {tolerance:g} is "
            "what rounding can explain. Its speed would mean nothing"
        )
    return deviation


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
