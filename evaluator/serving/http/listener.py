"""An HTTP/1.1 port: uvicorn's protocol, behind limits on connections and times that uvicorn does not have.

uvicorn's own server is not used: it installs signal handlers, and neither limits connections and handshakes nor the
time for the head of a request. Only this module imports uvicorn.
"""

import asyncio
import ctypes
import logging
import select
import socket
import ssl
import struct
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from email.utils import formatdate
from functools import lru_cache
from pathlib import Path
from typing import Any, cast
from urllib.parse import unquote

import h11
from msgspec import Struct
from starlette.types import ASGIApp
from uvicorn import Config
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from ...errors import EnvironmentFault
from ..network import explain_bind_error, host_port, is_wildcard

_NO_DESCRIPTOR_PAUSE = 1.0  # seconds without accepting, when the process has no file descriptor left
_POLL_INTERVAL = 0.01  # seconds between checks for open connections
_HANDSHAKES = 0.05  # seconds that handshakes which have begun get before a port is closed; slower ones are reset
_SO_ATTACH_FILTER = 26  # of Linux; Python's socket module lacks it
_RECEIVE_BYTES = 2**16  # at a time; by default 256 KiB, which tiny chunks would make 0.4 s of parsing

log = logging.getLogger(__name__)


class ConnectionLimits(Struct, frozen=True):
    """Limits of a port; times in seconds.

    count: of open connections; head_bytes: of request line and headers; head: to complete a handshake, and to receive
    request line and headers; idle: between two requests, also to read a response; unread: for the rest of a body that
    nobody reads, since closing at once would keep many clients from reading the response.
    """

    count: int
    head_bytes: int = 2**14
    head: float = 20.0
    idle: float = 75.0
    unread: float = 2.0


class _Batching:
    """A transport that sends together what is written within `with`.

    Each write is a system call, which gives other threads the GIL and may wait 5 ms for it, and a record of TLS.
    """

    def __init__(self, transport: Any) -> None:
        self._transport = transport
        self._parts: list[bytes] | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def __enter__(self) -> None:
        self._parts = []

    def __exit__(self, *_: object) -> None:
        parts, self._parts = self._parts or [], None
        self._transport.write(b"".join(parts))

    def write(self, data: bytes) -> None:
        """Send bytes, or keep them until the batch ends."""
        if self._parts is None:
            self._transport.write(data)
        else:
            self._parts.append(data)


class Connection(H11Protocol):
    """A connection. The application finds it in the state of its scope, and reports begin and end of each request."""

    def __init__(
        self, config: Config, state: ServerState, limits: ConnectionLimits, on_lost: "Callable[[Connection], None]"
    ) -> None:
        super().__init__(config, state, {"connection": self})
        self.requests = 0  # in progress; uvicorn starts one at a time, but the next may start before the last has ended
        self._limits = limits
        self._on_lost = on_lost
        self._between_requests = False
        self._timer: asyncio.TimerHandle | None = None
        self.answering: asyncio.Task[Any] | None = None  # is cancelled if the client leaves

    def connection_made(self, transport: Any) -> None:
        """Wait for the first request."""
        transport.max_size = _RECEIVE_BYTES
        self.batch = _Batching(transport)
        super().connection_made(cast("asyncio.Transport", self.batch))
        self._abort_after(self._limits.head)

    def connection_lost(self, exc: Exception | None) -> None:
        """End the requests in progress."""
        self._on_lost(self)
        if self._timer is not None:
            self._timer.cancel()
        if self.answering is not None:
            self.answering.cancel()
        self._unset_keepalive_if_required()  # uvicorn's timer; after a reset it would keep this object for two minutes
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Start the time for the head of a request when its first byte arrives."""
        if self._between_requests:
            self._between_requests = False
            self._abort_after(self._limits.head)
        self.server_state.default_headers = [(b"date", _date(int(time.time())))]
        super().data_received(data)

    def begin(self) -> None:
        """Note that a request is in progress: its time is the application's concern."""
        self.requests += 1
        self._between_requests = False
        if self._timer is not None:
            self._timer.cancel()

    @property
    def body_received(self) -> bool:
        """Return whether all of the request's body has arrived, or it has none."""
        return not self.cycle.more_body

    def end(self) -> None:
        """Note that a request has been answered."""
        self.requests -= 1
        if not self.requests and self in self.connections:  # uvicorn's set; one that is lost needs no timer
            self._between_requests = self.body_received
            self._abort_after(self._limits.idle if self.body_received else self._limits.unread)

    def close_if_idle(self) -> None:
        """Close the connection between two requests, unless bytes of the next have arrived: these are answered."""
        if self._between_requests and not self.transport.is_closing():
            poll = select.poll()
            poll.register(self.transport.get_extra_info("socket"), select.POLLIN)
            if not poll.poll(0):
                self.transport.close()

    def cancel_if_lost(self) -> None:
        """Have this task, which has read its request, cancelled if the client leaves, as gRPC does."""
        if self.transport.is_closing():
            raise asyncio.CancelledError
        self.flow.resume_reading()  # paused by a large body, it would not notice
        self.answering = asyncio.current_task()

    def _abort_after(self, seconds: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self.loop.call_later(seconds, self.transport.abort)

    def send_400_response(self, msg: str) -> None:  # noqa: ARG002
        """Refuse what is not HTTP; a request in progress, whose body this was, ends as if its client had left."""
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):  # too late for a response
            self.transport.abort()
            return
        if self.cycle is not None:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        body = b'{"error":"not a valid HTTP/1.1 request, or its head is larger than this server accepts"}'
        headers = [("content-type", "application/json"), ("content-length", str(len(body))), ("connection", "close")]
        headers.append(("date", _date(int(time.time())).decode()))
        for event in (h11.Response(status_code=400, headers=headers), h11.Data(data=body), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()


class Listener:
    """A port and its connections; created and used inside one running event loop.

    host: address, or unix:PATH for a Unix socket, which has no port; tls: returns the context for new connections, None
    without TLS; option: that sets the port.
    The constructor raises EnvironmentFault if the port is unavailable, and `open` if another program took it meanwhile.
    """

    def __init__(
        self,
        app: ASGIApp,
        host: str,
        port: int,
        limits: ConnectionLimits,
        *,
        option: str,
        tls: Callable[[], ssl.SSLContext] | None = None,
        shared: bool = False,
    ) -> None:
        self._limits, self._tls = limits, tls
        self._config = Config(
            app,
            interface="asgi3", http=Connection, ws="none", lifespan="off", log_config=None, log_level="critical",
            access_log=False, proxy_headers=False, h11_max_incomplete_event_size=limits.head_bytes,
            timeout_keep_alive=round(2 * limits.idle) + 1,  # not before ours, which also ends unread responses
        )  # fmt: skip
        self._config.load()
        self._state = ServerState()
        self._connections: dict[Connection, asyncio.Task[None]] = {}  # and what sets each up; oldest first
        self._aborted = False
        try:
            self._sockets = bind(host, port, shared=shared)
        except (OSError, UnicodeError) as error:
            reason = explain_bind_error(host, port, option)
            raise EnvironmentFault(f"cannot listen on {host_port(host, port)} ({option}): {reason}") from error
        self.address = host_port(host, self._sockets[0].getsockname()[1])

    def open(self) -> None:
        """Accept connections. Before, ports refuse them, and Unix sockets let them wait."""
        for each in self._sockets:
            try:
                each.listen()
            except OSError as error:
                raise EnvironmentFault(
                    f"cannot listen on {self.address}: another program has taken this port in the meantime. Choose "
                    "another port, or stop the other program"
                ) from error
            self._resume(each)

    @property
    def url(self) -> str:
        """Return the URL of the path /; unix:PATH for a Unix socket."""
        if self.address.startswith("unix:"):
            return self.address
        return f"{'http' if self._tls is None else 'https'}://{self.address}/"

    @property
    def connections(self) -> int:
        """Return the number of connections, also those that are being set up."""
        return len(self._connections)

    async def close(self) -> None:
        """Close the port and idle connections; return when all are closed.

        Connections that wait to be accepted are, since the kernel would reset them. A new one stays open until its
        first request is answered, comes too late (`ConnectionLimits.head`), or `abort` is called: by `Server`,
        CONNECTION_LINGER after the last call.
        """
        ignoring = [_ignore_new_handshakes(each) for each in self._sockets]
        if any(ignoring) and not self._aborted:
            await asyncio.sleep(_HANDSHAKES)
        while self._sockets:  # once: the path of a closed socket may be that of the next server
            each = self._sockets.pop()
            listening = asyncio.get_running_loop().remove_reader(each)
            if each.family == socket.AF_UNIX:
                Path(each.getsockname()).unlink(missing_ok=True)
            while listening and self._accept(each):
                pass
            each.close()
        while self._connections or self._state.tasks:
            for connection in list(self._connections):
                connection.close_if_idle()
            await asyncio.sleep(_POLL_INTERVAL)
            if not self._connections:
                for task in self._state.tasks:  # nobody waits for their responses
                    task.cancel()

    async def close_within(self, seconds: float) -> None:
        """Do the same, but abort the connections that take longer."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self.close()
        self.abort()
        await self.close()

    def abort(self) -> None:
        """Abort all connections, and with them the requests in progress; no further one is accepted."""
        self._aborted = True
        for connection, setup in self._connections.items():
            setup.cancel()
            if connection.transport is not None:
                connection.transport.abort()

    def _resume(self, listener: socket.socket) -> None:
        if listener in self._sockets:
            asyncio.get_running_loop().add_reader(listener, self._accept, listener)

    def _accept(self, listener: socket.socket) -> bool:
        """Accept one connection, so that a flood does not stop the loop; return whether there was one."""
        try:
            accepted, _ = listener.accept()
        except BlockingIOError:
            return False
        except OSError as error:
            log.warning("%s: cannot accept a connection: %s", self.address, error.strerror)
            loop = asyncio.get_running_loop()
            loop.remove_reader(listener)
            loop.call_later(_NO_DESCRIPTOR_PAUSE, self._resume, listener)
            return False
        accepted.setblocking(False)
        if not self._aborted and self._make_room():
            connection = Connection(self._config, self._state, self._limits, self._forget)
            self._connections[connection] = asyncio.create_task(self._set_up(connection, accepted))
        else:
            accepted.close()
        return True

    def _make_room(self) -> bool:
        """Return whether one more connection fits, after aborting the oldest idle one if necessary.

        Otherwise idle connections could lock out everybody else.
        """
        if self.connections < self._limits.count:
            return True
        idle = (each for each in self._connections if not each.requests)
        if (oldest := next(idle, None)) is None:
            return False
        self._connections.pop(oldest).cancel()  # its handshake, if that has not ended
        if oldest.transport is not None:
            oldest.transport.abort()
        return True

    async def _set_up(self, connection: Connection, accepted: socket.socket) -> None:
        tls = None if self._tls is None else self._tls()
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: connection, accepted, ssl=tls, ssl_handshake_timeout=None if tls is None else self._limits.head
            )
        except (OSError, asyncio.CancelledError):  # the client has left, or does not speak TLS; the port closes
            self._forget(connection)

    def _forget(self, connection: Connection) -> None:
        self._connections.pop(connection, None)


@lru_cache(1)
def _date(seconds: int) -> bytes:
    """Return the value of the header Date. seconds: since 1970."""
    return formatdate(seconds, usegmt=True).encode()


def _ignore_new_handshakes(listener: socket.socket) -> bool:
    """Drop incoming SYNs, so that no connection waits at the instant in which a TCP port closes.

    The client sends its SYN again a second later and is refused then, before it has sent a request. Returns whether it
    worked: Linux only, and not in every sandbox.
    """
    if listener.family == socket.AF_UNIX or sys.platform != "linux":
        return False
    load_flags, skip_unless_syn, drop, keep = (0x30, 0, 0, 13), (0x45, 0, 1, 2), (6, 0, 0, 0), (6, 0, 0, 2**32 - 1)
    program = b"".join(struct.pack("=HBBI", *each) for each in (load_flags, skip_unless_syn, drop, keep))
    code = ctypes.create_string_buffer(program, len(program))
    try:
        listener.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, struct.pack("@HP", 4, ctypes.addressof(code)))
    except OSError:
        return False
    return True


def bind(host: str, port: int, *, shared: bool = False) -> list[socket.socket]:
    """Return sockets on all addresses of a host, on the same port, that do not listen yet, except Unix sockets.

    shared: with other sockets of this user that are shared, too.
    """
    if host.startswith("unix:"):
        created = _bound(socket.AF_UNIX, unquote(host.removeprefix("unix:")))
        created.listen()  # else another server would take this one for dead, and its path
        return [created]
    if is_wildcard(host) and socket.has_dualstack_ipv6():  # as gRPC: IPv4 too
        return [_bound(socket.AF_INET6, (host, port), dual_stack=True, shared=shared)]
    found: list[socket.socket] = []
    addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    for family, _, _, _, address in addresses:
        found.append(_bound(family, (address[0], port), shared=shared))
        port = port or found[0].getsockname()[1]
    return found


def _bound(family: int, address: Any, *, dual_stack: bool = False, shared: bool = False) -> socket.socket:
    """Do what `socket.create_server` does, but do not listen."""
    tcp = family != socket.AF_UNIX  # for which asyncio sets TCP_NODELAY, else a response may wait 40 ms for an ACK
    created = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP if tcp else 0)
    try:
        created.setblocking(False)
        if tcp:
            created.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if shared:
                created.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        if family == socket.AF_INET6:
            created.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, not dual_stack)
        created.bind(address)
    except OSError:
        created.close()
        raise
    return created
