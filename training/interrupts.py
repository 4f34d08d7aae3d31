"""Signals during work that must be done whole or not at all."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Hold Ctrl-C and SIGTERM back while the block runs; afterwards raise KeyboardInterrupt if one came.

    Between the update of two layers a net is neither that of one step nor of the next: saving it there would break the
    promise that a resumed run equals an undisturbed one. Outside the main thread, where no signal arrives, it does
    nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []

    def note(number: int, _frame: FrameType | None) -> None:
        came.append(number)

    before = [(number, signal.signal(number, note)) for number in SIGNALS]
    try:
        yield
    finally:
        for number, handler in before:
            signal.signal(number, handler)
    if came:
        raise KeyboardInterrupt
