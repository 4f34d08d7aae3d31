"""`prelunet serve`: serve models over gRPC and HTTP."""

import asyncio
import contextlib
import logging
import os
import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from ..errors import error_status
from ..serving.lifecycle import serve as serve_until_stopped
from ..serving.observability.logs import configure_logging, flush
from ..serving.options import ServeOptions, require_files
from ..serving.processes.parent import Parent, choose_processes
from ..terminal import echo
from .options import derive_options, read_config


@derive_options
def serve(
    *,
    options: ServeOptions,
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
    """Serve models over gRPC, and HTTP with --http-port or --http-unix-socket, until SIGTERM or Ctrl-C.

    The first line of output shows the address, the models and their devices; the server then accepts calls. An option
    that is not given is taken from the environment, then from the --config file (docs/serving.md).

    Exits 0 after a signal, 2 for an invalid option or a missing file, 3 for a file that is not a model file, 5 if the
    port or the device is unavailable or the device is lost.
    """
    del config, show_config  # handled by `ConfigurableCommand`
    configure_logging(log_format, log_level.upper())
    require_files(options.models)
    try:
        if (count := choose_processes(options)) > 1:
            parent = Parent(options, count, log_format, log_level.upper())
            ended = asyncio.run(parent.serve(_try_echo))
        else:
            ended = asyncio.run(serve_until_stopped(options, _try_echo))
    finally:
        flush()  # a thread writes the log; all of it should precede the last message
    if ended.unfinished:
        _try_echo(f"stopped; calls cut off: {ended.unfinished}")
    elif ended.lost is None:
        _try_echo("stopped; no call was lost")
    if ended.stuck:  # a thread hangs; exiting normally would wait for it, or break it off inside a library
        code = error_status(ended.lost).exit_code if ended.lost is not None else 0
        abandoned = "a load, a device or a file system did not answer in time; it was abandoned"
        _try_echo(f"prelunet: {ended.lost or abandoned}", err=True)
        os._exit(code)
    if ended.lost is not None:
        raise ended.lost


def _try_echo(text: str, *, err: bool = False) -> None:
    """Print a message if the stream still works; otherwise the server continues and its exit code stays the same."""
    stream = sys.stderr if err else sys.stdout
    try:
        echo(text, err=err)
        stream.flush()
    except (OSError, AttributeError) as error:  # a closed pipe, a full disk; no such stream at all
        logging.getLogger(__name__).warning("%s (could not be written: %s)", text, error)
        with contextlib.suppress(OSError, AttributeError):  # no descriptor; no such stream
            # At exit Python would fail on what is left in the buffer, and change the exit code.
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
