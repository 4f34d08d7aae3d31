"""Images from a dataset through sessions to scores, every step at the same time.

    read, decode, resize     threads of a pool     an image at a time
    plan, pack, upload       one thread a session  a part at a time: its batches are planned from its images alone
    compute                  one thread a session  a batch at a time; no other thread touches the session
    average                  the caller            a part at a time, in their order

What is in memory, whatever the dataset's size. For each session: the views of two parts (one is packed and computed
while the next is decoded), three batches (one is computed, two are ready), and the results of a third part, which the
caller averages and writes. A part goes to the session that is free first.

An error belongs to its part: the parts before it are finished and handed over, the caller gets the error in its place,
and what comes later is left.
"""

import os
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

from evaluator.datasets.sample import Dataset, Sample
from evaluator.engine.batching import Batch
from evaluator.engine.classify import (
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
from evaluator.engine.stages import Stages
from evaluator.errors import ContractError, ImageError
from evaluator.imaging.decode import decode_rgb
from evaluator.imaging.views import ViewImage, make_views
from evaluator.protocols import Protocol
from evaluator.validation.predictions import Prediction, prediction_of

MAX_THREADS = 16  # beyond, the threads wait for the interpreter more than they decode
PARTS_OF_PIXELS = 2  # for each session: one is packed and computed, one is decoded
PARTS_BEGUN = 3  # for each session, until they are averaged and written
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

    sessions: of one model, which share the work; size: images of a part; threads: that decode and resize, 0 for one
    per core; stages: told where the time goes.

    Yields the lines of each chunk and its rows of scores, float32 (images, classes), NaN where refused. Nothing of it
    runs any more when the generator is closed or has failed.
    Raises ContractError that names the file when the model gives NaN, and what any of the threads raises.
    """
    stages = stages or Stages()
    parts = [chunk[start : start + size] for chunk in chunks for start in range(0, len(chunk), size)]

    def prepare(sample: Sample) -> Prepared:
        return _prepare(dataset, sample, protocol, stages)

    with closing(Pipeline(sessions, parts, prepare, threads, stages)) as pipeline:
        finished = pipeline.finished()
        for chunk in chunks:
            classified: list[Classified | ImageError] = []
            for start in range(0, len(chunk), size):
                part = next(finished)
                with stages.timed("average"):
                    classified += _combined(protocol, chunk[start : start + size], part)
            with stages.timed("average"):
                result = _to_write(chunk, classified, len(sessions[0].contract.classes))
            yield result


def decoding_threads(threads: int) -> int:
    """Return how many threads decode and resize; threads: asked for, 0 for one per core."""
    return min(threads or os.cpu_count() or 1, MAX_THREADS)


def _prepare(dataset: Dataset, sample: Sample, protocol: Protocol, stages: Stages) -> Prepared:
    """Read, decode and resize one image; runs in a thread."""
    try:
        with stages.timed("read"):
            data = dataset.read(sample)
        with stages.timed("decode"):
            image = decode_rgb(data, apply_exif=protocol.apply_exif)
        with stages.timed("resize"):
            return make_views(image, protocol)
    except ImageError as error:
        return error
    finally:
        stages.image_prepared()


@dataclass
class Part:
    """Some images on their way.

    prepared: emptied when they are packed, because it holds the pixels; views: of each image how many, or why it is
    refused; results: of all views, numbered through; error: why it is not computed.
    """

    number: int
    prepared: list[Future[Prepared]]
    views: list[int | ImageError] = field(default_factory=list)
    results: dict[int, ViewResult] = field(default_factory=dict)
    done: bool = False
    error: BaseException | None = None


@dataclass(frozen=True)
class _Ready:
    """A batch that a session can compute. last: of its part."""

    part: Part
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
        parts: Sequence[Sequence[Sample]],
        prepare: Callable[[Sample], Prepared],
        threads: int,
        stages: Stages,
    ):
        self._parts, self._prepare, self._stages = parts, prepare, stages
        self._closed = False
        self._begun = 0  # parts
        self._written = 0  # parts with which the caller has finished
        self._with_pixels = 0  # parts of which not all views are packed
        self._end = len(parts)  # the first part that need not be done: none, or the one that failed
        self._waiting: deque[Part] = deque()  # for a session
        self._in_hand: dict[int, Part] = {}  # begun and not yet taken by the caller
        self._lock = threading.Lock()
        self._parts_changed = threading.Condition(self._lock)
        self._lanes = [_Lane(session, threading.Condition(self._lock)) for session in sessions]
        self._pool = ThreadPoolExecutor(decoding_threads(threads), thread_name_prefix="decode")
        self._threads = [
            threading.Thread(target=work, args=(lane,), name=f"{name}-{number}")
            for number, lane in enumerate(self._lanes)
            for name, work in (("stage", self._stage_parts), ("compute", self._compute_batches))
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

    def finished(self) -> Iterator[Part]:
        """Give each part in its order, computed; the part before counts as written when the next is asked for."""
        for thread in self._threads:
            thread.start()
        for number in range(len(self._parts)):
            part = self._wait_for(number)
            if part.error is not None:
                raise part.error
            yield part

    def _wait_for(self, number: int) -> Part:
        with self._lock:
            self._written = number
            self._begin_parts()
            part = self._in_hand.pop(number)
            self._parts_changed.wait_for(lambda: part.done)
        return part

    def _begin_parts(self) -> None:
        """Hand images to the pool as far as memory allows; called under the lock."""
        while (
            not self._closed
            and self._begun < self._end
            and self._begun < self._written + PARTS_BEGUN * len(self._lanes)
            and self._with_pixels < PARTS_OF_PIXELS * len(self._lanes)
        ):
            samples = self._parts[self._begun]
            part = Part(self._begun, [self._pool.submit(self._prepare, sample) for sample in samples])
            self._begun += 1
            self._with_pixels += 1
            self._in_hand[part.number] = part
            self._waiting.append(part)
            self._parts_changed.notify_all()

    # The thread that packs for a session

    def _stage_parts(self, lane: _Lane) -> None:
        while (part := self._next_part()) is not None:
            try:
                self._stage_part(lane, part)
            except BaseException as error:  # the caller's to handle, whatever it is
                self._fail(part, error)
            with self._lock:
                self._with_pixels -= 1
                self._begin_parts()
            del part  # before this thread waits for the next
        self._put(lane, None)

    def _next_part(self) -> Part | None:
        """Wait for a part that needs a session; None when there will be no more."""
        with self._lock:
            self._parts_changed.wait_for(lambda: self._closed or self._waiting or self._begun >= self._end)
            return self._waiting.popleft() if self._waiting and not self._closed else None

    def _stage_part(self, lane: _Lane, part: Part) -> None:
        prepared = [future.result() for future in part.prepared]
        part.prepared.clear()  # the futures hold the pixels too
        part.views = [images if isinstance(images, ImageError) else len(images) for images in prepared]
        views = [view for images in prepared if not isinstance(images, ImageError) for view in images]
        with self._stages.timed("pack"):
            batches = plan_views(lane.session, views).batches
        if not batches:
            self._finish(part)
        for number, batch in enumerate(batches, start=1):
            if not self._room(lane, part):
                return
            with self._stages.timed("pack"):
                packed = pack_batch(batch, views)
            with self._stages.timed("upload"):
                staged = lane.session.stage(packed.images, packed.sizes)
            self._count(lane, batch, packed)
            self._put(lane, _Ready(part, packed.members, staged, last=number == len(batches)))

    def _room(self, lane: _Lane, part: Part) -> bool:
        """Wait until a session may have one more batch; False when this part is not wanted any more."""
        with self._lock:
            lane.changed.wait_for(lambda: len(lane.ready) < BATCHES_READY or not self._wanted(part))
            return self._wanted(part)

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
            if self._wanted(ready.part):
                self._compute_batch(lane, ready)
            del ready  # before this thread waits for the next

    def _compute_batch(self, lane: _Lane, ready: _Ready) -> None:
        try:
            with self._stages.timed("compute"):
                outputs = lane.session.compute(ready.staged)
            with self._stages.timed("average"):
                ready.part.results.update(results_of(ready.members, outputs))
        except BaseException as error:  # the caller's to handle, whatever it is
            self._fail(ready.part, error)
        else:
            if ready.last:
                self._finish(ready.part)

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

    def _wanted(self, part: Part) -> bool:
        return not self._closed and part.number < self._end

    def _finish(self, part: Part) -> None:
        with self._lock:
            part.done = True
            self._parts_changed.notify_all()

    def _fail(self, part: Part, error: BaseException) -> None:
        """Keep an error for the caller, who gets it in the place of the part; no later part is wanted any more."""
        with self._lock:
            part.error = part.error or error
            part.done = True
            self._end = min(self._end, part.number)
            self._tell_all()

    def _tell_all(self) -> None:
        """Wake whoever waits for anything; called under the lock."""
        for condition in (self._parts_changed, *(lane.changed for lane in self._lanes)):
            condition.notify_all()


def _combined(protocol: Protocol, samples: Sequence[Sample], part: Part) -> list[Classified | ImageError]:
    """Average the views of each image of a part."""
    results = iter([part.results[index] for index in range(len(part.results))])
    classified: list[Classified | ImageError] = []
    for sample, views in zip(samples, part.views, strict=True):
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
