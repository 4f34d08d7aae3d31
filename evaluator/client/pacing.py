"""Bursts of calls: how many a client has in flight, while the others wait for their turn."""

import threading
import time
from collections import deque

from .backends import Backend, Event

MAX_IN_FLIGHT = 128  # calls; a server's default limit per connection, see `ServerLimits.max_streams`
_GROWTH = 0.1  # calls per answer
_HEADROOM = 0.9  # below what a full server had accepted, so that it refuses few further calls


class Pacer:
    """Gives the calls of one client their turns, in order of arrival; thread-safe.

    A full server refuses calls at once, and with several views per image it is full before MAX_IN_FLIGHT. So a refusal
    lowers the limit to just below the number of calls that the server has accepted, and each answer raises it slightly.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._lock = threading.Lock()
        self._limit = float(MAX_IN_FLIGHT)
        self._in_flight = 0
        self._waiting: deque[Event] = deque()

    async def enter(self, deadline: float | None, *, first: bool = False) -> bool:
        """Wait for a turn, which `leave` ends; return False if there is none before the deadline.

        deadline: on the clock of time.monotonic(), None for no deadline; first: before all that are waiting.
        """
        with self._lock:
            if (first or not self._waiting) and self._has_room():
                self._in_flight += 1
                return True
            turn: Event = self._backend.Event()
            (self._waiting.appendleft if first else self._waiting.append)(turn)
        try:
            if await turn.reached(None if deadline is None else max(0.0, deadline - time.monotonic())):
                return True
        except BaseException:  # the task is cancelled, or Ctrl-C
            if not self._withdraw(turn):
                self.leave()
            raise
        return not self._withdraw(turn)

    def leave(self) -> None:
        """End a turn."""
        with self._lock:
            self._in_flight -= 1
            while self._waiting and self._has_room():
                self._in_flight += 1
                self._waiting.popleft().set()

    def answered(self) -> None:
        """Note that the server has answered a call."""
        with self._lock:
            self._limit = min(MAX_IN_FLIGHT, self._limit + _GROWTH)

    def refused(self) -> bool:
        """Note that a full server has refused a call; return whether it has accepted others, so that waiting for one of
        their answers makes room.
        """
        with self._lock:
            accepted = self._in_flight - 1
            self._limit = max(1.0, min(self._limit, _HEADROOM * accepted))
            return accepted > 0

    def _has_room(self) -> bool:
        return self._in_flight < int(self._limit)

    def _withdraw(self, turn: Event) -> bool:
        """Remove a waiting turn; return False if it has already come."""
        with self._lock:
            if turn.is_set():
                return False
            self._waiting.remove(turn)
            return True
