"""Room for images while they are decoded: so many bytes for all threads together, told from headers before decoding.

An image that alone takes more than that waits until no other is decoded, and others wait for it. An ordinary photo
never waits: of 500x375 pixels more than 300 have room at once, of 12 Mpixel five, for a GPU seventeen.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

ROOM = 5 * 2**26  # bytes: the largest JPEG that is accepted, of 64 Mpixel, fits if it is neither progressive nor CMYK
GPU_ROOM = 2**30  # beside a GPU, which may wait for sixteen threads that all decode 12 Mpixel


class DecodingRoom:
    """Room that threads share. size: bytes."""

    def __init__(self, size: int):
        self.size = size
        self._taken = 0
        self._changed = threading.Condition()

    @contextmanager
    def place(self) -> Iterator[Callable[[int], None]]:
        """Give what takes room for one image, waiting for it; with the end of the block it is given back.

        To be called once at most: who has room and waits for more could wait for ever.
        """
        taken = 0

        def admit(size: int) -> None:
            nonlocal taken
            assert not taken, "one image at a time"
            with self._changed:
                self._changed.wait_for(lambda: not self._taken or self._taken + size <= self.size)
                self._taken += size
                taken = size

        try:
            yield admit
        finally:
            with self._changed:
                self._taken -= taken
                self._changed.notify_all()


# Of this process: its memory is what is bounded, however many pipelines it has.
_DECODING, _DECODING_FOR_GPU = DecodingRoom(ROOM), DecodingRoom(GPU_ROOM)


def decoding_room(*, gpu: bool) -> DecodingRoom:
    """Return the room that all pipelines of this process share; gpu: whether a GPU computes."""
    return _DECODING_FOR_GPU if gpu else _DECODING
