"""Evaluate a model on a labeled dataset, chunk by chunk, into a run folder that can be resumed.

A chunk is evaluated in portions that are small enough for their views to fit into memory, whatever the images. While
one portion is written, `pipeline` computes the next and decodes the one after it.
"""

import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

from ..datasets.dataset import Dataset, DatasetSpec, Sample
from ..engine.session import Session
from ..errors import DatasetError, EnvironmentFault, Interrupted, UsageError
from ..terminal import progress
from .heatmaps import store_heat_maps
from .pipeline import ChunkResult, evaluate_chunks
from .run import Run, RunInfo, read_run
from .run_log import RESUMED, STARTED, spec_to_log
from .timing import StageTimer
from .writer import RunWriter, open_run

# Yields the result of each chunk of samples, in order.
ChunkEvaluator = Callable[[Sequence[Sequence[Sample]]], Generator[ChunkResult, None, None]]


class WorkersLost(Exception):  # noqa: N818 - converted to an EnvironmentFault that includes the progress
    """The machines that evaluate were lost. The message is the reason."""


def validate(  # noqa: PLR0913 - one argument per option
    sessions: Sequence[Session],
    dataset: Dataset,
    info: RunInfo,
    folder: Path,
    *,
    fresh: bool = False,
    threads: int = 0,
    heatmaps: int = 0,
    chunk_evaluator: ChunkEvaluator | None = None,
    report: Callable[[str], None] = lambda _message: None,
) -> Run:
    """Evaluate every image of a run, or resume an earlier call with the same arguments.

    sessions: of one model, which share the work; info: from `build_run_info` for one of them and the dataset; folder:
    of the run, created if missing; fresh: start over; threads: for decoding and resizing, 0 for one per core;
    heatmaps: number of mistakes whose heat maps are stored at the end; chunk_evaluator: evaluates the chunks instead of
    these sessions, see `ray_cluster.evaluate_on_ray`; report: receives one sentence on where the run starts. An image
    that cannot be decoded is recorded as refused, with the reason.
    Raises DatasetError when there are no images, RunFolderError when the folder contains anything else,
    Interrupted on Ctrl-C or SIGTERM, EnvironmentFault when the disk is full or the machines of `chunk_evaluator` are
    lost, and ContractError when the model returns NaN.
    """

    def evaluate_locally(chunks: Sequence[Sequence[Sample]]) -> Generator[ChunkResult, None, None]:
        assert info.batching is not None, "None only for ensembles"
        size = info.batching.images_together
        return evaluate_chunks(sessions, dataset, info.protocol, chunks, size, threads, timer=timer)

    timer = StageTimer()
    if not dataset.samples:
        raise DatasetError(f"{dataset.location}: contains no images, so there is nothing to evaluate")
    (first, end), total = info.span, info.images
    if first == end:
        raise UsageError(
            f"shard {info.shard and '/'.join(map(str, info.shard))} is empty: "
            f"the dataset has {info.dataset['images']} images, in chunks of {info.chunk}. Use fewer shards"
        )
    samples = dataset.samples[first:end]
    with open_run(folder, info, samples, fresh=fresh) as writer, _resumable(writer, total):
        if writer.done == total:
            report(f"{folder}: already {'evaluated' if heatmaps else 'finished; nothing to do'}")
        else:
            report(f"{folder}: resuming after {writer.done} of {total} images" if writer.done else f"{folder}: new")
            writer.log(
                RESUMED if writer.done else STARTED,
                done=writer.done,
                **spec_to_log(dataset.spec or DatasetSpec(dataset.location)),
                device=sessions[0].circumstances.provider,
                remarks=list(dataset.remarks),
            )
            chunks = [samples[start : start + info.chunk] for start in range(writer.done, total, info.chunk)]
            # closing() stops the evaluation at once, not when the generator is garbage-collected.
            with closing((chunk_evaluator or evaluate_locally)(chunks)) as results:
                _write(results, writer, total, len(info.protocol.views), timer)
        if heatmaps > 0:
            store_heat_maps(sessions[0], dataset, read_run(folder), heatmaps, writer)
    return read_run(folder)


@contextmanager
def _resumable(writer: RunWriter, total: int) -> Iterator[None]:
    """Convert Ctrl-C and lost machines into errors that include the progress."""
    try:
        yield
    except KeyboardInterrupt as error:
        raise Interrupted(
            f"{writer.folder}: interrupted; {writer.done} of {total} images are done. Repeat the same command or call "
            "to resume"
        ) from error
    except WorkersLost as error:
        raise EnvironmentFault(
            f"{writer.folder}: {error}. {writer.done} of {total} images are done and saved. Fix the cause, then run "
            "the same command to resume"
        ) from error


def _write(results: Iterator[ChunkResult], writer: RunWriter, total: int, views: int, timer: StageTimer) -> None:
    """Write each chunk and log its time. total: images of the run; views: of each; timer: tells the views computed."""
    with progress("validate", total, "images", done=writer.done) as advance:
        shown = _Shown(advance, writer.done, views)
        timer.on_views = shown.computed
        started = time.monotonic()
        for predictions, scores in results:
            index = writer.done // writer.chunk
            writer.append(predictions, scores)
            now = time.monotonic()
            writer.log("chunk", index=index, images=len(predictions), seconds=round(now - started, 3))
            started = now
            shown.written(writer.done)


class _Shown:
    """Shows images as they are computed, since a chunk of a slow net takes minutes. Thread-safe.

    done: images that were written before; views: of each image.
    """

    def __init__(self, advance: Callable[[int], None], done: int, views: int) -> None:
        self._advance, self._done, self._images, self._views, self._computed = advance, done, done, views, 0
        self._lock = threading.Lock()

    def computed(self, views: int) -> None:
        with self._lock:
            self._computed += views
            self._show(self._done + self._computed // self._views)

    def written(self, images: int) -> None:
        with self._lock:
            self._show(images)

    def _show(self, images: int) -> None:
        if images > self._images:
            self._advance(images - self._images)
            self._images = images
