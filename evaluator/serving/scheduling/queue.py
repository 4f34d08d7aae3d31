"""The queues of one device, and the only state that its threads share.

    encoded     images waiting to be decoded, in two        limited by the admission of each model
                queues: easy ones, and all others
    decoding    images being decoded                        one per thread
    ready       decoded views waiting for the device        limited by ready_views and ready_bytes
    taken       views in a batch                            one batch, on a GPU two, on a CPU one in each lane

Encoded images and ready views wait in fair order. A request ends once, for one reason. From then on none of its views
is decoded or computed, and those that wait are dropped.
"""

import math
import threading
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import chain

from ...errors import DeadlinePassed, DeviceLost, Interrupted
from ...imaging.views import ViewImage
from ..decoding import DecodeProcess
from ..observability.logs import release_frames
from ..options import QueueOptions
from .fair_queue import FairQueue
from .request import (
    Decoder,
    ReadyView,
    Request,
    ScheduledModel,
    as_reported,
    deliver,
)

# Clients that already have ready views may use this share of the limits on ready views. The rest is for other clients,
# so that their images are decoded during a busy client's batch and not after it.
_READY_SHARE = 0.75
_PLANNED_BATCHES = 3  # plan no more views at a time than these batches hold: hundreds take tens of milliseconds
_TOO_LATE = "the call's deadline {}, so the image was not computed. Use a longer deadline, or try again later"


class DeviceQueue:
    """The requests and views waiting for a device. Thread-safe; no method holds the lock for long.

    process_share: decoding processes that the images of one identity may take at once.
    """

    def __init__(self, options: QueueOptions, process_share: float = math.inf) -> None:
        self._options = options
        self._process_share = process_share
        self._processes: Counter[str] = Counter()  # taken, by identity
        self._lock = threading.Lock()
        self._computable = threading.Condition(self._lock)
        self._decodable: dict[Decoder, threading.Condition] = {
            "thread": threading.Condition(self._lock),
            "process": threading.Condition(self._lock),
            "compute": self._computable,
        }
        self._encoded: dict[Decoder, FairQueue[Request]] = {decoder: FairQueue() for decoder in self._decodable}
        self._stageable = threading.Condition(self._lock)
        self._ready: FairQueue[ReadyView] = FairQueue()
        self._decoding = 0  # requests
        self._decoding_views = 0
        self._decoded_bytes = 0.0  # of ready views, plus the estimate for images being decoded
        self._computing = False
        self._planning = False  # a compute thread forms a batch
        self._running = 0  # batches that have left the queue and not ended
        self._alone = False  # one of them has the device to itself
        self._staging_tried = False  # during the current batch
        self._closed = False
        self._lost: str | None = None  # error message of the lost device

    # Called by the event loop

    def add(self, request: Request) -> None:
        """Queue a request for decoding. Raises DeviceLost, or Interrupted if the queue is closed."""
        with self._lock:
            if self._lost is not None:
                raise DeviceLost(self._lost)
            if self._closed:
                raise Interrupted("the server has stopped")
            if request.easy:
                small = request.decode_cost <= self._options.small_cost
                request.decoder = "compute" if small and not request.model.session.circumstances.on_gpu else "thread"
            self._encoded[request.decoder].put(request, request.path, request.decode_cost)
            self._decodable[request.decoder].notify()

    def abandon(self, request: Request) -> None:
        """End a request whose caller has left, unless it has ended; work that has not started is dropped."""
        if request.ended is None:
            with self._lock:
                self._end(request, "expired" if request.expired(time.monotonic()) else "cancelled")

    def expire(self, request: Request) -> None:
        """End a request with DeadlinePassed, unless it has ended."""
        self.fail(request, DeadlinePassed(_TOO_LATE.format("has passed")), "expired")

    def fail(self, request: Request, error: BaseException, end_reason: str = "failed") -> None:
        """End a request with an error, unless it has ended."""
        with self._lock:
            self._fail(request, error, end_reason)

    # Called by the decoding threads

    def next_image(self, decoder: Decoder) -> Request | None:
        """Wait for the next image and for room for its views; None when the queue is closed and empty."""
        encoded, decodable = self._encoded[decoder], self._decodable[decoder]
        with self._lock:
            while (request := self._take_image(decoder)) is None:
                if self._closed and not encoded:
                    return None
                decodable.wait()
            if encoded:
                decodable.notify()  # there may be room for the next image too
            return request

    def _take_image(self, decoder: Decoder) -> Request | None:
        """Return the next image, None if there is none or no room for its views."""
        encoded, taken = self._encoded[decoder], self._processes.items() if decoder == "process" else ()
        busy = {identity for identity, number in taken if number >= self._process_share}
        while (request := encoded.first(busy)) is not None:
            if request.expired(time.monotonic()):
                self._fail(request, DeadlinePassed(_TOO_LATE.format("has passed")), "expired")
            elif not self._has_room(request):
                return None
            else:
                encoded.take(request)
                self._count_decoding(request, 1)
                request.begun = time.monotonic()
                return request
        return None

    def _has_room(self, request: Request) -> bool:
        views = len(self._ready) + self._decoding_views
        share = _READY_SHARE if self._ready.has(request.path) else 1.0
        return not views or (
            views + request.views <= share * self._options.ready_views
            and self._decoded_bytes + request.decoded_bytes <= share * self._options.ready_bytes
        )

    def _count_decoding(self, request: Request, sign: int) -> None:
        request.model.decoding += sign
        if request.decoder == "process":
            self._processes[request.caller.identity] += sign
            self._processes += Counter()  # forgets who has none
        self._decoding += sign
        self._decoding_views += sign * request.views
        self._decoded_bytes += sign * request.decoded_bytes

    def decode(self, request: Request, process: DecodeProcess | None = None) -> None:
        """Decode an image from `next_image` or `next_views`, in this thread or in a process, and queue its views."""
        try:
            ready = build_ready_views(request, request.model.decode_views(request, process))
        except BaseException as error:  # the thread must survive, or callers would wait forever
            release_frames(error)  # they refer to the request, and that to the error
            self.decode_failed(request, as_reported(request.model, error))
            del request  # the error's traceback refers to this frame
        else:
            self.decoded(request, ready)

    def decoded(self, request: Request, ready: Sequence[ReadyView]) -> None:
        """Queue the views of an image for the device; they are dropped if the request has ended."""
        model = request.model
        with self._lock:
            self._count_decoding(request, -1)
            self._notify_room()
            if request.decoder != "compute":  # otherwise this thread continues with its views
                self._computable.notify()
            if request.ended is not None:
                model.metrics.dropped(request.end_reason, len(ready))
                return
            if self._lost is not None:
                self._fail(request, DeviceLost(self._lost))
                return
            request.ready = time.monotonic()
            request.results = [None] * len(ready)
            if not model.ready_pixels:
                model.ready_since = request.ready
            for view in ready:
                self._ready.put(view, request.path, view.pixels)
                self._count_ready(view, 1)
            request.queued_views.update(ready)
            if self._computing:
                self._stageable.notify()

    def decode_failed(self, request: Request, error: BaseException) -> None:
        """End a request whose image could not be decoded."""
        with self._lock:
            self._count_decoding(request, -1)
            self._notify_room()
            self._computable.notify()
            end_reason = request.end_reason or ("expired" if isinstance(error, DeadlinePassed) else "failed")
            request.model.metrics.dropped(end_reason, request.views)
            self._fail(request, error, end_reason)

    def _count_ready(self, view: ReadyView, sign: int) -> None:
        model = view.request.model
        model.ready_pixels += sign * view.canvas_pixels
        model.ready_windows += sign * view.windows
        self._decoded_bytes += sign * view.bytes

    # Called by the compute and staging threads

    def next_views(self) -> Request | list[ReadyView] | None:
        """Wait for views and return those of the next model, in fair order; None when the queue is closed and empty.

        Returns at most as many as a few batches hold. If they do not fill a batch and no other model has ready views,
        waits up to `batch_wait` for images of this model that are being decoded, and returns images that the compute
        thread has to decode itself; those of clients without ready views come first. With lanes, larger batches gain
        little, so it does not wait. Of several threads one at a time gets views, until it calls `end_planning`.
        """
        with self._lock:
            self._computing = False
            while True:
                if (request := self._take_newcomer()) is not None:
                    return request
                model = self._startable_model()
                if model is not None:
                    remaining_wait = model.ready_since + self._options.batch_wait - time.monotonic()
                    if remaining_wait <= 0 or self._ready.flow_count() > 1 or model.fills_batch:
                        self._planning = True
                        return self._views_to_plan(model)
                if (request := self._take_image("compute")) is not None:
                    return request
                if model is not None:
                    if not model.decoding or model.session.lanes > 1:
                        self._planning = True
                        return self._views_to_plan(model)
                    self._computable.wait(remaining_wait)
                elif self._finished():
                    self._stageable.notify()
                    return None
                else:
                    self._computable.wait()

    def next_full_batch(self) -> list[ReadyView] | None:
        """Wait until enough views for a full batch are ready during a computation; then the same as `next_views`.

        Returns views at most once per computed batch.
        """
        with self._lock:
            while not self._finished():
                first = self._ready.first() if self._computing and not self._staging_tried else None
                if first is not None and first.request.model.fills_batch:
                    self._staging_tried = True
                    return self._views_to_plan(first.request.model)
                del first  # while this thread waits, it must not keep a version that is no longer served
                self._stageable.wait()
            return None

    def _take_newcomer(self) -> Request | None:
        """Take the next image for a compute thread if its client has nothing ready: that of others may never end."""
        first = self._encoded["compute"].first()
        return None if first is None or self._ready.has(first.path) else self._take_image("compute")

    def _startable_model(self) -> ScheduledModel | None:
        """Return the next model, unless its batch has to wait for others: beside them it may only start in a lane."""
        first = self._ready.first()
        if (
            first is None
            or self._planning
            or (self._running and (self._alone or not self._use_lane(first, len(self._ready))))
        ):
            return None
        return first.request.model

    def _use_lane(self, view: ReadyView, views: int) -> bool:
        """Return whether a batch with this view is for a lane. views: number of those that wait.

        Together with the batches that run they should fill more than half of the lanes. Fewer are sooner done one batch
        after the other, on all threads.
        """
        return self._running < view.lanes and 2 * (self._running + views) > view.lanes > 1

    def use_lane(self, views: Sequence[ReadyView]) -> bool:
        """Return whether a batch with the first of these waiting views is for a lane."""
        if self._running:  # beside others, so in a lane; or staged on a GPU, which has none
            return views[0].lanes > 1
        return self._use_lane(views[0], sum(view.lanes > 1 for view in views))

    def _views_to_plan(self, model: ScheduledModel) -> list[ReadyView]:
        views, pixels, windows = [], 0, 0
        for view in self._ready.in_order(model.key):
            views.append(view)
            pixels += view.canvas_pixels
            windows += view.windows
            if model.fills(pixels, windows, _PLANNED_BATCHES):
                break
        return views

    def take(self, views: Sequence[ReadyView], *, alone: bool = True) -> bool:
        """Take views for a batch; False, and takes none, if one of them has left the queue.

        alone: no other batch may run beside it. `end_batch` is to be called later.
        """
        with self._lock:
            if not all(view in self._ready for view in views):
                return False
            self._running, self._alone = self._running + 1, alone
            for view in views:
                self._ready.take(view)
                self._count_ready(view, -1)
                view.request.queued_views.discard(view)
            self._notify_room()
            return True

    def begin(self, views: Sequence[ReadyView]) -> tuple[list[ReadyView], float]:
        """Start a batch: return its views whose requests have not ended, and the time of this check."""
        wanted = []
        with self._lock:
            now = time.monotonic()
            for view in views:
                request = view.request
                if request.ended is None and not request.expired(now):
                    wanted.append(view)
                    request.batch_begun = request.batch_begun or now
                else:
                    request.model.metrics.dropped(request.end_reason or "expired", 1)
                    self._fail(request, DeadlinePassed(_TOO_LATE.format("has passed")), "expired")
            self._computing, self._staging_tried = True, False
            self._stageable.notify()
        return wanted, now

    def end_planning(self) -> None:
        """Let another compute thread plan the views that are left."""
        with self._lock:
            self._planning = False
            if self._ready:
                self._computable.notify()

    def end_batch(self) -> None:
        """Report that a batch has ended, so that others may start."""
        with self._lock:
            self._running -= 1
            if self._ready:
                self._computable.notify()

    def give_up(self, requests: Iterable[Request]) -> None:
        """End requests whose deadline leaves less time than their batch takes."""
        with self._lock:
            for request in requests:
                self._fail(request, DeadlinePassed(_TOO_LATE.format("leaves less time than a batch takes")), "expired")

    def finish(self, requests: Iterable[Request]) -> list[Request]:
        """End requests as answered; return those that had not ended before."""
        with self._lock:
            return [request for request in requests if self._end(request, "answered")]

    def mark_lost(self, error: DeviceLost, views: Sequence[ReadyView]) -> bool:
        """Mark the device as lost: fail all waiting requests, those of `views` and all later ones.

        Returns False if it was lost already.
        """
        with self._lock:
            first = self._lost is None
            self._lost = self._lost or str(error)
            affected = [view.request for view in (*views, *self._ready)]
            for request in {*affected, *chain.from_iterable(self._encoded.values())}:
                self._fail(request, DeviceLost(self._lost))
        return first

    # Shared

    def _fail(self, request: Request, error: BaseException, end_reason: str = "failed") -> None:
        if self._end(request, end_reason):
            request.error = error
            deliver([request])

    def _end(self, request: Request, end_reason: str) -> bool:
        """End a request and drop its waiting views; False if it had ended."""
        if request.ended is not None:
            return False
        request.ended, request.end_reason, request.image = time.monotonic(), end_reason, b""
        if end_reason != "answered":
            request.model.metrics.failed_seconds.observe(request.ended - request.arrived)
        dropped = 0
        if request in self._encoded[request.decoder]:
            self._encoded[request.decoder].withdraw(request)
            dropped = request.views
        for view in request.queued_views:
            self._ready.withdraw(view)
            self._count_ready(view, -1)
            dropped += 1
        request.queued_views.clear()
        if dropped:
            request.model.metrics.dropped(end_reason, dropped)
            self._notify_room()
            self._computable.notify()
        return True

    def _finished(self) -> bool:
        return self._closed and not (any(self._encoded.values()) or self._decoding or self._ready)

    def _notify_room(self) -> None:
        """Wake a decoding thread of each queue with images: there may be room for views. It wakes the next."""
        for decoder, decodable in self._decodable.items():
            if self._closed:  # they may be about to end
                decodable.notify_all()
            elif self._encoded[decoder]:
                decodable.notify()

    def close(self) -> None:
        """Refuse new requests; the threads end when the queue is empty."""
        with self._lock:
            self._closed = True
            for condition in (*self._decodable.values(), self._stageable):
                condition.notify_all()


def build_ready_views(request: Request, views: Sequence[ViewImage]) -> list[ReadyView]:
    """Return the views of an image as queue entries."""
    ready = []
    for index, view in enumerate(views):
        height, width = view.image.shape[:2]
        canvas = request.model.canvas_of(height, width)
        pixels, windows = math.prod(canvas), math.prod(request.model.grid(*canvas))
        lanes, size = request.model.lanes(pixels, windows), view.image.nbytes / (2 if request.protocol.mirror else 1)
        ready.append(ReadyView(request, index, view, height * width, pixels, windows, lanes, size))
    return ready
