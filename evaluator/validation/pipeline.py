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
    Classified,
    Member,
    Model,
    PackedBatch,
    ViewResult,
    combine,
    pack_batch,
    plan_views,
    results_of,
)
from prelunet.evaluator.errors import ContractError, ImageError
from prelunet.evaluator.imaging.decode import decode_image
from prelunet.evaluator.imaging.decode_memory import DecodingRoom, decoding_room
from prelunet.evaluator.imaging.views import ViewImage, make_views
from prelunet.evaluator.machine import cores
from prelunet.evaluator.protocols import Protocol
from prelunet.evaluator.validation.predictions import Prediction, prediction_of
from prelunet.evaluator.validation.timing import Stages

MAX_THREADS = 16  # beyond, the threads wait for the interpreter more than they decode
PORTIONS_OF_PIXELS = 2  # for each session: one is packed and computed, one is decoded
PORTIONS_BEGUN = 3  # for each session, until they are averaged and written
BATCHES_READY = 2  # for each session, besides the one that is computed

Prepared = list[ViewImage] | ImageError  # one image, ready for the session or refused
ChunkResult = tuple[list[Prediction], npt.NDArray[np.float32]]  # lines and rows of scores


def evaluate_chunks(
    sessions: Sequence[Model],
    dataset: Dataset,
    protocol: Protocol,
    chunks: Sequence[Sequence[Sample]],
    size: int,
    threads: int,
    *,
    stages: Stages | None = None,
) -> Generator[ChunkResult, None, None]:
    """Evaluate chunks of a dataset, in their order.

    sessions: of one model, which share the work; size: images of a portion; threads: that decode and resize, 0 for one
    per core; stages: told where the time goes.

    Yields the lines of each chunk and its rows of scores, float32 (images, classes), NaN where refused. Nothing of it
    runs any more when the generator is closed or has failed.
    Raises ContractError that names the file when the model gives NaN, and what any of the threads raises.
    """
    stages = stages or Stages()
    portions = [chunk[start : start + size] for chunk in chunks for start in range(0, len(chunk), size)]
    room = decoding_room(gpu=sessions[0].circumstances.on_gpu)

    def prepared(sample: Sample) -> Prepared:
        return prepare(dataset, sample, protocol, stages, room)

    with closing(Pipeline(sessions, portions, prepared, threads, stages)) as pipeline:
        finished = pipeline.finished()
        for chunk in chunks:
            classified: list[Classified | ImageError] = []
            for start in range(0, len(chunk), size):
                portion = next(finished)
                with stages.timed("average"):
                    classified += _combined(protocol, chunk[start : start + size], portion)
            with stages.timed("average"):
                result = _to_write(chunk, classified, len(sessions[0].contract.classes))
            yield result


def decoding_threads(threads: int) -> int:
    """Return how many threads decode and resize; threads: asked for, 0 for one per core."""
    return min(threads or cores(), MAX_THREADS)


def prepare(
    dataset: Dataset, sample: Sample, protocol: Protocol, stages: Stages, room: DecodingRoom | None = None
) -> Prepared:
    """Read, decode and resize one image; any thread may. room: for its decoded pixels, None for that beside a CPU."""
    try:
        with stages.timed("read"):
            data = dataset.read(sample)
        with (room or decoding_room(gpu=False)).place() as admit:
            with stages.timed("decode"):
                image = decode_image(data, apply_exif=protocol.apply_exif, admit=admit)
            with stages.timed("resize"):
                views = make_views(image, protocol)
            del image  # before its room is given back
        return views
    except ImageError as error:
        return error
    finally:
        stages.image_prepared()


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
class _Ready:
    """A batch that a session can compute. last: of its portion."""

    portion: Portion
    members: tuple[Member, ...]
    staged: Any
    last: bool


@dataclass
class _Lane:
    """A session and what is ready for it; None behind the last batch. changed: told when that changes."""

    session: Model
    changed: threading.Condition
    ready: deque[_Ready | None] = field(default_factory=deque)
    canvas: tuple[int, ...] = ()  # of the last batch that was packed


class Pipeline:
    """The threads, and what is between them. All that several of them see changes under one lock.

    prepare: gives the views of a sample, in any thread; else see `evaluate_chunks`.
    """

    def __init__(
        self,
        sessions: Sequence[Model],
        portions: Sequence[Sequence[Sample]],
        prepare: Callable[[Sample], Prepared],
        threads: int,
        stages: Stages,
    ):
        self._portions, self._prepare, self._stages = portions, prepare, stages
        self._closed = False
        self._begun = 0  # portions
        self._written = 0  # portions with which the caller has finished
        self._with_pixels = 0  # portions of which not all views are packed
        self._end = len(portions)  # the first portion that need not be done: none, or the one that failed
        self._broken: BaseException | None = None  # why one of the threads is gone
        self._waiting: deque[Portion] = deque()  # for a session
        self._in_hand: dict[int, Portion] = {}  # begun and not yet taken by the caller
        self._lock = threading.Lock()
        self._portions_changed = threading.Condition(self._lock)
        self._lanes = [_Lane(session, threading.Condition(self._lock)) for session in sessions]
        self._pool = ThreadPoolExecutor(decoding_threads(threads), thread_name_prefix="decode")
        self._threads = [
            threading.Thread(target=self._guarded, args=(work, lane), name=f"{name}-{number}")
            for number, lane in enumerate(self._lanes)
            for name, work in (("stage", self._stage_portions), ("compute", self._compute_batches))
        ]

    def close(self) -> None:
        """End all threads; an image or a batch that one of them has begun is finished first."""
        with self._lock:
            self._closed = True
            for lane in self._lanes:
                lane.ready.clear()  # a session may wait in `stage` until it has room for another batch
            self._tell_all()
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
            self._begin_portions()
            self._portions_changed.wait_for(lambda: self._broken or self._in_hand[number].done)
            if self._broken is not None:
                raise self._broken
            return self._in_hand.pop(number)

    def _begin_portions(self) -> None:
        """Hand images to the pool as far as memory allows; called under the lock."""
        while (
            not self._closed
            and self._begun < self._end
            and self._begun < self._written + PORTIONS_BEGUN * len(self._lanes)
            and self._with_pixels < PORTIONS_OF_PIXELS * len(self._lanes)
        ):
            portion = self._in_hand[self._begun] = Portion(self._begun)
            self._begun += 1
            try:
                samples = self._portions[portion.number]
                portion.prepared += [self._pool.submit(self._prepare, sample) for sample in samples]
            except Exception as error:  # "can't start new thread"
                self._give_up(portion, error)
                return
            self._with_pixels += 1
            self._waiting.append(portion)
            self._portions_changed.notify_all()

    def _guarded(self, work: Callable[[_Lane], None], lane: _Lane) -> None:
        """Run the work of a thread; when it fails the caller is told, who would wait for ever otherwise."""
        try:
            work(lane)
        except BaseException as error:  # the caller's to handle, whatever it is
            with self._lock:
                self._broken = error
                self._end = 0
                self._tell_all()

    # The thread that packs for a session

    def _stage_portions(self, lane: _Lane) -> None:
        while (portion := self._next_portion()) is not None:
            try:
                self._stage_portion(lane, portion)
            except BaseException as error:  # the caller's to handle, whatever it is
                self._fail(portion, error)
            with self._lock:
                self._with_pixels -= 1
                self._begin_portions()
            del portion  # before this thread waits for the next
        self._put(lane, None)

    def _next_portion(self) -> Portion | None:
        """Wait for a portion that needs a session; None when there will be no more."""
        with self._lock:
            self._portions_changed.wait_for(lambda: self._closed or self._waiting or self._begun >= self._end)
            return self._waiting.popleft() if self._waiting and not self._closed else None

    def _stage_portion(self, lane: _Lane, portion: Portion) -> None:
        prepared = [future.result() for future in portion.prepared]
        portion.prepared.clear()  # the futures hold the pixels too
        portion.views = [images if isinstance(images, ImageError) else len(images) for images in prepared]
        views = [view for images in prepared if not isinstance(images, ImageError) for view in images]
        with self._stages.timed("pack"):
            batches = plan_views(lane.session, views).batches
        if not batches:
            self._finish(portion)
        for number, batch in enumerate(batches, start=1):
            if not self._room(lane, portion):
                return
            with self._stages.timed("pack"):
                packed = pack_batch(batch, views)
            with self._stages.timed("upload"):
                staged = lane.session.stage(packed.images, packed.sizes)
            self._count(lane, batch, packed)
            self._put(lane, _Ready(portion, packed.members, staged, last=number == len(batches)))

    def _room(self, lane: _Lane, portion: Portion) -> bool:
        """Wait until a session may have one more batch; False when this portion is not wanted any more."""
        with self._lock:
            lane.changed.wait_for(lambda: len(lane.ready) < BATCHES_READY or not self._wanted(portion))
            return self._wanted(portion)

    def _count(self, lane: _Lane, batch: Batch, packed: PackedBatch) -> None:
        canvas = (batch.rows, batch.height, batch.width)
        shapes = [(member.height, member.width) for member in packed.members]
        self._stages.batch_packed(canvas, shapes, changed=canvas != lane.canvas)
        lane.canvas = canvas

    def _put(self, lane: _Lane, ready: _Ready | None) -> None:
        with self._lock:
            lane.ready.append(ready)
            lane.changed.notify_all()

    # The thread that owns a session

    def _compute_batches(self, lane: _Lane) -> None:
        while (ready := self._next_batch(lane)) is not None:
            if self._wanted(ready.portion):
                self._compute_batch(lane, ready)
            del ready  # before this thread waits for the next

    def _compute_batch(self, lane: _Lane, ready: _Ready) -> None:
        try:
            with self._stages.timed("compute"):
                outputs = lane.session.compute(ready.staged)
            with self._stages.timed("average"):
                ready.portion.results.update(results_of(ready.members, outputs))
        except BaseException as error:  # the caller's to handle, whatever it is
            self._fail(ready.portion, error)
        else:
            if ready.last:
                self._finish(ready.portion)

    def _next_batch(self, lane: _Lane) -> _Ready | None:
        """Wait for a batch; None when there will be no more."""
        begun = time.perf_counter()
        with self._lock:
            lane.changed.wait_for(lambda: self._closed or lane.ready)
            ready = None if self._closed else lane.ready.popleft()
            lane.changed.notify_all()
        if ready is not None:
            self._stages.add("wait", time.perf_counter() - begun)
        return ready

    # All of them

    def _wanted(self, portion: Portion) -> bool:
        return not self._closed and portion.number < self._end

    def _finish(self, portion: Portion) -> None:
        with self._lock:
            portion.done = True
            self._portions_changed.notify_all()

    def _fail(self, portion: Portion, error: BaseException) -> None:
        with self._lock:
            self._give_up(portion, error)

    def _give_up(self, portion: Portion, error: BaseException) -> None:
        """Keep an error for the caller, who gets it in the place of the portion; called under the lock.

        No later portion is wanted any more.
        """
        portion.error = portion.error or error
        portion.done = True
        self._end = min(self._end, portion.number)
        self._tell_all()

    def _tell_all(self) -> None:
        """Wake whoever waits for anything; called under the lock."""
        for condition in (self._portions_changed, *(lane.changed for lane in self._lanes)):
            condition.notify_all()


def _combined(protocol: Protocol, samples: Sequence[Sample], portion: Portion) -> list[Classified | ImageError]:
    """Average the views of each image of a portion."""
    results = iter([portion.results[index] for index in range(len(portion.results))])
    classified: list[Classified | ImageError] = []
    for sample, views in zip(samples, portion.views, strict=True):
        if isinstance(views, ImageError):
            classified.append(views)
            continue
        try:
            classified.append(combine(protocol, list(islice(results, views))))
        except ContractError as error:
            raise ContractError(f"{sample.file}: {error}") from error
    return classified


def _to_write(chunk: Sequence[Sample], classified: Sequence[Classified | ImageError], classes: int) -> ChunkResult:
    """Return the lines of a chunk and its rows of scores, NaN where refused."""
    scores = np.full((len(chunk), classes), np.nan, np.float32)
    predictions = []
    for row, sample, result in zip(scores, chunk, classified, strict=True):
        if isinstance(result, ImageError):
            predictions.append(Prediction(sample.file, sample.label, refused=str(result)))
        else:
            row[:] = result.scores
            predictions.append(prediction_of(sample.file, sample.label, result))
    return predictions, scores
