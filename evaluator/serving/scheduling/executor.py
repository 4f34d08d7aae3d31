"""Batches of all models of a device: formed from waiting views, run, and, if they fail, run again in halves.

A compute thread takes the next model in fair order, plans batches of that model's views with `engine.batching`, runs
the batch that holds the first view, and starts over, so that views that have arrived meanwhile can join the next batch.
On a GPU a second thread packs and uploads the next batch during a computation, but only a full one: no later view could
join it. On a CPU several compute threads decode small images, and run batches side by side in the lanes of a session.

A failed batch is run again in halves, down to single views, so that one bad image, or too little memory for the whole
batch, does not fail the others. A device that fails on every input is lost, and so is one that hangs
(`evaluator.serving.scheduling.watchdog`).
"""

import logging
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ...engine.batching import Batch, BatchPlan
from ...engine.classify import PackedBatch, ViewResult, pack_batch, plan_views, unpack_results
from ...errors import ContractError, DeviceLost, OutOfMemory, UsageError
from ..observability.logs import release_frames
from .queue import DeviceQueue
from .request import BatchTimes, ReadyView, Request, ScheduledModel, as_reported
from .watchdog import Watchdog

_HOPELESS_FACTOR = 2  # a view is not run if its remaining time is less than 1/2 of its batch's expected time

log = logging.getLogger(__name__)


@dataclass
class _FormedBatch:
    """A batch whose views have left the queue. packed, staged: None before, and again once they are used up."""

    model: ScheduledModel
    views: Sequence[ReadyView]
    batch: Batch
    in_lane: bool = False
    packed: PackedBatch | None = None
    staged: Any = None


class BatchExecutor:
    """Runs the views queued for a device, on sessions that no other thread may run.

    on_complete: called with the requests whose views are all computed; on_lost: called once, when the device is lost;
    stage_ahead: pack and stage full batches during the computation of others.
    """

    def __init__(
        self,
        device_queue: DeviceQueue,
        on_complete: Callable[[list[Request]], object],
        on_lost: Callable[[DeviceLost], object],
        device: str,
        *,
        stage_ahead: bool,
    ) -> None:
        self._device_queue = device_queue
        self._on_complete = on_complete
        self._on_lost = on_lost
        # Only one thread at a time forms batches; where none stages them, the queue sees to that.
        self._forming = threading.Lock() if stage_ahead else nullcontext()
        self._staged: _FormedBatch | None = None
        self._device = device
        self._threads: list[threading.Thread] = []
        self._start(f"compute-{device}", self._compute)
        if stage_ahead:
            self._start(f"stage-{device}", self._stage)
        self._watchdog = Watchdog(self._on_hang)
        self._ended = threading.Event()
        watch = self._watchdog.watch
        self._watchdog_thread = threading.Thread(target=watch, args=(self._ended,), name=f"watch-{device}", daemon=True)
        self._watchdog_thread.start()

    def _start(self, name: str, work: Callable[[], None]) -> None:
        self._threads.append(threading.Thread(target=work, name=name, daemon=True))
        self._threads[-1].start()

    def add_threads(self, lanes: int) -> None:
        """Have at least one compute thread for each lane; called before a session with lanes is used."""
        while len(self._threads) < lanes:
            self._start(f"compute-{self._device}", self._compute)

    def join(self) -> None:
        """Wait for the threads to end, after `DeviceQueue.close`."""
        for thread in self._threads:
            thread.join()
        self._ended.set()
        self._watchdog_thread.join()

    # Forming batches

    def _next_batch(self) -> _FormedBatch | None:
        """Return the staged batch, or wait for views and form one; None when the queue is closed and empty."""
        with self._forming:
            formed, self._staged = self._staged, None
            while formed is None:
                views = self._device_queue.next_views()
                if views is None:
                    return None
                if isinstance(views, Request):
                    self._device_queue.decode(views)
                else:
                    formed = self._form(views)
                    self._device_queue.end_planning()
                del views  # free an image before waiting for the next
            return formed

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
            if in_lane := self._device_queue.use_lane(views):
                chosen = chosen[: max(1, len(chosen) // views[0].lanes)]  # the others are for other lanes
            batch = _truncated(plan.batches[0], len(chosen), model)
            if hopeless := _hopeless(model.batch_times[in_lane], batch, chosen):
                model.batch_times[in_lane].forget_oldest()
                self._device_queue.give_up(hopeless)
                return None
            taken = self._device_queue.take(chosen, alone=not in_lane)
            return _FormedBatch(model, chosen, batch, in_lane) if taken else None
        except Exception as error:  # this thread must survive, or every later call would wait forever
            self._device_queue.fail(views[0].request, as_reported(model, error))
            return None

    def _stage(self) -> None:
        while (views := self._device_queue.next_full_batch()) is not None:
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
                return replace(formed, packed=packed, staged=formed.model.session.stage(packed.images, packed.sizes))
        except Exception as error:
            log.warning("could not stage a batch ahead: %s", error)
            return formed

    # Computing batches

    def _compute(self) -> None:
        while (formed := self._next_batch()) is not None:
            try:
                self._run(formed)
            except Exception as error:  # as above; `_run` handles the session's errors
                for view in formed.views:
                    self._device_queue.fail(view.request, error)
            self._device_queue.end_batch()
            del formed  # free its pixels before waiting for the next batch

    def _run(self, formed: _FormedBatch) -> None:
        """Run a batch, without the views of requests that have ended, and pass on the requests that it completes."""
        model, views, packed, staged = formed.model, formed.views, formed.packed, formed.staged
        formed.packed = formed.staged = None  # only the locals hold them, to free them before anything else is packed
        try:
            while True:
                wanted, start = self._device_queue.begin(views)
                if not wanted:
                    return
                if packed is not None and len(wanted) == len(views):
                    break
                views, packed, staged = wanted, None, None
                packed = pack_batch(_truncated(formed.batch, len(wanted), model), [view.view for view in wanted])
            canvas = packed.images.shape[:3]
            pixels = sum(view.pixels for view in views)
            model.metrics.batch(len(views), pixels, math.prod(canvas), changed=canvas != model.canvas)
            model.canvas = canvas
            keep_windows = any(view.request.keep_windows for view in views)
            with self._watchdog.watch_batch(model, views, math.prod(canvas)):
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
            self._failed(model, views, error, in_lane=formed.in_lane)
        else:
            self._computed(formed, views, packed, results, start)

    def _computed(
        self,
        formed: _FormedBatch,
        views: Sequence[ReadyView],
        packed: PackedBatch,
        results: Mapping[int, ViewResult],
        start: float,
    ) -> None:
        """Store the results of a batch in its requests; other views of these may be in other lanes."""
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
            if not view.request.keep_windows:  # kept for another view of the batch
                result = replace(result, window_scores=None)
            view.request.results[view.index] = result
        if complete := [request for request in requests if not request.missing]:  # perhaps in two lanes: `finish`
            self._on_complete(complete)

    # Failures

    def _failed(self, model: ScheduledModel, views: Sequence[ReadyView], error: Exception, *, in_lane: bool) -> None:
        """Run a failed batch again in halves, on all threads; if that was a single view, fail its request."""
        memory = isinstance(error, OutOfMemory | MemoryError)
        lost = isinstance(error, DeviceLost)
        model.metrics.batch_failed("lost" if lost else "memory" if memory else "error")
        model.canvas = None
        if isinstance(error, DeviceLost):
            self._mark_lost(error, views)
        elif len(views) > 1 or in_lane:
            log.warning(
                "a batch of %d views of model '%s' failed, retrying in halves: %s", len(views), model.name, error
            )
            for half in (views[: len(views) // 2], views[len(views) // 2 :]):
                for batch in _plan(model, half).batches:
                    self._run(_FormedBatch(model, [half[index] for index in batch.indices], batch))
        elif memory:
            self._device_queue.fail(views[0].request, as_reported(model, error))
        elif isinstance(error, UsageError | ContractError) or self._runs_at_all(model, views):
            self._device_queue.fail(views[0].request, error)
        else:
            lost_device = DeviceLost(
                f"{model.session.circumstances.provider} fails on every input ({type(error).__name__}: {error}). "
                "Restart the program; if the error returns, check the device"
            )
            lost_device.__cause__ = error
            self._mark_lost(lost_device, views)

    def _runs_at_all(self, model: ScheduledModel, views: Sequence[ReadyView]) -> bool:
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
        views[0].request.model.metrics.batch_failed("lost")
        self._mark_lost(error, views)

    def _mark_lost(self, error: DeviceLost, views: Sequence[ReadyView]) -> None:
        if self._device_queue.mark_lost(error, views):
            self._on_lost(error)


def _plan(model: ScheduledModel, views: Sequence[ReadyView]) -> BatchPlan:
    return plan_views(model.session, [view.view for view in views], model.shape_buckets)


def is_full(plan: BatchPlan, model: ScheduledModel) -> bool:
    """Return whether no other view could join the first batch of a plan."""
    first, *others = plan.batches
    another = bool(others) and (others[0].height, others[0].width) == (first.height, first.width)
    return another or len(first.indices) >= model.max_rows(first.height, first.width)


def _hopeless(times: BatchTimes, batch: Batch, views: Sequence[ReadyView]) -> list[Request]:
    """Return the requests whose remaining time is far less than the batch is expected to take."""
    minimum = times.expected(batch.rows * batch.height * batch.width) / _HOPELESS_FACTOR
    remaining = {view.request: view.request.caller.remaining() for view in views} if minimum else {}
    return [request for request, seconds in remaining.items() if seconds is not None and seconds < minimum]


def _truncated(batch: Batch, views: int, model: ScheduledModel) -> Batch:
    """Return the batch with its first `views` views, numbered from 0. It keeps its rows if another shape has a cost."""
    rows = batch.rows if model.shape_buckets or model.session.rules.switch_pixels else views
    return replace(batch, indices=tuple(range(views)), rows=rows)
