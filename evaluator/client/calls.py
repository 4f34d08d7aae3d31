"""What both clients do about a call that is not I/O: its deadline, its attempts, its errors."""

import logging
import random
import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, Self, TypeAlias

import grpc

from prelunet.evaluator.client.channel import checked_address
from prelunet.evaluator.errors import Interrupted, NotReady, Overloaded, PreluNetError, UsageError
from prelunet.evaluator.pb.prelunet.v1 import prelunet_pb2 as pb
from prelunet.evaluator.rpc.status import error_for_reason, error_from, is_unreachable


@dataclass(frozen=True)
class RetryPolicy:
    """How often a client tries a call again, and how long it waits before.

    attempts: of one call, the first one included; initial_backoff: seconds that the wait before the second attempt may last; each
    further wait may last twice as long as the one before, but no longer than `max_backoff`. Each wait is drawn evenly
    between 0 and that (full jitter), so that many clients do not come back at one moment; what an overloaded server
    asks to wait comes on top.

    retry_budget: retries that a client has in hand, all its calls together; answers_per_retry: so many answers bring one
    back, up to the budget. So a client whose calls fail for long adds at most `retry_budget` calls and one for every
    `answers_per_retry` answers to what the server has to bear.

    restart_timeout: seconds for which a call waits for a server that is absent, with the same waits in between; attempts and
    budget do not count meanwhile. 0: such a failure is one like the others.
    """

    attempts: int = 4
    initial_backoff: float = 0.1
    max_backoff: float = 5.0
    retry_budget: int = 50
    answers_per_retry: int = 10
    restart_timeout: float = 20.0

    def __post_init__(self) -> None:
        if self.attempts < 1 or self.retry_budget < 0 or self.answers_per_retry < 1:
            raise UsageError(f"{self}: attempts and answers_per_retry should be 1 or more, retry_budget 0 or more")
        if not 0 < self.initial_backoff <= self.max_backoff < float("inf"):
            raise UsageError(
                f"{self}: initial_backoff and max_backoff should be seconds above 0, initial_backoff no more than max_backoff"
            )
        if not 0 <= self.restart_timeout < float("inf"):
            raise UsageError(f"{self}: restart_timeout should be seconds, 0 or more")

    @classmethod
    def none(cls) -> Self:
        """Return the rule by which nothing is tried again."""
        return cls(attempts=1, restart_timeout=0.0)


class RetryBudget:
    """The retries that a client has in hand; for any number of threads."""

    def __init__(self, retries: RetryPolicy) -> None:
        self._cost = retries.answers_per_retry  # counted in answers: whole numbers, so that ten tenths are one
        self._limit = self._left = retries.retry_budget * self._cost
        self._lock = threading.Lock()

    def withdraw(self) -> bool:
        """Take one retry; False where none is left."""
        with self._lock:
            if self._left < self._cost:
                return False
            self._left -= self._cost
            return True

    def deposit(self) -> None:
        """Take note of an answer."""
        with self._lock:
            self._left = min(self._limit, self._left + 1)


_draw = random.SystemRandom().uniform  # not the module's generator: a fleet whose programs seed it would keep step


class Attempts:
    """The attempts of one call.

    deadline: on the clock of time.monotonic(), None where there is no end; draw: returns a number between two others.
    """

    def __init__(
        self,
        retries: RetryPolicy,
        budget: RetryBudget,
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
    def exhausted(self) -> bool:
        """Whether no further attempt is allowed."""
        return self._begun >= self._retries.attempts

    def pause(self, error: PreluNetError, *, absent: bool = False) -> float | None:
        """Return the seconds to wait before the next attempt; None where there should be none.

        error: why the last one failed, one that may pass; absent: because there is no server yet. There should be none
        after the last attempt, none that could not begin before the deadline, and none that the client has no more
        retries in hand for.
        """
        if absent and self._retries.restart_timeout:
            return self._pause_until_available(error)
        self._absences = 0
        if self.exhausted:
            return None
        pause = self._jittered(error, self._begun)
        if self._deadline is not None and time.monotonic() + pause >= self._deadline:
            return None
        return pause if self._budget.withdraw() else None

    def _pause_until_available(self, error: PreluNetError) -> float | None:
        """Return the seconds to wait for a server that is absent: at most half of what is left, so that the last
        attempts come just before the end.
        """
        now = time.monotonic()
        self.discard_last()
        if self._absences == 0:
            self._absent_since = now
        self._absences += 1
        end = self._absent_since + self._retries.restart_timeout
        left = (end if self._deadline is None else min(end, self._deadline)) - now
        if left < self._retries.initial_backoff:
            return None
        return min(self._jittered(error, self._absences), left / 2)

    def _jittered(self, error: PreluNetError, failures: int) -> float:
        """Return a wait after so many failures, with what the server asks to wait."""
        doublings = min(failures - 1, 60)  # the wait has long reached `max_backoff`, and a float has an end
        pause = self._draw(0.0, min(self._retries.max_backoff, self._retries.initial_backoff * 2.0**doublings))
        asked: float | None = getattr(error, "retry_after", None)
        return pause if asked is None else pause + asked

    def discard_last(self) -> None:
        """Count the last attempt as none: no server has seen it."""
        self._begun -= 1

    def answer_received(self) -> None:
        """Take note of an answer; in a stream, from which attempts are counted anew."""
        self._begun = 1
        self._absences = 0
        self._budget.deposit()


Timeout: TypeAlias = float | Literal["client"] | None
"""Seconds for a call, retries included; None to wait for ever; "client": as its client was told."""

DEFAULT_RETRY_POLICY = RetryPolicy()
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_MAX_TIMEOUT = 1e9  # seconds; gRPC counts nanoseconds in 64 bits
_CANCELLED = grpc.StatusCode.CANCELLED  # from a server: it stopped before it had begun the call
_TRANSIENT = (grpc.StatusCode.UNAVAILABLE, _CANCELLED)

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Failure:
    """Why a call or an image has no answer.

    transient: whether the same may succeed later; absent: because there is no server yet, or none that is ready.
    """

    error: PreluNetError
    transient: bool
    absent: bool = False


class ClientSettings:
    """What a client was told about all its calls; shared by its threads. closed: no further call may begin."""

    def __init__(self, address: str, timeout: float | None, retries: RetryPolicy) -> None:
        self.address = checked_address(address)
        self.retries = retries
        self.budget = RetryBudget(retries)
        self.closed = False
        self._timeout = _checked(timeout)
        self._warned = False

    def deadline(self, timeout: Timeout) -> float | None:
        """Return when a call that begins now should be over, on the clock of time.monotonic()."""
        seconds = self._timeout if timeout == "client" else _checked(timeout)
        return None if seconds is None else time.monotonic() + seconds

    def attempts(self, deadline: float | None) -> Attempts:
        """Return the attempts of something that is asked now."""
        return Attempts(self.retries, self.budget, deadline)

    def warn_server_absent(self, error: PreluNetError) -> None:
        """Tell once, until a call has its answer, that calls wait: else nobody would know why nothing happens."""
        if self.retries.restart_timeout and not self._warned:
            self._warned = True
            where = "" if self.address in str(error) else f"{self.address}: "
            log.warning("trying again for up to %g s: %s%s", self.retries.restart_timeout, where, error)

    def clear_warning(self) -> None:
        """Take note that there is a server."""
        self._warned = False


class Call:
    """One call of a client, through all its attempts. deadline: as of `ClientSettings.deadline`."""

    def __init__(self, settings: ClientSettings, deadline: float | None, request_id: str | None) -> None:
        if request_id is not None and not _REQUEST_ID.fullmatch(request_id):
            raise UsageError(
                f"request_id is {request_id!a}, but it should have 1 to 128 letters, digits, '.', '_', ':' and '-'"
            )
        self._settings = settings
        self._request_id = request_id
        self._attempts = settings.attempts(deadline)

    def begin(self) -> dict[str, Any]:
        """Begin an attempt: return the arguments that gRPC needs beside the request."""
        if self._settings.closed:
            raise UsageError("the client is closed; make the call inside of its `with` block")
        metadata = () if self._request_id is None else (("x-request-id", self._request_id),)
        return {"timeout": self._attempts.begin(), "metadata": metadata}

    def answer_received(self) -> None:
        """Take note of an answer."""
        self._attempts.answer_received()
        self._settings.clear_warning()

    def pause_after(self, failed: grpc.RpcError, *, repeatable: bool = True) -> float:
        """Return the seconds to wait before the next attempt; raise the error where there should be none.

        repeatable: whether the call can be made again once a server has begun it.
        """
        failure = self.failure_of(failed)
        if failure.transient and (repeatable or failure.absent):
            pause = self._attempts.pause(failure.error, absent=failure.absent)
            if pause is not None:
                if failure.absent:
                    self._settings.warn_server_absent(failure.error)
                return pause
        try:
            raise failure.error from failed
        finally:
            del failure, failed  # the traceback holds this frame: they would keep it, and the request's image, alive

    def failure_of(self, failed: grpc.RpcError) -> Failure:
        """Return why the call failed."""
        if failed.code() == _CANCELLED and self._settings.closed:
            return self._failure(Interrupted(f"{self._settings.address}: the client was closed before the answer came"))
        return self._failure(error_from(failed, self._settings.address), failed.code(), absent=is_unreachable(failed))

    def failure_from_message(self, message: pb.CallError) -> Failure:
        """Return why an image of a stream has no answer."""
        retry_after = message.retry_after_seconds if message.HasField("retry_after_seconds") else None
        error = error_for_reason(message.reason, retry_after, message.message)
        if error is None:
            error = PreluNetError(f"{self._settings.address}: status {message.code}: {message.message}")
        return self._failure(error, next((code for code in _TRANSIENT if code.value[0] == message.code), None))

    def _failure(self, error: PreluNetError, code: grpc.StatusCode | None = None, *, absent: bool = False) -> Failure:
        if self._request_id is not None:
            error.args = (f"{error} (request id {self._request_id})", *error.args[1:])
        transient = code in _TRANSIENT or isinstance(error, Overloaded)
        return Failure(error, transient, absent or isinstance(error, NotReady))

    def invalid_response(self, what: str) -> PreluNetError:
        """Return the error for a server that does not keep to the protocol."""
        error = PreluNetError(f"{self._settings.address}: {what}. Are client and server of the same version?")
        return self._failure(error).error


def _checked(timeout: float | Literal["client"] | None) -> float | None:
    """Return a timeout that is one."""
    if timeout is None:
        return None
    if isinstance(timeout, str) or not 0 < timeout <= _MAX_TIMEOUT:
        raise UsageError(f"timeout is {timeout!r}, but it should be seconds above 0, or None to wait for ever")
    return float(timeout)
