"""Trusted proxies: whose connections carry the calls of many clients, and report the address of each."""

import ipaddress
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar, TypeAlias
from urllib.parse import unquote

from ..cli_option import option, split_commas
from ..errors import UsageError
from .observability.call_context import identity_of

Address: TypeAlias = ipaddress.IPv4Address | ipaddress.IPv6Address
Network: TypeAlias = ipaddress.IPv4Network | ipaddress.IPv6Network
_UNIX = "::"  # stands for all who connect over Unix sockets; the unspecified address is nobody's


def parse_networks(options: Sequence[str] | None) -> tuple[Network, ...]:
    """Parse `CIDR[,CIDR…]` options, and `unix:`, of Unix sockets, as _UNIX. Raises UsageError for anything else."""
    try:
        return tuple(ipaddress.ip_network(_UNIX if text == "unix:" else text) for text in split_commas(options))
    except ValueError as error:
        raise UsageError(f"--trusted-proxies: {error}. Give networks, such as 10.0.0.0/8,fd00::/8, or unix:") from None


@dataclass(frozen=True)
class TrustedProxies:
    """Which proxies to trust, and the metadata key in which they name the address of their client."""

    HELP_GROUP: ClassVar[str] = "Proxies"
    key: str | None = option(
        None,
        "Metadata key in which trusted proxies name the address of their client, such as x-forwarded-for.",
        flag="client-address-key",
        metavar="KEY",
        default="the address of the connection counts",
    )
    networks: tuple[Network, ...] = option(
        (),
        "Networks of the proxies that are trusted to name the address of their client, unix: for those on a Unix "
        "socket; repeatable.",
        flag="trusted-proxies",
        metavar="CIDR[,CIDR]",
        kind=list[str] | None,
        parse=parse_networks,
    )

    def __post_init__(self) -> None:
        if (self.key is None) != (not self.networks):
            raise UsageError(
                "--client-address-key and --trusted-proxies belong together: give both, or neither if clients connect "
                "without a proxy"
            )
        if self.key is not None and not re.fullmatch(r"[a-z0-9_.-]+(?<!-bin)", self.key):
            raise UsageError(
                f"--client-address-key {self.key}: not a metadata key of text. Use lower-case letters, digits, '-', "
                "'_' and '.', without '-bin' at the end"
            )

    def identity(self, metadata: Iterable[tuple[str, str | bytes]], peer: str) -> str:
        """Return the identity of a call's client.

        Each proxy appends the address of its own client to the list. So the last address that is not a trusted proxy's
        is the client's, and what precedes it may be forged. A missing or malformed value means the peer itself.
        """
        host = unquote(peer).partition(":")[2].rpartition(":")[0].strip("[]")
        address = parse_address(_UNIX if peer.startswith("unix:") else host)
        forwarded = ",".join(value for key, value in metadata if key == self.key and isinstance(value, str)).split(",")
        while forwarded and address is not None and any(address in network for network in self.networks):
            address = parse_address(forwarded.pop().strip())
        if address is None or address.is_unspecified:
            return identity_of(peer)
        return f"ipv4:{address}" if address.version == 4 else f"ipv6:%5B{address}%5D"  # as in the names of peers


def parse_address(text: str) -> Address | None:
    """Return an IP address, None for other text; an IPv4 address within an IPv6 one becomes its own."""
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return None
    return getattr(address, "ipv4_mapped", None) or address
