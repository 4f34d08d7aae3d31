"""Who may call which method: tokens, their scopes and rates. It knows nothing of gRPC, so that all ports can use it.

The file has the SHA-256 of each token, not the token. A slow hash, as for passwords, is unnecessary: a token has 256
random bits, which nobody finds by trying. For the same reason the time of a look-up by hash gives nothing away.
"""

import hashlib
import json
import re
import secrets
import time
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Literal, TypeAlias, get_args

from msgspec import Meta, Struct, ValidationError, convert

from ..errors import Overloaded, PermissionDenied, Unauthenticated, UsageError
from .observability.metrics import Metrics
from .watched_files import Contents, WatchedFiles

Scope: TypeAlias = Literal["classify", "evaluate", "admin"]
SCOPES: tuple[Scope, ...] = get_args(Scope)

# All methods and what they require: nothing, any token, or a scope. A method that is not listed is refused to all
# tokens, and "unknown" in metrics: clients could invent any number of names.
_RULES = (
    ("nothing", "grpc.health.v1.Health", "Check Watch"),
    ("nothing", "inference.GRPCInferenceService", "ServerLive ServerReady ModelReady"),
    ("token", "grpc.reflection.v1.ServerReflection", "ServerReflectionInfo"),
    ("token", "grpc.reflection.v1alpha.ServerReflection", "ServerReflectionInfo"),
    ("token", "inference.GRPCInferenceService", "ServerMetadata ModelMetadata ModelConfig"),
    ("token", "inference.GRPCInferenceService", "ModelStatistics RepositoryIndex"),
    ("token", "prelunet.v1.PreluNetService", "ListModels GetModel"),
    ("classify", "prelunet.v1.PreluNetService", "Classify ClassifyStream"),
    ("classify", "inference.GRPCInferenceService", "ModelInfer ModelStreamInfer"),
    ("evaluate", "prelunet.v1.PreluNetService", "Evaluate"),
    ("classify", "prelunet.http", "Examples"),
    ("evaluate", "prelunet.http", "Reports"),
    ("admin", "inference.GRPCInferenceService", "RepositoryModelLoad RepositoryModelUnload"),
)
REQUIRED = {f"/{service}/{method}": need for need, service, methods in _RULES for method in methods.split()}
_TOKEN_NAME = re.compile(r"[A-Za-z0-9_-]{1,100}")  # a key of TOML that needs no quotes


class Token(Struct, frozen=True, forbid_unknown_fields=True):
    """What a token may do. sha256: of the secret; rate: calls per second; share: of each model's queue."""

    sha256: Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]
    scopes: Annotated[tuple[Scope, ...], Meta(min_length=1)]
    rate: Annotated[float, Meta(gt=0, le=1e6)] | None = None
    share: Annotated[float, Meta(gt=0, le=1)] | None = None


def create_token(
    name: str, scopes: Sequence[str], *, rate: float | None = None, share: float | None = None
) -> tuple[str, str]:
    """Return a new secret, and the lines for the file. Raises UsageError for an invalid name or scope."""
    if not _TOKEN_NAME.fullmatch(name):
        raise UsageError(f"'{name[:100]}' is not a name for a token: 1 to 100 letters, digits, '_' and '-'")
    if unknown := set(scopes) - set(SCOPES):
        raise UsageError(f"no scope '{min(unknown)[:100]}'. Valid: {', '.join(SCOPES)}")
    secret = secrets.token_urlsafe(32)
    fields = {"sha256": _digest(secret.encode()), "scopes": list(scopes), "rate": rate, "share": share}
    lines = [f"{key} = {json.dumps(value)}\n" for key, value in fields.items() if value is not None]
    return secret, "".join([f"[{name}]\n", *lines])


def parse_tokens(path: Path, content: bytes) -> dict[str, Token]:
    """Return the tokens of a file by name. Raises UsageError that names the token at fault."""
    try:
        tables = tomllib.loads(content.decode())
    except (ValueError, RecursionError) as error:  # also the second of two tokens with one name
        raise UsageError(
            f"{path}: not a TOML file of tokens: {error}. Create tokens with: prelunet token NAME"
        ) from None
    tokens: dict[str, Token] = {}
    names: dict[str, str] = {}
    for name, table in tables.items():
        try:
            if not _TOKEN_NAME.fullmatch(name):
                raise ValidationError("the name may have only 1 to 100 letters, digits, '_' and '-'")
            tokens[name] = token = convert(table, Token)
        except ValidationError as error:
            raise UsageError(
                f"{path}: [{name[:100]}]: {error}. A token has `sha256`, `scopes` ({', '.join(SCOPES)}) and optionally "
                "`rate` and `share`; create it with: prelunet token NAME"
            ) from None
        if (other := names.setdefault(token.sha256, name)) != name:
            raise UsageError(f"{path}: [{name}] has the sha256 of [{other}]. Create a token of its own for each name")
    if not tokens:
        raise UsageError(f"{path}: no token, so every call would be refused. Create one with: prelunet token NAME")
    return tokens


class AccessControl:
    """Decides on calls by the tokens of a file, which is read again when it changes.

    clock: returns seconds. The constructor raises UsageError for a file that cannot be used.
    """

    def __init__(self, path: Path, metrics: Metrics | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._path = path
        self._metrics = metrics or Metrics()
        self._clock = clock
        self._left: dict[str, tuple[float, float]] = {}  # by name: calls that a token may make now, and when counted
        self.files = WatchedFiles("tokens", (path,), self._parse, self._metrics)

    def _parse(self, contents: Contents) -> dict[str, tuple[str, Token]]:
        return {token.sha256: (name, token) for name, token in parse_tokens(self._path, contents[0]).items()}

    def check(
        self, method: str, authorizations: Sequence[str | bytes], *, known: bool = True
    ) -> tuple[str, Token] | None:
        """Return the name of a call's token and the token; None for a method that requires none.

        method: as in "/prelunet.v1.PreluNetService/Classify"; known: whether it exists; authorizations: values of the
        header. Raises Unauthenticated, PermissionDenied, or Overloaded above the token's rate.
        """
        required = REQUIRED.get(method)
        if required == "nothing":
            return None
        try:
            name, token = self._authenticate(authorizations)
        except Unauthenticated:
            self._metrics.refused["token"].inc()
            raise
        if known and required != "token" and required not in token.scopes:
            self._metrics.refused["scope"].inc()
            lacking = "no scope allows it" if required is None else f"it requires the scope '{required}'"
            raise PermissionDenied(
                f"token '{name}' may not call {method.removeprefix('/')}: {lacking}, and this token has "
                f"{', '.join(token.scopes)}. Ask the server's operator for a token with that scope"
            )
        if token.rate is not None:
            self._count(name, token.rate)
        return name, token

    def _authenticate(self, authorizations: Sequence[str | bytes]) -> tuple[str, Token]:
        if not authorizations:
            raise Unauthenticated(
                "this server requires a token: give the file with yours (--token-file, or Credentials(token_file=…) in "
                "Python), or send it as metadata or HTTP header, authorization: Bearer TOKEN"
            )
        header = authorizations[0]
        scheme, _, secret = (header if isinstance(header, str) else "").partition(" ")
        if len(authorizations) > 1 or scheme.lower() != "bearer" or not secret:
            raise Unauthenticated("the metadata `authorization` is not one token in the form: Bearer TOKEN")
        found = self.files.value.get(_digest(secret.strip().encode(errors="surrogateescape")))
        if found is None:
            raise Unauthenticated(
                "this token is unknown to the server, or has been removed. Check the file, or ask the server's operator"
            )
        return found

    def _count(self, name: str, rate: float) -> None:
        """Count a call; raise Overloaded above the rate. Up to a second's worth of calls may come at once."""
        now, limit = self._clock(), max(1.0, rate)
        left, since = self._left.get(name, (limit, now))
        left = min(limit, left + rate * (now - since))
        self._left[name] = (left - (left >= 1), now)
        if left < 1:
            self._metrics.refused["rate"].inc()
            wait = (1 - left) / rate
            raise Overloaded(f"token '{name}' may make {rate:g} calls per second. Try again in {wait:.2g} s", wait)


def _digest(secret: bytes) -> str:
    return hashlib.sha256(secret).hexdigest()
