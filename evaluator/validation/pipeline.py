"""Evaluate images on one or several sessions, reading, decoding, packing and computing concurrently.

A chunk is split into portions: images that are prepared, packed into batches and computed together.

    read, decode, resize     thread pool             one image at a time
    plan, pack, upload       one thread per session  one portion at a time; its batches depend only on its images
    compute                  one thread per session  one batch at a time; no other thread uses the session
    average                  the caller              one portion at a time, in order

Memory does not depend on the size of the dataset. Each session needs the views of two portions (one is packed and
computed while the next is decoded), three batches (one being computed, two ready), and the results of a third portion,
which the caller averages and writes. A portion goes to the first session that is free.

An error belongs to its portion: earlier portions are finished and yielded, the caller then receives the error, and
later portions are dropped. An error in a thread that has no portion is raised in the caller immediately.
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

from ..datasets.dataset import Dataset, Sample
from ..engine.classify import (
    PackedView,
    ViewResult,
    average_image,
    pack_batch,
    plan_views,
    unpack_results,
)
from ..engine.session import Session
from ..errors import ContractError, ImageError
from ..imaging.decode import Trait, decode_image
from ..imaging.decode_memory import ByteSemaphore, decode_semaphore
from ..imaging.views import ViewImage, make_views
from ..machine import cores
from ..protocols import EvaluationProtocol
from .predictions import Prediction, build_prediction
from .timing import StageTimer

MAX_THREADS = 16  # more threads spend more time waiting for the interpreter lock than decoding
MAX_DECODED_PORTIONS = 2  # per session: one is packed and computed, one is decoded
MAX_STARTED_PORTIONS = 3  # per session, until they are averaged and written
MAX_READY_BATCHES = 2  # per session, besides the one being computed


@dataclass(frozen=True)
class PreparedViews:
    """The views of one image, and the traits of its file."""

    views: list[ViewImage]
    traits: tuple[Trait, ...]


Prepared = PreparedViews | ImageError  # ImageError: why the image is refused
ChunkResult = tuple[list[Prediction], npt.NDArray[np.float32]]  # lines and rows of scores


def evaluate_chunks(
    sessions: Sequence[Session],
    dataset: Dataset,
    protocol: EvaluationProtocol,
    chunks: Sequence[Sequence[Sample]],
    size: int,
    threads: int,
    *,
    timer: StageTimer | None = None,
) -> Generator[ChunkResult, None, None]:
    """Evaluate chunks of a dataset, in order.

    sessions: of one model, which share the work; size: images per portion; threads: for decoding and resizing, 0 for
    one per core; timer: records the time of each stage.

    Yields the lines of each chunk and its rows of scores, float32 (images, classes), NaN where refused. All threads
    have ended when the generator is closed or has failed.
    Raises ContractError with the file name when the model returns NaN, and any exception of the threads.
    """
    timer = timer or StageTimer()
    portions = [chunk[start : start + size] for chunk in chunks for start in range(0, len(chunk), size)]
    semaphore = decode_semaphore(gpu=sessions[0].circumstances.on_gpu)

    def prepared(sample: Sample) -> Prepared:
        return prepare(dataset, sample, protocol, timer, semaphore)

    with closing(Pipeline(sessions, portions, prepared, threads, timer)) as pipeline:
        finished = pipeline.finished()
        for chunk in chunks:
            lines: list[Prediction] = []
            scores = np.full((len(chunk), len(sessions[0].contract.classes)), np.nan, np.float32)
            for start in range(0, len(chunk), size):
                portion, end = next(finished), start + size
                with timer.timed("average"):
                    lines += _average_portion(
                        protocol, dataset.candidates, chunk[start:end], portion, scores[start:end]
                    )
            yield lines, scores


def decoding_threads(threads: int) -> int:
    """Return the number of threads for decoding and resizing. threads: requested, 0 for one per core."""
    return min(threads or cores(), MAX_THREADS)


def prepare(
    dataset: Dataset,
    sample: Sample,
    protocol: EvaluationProtocol,
    timer: StageTimer,
    semaphore: ByteSemaphore | None = None,
) -> Prepared:
    """Read, decode and resize one image. Thread-safe. semaphore: limits decoded pixels, None for the CPU's default."""
    traits: list[Trait] = []
    try:
        with timer.timed("read"):
            data = dataset.read(sample)
        with (semaphore or decode_semaphore(gpu=False)).reservation() as reserve:
            with timer.timed("decode"):
                image = decode_image(
                    data,
                    apply_exif=protocol.apply_exif,
                    preparation=protocol.preparation,
                    reserve=reserve,
                    notice=traits.append,
                )
            with timer.timed("resize"):
                views = make_views(image, protocol)
            del image  # before its reservation is released
        return PreparedViews(views, tuple(traits))
    except ImageError as error:
        return error
    finally:
        timer.image_prepared()


@dataclass
class Portion:
    """Some images in the pipeline.

    prepared: cleared when the images are packed, because it holds the pixels; views: for each image the number of views
    and the traits of its file, or why it is refused; results: view number in the portion → result; error: why the
    portion failed.
    """

    number: int
    prepared: list[Future[Prepared]] = field(default_factory=list)
    views: list[tuple[int, tuple[Trait, ...]] | ImageError] = field(default_factory=list)
    results: dict[int, ViewResult] = field(default_factory=dict)
    done: bool = False
    error: BaseException | None = None


@dataclass(frozen=True)
class _ReadyBatch:
    """A batch that is ready for a session. last: whether it is the last one of its portion."""

    portion: Portion
    packed_views: tuple[PackedView, ...]
    staged: Any
    last: bool


@dataclass
class _SessionQueue:
    """A session and its ready batches; None marks the end. changed: notified when `ready` changes."""

    session: Session
    changed: threading.Condition
    ready: deque[_ReadyBatch | None] = field(default_factory=deque)
    canvas: tuple[int, ...] = ()  # of the last packed batch


class Pipeline:
    """The threads and their shared state, which is guarded by one lock.

    prepare: returns the views of a sample, thread-safe. For the other parameters see `evaluate_chunks`.
    """

    def __init__(
        self,
        sessions: Sequence[Session],
        portions: Sequence[Sequence[Sample]],
        prepare: Callable[[Sample], Prepared],
        threads: int,
        timer: StageTimer,
    ):
        self._portions, self._prepare, self._timer = portions, prepare, timer
        self._closed = False
        self._started = 0  # portions
        self._written = 0  # portions that the caller has finished with
        self._decoded = 0  # portions whose views are not all packed
        self._stop_at = len(portions)  # the first portion that is not needed: none, or the one that failed
        self._thread_error: BaseException | None = None  # of a thread without a portion
        self._waiting: deque[Portion] = deque()  # for a session
        self._in_flight: dict[int, Portion] = {}  # started and not yet taken by the caller
        self._lock = threading.RLock()
        self._portions_changed = threading.Condition(self._lock)
        self._session_queues = [_SessionQueue(session, threading.Condition(self._lock)) for session in sessions]
        self._pool = ThreadPoolExecutor(decoding_threads(threads), thread_name_prefix="decode")
        self._threads = [
            threading.Thread(target=self._guarded, args=(work, session_queue), name=f"{name}-{number}")
            for number, session_queue in enumerate(self._session_queues)
            for name, work in (("pack", self._pack_portions), ("compute", self._compute_batches))
        ]

    def close(self) -> None:
        """Stop all threads. Images and batches in progress are finished first."""
        with self._lock:
            self._closed = True
            for session_queue in self._session_queues:
                session_queue.ready.clear()  # `_wait_for_slot` may be waiting
            self._notify_all()
        self._pool.shutdown(cancel_futures=True)
        for thread in self._threads:
            if thread.is_alive():
                thread.join()

    def finished(self) -> Iterator[Portion]:
        """Yield each computed portion, in order. Requesting the next one marks the previous one as written."""
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
        """Submit images to the pool as far as the limits allow. The caller holds the lock."""
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
                self._fail(portion, error)
                return
            self._decoded += 1
            self._waiting.append(portion)
            self._portions_changed.notify_all()

    def _guarded(self, work: Callable[[_SessionQueue], None], session_queue: _SessionQueue) -> None:
        """Run the work of a thread and pass on its exception, because the caller would wait forever otherwise."""
        try:
            work(session_queue)
        except BaseException as error:  # re-raised in the caller
            with self._lock:
                self._thread_error = error
                self._stop_at = 0
                self._notify_all()

    # The thread that packs for a session

    def _pack_portions(self, session_queue: _SessionQueue) -> None:
        while (portion := self._next_portion()) is not None:
            try:
                self._pack_portion(session_queue, portion)
            except BaseException as error:  # re-raised in the caller
                self._fail(portion, error)
            with self._lock:
                self._decoded -= 1
                self._start_portions()
            del portion  # free its memory before waiting for the next one
        self._put(session_queue, None)

    def _next_portion(self) -> Portion | None:
        """Wait for a portion that needs a session. Return None when there are no more."""
        with self._lock:
            self._portions_changed.wait_for(lambda: self._closed or self._waiting or self._started >= self._stop_at)
            return self._waiting.popleft() if self._waiting and not self._closed else None

    def _pack_portion(self, session_queue: _SessionQueue, portion: Portion) -> None:
        prepared = [future.result() for future in portion.prepared]
        portion.prepared.clear()  # the futures also hold the pixels
        portion.views = [
            image if isinstance(image, ImageError) else (len(image.views), image.traits) for image in prepared
        ]
        views = [view for image in prepared if not isinstance(image, ImageError) for view in image.views]
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
            canvas = (batch.rows, batch.height, batch.width)
            shapes = [(view.height, view.width) for view in packed.packed_views]
            self._timer.batch_packed(canvas, shapes, changed=canvas != session_queue.canvas)
            session_queue.canvas = canvas
            self._put(session_queue, _ReadyBatch(portion, packed.packed_views, staged, last=number == len(batches)))

    def _wait_for_slot(self, session_queue: _SessionQueue, portion: Portion) -> bool:
        """Wait until a session has a free slot. Return False when the portion is no longer needed."""
        with self._lock:
            session_queue.changed.wait_for(
                lambda: len(session_queue.ready) < MAX_READY_BATCHES or not self._is_needed(portion)
            )
            return self._is_needed(portion)

    def _put(self, session_queue: _SessionQueue, ready: _ReadyBatch | None) -> None:
        with self._lock:
            session_queue.ready.append(ready)
            session_queue.changed.notify_all()

    # The thread that computes on a session

    def _compute_batches(self, session_queue: _SessionQueue) -> None:
        while (ready := self._next_batch(session_queue)) is not None:
            if self._is_needed(ready.portion):
                self._compute_batch(session_queue, ready)
            del ready  # free its memory before waiting for the next one

    def _compute_batch(self, session_queue: _SessionQueue, ready: _ReadyBatch) -> None:
        try:
            with self._timer.timed("compute"):
                outputs = session_queue.session.compute(ready.staged)
            with self._timer.timed("average"):
                ready.portion.results.update(unpack_results(ready.packed_views, outputs))
        except BaseException as error:  # re-raised in the caller
            self._fail(ready.portion, error)
        else:
            if ready.last:
                self._finish(ready.portion)

    def _next_batch(self, session_queue: _SessionQueue) -> _ReadyBatch | None:
        """Wait for a batch. Return None when there are no more."""
        started = time.perf_counter()
        with self._lock:
            session_queue.changed.wait_for(lambda: self._closed or session_queue.ready)
            ready = None if self._closed else session_queue.ready.popleft()
            session_queue.changed.notify_all()
        if ready is not None:
            self._timer.add("wait", time.perf_counter() - started)
        return ready

    # All threads

    def _is_needed(self, portion: Portion) -> bool:
        return not self._closed and portion.number < self._stop_at

    def _finish(self, portion: Portion) -> None:
        with self._lock:
            portion.done = True
            self._portions_changed.notify_all()

    def _fail(self, portion: Portion, error: BaseException) -> None:
        """Store an error, which the caller receives instead of the portion. Later portions are no longer needed."""
        with self._lock:
            portion.error = portion.error or error
            portion.done = True
            self._stop_at = min(self._stop_at, portion.number)
            self._notify_all()

    def _notify_all(self) -> None:
        for condition in (self._portions_changed, *(session_queue.changed for session_queue in self._session_queues)):
            condition.notify_all()


def _average_portion(
    protocol: EvaluationProtocol,
    candidates: tuple[int, ...] | None,
    samples: Sequence[Sample],
    portion: Portion,
    scores: npt.NDArray[np.float32],
) -> Iterator[Prediction]:
    """Average the views of each image of a portion. Yield its line; set its row of `scores`, unless it was refused.

    candidates: the class indices among which predictions are made, None for all; `scores` are those of all.
    """
    results = iter([portion.results[index] for index in range(len(portion.results))])
    for sample, image, row in zip(samples, portion.views, scores, strict=True):
        if isinstance(image, ImageError):
            yield Prediction(sample.file, sample.label, refused=str(image), also=sample.also)
            continue
        views, traits = image
        try:
            classified = average_image(protocol, list(islice(results, views)))
        except ContractError as error:
            raise ContractError(f"{sample.file}: {error}") from error
        row[:] = classified.scores
        yield build_prediction(sample.file, sample.label, classified.among(candidates), sample.also, traits)
