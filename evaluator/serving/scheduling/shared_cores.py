"""The cores of a machine, which the processes of a server share: those that compute divide them, without messages."""

import mmap
import sys

from ...machine import cores


class SharedCores:
    """How many threads of this process may compute at once.

    More threads than cores would take the cores from each other, and those of a process Python's lock, too. notes: a
    byte for each process, in memory that all share: how many of its threads compute; by default there is only this one.
    number: of this process, from 1.
    """

    def __init__(self, notes: "bytearray | mmap.mmap | None" = None, number: int = 1) -> None:
        self._notes = bytearray(1) if notes is None else notes
        self._own = number - 1
        self._threads = worker_threads()

    def note(self, computing: int) -> None:
        """Tell the other processes how many threads of this one compute."""
        self._notes[self._own] = max(0, min(computing, 255))

    def threads(self) -> int:
        """Return the number of threads: an equal part, and what the others that compute leave; no limit if none does.

        At least one, also where a batch then keeps its process from decoding: with as many processes as cores.
        """
        others = [threads for place, threads in enumerate(self._notes[:]) if threads and place != self._own]
        if not others:
            return sys.maxsize
        return max(-(-self._threads // (1 + len(others))), self._threads - sum(others))


def worker_threads() -> int:
    """Return the number of threads on a CPU: one for each core, and two at least, to decode beside a batch."""
    return max(2, cores())
