"""Network settings: the limits that gRPC enforces on connections, messages and pings; addresses and open files."""

import asyncio
import errno
import os
import resource
import socket
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from urllib.parse import quote

from ..errors import EnvironmentFault
from .options import RESERVED_FILES, ServerLimits
from .proxies import parse_address

_FULL = 0.75  # of the limit of connections, from which on idle ones are closed
_ROOM_INTERVAL = 0.1  # seconds between checks that there is room for connections
DESCRIPTORS = Path("/proc/self/fd")


def channel_options(limits: ServerLimits, *, shared: bool = False) -> list[tuple[str, int]]:
    """Return the options of the gRPC server. shared: its port, with other processes of the same server."""
    options = [
        (
            "grpc.so_reuseport",
            int(shared),
        ),  # else a second server started by mistake would share the calls
        ("grpc.max_receive_message_length", limits.max_message_bytes),
        # gRPC decompresses before it checks the size: 400 kB on the wire become 400 MB. `Method` decompresses.
        ("grpc.per_message_decompression", 0),
        # More than these only of a message that is being read. By default gRPC accepts as many as the bandwidth
        # suggests, 1 GiB over loopback, although nobody reads them.
        ("grpc.http2.bdp_probe", 0),
        ("grpc.http2.lookahead_bytes", limits.unread_bytes),
        ("grpc.max_concurrent_streams", limits.max_streams),
        # gRPC counts a call until it is freed. By then its client has the answer and may have started another call.
        # This is the number of calls that may wait to be freed. With gRPC's default, calls of a client that makes more
        # than max_concurrent_streams at once fail (UNAVAILABLE). With no limit (grpc.http.overload_protection 0) a
        # connection that starts and resets calls (CVE-2023-44487) takes 1 GB in 5 s.
        ("grpc.http2.max_deallocating_streams", limits.max_streams),
        ("grpc.max_allowed_incoming_connections", limits.max_connections),
        # Equal: between a soft and a hard limit gRPC rejects calls at random.
        ("grpc.max_metadata_size", limits.max_metadata),
        ("grpc.absolute_max_metadata_size", limits.max_metadata),
        ("grpc.server_handshake_timeout_ms", _ms(limits.handshake_timeout)),
        # Detect clients whose machine disappeared, whether or not they have calls.
        ("grpc.keepalive_time_ms", _ms(limits.keepalive)),
        ("grpc.keepalive_timeout_ms", _ms(limits.keepalive_timeout)),
        ("grpc.http2.ping_timeout_ms", _ms(limits.keepalive_timeout)),  # default 60 s while data can still be sent
        # gRPC's default (a ping in 5 minutes, without calls in 2 hours) disconnects clients with common settings.
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_ping_interval_without_data_ms", _ms(limits.min_ping_interval)),
    ]
    if limits.max_connection_age is not None:
        options += [
            ("grpc.max_connection_age_ms", _ms(limits.max_connection_age)),
            ("grpc.max_connection_age_grace_ms", _ms(limits.connection_age_grace)),
        ]
    return options


def _ms(seconds: float) -> int:
    return max(1, round(1000 * seconds))


def host_port(host: str, port: int) -> str:
    """Return host:port, with an IPv6 address in brackets; a host `unix:PATH` alone."""
    if host.startswith("unix:"):
        return host
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def explain_bind_error(host: str, port: int, option: str = "--port") -> str:
    """Return why a port is unavailable and how to fix it; gRPC reports only that it is.

    option: the option that sets the port.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.bind(address)
    except (socket.gaierror, UnicodeError):
        return f"{host} is not an address. Give --host an address of this machine, such as 127.0.0.1"
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            return f"port {port} is in use. Choose another {option} (0 selects a free one), or stop the other program"
        if error.errno == errno.EACCES:
            return f"this user may not use port {port}. Choose a {option} of 1024 or higher"
        if error.errno == errno.EADDRNOTAVAIL:
            return f"{host} is not an address of this machine. Choose another --host"
        return f"{error.strerror}. Choose another --host or {option}"
    return f"port {port} was in use. Try again, or choose another {option} (0 selects a free one)"


def unix_host(path: Path, option: str) -> str:
    """Return unix:PATH after making sure that this socket can be created; one whose server is dead is removed.

    option: that sets the path. Raises EnvironmentFault: gRPC would take the place of a living server, and reports no
    reason if it cannot listen.
    """
    try:
        with socket.socket(socket.AF_UNIX) as probe:
            probe.setblocking(False)
            if path.is_socket() and probe.connect_ex(str(path)) == errno.ECONNREFUSED:
                path.unlink()
        with socket.socket(socket.AF_UNIX) as probe:
            probe.bind(str(path))
        path.unlink()
    except OSError as error:
        reason = error.strerror or str(error)
        if error.errno == errno.EADDRINUSE:
            reason = "a server is listening there" if path.is_socket() else "this file is not a socket"
        raise EnvironmentFault(f"cannot listen on {path} ({option}): {reason}. Choose another path") from error
    return f"unix:{quote(str(path))}"  # gRPC unquotes it


def is_wildcard(host: str) -> bool:
    """Return whether an address means all of this machine's addresses, IPv4 and IPv6."""
    address = parse_address(host)
    return address is not None and address.version == 6 and address.is_unspecified


def _descriptors() -> list[str]:
    """Return the numbers of this process's open files; none on systems without /proc."""
    try:
        return os.listdir(DESCRIPTORS)  # noqa: PTH208 - five times as fast as iterdir
    except FileNotFoundError:
        return []


def connections_to(port: int) -> Iterator[tuple[str, socket.socket]]:
    """Yield the open TCP connections to a port of this process, each with gRPC's name of its peer.

    They are not copies: do not close or keep them. Nothing on systems without /proc.
    """
    for number in _descriptors():
        with suppress(OSError):  # something else, of another kind, or closed
            connection = socket.socket(socket.AF_INET6, socket.SOCK_STREAM, 0, int(number))
            try:
                peer, name = connection.getpeername(), connection.getsockname()
                if isinstance(name, tuple) and name[1] == port:
                    yield peer_name(*peer[:2]), connection
            finally:
                connection.detach()


def peer_name(host: str, port: int) -> str:
    """Return gRPC's name of a connection, so that a client has one identity over gRPC and HTTP. host: "" for Unix's."""
    if not host:
        return "unix:"
    host = host.removeprefix("::ffff:")
    return f"ipv6:%5B{host}%5D:{port}" if ":" in host else f"ipv4:{host}:{port}"


async def keep_room(port: int, limit: int, busy: Callable[[], Collection[str]], recent: Mapping[str, None]) -> None:
    """Keep room for new connections to a gRPC port: otherwise idle ones could lock out everybody else.

    gRPC refuses connections beyond its limit, and keeps idle ones as long as they answer pings. This closes those that
    have been idle for longest while few places are left. limit: gRPC's; busy: returns the peers with calls; recent:
    peers in the order of their latest calls, others have had none.
    """
    seen: dict[str, None] = {}  # connections without a call, in the order in which they were found so
    while True:
        await asyncio.sleep(_ROOM_INTERVAL)
        if len(_descriptors()) < _FULL * limit:
            continue
        peers, with_calls = [peer for peer, _ in connections_to(port)], busy()
        idle = {peer: None for peer in peers if peer not in with_calls}
        seen = {peer: None for peer in (*seen, *idle) if peer in idle}
        excess = len(peers) - int(_FULL * limit)
        order = {peer: number for number, peer in enumerate(recent, 1)}
        closed = set(sorted(seen, key=lambda peer: order.get(peer, 0))[: max(0, excess)])
        for peer, connection in connections_to(port) if closed else ():
            if peer in closed:
                with suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)


def raise_open_file_limit(connections: int) -> int:
    """Raise this process's open-file limit for this many connections, at most to its hard limit.

    Returns the number of connections that the limit then allows, at most `connections`; 0 or less if it allows none.
    """
    needed = connections + RESERVED_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < needed:
        soft = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return connections if soft == resource.RLIM_INFINITY else min(connections, soft - RESERVED_FILES)
