"""`prelunet serve`: serve models over gRPC."""

import asyncio
import contextlib
import logging
import os
import sys
from pathlib import Path
from typing import Annotated, Literal, TextIO

import typer

from prelunet.evaluator.errors import error_status
from prelunet.evaluator.imaging.limits import DecodeLimits
from prelunet.evaluator.serving.lifecycle import serve as serve_until_stopped
from prelunet.evaluator.serving.observability.logs import configure_logging, flush
from prelunet.evaluator.serving.options import QueueOptions, ServeOptions, ServerLimits, parse_models, require_files
from prelunet.evaluator.terminal import echo
from prelunet.evaluator.verbs.config_file import read_config
from prelunet.evaluator.verbs.config_file import show_config as as_config
from prelunet.evaluator.verbs.options import (
    DeviceOption,
    GpuMemoryOption,
    MemoryOption,
    PrecisionOption,
    ThreadsOption,
    placement_from_options,
)

_DAY = 86_400.0  # seconds


def serve(
    context: typer.Context,
    model: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=MODEL.onnx", help="Model file and the name it is served under; at least one, repeatable."
        ),
    ] = None,
    host: Annotated[
        str, typer.Option(help="Address to listen on; 0.0.0.0 listens on all interfaces.")
    ] = ServeOptions.host,
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port to listen on; 0 picks a free port.")
    ] = ServeOptions.port,
    device: DeviceOption = "auto",
    precision: PrecisionOption = None,
    threads: ThreadsOption = 0,
    memory_limit: MemoryOption = None,
    gpu_memory_limit: GpuMemoryOption = None,
    queue_views: Annotated[
        int,
        typer.Option(
            min=1,
            help="Limit of unanswered views per model: calls beyond it are refused, and streams wait. An image alone "
            "is always accepted; clients below their share may exceed the limit by a quarter.",
        ),
    ] = QueueOptions.max_views,
    queue_bytes: Annotated[
        int,
        typer.Option(min=1, help="The same limit for the encoded bytes of unanswered images per model."),
    ] = QueueOptions.max_bytes,
    batch_wait: Annotated[
        float,
        typer.Option(min=0, max=1000, help="Milliseconds that a view may wait for others still being decoded."),
    ] = 1000 * QueueOptions.batch_wait,
    max_image_bytes: Annotated[
        int, typer.Option(min=1, max=2**29, help="Maximum size of an encoded image, in bytes.")
    ] = DecodeLimits.max_bytes,
    max_image_pixels: Annotated[
        int, typer.Option(min=1, help="Maximum size of a decoded image, in pixels (height x width).")
    ] = DecodeLimits.max_pixels,
    max_calls: Annotated[
        int,
        typer.Option(
            min=1,
            help="Maximum number of calls in flight, over all clients, not counting health checks and reflection; more "
            "are refused.",
        ),
    ] = ServerLimits.max_calls,
    max_connections: Annotated[
        int, typer.Option(min=1, max=1_000_000, help="Maximum number of open connections; more are closed at once.")
    ] = ServerLimits.max_connections,
    max_streams: Annotated[
        int,
        typer.Option(
            min=1, max=100_000, help="Maximum number of calls in flight per connection; the client holds back more."
        ),
    ] = ServerLimits.max_streams,
    handshake_timeout: Annotated[
        float, typer.Option(min=0.1, max=3600, help="Time for a new connection to start speaking HTTP/2, in seconds.")
    ] = ServerLimits.handshake_timeout,
    stream_idle_timeout: Annotated[
        float,
        typer.Option(
            min=0.1,
            max=_DAY,
            help="Time after which an idle stream (no message, no request in progress) is ended, in seconds.",
        ),
    ] = ServerLimits.stream_idle_timeout,
    keepalive: Annotated[
        float, typer.Option(min=1, max=_DAY, help="Idle time after which a client is pinged, in seconds.")
    ] = ServerLimits.keepalive,
    max_connection_age: Annotated[
        float | None,
        typer.Option(
            min=1,
            max=_DAY,
            help="Maximum age of a connection, in seconds; the client then reconnects, which lets load balancers move "
            "it.",
            show_default="no limit",
        ),
    ] = None,
    lame_duck: Annotated[
        float,
        typer.Option(
            min=0,
            max=3600,
            help="Seconds after SIGTERM or Ctrl-C during which new calls are still accepted, while health checks "
            "report NOT_SERVING.",
        ),
    ] = ServeOptions.lame_duck,
    grace: Annotated[
        float,
        typer.Option(
            min=0,
            max=_DAY,
            help="Seconds after the lame-duck period that calls in flight have to finish, while new ones are refused; "
            "then they are cut off.",
        ),
    ] = ServeOptions.grace,
    metrics_port: Annotated[
        int | None,
        typer.Option(
            min=0,
            max=65535,
            help="Port for Prometheus metrics over HTTP, on --host; 0 picks a free port.",
            show_default="no metrics",
        ),
    ] = None,
    log_format: Annotated[Literal["text", "json"], typer.Option(help="Format of the log lines on stderr.")] = "text",
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"], typer.Option(help="Minimum level of the log lines.")
    ] = "info",
    config: Annotated[
        Path | None,
        typer.Option(
            is_eager=True, callback=read_config, metavar="FILE", help="TOML file of options, e.g. `max-calls = 100`."
        ),
    ] = None,
    show_config: Annotated[
        bool, typer.Option("--show-config", help="Print the options in the format of the config file and exit.")
    ] = False,
) -> None:
    """Serve models over gRPC until SIGTERM or Ctrl-C.

    The first line of output shows the address, the models and their devices; the server then accepts calls. An option
    that is not given is taken from the environment, then from the --config file (docs/serving.md).

    Exits 0 after a signal, 2 for an invalid option or a missing file, 3 for a file that is not a model file, 5 if the
    port or the device is unavailable or the device is lost.
    """
    del config  # handled by its callback
    if show_config:
        echo(as_config(context))
        return
    options = ServeOptions(
        models=parse_models(model or ()),
        host=host,
        port=port,
        placement=placement_from_options(device, precision, threads, memory_limit, gpu_memory_limit),
        queue=QueueOptions(max_views=queue_views, max_bytes=queue_bytes, batch_wait=batch_wait / 1000),
        limits=ServerLimits(
            image=DecodeLimits(max_image_bytes, max_image_pixels),
            max_calls=max_calls,
            max_connections=max_connections,
            max_streams=max_streams,
            handshake_timeout=handshake_timeout,
            stream_idle_timeout=stream_idle_timeout,
            keepalive=keepalive,
            max_connection_age=max_connection_age,
        ),
        lame_duck=lame_duck,
        grace=grace,
        metrics_port=metrics_port,
    )
    configure_logging(log_format, log_level.upper())
    _serve(options)


def _serve(options: ServeOptions) -> None:
    require_files(options.models)
    try:
        ended = asyncio.run(serve_until_stopped(options, _try_echo))
    finally:
        flush()  # a thread writes the log; all of it should precede the last message
    if ended.unfinished:
        _try_echo(f"stopped; calls cut off: {ended.unfinished}")
    elif ended.lost is None:
        _try_echo("stopped; no call was lost")
    if ended.stuck:  # a thread hangs in the device; exiting normally would wait for it forever
        code = error_status(ended.lost).exit_code if ended.lost is not None else 0
        _try_echo(f"prelunet: {ended.lost or 'a model did not stop computing; it was abandoned'}", err=True)
        os._exit(code)
    if ended.lost is not None:
        raise ended.lost


def _try_echo(text: str, *, err: bool = False) -> None:
    """Print a message if the stream still works; otherwise the server continues and its exit code stays the same."""
    try:
        echo(text, err=err)
        (sys.stderr if err else sys.stdout).flush()
    except (OSError, AttributeError) as error:  # a closed pipe, a full disk; no such stream at all
        logging.getLogger(__name__).warning("%s (could not be written: %s)", text, error)
        _discard_buffer(sys.stderr if err else sys.stdout)


def _discard_buffer(stream: TextIO | None) -> None:
    """Discard what is left in a stream's buffer: at exit Python would fail on it and change the exit code."""
    if stream is not None:
        with contextlib.suppress(OSError):  # the stream has no descriptor
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
