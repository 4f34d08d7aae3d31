"""`prelunet token`: create a token for a client of a server."""

import os
from pathlib import Path
from typing import Annotated

import typer

from ..errors import UsageError, from_os_error
from ..rpc.tls import read_small_file
from ..serving.access import create_token, parse_tokens
from ..terminal import echo, report


def token(
    *,
    name: Annotated[str, typer.Argument(help="Name of the token, for the server's log.", metavar="NAME")],
    scope: Annotated[
        list[str],
        typer.Option(help="What it allows: classify, evaluate or admin; repeatable.", metavar="SCOPE"),
    ],
    rate: Annotated[
        float | None, typer.Option(min=0.001, max=1e6, help="Calls per second.", show_default="no limit")
    ] = None,
    share: Annotated[
        float | None,
        typer.Option(min=0.001, max=1, help="Part of each model's queue that it may use.", show_default="no limit"),
    ] = None,
    token_file: Annotated[
        Path | None,
        typer.Option(
            help="The server's token file: append the token's lines, which have only its hash.",
            metavar="FILE",
            show_default="print them",
        ),
    ] = None,
    secret_file: Annotated[
        Path | None,
        typer.Option(
            help="File to create for the client, with the token itself.", metavar="FILE", show_default="print it once"
        ),
    ] = None,
) -> None:
    """Create a token for a client of a server.

    The server's file (`prelunet serve --token-file`) has only a hash of it. A running server reads the file again.
    """
    secret, lines = create_token(name, scope, rate=rate, share=share)
    if token_file is not None and token_file.exists():
        content, lines = read_small_file(token_file), f"\n{lines}"
        if f"[{name}]".encode() in content.split():
            raise UsageError(f"{token_file} has a token '{name}' already. Choose another name, or remove it first")
        parse_tokens(token_file, content + lines.encode())
    if secret_file is not None:
        _write(secret_file, f"{secret}\n", os.O_EXCL)
    if token_file is not None:
        _write(token_file, lines, os.O_APPEND)
        report(f"{token_file}: added {name}, with the hash of the token")
    else:
        echo(lines, end="")
    if secret_file is not None:
        report(f"{secret_file}: the token, for the client")
    else:
        echo(f"The token, for the client; it is shown only now:\n{secret}", err=True)  # must not be lost silently


def _write(path: Path, text: str, mode: int) -> None:
    """Write to a file; a new one is readable only by its owner. mode: flags of `os.open`."""
    try:
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | mode, 0o600), "w") as file:
            file.write(text)
    except OSError as error:
        raise from_os_error(error) from error
