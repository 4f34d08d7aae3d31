"""A watchdog beside a device: a batch that never ends makes the device lost.

Devices and their drivers do not only fail, they can hang. The thread that computes waits for ever then, everybody's
images behind it, and the server would look alive while it answers nobody.
"""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from prelunet.evaluator.errors import DeviceLost
from prelunet.evaluator.serving.scheduling.request import ReadyView, ScheduledModel

# A batch hangs when it takes so many times as long as the longest of its model did, in proportion where it is larger.
# On a machine full of other work they differ by ten; a false alarm ends a server that works, a late one only prolongs
# an outage.
HANG_FACTOR = 20
MIN_TIMEOUT = 60.0  # seconds that every batch has: a machine that swaps, a GPU that somebody else uses too
FIRST_BATCH_TIMEOUT = (
    600.0  # seconds of a model's first batch, of whose pace nothing is known: a large net on a slow core
)
CHECK_INTERVAL = 1.0  # seconds between two looks

OnHang = Callable[[DeviceLost, Sequence[ReadyView]], object]


@dataclass(eq=False)
class _Batch:
    """A batch on the device. watched: seconds, of which those in which the whole process stood still are none."""

    model: ScheduledModel
    views: Sequence[ReadyView]
    pixels: int
    elapsed: float = 0.0


class Watchdog:
    """Watches the batches of one device, which any thread may begin.

    hangs: told the error and the views of a batch that does not end, in the watchdog's own thread.
    """

    def __init__(self, on_hang: OnHang) -> None:
        self._on_hang = on_hang
        self._lock = threading.Lock()
        self._batches: list[_Batch] = []
        self._longest: dict[ScheduledModel, tuple[float, int]] = {}  # seconds and pixels

    @contextmanager
    def watch_batch(self, model: ScheduledModel, views: Sequence[ReadyView], pixels: int) -> Iterator[None]:
        """Watch a batch while the block runs. pixels: of its canvases."""
        batch, begun = _Batch(model, views, pixels), time.monotonic()
        with self._lock:
            self._batches.append(batch)
        try:
            yield
        finally:
            with self._lock:
                # The clock goes on while the process stands still; the looks do not, and are CHECK_INTERVAL apart.
                seconds = min(time.monotonic() - begun, batch.elapsed + 2 * CHECK_INTERVAL)
                if batch in self._batches:  # else it was told to hang
                    self._batches.remove(batch)
                    self._longest[model] = max(self._longest.get(model, (0.0, 1)), (seconds, pixels))

    def watch(self, ended: threading.Event) -> None:
        """Look at the batches until it has ended.

        Looks are counted, not the clock: a process that was stopped for an hour, or its container, has not waited.
        """
        while not ended.wait(CHECK_INTERVAL):
            self.check(CHECK_INTERVAL)

    def check(self, seconds: float) -> None:
        """Count so many seconds more for each batch, and tell those that hang."""
        hanging = []
        with self._lock:
            for batch in self._batches:
                batch.elapsed += seconds
                if batch.elapsed > self._timeout(batch):
                    hanging.append(batch)
            for batch in hanging:
                self._batches.remove(batch)
        for batch in hanging:
            self._on_hang(self._lost(batch), batch.views)

    def _timeout(self, batch: _Batch) -> float:
        """Return the seconds that a batch may take."""
        if batch.model not in self._longest:
            return FIRST_BATCH_TIMEOUT
        seconds, pixels = self._longest[batch.model]
        return max(MIN_TIMEOUT, HANG_FACTOR * seconds * max(1.0, batch.pixels / pixels))

    def _lost(self, batch: _Batch) -> DeviceLost:
        return DeviceLost(
            f"{batch.model.session.circumstances.provider} has been computing one batch for {batch.elapsed:.0f} s, so "
            "that it will hardly end. Start the program again; if it comes back, look at the device and its driver"
        )
