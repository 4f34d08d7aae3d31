"""What can be set for a server; `prelunet serve --help` and docs/serving.md tell it to people."""

from dataclasses import dataclass, field

from prelunet.evaluator.engine.session import Placement
from prelunet.evaluator.imaging.decode import DecodeLimits
from prelunet.evaluator.serving.files import ModelFile

OTHER_FILES = 256  # open in a server beside connections: libraries, model files, sockets of its own


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
class Limits:
    """What clients may do; times in seconds.

    image: of each encoded image; max_calls: in flight, of all clients, health and reflection apart; arrival: until the
    message of a call has come; max_connections: open; max_streams: calls in flight on one connection; max_metadata:
    bytes of a call's headers;
    handshake_timeout: until a new connection has said that it speaks HTTP/2; keepalive: without a word from a client
    until it is asked whether it is there; keepalive_timeout: for its answer, else it is cut off; min_ping_interval:
    between a client's own pings, more often is cut off; max_connection_age: until a client has to connect anew, with
    connection_age_grace more for its calls in flight, None for never; max_evaluation_images: of one evaluation, whose
    predictions lie in memory until its report.
    """

    image: DecodeLimits = field(default_factory=DecodeLimits)
    max_calls: int = 2048
    arrival: float = 60.0
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
    limits: Limits = field(default_factory=Limits)
    lame_duck: float = 5.0
    grace: float = 30.0
    metrics_port: int | None = None
