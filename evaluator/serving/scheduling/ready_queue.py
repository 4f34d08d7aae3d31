"""Decoded views that wait for a device, in fair order, and which of them may start. The owner holds its lock."""

from collections.abc import Sequence
from threading import get_ident

from .fair_queue import FairQueue
from .model import ServedModel
from .request import ReadyView, Request
from .shared_cores import SharedCores

_PLANNED_BATCHES = 3  # plan no more views at a time than these batches hold: hundreds take tens of milliseconds


class ReadyQueue(FairQueue[ReadyView]):
    """bytes: of the waiting views; running: batches that have left the queue and not ended; planning: one is formed."""

    def __init__(self, cores: SharedCores) -> None:
        super().__init__()
        self._cores = cores
        self.bytes = 0.0
        self.running = 0
        self.planning = False
        # By thread, which runs one batch: how many may run at once with it; 1: it has all threads.
        self._agreed: dict[int, int] = {}

    def add(self, request: Request, views: Sequence[ReadyView]) -> None:
        """Add the views of a request, which has its time `ready`."""
        model = request.model
        if not model.ready_pixels:
            model.ready_since = request.ready
        for view in views:
            self.put(view, request.path, view.pixels)
            self._count(view, 1)
        request.queued_views.update(views)

    def drop(self, request: Request) -> int:
        """Remove all views of a request; return their number."""
        for view in request.queued_views:
            self.withdraw(view)
            self._count(view, -1)
        dropped = len(request.queued_views)
        request.queued_views.clear()
        return dropped

    @property
    def _lanes(self) -> int:
        """Return how many batches may run at once with those that run."""
        return min(self._agreed.values(), default=1)

    def begin_batch(self, views: Sequence[ReadyView], *, alone: bool) -> bool:
        """Take views for a batch, until `Waiting.end_batch`; False, and takes none, if one of them has left the queue.

        alone: no other batch may run beside it.
        """
        if not all(view in self for view in views):
            return False
        self._begin(1 if alone else _lanes_of(views))
        for view in views:
            self.take(view)
            self._count(view, -1)
            view.request.queued_views.discard(view)
        return True

    def reserve(self, lanes: int, images: int, *, short: bool) -> bool | None:
        """Begin batches of images that are about to be decoded, until `Waiting.end_batch`, if nothing waits.

        images: that there are, at most one view for each is expected; short: a batch of them is, so that more threads
        would wait for each other. Returns whether they are for a lane, None if they have to wait in the queue.
        """
        if len(self) or self.planning or (self.running and self.running >= min(lanes, self._lanes)):
            return None
        in_lane = short or 2 * (self.running + images) > min(lanes, self._cores.threads())
        if not in_lane and self.running:
            return None
        self._begin(lanes if in_lane else 1)
        return in_lane

    def keep_lane(self, views: Sequence[ReadyView]) -> bool:
        """Return whether decoded views may be computed in the lane that was reserved for their images."""
        lanes = min(self._lanes, _lanes_of(views))
        if lanes == 1 or self.running > lanes:
            return False
        self._agreed[get_ident()] = lanes
        return True

    def end_batch(self) -> None:
        """Note that this thread's batch has ended."""
        self.running -= 1
        self._agreed.pop(get_ident(), None)  # on a GPU the thread that stages has begun it

    def _begin(self, lanes: int) -> None:
        """Begin a batch in this thread; so many may run at once with it, and there are no more yet."""
        self._agreed[get_ident()] = lanes
        self.running += 1

    def startable(self) -> ServedModel | None:
        """Return the next model, unless its batch has to wait for others: beside them it may only start in a lane.

        Of several threads one at a time forms a batch.
        """
        if self.planning or (first := self.first()) is None:
            return None
        if self.running and not self._use_lane(first, len(self)):
            return None
        return first.request.model

    def full(self) -> ServedModel | None:
        """Return the next model if its views fill a batch."""
        first = self.first()
        return first.request.model if first is not None and first.request.model.fills_batch else None

    def to_plan(self, model: ServedModel) -> list[ReadyView]:
        """Return the next views of a model, in fair order, at most as many as a few batches hold."""
        views, pixels, windows = [], 0, 0
        for view in self.in_order(model.key):
            views.append(view)
            pixels += view.canvas_pixels
            windows += view.windows
            if model.fills(pixels, windows, _PLANNED_BATCHES):
                break
        return views

    def use_lane(self, views: Sequence[ReadyView]) -> bool:
        """Return whether a batch with the first of these waiting views is for a lane."""
        if self.running:  # beside others, so in a lane; or staged on a GPU, which has none
            return views[0].lanes > 1
        return self._use_lane(views[0], sum(view.lanes > 1 for view in views))

    def _use_lane(self, view: ReadyView, views: int) -> bool:
        """Return whether a batch with this view is for a lane. views: number of those that wait.

        Together with the batches that run they should fill more than half of the lanes, or of the threads that may
        compute now. Fewer are sooner done one batch after the other, on all threads.
        """
        lanes = min(view.lanes, self._lanes) if self.running else view.lanes
        return self.running < lanes > 1 and 2 * (self.running + views) > min(lanes, self._cores.threads())

    def _count(self, view: ReadyView, sign: int) -> None:
        model = view.request.model
        model.ready_pixels += sign * view.canvas_pixels
        model.ready_windows += sign * view.windows
        self.bytes += sign * view.bytes


def _lanes_of(views: Sequence[ReadyView]) -> int:
    return min(view.lanes for view in views)
