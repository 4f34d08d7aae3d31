"""Files that a server reads again when they change: certificates, which are here, and tokens (`access`)."""

import asyncio
import logging
import ssl
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Generic, TypeAlias, TypeVar

import grpc

from ..errors import UsageError
from ..rpc.tls import check_authorities, check_key_pair, read_small_file
from .observability.metrics import Metrics
from .options import AccessOptions

INTERVAL = 1.0  # seconds between two looks at the files
READ_TIMEOUT = 30.0  # seconds until a warning that a file system does not answer
_THREAD_NAME = "may block"

log = logging.getLogger(__name__)

Value = TypeVar("Value")
Contents: TypeAlias = tuple[bytes, ...]


class WatchedFiles(Generic[Value]):
    """The value of files that belong together. A new one replaces it only if it is valid.

    A change counts once two looks find the same contents, so that half-written files and half-replaced pairs are seldom
    read.
    name: of the files in log and metrics; parse: returns the value of the contents, raises UsageError.
    The constructor raises the UsageError of `parse`, or for a file that cannot be read.
    """

    def __init__(self, name: str, paths: Sequence[Path], parse: Callable[[Contents], Value], metrics: Metrics) -> None:
        self.name, self._paths, self._parse = name, paths, parse
        self._reloads = metrics.reloads
        for outcome in ("loaded", "refused"):
            self._reloads.labels(name, outcome)
        self._contents = self._last_look = self._read()
        self.value = parse(self._contents)

    def poll(self) -> None:
        """Look at the files, and replace the value if they have changed."""
        try:
            contents, problem = self._read(), None
        except UsageError as error:
            contents, problem = (str(error).encode(),), error
        settled, self._last_look = contents == self._last_look, contents
        if not settled or contents == self._contents:
            return
        self._contents = contents  # also if they are refused: reported once
        try:
            if problem is not None:
                raise problem
            self.value = self._parse(contents)
        except Exception as error:  # whatever it is, further changes are read
            self._reloads.labels(self.name, "refused").inc()
            log.error("the changed %s are not used, the previous ones stay: %s", self.name, error)
        else:
            self._reloads.labels(self.name, "loaded").inc()
            log.info("the changed %s are in use", self.name)

    def _read(self) -> Contents:
        return tuple(map(read_small_file, self._paths))


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
        # As gRPC does. Python 3.13's default refuses authorities without key usage, which `openssl req -x509` makes.
        context.verify_flags = ssl.VERIFY_X509_TRUSTED_FIRST | ssl.VERIFY_X509_PARTIAL_CHAIN
        for path in authorities:
            context.load_verify_locations(path)
            context.verify_mode = ssl.CERT_REQUIRED
        if contents != tuple(map(read_small_file, self._options.tls_files)):
            raise UsageError("the files changed while they were read")
        self._metrics.certificate_expiry.set(expiry.timestamp())
        return grpc.ssl_server_certificate_configuration([(contents[1], contents[0])], *contents[2:]), context


async def poll_forever(files: WatchedFiles[Any]) -> None:
    """Poll files at intervals."""
    while True:
        await asyncio.sleep(INTERVAL)
        await in_thread(files.poll, reads=files.name)


async def in_thread(function: Callable[..., Value], *arguments: Any, reads: str = "") -> Value:
    """Return the result of a function in a thread of its own, because a network file system may never answer.

    A thread of asyncio.to_thread would then be missing elsewhere, and keep the process from exiting. The function
    continues if the caller is cancelled. reads: what it reads, for a warning if that takes more than READ_TIMEOUT.
    """
    result = Future[Value]()
    result.set_running_or_notify_cancel()  # from now on it cannot be cancelled

    def run() -> None:
        try:
            result.set_result(function(*arguments))
        except BaseException as error:
            result.set_exception(error)

    threading.Thread(target=run, name=_THREAD_NAME, daemon=True).start()
    waiting = asyncio.wrap_future(result)
    if reads and not (await asyncio.wait({waiting}, timeout=READ_TIMEOUT))[0]:
        log.warning("the %s are not read: their file system has not answered for %g s", reads, READ_TIMEOUT)
    return await waiting


def unfinished_threads() -> bool:
    """Return whether a thread of `in_thread` runs."""
    return any(thread.name == _THREAD_NAME for thread in threading.enumerate())
