"""What both doors, gRPC and HTTP, do with every call: check its token, limit those in flight, record the end."""

import asyncio
import time
from collections import Counter, defaultdict
from typing import TYPE_CHECKING

import grpc

from ..errors import Overloaded, PreluNetError
from ..rpc.status import reason_for, status_of
from .access import REQUIRED, AccessControl
from .arriving import ArrivingBytes
from .observability.call_context import Call, Metadata, current_call, request_id_from
from .observability.logs import CallLog, log_incident
from .observability.metrics import Metrics
from .options import ServerLimits
from .scheduling.admission import with_reserve

if TYPE_CHECKING:  # the extra `otel` may be missing
    from .observability.tracing import Tracing

OUR_METHODS = ("/prelunet.", "/inference.")  # prefixes of the methods that we implement
# Liveness and readiness probes. They are exempt from the limit: a prober without an answer might kill a busy server.
PROBES = tuple(f"/inference.GRPCInferenceService/{name}" for name in ("ServerLive", "ServerReady", "ModelReady"))
_MAX_RECENT = 10_000  # connections that are remembered
_RETRY_AFTER = 1.0  # seconds, for a call above the limit; how long the calls in flight will take is unknown


class CallsInFlight:
    """The calls in flight of all clients: counts and limits them, and records their ends in metrics, log and traces.

    limits: on clients; metrics: of the server; tracing: None without traces; access: None without tokens; arriving: the
    messages of all calls.
    """

    def __init__(
        self,
        limits: ServerLimits = ServerLimits(),
        metrics: Metrics | None = None,
        log: CallLog | None = None,
        tracing: "Tracing | None" = None,
        access: AccessControl | None = None,
    ) -> None:
        self.count = 0
        self.limits, self.metrics = limits, metrics or Metrics()
        self.arriving = ArrivingBytes(limits, self.metrics)
        self._by_identity: defaultdict[str, Counter[str]] = defaultdict(Counter)  # calls of each of its connections
        self._log, self._tracing, self._access = log or CallLog(), tracing, access
        self.recent: dict[str, None] = {}  # connections by the end of their latest call, the latest last
        self.metrics.calls_now.set_function(lambda: self.count)

    def arrived(self, method: str, peer: str, metadata: Metadata) -> Call:
        """Return a call that begins here, which log lines of this task, of its tasks and threads name."""
        call = Call(method, request_id_from(metadata), peer=peer, metadata=metadata)
        if self.limits.proxies.networks:
            call.identity = self.limits.proxies.identity(metadata, peer)
        current_call.set(call)
        return call

    def begin(self, call: Call, *, known: bool = True) -> None:
        """Count a call as in flight until its task ends, which is after its answer is sent; called in that task.

        Raises the error with which it is refused: for its token or the lack of one, or because there are too many.
        Probes are not limited, and health and reflection are only recorded if they are refused.
        known: whether its method exists.
        """
        path = f"/{call.method}"
        ours = not known or path.startswith(OUR_METHODS)
        try:
            if self._access is not None:
                self._check_token(self._access, call, known=known)
            if ours and path not in PROBES:
                self._admit(call)
        except PreluNetError:
            self.record(call)
            raise
        if ours:
            self.record(call)

    def record(self, call: Call) -> None:
        """Record the end of a call in metrics, log and traces, once the task ends that calls this."""
        if self._tracing is not None and f"/{call.method}" not in PROBES:
            call.trace = self._tracing.begin(call)
        task = asyncio.current_task()
        assert task is not None, "gRPC and HTTP run each call in a task"
        task.add_done_callback(lambda _: self._end(call))

    def _check_token(self, access: AccessControl, call: Call, *, known: bool) -> None:
        authorizations = [value for key, value in call.metadata if key == "authorization"]
        if (found := access.check(f"/{call.method}", authorizations, known=known)) is not None:
            name, token = found
            call.identity, call.share = f"token:{name}", token.share

    def _admit(self, call: Call) -> None:
        """Count a call. Above the limit, raise Overloaded unless the caller has less than its share of the calls.

        Identities below their share may use all the reserve, connections below their part of it only half: otherwise
        an address with many connections would leave nothing to the others.
        """
        limit = self.limits.max_calls
        if self.count >= limit:
            own = self._by_identity.get(call.identity, Counter())
            share = limit // (len(self._by_identity) + (not own))
            part = share // (len(own) + (call.peer not in own))
            allowed = with_reserve(limit)
            if own.total() >= share:
                allowed = (limit + allowed) // 2 if own[call.peer] < part else limit
            if self.count >= allowed:
                self.metrics.refused["calls"].inc()
                raise Overloaded(f"the server already has {limit} calls in flight. Try again later", _RETRY_AFTER)
        self.count += 1
        self._by_identity[call.identity][call.peer] += 1
        call.admitted = True

    def peers(self) -> set[str]:
        """Return gRPC's names of the connections with calls in flight."""
        return set().union(*self._by_identity.values())

    def _end(self, call: Call) -> None:
        call.status = call.status or "CANCELLED"  # the client left, or its message was too large for gRPC
        if call.status == "CANCELLED" and not call.bytes:
            self.metrics.refused["message"].inc()
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
            self.count -= 1  # last: a server that stops waits for this; earlier, the log line would be lost


def record_error(call: Call, error: Exception) -> grpc.Status:
    """Note the error that ends a call, and return its status. An internal error is logged as an incident."""
    status = status_of(error, log_incident(error))
    call.status, call.reason, call.error = status.code.name, reason_for(error), status.details
    return status
