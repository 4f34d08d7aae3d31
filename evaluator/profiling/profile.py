"""Measure what `prelunet bench` reports: the pipeline of `validate` on a dataset's images, stage by stage.

Nothing is written. A warm-up, which does not count, determines how many images take the requested time. Afterwards the
session computes the same batches alone, because in the pipeline other steps take cores from it and slow it down.
"""

import resource
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..datasets.dataset import Dataset, Sample
from ..engine.classify import pack_batch, plan_views
from ..engine.session import Session
from ..errors import DatasetError, ImageError
from ..protocols import EvaluationProtocol
from ..terminal import progress
from ..validation.pipeline import Prepared, decoding_threads, evaluate_chunks, prepare
from ..validation.timing import STAGES, Stage, StageTimer, StageTotals

MIN_PASS_SHARE = 1 / 20  # of the requested seconds: shorter passes are not reliable
WARM_UP_IMAGES = 2  # images per session
MIN_PORTIONS = 4  # per session, so that its steps overlap as in a long run
ISOLATED_SECONDS = 10.0  # seconds of isolated computing suffice if the batches of a pass take longer
_GOLDEN = (5**0.5 - 1) / 2

_THREADS_OF: dict[Stage, str] = {
    "read": "pool", "decode": "pool", "resize": "pool", "pack": "session", "upload": "session", "compute": "session",
    "wait": "session", "average": "caller", "write": "caller",
}  # fmt: skip


@dataclass(frozen=True)
class IsolatedCompute:
    """Batches of a pass that a session computed again, with nothing else running.

    seconds: of `Session.compute`; batches: their number; canvas_pixels: theirs, blank canvases included.
    """

    seconds: float
    batches: int
    canvas_pixels: int


@dataclass(frozen=True)
class Measurement:
    """Result of a measurement.

    images: including refused ones; seconds: from the first image's bytes to the last one's scores; images_together: of
    a portion; usually_together: of a portion in `validate`; sessions, threads: number of computing sessions and
    decoding threads; canvases: number of different ones; multiply_adds: of all views without their padding, None if the
    model file does not state them; memory: peak of this process so far, in bytes; isolated: computing without the other
    steps.
    """

    images: int
    refused: int
    seconds: float
    images_together: int
    usually_together: int
    sessions: int
    threads: int
    totals: StageTotals
    canvases: int
    multiply_adds: int | None
    memory: int
    isolated: IsolatedCompute

    @property
    def images_per_second(self) -> float:
        return self.images / self.seconds

    @property
    def gflops(self) -> float | None:
        """Return billions of multiplications and additions per second, without those for padding."""
        return None if self.multiply_adds is None else 2 * self.multiply_adds / self.seconds / 1e9

    @property
    def pure_compute(self) -> float:
        """Return the seconds in which one session would compute all batches with nothing else running.

        Extrapolated by pixels from the isolated batches.
        """
        return self.isolated.seconds * self.totals.canvas_pixels / self.isolated.canvas_pixels

    @property
    def wall_by_compute(self) -> float:
        """Return how many times longer the whole takes than the sessions alone; 1 is the best."""
        return self.seconds * self.sessions / self.pure_compute

    @property
    def slowed(self) -> float:
        """Return how many times longer a session computes while everything else runs; 1 if nothing slows it."""
        return self.totals.seconds["compute"] / self.pure_compute

    def threads_of(self, stage: Stage) -> int:
        return {"pool": self.threads, "session": self.sessions, "caller": 1}[_THREADS_OF[stage]]

    def share(self, stage: Stage) -> float:
        """Return the fraction of the time for which a thread of a stage is busy with it, 0 to 1."""
        return self.totals.seconds[stage] / (self.threads_of(stage) * self.seconds)

    def to_json(self) -> dict[str, Any]:
        """Return the measurement as plain data."""
        return {
            "images": self.images,
            "refused": self.refused,
            "seconds": round(self.seconds, 3),
            "images_per_second": round(self.images_per_second, 4),
            "gflops": self.gflops and round(self.gflops, 1),
            "wall_by_compute": round(self.wall_by_compute, 4),
            "slowed": round(self.slowed, 4),
            "alone": {"batches": self.isolated.batches, "seconds": round(self.isolated.seconds, 4)},
            "images_together": self.images_together,
            "usually_together": self.usually_together,
            "sessions": self.sessions,
            "stages": [
                {
                    "stage": stage,
                    "threads": self.threads_of(stage),
                    "seconds": round(self.totals.seconds[stage], 4),
                    "ms_per_image": round(1000 * self.totals.seconds[stage] / self.images, 3),
                    "share": round(self.share(stage), 4),
                }
                for stage in STAGES
                if stage != "write"
            ],
            "views": self.totals.views,
            "batches": self.totals.batches,
            "canvases": self.canvases,
            "canvas_changes": self.totals.canvas_changes,
            "padding": round(self.totals.padding, 4),
            "memory_peak": self.memory,
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
    report(
        f"measuring {limit:,} of {len(dataset.samples):,} images, about {limit * took / count:.0f} s; then computing "
        f"the same batches alone, up to about {ISOLATED_SECONDS:.0f} s of them"
    )
    timer, portions = StageTimer(), portions_of(limit)
    took, refused = one_pass("measure", portions, timer)
    totals, memory = timer.totals(), peak_memory()
    if not totals.batches:
        raise DatasetError(f"{dataset.location}: none of {limit} images can be read, so there is nothing to measure")
    of_view = sessions[0].contract.multiply_adds  # known for all views or for none
    multiply_adds = sum((of_view(*shape) or 0) * views for shape, views in timer.view_shapes().items()) or None
    isolated = measure_isolated(sessions[0], dataset, protocol, portions, decoding_threads(threads))
    return Measurement(
        limit, refused, took, len(portions[0]), usually_together, len(sessions), decoding_threads(threads), totals,
        len(timer.canvases()), multiply_adds, memory, isolated,
    )  # fmt: skip


def measure_isolated(
    session: Session,
    dataset: Dataset,
    protocol: EvaluationProtocol,
    portions: Sequence[Sequence[Sample]],
    threads: int,
) -> IsolatedCompute:
    """Compute the batches of a pass again, portion by portion, each after it is prepared and packed.

    Stops after the portion that reaches ISOLATED_SECONDS. The order spreads any number of first portions evenly over
    all.
    Raises DatasetError when no image can be read any more.
    """
    isolated, idle = IsolatedCompute(0.0, 0, 0), StageTimer()
    order = sorted(range(len(portions)), key=lambda number: number * _GOLDEN % 1)
    with ThreadPoolExecutor(threads) as pool, progress("compute alone", len(portions), "portions") as advance:
        for number in order:
            prepared: list[Prepared] = list(
                pool.map(lambda sample: prepare(dataset, sample, protocol, idle), portions[number])
            )
            views = [view for image in prepared if not isinstance(image, ImageError) for view in image.views]
            for batch in plan_views(session, views).batches:
                packed = pack_batch(batch, views)
                staged = session.stage(packed.images, packed.sizes)
                begun = time.perf_counter()
                session.compute(staged)
                took = time.perf_counter() - begun
                pixels = batch.rows * batch.height * batch.width
                isolated = IsolatedCompute(
                    isolated.seconds + took, isolated.batches + 1, isolated.canvas_pixels + pixels
                )
            advance()
            if isolated.seconds >= ISOLATED_SECONDS:
                break
    if not isolated.batches:
        raise DatasetError(
            f"{dataset.location}: no image can be read any more. Do not change the images during a measurement"
        )
    return isolated


def peak_memory() -> int:
    """Return the peak memory of this process in bytes.

    Read from the kernel if possible, because `getrusage` starts with the peak of the parent process.
    """
    status = Path("/proc/self/status")
    for line in status.read_text().splitlines() if status.exists() else ():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
