"""What waits for one device, and how a request ends: the only state that its threads share.

    encoded     images waiting to be decoded (`DecodeQueue`)    limited by the admission of each model
    decoding    images being decoded                            a few per thread
    ready       views waiting for the device (`ReadyQueue`)     limited by ready_views and ready_bytes
    taken       views in a batch                                one batch, on a GPU two, on a CPU one in each lane

A request ends once, for one reason. From then on none of its views is decoded or computed, and those that wait are
dropped. The event loop adds requests, and ends them when their callers leave or their deadlines pass. The threads of
`BatchExecutor` and `ServedDevice` do all the rest, most of it under `lock`.
"""

import threading
import time
from collections.abc import Iterable, Sequence

from ...errors import DeadlinePassed, DeviceLost, Interrupted
from ..options import QueueOptions
from .decode_queue import DecodeQueue
from .ready_queue import ReadyQueue
from .request import Decoder, ReadyView, Request, deliver
from .shared_cores import SharedCores

# Clients that already have ready views may use this share of the limits on ready views. The rest is for other clients,
# so that their images are decoded during a busy client's batch and not after it.
_READY_SHARE = 0.75
_TAKEN_AT_ONCE = 8  # images at most: the lock and the device are taken once for all, and their views share a batch
SMALL_PIXELS = 2**13  # of all views: waking another thread would cost more than computing so few


class IdleThreads:
    """Threads that wait for work. Unlike a condition, it wakes the latest first, and one at a time.

    The latest has warm caches, and a thread that is on its way takes what comes meanwhile, too. lock: is held when a
    method is called.
    """

    def __init__(self, lock: threading.RLock) -> None:
        self._lock = lock
        self._waiting: list[threading.Lock] = []
        self._on_its_way = False

    def __len__(self) -> int:
        return len(self._waiting)

    def wait(self, seconds: float | None = None) -> None:
        """Wait until woken, at most for these seconds. Releases the lock meanwhile."""
        bell = threading.Lock()
        bell.acquire()
        self._waiting.append(bell)
        self._lock.release()
        try:
            woken = bell.acquire(timeout=-1 if seconds is None else max(0.0, seconds))
        finally:
            self._lock.acquire()
        if not woken and bell in self._waiting:
            self._waiting.remove(bell)
        else:
            self._on_its_way = False

    def wake(self) -> None:
        """Wake a thread, unless one is on its way. It should call this again if it leaves work behind."""
        if self._waiting and not self._on_its_way:
            self._on_its_way = True
            self._waiting.pop().release()

    def wake_all(self) -> None:
        while self._waiting:
            self._waiting.pop().release()


class Workers(IdleThreads):
    """The threads that compute, of which only as many work at once as `SharedCores` says. threads: all of them."""

    def __init__(self, lock: threading.RLock, cores: SharedCores) -> None:
        super().__init__(lock)
        self.threads = 0
        self._cores = cores

    def available(self) -> int:
        """Return the number of threads that may be woken now, less than 0 if too many work."""
        return min(len(self), self._cores.threads() - (self.threads - len(self)))

    def wait(self, seconds: float | None = None) -> None:
        """Do the same; the other processes see how many threads of this one work."""
        self._cores.note(self.threads - len(self) - 1)
        super().wait(seconds)
        self._cores.note(self.threads - len(self))

    def wake(self) -> None:
        """Do the same, unless enough threads work: those take what comes once they are done."""
        if self.available() > 0:
            super().wake()

    def change(self, number: int) -> None:
        """Note that so many threads have started, or with a negative number have ended."""
        self.threads += number
        self._cores.note(self.threads - len(self))


class Waiting:
    """The queues of a device.

    process_share: decoding processes that the images of one identity may take at once; decoders: threads of their own
    decode easy images, not those that compute.
    lock: of all queues; workers: threads that compute, and on a CPU decode easy images; decoders: by what they decode;
    stageable: a batch may be staged; may_stage: true once for each batch on a GPU.
    """

    def __init__(self, options: QueueOptions, process_share: float, *, decoders: bool) -> None:
        self.options = options
        self.images, self.ready = DecodeQueue(process_share), ReadyQueue(options.cores)
        self.lock = threading.RLock()  # also a thread that holds it may end requests
        self.workers, self.stageable = Workers(self.lock, options.cores), threading.Condition(self.lock)
        self.decoders: dict[Decoder, IdleThreads] = {
            "thread": IdleThreads(self.lock) if decoders else self.workers,
            "process": IdleThreads(self.lock),
        }
        self.may_stage = False
        self.closed = False
        self._lost: str | None = None  # error message of the lost device

    # For the event loop

    def add(self, request: Request) -> None:
        """Queue a request for decoding. Raises DeviceLost, or Interrupted if the queue is closed."""
        with self.lock:
            if self._lost is not None:
                raise DeviceLost(self._lost)
            if self.closed:
                raise Interrupted("the server has stopped")
            self.images.waiting[request.decoder].put(request, request.path, request.decode_cost)
            self.decoders[request.decoder].wake()

    def abandon(self, request: Request) -> None:
        """End a request whose caller has left, unless it has ended; work that has not started is dropped."""
        if request.ended is None:
            with self.lock:
                self._end(request, "expired" if request.deadline <= time.monotonic() else "cancelled")

    def expire(self, request: Request, reason: str = "has passed") -> None:
        """End a request with DeadlinePassed, unless it has ended. reason: what is wrong with its deadline."""
        text = f"the call's deadline {reason}, so the image was not computed. Use a longer deadline, or try again later"
        self.fail(request, DeadlinePassed(text), "expired")

    def close(self) -> None:
        """Refuse new requests; the threads end when the queues are empty."""
        with self.lock:
            self.closed = True
            self.stageable.notify_all()
            for idle in (self.workers, *self.decoders.values()):
                idle.wake_all()

    # For threads that hold the lock

    def wait_for_core(self) -> None:
        """Wait while more threads compute than `SharedCores` says."""
        while self.workers.available() < 0 and not self.closed:
            self.workers.wait()

    def take_image(self, decoder: Decoder) -> Request | None:
        """Take the next image, if there is room for its views."""
        if (request := self._next_image(decoder)) is not None:
            self.images.begin(request)
        return request

    def take_images(self, *, newcomers: bool = False) -> list[Request]:
        """Take this thread's share of the images that threads decode: one, and those behind it within a turn's limits.

        newcomers: only of clients without ready views. All are of one model.
        """
        taken: list[Request] = []
        if not (waiting := len(self.images.waiting["thread"])):
            return taken
        share = -(-waiting // (1 + max(0, self.workers.available())))
        options, pixels, cost, work = self.options, 0, 0.0, 0.0
        while len(taken) < _TAKEN_AT_ONCE and (request := self._next_image("thread")) is not None:
            pixels += request.plan.pixels
            cost, work = cost + request.decode_cost, work + request.plan.multiply_adds
            if taken and (
                request.model is not taken[0].model
                or cost > options.turn_cost
                or work > options.turn_work
                or (len(taken) >= share and pixels > SMALL_PIXELS)
            ):
                break
            if newcomers and self.ready.has(request.path):
                break
            self.images.begin(request)
            taken.append(request)
        if taken and self.images.waiting["thread"]:
            self.workers.wake()
        return taken

    def _next_image(self, decoder: Decoder) -> Request | None:
        """Return the next image if there is room for its views; end those whose deadline has passed."""
        while (request := self.images.first(decoder)) is not None:
            if request.deadline > time.monotonic():
                return request if self._has_room(request) else None
            self.expire(request)
        return None

    def _has_room(self, request: Request) -> bool:
        views = len(self.ready) + self.images.views
        share = _READY_SHARE if self.ready.has(request.path) else 1.0
        return not views or (
            views + request.plan.views <= share * self.options.ready_views
            and self.ready.bytes + self.images.bytes + request.decoded_bytes <= share * self.options.ready_bytes
        )

    def finished(self) -> bool:
        """Return whether the queues are closed and empty."""
        return self.closed and not (self.images.decoding or self.ready or next(iter(self.images), None))

    def notify_room(self) -> None:
        """Wake a decoding thread of each kind with images: there may be room for views. It wakes the next."""
        for decoder, idle in self.decoders.items():
            if self.closed:  # they may be about to end
                idle.wake_all()
            elif self.images.waiting[decoder]:
                idle.wake()

    # For all threads

    def begin_decoded(self, requests: Sequence[Request], views: Sequence[ReadyView], *, in_lane: bool) -> bool:
        """Begin with the views of decoded images, for which this thread has reserved a lane or all threads.

        Returns False, and does nothing, if they are too large for a lane beside those that run.
        """
        with self.lock:
            if in_lane and views and not self.ready.keep_lane(views):
                return False
            now = time.monotonic()
            for request in requests:
                self.images.end(request)
                request.ready = now
                if self._lost is not None:
                    self.fail(request, DeviceLost(self._lost))
            for view in views:
                view.request.results.append(None)
            self.notify_room()
            return True

    def decoded(self, request: Request, views: Sequence[ReadyView]) -> None:
        """Queue the views of an image for the device; they are dropped if the request has ended."""
        with self.lock:
            self.images.end(request)
            if request.ended is not None:
                request.model.metrics.dropped[request.end_reason].inc(len(views))
            elif self._lost is not None:
                self.fail(request, DeviceLost(self._lost))
            else:
                request.ready = time.monotonic()
                request.results = [None] * len(views)
                self.ready.add(request, views)
                if self.may_stage:
                    self.stageable.notify()
                if self.decoders[request.decoder] is not self.workers:  # otherwise this thread continues with its views
                    self.workers.wake()
            self.notify_room()

    def decode_failed(self, request: Request, error: BaseException) -> None:
        """End a request whose image could not be decoded."""
        with self.lock:
            self.images.end(request)
            end_reason = request.end_reason or ("expired" if isinstance(error, DeadlinePassed) else "failed")
            request.model.metrics.dropped[end_reason].inc(request.plan.views)
            self.fail(request, error, end_reason)
            self.notify_room()
            self.workers.wake()

    def take(self, views: Sequence[ReadyView], *, alone: bool) -> bool:
        """Take views for a batch; see `ReadyQueue.begin_batch`."""
        with self.lock:
            taken = self.ready.begin_batch(views, alone=alone)
            if taken:
                self.notify_room()
            return taken

    def end_planning(self) -> None:
        """Let another thread plan the views that are left."""
        with self.lock:
            self.ready.planning = False
            if self.ready:
                self.workers.wake()

    def end_batch(self) -> None:
        """Note that a batch has ended, so that others may start."""
        with self.lock:
            self.ready.end_batch()
            if self.ready:
                self.workers.wake()

    def begin(self, views: Sequence[ReadyView]) -> tuple[list[ReadyView], float]:
        """Start a batch: return its views whose requests have not ended, and the time of this check."""
        wanted = []
        with self.lock:
            now = time.monotonic()
            for view in views:
                request = view.request
                if request.ended is None and request.deadline > now:
                    wanted.append(view)
                    request.batch_begun = request.batch_begun or now
                else:
                    request.model.metrics.dropped[request.end_reason or "expired"].inc()
                    self.expire(request)
            self.may_stage = True
            self.stageable.notify()
        return wanted, now

    def finish(self, requests: Iterable[Request]) -> list[Request]:
        """End requests as answered; return those that had not ended before."""
        with self.lock:
            return [request for request in requests if self._end(request, "answered")]

    def fail(self, request: Request, error: BaseException, end_reason: str = "failed") -> None:
        """End a request with an error, unless it has ended."""
        with self.lock:
            if self._end(request, end_reason):
                request.error = error
                deliver([request])

    def mark_lost(self, error: DeviceLost, views: Sequence[ReadyView]) -> bool:
        """Mark the device as lost: fail all waiting requests, those of `views` and all later ones.

        Returns False if it was lost already.
        """
        with self.lock:
            first = self._lost is None
            self._lost = self._lost or str(error)
            for request in {*(view.request for view in (*views, *self.ready)), *self.images}:
                self.fail(request, DeviceLost(self._lost))
        return first

    def _end(self, request: Request, end_reason: str) -> bool:
        """End a request and drop its waiting views; False if it had ended."""
        if request.ended is not None:
            return False
        request.ended, request.end_reason, request.image = time.monotonic(), end_reason, b""
        if end_reason == "answered":
            return True
        request.model.metrics.failed_seconds.observe(request.ended - request.arrived)
        dropped = self.ready.drop(request) + (request.plan.views if self.images.withdraw(request) else 0)
        if dropped:
            request.model.metrics.dropped[end_reason].inc(dropped)
            self.notify_room()
            self.workers.wake()
        return True
