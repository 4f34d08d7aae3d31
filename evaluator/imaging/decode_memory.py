"""Room for images while they are decoded: so many bytes for all threads together, told from headers before decoding.

An image that alone takes more than that waits until no other is decoded, and others wait for it: whoever comes later
waits behind it, or small ones without end would keep it out. An ordinary photo
never waits: of 500x375 pixels more than 300 have room at once, of 12 Mpixel five, for a GPU seventeen.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from prelunet.evaluator.errors import DeadlinePassed

DECODE_BYTES = (
    5 * 2**26
)  # bytes: the largest JPEG that is accepted, of 64 Mpixel, fits if it is neither progressive nor CMYK
GPU_DECODE_BYTES = 2**30  # beside a GPU, which may wait for sixteen threads that all decode 12 Mpixel


class ByteSemaphore:
    """Room that threads share, first come, first served. size: bytes."""

    def __init__(self, capacity: int):
        self.capacity = capacity
        self._used = 0
        self._waiters: deque[object] = deque()  # who waits, in the order in which they came
        self._changed = threading.Condition()

    @contextmanager
    def reservation(self, deadline: float | None = None) -> Iterator[Callable[[int], None]]:
        """Give what takes room for one image, waiting for it; with the end of the block it is given back.

        To be called once at most: who has room and waits for more could wait for ever.
        deadline: on the clock of time.monotonic(), until which to wait; then it raises DeadlinePassed.
        """
        used = 0

        def reserve(size: int) -> None:
            nonlocal used
            assert not used, "one image at a time"
            self._acquire(size, deadline)
            used = size

        try:
            yield reserve
        finally:
            with self._changed:
                self._used -= used
                self._changed.notify_all()

    def _acquire(self, size: int, deadline: float | None) -> None:
        def my_turn() -> bool:
            return self._waiters[0] is me and (not self._used or self._used + size <= self.capacity)

        me = object()
        with self._changed:
            self._waiters.append(me)
            try:
                if not self._changed.wait_for(my_turn, None if deadline is None else deadline - time.monotonic()):
                    raise DeadlinePassed(
                        "the time that this call was given is over while its image waited for memory to be decoded in. "
                        "Give it more time, or try again later"
                    )
                self._used += size
            finally:
                self._waiters.remove(me)
                self._changed.notify_all()  # whose turn it is now


# Of this process: its memory is what is bounded, however many pipelines it has.
_CPU_SEMAPHORE, _GPU_SEMAPHORE = ByteSemaphore(DECODE_BYTES), ByteSemaphore(GPU_DECODE_BYTES)


def decode_semaphore(*, gpu: bool) -> ByteSemaphore:
    """Return the room that all pipelines of this process share; gpu: whether a GPU computes."""
    return _GPU_SEMAPHORE if gpu else _CPU_SEMAPHORE
