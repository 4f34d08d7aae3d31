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
from prelunet.evaluator.serving.scheduling.request import Lane, ReadyView

# A batch hangs when it takes so many times as long as the longest of its model did, in proportion where it is larger.
# On a machine full of other work they differ by ten; a false alarm ends a server that works, a late one only prolongs
# an outage.
TIMES = 20
LEAST = 60.0  # seconds that every batch has: a machine that swaps, a GPU that somebody else uses too
FIRST = 600.0  # seconds of a model's first batch, of whose pace nothing is known: a large net on a slow core
TICK = 1.0  # seconds between two looks

Hangs = Callable[[DeviceLost, Sequence[ReadyView]], object]


@dataclass(eq=False)
class _Batch:
    """A batch on the device. watched: seconds, of which those in which the whole process stood still are none."""

    lane: Lane
    views: Sequence[ReadyView]
    pixels: int
    watched: float = 0.0


class Watchdog:
    """Watches the batches of one device, which any thread may begin.

    hangs: told the error and the views of a batch that does not end, in the watchdog's own thread.
    """

    def __init__(self, hangs: Hangs) -> None:
        self._hangs = hangs
        self._lock = threading.Lock()
        self._batches: list[_Batch] = []
        self._longest: dict[Lane, tuple[float, int]] = {}  # seconds and pixels

    @contextmanager
    def over(self, lane: Lane, views: Sequence[ReadyView], pixels: int) -> Iterator[None]:
        """Watch a batch while the block runs. pixels: of its canvases."""
        batch, begun = _Batch(lane, views, pixels), time.monotonic()
        with self._lock:
            self._batches.append(batch)
        try:
            yield
        finally:
            with self._lock:
                # The clock goes on while the process stands still; the looks do not, and are TICK apart.
                seconds = min(time.monotonic() - begun, batch.watched + 2 * TICK)
                if batch in self._batches:  # else it was told to hang
                    self._batches.remove(batch)
                    self._longest[lane] = max(self._longest.get(lane, (0.0, 1)), (seconds, pixels))

    def watch(self, ended: threading.Event) -> None:
        """Look at the batches until it has ended.

        Looks are counted, not the clock: a process that was stopped for an hour, or its container, has not waited.
        """
        while not ended.wait(TICK):
            self.look(TICK)

    def look(self, seconds: float) -> None:
        """Count so many seconds more for each batch, and tell those that hang."""
        hanging = []
        with self._lock:
            for batch in self._batches:
                batch.watched += seconds
                if batch.watched > self._patience(batch):
                    hanging.append(batch)
            for batch in hanging:
                self._batches.remove(batch)
        for batch in hanging:
            self._hangs(self._lost(batch), batch.views)

    def _patience(self, batch: _Batch) -> float:
        """Return the seconds that a batch may take."""
        if batch.lane not in self._longest:
            return FIRST
        seconds, pixels = self._longest[batch.lane]
        return max(LEAST, TIMES * seconds * max(1.0, batch.pixels / pixels))

    def _lost(self, batch: _Batch) -> DeviceLost:
        return DeviceLost(
            f"{batch.lane.session.circumstances.provider} has been computing one batch for {batch.watched:.0f} s, so "
            "that it will hardly end. Start the program again; if it comes back, look at the device and its driver"
        )
