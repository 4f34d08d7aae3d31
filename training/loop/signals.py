"""Signals that stop a training: they are noted, and the training stops between two steps."""

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM)
TOGETHER = 2.0  # seconds: a scheduler that stops a job tells torchrun and each process, and torchrun tells them again


class Signals:
    """What was heard. came: whether somebody wants the training to stop."""

    def __init__(self) -> None:
        self.came = False
        self._first = 0.0  # when, by time.monotonic

    def _hear(self, _number: int, _frame: FrameType | None) -> None:
        if not self.came:
            self.came, self._first = True, time.monotonic()
        elif time.monotonic() - self._first > TOGETHER:
            raise KeyboardInterrupt  # whoever asks again does not want to wait


@contextmanager
def heard_signals() -> Iterator[Signals]:
    """Note Ctrl-C and SIGTERM while the block runs instead of raising KeyboardInterrupt.

    One that comes more than TOGETHER seconds after the first raises it.

    Between the update of two layers a net is neither that of one step nor of the next: saving it there would break the
    promise that a resumed run equals an undisturbed one. One that came before is raised after the block if nobody has
    looked. Outside the main thread, where no signal arrives, nothing is ever heard.
    """
    signals = Signals()
    if threading.current_thread() is not threading.main_thread():
        yield signals
        return
    before = [(number, signal.signal(number, signals._hear)) for number in SIGNALS]
    try:
        yield signals
    finally:
        for number, handler in before:
            signal.signal(number, handler)
    if signals.came:
        raise KeyboardInterrupt
