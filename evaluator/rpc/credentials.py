"""How a client proves who it is, and which servers it trusts: TLS and a token."""

import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from ..cli_option import option
from ..errors import UsageError
from .tls import check_authorities, check_key_pair, is_loopback, read_small_file, warn_of_readers

if TYPE_CHECKING:
    import grpc

_TOKEN = re.compile(r"[\x21-\x7e]+")


@dataclass(frozen=True)
class Credentials:
    """Credentials of a client; by default none, without TLS.

    TLS is used if `tls` is set or any of its files is given. The files for TLS are read once, the token for each call,
    so that it can be replaced. Without TLS it is sent only to this machine, unless `insecure`.
    """

    HELP_GROUP: ClassVar[str] = "Connection to --server"
    ENVIRONMENT_PREFIX: ClassVar[str] = "PRELUNET_"
    tls: bool = option(False, "Use TLS, and trust the usual certificate authorities.")
    tls_ca: Path | None = option(None, "Use TLS, and trust the certificate authorities of a file (PEM).")
    tls_cert: Path | None = option(None, "Certificate (PEM), for servers that require one of clients.")
    tls_key: Path | None = option(None, "Private key of that certificate (PEM), not encrypted.")
    token_file: Path | None = option(None, "File with the token, for servers that require one.")
    insecure: bool = option(False, "Send the token to other machines without TLS, too.")

    def __post_init__(self) -> None:
        for name in ("tls_ca", "tls_cert", "tls_key", "token_file"):
            if isinstance(path := getattr(self, name), str):  # as Python users may give it
                object.__setattr__(self, name, Path(path))
        if (self.tls_cert is None) != (self.tls_key is None):
            raise UsageError("--tls-cert and --tls-key (tls_cert, tls_key) belong together: give both or neither")

    def of_channel(self) -> "grpc.ChannelCredentials | None":
        """Return gRPC's credentials, None without TLS. Raises UsageError for a file that cannot be used."""
        if not (self.tls or self.tls_ca or self.tls_cert):
            return None
        import grpc  # here: verbs declare these options without it

        authorities = pair = None
        if self.tls_ca is not None:
            authorities = read_small_file(self.tls_ca)
            check_authorities(self.tls_ca)
        if self.tls_cert is not None and self.tls_key is not None:
            pair = read_small_file(self.tls_key), read_small_file(self.tls_cert)
            check_key_pair(self.tls_cert, self.tls_key)
        return grpc.ssl_channel_credentials(authorities, *(pair or ()))

    def of_calls(self, address: str) -> "CallToken | None":
        """Return the token of calls to a server, None without one. Raises UsageError if it may not be sent there."""
        if self.token_file is None:
            return None
        if not (self.tls or self.tls_ca or self.tls_cert or self.insecure or _is_this_machine(address)):
            raise UsageError(
                f"{address}: without TLS, others on the network could read the token. Use TLS (--tls, --tls-ca), or "
                "--insecure if a proxy or the network itself protects the connection (in Python: Credentials)"
            )
        return CallToken(self.token_file)


class CallToken:
    """The token of a client's calls. Raises UsageError for a file without a token."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._token = self._read()
        warn_of_readers(path)

    def metadata(self) -> tuple[tuple[str, str], ...]:
        """Return the metadata of a call. While the file cannot be read, the last token is used."""
        with suppress(UsageError):
            self._token = self._read()
        return (("authorization", f"Bearer {self._token}"),)

    def _read(self) -> str:
        token = read_small_file(self._path).decode("latin-1").strip()
        if not _TOKEN.fullmatch(token):
            raise UsageError(f"{self._path}: not a token: one line without spaces, as `prelunet token` prints it")
        return token


def _is_this_machine(address: str) -> bool:
    found = re.fullmatch(r"(?:dns:///|dns:|ipv4:|ipv6:)?(.*):\d+", address)
    return address.startswith(("unix:", "unix-abstract:")) or (found is not None and is_loopback(found[1].strip("[]")))
