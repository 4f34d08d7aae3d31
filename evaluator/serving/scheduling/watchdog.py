"""The watchdog of a device: a batch that never ends marks the device as lost.

Devices and drivers can hang instead of failing. A compute thread then waits forever with all images behind it, and
the server looks alive but answers nobody.
"""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from weakref import WeakKeyDictionary

from msgspec import Struct

from ...errors import DeviceLost
from .model import ServedModel
from .request import ReadyView

# A batch hangs if it takes this many times as long as the longest batch of its model so far, in proportion to its
# pixels if it is larger. On a busy machine batch times differ by a factor of ten. A false alarm stops a working server,
# a late one only prolongs an outage.
HANG_FACTOR = 20
MIN_TIMEOUT = 60.0  # seconds: the machine may swap, or another process may use the GPU
FIRST_BATCH_TIMEOUT = 600.0  # seconds, while the model's speed is unknown: it may be a large net on a slow core
CHECK_INTERVAL = 1.0  # seconds


class _Batch(Struct, eq=False):
    """A batch on the device. elapsed: seconds, without those in which the whole process was suspended."""

    model: ServedModel
    views: Sequence[ReadyView]
    pixels: int
    elapsed: float = 0.0


class Watchdog:
    """Watches the batches of one device, started in any thread.

    on_hang: called with the error and the views of a batch that hangs, in the watchdog's own thread.
    """

    def __init__(self, on_hang: Callable[[DeviceLost, Sequence[ReadyView]], object]) -> None:
        self._on_hang = on_hang
        self._lock = threading.Lock()
        self._batches: list[_Batch] = []
        self._longest = WeakKeyDictionary[ServedModel, tuple[float, int]]()  # seconds and pixels

    @contextmanager
    def watch_batch(self, model: ServedModel, views: Sequence[ReadyView], pixels: int) -> Iterator[None]:
        """Watch a batch for as long as the block runs. pixels: of its canvases."""
        batch, start = _Batch(model, views, pixels), time.monotonic()
        with self._lock:
            self._batches.append(batch)
        succeeded = False
        try:
            yield
            succeeded = True
        finally:
            with self._lock:
                # A suspended process stops the checks, CHECK_INTERVAL apart, but not the clock.
                seconds = min(time.monotonic() - start, batch.elapsed + 2 * CHECK_INTERVAL)
                if batch in self._batches:  # otherwise it was reported as hanging
                    self._batches.remove(batch)
                    if succeeded:  # a failure says nothing of how long batches take
                        self._longest[model] = max(self._longest.get(model, (0.0, 1)), (seconds, pixels))

    def watch(self, ended: threading.Event) -> None:
        """Check the batches at intervals until `ended` is set.

        Counts checks instead of reading the clock: a process or container suspended for an hour has not waited.
        """
        while not ended.wait(CHECK_INTERVAL):
            self.check(CHECK_INTERVAL)

    def check(self, seconds: float) -> None:
        """Add the seconds to each batch's elapsed time, and report those that hang."""
        hanging = []
        with self._lock:
            for batch in self._batches:
                batch.elapsed += seconds
                if batch.elapsed > self._timeout(batch):
                    hanging.append(batch)
            for batch in hanging:
                self._batches.remove(batch)
        for batch in hanging:
            error = DeviceLost(
                f"{batch.model.session.circumstances.provider} has been computing one batch for {batch.elapsed:.0f} s "
                "and appears to hang. Restart the program; if the error returns, check the device and its driver"
            )
            self._on_hang(error, batch.views)

    def _timeout(self, batch: _Batch) -> float:
        """Return the time limit of a batch in seconds."""
        if batch.model not in self._longest:
            return FIRST_BATCH_TIMEOUT
        seconds, pixels = self._longest[batch.model]
        return max(MIN_TIMEOUT, HANG_FACTOR * seconds * max(1.0, batch.pixels / pixels))
