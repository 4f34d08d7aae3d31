"""The TLS credentials of a server: certificate, key, and the authorities of its clients' certificates."""

import ssl
from typing import Any

import grpc

from ..errors import UsageError
from ..rpc.tls import check_authorities, check_key_pair, read_small_file
from .observability.metrics import Metrics
from .options import AccessOptions
from .watched_files import Contents, WatchedFiles


class Certificates:
    """Reads the TLS files when they change; new connections get the latest valid ones, open ones keep theirs.

    The constructor raises UsageError for files that cannot be used.
    """

    def __init__(self, options: AccessOptions, metrics: Metrics) -> None:
        self._options = options
        self._metrics = metrics
        self.files = WatchedFiles("TLS files", options.tls_files, self._parse, metrics)
        self._served = self.files.value

    def credentials(self) -> grpc.ServerCredentials:
        """Return the credentials of a port. gRPC asks for changes at each new connection."""
        mutual = self._options.tls_client_ca is not None
        return grpc.dynamic_ssl_server_credentials(self._served[0], self._changed, require_client_authentication=mutual)

    def context(self) -> ssl.SSLContext:
        return self.files.value[1]

    def _changed(self) -> Any:
        """Return the configuration if it has changed, else None. gRPC calls this in threads of its own."""
        latest = self.files.value
        if latest is self._served:
            return None
        self._served = latest
        return latest[0]

    def _parse(self, contents: Contents) -> tuple[Any, ssl.SSLContext]:
        """Return the configurations of gRPC and HTTP. OpenSSL checks the files: gRPC only logs what is wrong."""
        certificate, key, *authorities = self._options.tls_files
        expiry = check_key_pair(certificate, key)
        for path in authorities:
            check_authorities(path)
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(certificate, key)
        context.set_alpn_protocols(["http/1.1"])
        for path in authorities:
            context.load_verify_locations(path)
            context.verify_mode = ssl.CERT_REQUIRED
        if contents != tuple(map(read_small_file, self._options.tls_files)):
            raise UsageError("the files changed while they were read")
        self._metrics.certificate_expiry.set(expiry.timestamp())
        return grpc.ssl_server_certificate_configuration([(contents[1], contents[0])], *contents[2:]), context
