"""The cores of a machine, which the processes of a server share: those that compute divide them, without messages."""

import mmap
import sys

from ...machine import cores


class SharedCores:
    """How many threads of this process may compute at once.

    More threads than cores would take the cores from each other, and those of a process Python's lock, too. notes: a
    byte for each process, in memory that all share: whether it computes; by default there is only this one. number: of
    this process, from 1.
    """

    def __init__(self, notes: "bytearray | mmap.mmap | None" = None, number: int = 1) -> None:
        self._notes = bytearray(1) if notes is None else notes
        self._own = number - 1
        self._threads = worker_threads()

    def note(self, *, computes: bool) -> None:
        """Tell the other processes whether this one computes."""
        self._notes[self._own] = computes

    def threads(self) -> int:
        """Return the number of threads: while others compute, too, the part of one of them, at least one."""
        notes = self._notes[:]
        others = len(notes) - notes.count(0) - notes[self._own]
        return -(-self._threads // (1 + others)) if others else sys.maxsize


def worker_threads() -> int:
    """Return the number of threads on a CPU: one for each core, and two at least, to decode beside a batch."""
    return max(2, cores())
