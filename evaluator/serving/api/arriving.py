"""A limit on the bytes of messages that are still arriving.

gRPC keeps an unfinished message in memory and reports neither its size nor its progress. But the kernel counts the
bytes that each connection receives. What came since the oldest of its waiting calls began to wait, less complete
messages, is still arriving; at most, because headers and the beginnings of cancelled messages count too.
"""

import asyncio
import logging
import socket
import sys
import time
from collections import Counter
from collections.abc import Awaitable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote

from ...errors import Overloaded
from ..network import DESCRIPTORS, UNREAD_BYTES, tcp_connections
from ..observability.call_context import Call
from ..observability.metrics import Metrics
from ..options import ServerLimits

_INTERVAL = 0.1  # seconds between checks while calls wait; a fifth of it when half of the limit is used
_MIN_WAIT = 0.05  # seconds; calls that wait for less are not checked
_MAX_AGE = 10.0  # seconds; older counts are renewed, or the headers of many short calls would seem to be arriving
_REST = 20  # after a check that took a time t, the next comes no earlier than 20 t
_PREFIX = 5  # bytes before each message
_RETRY_AFTER = 1.0  # seconds

log = logging.getLogger(__name__)


@dataclass(eq=False)
class _Wait:
    """The wait of a task for a message. floor: `surplus` of the connection when it began."""

    identity: str
    task: "asyncio.Task[Any]"
    floor: int
    began: float
    error: Overloaded | None = None


@dataclass(eq=False)
class _Connection:
    """A connection. completed: bytes of complete messages; surplus: all other received bytes; waits: oldest first."""

    completed: int = 0
    surplus: int = 0
    waits: list[_Wait] = field(default_factory=list)

    def arriving(self, max_message: int) -> int:
        """Return the bytes that are arriving, beyond those that each call may send before it is read."""
        if not self.waits:
            return 0
        count = len(self.waits)
        return max(0, min(self.surplus - self.waits[0].floor - count * UNREAD_BYTES, count * max_message))


class ArrivingBytes:
    """Refuses calls whose messages are unfinished while too much is arriving. Only for the event loop's thread."""

    def __init__(self, limits: ServerLimits = ServerLimits(), metrics: Metrics | None = None) -> None:
        self._limit, self._max_message = limits.max_arriving_bytes, limits.max_message_bytes
        self._refusals = (metrics or Metrics()).refusals.labels("", "arriving")
        self._connections: dict[str, _Connection] = {}  # by gRPC's name
        self._timer: asyncio.TimerHandle | None = None
        self._counted = 0.0
        self._supported = DESCRIPTORS.is_dir() and hasattr(socket, "TCP_INFO")
        if not self._supported:
            log.warning("--arriving-bytes has no effect: this system does not report how many bytes have arrived")

    async def receive(self, call: Call, message: Awaitable[Any]) -> Any:
        """Await the next message of a call. Raises Overloaded if the call is refused meanwhile."""
        task, loop = asyncio.current_task(), asyncio.get_running_loop()
        assert task is not None, "gRPC runs each call in a task"
        connection = self._connections.get(call.peer)
        if connection is None:
            connection = self._connections[call.peer] = _Connection()
        wait = _Wait(call.identity, task, connection.surplus, loop.time())
        connection.waits.append(wait)
        if self._timer is None and self._supported:
            self._timer = loop.call_later(_INTERVAL, self._check)
        try:
            data = await message
            connection.completed += _PREFIX + len(data) if isinstance(data, bytes) else 0
            return data
        except asyncio.CancelledError:
            if wait.error is None:
                raise
            task.uncancel()
            raise wait.error from None
        finally:
            if wait.error is None:
                connection.waits.remove(wait)

    def _check(self) -> None:
        """Refuse calls until the rest is within the limit."""
        self._timer = None
        started, loop = time.monotonic(), asyncio.get_running_loop()
        waiting = [connection for connection in self._connections.values() if connection.waits]
        oldest = min((connection.waits[0].began for connection in waiting), default=loop.time())
        if loop.time() - oldest > _MIN_WAIT or loop.time() - self._counted > _MAX_AGE:
            self._counted = loop.time()
            self._count()
            while (excess := self._arriving(waiting) - self._limit) > 0:
                self._refuse(waiting, excess)
        interval = _INTERVAL if self._arriving(waiting) < self._limit / 2 else _INTERVAL / 5
        rest = max(interval, _REST * (time.monotonic() - started))
        if waiting:
            self._timer = loop.call_later(rest, self._check)

    def _arriving(self, connections: list[_Connection]) -> int:
        return sum(connection.arriving(self._max_message) for connection in connections)

    def _count(self) -> None:
        """Count the bytes of all connections, and forget those that are closed."""
        received = _received_bytes()
        for peer, connection in list(self._connections.items()):
            host, _, port = unquote(peer).partition(":")[2].rpartition(":")  # of ipv6:%5B::1%5D:41022
            bytes_ = received.get((host.strip("[]"), port))
            if bytes_ is None:
                if not connection.waits:
                    del self._connections[peer]
                continue
            if bytes_ < connection.completed:  # a new connection with the name of an old one
                connection.completed = 0
            connection.surplus = bytes_ - connection.completed

    def _refuse(self, waiting: list[_Connection], excess: int) -> None:
        """Refuse calls of the identity with the most arriving bytes, on its connection with the most.

        To which calls the bytes belong is unknown. The oldest are spared, as many as have room whatever they hold.
        """
        shares: Counter[tuple[str, _Connection]] = Counter()
        totals: Counter[str] = Counter()
        for connection in waiting:
            arriving = connection.arriving(self._max_message)
            for identity, count in Counter(wait.identity for wait in connection.waits).items():
                shares[identity, connection] = arriving * count // len(connection.waits)
                totals[identity] += shares[identity, connection]
        identity = max(totals, key=totals.__getitem__)
        share, connection = max(((shares[identity, each], each) for each in waiting), key=lambda pair: pair[0])
        spared = max(0, share - excess) // self._max_message
        others = connection.arriving(self._max_message) - share
        for wait in [wait for wait in connection.waits if wait.identity == identity][spared:]:
            wait.error = Overloaded(
                f"the messages arriving at this server have reached its limit of {self._limit} bytes (option "
                f"--arriving-bytes), most of them from {identity}. Send fewer large messages at a time, or later",
                _RETRY_AFTER,
            )
            wait.task.cancel()
            connection.waits.remove(wait)
            self._refusals.inc()
        floor = connection.surplus - others - min(share, spared * self._max_message)
        floor -= len(connection.waits) * UNREAD_BYTES
        for wait in connection.waits:  # gRPC drops what has arrived for the others
            wait.floor = max(wait.floor, floor)


def _received_bytes() -> dict[tuple[str, str], int]:
    """Return the bytes received on each of this process's TCP connections, by address and port of the peer."""
    received = {}
    for connection in tcp_connections():
        with suppress(OSError):  # of another kind, or closed meanwhile
            info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 136)
            host, port = connection.getpeername()[:2]
            # tcpi_bytes_received of linux/tcp.h, since Linux 4.1
            received[host.removeprefix("::ffff:"), str(port)] = int.from_bytes(info[128:136], sys.byteorder)
    return received
