"""The verb `prelunet serve`."""

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
            metavar="NAME=MODEL.onnx", help="A model and the name it is served under; at least one, repeatable."
        ),
    ] = None,
    host: Annotated[
        str, typer.Option(help="Address to listen on; 0.0.0.0 is every one of this machine.")
    ] = ServeOptions.host,
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port to listen on; 0 takes a free one.")
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
            help="Views of images without an answer, for each model; more are refused, but one image alone is not.",
        ),
    ] = QueueOptions.max_views,
    queue_bytes: Annotated[
        int, typer.Option(min=1, help="Bytes of such images as they came, for each model; more are refused.")
    ] = QueueOptions.max_bytes,
    batch_wait: Annotated[
        float,
        typer.Option(min=0, max=1000, help="Milliseconds for which a view may wait for others that are being decoded."),
    ] = 1000 * QueueOptions.batch_wait,
    max_image_bytes: Annotated[
        int, typer.Option(min=1, max=2**29, help="Largest encoded image, in bytes.")
    ] = DecodeLimits.max_bytes,
    max_image_pixels: Annotated[
        int, typer.Option(min=1, help="Largest decoded image, in pixels: height times width.")
    ] = DecodeLimits.max_pixels,
    max_calls: Annotated[
        int, typer.Option(min=1, help="Calls in flight, of all clients; more are refused.")
    ] = ServerLimits.max_calls,
    max_connections: Annotated[
        int, typer.Option(min=1, max=1_000_000, help="Open connections; more are closed at once.")
    ] = ServerLimits.max_connections,
    max_streams: Annotated[
        int, typer.Option(min=1, max=100_000, help="Calls in flight on one connection; a client keeps more back.")
    ] = ServerLimits.max_streams,
    handshake_timeout: Annotated[
        float, typer.Option(min=0.1, max=3600, help="Seconds in which a connection has to begin to speak HTTP/2.")
    ] = ServerLimits.handshake_timeout,
    stream_idle_timeout: Annotated[
        float,
        typer.Option(
            min=0.1, max=_DAY, help="Seconds after which a stream ends that sends nothing, with no request in progress."
        ),
    ] = ServerLimits.stream_idle_timeout,
    keepalive: Annotated[
        float, typer.Option(min=1, max=_DAY, help="Seconds of silence until a client is asked whether it is there.")
    ] = ServerLimits.keepalive,
    max_connection_age: Annotated[
        float | None,
        typer.Option(
            min=1,
            max=_DAY,
            help="Seconds until a client has to connect anew, so that balancers of connections can move it. Default: "
            "never.",
        ),
    ] = None,
    lame_duck: Annotated[
        float,
        typer.Option(min=0, max=3600, help="Seconds after SIGTERM in which new calls still work; health says no."),
    ] = ServeOptions.lame_duck,
    grace: Annotated[
        float, typer.Option(min=0, max=_DAY, help="Seconds after that which calls in flight have.")
    ] = ServeOptions.grace,
    metrics_port: Annotated[
        int | None,
        typer.Option(
            min=0,
            max=65535,
            help="Port of Prometheus' metrics over HTTP, on --host; 0 takes a free one. Default: none.",
        ),
    ] = None,
    log_format: Annotated[Literal["text", "json"], typer.Option(help="How log lines are written to stderr.")] = "text",
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"], typer.Option(help="From which level on lines are written.")
    ] = "info",
    config: Annotated[
        Path | None,
        typer.Option(
            is_eager=True, callback=read_config, metavar="FILE", help="TOML file of options, as `max-calls = 100`."
        ),
    ] = None,
    show_config: Annotated[
        bool, typer.Option("--show-config", help="Print the options as such a file and end.")
    ] = False,
) -> None:
    """Serve models over gRPC until SIGTERM or Ctrl-C.

    The first line of output says the address, the models and what runs them; calls are answered from then on. An
    option that is not given is taken from the environment, then from the file of --config (docs/serving.md).

    Exits 0 when a signal stopped it, 2 for an option or a file that is not there, 3 for a file that is no model file,
    5 where the port or the device cannot be had, or the device is lost.
    """
    del config  # its callback has done the work
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
        flush()  # a thread writes the log; all of it should stand before the last words
    if ended.unfinished:
        _try_echo(f"stopped; calls cut off: {ended.unfinished}")
    elif ended.lost is None:
        _try_echo("stopped; no call was lost")
    if ended.stuck:  # a thread that hangs in the device would be waited for, for ever
        code = error_status(ended.lost).exit_code if ended.lost is not None else 0
        _try_echo(f"prelunet: {ended.lost or 'a model did not stop computing; it is left behind'}", err=True)
        os._exit(code)
    if ended.lost is not None:
        raise ended.lost


def _try_echo(text: str, *, err: bool = False) -> None:
    """Say something, unless nobody can read it any more: a server goes on, and its exit code stays what it is."""
    try:
        echo(text, err=err)
        (sys.stderr if err else sys.stdout).flush()
    except (OSError, AttributeError) as error:  # a pipe that was closed, a full disk; no such stream at all
        logging.getLogger(__name__).warning("%s (could not be written: %s)", text, error)
        _discard_buffer(sys.stderr if err else sys.stdout)


def _discard_buffer(stream: TextIO | None) -> None:
    """Let what is left in a stream's buffer go nowhere: at the end Python would fail on it, with its own exit code."""
    if stream is not None:
        with contextlib.suppress(OSError):  # it has no descriptor
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
