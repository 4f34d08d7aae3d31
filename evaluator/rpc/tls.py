"""TLS files, in PEM, checked before gRPC uses them: it reports only that a handshake failed, not which file is why."""

import ipaddress
import logging
import ssl
from datetime import UTC, datetime
from pathlib import Path

from ..errors import UsageError
from ..files import read_regular

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
    try:
        return read_regular(path, MAX_FILE_BYTES)
    except OSError as error:
        raise UsageError(f"{path}: cannot be read ({error.strerror}). Give a file that this user can read") from error


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
    from cryptography import x509  # here: verbs declare their options without it
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key, password=lambda: _no_password(key))
        leaf = x509.load_pem_x509_certificate(read_small_file(certificate))
    except (OSError, ValueError) as error:
        if getattr(error, "reason", None) in {"KEY_VALUES_MISMATCH", "KEY_TYPE_MISMATCH"}:
            problem = f"is not the key of the certificate in {certificate}. Give the two files that belong together"
            raise UsageError(f"{key}: {problem}") from error
        raise UsageError(
            f"{certificate}, {key}: cannot be used as a certificate and its private key in PEM form "
            f"({getattr(error, 'strerror', None) or error})"
        ) from error
    if isinstance(leaf.public_key(), Ed25519PublicKey):
        raise UsageError(
            f"{certificate}: gRPC does not support Ed25519 keys. Use a certificate with an RSA or ECDSA key"
        )
    begins, ends, now = leaf.not_valid_before_utc, leaf.not_valid_after_utc, datetime.now(UTC)
    if now > ends:
        raise UsageError(f"{certificate}: this certificate expired on {ends:%Y-%m-%d %H:%M} UTC. Renew it")
    if now < begins:
        problem = f"this certificate is valid only from {begins:%Y-%m-%d %H:%M} UTC. Check this machine's clock"
        raise UsageError(f"{certificate}: {problem}, or give another certificate")
    return ends


def _no_password(key: Path) -> str:
    raise UsageError(f"{key}: this key is encrypted. Decrypt it, for example with: openssl pkey -in {key} -out NEW.key")
