"""Who waits for an answer, and until when."""

import time
from dataclasses import dataclass, replace

from prelunet.evaluator.errors import DeadlinePassed


@dataclass(frozen=True)
class Caller:
    """Who asks.

    client: whose calls take turns with those of others; today the connection, later whom a token names;
    deadline: on the clock of time.monotonic(), None where the caller waits for ever; request_id: in log lines.
    """

    client: str = ""
    deadline: float | None = None
    request_id: str = ""

    def remaining(self) -> float | None:
        """Return the seconds that are left, below 0 when they are over; None where there is no end."""
        return None if self.deadline is None else self.deadline - time.monotonic()

    def within(self, seconds: float) -> "Caller":
        """Return the same caller with no more than so many seconds left."""
        deadline = time.monotonic() + seconds
        return replace(self, deadline=deadline if self.deadline is None else min(self.deadline, deadline))

    def require_time(self) -> None:
        """Raise DeadlinePassed once the time is over."""
        remaining = self.remaining()
        if remaining is not None and remaining <= 0:
            raise DeadlinePassed("the time that this call was given is over, so it was not computed. Give it more time")
