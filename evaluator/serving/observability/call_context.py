"""The current call: what its log line reports, its request id, and its caller."""

import random
import re
import time
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Protocol, TypeAlias

import grpc.aio

REQUEST_ID = "x-request-id"  # metadata key, of requests and responses
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")  # no characters with a meaning in logs or terminals

Metadata: TypeAlias = Sequence[tuple[str, str | bytes]]  # keys in lower case, of gRPC or of HTTP headers

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"


class CallTrace(Protocol):
    """The spans of one sampled call. `tracing`, which requires an extra, creates them.

    exemplar: labels that lead from a metric to this trace.
    """

    exemplar: dict[str, str]

    def add_image(self, stages: Sequence[tuple[str, float, float]], failure: str) -> None:
        """Add an image that has ended. stages: name, begin and end of each; failure: of the last stage, or empty."""

    def end(self, call: "Call", method: str) -> None:
        """End the span of the call, and create those of its images. method: "unknown" unless it is one of ours."""


def identity_of(client: str) -> str:
    """Return the identity behind a connection, which shares what is fair with its other connections: its address.

    client: gRPC's name of the connection, such as ipv4:10.0.0.7:41022.
    """
    return client.rpartition(":")[0] or client


@dataclass
class Call:
    """One RPC, filled in while it runs.

    method: as in "prelunet.v1.PreluNetService/Classify"; begun: time.monotonic() at its start; peer: gRPC's name of the
    connection; admitted: counted among the calls of its identity; identify: returns the identity behind a peer; share:
    of the queue, at most for its identity; status: name of its gRPC status, empty until it ends; reason, error: of the
    error as sent to the caller; id: of its message in the Open Inference Protocol; models: names of the requested
    models; images, failed: number of images of a stream, and of those that got an error; views: of all its images;
    bytes, message_bytes: of all its messages, and of the latest; message_done: to be called after each answered message
    of a stream, None for a call with one message; trace: None unless it is sampled.
    """

    method: str
    request_id: str
    begun: float = field(default_factory=time.monotonic)
    peer: str = ""
    admitted: bool = False
    identify: Callable[[str], str] = identity_of
    share: float | None = None
    status: str = ""
    reason: str = ""
    error: str = ""
    id: str = ""
    models: set[str] = field(default_factory=set)
    images: int = 0
    failed: int = 0
    views: int = 0
    bytes: int = 0
    message_bytes: int = 0
    message_done: Callable[[], None] | None = None
    trace: CallTrace | None = None

    @cached_property
    def identity(self) -> str:
        """Return the identity of the caller; not before the call has its peer."""
        return self.identify(self.peer)


# The call of this task, of the tasks that it starts and of their threads; None outside of calls.
current_call: ContextVar[Call | None] = ContextVar("call", default=None)


def record_views(model: str, views: int) -> None:
    """Add a model and its number of views to the log line of the current call, if there is one."""
    if (call := current_call.get()) is not None:
        call.models.add(model)
        call.views += views


def record_answer(*, failed: bool) -> None:
    """Count an image of a stream that got its answer, or its error."""
    if (call := current_call.get()) is not None:
        call.images += 1
        call.failed += failed


def note_done() -> None:
    """Report that a message of a stream is done: its answer has been sent, or it needs none."""
    call = current_call.get()
    if call is not None and call.message_done is not None:
        call.message_done()


def request_id_from(metadata: Metadata) -> str:
    """Return the request id in the caller's metadata, or a new one if there is none or it is invalid."""
    requested = next((value for key, value in metadata if key == REQUEST_ID), "")
    if isinstance(requested, str) and _REQUEST_ID.fullmatch(requested):
        return requested
    # Not from the kernel, as `secrets`: under load the call would wait for the GIL for half a millisecond.
    return f"{random.getrandbits(64):016x}"


@dataclass(frozen=True)
class Caller:
    """The caller of a request.

    client: fair queueing alternates between identities, then between the clients (today: connections) of each;
    deadline: of time.monotonic(), None for no deadline; request_id: for log lines; identity: the name of its token, by
    default the address; share: of the queue, at most for this identity, None for no such limit; trace: of the call.
    """

    client: str = ""
    deadline: float | None = None
    request_id: str = ""
    identity: str = ""
    share: float | None = None
    trace: CallTrace | None = None

    def __post_init__(self) -> None:
        if not self.identity:
            object.__setattr__(self, "identity", identity_of(self.client))

    def remaining(self) -> float | None:
        """Return the seconds until the deadline, negative after it; None without a deadline."""
        return None if self.deadline is None else self.deadline - time.monotonic()

    def with_timeout(self, seconds: float) -> "Caller":
        """Return the same caller with a deadline at most `seconds` from now."""
        deadline = time.monotonic() + seconds
        return replace(self, deadline=deadline if self.deadline is None else min(self.deadline, deadline))


def caller_of(context: Context) -> Caller:
    """Return the caller of the current call, with its deadline and request id."""
    remaining = context.time_remaining()
    deadline = None if remaining is None else time.monotonic() + remaining
    call = current_call.get() or Call("", "", peer=context.peer())
    return Caller(context.peer(), deadline, call.request_id, call.identity, call.share, call.trace)
