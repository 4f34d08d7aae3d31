"""Deferred handling of stop signals: they are recorded, and training stops between two steps."""

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM)
DEBOUNCE_SECONDS = 2.0  # a scheduler signals torchrun and each process, and torchrun signals the processes again


class StopSignals:
    """The signals so far. received: whether one requested a stop."""

    def __init__(self) -> None:
        self.received = False
        self._first = 0.0  # time of the first one, by time.monotonic

    def _handle(self, _number: int, _frame: FrameType | None) -> None:
        if not self.received:
            self.received, self._first = True, time.monotonic()
        elif time.monotonic() - self._first > DEBOUNCE_SECONDS:
            raise KeyboardInterrupt  # a second request does not wait


@contextmanager
def deferred_signals() -> Iterator[StopSignals]:
    """Record Ctrl-C and SIGTERM while the block runs instead of raising KeyboardInterrupt.

    A signal more than DEBOUNCE_SECONDS after the first does raise it. If `received` is still set at the end of the
    block, KeyboardInterrupt is raised there. Only the main thread may enter it.

    Between the updates of two layers a net belongs to neither step. Saving it there would break the guarantee that a
    resumed run equals an uninterrupted one.
    """
    signals = StopSignals()
    before = [(number, signal.signal(number, signals._handle)) for number in SIGNALS]
    try:
        yield signals
    finally:
        for number, handler in before:
            signal.signal(number, handler)
    if signals.received:
        raise KeyboardInterrupt
