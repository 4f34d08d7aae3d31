"""Measure what `prelunet bench` reports: the pipeline of `validate` on a dataset's images, stage by stage.

Nothing is written. A warm-up, which does not count, determines how many images take the requested time.
"""

import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from ..datasets.dataset import Dataset, Sample
from ..engine.session import Session
from ..errors import DatasetError
from ..protocols import EvaluationProtocol
from ..terminal import progress
from ..validation.pipeline import decoding_threads, evaluate_chunks
from ..validation.timing import STAGES, Stage, StageTimer, StageTotals

MIN_PASS_SHARE = 1 / 20  # of the requested seconds: shorter passes are not reliable
WARM_UP_IMAGES = 2  # images per session
MIN_PORTIONS = 4  # per session, so that its steps overlap as in a long run

_THREADS_OF: dict[Stage, str] = {
    "read": "pool", "decode": "pool", "resize": "pool", "pack": "session", "upload": "session", "compute": "session",
    "wait": "session", "average": "caller",
}  # fmt: skip
_STEPS: dict[str, tuple[tuple[Stage, ...], str]] = {  # with their stages, and what makes each faster
    "computing": (("compute",), "A faster engine may help, if one is listed below"),
    "reading and decoding": (
        ("read", "decode", "resize"),
        "More --threads, images saved closer to the protocol's scales or a faster disk may help",
    ),
    "packing batches": (("pack", "upload"), "A protocol with fewer views may help"),
    "averaging scores": (("average",), "A protocol with fewer views may help"),
}
_BUSY = 0.7  # share of the time; a step that is busy for less seldom keeps others waiting


@dataclass(frozen=True)
class Measurement:
    """Result of a measurement.

    images: including refused ones; seconds: from the first image's bytes to the last one's scores; images_together: of
    a portion; sessions, threads: number of computing sessions and decoding threads.
    """

    images: int
    refused: int
    seconds: float
    images_together: int
    sessions: int
    threads: int
    totals: StageTotals

    @property
    def images_per_second(self) -> float:
        return self.images / self.seconds

    def stages(self) -> list[dict[str, Any]]:
        """Return the seconds in each stage, and the share of the time for which each of its threads is busy with it."""
        threads = {"pool": self.threads, "session": self.sessions, "caller": 1}
        return [
            {
                "stage": stage,
                "threads": threads[_THREADS_OF[stage]],
                "seconds": round(self.totals.seconds[stage], 4),
                "ms_per_image": round(1000 * self.totals.seconds[stage] / self.images, 3),
                "share": round(self.totals.seconds[stage] / (threads[_THREADS_OF[stage]] * self.seconds), 4),
            }
            for stage in STAGES
        ]

    def bound(self) -> str:
        """Return in a sentence which step bounds the rate, because its threads are busy, and what may help."""
        shares = {stage["stage"]: stage["share"] for stage in self.stages()}
        busy = {step: sum(shares[stage] for stage in stages) for step, (stages, _) in _STEPS.items()}
        step = max(busy, key=lambda each: busy[each])
        if busy[step] < _BUSY:
            return "No step is busy most of the time, so nothing is known to bound the rate. Measure more images"
        return f"Bound by {step}, which takes {busy[step]:.0%} of its threads' time. {_STEPS[step][1]}"

    def to_json(self) -> dict[str, Any]:
        """Return the measurement as plain data."""
        return {
            "images": self.images,
            "refused": self.refused,
            "seconds": round(self.seconds, 3),
            "images_per_second": round(self.images_per_second, 4),
            "images_together": self.images_together,
            "sessions": self.sessions,
            "stages": self.stages(),
            "bound": self.bound(),
            "views": self.totals.views,
            "batches": self.totals.batches,
            "canvas_changes": self.totals.canvas_changes,
            "padding": round(self.totals.padding, 4),
        }


def benchmark(
    sessions: Sequence[Session],
    dataset: Dataset,
    protocol: EvaluationProtocol,
    usually_together: int,
    *,
    threads: int = 0,
    images: int | None = None,
    seconds: float = 60.0,
    report: Callable[[str], None] = lambda _message: None,
) -> Measurement:
    """Measure the evaluation of a dataset's images, sampled evenly from it; labels are not needed.

    usually_together: images of a portion in a run, see `Batching`; threads: for decoding, 0 for one per core; images:
    their number, None for as many as take about `seconds`, at most all; report: receives a sentence on the progress.
    Raises DatasetError when there are no images, or none can be read, otherwise as `evaluate_chunks`.
    """
    if not dataset.samples:
        raise DatasetError(f"{dataset.location}: contains no images, so there is nothing to measure")

    def one_pass(title: str, portions: Sequence[Sequence[Sample]], timer: StageTimer) -> tuple[float, int]:
        """Evaluate images; return the seconds, and the number of refused images."""
        refused, begun = 0, time.perf_counter()
        results = evaluate_chunks(sessions, dataset, protocol, portions, len(portions[0]), threads, timer=timer)
        with closing(results), progress(title, sum(map(len, portions)), "images") as advance:
            for lines, _ in results:
                refused += sum(line.refused is not None for line in lines)
                advance(len(lines))
            return time.perf_counter() - begun, refused

    def portions_of(count: int) -> list[list[Sample]]:
        """Cut images spread evenly into portions as in a run, or smaller ones if there would be too few portions."""
        chosen = [dataset.samples[number * len(dataset.samples) // count] for number in range(count)]
        size = min(usually_together, -(-count // (MIN_PORTIONS * len(sessions))))
        return [chosen[start : start + size] for start in range(0, count, size)]

    limit = len(dataset.samples) if images is None else min(images, len(dataset.samples))
    count = min(WARM_UP_IMAGES * len(sessions), limit)
    one_pass("warm-up", portions_of(count), StageTimer())  # twice: a session's first call may take far longer
    while (took := one_pass("warm-up", portions_of(count), StageTimer())[0]) < MIN_PASS_SHARE * seconds:
        if count == limit:
            break
        count = min(2 * count, limit)
    if images is None:
        limit = max(1, min(limit, round(seconds * count / took)))
    report(f"measuring {limit:,} of {len(dataset.samples):,} images, about {limit * took / count:.0f} s")
    timer, portions = StageTimer(), portions_of(limit)
    took, refused = one_pass("measure", portions, timer)
    totals = timer.totals()
    if not totals.batches:
        raise DatasetError(f"{dataset.location}: none of {limit} images can be read, so there is nothing to measure")
    return Measurement(limit, refused, took, len(portions[0]), len(sessions), decoding_threads(threads), totals)
