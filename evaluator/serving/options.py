"""The options of a server. Fields with a `CliOption` are options of `prelunet serve`; see also docs/serving.md."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from ..cli_option import option, split_commas
from ..engine.session import Placement
from ..errors import UsageError
from ..files import open_regular
from ..imaging.limits import PILLOW_MAX_PIXELS, DecodeLimits
from ..machine import cores
from ..rpc.status import MAX_MESSAGE_BYTES
from .proxies import TrustedProxies
from .scheduling.shared_cores import SharedCores

MODEL_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_DAY = 86_400.0  # seconds


@dataclass(frozen=True)
class ModelFile:
    """One model to serve: its name in requests, its file, and its version, which is above 0."""

    name: str
    path: Path
    version: int = 1


def parse_models(options: Sequence[str] | None) -> tuple[ModelFile, ...]:
    """Parse `NAME=MODEL.onnx`, or `NAME.onnx`. Raises UsageError for an invalid option or a repeated name."""
    files = []
    for text in options or ():
        name, separator, path = text.partition("=")
        if not separator:  # an unnamed file
            name, path = Path(text).stem, text
        if not path or not MODEL_NAME.fullmatch(name):
            raise UsageError(
                f"--model {text}: give a name and a file, as in --model flowers=flowers.onnx. "
                "A name has up to 100 letters, digits, '.', '_' or '-' and starts with a letter or digit"
            )
        files.append(ModelFile(name, Path(path)))
    names = [file.name for file in files]
    if repeated := next((name for name in names if names.count(name) > 1), None):
        raise UsageError(f"--model {repeated}=…: the name is given twice; give each model its own name")
    return tuple(files)


def require_files(files: Iterable[ModelFile]) -> None:
    """Raise UsageError for a file that cannot be read; called for all files before the first is loaded."""
    for file in files:
        try:
            open_regular(file.path).close()
        except OSError as error:
            raise UsageError(
                f"--model {file.name}={file.path}: cannot be read ({error.strerror}). Give the path of a model file"
            ) from error


@dataclass(frozen=True)
class ServedImageLimits(DecodeLimits):
    """The largest image that a server accepts: photos of all phones, but nothing that takes seconds to decode."""

    max_pixels: int = option(
        16_000_000,
        "Maximum size of a decoded image, in pixels (height x width); a baseline JPEG, which takes far less time "
        "and memory, may have three times as many.",
        flag="max-image-pixels",
        min=1,
        max=PILLOW_MAX_PIXELS // 3,
    )
    baseline_factor: int = 3


RESERVED_FILES = 256  # open files of a server besides connections: libraries, model files, its own sockets


@dataclass(frozen=True)
class QueueOptions:
    """Limits on unanswered images, and how long a batch waits to fill.

    ready_views, ready_bytes: decoded ahead of the device, over all models; decode_threads: beside a GPU, for images
    that are easy to decode; cores: limit how many threads compute; batch_wait: in seconds; turn_cost, turn_work: the
    thread of a CPU takes several images at once whose decoding costs at most this much together, in view pixels (6 ms),
    and whose views take at most so many multiply-adds (some 10 ms): a newcomer should not wait behind more.
    """

    HELP_GROUP: ClassVar[str] = "Queue"
    max_views: int = option(
        1024,
        "Limit of unanswered views per model: calls beyond it are refused, and streams wait. An image alone is "
        "always accepted; clients below their share may exceed the limit by a quarter.",
        flag="queue-views",
        min=1,
    )
    queue_bytes: int | None = option(
        None,
        "The same limit for the encoded bytes of unanswered images per model.",
        min=1,
        default="268435456, or less to fit --memory-limit",
    )
    max_view_pixels: int | None = option(
        None,
        "Maximum size of a view, in pixels; all scales of an image together may have three times as many.",
        min=1,
        default="the largest of the model's own protocols",
    )
    ready_views: int = 512
    ready_bytes: int = 2**27
    decode_threads: int = field(default_factory=cores)
    decode_processes: int = option(
        cores() + 1,
        "Processes that decode large images, and all but plain JPEG and PNG; a client may take all but one.",
        min=2,
        max=1000,
        default="one more than cores",
    )
    cores: SharedCores = field(default_factory=SharedCores, compare=False)
    turn_cost: int = 2_000_000
    turn_work: int = 2 * 10**8
    batch_wait: float = option(
        0.002, "Milliseconds that a view may wait for others still being decoded.", min=0, max=1000, units=1000
    )

    @property
    def max_bytes(self) -> int:
        """Return the limit of encoded bytes."""
        return 2**28 if self.queue_bytes is None else self.queue_bytes


@dataclass(frozen=True)
class ServerLimits:
    """Limits on clients; times in seconds.

    unread_bytes: of a call, that gRPC takes before the server reads them; message_timeout: to receive the message of a
    call, or the first of a stream; max_metadata: bytes of a call's headers; keepalive_timeout: to answer a ping, or the
    connection is closed; min_ping_interval: between a client's own pings, or the connection is closed;
    connection_age_grace: for calls in flight on a connection that reached its maximum age; max_evaluation_images: of
    one evaluation, whose predictions stay in memory until its report.
    """

    HELP_GROUP: ClassVar[str] = "Limits on clients"
    image: ServedImageLimits = field(default_factory=ServedImageLimits)
    proxies: TrustedProxies = field(default_factory=TrustedProxies)
    max_calls: int = option(
        2048,
        "Maximum number of calls in flight, over all clients, not counting health checks and reflection; more are "
        "refused, but addresses below their share may exceed the limit by a quarter.",
        min=1,
    )
    max_connections: int = option(
        4096, "Maximum number of connections to each port; more are closed at once.", min=1, max=1_000_000
    )
    max_streams: int = option(
        128, "Maximum number of calls in flight per connection; the client holds back more.", min=1, max=100_000
    )
    arriving_bytes: int | None = option(
        None,
        "Bytes for messages that are arriving or being decompressed; room for at least one. If the process exceeds "
        "the memory in its start line, the client with the most unfinished messages may keep this much.",
        min=1,
        default="268435456, or less to fit --memory-limit",
    )
    handshake_timeout: float = option(
        20.0, "Time for a new connection to start speaking HTTP/2, in seconds.", min=0.1, max=3600
    )
    stream_idle_timeout: float = option(
        300.0,
        "Time after which an idle stream (no message, no request in progress) is ended, in seconds.",
        min=0.1,
        max=_DAY,
    )
    keepalive: float = option(60.0, "Idle time after which a client is pinged, in seconds.", min=1, max=_DAY)
    max_connection_age: float | None = option(
        None,
        "Maximum age of a connection, in seconds; the client then reconnects, which lets load balancers move it.",
        min=1,
        max=_DAY,
        default="no limit",
    )
    unread_bytes: int = 2**16
    message_timeout: float = 60.0
    max_metadata: int = 2**14
    keepalive_timeout: float = 20.0
    min_ping_interval: float = 5.0
    connection_age_grace: float = 30.0
    max_evaluation_images: int = 250_000

    @property
    def max_message_bytes(self) -> int:
        """Return the limit of a message: twice the largest image, so that a slightly larger one gets our error."""
        return max(MAX_MESSAGE_BYTES, 2 * self.image.max_bytes)

    @property
    def max_arriving_bytes(self) -> int:
        """Return the limit of unfinished messages: one of them has room always."""
        return max(2**28 if self.arriving_bytes is None else self.arriving_bytes, self.max_message_bytes)


@dataclass(frozen=True)
class AccessOptions:
    """Who may connect and call: files for TLS, and of tokens. All are read again when they change."""

    HELP_GROUP: ClassVar[str] = "TLS and tokens"
    tls_cert: Path | None = option(None, "Certificate (PEM), with those of intermediate authorities.", default="no TLS")
    tls_key: Path | None = option(None, "Private key of the certificate (PEM), not encrypted.")
    tls_client_ca: Path | None = option(
        None, "Certificate authorities (PEM): clients must have a certificate of one of them."
    )
    token_file: Path | None = option(
        None, "Tokens, a file of `prelunet token`: calls without one are refused, except health checks."
    )
    insecure: bool = option(
        False, "Allow connections without TLS on other addresses than loopback; has no effect with TLS."
    )

    def __post_init__(self) -> None:
        if (self.tls_cert is None) != (self.tls_key is None):
            raise UsageError("--tls-cert and --tls-key belong together: give both, or neither to serve without TLS")
        if self.tls_client_ca is not None and self.tls_cert is None:
            raise UsageError("--tls-client-ca requires TLS: give --tls-cert and --tls-key, too")

    @property
    def tls_files(self) -> tuple[Path, ...]:
        """Return the files for TLS; none without TLS."""
        return tuple(file for file in (self.tls_cert, self.tls_key, self.tls_client_ca) if file is not None)


def parse_host_names(options: Sequence[str] | None) -> tuple[str, ...]:
    """Parse `NAME[,NAME…]` options. Raises UsageError for what no `Host` header has as its name."""
    names = tuple(split_commas(options))
    if wrong := [name for name in names if not re.fullmatch(r"(\*\.)?[A-Za-z0-9._-]+", name)]:
        raise UsageError(
            f"--http-host-names: '{wrong[0]}' is not a host name. Give names without scheme and port, such as "
            "flowers.example.org, or *.example.org for all below example.org"
        )
    return names


@dataclass(frozen=True)
class HttpOptions:
    """The second port, for HTTP."""

    HELP_GROUP: ClassVar[str] = "HTTP"
    port: int | None = option(
        None, "Port for HTTP, on --host; 0 picks a free port.", flag="http-port", min=0, max=65535, default="no HTTP"
    )
    host_names: tuple[str, ...] = option(
        (),
        "Names of this server that HTTP requests may have in their Host header, besides localhost and IP "
        "addresses, or *.example.org for all names below example.org; repeatable.",
        flag="http-host-names",
        metavar="NAME[,NAME]",
        kind=list[str] | None,
        parse=parse_host_names,
    )
    unix_socket: Path | None = option(
        None, "Unix socket for HTTP, in place of a port.", flag="http-unix-socket", default="none"
    )
    keep_alive: float = option(
        75.0,
        "Time after which an idle HTTP connection is closed, in seconds. Give more than a proxy's own, so that the "
        "proxy never sends a request on a connection that is just being closed.",
        flag="http-keep-alive",
        min=1,
        max=_DAY,
    )
    reports: Path | None = option(
        None, "Folder with runs and comparisons, whose reports the live page lists.", default="none"
    )
    examples: Path | None = option(None, "Folder of images that the live page offers to try.", default="none")

    def __post_init__(self) -> None:
        if self.port is not None and self.unix_socket is not None:
            raise UsageError("--http-port and --http-unix-socket exclude each other: give one of them")
        for name, folder in (("reports", self.reports), ("examples", self.examples)):
            if folder is not None and not self.enabled:
                raise UsageError(f"--{name} requires HTTP: give --http-port or --http-unix-socket, too")
        if self.reports is not None and not self.reports.is_dir():
            raise UsageError(f"--reports {self.reports}: not a folder. Give one with runs, such as runs/")

    @property
    def enabled(self) -> bool:
        return self.port is not None or self.unix_socket is not None


@dataclass(frozen=True)
class ServeOptions:
    """All options of a server."""

    models: tuple[ModelFile, ...] = option(
        (),
        "Model file and the name it is served under, by default the file's; repeatable.",
        flag="model",
        metavar="[NAME=]MODEL.onnx",
        kind=list[str] | None,
        parse=parse_models,
    )
    models_folder: Path | None = option(
        None,
        "Folder of models, NAME/VERSION/model.onnx: the newest version of each is served, and new ones replace it "
        "while the server runs.",
        flag="models",
        metavar="DIR",
        default="none",
    )
    strict: bool = option(
        False, "Exit at the start unless the newest version of each model in that folder can be loaded."
    )
    host: str = option("127.0.0.1", "Address to listen on; 0.0.0.0 listens on all interfaces.")
    port: int = option(50051, "Port to listen on; 0 picks a free port.", min=0, max=65535)
    unix_socket: Path | None = option(None, "Unix socket to listen on, instead of --host and --port.", default="none")
    processes: int = option(
        0,
        "Processes that answer calls, each with the models in memory; new connections are shared out among them. "
        "0 takes one for every four cores, at most eight, and only one for models above 128 MB, GPUs, other devices "
        "than cpu and Unix sockets.",
        min=0,
        max=64,
    )
    http: HttpOptions = field(default_factory=HttpOptions)
    access: AccessOptions = field(default_factory=AccessOptions)
    placement: Placement = field(default_factory=Placement)
    queue: QueueOptions = field(default_factory=QueueOptions)
    limits: ServerLimits = field(default_factory=ServerLimits)
    lame_duck: float = option(
        5.0,
        "Seconds after SIGTERM or Ctrl-C during which new calls are still accepted, while health checks report "
        "NOT_SERVING.",
        min=0,
        max=3600,
    )
    grace: float = option(
        30.0,
        "Seconds after the lame-duck period that calls in flight have to finish, while new ones are refused; then "
        "they are cut off.",
        min=0,
        max=_DAY,
    )
    metrics_port: int | None = option(
        None,
        "Port for Prometheus metrics over HTTP, on --host; 0 picks a free port.",
        min=0,
        max=65535,
        default="no metrics",
    )
    tracing: bool = option(
        False,
        "Export traces with OpenTelemetry over OTLP/gRPC, as its variables OTEL_… say; requires the extra `otel`.",
    )
    log_sampling: bool = option(
        False,
        "Log at most one answered call per second for each client and method, with the number of calls that the "
        "line stands for. Calls that fail in the same way are always logged like this.",
    )

    def __post_init__(self) -> None:
        object.__setattr__(self, "host", self.host.strip("[]"))  # as an IPv6 address stands before a port
        if not self.models and self.models_folder is None:
            raise UsageError("no model to serve; give at least one: --model NAME=MODEL.onnx, or --models DIR")
