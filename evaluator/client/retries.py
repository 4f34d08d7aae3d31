"""When a call that failed is tried again: the rule alone, without a connection.

Tried again is only what may succeed later: an UNAVAILABLE (a server that stops, a connection refused or lost), a
CANCELLED that the caller did not ask for (a server that stops before it has begun the call) and the
RESOURCE_EXHAUSTED of `Overloaded`. Every call of this service may be repeated, since none changes anything.

A server that is absent (no connection can be made, or it still loads its models) is waited for: such attempts cost no
server anything, so they are not counted, only bounded in time.

gRPC can retry by itself, and is not asked to (all tried with grpcio 1.81.1). It knows status codes only, so an overload
and a device with too little memory are the same to it; it obeys a header of its own (`grpc-retry-pushback-ms`), but not
google.rpc.RetryInfo; it keeps a request for another attempt up to 256 KiB, which photos exceed; and where the time will
be over before another attempt it waits all the same, so that the caller hears of a deadline and not of its reason.
"""

import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

from prelunet.evaluator.errors import PreluNetError, UsageError


@dataclass(frozen=True)
class Retries:
    """How often a client tries a call again, and how long it waits before.

    attempts: of one call, the first one included; first: seconds that the wait before the second attempt may last; each
    further wait may last twice as long as the one before, but no longer than `most`. Each wait is drawn evenly between
    0 and that (full jitter), so that many clients do not come back at one moment; what an overloaded server asks to
    wait comes on top.

    reserve: retries that a client has in hand, all its calls together; answers_per_retry: so many answers bring one
    back, up to the reserve. So a client whose calls fail for long adds at most `reserve` calls and one for every
    `answers_per_retry` answers to what the server has to bear.

    restart: seconds for which a call waits for a server that is absent, with the same waits in between; attempts and
    reserve do not count meanwhile. 0: such a failure is one like the others.
    """

    attempts: int = 4
    first: float = 0.1
    most: float = 5.0
    reserve: int = 50
    answers_per_retry: int = 10
    restart: float = 20.0

    def __post_init__(self) -> None:
        if self.attempts < 1 or self.reserve < 0 or self.answers_per_retry < 1:
            raise UsageError(f"{self}: attempts and answers_per_retry should be 1 or more, reserve 0 or more")
        if not 0 < self.first <= self.most < float("inf"):
            raise UsageError(f"{self}: first and most should be seconds above 0, first no more than most")
        if not 0 <= self.restart < float("inf"):
            raise UsageError(f"{self}: restart should be seconds, 0 or more")

    @classmethod
    def none(cls) -> Self:
        """Return the rule by which nothing is tried again."""
        return cls(attempts=1, restart=0.0)


class Budget:
    """The retries that a client has in hand; for any number of threads."""

    def __init__(self, retries: Retries) -> None:
        self._price = retries.answers_per_retry  # counted in answers: whole numbers, so that ten tenths are one
        self._most = self._left = retries.reserve * self._price
        self._lock = threading.Lock()

    def take(self) -> bool:
        """Take one retry; False where none is left."""
        with self._lock:
            if self._left < self._price:
                return False
            self._left -= self._price
            return True

    def earn(self) -> None:
        """Take note of an answer."""
        with self._lock:
            self._left = min(self._most, self._left + 1)


_draw = random.SystemRandom().uniform  # not the module's generator: a fleet whose programs seed it would keep step


class Attempts:
    """The attempts of one call.

    deadline: on the clock of time.monotonic(), None where there is no end; draw: returns a number between two others.
    """

    def __init__(
        self,
        retries: Retries,
        budget: Budget,
        deadline: float | None,
        draw: Callable[[float, float], float] = _draw,
    ) -> None:
        self._retries = retries
        self._budget = budget
        self._deadline = deadline
        self._draw = draw
        self._begun = 0
        self._absences = 0  # in a row
        self._absent_since = 0.0  # on the clock of time.monotonic()

    def begin(self) -> float | None:
        """Count one more attempt and return the seconds that it has, None where there is no end."""
        self._begun += 1
        return None if self._deadline is None else max(0.0, self._deadline - time.monotonic())

    @property
    def spent(self) -> bool:
        """Whether no further attempt is allowed."""
        return self._begun >= self._retries.attempts

    def pause(self, error: PreluNetError, *, absent: bool = False) -> float | None:
        """Return the seconds to wait before the next attempt; None where there should be none.

        error: why the last one failed, one that may pass; absent: because there is no server yet. There should be none
        after the last attempt, none that could not begin before the deadline, and none that the client has no more
        retries in hand for.
        """
        if absent and self._retries.restart:
            return self._pause_until_back(error)
        self._absences = 0
        if self.spent:
            return None
        pause = self._drawn(error, self._begun)
        if self._deadline is not None and time.monotonic() + pause >= self._deadline:
            return None
        return pause if self._budget.take() else None

    def _pause_until_back(self, error: PreluNetError) -> float | None:
        """Return the seconds to wait for a server that is absent: at most half of what is left, so that the last
        attempts come just before the end.
        """
        now = time.monotonic()
        self.take_back()
        if self._absences == 0:
            self._absent_since = now
        self._absences += 1
        end = self._absent_since + self._retries.restart
        left = (end if self._deadline is None else min(end, self._deadline)) - now
        if left < self._retries.first:
            return None
        return min(self._drawn(error, self._absences), left / 2)

    def _drawn(self, error: PreluNetError, failures: int) -> float:
        """Return a wait after so many failures, with what the server asks to wait."""
        doublings = min(failures - 1, 60)  # the wait has long reached `most`, and a float has an end
        pause = self._draw(0.0, min(self._retries.most, self._retries.first * 2.0**doublings))
        asked: float | None = getattr(error, "retry_after", None)
        return pause if asked is None else pause + asked

    def take_back(self) -> None:
        """Count the last attempt as none: no server has seen it."""
        self._begun -= 1

    def answered(self) -> None:
        """Take note of an answer; in a stream, from which attempts are counted anew."""
        self._begun = 1
        self._absences = 0
        self._budget.earn()
