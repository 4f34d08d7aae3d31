"""When a call that failed is tried again: the rule alone, without a connection.

Tried again is only what may succeed later: an UNAVAILABLE (a server that stops, a connection refused or lost) and the
RESOURCE_EXHAUSTED of `Overloaded`. Every call of this service may be repeated, since none changes anything.

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

from evaluator.errors import Overloaded, PreluNetError, UsageError


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
    """

    attempts: int = 4
    first: float = 0.1
    most: float = 5.0
    reserve: int = 50
    answers_per_retry: int = 10

    def __post_init__(self) -> None:
        if self.attempts < 1 or self.reserve < 0 or self.answers_per_retry < 1:
            raise UsageError(f"{self}: attempts and answers_per_retry should be 1 or more, reserve 0 or more")
        if not 0 < self.first <= self.most < float("inf"):
            raise UsageError(f"{self}: first and most should be seconds above 0, first no more than most")

    @classmethod
    def none(cls) -> Self:
        """Return the rule by which nothing is tried again."""
        return cls(attempts=1)


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

    def begin(self) -> float | None:
        """Count one more attempt and return the seconds that it has, None where there is no end."""
        self._begun += 1
        return None if self._deadline is None else max(0.0, self._deadline - time.monotonic())

    @property
    def spent(self) -> bool:
        """Whether no further attempt is allowed."""
        return self._begun >= self._retries.attempts

    def pause(self, error: PreluNetError) -> float | None:
        """Return the seconds to wait before the next attempt; None where there should be none.

        error: why the last one failed, one that may pass. There should be none after the last attempt, none that could
        not begin before the deadline, and none that the client has no more retries in hand for.
        """
        if self.spent:
            return None
        doublings = min(self._begun - 1, 60)  # the wait has long reached `most`, and a float has an end
        pause = self._draw(0.0, min(self._retries.most, self._retries.first * 2.0**doublings))
        if isinstance(error, Overloaded) and error.retry_after is not None:
            pause += error.retry_after
        if self._deadline is not None and time.monotonic() + pause >= self._deadline:
            return None
        return pause if self._budget.take() else None

    def answered(self) -> None:
        """Take note of an answer; in a stream, from which attempts are counted anew."""
        self._begun = 1
        self._budget.earn()
