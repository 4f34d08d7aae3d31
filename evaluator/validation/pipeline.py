"""Images from a dataset through sessions to scores, every step at the same time.

A chunk is cut into portions: images that are prepared, planned and computed together.

    read, decode, resize     threads of a pool     an image at a time
    plan, pack, upload       one thread a session  a portion at a time: its batches are planned from its images alone
    compute                  one thread a session  a batch at a time; no other thread touches the session
    average                  the caller            a portion at a time, in their order

What is in memory, whatever the dataset's size. For each session: the views of two portions (one is packed and computed
while the next is decoded), three batches (one is computed, two are ready), and the results of a third portion, which
the caller averages and writes. A portion goes to the session that is free first.

An error belongs to its portion: those before it are finished and handed over, the caller gets the error in its place,
and what comes later is left. An error of a thread that has no portion in hand goes to the caller at once.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import numpy as np
import numpy.typing as npt

from prelunet.evaluator.datasets.dataset import Dataset, Sample
from prelunet.evaluator.engine.batching import Batch
from prelunet.evaluator.engine.classify import (
    Classification,
    EvaluationSession,
    PackedBatch,
    PackedView,
    ViewResult,
    average_image,
    pack_batch,
    plan_views,
    unpack_results,
)
from prelunet.evaluator.errors import ContractError, ImageError
from prelunet.evaluator.imaging.decode import decode_image
from prelunet.evaluator.imaging.decode_memory import ByteSemaphore, decode_semaphore
from prelunet.evaluator.imaging.views import ViewImage, make_views
from prelunet.evaluator.machine import cores
from prelunet.evaluator.protocols import EvaluationProtocol
from prelunet.evaluator.validation.predictions import Prediction, build_prediction
from prelunet.evaluator.validation.timing import StageTimer

MAX_THREADS = 16  # beyond, the threads wait for the interpreter more than they decode
MAX_DECODED_PORTIONS = 2  # for each session: one is packed and computed, one is decoded
MAX_STARTED_PORTIONS = 3  # for each session, until they are averaged and written
MAX_READY_BATCHES = 2  # for each session, besides the one that is computed

Prepared = list[ViewImage] | ImageError  # one image, ready for the session or refused
ChunkResult = tuple[list[Prediction], npt.NDArray[np.float32]]  # lines and rows of scores


def evaluate_chunks(
    sessions: Sequence[EvaluationSession],
    dataset: Dataset,
    protocol: EvaluationProtocol,
    chunks: Sequence[Sequence[Sample]],
    size: int,
    threads: int,
    *,
    timer: StageTimer | None = None,
) -> Generator[ChunkResult, None, None]:
    """Evaluate chunks of a dataset, in their order.

    sessions: of one model, which share the work; size: images of a portion; threads: that decode and resize, 0 for one
    per core; stages: told where the time goes.

    Yields the lines of each chunk and its rows of scores, float32 (images, classes), NaN where refused. Nothing of it
    runs any more when the generator is closed or has failed.
    Raises ContractError that names the file when the model gives NaN, and what any of the threads raises.
    """
    timer = timer or StageTimer()
    portions = [chunk[start : start + size] for chunk in chunks for start in range(0, len(chunk), size)]
    semaphore = decode_semaphore(gpu=sessions[0].circumstances.on_gpu)

    def prepared(sample: Sample) -> Prepared:
        return prepare(dataset, sample, protocol, timer, semaphore)

    with closing(Pipeline(sessions, portions, prepared, threads, timer)) as pipeline:
        finished = pipeline.finished()
        for chunk in chunks:
            classified: list[Classification | ImageError] = []
            for start in range(0, len(chunk), size):
                portion = next(finished)
                with timer.timed("average"):
                    classified += _average_portion(protocol, chunk[start : start + size], portion)
            with timer.timed("average"):
                result = _chunk_result(chunk, classified, len(sessions[0].contract.classes))
            yield result


def decoding_threads(threads: int) -> int:
    """Return how many threads decode and resize; threads: asked for, 0 for one per core."""
    return min(threads or cores(), MAX_THREADS)


def prepare(
    dataset: Dataset,
    sample: Sample,
    protocol: EvaluationProtocol,
    timer: StageTimer,
    semaphore: ByteSemaphore | None = None,
) -> Prepared:
    """Read, decode and resize one image; any thread may. room: for its decoded pixels, None for that beside a CPU."""
    try:
        with timer.timed("read"):
            data = dataset.read(sample)
        with (semaphore or decode_semaphore(gpu=False)).reservation() as reserve:
            with timer.timed("decode"):
                image = decode_image(data, apply_exif=protocol.apply_exif, reserve=reserve)
            with timer.timed("resize"):
                views = make_views(image, protocol)
            del image  # before its room is given back
        return views
    except ImageError as error:
        return error
    finally:
        timer.image_prepared()


@dataclass
class Portion:
    """Some images on their way.

    prepared: emptied when they are packed, because it holds the pixels; views: of each image how many, or why it is
    refused; results: of all views, numbered through; error: why it is not computed.
    """

    number: int
    prepared: list[Future[Prepared]] = field(default_factory=list)
    views: list[int | ImageError] = field(default_factory=list)
    results: dict[int, ViewResult] = field(default_factory=dict)
    done: bool = False
    error: BaseException | None = None


@dataclass(frozen=True)
class _ReadyBatch:
    """A batch that a session can compute. last: of its portion."""

    portion: Portion
    packed_views: tuple[PackedView, ...]
    staged: Any
    last: bool


@dataclass
class _SessionQueue:
    """A session and what is ready for it; None behind the last batch. changed: told when that changes."""

    session: EvaluationSession
    changed: threading.Condition
    ready: deque[_ReadyBatch | None] = field(default_factory=deque)
    canvas: tuple[int, ...] = ()  # of the last batch that was packed


class Pipeline:
    """The threads, and what is between them. All that several of them see changes under one lock.

    prepare: gives the views of a sample, in any thread; else see `evaluate_chunks`.
    """

    def __init__(
        self,
        sessions: Sequence[EvaluationSession],
        portions: Sequence[Sequence[Sample]],
        prepare: Callable[[Sample], Prepared],
        threads: int,
        timer: StageTimer,
    ):
        self._portions, self._prepare, self._timer = portions, prepare, timer
        self._closed = False
        self._started = 0  # portions
        self._written = 0  # portions with which the caller has finished
        self._decoded = 0  # portions of which not all views are packed
        self._stop_at = len(portions)  # the first portion that need not be done: none, or the one that failed
        self._thread_error: BaseException | None = None  # why one of the threads is gone
        self._waiting: deque[Portion] = deque()  # for a session
        self._in_flight: dict[int, Portion] = {}  # begun and not yet taken by the caller
        self._lock = threading.Lock()
        self._portions_changed = threading.Condition(self._lock)
        self._session_queues = [_SessionQueue(session, threading.Condition(self._lock)) for session in sessions]
        self._pool = ThreadPoolExecutor(decoding_threads(threads), thread_name_prefix="decode")
        self._threads = [
            threading.Thread(target=self._guarded, args=(work, session_queue), name=f"{name}-{number}")
            for number, session_queue in enumerate(self._session_queues)
            for name, work in (("stage", self._stage_portions), ("compute", self._compute_batches))
        ]

    def close(self) -> None:
        """End all threads; an image or a batch that one of them has begun is finished first."""
        with self._lock:
            self._closed = True
            for session_queue in self._session_queues:
                session_queue.ready.clear()  # a session may wait in `stage` until it has room for another batch
            self._notify_all()
        self._pool.shutdown(cancel_futures=True)
        for thread in self._threads:
            if thread.is_alive():
                thread.join()

    def finished(self) -> Iterator[Portion]:
        """Give each portion in its order, computed; the one before counts as written when the next is asked for."""
        for thread in self._threads:
            thread.start()
        for number in range(len(self._portions)):
            portion = self._wait_for(number)
            if portion.error is not None:
                raise portion.error
            yield portion

    def _wait_for(self, number: int) -> Portion:
        with self._lock:
            self._written = number
            self._start_portions()
            self._portions_changed.wait_for(lambda: self._thread_error or self._in_flight[number].done)
            if self._thread_error is not None:
                raise self._thread_error
            return self._in_flight.pop(number)

    def _start_portions(self) -> None:
        """Hand images to the pool as far as memory allows; called under the lock."""
        while (
            not self._closed
            and self._started < self._stop_at
            and self._started < self._written + MAX_STARTED_PORTIONS * len(self._session_queues)
            and self._decoded < MAX_DECODED_PORTIONS * len(self._session_queues)
        ):
            portion = self._in_flight[self._started] = Portion(self._started)
            self._started += 1
            try:
                samples = self._portions[portion.number]
                portion.prepared += [self._pool.submit(self._prepare, sample) for sample in samples]
            except Exception as error:  # "can't start new thread"
                self._record_failure(portion, error)
                return
            self._decoded += 1
            self._waiting.append(portion)
            self._portions_changed.notify_all()

    def _guarded(self, work: Callable[[_SessionQueue], None], session_queue: _SessionQueue) -> None:
        """Run the work of a thread; when it fails the caller is told, who would wait for ever otherwise."""
        try:
            work(session_queue)
        except BaseException as error:  # the caller's to handle, whatever it is
            with self._lock:
                self._thread_error = error
                self._stop_at = 0
                self._notify_all()

    # The thread that packs for a session

    def _stage_portions(self, session_queue: _SessionQueue) -> None:
        while (portion := self._next_portion()) is not None:
            try:
                self._stage_portion(session_queue, portion)
            except BaseException as error:  # the caller's to handle, whatever it is
                self._fail(portion, error)
            with self._lock:
                self._decoded -= 1
                self._start_portions()
            del portion  # before this thread waits for the next
        self._put(session_queue, None)

    def _next_portion(self) -> Portion | None:
        """Wait for a portion that needs a session; None when there will be no more."""
        with self._lock:
            self._portions_changed.wait_for(lambda: self._closed or self._waiting or self._started >= self._stop_at)
            return self._waiting.popleft() if self._waiting and not self._closed else None

    def _stage_portion(self, session_queue: _SessionQueue, portion: Portion) -> None:
        prepared = [future.result() for future in portion.prepared]
        portion.prepared.clear()  # the futures hold the pixels too
        portion.views = [images if isinstance(images, ImageError) else len(images) for images in prepared]
        views = [view for images in prepared if not isinstance(images, ImageError) for view in images]
        with self._timer.timed("pack"):
            batches = plan_views(session_queue.session, views).batches
        if not batches:
            self._finish(portion)
        for number, batch in enumerate(batches, start=1):
            if not self._wait_for_slot(session_queue, portion):
                return
            with self._timer.timed("pack"):
                packed = pack_batch(batch, views)
            with self._timer.timed("upload"):
                staged = session_queue.session.stage(packed.images, packed.sizes)
            self._count_batch(session_queue, batch, packed)
            self._put(session_queue, _ReadyBatch(portion, packed.packed_views, staged, last=number == len(batches)))

    def _wait_for_slot(self, session_queue: _SessionQueue, portion: Portion) -> bool:
        """Wait until a session may have one more batch; False when this portion is not wanted any more."""
        with self._lock:
            session_queue.changed.wait_for(
                lambda: len(session_queue.ready) < MAX_READY_BATCHES or not self._is_needed(portion)
            )
            return self._is_needed(portion)

    def _count_batch(self, session_queue: _SessionQueue, batch: Batch, packed: PackedBatch) -> None:
        canvas = (batch.rows, batch.height, batch.width)
        shapes = [(packed_view.height, packed_view.width) for packed_view in packed.packed_views]
        self._timer.batch_packed(canvas, shapes, changed=canvas != session_queue.canvas)
        session_queue.canvas = canvas

    def _put(self, session_queue: _SessionQueue, ready: _ReadyBatch | None) -> None:
        with self._lock:
            session_queue.ready.append(ready)
            session_queue.changed.notify_all()

    # The thread that owns a session

    def _compute_batches(self, session_queue: _SessionQueue) -> None:
        while (ready := self._next_batch(session_queue)) is not None:
            if self._is_needed(ready.portion):
                self._compute_batch(session_queue, ready)
            del ready  # before this thread waits for the next

    def _compute_batch(self, session_queue: _SessionQueue, ready: _ReadyBatch) -> None:
        try:
            with self._timer.timed("compute"):
                outputs = session_queue.session.compute(ready.staged)
            with self._timer.timed("average"):
                ready.portion.results.update(unpack_results(ready.packed_views, outputs))
        except BaseException as error:  # the caller's to handle, whatever it is
            self._fail(ready.portion, error)
        else:
            if ready.last:
                self._finish(ready.portion)

    def _next_batch(self, session_queue: _SessionQueue) -> _ReadyBatch | None:
        """Wait for a batch; None when there will be no more."""
        begun = time.perf_counter()
        with self._lock:
            session_queue.changed.wait_for(lambda: self._closed or session_queue.ready)
            ready = None if self._closed else session_queue.ready.popleft()
            session_queue.changed.notify_all()
        if ready is not None:
            self._timer.add("wait", time.perf_counter() - begun)
        return ready

    # All of them

    def _is_needed(self, portion: Portion) -> bool:
        return not self._closed and portion.number < self._stop_at

    def _finish(self, portion: Portion) -> None:
        with self._lock:
            portion.done = True
            self._portions_changed.notify_all()

    def _fail(self, portion: Portion, error: BaseException) -> None:
        with self._lock:
            self._record_failure(portion, error)

    def _record_failure(self, portion: Portion, error: BaseException) -> None:
        """Keep an error for the caller, who gets it in the place of the portion; called under the lock.

        No later portion is wanted any more.
        """
        portion.error = portion.error or error
        portion.done = True
        self._stop_at = min(self._stop_at, portion.number)
        self._notify_all()

    def _notify_all(self) -> None:
        """Wake whoever waits for anything; called under the lock."""
        for condition in (self._portions_changed, *(session_queue.changed for session_queue in self._session_queues)):
            condition.notify_all()


def _average_portion(
    protocol: EvaluationProtocol, samples: Sequence[Sample], portion: Portion
) -> list[Classification | ImageError]:
    """Average the views of each image of a portion."""
    results = iter([portion.results[index] for index in range(len(portion.results))])
    classified: list[Classification | ImageError] = []
    for sample, views in zip(samples, portion.views, strict=True):
        if isinstance(views, ImageError):
            classified.append(views)
            continue
        try:
            classified.append(average_image(protocol, list(islice(results, views))))
        except ContractError as error:
            raise ContractError(f"{sample.file}: {error}") from error
    return classified


def _chunk_result(
    chunk: Sequence[Sample], classified: Sequence[Classification | ImageError], classes: int
) -> ChunkResult:
    """Return the lines of a chunk and its rows of scores, NaN where refused."""
    scores = np.full((len(chunk), classes), np.nan, np.float32)
    predictions = []
    for row, sample, result in zip(scores, chunk, classified, strict=True):
        if isinstance(result, ImageError):
            predictions.append(Prediction(sample.file, sample.label, refused=str(result)))
        else:
            row[:] = result.scores
            predictions.append(build_prediction(sample.file, sample.label, result))
    return predictions, scores
