"""The current call: what its log line reports, its request id, and its caller."""

import math
import random
import re
import time
from collections.abc import Sequence
from contextvars import ContextVar
from typing import Any, TypeAlias

import grpc.aio
from msgspec import Struct, field

REQUEST_ID = "x-request-id"  # metadata key, of requests and responses
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")  # no characters with a meaning in logs or terminals

Metadata: TypeAlias = Sequence[tuple[str, str | bytes]]  # keys in lower case, of gRPC or of HTTP headers

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"


def identity_of(client: str) -> str:
    """Return the identity behind a connection, which shares what is fair with its other connections: its address.

    client: gRPC's name of the connection, such as ipv4:10.0.0.7:41022.
    """
    return client.rpartition(":")[0] or client


class Call(Struct, eq=False):
    """One RPC: who calls, until when, and what its log line will report. Filled in while it runs.

    method: as in "prelunet.v1.PreluNetService/Classify"; begun: time.monotonic() at its start; peer: gRPC's name of the
    connection; metadata: of gRPC, or the HTTP headers; deadline: of time.monotonic(); admitted: counted among the calls
    of its identity; identity: of the caller, the name of its token or by default its address; share: of the queue, at
    most for its identity; status: name of its gRPC status, empty until it ends; reason, error: of the error as sent to
    the caller; id: of its message in the Open Inference Protocol; models: names of the requested models; images,
    failed: number of images of a stream, and of those that got an error; views: of all its images; bytes,
    message_bytes: of all its messages, and of the latest; in_progress: messages of a stream that have no answer yet;
    trace: a `CallTrace`, whose module requires an extra, None unless it is sampled.

    Fair queueing alternates between identities, then between the connections of each.
    """

    method: str = ""
    request_id: str = ""
    begun: float = field(default_factory=time.monotonic)
    peer: str = ""
    metadata: Metadata = ()
    deadline: float = math.inf
    admitted: bool = False
    identity: str = ""
    share: float | None = None
    status: str = ""
    reason: str = ""
    error: str = ""
    id: str = ""
    models: set[str] = set()
    images: int = 0
    failed: int = 0
    views: int = 0
    bytes: int = 0
    message_bytes: int = 0
    in_progress: int = 0
    trace: Any = None

    def __post_init__(self) -> None:
        self.identity = self.identity or identity_of(self.peer)

    def message_done(self) -> None:
        """Note that a message of a stream is answered."""
        self.in_progress -= 1

    def record_views(self, model: str, views: int) -> None:
        """Note a requested model and its number of views."""
        self.models.add(model)
        self.views += views

    def record_answer(self, *, failed: bool) -> None:
        """Count an image of a stream that got its answer, or its error."""
        self.images += 1
        self.failed += failed


# The call of this task, of the tasks that it starts and of their threads; None outside of calls.
current_call: ContextVar[Call | None] = ContextVar("call", default=None)


def this_call() -> Call:
    """Return the call of this task; a new one outside of calls."""
    return current_call.get() or Call()


def request_id_from(metadata: Metadata) -> str:
    """Return the request id in the caller's metadata, or a new one if there is none or it is invalid."""
    for key, value in metadata:
        if key == REQUEST_ID and isinstance(value, str) and _REQUEST_ID.fullmatch(value):
            return value
    # Not from the kernel, as `secrets`: under load the call would wait for the GIL for half a millisecond.
    return f"{random.getrandbits(64):016x}"
