"""The options of a server; `prelunet serve --help` and docs/serving.md document them for users."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from prelunet.evaluator.engine.session import Placement
from prelunet.evaluator.errors import UsageError
from prelunet.evaluator.imaging.limits import DecodeLimits

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


@dataclass(frozen=True)
class ModelFile:
    """One model to serve: its name in requests, and its file."""

    name: str
    path: Path


def parse_models(options: Sequence[str]) -> tuple[ModelFile, ...]:
    """Parse `NAME=MODEL.onnx` options. Raises UsageError for an invalid option or a repeated name."""
    files = []
    for option in options:
        name, separator, path = option.partition("=")
        if not separator or not path or not _NAME.fullmatch(name):
            raise UsageError(
                f"--model {option}: give a name and a file, as in --model flowers=flowers.onnx. "
                "A name has up to 100 letters, digits, '.', '_' or '-' and starts with a letter or digit"
            )
        files.append(ModelFile(name, Path(path)))
    names = [file.name for file in files]
    if repeated := next((name for name in names if names.count(name) > 1), None):
        raise UsageError(f"--model {repeated}=…: the name is given twice; give each model its own name")
    if not files:
        raise UsageError("no model to serve; give at least one: --model NAME=MODEL.onnx")
    return tuple(files)


def require_files(files: Iterable[ModelFile]) -> None:
    """Raise UsageError for a file that cannot be read; called for all files before the first is loaded."""
    for file in files:
        try:
            with file.path.open("rb"):
                pass
        except OSError as error:
            raise UsageError(
                f"--model {file.name}={file.path}: cannot be read ({error.strerror}). Give the path of a model file"
            ) from error


RESERVED_FILES = 256  # open files of a server besides connections: libraries, model files, its own sockets


@dataclass(frozen=True)
class QueueOptions:
    """Limits on unanswered images, and how long a batch waits to fill.

    max_views, max_bytes: views and encoded bytes of all unanswered images of one model; more are refused, but an image
    alone is always admitted; ready_views, ready_bytes: decoded ahead of the device, over all models; batch_wait:
    seconds that a ready view waits at most for others that are being decoded.
    """

    max_views: int = 1024
    max_bytes: int = 2**28
    ready_views: int = 512
    ready_bytes: int = 2**27
    batch_wait: float = 0.002


@dataclass(frozen=True)
class ServerLimits:
    """Limits on clients; times in seconds.

    image: of each encoded image; max_calls: calls in flight, over all clients, without health and reflection;
    message_timeout: to receive the message of a call, or the first of a stream; stream_idle_timeout: to receive the
    next message of a stream, while none is in progress; max_connections: open connections; max_streams: calls in flight
    on one connection; max_metadata: bytes of a call's headers; handshake_timeout: for a new connection to start HTTP/2;
    keepalive: without data from a client before it is pinged; keepalive_timeout: to answer that ping, or the connection
    is closed; min_ping_interval: between a client's own pings, or the connection is closed; max_connection_age: before
    a client must reconnect, with connection_age_grace more for its calls in flight, None for never;
    max_evaluation_images: of one evaluation, whose predictions stay in memory until its report.
    """

    image: DecodeLimits = field(default_factory=DecodeLimits)
    max_calls: int = 2048
    message_timeout: float = 60.0
    stream_idle_timeout: float = 300.0
    max_connections: int = 4096
    max_streams: int = 256
    max_metadata: int = 2**14
    handshake_timeout: float = 20.0
    keepalive: float = 60.0
    keepalive_timeout: float = 20.0
    min_ping_interval: float = 5.0
    max_connection_age: float | None = None
    connection_age_grace: float = 30.0
    max_evaluation_images: int = 1_000_000


@dataclass(frozen=True)
class ServeOptions:
    """All options of a server.

    port: 0 selects a free one; lame_duck: seconds after a signal during which new calls still work and health reports
    NOT_SERVING; grace: seconds after that for calls in flight; metrics_port: of the Prometheus metrics over HTTP, None
    for none, 0 selects a free one.
    """

    models: tuple[ModelFile, ...]
    host: str = "127.0.0.1"
    port: int = 50051
    placement: Placement = field(default_factory=Placement)
    queue: QueueOptions = field(default_factory=QueueOptions)
    limits: ServerLimits = field(default_factory=ServerLimits)
    lame_duck: float = 5.0
    grace: float = 30.0
    metrics_port: int | None = None
