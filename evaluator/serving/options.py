"""What can be set for a server; `prelunet serve --help` and docs/serving.md tell it to people."""

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
    """One model to serve: the name by which callers ask for it, and its file."""

    name: str
    path: Path


def parse_models(options: Sequence[str]) -> tuple[ModelFile, ...]:
    """Read `NAME=MODEL.onnx` options; raises UsageError for one that is none, and for a name given twice."""
    files = []
    for option in options:
        name, separator, path = option.partition("=")
        if not separator or not path or not _NAME.fullmatch(name):
            raise UsageError(
                f"--model {option}: give a name and a file, as in --model flowers=flowers.onnx. "
                "A name has up to 100 letters, digits, '.', '_' or '-' and begins with a letter or digit"
            )
        files.append(ModelFile(name, Path(path)))
    names = [file.name for file in files]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise UsageError(f"--model {twice}=…: the name is given twice; each model needs its own")
    if not files:
        raise UsageError("no model to serve; name at least one: --model NAME=MODEL.onnx")
    return tuple(files)


def require_files(files: Iterable[ModelFile]) -> None:
    """Refuse files that cannot be read, all before the first is loaded; raises UsageError."""
    for file in files:
        try:
            with file.path.open("rb"):
                pass
        except OSError as error:
            raise UsageError(
                f"--model {file.name}={file.path}: cannot be read ({error.strerror}). Give the path of a model file"
            ) from error


RESERVED_FILES = 256  # open in a server beside connections: libraries, model files, sockets of its own


@dataclass(frozen=True)
class QueueOptions:
    """How much may wait, and how long the device waits for company.

    max_views, max_bytes: of all images of one model that have no answer yet, and of their encoded files; more are
    refused, but one image is always let in where nothing waits; ready_views, ready_bytes: decoded ahead of the device,
    all models together; batch_wait: seconds at most for which a view that could be computed waits for others that are
    being decoded.
    """

    max_views: int = 1024
    max_bytes: int = 2**28
    ready_views: int = 512
    ready_bytes: int = 2**27
    batch_wait: float = 0.002


@dataclass(frozen=True)
class ServerLimits:
    """What clients may do; times in seconds.

    image: of each encoded image; max_calls: in flight, of all clients, health and reflection apart; arrival: until the
    message of a call, or the first of a stream, has come; stream_idle_timeout: until the next message of a stream has
    come, while none is in progress; max_connections: open; max_streams: calls in flight on one connection;
    max_metadata: bytes of a call's headers;
    handshake_timeout: until a new connection has said that it speaks HTTP/2; keepalive: without a word from a client
    until it is asked whether it is there; keepalive_timeout: for its answer, else it is cut off; min_ping_interval:
    between a client's own pings, more often is cut off; max_connection_age: until a client has to connect anew, with
    connection_age_grace more for its calls in flight, None for never; max_evaluation_images: of one evaluation, whose
    predictions lie in memory until its report.
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
    """How to serve.

    port: 0 takes a free one; lame_duck: seconds after a signal in which new calls still work while health says
    NOT_SERVING; grace: seconds after that for calls in flight; metrics_port: of Prometheus' metrics over HTTP, None for
    none, 0 takes a free one.
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
