"""The committed certificates (tests/data/tls/make.sh), copied where a test may change them; and token files."""

import shutil
from pathlib import Path

from prelunet.evaluator.serving.access import create_token
from prelunet.evaluator.serving.options import AccessOptions

TLS = Path(__file__).parents[1] / "data" / "tls"
assert (TLS / "ca.pem").exists(), "run tests/data/tls/make.sh"


def install_pair(folder: Path, name: str) -> None:
    """Put a certificate and its key in the place of a server's, each atomically, one after the other."""
    for kind in ("pem", "key"):
        shutil.copyfile(TLS / f"{name}.{kind}", folder / "new")
        (folder / "new").replace(folder / f"tls.{kind}")


def tls_options(folder: Path, pair: str = "server", *, mutual: bool = False) -> AccessOptions:
    """Return the options of a server with a copy of a certificate. mutual: clients need a certificate of `ca`."""
    install_pair(folder, pair)
    return AccessOptions(folder / "tls.pem", folder / "tls.key", TLS / "ca.pem" if mutual else None)


def write_tokens(path: Path, *tokens: tuple[str, tuple[str, ...]]) -> list[str]:
    """Write a server's token file with (name, scopes) and return the secrets."""
    created = [create_token(name, scopes) for name, scopes in tokens]
    path.write_text("\n".join(lines for _, lines in created))
    path.chmod(0o600)
    return [secret for secret, _ in created]


def secret_file(path: Path, secret: str) -> Path:
    """Write a client's token file."""
    path.touch(0o600)
    path.write_text(f"{secret}\n")
    return path
