"""Limit the memory of decoding: all threads share a number of bytes, reserved from image headers before decoding.

An image that alone exceeds the capacity waits until no other is decoded. Later images queue behind it, because
otherwise an endless flow of small ones would keep it out; a server lets small ones pass. Ordinary photos never wait:
the capacity holds more than 300 of 500x375 pixels, or five of 12 Mpixel (seventeen beside a GPU).
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ..errors import DeadlinePassed

# The largest accepted JPEG, of 64 Mpixel, fits if it is neither progressive nor CMYK.
DECODE_BYTES = 5 * 2**26
LEAST_DECODE_BYTES = 2**26  # a JPEG of 12 Mpixel
GPU_DECODE_BYTES = 2**30  # beside a GPU, fed by up to sixteen threads that decode 12 Mpixel each


class ByteSemaphore:
    """A number of bytes that threads share, first come, first served. capacity: bytes."""

    def __init__(self, capacity: int):
        self.capacity = capacity
        self._used = 0
        self._waiters: deque[object] = deque()  # in order of arrival
        self._changed = threading.Condition()

    @contextmanager
    def reservation(self, deadline: float | None = None) -> Iterator[Callable[[int], None]]:
        """Yield a function that reserves bytes for one image, blocking until they are free; the block's end frees them.

        Another call, for another attempt at the image, first frees what it had: a thread that holds bytes and waits for
        more could deadlock.
        deadline: latest end of the wait, on the clock of time.monotonic(); after it the function raises DeadlinePassed.
        """
        used = 0

        def reserve(size: int) -> None:
            nonlocal used
            release()
            me = object()
            with self._changed:
                self._waiters.append(me)
                try:
                    if not self._changed.wait_for(
                        lambda: self._waiters[0] is me and (not self._used or self._used + size <= self.capacity),
                        None if deadline is None else deadline - time.monotonic(),
                    ):
                        raise DeadlinePassed(
                            "the deadline of this call passed while its image waited for memory for decoding. "
                            "Set a later deadline, or try again later"
                        )
                    self._used += size
                finally:
                    self._waiters.remove(me)
                    self._changed.notify_all()  # wake the next in the queue
            used = size

        def release() -> None:
            nonlocal used
            with self._changed:
                self._used -= used
                self._changed.notify_all()
            used = 0

        try:
            yield reserve
        finally:
            release()


def decode_capacity(memory: int | None = None, *, gpu: bool) -> int:
    """Return the capacity of a semaphore in bytes; memory: a server's limit, None for none; gpu: as below."""
    most = GPU_DECODE_BYTES if gpu else DECODE_BYTES
    return most if memory is None else min(most, max(LEAST_DECODE_BYTES, memory // 8))


# One per process, because the limit is for its memory, however many pipelines it has.
_SEMAPHORES = {gpu: ByteSemaphore(decode_capacity(gpu=gpu)) for gpu in (False, True)}


def decode_semaphore(*, gpu: bool) -> ByteSemaphore:
    """Return the semaphore that all pipelines of this process share; gpu: whether a GPU computes."""
    return _SEMAPHORES[gpu]


def limit_decoding(memory: int | None) -> None:
    """Make the capacity of this process's semaphores a part of a server's `--memory-limit`; None for the usual."""
    for gpu, semaphore in _SEMAPHORES.items():
        semaphore.capacity = decode_capacity(memory, gpu=gpu)
