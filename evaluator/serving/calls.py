"""What both doors, gRPC and HTTP, do with every call: limit those in flight, check tokens, record the end."""

import asyncio
import time
from collections import Counter, defaultdict
from typing import TYPE_CHECKING

import grpc

from ..errors import Overloaded, PreluNetError
from ..rpc.status import reason_for, status_of
from .access import REQUIRED, AccessControl
from .observability.call_context import Call
from .observability.logs import CallLog, log_incident
from .observability.metrics import Metrics
from .options import ServerLimits
from .scheduling.admission import with_reserve

if TYPE_CHECKING:  # the extra `otel` may be missing
    from .observability.tracing import Tracing

OUR_METHODS = ("/prelunet.v1.", "/inference.")  # prefixes of the methods that we implement
# Liveness and readiness probes. They are exempt from the limit: a prober without an answer might kill a busy server.
PROBES = tuple(f"/inference.GRPCInferenceService/{name}" for name in ("ServerLive", "ServerReady", "ModelReady"))
_MAX_RECENT = 10_000  # connections that are remembered
_RETRY_AFTER = 1.0  # seconds, for a call above the limit; how long the calls in flight will take is unknown


class CallsInFlight:
    """The calls in flight of all clients: counts and limits them, and records their ends in metrics, log and traces.

    limit: maximum number of calls in flight; metrics: of the server; tracing: None without traces.
    """

    def __init__(
        self,
        limit: int = ServerLimits.max_calls,
        metrics: Metrics | None = None,
        log: CallLog | None = None,
        tracing: "Tracing | None" = None,
    ) -> None:
        self.count = 0
        self.metrics = metrics or Metrics()
        self._by_identity: defaultdict[str, Counter[str]] = defaultdict(Counter)  # calls of each of its connections
        self._limit = limit
        self._log = log or CallLog()
        self._tracing = tracing
        self.recent: dict[str, None] = {}  # connections by the end of their latest call, the latest last
        self.metrics.calls_now.set_function(lambda: self.count)

    def begin(self, call: Call, *, exempt: bool = False) -> Overloaded | None:
        """Count a call as in flight, until gRPC ends it after sending its answer; above the limit, return its error.

        exempt: always admit the call, and do not count it. `begin` must be called in the task in which gRPC runs the
        call, before its first message is read.

        Who calls is not known here yet, so there is room for a quarter more; `admit` decides on it.
        """
        if self._tracing is not None and f"/{call.method}" not in PROBES:
            call.trace = self._tracing.begin(call)
        counted = not exempt and self.count < with_reserve(self._limit)
        task = asyncio.current_task()
        assert task is not None, "gRPC runs each call in a task"
        task.add_done_callback(lambda _: self._end(call, counted=counted))
        if counted:
            self.count += 1
        elif not exempt:
            return self._overloaded()
        return None

    def admit(self, call: Call) -> None:
        """Raise Overloaded above the limit, unless the caller has less than its share of the calls.

        Identities below their share may use all the reserve, connections below their part of it only half: otherwise
        an address with many connections would leave nothing to the others.
        """
        if self.count > self._limit:
            own = self._by_identity.get(call.identity, Counter())
            share = self._limit // (len(self._by_identity) + (not own))
            part = share // (len(own) + (call.peer not in own))
            half = (self._limit + with_reserve(self._limit)) // 2
            if own.total() >= share and (own[call.peer] >= part or self.count > half):
                raise self._overloaded()
        self._by_identity[call.identity][call.peer] += 1
        call.admitted = True

    def peers(self) -> set[str]:
        """Return gRPC's names of the connections with calls in flight."""
        return set().union(*self._by_identity.values())

    def _overloaded(self) -> Overloaded:
        self.metrics.refusals.labels("", "calls").inc()
        return Overloaded(f"the server already has {self._limit} calls in flight. Try again later", _RETRY_AFTER)

    def _end(self, call: Call, *, counted: bool) -> None:
        call.status = call.status or "CANCELLED"  # the client left, or its message was too large for gRPC
        if call.status == "CANCELLED" and not call.bytes:
            self.metrics.refusals.labels("", "message").inc()
        seconds = time.monotonic() - call.begun
        method = call.method if f"/{call.method}" in REQUIRED else "unknown"
        self.metrics.call_ended(method, call.status, seconds)
        self._log.ended(call, seconds)
        if call.trace is not None:
            call.trace.end(call, method)
        self.recent.pop(call.peer, None)
        self.recent[call.peer] = None
        if len(self.recent) > _MAX_RECENT:
            del self.recent[next(iter(self.recent))]
        if call.admitted:
            own = self._by_identity[call.identity]
            own[call.peer] -= 1
            if not own[call.peer]:
                del own[call.peer]
            if not own:
                del self._by_identity[call.identity]
        if counted:
            self.count -= 1  # last: a server that stops waits for this; earlier, the log line would be lost


def access_error(access: AccessControl | None, call: Call, *, known: bool = True) -> PreluNetError | None:
    """Return the error of a call that its token, or the lack of one, does not allow; note whose token it is.

    access: None without tokens; known: whether its method exists.
    """
    if access is None:
        return None
    try:
        authorizations = [value for key, value in call.metadata if key == "authorization"]
        found = access.check(f"/{call.method}", authorizations, known=known)
    except PreluNetError as error:
        return error
    if found is not None:
        name, token = found
        call.identify, call.share = lambda _: f"token:{name}", token.share
    return None


def record_error(call: Call, error: Exception) -> grpc.Status:
    """Note the error that ends a call, and return its status. An internal error is logged as an incident."""
    status = status_of(error, log_incident(error))
    call.status, call.reason, call.error = status.code.name, reason_for(error), status.details
    return status
