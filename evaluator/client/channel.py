"""A client's channel: its options, with gRPC's retries, and the check of its address."""

import json
import re
from typing import Any

import grpc

from ..errors import UsageError
from ..rpc.status import MAX_MESSAGE_BYTES

PING_INTERVAL = 30  # seconds; a server disconnects clients that ping faster than `ServerLimits.min_ping_interval`: 5 s
PING_TIMEOUT = 10  # seconds

_OPTIONS = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),  # a report of 1000 classes may exceed gRPC's 4 MiB
    ("grpc.per_rpc_retry_buffer_size", MAX_MESSAGE_BYTES),  # gRPC retries no larger message; its default is 256 kB
    ("grpc.enable_http_proxy", 0),  # connect directly, ignoring the proxies of the environment
    # Detect a machine that vanished during a call, after these two, instead of never.
    ("grpc.keepalive_time_ms", 1000 * PING_INTERVAL),
    ("grpc.keepalive_timeout_ms", 1000 * PING_TIMEOUT),
    ("grpc.http2.ping_timeout_ms", 1000 * PING_TIMEOUT),  # gRPC's default is 60 s while the connection takes bytes
    ("grpc.http2.max_pings_without_data", 0),  # an image may wait and compute for longer than gRPC's two pings
    ("grpc.initial_reconnect_backoff_ms", 100),  # gRPC's default is 1 s
    ("grpc.max_reconnect_backoff_ms", 150),  # a call that waits for a restart should not wait for this too
    ("grpc.use_local_subchannel_pool", 1),  # a server shares its time among connections, so each client has its own
)

_RETRIED = {
    "waitForReady": True,
    "retryPolicy": {
        "maxAttempts": 5,  # gRPC's maximum
        "initialBackoff": "0.1s",
        "maxBackoff": "2s",
        "backoffMultiplier": 2,
        # CANCELLED by a server: it stopped before it began the call.
        "retryableStatusCodes": ["UNAVAILABLE", "RESOURCE_EXHAUSTED", "CANCELLED"],
    },
}


def channel_options(*, retries: bool) -> list[tuple[str, Any]]:
    """Return the options of a channel.

    With retries, a call also waits for a server that accepts calls, until its deadline, and this costs no attempt:
    gRPC watches the health of each server. An evaluation waits, but is never repeated.
    """
    # Spread calls over all addresses of a name (a headless Kubernetes service); gRPC would stay with the first.
    config: dict[str, Any] = {"loadBalancingConfig": [{"round_robin": {}}]}
    if retries:
        evaluate = {"service": "prelunet.v1.PreluNetService", "method": "Evaluate"}
        config["methodConfig"] = [
            {"name": [{}], **_RETRIED},
            {"name": [evaluate], "waitForReady": True},
            {"name": [{"service": "grpc.health.v1.Health"}]},
        ]
        config["healthCheckConfig"] = {"serviceName": ""}
    return [*_OPTIONS, ("grpc.service_config", json.dumps(config))]


def open_channel(
    library: Any, address: str, credentials: grpc.ChannelCredentials | None, options: list[tuple[str, Any]]
) -> Any:
    """Return a channel of `grpc` or `grpc.aio`. credentials: None without TLS."""
    if credentials is None:
        return library.insecure_channel(address, options)
    return library.secure_channel(address, credentials, options)


# gRPC's address schemes besides host:port.
_GRPC_SCHEMES = ("dns:", "ipv4:", "ipv6:", "unix:", "unix-abstract:", "vsock:", "xds:")
_HOST_AND_PORT = re.compile(r"(?:\[[0-9A-Fa-f:.%\w]+\]|[^\s:/\[\]]+):([0-9]{1,5})")
_MAX_PORT = 65535


def checked_address(address: str) -> str:
    """Return the address if it is valid: host:port, or an address with one of gRPC's schemes, e.g. dns:///host:port.

    Raises UsageError for an address that gRPC would misunderstand: it reads "host" as host:443, and
    "http://host:50051" as a host name.
    """
    if isinstance(address, str) and address.isprintable():
        found = _HOST_AND_PORT.fullmatch(address)
        if address.startswith(_GRPC_SCHEMES) or (found is not None and int(found[1]) <= _MAX_PORT):
            return address
    raise UsageError(
        f"address is {address!r}, but it must be host:port, without http:// and with a port up to {_MAX_PORT}, "
        "e.g. 127.0.0.1:50051 or [::1]:50051"
    )
