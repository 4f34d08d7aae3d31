"""What both clients do about a call that is not I/O: its deadline, its attempts, its errors."""

import re
import time
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import grpc

from evaluator.client.retries import Attempts, Budget, Retries
from evaluator.errors import Overloaded, PreluNetError, UsageError
from evaluator.pb.prelunet.v1 import prelunet_pb2 as pb
from evaluator.serving.status import error_from, error_named

Timeout: TypeAlias = float | Literal["client"] | None
"""Seconds for a call, retries included; None to wait for ever; "client": as its client was told."""

RETRIES = Retries()
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_LONGEST = 1e9  # seconds; gRPC counts nanoseconds in 64 bits


@dataclass(frozen=True)
class Failure:
    """Why a call or an image has no answer; passing: whether the same may succeed later."""

    error: PreluNetError
    passing: bool


class Terms:
    """What a client was told about all its calls; shared by its threads. closed: no further call may begin."""

    def __init__(self, address: str, timeout: float | None, retries: Retries) -> None:
        self.address = address
        self.retries = retries
        self.budget = Budget(retries)
        self.closed = False
        self._timeout = _checked(timeout)

    def deadline(self, timeout: Timeout) -> float | None:
        """Return when a call that begins now should be over, on the clock of time.monotonic()."""
        seconds = self._timeout if timeout == "client" else _checked(timeout)
        return None if seconds is None else time.monotonic() + seconds

    def attempts(self, deadline: float | None) -> Attempts:
        """Return the attempts of something that is asked now."""
        return Attempts(self.retries, self.budget, deadline)


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

    def pause_after(self, failed: grpc.RpcError, *, repeatable: bool = True) -> float:
        """Return the seconds to wait before the next attempt; raise the error where there should be none.

        repeatable: whether the call can be made again at all.
        """
        failure = self.failure_of(failed)
        if repeatable and failure.passing and (pause := self._attempts.pause(failure.error)) is not None:
            return pause
        try:
            raise failure.error from failed
        finally:
            del failure, failed  # the traceback holds this frame: they would keep it, and the request's image, alive

    def failure_of(self, failed: grpc.RpcError) -> Failure:
        """Return why the call failed."""
        error = error_from(failed, self._terms.address)
        unavailable = failed.code() == grpc.StatusCode.UNAVAILABLE
        return self._failure(error, unavailable=unavailable)

    def failure_told(self, told: pb.CallError) -> Failure:
        """Return why an image of a stream has no answer."""
        retry_after = told.retry_after_seconds if told.HasField("retry_after_seconds") else None
        error = error_named(told.reason, retry_after, told.message)
        if error is None:
            error = PreluNetError(f"{self._terms.address}: status {told.code}: {told.message}")
        return self._failure(error, unavailable=told.code == grpc.StatusCode.UNAVAILABLE.value[0])

    def _failure(self, error: PreluNetError, *, unavailable: bool) -> Failure:
        if self._request_id is not None:
            error.args = (f"{error} (request id {self._request_id})", *error.args[1:])
        return Failure(error, unavailable or isinstance(error, Overloaded))

    def broken(self, what: str) -> PreluNetError:
        """Return the error for a server that does not keep to the protocol."""
        error = PreluNetError(f"{self._terms.address}: {what}. Are client and server of the same version?")
        return self._failure(error, unavailable=False).error


def _checked(timeout: float | Literal["client"] | None) -> float | None:
    """Return a timeout that is one."""
    if timeout is None:
        return None
    if isinstance(timeout, str) or not 0 < timeout <= _LONGEST:
        raise UsageError(f"timeout is {timeout!r}, but it should be seconds above 0, or None to wait for ever")
    return float(timeout)
