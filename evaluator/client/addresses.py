"""The address of a server, as people write it."""

import re

from prelunet.evaluator.errors import UsageError

# What gRPC takes beside host:port; it knows the names of further ones by itself.
_OWN_KINDS = ("dns:", "ipv4:", "ipv6:", "unix:", "unix-abstract:", "vsock:", "xds:")
_WITH_SCHEME = re.compile(r"([a-z][a-z0-9+.-]*)://([^/]*)", re.IGNORECASE)
_WITH_PORT = re.compile(r"(?:\[[0-9A-Fa-f:.%\w]+\]|[^\s:/\[\]]+):([0-9]{1,5})")
_EXAMPLE = "127.0.0.1:50051"
_MOST = 65535


def checked_address(address: str) -> str:
    """Return an address that is one, as gRPC takes it: host:port, or one of gRPC's own kinds, as dns:///host:port.

    Raises UsageError where gRPC would understand something else: it takes "host" for host:443, and "http://host:50051"
    for the name of a machine.
    """
    if address.startswith(_OWN_KINDS):
        return address
    if found := _WITH_PORT.fullmatch(address):
        if int(found[1]) <= _MOST:
            return address
        raise UsageError(f"address is {address!r}, but a port is 0 to {_MOST}, as in {_EXAMPLE}")
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
