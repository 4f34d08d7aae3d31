"""The call that runs: what is noted of it for its log line, and the id under which callers and log lines know it."""

import re
import secrets
import time
from collections.abc import Callable, Iterable
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import grpc.aio

from prelunet.evaluator.errors import DeadlinePassed
from prelunet.evaluator.serving.observability import call_context

REQUEST_ID = "x-request-id"  # metadata key, there and back
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")  # nothing that could mean something to a log or a terminal


@dataclass
class Call:
    """One call of a method, filled while it runs.

    method: as "prelunet.v1.PreluNetService/Classify"; begun: on the clock of time.monotonic(); peer: gRPC's name of the
    connection; status: name of its gRPC status, empty until it has one; reason, error: what the caller was told of an
    error; id: that its message bears, of the Open Inference Protocol; models: that were asked; images, failed: of a
    stream, how many were asked and how many of them got an error; views: of its images; bytes: of its messages;
    message_done: to be called when a message of a stream has been answered, None of a call of one message.
    """

    method: str
    request_id: str
    begun: float = field(default_factory=time.monotonic)
    peer: str = ""
    status: str = ""
    reason: str = ""
    error: str = ""
    id: str = ""
    models: set[str] = field(default_factory=set)
    images: int = 0
    failed: int = 0
    views: int = 0
    bytes: int = 0
    message_done: Callable[[], None] | None = None


_current: ContextVar[Call | None] = ContextVar("call", default=None)


def set_current(call: Call) -> None:
    """Make `call` the one that runs in this task, in the tasks that it starts and in their threads."""
    _current.set(call)


def current() -> Call | None:
    """Return the call that runs, None outside of any."""
    return _current.get()


def record_views(model: str, views: int) -> None:
    """Note for the log line of the call that runs, if one does, that so many views of a model are asked."""
    call = current()
    if call is not None:
        call.models.add(model)
        call.views += views


def record_answer(*, failed: bool) -> None:
    """Note that an image of a stream has its answer, or its error."""
    call = current()
    if call is not None:
        call.images += 1
        call.failed += failed


def note_done() -> None:
    """Note that a message of a stream is no longer in progress: its answer has been sent, or it needs none."""
    call = current()
    if call is not None and call.message_done is not None:
        call.message_done()


def record_message_id(id_: str) -> None:
    """Note the id that a message bears."""
    call = current()
    if call is not None:
        call.id = id_


def request_id_from(metadata: Iterable[tuple[str, str | bytes]]) -> str:
    """Return the id that a caller gave in the metadata, or a new one where that is none that we take."""
    given = next((value for key, value in metadata if key == REQUEST_ID), "")
    if isinstance(given, str) and _REQUEST_ID.fullmatch(given):
        return given
    return secrets.token_hex(8)


# Who waits for an answer, and until when.


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

    def with_timeout(self, seconds: float) -> "Caller":
        """Return the same caller with no more than so many seconds left."""
        deadline = time.monotonic() + seconds
        return replace(self, deadline=deadline if self.deadline is None else min(self.deadline, deadline))

    def require_time_left(self) -> None:
        """Raise DeadlinePassed once the time is over."""
        remaining = self.remaining()
        if remaining is not None and remaining <= 0:
            raise DeadlinePassed("the time that this call was given is over, so it was not computed. Give it more time")


Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"


def caller_of(context: Context) -> Caller:
    """Return who calls, until when, and under which request id."""
    remaining = context.time_remaining()
    call = call_context.current()
    return Caller(
        client=context.peer(),
        deadline=None if remaining is None else time.monotonic() + remaining,
        request_id=call.request_id if call else "",
    )
