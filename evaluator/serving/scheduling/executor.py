"""The one thread that computes for all models of a device, batch by batch.

It takes the model whose turn it is, plans batches of that model's views as `engine.batching` does everywhere, runs the
one that holds the first view in fair order and looks again, so that what came meanwhile can share the next. Beside a
GPU a second thread packs and uploads a batch while another is computed, if it is full: nothing that comes later could
have joined it.

A batch that fails is run again in halves, down to single views: one bad image, or too little memory for all of them
together, fails nobody else. A device that fails whatever it is given is lost, and so is one that hangs
(`evaluator.serving.scheduling.watchdog`).
"""

import logging
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from prelunet.evaluator.engine.batching import Batch, BatchPlan
from prelunet.evaluator.engine.classify import PackedBatch, ViewResult, pack_batch, plan_views, unpack_results
from prelunet.evaluator.errors import ContractError, DeviceLost, OutOfMemory, UsageError
from prelunet.evaluator.serving.scheduling.queue import DeviceQueue
from prelunet.evaluator.serving.scheduling.request import ReadyView, Request, ScheduledModel, as_reported
from prelunet.evaluator.serving.scheduling.watchdog import Watchdog

_HOPELESS_FACTOR = 2  # times less time than its batch is expected to take: such a view is not run

log = logging.getLogger(__name__)


@dataclass
class _FormedBatch:
    """A batch whose views wait no more. packed, staged: None where that is still to be done, or done with."""

    model: ScheduledModel
    views: Sequence[ReadyView]
    batch: Batch
    packed: PackedBatch | None = None
    staged: Any = None


class ComputeThread:
    """Runs what waits for a device, on sessions that nobody else may run.

    answer: told the requests of which all views are computed; on_lost: told once, when the device is lost;
    ahead: pack and stage full batches while others are computed.
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
        self._forming = threading.Lock()  # of batches: in one thread at a time
        self._staged: _FormedBatch | None = None
        work = [(f"compute-{device}", self._compute), (f"stage-{device}", self._stage)]
        self._threads = [
            threading.Thread(target=target, name=name, daemon=True) for name, target in work[: 2 if stage_ahead else 1]
        ]
        self._watchdog = Watchdog(self._on_hang)
        self._ended = threading.Event()
        watch = self._watchdog.watch
        self._watchdog_thread = threading.Thread(target=watch, args=(self._ended,), name=f"watch-{device}", daemon=True)
        for thread in (*self._threads, self._watchdog_thread):
            thread.start()

    def join(self) -> None:
        """Wait until the threads have ended, after `Waiting.close`."""
        for thread in self._threads:
            thread.join()
        self._ended.set()
        self._watchdog_thread.join()

    # Forming batches

    def _next_batch(self) -> _FormedBatch | None:
        """Take the batch that was staged, or wait for views and form one; None when there will be no more."""
        with self._forming:
            formed, self._staged = self._staged, None
            while formed is None:
                views = self._device_queue.next_views()
                if views is None:
                    return None
                formed = self._try_form(views)
            return formed

    def _try_form(self, views: Sequence[ReadyView], *, full: bool = False) -> _FormedBatch | None:
        """Plan views and take those that share a batch with the first; full: only where no more could share it.

        None where there is no such batch, or one of the views waits no more.
        """
        try:
            return self._form(views, full=full)
        except Exception as error:  # a thread that died here would leave every later call waiting for ever
            self._device_queue.fail(views[0].request, as_reported(views[0].request.model, error))
            return None

    def _form(self, views: Sequence[ReadyView], *, full: bool) -> _FormedBatch | None:
        model = views[0].request.model
        plan = _plan(model, views)
        batch = plan.batches[0]
        chosen = [views[index] for index in batch.indices]
        if full and not _is_full(plan, model):
            return None
        if hopeless := _hopeless(model, batch, chosen):
            model.batch_times.forget_oldest()
            self._device_queue.give_up(hopeless)
            return None
        return _FormedBatch(model, chosen, _renumbered(batch)) if self._device_queue.take(chosen) else None

    def _stage(self) -> None:
        while (views := self._device_queue.next_full_batch()) is not None:
            with self._forming:
                if self._staged is None and (formed := self._try_form(views, full=True)) is not None:
                    self._staged = self._pack_and_stage(formed)
                    del formed  # its pixels, before this thread waits for the next
            del views

    def _pack_and_stage(self, formed: _FormedBatch) -> _FormedBatch:
        """Pack and stage a batch; where that fails it is left to the thread that computes, which handles failures."""
        try:
            packed = pack_batch(formed.batch, [view.view for view in formed.views])
            with self._watchdog.watch_batch(formed.model, formed.views, packed.images[..., 0].size):
                return replace(formed, packed=packed, staged=formed.model.session.stage(packed.images, packed.sizes))
        except Exception as error:
            log.warning("a batch could not be staged ahead: %s", error)
            return formed

    # Computing them

    def _compute(self) -> None:
        while (formed := self._next_batch()) is not None:
            try:
                self._run(formed)
            except Exception as error:  # as above; the session's own are handled where it is called
                for view in formed.views:
                    self._device_queue.fail(view.request, error)
            del formed  # its pixels, before this thread waits for the next

    def _run(self, formed: _FormedBatch) -> None:
        """Run a batch without the views that nobody waits for any more, and hand over what is complete with it."""
        model, views, packed, staged = formed.model, formed.views, formed.packed, formed.staged
        formed.packed = formed.staged = None  # they are held here alone, and gone before anything else is packed
        try:
            while True:
                wanted, begun = self._device_queue.begin(views)
                if not wanted:
                    return
                if packed is not None and len(wanted) == len(views):
                    break
                views, packed, staged = wanted, None, None
                packed = pack_batch(_truncated(formed.batch, len(wanted), model), [view.view for view in wanted])
            self._count(model, views, packed)
            keep_windows = any(view.request.keep_windows for view in views)
            with self._watchdog.watch_batch(model, views, packed.images[..., 0].size):
                results = _results(model, packed, staged, keep_windows=keep_windows)
        except Exception as error:
            packed = staged = None  # the memory, before less is tried
            _forget_frames(error)
            self._failed(model, views, error)
        else:
            self._computed(model, views, packed, results, begun)

    def _count(self, model: ScheduledModel, views: Sequence[ReadyView], packed: PackedBatch) -> None:
        rows, height, width, _ = packed.images.shape
        canvas = rows, height, width
        pixels = sum(view.pixels for view in views)
        model.metrics.batch(len(views), pixels, rows * height * width, changed=canvas != model.canvas)
        model.canvas = canvas

    def _computed(
        self,
        model: ScheduledModel,
        views: Sequence[ReadyView],
        packed: PackedBatch,
        results: Mapping[int, ViewResult],
        begun: float,
    ) -> None:
        """Keep the results of a batch."""
        now = time.monotonic()
        model.batch_times.measured(packed.images[..., 0].size, now - begun)
        model.metrics.batch_done(now - begun)
        if late := sum(view.request.ended_before(begun) for view in views):
            model.metrics.late_views.inc(late)
        for place, view in enumerate(views):
            result = results[place]
            if not view.request.keep_windows:  # but a neighbour's are
                result = replace(result, window_scores=None)
            view.request.results[view.index] = result
            view.request.missing -= 1
        complete = []
        for request in {view.request: None for view in views}:  # each once, in their order
            request.computed = now
            request.compute_seconds += now - begun
            request.batches += 1
            if not request.missing:
                complete.append(request)
        if complete:
            self._on_complete(complete)

    # Failures

    def _failed(self, model: ScheduledModel, views: Sequence[ReadyView], error: Exception) -> None:
        """Run a failed batch again in halves; of a single view, fail its request."""
        memory = isinstance(error, OutOfMemory | MemoryError)
        lost = isinstance(error, DeviceLost)
        model.metrics.batch_failed("lost" if lost else "memory" if memory else "error")
        model.canvas = None
        if isinstance(error, DeviceLost):
            self._mark_lost(error, views)
        elif len(views) > 1:
            log.warning("a batch of %d views of model '%s' failed and is split: %s", len(views), model.name, error)
            for half in (views[: len(views) // 2], views[len(views) // 2 :]):
                for batch in _plan(model, half).batches:
                    self._run(_FormedBatch(model, [half[index] for index in batch.indices], _renumbered(batch)))
        elif memory:
            self._device_queue.fail(views[0].request, as_reported(model, error))
        elif isinstance(error, UsageError | ContractError) or self._runs_at_all(model, views):
            self._device_queue.fail(views[0].request, error)
        else:
            self._mark_lost(_lost(model, error), views)

    def _runs_at_all(self, model: ScheduledModel, views: Sequence[ReadyView]) -> bool:
        """Say whether the model still runs, on the smallest black canvas."""
        side = model.session.contract.min_side
        try:
            with self._watchdog.watch_batch(model, views, side * side):
                model.session.run(np.zeros((1, side, side, 3), np.uint8), np.array([[side, side]], np.int64))
        except Exception as error:
            log.error("model '%s' does not even run on a black canvas: %s", model.name, error)
            return False
        return True

    def _on_hang(self, error: DeviceLost, views: Sequence[ReadyView]) -> None:
        """Count a batch that does not end as a lost device; what was staged behind it never runs."""
        staged = self._staged  # without the lock, which a thread may hold that hangs
        views = [*views, *(staged.views if staged is not None else ())]
        views[0].request.model.metrics.batch_failed("lost")
        self._mark_lost(error, views)

    def _mark_lost(self, error: DeviceLost, views: Sequence[ReadyView]) -> None:
        if self._device_queue.mark_lost(error, views):
            self._on_lost(error)


def _plan(model: ScheduledModel, views: Sequence[ReadyView]) -> BatchPlan:
    return plan_views(model.session, [view.view for view in views], model.shape_buckets)


def _is_full(plan: BatchPlan, model: ScheduledModel) -> bool:
    """Say whether no other view could join the first batch of a plan."""
    first, *others = plan.batches
    another = bool(others) and (others[0].height, others[0].width) == (first.height, first.width)
    return another or len(first.indices) >= model.rows(first.height, first.width)


def _hopeless(model: ScheduledModel, batch: Batch, views: Sequence[ReadyView]) -> list[Request]:
    """Return the requests that have far less time than their batch will take."""
    least = model.batch_times.expected(batch.rows * batch.height * batch.width) / _HOPELESS_FACTOR
    remaining = {view.request: view.request.caller.remaining() for view in views} if least else {}
    return [request for request, seconds in remaining.items() if seconds is not None and seconds < least]


def _renumbered(batch: Batch) -> Batch:
    """Return a batch whose views are numbered by themselves."""
    return replace(batch, indices=tuple(range(len(batch.indices))))


def _truncated(batch: Batch, views: int, model: ScheduledModel) -> Batch:
    """Return a batch with the first so many views; where a change of shape costs something it keeps its rows."""
    rows = batch.rows if model.session.rules.switch_pixels else views
    return replace(batch, indices=tuple(range(views)), rows=rows)


def _results(
    model: ScheduledModel, packed: PackedBatch, staged: Any, *, keep_windows: bool
) -> Mapping[int, ViewResult]:
    session = model.session
    outputs = session.run(packed.images, packed.sizes) if staged is None else session.compute(staged)
    return unpack_results(packed.packed_views, outputs, keep_windows=keep_windows)  # may bring more from the device


def _forget_frames(error: BaseException | None) -> None:
    """Drop what the functions held from which an error came, such as canvases; its lines in a log stay the same."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def _lost(model: ScheduledModel, error: Exception) -> DeviceLost:
    lost = DeviceLost(
        f"{model.session.circumstances.provider} fails whatever it is given ({type(error).__name__}: {error}). "
        "Start the program again; if it comes back, look at the device"
    )
    lost.__cause__ = error
    return lost
