"""The threads that compute the batches of all models of a device.

A thread takes the next model in fair order, plans batches of that model's views with `engine.batching`, runs the batch
that holds the first view, and starts over, so that views that have arrived meanwhile can join the next batch. On a CPU
the same threads decode easy images, compute and answer: handing an image over costs more than most of these steps. They
run batches side by side in the lanes of a session; without lanes one computes while the others decode. On a GPU one
thread computes, and another packs and uploads the next batch meanwhile, but only a full one: no later view could join
it.

A failed batch is run again in halves, down to single views, so that one bad image, or too little memory for the whole
batch, does not fail the others. A device that fails on every input is lost, and so is one that hangs
(`evaluator.serving.scheduling.watchdog`).
"""

import logging
import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import numpy as np
from msgspec import Struct, structs

from ...engine.batching import Batch, BatchPlan
from ...engine.classify import PackedBatch, ViewResult, pack_batch, plan_views, unpack_results
from ...errors import ContractError, DeviceLost, OutOfMemory, UsageError
from ..decoding import DecodeProcess
from ..observability.logs import release_frames
from .model import ServedModel
from .request import ReadyView, Request, as_reported
from .shared_cores import worker_threads
from .waiting import SMALL_PIXELS, Waiting
from .watchdog import Watchdog

_SHORT_WORK = 2e7  # multiply-adds of a batch, about a millisecond: more threads would wait for each other
_HOPELESS_FACTOR = 2  # a view is not run if its remaining time is less than 1/2 of its batch's expected time

log = logging.getLogger(__name__)


class _FormedBatch(Struct, eq=False):
    """A batch whose views have left the queue.

    packed, staged: None before, and again once they are used up; behind: views that its thread computes after it.
    """

    model: ServedModel
    views: Sequence[ReadyView]
    batch: Batch
    in_lane: bool = False
    packed: PackedBatch | None = None
    staged: Any = None
    behind: Sequence[ReadyView] = ()


class BatchExecutor:
    """Runs what waits for a device, on sessions that no other thread may run.

    on_complete: called with the requests whose views are all computed; on_lost: called once, when the device is lost;
    gpu: the thread that computes decodes nothing, and another stages full batches.
    """

    def __init__(
        self,
        waiting: Waiting,
        on_complete: Callable[[list[Request]], object],
        on_lost: Callable[[DeviceLost], object],
        device: str,
        *,
        gpu: bool,
    ) -> None:
        self._waiting = waiting
        self._on_complete = on_complete
        self._on_lost = on_lost
        self._decodes = not gpu
        # Only one thread at a time forms batches; where none stages them, `ReadyQueue.planning` sees to that.
        self._forming = threading.Lock() if gpu else nullcontext()
        self._staged: _FormedBatch | None = None
        self._device = device
        self._threads: list[threading.Thread] = []
        self._watchdog = Watchdog(self._on_hang)
        self.ensure_threads(1 if gpu else worker_threads())
        if gpu:
            self.start(f"stage-{device}", self._stage)
        self._ended = threading.Event()
        watch = self._watchdog.watch
        self._watchdog_thread = threading.Thread(target=watch, args=(self._ended,), name=f"watch-{device}", daemon=True)
        self._watchdog_thread.start()

    def start(self, name: str, work: Callable[[], None]) -> None:
        """Start a thread that ends after `Waiting.close`."""
        self._threads.append(threading.Thread(target=work, name=name, daemon=True))
        self._threads[-1].start()

    def ensure_threads(self, number: int) -> None:
        """Have at least this many threads that compute; called before a session with so many lanes is used."""
        while self._waiting.workers.threads < number:
            self.start(f"compute-{self._device}", self._work)
            with self._waiting.lock:
                self._waiting.workers.change(1)

    def join(self) -> None:
        """Wait for the threads to end, after `Waiting.close`."""
        for thread in self._threads:
            thread.join()
        self._ended.set()
        self._watchdog_thread.join()

    def _work(self) -> None:
        try:
            while (task := self._next_task()) is not None:
                task()
                del task  # free what it holds before waiting for the next
        finally:
            with self._waiting.lock:
                self._waiting.workers.change(-1)

    def _next_task(self) -> Callable[[], None] | None:
        with self._forming:
            if self._staged is not None:
                formed, self._staged = self._staged, None
                return partial(self._compute, [formed], formed.views)
            return self._wait_for_task()

    def _wait_for_task(self) -> Callable[[], None] | None:
        """Wait for images to decode or a batch to run; None when the queues are closed and empty.

        A batch that is not full starts at once if another model has ready views too, or if `batch_wait` is over;
        otherwise when there is nothing left that could join it. With lanes, larger batches gain little, so it does not
        wait for what others decode. Images of clients without ready views come first: the batches of others may never
        end.
        """
        waiting, ready = self._waiting, self._waiting.ready
        with waiting.lock:
            waiting.may_stage = False
            while True:
                waiting.wait_for_core()
                if self._decodes and (images := waiting.take_images(newcomers=True)):
                    if ready.startable() is not None:
                        waiting.workers.wake()
                    lanes, expected = images[0].model.session.lanes, len(images) + len(waiting.images.waiting["thread"])
                    short = sum(image.plan.multiply_adds for image in images) <= _SHORT_WORK
                    if lanes > 1 and (in_lane := ready.reserve(lanes, expected, short=short)) is not None:
                        return partial(self._decode_and_run, images, in_lane)
                    return partial(self.decode, images)
                model = ready.startable()
                patience = None
                if model is not None:
                    patience = model.ready_since + waiting.options.batch_wait - time.monotonic()
                    if patience <= 0 or ready.flow_count() > 1 or model.fills_batch:
                        return self._batch_of(model)
                if self._decodes and (images := waiting.take_images()):
                    return partial(self.decode, images)
                if model is not None and (not model.decoding or model.session.lanes > 1):
                    return self._batch_of(model)
                if model is None and waiting.finished():
                    waiting.stageable.notify()
                    return None
                del model  # while this thread waits, it must not keep a version that is no longer served
                waiting.workers.wait(patience)

    def decode(self, requests: list[Request], process: DecodeProcess | None = None) -> None:
        """Decode images in this thread, or in a process, and queue their views. Empties the list."""
        while requests:
            request = requests.pop(0)
            if (ready := self._decoded(request, process)) is not None:
                self._waiting.decoded(request, ready)
            del request, ready

    def _decoded(self, request: Request, process: DecodeProcess | None = None) -> list[ReadyView] | None:
        """Return the views of an image; None if it cannot be decoded, which has ended its request."""
        try:
            return request.decode(process)
        except BaseException as error:  # the thread must survive, or callers would wait forever
            release_frames(error)  # they refer to the request, and that to the error
            self._waiting.decode_failed(request, as_reported(request.model, error))
            del request  # the error's traceback refers to this frame
            return None

    def _decode_and_run(self, requests: list[Request], in_lane: bool) -> None:
        """Decode images of one model and compute them at once: nothing else waits for the device. Empties the list."""
        model = requests[0].model
        decoded: list[Request] = []
        views: list[ReadyView] = []
        while requests:
            request = requests.pop(0)
            if (ready := self._decoded(request)) is not None:
                views += ready
                decoded.append(request)
            del request
        if not self._waiting.begin_decoded(decoded, views, in_lane=in_lane):  # too large to be computed beside others
            for request in decoded:
                self._waiting.decoded(request, [view for view in views if view.request is request])
            self._waiting.end_batch()
            return
        self._compute(_planned(model, views, in_lane=in_lane), views)

    # Forming batches

    def _batch_of(self, model: ServedModel) -> Callable[[], None]:
        waiting = self._waiting
        waiting.ready.planning = True
        if self._decodes and waiting.images.waiting["thread"]:
            waiting.workers.wake()
        return partial(self._run_first, waiting.ready.to_plan(model))

    def _run_first(self, views: list[ReadyView]) -> None:
        """Plan batches of views and run the first. Empties the list: the others stay in their queue."""
        formed = self._form(views)
        views.clear()
        self._waiting.end_planning()
        if formed is not None:
            self._compute([formed], formed.views)

    def _form(self, views: Sequence[ReadyView], *, full: bool = False) -> _FormedBatch | None:
        """Plan batches and take the views of the first one. full: only if no other view could join it.

        Returns None if there is no such batch, or if one of its views has left the queue.
        """
        model = views[0].request.model
        try:
            plan = _plan(model, views)
            if full and not is_full(plan, model):
                return None
            chosen = [views[index] for index in plan.batches[0].indices]
            if in_lane := self._waiting.ready.use_lane(views):
                chosen = chosen[: _share_of_lane(chosen)]
            if not self._waiting.take(chosen, alone=not in_lane):
                return None
            batch = model.in_prepared_shape(_truncated(plan.batches[0], len(chosen), model))
            return _FormedBatch(model, chosen, batch, in_lane)
        except Exception as error:  # this thread must survive, or every later call would wait forever
            self._waiting.fail(views[0].request, as_reported(model, error))
            return None

    def _stage(self) -> None:
        while (views := self._next_full_batch()) is not None:
            with self._forming:
                if self._staged is None and (formed := self._form(views, full=True)) is not None:
                    self._staged = formed  # already now: if another batch hangs, it fails too
                    self._staged = self._pack_and_stage(formed)
                    del formed  # free its pixels before waiting for the next batch
            del views

    def _pack_and_stage(self, formed: _FormedBatch) -> _FormedBatch:
        """Pack and stage a batch; on failure return it unstaged: the compute thread handles failures."""
        try:
            packed = pack_batch(formed.batch, [view.view for view in formed.views])
            with self._watchdog.watch_batch(formed.model, formed.views, packed.images[..., 0].size):
                return structs.replace(
                    formed, packed=packed, staged=formed.model.session.stage(packed.images, packed.sizes)
                )
        except Exception as error:
            log.warning("could not stage a batch ahead: %s", error)
            return formed

    def _next_full_batch(self) -> list[ReadyView] | None:
        """Wait until enough views for a full batch are ready during a computation; return them once per batch."""
        waiting = self._waiting
        with waiting.lock:
            while not waiting.finished():
                if waiting.may_stage and (model := waiting.ready.full()) is not None:
                    waiting.may_stage = False
                    return waiting.ready.to_plan(model)
                waiting.stageable.wait()
            return None

    # Computing batches

    def _compute(self, batches: Iterable[_FormedBatch], views: Sequence[ReadyView]) -> None:
        """Run batches, which hold these views, and have those requests answered that they complete."""
        complete: list[Request] = []
        try:
            for formed in batches:
                self._on_complete(complete)
                self._give_up_hopeless(formed)
                complete = self._run(formed)
        except Exception as error:  # this thread must survive; `_run` handles the session's errors
            for view in views:
                self._waiting.fail(view.request, as_reported(view.request.model, error))
        self._waiting.end_batch()  # first: the next image may come as soon as an answer is sent
        self._on_complete(complete)

    def _give_up_hopeless(self, formed: _FormedBatch) -> None:
        """End requests that have far less time left than their batch is expected to take."""
        times, batch = formed.model.batch_times[formed.in_lane], formed.batch
        minimum = times.expected(batch.rows * batch.height * batch.width) / _HOPELESS_FACTOR
        latest = time.monotonic() + minimum
        hopeless = [view.request for view in formed.views if minimum and view.request.deadline < latest]
        if hopeless:
            times.forget_oldest()
            for request in hopeless:
                self._waiting.expire(request, "leaves less time than a batch takes")

    def _run(self, formed: _FormedBatch) -> list[Request]:
        """Run a batch, without the views of requests that have ended; return the requests that it completes."""
        model, views, packed, staged = formed.model, formed.views, formed.packed, formed.staged
        formed.packed = formed.staged = None  # only the locals hold them, to free them before anything else is packed
        try:
            while True:
                wanted, start = self._waiting.begin(views)
                if not wanted:
                    return []
                if packed is not None and len(wanted) == len(views):
                    break
                batch = formed.batch if len(wanted) == len(views) else _truncated(formed.batch, len(wanted), model)
                views, packed, staged = wanted, None, None
                packed = pack_batch(batch, [view.view for view in wanted])
            canvas = packed.images.shape[:3]
            pixels = sum(view.pixels for view in views)
            model.metrics.batch(len(views), pixels, math.prod(canvas), changed=canvas != model.canvas)
            model.canvas = canvas
            keep_windows = any(view.request.keep_windows for view in views)
            with self._watchdog.watch_batch(model, [*views, *formed.behind], math.prod(canvas)):
                session = model.session
                results = unpack_results(  # may copy more from the device
                    packed.packed_views,
                    session.run(packed.images, packed.sizes, in_lane=formed.in_lane)
                    if staged is None
                    else session.compute(staged),
                    keep_windows=keep_windows,
                )
        except Exception as error:
            packed = staged = None  # free the memory before a smaller batch is tried
            release_frames(error)
            return self._failed(structs.replace(formed, views=views), error)
        return self._computed(formed, views, packed, results, start)

    def _computed(
        self,
        formed: _FormedBatch,
        views: Sequence[ReadyView],
        packed: PackedBatch,
        results: Mapping[int, ViewResult],
        start: float,
    ) -> list[Request]:
        """Store the results of a batch in its requests, whose other views may be in other lanes; return complete ones.

        A request may be complete in two lanes at once: `Waiting.finish` sees to that.
        """
        model, now = formed.model, time.monotonic()
        model.batch_times[formed.in_lane].record(packed.images[..., 0].size, now - start)
        model.metrics.batch_seconds.observe(now - start)
        if late := sum(view.request.ended_before(start) for view in views):
            model.metrics.late_views.inc(late)
        requests = {view.request: None for view in views}  # unique, in order
        for request in requests:  # before the results: whoever finds all of them finds all batches
            request.batches.append((start, now))
        for place, view in enumerate(views):
            result = results[place]
            if result.window_scores is not None and not view.request.keep_windows:  # kept for another view
                result = structs.replace(result, window_scores=None)
            view.request.results[view.index] = result
        return [request for request in requests if not request.missing]

    # Failures

    def _failed(self, formed: _FormedBatch, error: Exception) -> list[Request]:
        """Run a failed batch again in halves, on all threads; if that was a single view, fail its request."""
        model, views, behind = formed.model, formed.views, formed.behind
        memory = isinstance(error, OutOfMemory | MemoryError)
        model.metrics.failed["lost" if isinstance(error, DeviceLost) else "memory" if memory else "error"].inc()
        model.canvas = None
        if isinstance(error, DeviceLost):
            self._mark_lost(error, views)
        elif len(views) > 1 or formed.in_lane:
            log.warning(
                "a batch of %d views of model '%s' failed, retrying in halves: %s", len(views), model.name, error
            )
            middle, complete = len(views) // 2, list[Request]()
            for half, later in ((views[:middle], [*views[middle:], *behind]), (views[middle:], behind)):
                for smaller in _planned(model, half, behind=later):
                    complete += self._run(smaller)
            return complete
        elif memory or isinstance(error, UsageError | ContractError) or self._runs_at_all(model, [*views, *behind]):
            self._waiting.fail(views[0].request, as_reported(model, error))
        else:
            lost_device = DeviceLost(
                f"{model.session.circumstances.provider} fails on every input ({type(error).__name__}: {error}). "
                "Restart the program; if the error returns, check the device"
            )
            lost_device.__cause__ = error
            self._mark_lost(lost_device, views)
        return []

    def _runs_at_all(self, model: ServedModel, views: Sequence[ReadyView]) -> bool:
        """Return whether the model still runs, on the smallest black canvas."""
        side = model.session.contract.min_side
        try:
            with self._watchdog.watch_batch(model, views, side * side):
                model.session.run(np.zeros((1, side, side, 3), np.uint8), np.array([[side, side]], np.int64))
        except Exception as error:
            log.error("model '%s' fails even on a black canvas: %s", model.name, error)
            return False
        return True

    def _on_hang(self, error: DeviceLost, views: Sequence[ReadyView]) -> None:
        """Mark the device as lost, because a batch hangs; a batch staged behind it never runs."""
        staged = self._staged  # without the lock: a hanging thread may hold it
        views = [*views, *(staged.views if staged is not None else ())]
        views[0].request.model.metrics.failed["lost"].inc()
        self._mark_lost(error, views)

    def _mark_lost(self, error: DeviceLost, views: Sequence[ReadyView]) -> None:
        if self._waiting.mark_lost(error, views):
            self._on_lost(error)


def _plan(model: ServedModel, views: Sequence[ReadyView]) -> BatchPlan:
    return plan_views(model.session, [view.view for view in views], model.shape_buckets, model.planning_rules)


def _planned(
    model: ServedModel, views: Sequence[ReadyView], *, in_lane: bool = False, behind: Sequence[ReadyView] = ()
) -> Iterator[_FormedBatch]:
    """Yield batches of views that have left the queue. behind: views that this thread computes after them."""
    batches = _plan(model, views).batches
    for number, batch in enumerate(batches, 1):
        chosen = [views[index] for index in batch.indices]
        later = [views[index] for other in batches[number:] for index in other.indices]
        truncated = _truncated(batch, len(chosen), model)
        yield _FormedBatch(model, chosen, truncated, in_lane, behind=[*later, *behind])


def is_full(plan: BatchPlan, model: ServedModel) -> bool:
    """Return whether no other view could join the first batch of a plan."""
    first, *others = plan.batches
    another = bool(others) and (others[0].height, others[0].width) == (first.height, first.width)
    return another or len(first.indices) >= model.max_rows(first.height, first.width)


def _share_of_lane(views: Sequence[ReadyView]) -> int:
    """Return how many of a batch's views one lane computes, to leave the others to the other lanes.

    Views so small that a batch costs more than they do stay together.
    """
    small = max(1, SMALL_PIXELS // views[0].canvas_pixels)
    return max(len(views) // views[0].lanes, min(len(views), small))


def _truncated(batch: Batch, views: int, model: ServedModel) -> Batch:
    """Return the batch with its first `views` views, numbered from 0. It keeps its rows if another shape has a cost."""
    rows = batch.rows if model.shape_buckets or model.session.rules.switch_pixels else views
    return structs.replace(batch, indices=tuple(range(views)), rows=rows)
