"""The door of one model: how much may wait, and when to come back. On the event loop's own thread only."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from evaluator.errors import Overloaded
from evaluator.serving.metrics import ModelMetrics
from evaluator.serving.options import QueueOptions

SOONEST, LATEST = 0.05, 30.0  # seconds after which a caller may be told to come back
UNKNOWN = 1.0  # where nothing was answered yet
_REMEMBERED = 256  # views over which the pace is taken, older ones fade


class Pace:
    """How long a view takes from one answer to the next, measured while anything waits.

    So it tells of everything that slows answers down: decoding, the device, and other models that share it.
    clock: in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._since = 0.0
        self._seconds = 0.0
        self._views = 0.0

    def begin(self) -> None:
        """Begin to measure: something waits from now on."""
        self._since = self._clock()

    def left(self, answered: int) -> None:
        """Count an image that has left; answered: how many views, 0 where it left without an answer."""
        now = self._clock()
        kept = 1 - answered / _REMEMBERED if answered < _REMEMBERED else 0.0
        self._seconds = kept * self._seconds + now - self._since
        self._views = kept * self._views + answered
        self._since = now

    def seconds(self, views: int) -> float | None:
        """Return how long so many views take, None where nothing was answered yet."""
        return views * self._seconds / self._views if self._views else None


class Door:
    """Counts what waits for one model, and lets no more in than may wait."""

    def __init__(self, model: str, queue: QueueOptions, metrics: ModelMetrics) -> None:
        self._model = model
        self._queue = queue
        self._metrics = metrics
        self._pace = Pace()
        self.images = 0
        self.views = 0
        self.bytes = 0

    @contextmanager
    def admitted(self, size: int, views: int) -> Iterator[None]:
        """Count an image of `size` bytes and so many views among those that wait while the block runs.

        Raises Overloaded, which says when to try again, where as much waits already as may; one image is let in
        wherever nothing waits.
        """
        if self.images:
            if self.views + views > self._queue.max_views:
                raise self._refusal("views", f"{self._queue.max_views} views")
            if self.bytes + size > self._queue.max_bytes:
                raise self._refusal("bytes", f"{self._queue.max_bytes} bytes")
        else:
            self._pace.begin()
        self._count(1, views, size)
        answered = 0
        try:
            yield
            answered = views
        finally:
            self._count(-1, -views, -size)
            self._pace.left(answered)

    def _refusal(self, reason: str, most: str) -> Overloaded:
        self._metrics.refused(reason)
        expected = self._pace.seconds(self.views)
        return Overloaded(
            f"{self.views} views of {self.bytes} bytes wait for model '{self._model}' already, and at most {most} may. "
            "Try again later",
            retry_after=UNKNOWN if expected is None else min(max(expected, SOONEST), LATEST),
        )

    def _count(self, images: int, views: int, size: int) -> None:
        self.images += images
        self.views += views
        self.bytes += size
        self._metrics.waiting_images.inc(images)
        self._metrics.waiting_views.inc(views)
        self._metrics.waiting_bytes.inc(size)
