"""How a client's connection behaves."""

import re

from prelunet.evaluator.errors import UsageError
from prelunet.evaluator.rpc.status import MAX_MESSAGE_BYTES

PING_INTERVAL = 30  # seconds; a server cuts off who pings more often than `Limits.min_ping_interval` allows: 5 s
PING_TIMEOUT = 10  # seconds

CHANNEL_OPTIONS = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),  # a report of 1000 classes may pass gRPC's 4 MiB
    ("grpc.enable_http_proxy", 0),  # the address is meant as it stands; a proxy for downloads has no part in it
    # Calls go round all addresses of a name, as those of a headless Kubernetes service; gRPC would stay with the first.
    ("grpc.service_config", '{"loadBalancingConfig": [{"round_robin": {}}]}'),
    # A machine that vanished during a call is noticed after these two, instead of never; an idle connection is silent.
    ("grpc.keepalive_time_ms", 1000 * PING_INTERVAL),
    ("grpc.keepalive_timeout_ms", 1000 * PING_TIMEOUT),
    ("grpc.http2.ping_timeout_ms", 1000 * PING_TIMEOUT),  # 60 s, where a connection still takes bytes
    ("grpc.http2.max_pings_without_data", 0),  # an image may wait and compute for longer than gRPC's two pings
    # gRPC connects anew after 1 s at the earliest, and until then refuses by itself what our retries try again.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2_000),  # a call that waits for a restart should not wait for this too
    ("grpc.use_local_subchannel_pool", 1),  # a server shares its time among connections, so each client has its own
)


# The address of a server, as people write it.


# What gRPC takes beside host:port; it knows the names of further ones by itself.
_GRPC_SCHEMES = ("dns:", "ipv4:", "ipv6:", "unix:", "unix-abstract:", "vsock:", "xds:")
_WITH_SCHEME = re.compile(r"([a-z][a-z0-9+.-]*)://([^/]*)", re.IGNORECASE)
_WITH_PORT = re.compile(r"(?:\[[0-9A-Fa-f:.%\w]+\]|[^\s:/\[\]]+):([0-9]{1,5})")
_EXAMPLE = "127.0.0.1:50051"
_MAX_PORT = 65535


def checked_address(address: str) -> str:
    """Return an address that is one, as gRPC takes it: host:port, or one of gRPC's own kinds, as dns:///host:port.

    Raises UsageError where gRPC would understand something else: it takes "host" for host:443, and "http://host:50051"
    for the name of a machine.
    """
    if address.startswith(_GRPC_SCHEMES):
        return address
    if found := _WITH_PORT.fullmatch(address):
        if int(found[1]) <= _MAX_PORT:
            return address
        raise UsageError(f"address is {address!r}, but a port is 0 to {_MAX_PORT}, as in {_EXAMPLE}")
    if found := _WITH_SCHEME.match(address):
        host = found[2] or _EXAMPLE
        raise UsageError(f"address is {address!r}, but it is written without {found[1]}://, as {_with_port(host)}")
    if address.count(":") > 1 and "[" not in address and "/" not in address:
        raise UsageError(f"address is {address!r}, but an IPv6 address stands in brackets, as [::1]:50051")
    if re.fullmatch(r"[^\s:/\[\]]+|\[[^\s\]/]+\]", address):
        raise UsageError(f"address is {address!r}, but it needs a port, as {_with_port(address)}")
    raise UsageError(f"address is {address!r}, but it should be host:port, as {_EXAMPLE}")


def _with_port(host: str) -> str:
    return host if _WITH_PORT.fullmatch(host) else f"{host}:50051"
