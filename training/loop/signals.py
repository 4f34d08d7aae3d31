"""Signals that stop a training: they are noted, and the training stops between two steps."""

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM)
DEBOUNCE_SECONDS = (
    2.0  # seconds: a scheduler that stops a job tells torchrun and each process, and torchrun tells them again
)


class StopSignals:
    """What was heard. came: whether somebody wants the training to stop."""

    def __init__(self) -> None:
        self.received = False
        self._first = 0.0  # when, by time.monotonic

    def _handle(self, _number: int, _frame: FrameType | None) -> None:
        if not self.received:
            self.received, self._first = True, time.monotonic()
        elif time.monotonic() - self._first > DEBOUNCE_SECONDS:
            raise KeyboardInterrupt  # whoever asks again does not want to wait


@contextmanager
def deferred_signals() -> Iterator[StopSignals]:
    """Note Ctrl-C and SIGTERM while the block runs instead of raising KeyboardInterrupt.

    One that comes more than DEBOUNCE_SECONDS seconds after the first raises it.

    Between the update of two layers a net is neither that of one step nor of the next: saving it there would break the
    promise that a resumed run equals an undisturbed one. One that came before is raised after the block if nobody has
    looked. Outside the main thread, where no signal arrives, nothing is ever heard.
    """
    signals = StopSignals()
    if threading.current_thread() is not threading.main_thread():
        yield signals
        return
    before = [(number, signal.signal(number, signals._handle)) for number in SIGNALS]
    try:
        yield signals
    finally:
        for number, handler in before:
            signal.signal(number, handler)
    if signals.received:
        raise KeyboardInterrupt
