"""The parts of a call that do no I/O, shared by both clients: deadline, attempts, errors."""

import logging
import random
import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, Self, TypeAlias

import grpc

from ..errors import Interrupted, NotReady, Overloaded, PreluNetError, UsageError
from ..pb.prelunet.v1 import prelunet_pb2 as pb
from ..rpc.credentials import Credentials
from ..rpc.status import error_for_reason, error_from, is_unreachable
from .channel import checked_address


@dataclass(frozen=True)
class RetryPolicy:
    """When and how often a client retries a call.

    attempts: maximum number of attempts per call, including the first.
    initial_backoff: maximum wait before the second attempt, in seconds. The maximum doubles with every attempt, up to
    `max_backoff`. Each wait is drawn uniformly between 0 and the maximum (full jitter), so that many clients do not
    return at the same moment. The wait that an overloaded server requests is added.
    retry_budget: retries available to all calls of a client together; every `answers_per_retry` answers return one, up
    to the budget. So a client whose calls keep failing adds at most `retry_budget` calls, plus one for every
    `answers_per_retry` answers, to the server's load.
    restart_timeout: how long a call waits for an absent server, in seconds. It tries again every 0.3 s at the latest;
    these attempts count neither as `attempts` nor against the budget. 0 treats an absent server like any other failure.
    """

    attempts: int = 4
    initial_backoff: float = 0.1
    max_backoff: float = 5.0
    retry_budget: int = 50
    answers_per_retry: int = 10
    restart_timeout: float = 20.0

    def __post_init__(self) -> None:
        if self.attempts < 1 or self.retry_budget < 0 or self.answers_per_retry < 1:
            raise UsageError(f"{self}: attempts and answers_per_retry must be at least 1, retry_budget at least 0")
        if not 0 < self.initial_backoff <= self.max_backoff < float("inf"):
            raise UsageError(f"{self}: initial_backoff must be above 0 and at most max_backoff, both in finite seconds")
        if not 0 <= self.restart_timeout < float("inf"):
            raise UsageError(f"{self}: restart_timeout must be a finite number of seconds, at least 0")

    @classmethod
    def none(cls) -> Self:
        """Return a policy without retries."""
        return cls(attempts=1, restart_timeout=0.0)


class RetryBudget:
    """The retries that a client has left; thread-safe."""

    def __init__(self, retries: RetryPolicy) -> None:
        self._cost = retries.answers_per_retry  # counted in answers, to stay with integers
        self._limit = self._left = retries.retry_budget * self._cost
        self._lock = threading.Lock()

    def withdraw(self) -> bool:
        """Take one retry; return False if none is left."""
        with self._lock:
            if self._left < self._cost:
                return False
            self._left -= self._cost
            return True

    def deposit(self) -> None:
        """Count an answer."""
        with self._lock:
            self._left = min(self._limit, self._left + 1)


# Seconds. An attempt costs an absent server nothing, and a call should be answered as soon as the server is back.
_MAX_ABSENT_BACKOFF = 0.3
_draw = random.SystemRandom().uniform  # not the module's generator: clients with the same seed would retry in step


class Attempts:
    """The attempts of one call.

    deadline: on the clock of time.monotonic(), None for no deadline; it may change between attempts. draw:
    returns a random number between two others.
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
        self.deadline = deadline
        self._draw = draw
        self._begun = 0
        self._absences = 0  # consecutive failures to reach a server
        self._absent_since = 0.0  # on the clock of time.monotonic()

    def begin(self) -> float | None:
        """Count an attempt and return its time limit in seconds, None for no limit."""
        self._begun += 1
        return None if self.deadline is None else max(0.0, self.deadline - time.monotonic())

    @property
    def exhausted(self) -> bool:
        """Whether no further attempt is allowed."""
        return self._begun >= self._retries.attempts

    def pause(self, error: PreluNetError, *, absent: bool = False) -> float | None:
        """Return the seconds to wait before the next attempt, None if there should be none.

        error: the transient error of the last attempt; absent: whether it failed because there is no server yet.
        There is no next attempt after the last one allowed, if it could not begin before the deadline, or if the
        client's retry budget is exhausted.
        """
        if absent and self._retries.restart_timeout:
            return self._pause_until_available(error)
        self._absences = 0
        if self.exhausted:
            return None
        pause = self._jittered(error, self._begun)
        if self.deadline is not None and time.monotonic() + pause >= self.deadline:
            return None
        return pause if self._budget.withdraw() else None

    def _pause_until_available(self, error: PreluNetError) -> float | None:
        """Return the seconds to wait for an absent server: at most half of the time left, so that the last attempts
        are made just before the end.
        """
        now = time.monotonic()
        self.discard_last()
        if self._absences == 0:
            self._absent_since = now
        self._absences += 1
        end = self._absent_since + self._retries.restart_timeout
        left = (end if self.deadline is None else min(end, self.deadline)) - now
        if left < self._retries.initial_backoff:
            return None
        return min(self._jittered(error, self._absences, _MAX_ABSENT_BACKOFF), left / 2)

    def _jittered(self, error: PreluNetError, failures: int, limit: float = float("inf")) -> float:
        """Return the backoff after `failures` failures, at most `limit` seconds, plus the server's `retry_after`."""
        doublings = min(failures - 1, 60)  # keeps the float finite; `max_backoff` applies long before
        backoff = min(self._retries.max_backoff, self._retries.initial_backoff * 2.0**doublings, limit)
        pause = self._draw(0.0, backoff)
        retry_after: float | None = getattr(error, "retry_after", None)
        return pause if retry_after is None else pause + retry_after

    def discard_last(self) -> None:
        """Do not count the last attempt: no server has seen it."""
        self._begun -= 1

    def answer_received(self) -> None:
        """Handle an answer: replenish the budget and, in a stream, start counting attempts again."""
        self._begun = 1
        self._absences = 0
        self._budget.deposit()


Timeout: TypeAlias = float | Literal["default"] | None
"""Seconds for a call, including retries and the wait for its turn; None for no limit. "default": of a call, the
client's; of a client, 60 s from the moment when the call is first sent, so that no burst is too large for it.
"""

_DEFAULT_TIMEOUT = 60.0
DEFAULT_RETRY_POLICY = RetryPolicy()
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_MAX_TIMEOUT = 1e9  # seconds; gRPC counts nanoseconds in 64 bits
_CANCELLED = grpc.StatusCode.CANCELLED  # from a server: it stopped before it began the call
_TRANSIENT = (grpc.StatusCode.UNAVAILABLE, _CANCELLED)

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Failure:
    """Why a call or an image has no answer.

    transient: whether a retry may succeed; absent: whether there is no server yet, or none that is ready.
    """

    error: PreluNetError
    transient: bool
    absent: bool = False


class ClientSettings:
    """The settings of a client for all its calls; shared by its threads.

    closed: no further call may begin; default_timeout: whether the client has no timeout of its own;
    channel_credentials: None without TLS.
    """

    def __init__(
        self, address: str, timeout: Timeout, retries: RetryPolicy, credentials: Credentials = Credentials()
    ) -> None:
        if not isinstance(retries, RetryPolicy):
            raise UsageError(f"retries is {retries!r}, but it must be a RetryPolicy, e.g. RetryPolicy(attempts=3)")
        self.address = checked_address(address)
        self.channel_credentials = credentials.of_channel()
        self._token = credentials.of_calls(self.address)
        self.retries = retries
        self.budget = RetryBudget(retries)
        self.closed = False
        self.absence_logged = False  # since the last answer
        self.default_timeout = timeout == "default"
        self._timeout = _DEFAULT_TIMEOUT if timeout == "default" else _checked(timeout)

    def metadata(self, request_id: str | None) -> tuple[tuple[str, str], ...]:
        """Return the metadata of an attempt."""
        named = () if request_id is None else (("x-request-id", request_id),)
        return named if self._token is None else (*named, *self._token.metadata())

    def deadline(self, timeout: Timeout) -> float | None:
        """Return the deadline of a call that begins now, on the clock of time.monotonic()."""
        seconds = self._timeout if timeout == "default" else _checked(timeout)
        return None if seconds is None else time.monotonic() + seconds

    def log_absence(self, error: PreluNetError) -> None:
        """Log that calls wait for a server, once until a call is answered."""
        if self.retries.restart_timeout and not self.absence_logged:
            self.absence_logged = True
            where = "" if self.address in str(error) else f"{self.address}: "
            log.warning("retrying for up to %g s: %s%s", self.retries.restart_timeout, where, error)


class Call:
    """One call of a client, with all its attempts.

    deadline: from `ClientSettings.deadline`; patient: whether it begins only with the first attempt that a server sees.
    """

    def __init__(
        self, settings: ClientSettings, deadline: float | None, request_id: str | None, *, patient: bool = False
    ) -> None:
        if settings.closed:
            raise UsageError("the client is closed; make the call inside its `with` block")
        if request_id is not None and not (isinstance(request_id, str) and _REQUEST_ID.fullmatch(request_id)):
            raise UsageError(
                f"request_id is {request_id!a}, but it must consist of 1 to 128 letters, digits, '.', '_', ':' and '-'"
            )
        self._settings = settings
        self._request_id = request_id
        self._attempts = Attempts(settings.retries, settings.budget, deadline)
        self._patient = patient
        self._sent = False

    @property
    def turn_deadline(self) -> float | None:
        """Return until when the next attempt may wait for its turn, on the clock of time.monotonic()."""
        return None if self._patient and not self._sent else self._attempts.deadline

    def begin(self) -> dict[str, Any]:
        """Begin an attempt: return gRPC's arguments besides the request."""
        if self._settings.closed:
            raise self._closed_meanwhile()
        if self._patient and not self._sent:
            self._attempts.deadline = self._settings.deadline("default")
        self._sent = True
        return {"timeout": self._attempts.begin(), "metadata": self._settings.metadata(self._request_id)}

    def answer_received(self) -> None:
        """Handle an answer."""
        self._attempts.answer_received()
        self._settings.absence_logged = False

    def forgive_refusal(self) -> bool:
        """Do not count the last attempt, which met a server full of this client's calls; False without retries."""
        if self._settings.retries.attempts == 1:
            return False
        self._attempts.discard_last()
        return True

    def pause_after(self, failed: grpc.RpcError, *, repeatable: bool = True) -> float:
        """Return the seconds to wait before the next attempt; raise the error if there should be none.

        repeatable: whether the call can be retried after a server has begun it.
        """
        failure = self.failure_of(failed)
        self._sent = not failure.absent
        if failure.transient and (repeatable or failure.absent):
            pause = self._attempts.pause(failure.error, absent=failure.absent)
            if pause is not None:
                if failure.absent:
                    self._settings.log_absence(failure.error)
                return pause
        try:
            raise failure.error from failed
        finally:
            del failure, failed  # they refer to the traceback and so to this frame: a cycle that keeps the image alive

    def failure_of(self, failed: grpc.RpcError) -> Failure:
        """Return why the call failed."""
        if failed.code() == _CANCELLED and self._settings.closed:
            return Failure(self._closed_meanwhile(), transient=False)
        return self._failure(error_from(failed, self._settings.address), failed.code(), absent=is_unreachable(failed))

    def failure_from_message(self, message: pb.CallError) -> Failure:
        """Return why an image of a stream has no answer."""
        retry_after = message.retry_after_seconds if message.HasField("retry_after_seconds") else None
        error = error_for_reason(message.reason, retry_after, message.message)
        if error is None:
            error = PreluNetError(f"{self._settings.address}: status {message.code}: {message.message}")
        return self._failure(error, next((code for code in _TRANSIENT if code.value[0] == message.code), None))

    def _failure(self, error: PreluNetError, code: grpc.StatusCode | None = None, *, absent: bool = False) -> Failure:
        transient = code in _TRANSIENT or isinstance(error, Overloaded)
        return Failure(self.with_request_id(error), transient, absent or isinstance(error, NotReady))

    def _closed_meanwhile(self) -> PreluNetError:
        return self.with_request_id(
            Interrupted(f"{self._settings.address}: the client was closed before the answer arrived")
        )

    def with_request_id(self, error: PreluNetError) -> PreluNetError:
        """Return an error of this call with its request id, if it has one, at the end of its text."""
        if self._request_id is not None:
            error.args = (f"{error} (request id {self._request_id})", *error.args[1:])
        return error

    def invalid_response(self, what: str) -> PreluNetError:
        """Return the error for a server that violates the protocol."""
        text = f"{self._settings.address}: {what}. Do client and server have the same version?"
        return self.with_request_id(PreluNetError(text))


def _checked(timeout: Timeout) -> float | None:
    """Return the timeout as a float; UsageError if it is invalid."""
    if timeout is None:
        return None
    if not isinstance(timeout, int | float) or not 0 < timeout <= _MAX_TIMEOUT:
        raise UsageError(f"timeout is {timeout!r}, but it must be a number of seconds above 0, or None for no limit")
    return float(timeout)
