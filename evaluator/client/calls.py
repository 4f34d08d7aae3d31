"""What both clients do about a call that is not I/O: its deadline, its attempts, its errors."""

import logging
import re
import time
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import grpc

from prelunet.evaluator.client.addresses import checked_address
from prelunet.evaluator.client.retries import Attempts, Budget, Retries
from prelunet.evaluator.errors import Interrupted, NotReady, Overloaded, PreluNetError, UsageError
from prelunet.evaluator.pb.prelunet.v1 import prelunet_pb2 as pb
from prelunet.evaluator.serving.status import error_from, error_named, is_absent

Timeout: TypeAlias = float | Literal["client"] | None
"""Seconds for a call, retries included; None to wait for ever; "client": as its client was told."""

RETRIES = Retries()
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_LONGEST = 1e9  # seconds; gRPC counts nanoseconds in 64 bits
_CANCELLED = grpc.StatusCode.CANCELLED  # from a server: it stopped before it had begun the call
_PASSING = (grpc.StatusCode.UNAVAILABLE, _CANCELLED)

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Failure:
    """Why a call or an image has no answer.

    passing: whether the same may succeed later; absent: because there is no server yet, or none that is ready.
    """

    error: PreluNetError
    passing: bool
    absent: bool = False


class Terms:
    """What a client was told about all its calls; shared by its threads. closed: no further call may begin."""

    def __init__(self, address: str, timeout: float | None, retries: Retries) -> None:
        self.address = checked_address(address)
        self.retries = retries
        self.budget = Budget(retries)
        self.closed = False
        self._timeout = _checked(timeout)
        self._told = False

    def deadline(self, timeout: Timeout) -> float | None:
        """Return when a call that begins now should be over, on the clock of time.monotonic()."""
        seconds = self._timeout if timeout == "client" else _checked(timeout)
        return None if seconds is None else time.monotonic() + seconds

    def attempts(self, deadline: float | None) -> Attempts:
        """Return the attempts of something that is asked now."""
        return Attempts(self.retries, self.budget, deadline)

    def note_absence(self, error: PreluNetError) -> None:
        """Tell once, until a call has its answer, that calls wait: else nobody would know why nothing happens."""
        if self.retries.restart and not self._told:
            self._told = True
            where = "" if self.address in str(error) else f"{self.address}: "
            log.warning("trying again for up to %g s: %s%s", self.retries.restart, where, error)

    def note_answer(self) -> None:
        """Take note that there is a server."""
        self._told = False


class Call:
    """One call of a client, through all its attempts. deadline: as of `Terms.deadline`."""

    def __init__(self, terms: Terms, deadline: float | None, request_id: str | None) -> None:
        if request_id is not None and not _REQUEST_ID.fullmatch(request_id):
            raise UsageError(
                f"request_id is {request_id!a}, but it should have 1 to 128 letters, digits, '.', '_', ':' and '-'"
            )
        self._terms = terms
        self._request_id = request_id
        self._attempts = terms.attempts(deadline)

    def begin(self) -> dict[str, Any]:
        """Begin an attempt: return the arguments that gRPC needs beside the request."""
        if self._terms.closed:
            raise UsageError("the client is closed; make the call inside of its `with` block")
        metadata = () if self._request_id is None else (("x-request-id", self._request_id),)
        return {"timeout": self._attempts.begin(), "metadata": metadata}

    def answered(self) -> None:
        """Take note of an answer."""
        self._attempts.answered()
        self._terms.note_answer()

    def pause_after(self, failed: grpc.RpcError, *, repeatable: bool = True) -> float:
        """Return the seconds to wait before the next attempt; raise the error where there should be none.

        repeatable: whether the call can be made again once a server has begun it.
        """
        failure = self.failure_of(failed)
        if failure.passing and (repeatable or failure.absent):
            pause = self._attempts.pause(failure.error, absent=failure.absent)
            if pause is not None:
                if failure.absent:
                    self._terms.note_absence(failure.error)
                return pause
        try:
            raise failure.error from failed
        finally:
            del failure, failed  # the traceback holds this frame: they would keep it, and the request's image, alive

    def failure_of(self, failed: grpc.RpcError) -> Failure:
        """Return why the call failed."""
        if failed.code() == _CANCELLED and self._terms.closed:
            return self._failure(Interrupted(f"{self._terms.address}: the client was closed before the answer came"))
        return self._failure(error_from(failed, self._terms.address), failed.code(), absent=is_absent(failed))

    def failure_told(self, told: pb.CallError) -> Failure:
        """Return why an image of a stream has no answer."""
        retry_after = told.retry_after_seconds if told.HasField("retry_after_seconds") else None
        error = error_named(told.reason, retry_after, told.message)
        if error is None:
            error = PreluNetError(f"{self._terms.address}: status {told.code}: {told.message}")
        return self._failure(error, next((code for code in _PASSING if code.value[0] == told.code), None))

    def _failure(self, error: PreluNetError, code: grpc.StatusCode | None = None, *, absent: bool = False) -> Failure:
        if self._request_id is not None:
            error.args = (f"{error} (request id {self._request_id})", *error.args[1:])
        passing = code in _PASSING or isinstance(error, Overloaded)
        return Failure(error, passing, absent or isinstance(error, NotReady))

    def broken(self, what: str) -> PreluNetError:
        """Return the error for a server that does not keep to the protocol."""
        error = PreluNetError(f"{self._terms.address}: {what}. Are client and server of the same version?")
        return self._failure(error).error


def _checked(timeout: float | Literal["client"] | None) -> float | None:
    """Return a timeout that is one."""
    if timeout is None:
        return None
    if isinstance(timeout, str) or not 0 < timeout <= _LONGEST:
        raise UsageError(f"timeout is {timeout!r}, but it should be seconds above 0, or None to wait for ever")
    return float(timeout)
