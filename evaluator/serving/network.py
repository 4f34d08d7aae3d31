"""What a server allows its clients before any of our code sees a call: connections, messages, pings."""

import errno
import ipaddress
import resource
import socket

from prelunet.evaluator.rpc.status import MAX_MESSAGE_BYTES
from prelunet.evaluator.serving.options import RESERVED_FILES, ServerLimits


def channel_options(limits: ServerLimits) -> list[tuple[str, int]]:
    """Return the options of the gRPC server. docs/serving.md says what a client sees of each."""
    options = [
        ("grpc.so_reuseport", 0),  # else a second server started by mistake would share the calls silently
        # Twice the largest image, so that one slightly too large is refused in our words.
        ("grpc.max_receive_message_length", max(MAX_MESSAGE_BYTES, 2 * limits.image.max_bytes)),
        # gRPC unpacks before it looks at the size: 400 kB on the wire would be 400 MB here. Photos are packed already.
        ("grpc.per_message_decompression", 0),
        ("grpc.max_concurrent_streams", limits.max_streams),
        # gRPC counts a call until it is freed, which is after its client has had the answer and may have begun another.
        # This is how many may wait to be freed; without it gRPC refuses (UNAVAILABLE) calls of a client that makes more
        # than max_concurrent_streams at once. With no bound at all (grpc.http.overload_protection 0) one connection
        # that begins calls and resets them (CVE-2023-44487) takes 1 GB in 5 s.
        ("grpc.http2.max_deallocating_streams", limits.max_streams),
        ("grpc.max_allowed_incoming_connections", limits.max_connections),
        # One bound, not a lower one from which on calls fail by chance and a higher one.
        ("grpc.max_metadata_size", limits.max_metadata),
        ("grpc.absolute_max_metadata_size", limits.max_metadata),
        ("grpc.server_handshake_timeout_ms", _ms(limits.handshake_timeout)),
        # A client whose machine is gone without a word is noticed, whether it has calls or not.
        ("grpc.keepalive_time_ms", _ms(limits.keepalive)),
        ("grpc.keepalive_timeout_ms", _ms(limits.keepalive_timeout)),
        ("grpc.http2.ping_timeout_ms", _ms(limits.keepalive_timeout)),  # 60 s where a connection still takes bytes
        # gRPC's own bound, a ping in five minutes and in two hours without calls, cuts off clients with usual settings.
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
    """Return host:port; an IPv6 address needs brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def explain_bind_error(host: str, port: int, option: str = "--port") -> str:
    """Return why a port cannot be had, in words, and how to mend it; gRPC says only that it cannot.

    option: that chooses the port.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.bind(address)
    except socket.gaierror:
        return f"{host} is no address. Give --host one of this machine's, as 127.0.0.1"
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            return f"port {port} is in use. Choose another {option} (0 takes a free one), or stop the other program"
        if error.errno == errno.EACCES:
            return f"this user may not take port {port}. Choose a {option} from 1024 on"
        if error.errno == errno.EADDRNOTAVAIL:
            return f"{host} is no address of this machine. Choose another --host"
        return f"{error.strerror}. Choose another --host or {option}"
    return f"port {port} was in use. Try again, or choose another {option} (0 takes a free one)"


def is_loopback(host: str) -> bool:
    """Say whether only this machine reaches an address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name
        return host == "localhost"


def is_wildcard(host: str) -> bool:
    """Say whether an address stands for all of this machine's, those of IPv4 and of IPv6."""
    try:
        return ipaddress.IPv6Address(host).is_unspecified
    except ValueError:
        return False


def raise_open_file_limit(connections: int) -> int:
    """Let this process open as many files as so many connections take, as far as its hard limit lets it.

    Returns how many connections it has room for: fewer where the limit is too low, 0 or less where there is none.
    """
    needed = connections + RESERVED_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < needed:
        soft = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return connections if soft == resource.RLIM_INFINITY else min(connections, soft - RESERVED_FILES)
