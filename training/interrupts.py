"""Signals that stop a training: they are noted, and the training stops between two steps."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Signals:
    """What was heard. came: whether somebody wants the training to stop."""

    def __init__(self) -> None:
        self.came = False

    def _hear(self, _number: int, _frame: FrameType | None) -> None:
        if self.came:
            raise KeyboardInterrupt  # whoever asks twice does not want to wait
        self.came = True


@contextmanager
def heard_signals() -> Iterator[Signals]:
    """Note Ctrl-C and SIGTERM while the block runs instead of raising KeyboardInterrupt; the second one raises it.

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
