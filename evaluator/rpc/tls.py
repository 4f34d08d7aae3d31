"""TLS files, in PEM, checked before gRPC uses them: it reports only that a handshake failed, not which file is why."""

import ipaddress
import logging
import re
import ssl
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

from prelunet.evaluator.errors import UsageError
from prelunet.evaluator.files import require_regular_file

MAX_FILE_BYTES = 2**20  # of a file with certificates, a key or tokens

log = logging.getLogger(__name__)


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach an address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name
        return host == "localhost"


def read_small_file(path: Path) -> bytes:
    """Return the content of a file with certificates, a key or tokens; UsageError if it cannot be read."""
    require_regular_file(path)
    try:
        with path.open("rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise UsageError(f"{path}: cannot be read ({error.strerror}). Give a file that this user can read") from error
    if len(content) > MAX_FILE_BYTES:
        raise UsageError(f"{path}: larger than {MAX_FILE_BYTES} bytes, so it is another kind of file")
    return content


def warn_of_readers(path: Path) -> None:
    """Log a warning if other users of this machine may read or change a file."""
    if path.stat().st_mode & 0o026:
        log.warning("other users of this machine may read or change %s; restrict it: chmod go= %s", path, path)


def check_authorities(path: Path) -> None:
    """Raise UsageError for a file that has no certificates of authorities."""
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(path)
    except OSError as error:
        raise UsageError(f"{path}: no certificates in PEM form. Give the file of a certificate authority") from error


def check_key_pair(certificate: Path, key: Path) -> datetime:
    """Return when a certificate expires.

    certificate: a file that may continue with those of intermediate authorities. Raises UsageError if the files are not
    a certificate and its key, or if the certificate is not valid now.
    """
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key, password=lambda: _no_password(key))
    except OSError as error:
        if getattr(error, "reason", None) in {"KEY_VALUES_MISMATCH", "KEY_TYPE_MISMATCH"}:
            problem = f"is not the key of the certificate in {certificate}. Give the two files that belong together"
            raise UsageError(f"{key}: {problem}") from error
        raise UsageError(
            f"{certificate}, {key}: cannot be used as a certificate and its private key in PEM form "
            f"({error.strerror or error})"
        ) from error
    fields = _fields(certificate.read_text("latin-1"))
    if fields[5].startswith(_ED25519):
        raise UsageError(
            f"{certificate}: gRPC does not support Ed25519 keys. Use a certificate with an RSA or ECDSA key"
        )
    begins, ends = (_time(tag, content.decode()) for tag, content in _elements(fields[3]))
    now = datetime.now(UTC)
    if now > ends:
        raise UsageError(f"{certificate}: this certificate expired on {ends:%Y-%m-%d %H:%M} UTC. Renew it")
    if now < begins:
        problem = f"this certificate is valid only from {begins:%Y-%m-%d %H:%M} UTC. Check this machine's clock"
        raise UsageError(f"{certificate}: {problem}, or give another certificate")
    return ends


def _no_password(key: Path) -> str:
    raise UsageError(f"{key}: this key is encrypted. Decrypt it, for example with: openssl pkey -in {key} -out NEW.key")


_ED25519 = bytes.fromhex("300506032b6570")  # RFC 8410


def _fields(pem: str) -> list[bytes]:
    """Return the fields of the first certificate of a valid file from its serial number on: RFC 5280, 4.1.

    Python's ssl does not read certificates. 3 is the validity, 5 begins with the algorithm of the key.
    """
    found = re.search(f"{ssl.PEM_HEADER}.*?{ssl.PEM_FOOTER}", pem, re.DOTALL)
    assert found is not None, "OpenSSL has read this file"
    certificate = next(_elements(ssl.PEM_cert_to_DER_cert(found[0])))[1]
    return [content for tag, content in _elements(next(_elements(certificate))[1]) if tag != 0xA0]  # no version


def _elements(der: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield the elements of a DER encoding: tag and content."""
    while der:
        tag, length, start = der[0], der[1], 2
        if length & 0x80:
            start += length & 0x7F
            length = int.from_bytes(der[2:start])
        yield tag, der[start : start + length]
        der = der[start + length :]


def _time(tag: int, text: str) -> datetime:
    if tag == 0x17:  # UTCTime, of two-digit years from 1950 to 2049
        text = ("19" if text >= "50" else "20") + text
    return datetime.strptime(text, "%Y%m%d%H%M%SZ").replace(tzinfo=UTC)
