"""`prelunet doctor`: what this machine can run, and whether it is set up correctly."""

import json
from collections.abc import Sequence
from typing import Annotated

import typer

from ..engine.session import Placement
from ..errors import CheckFailed
from ..rpc.credentials import Credentials
from ..serving.options import ServeOptions
from ..terminal import echo
from .doctor_checks import Finding, check_machine, check_model, check_server
from .options import Only, OptionalModelOption, derive_options


@derive_options
def doctor(
    *,
    model: OptionalModelOption = None,
    placement: Annotated[Placement, Only("device", "precision", "threads")],
    server: Annotated[str | None, typer.Option(help="HOST:PORT or unix:PATH of a running server to check.")] = None,
    timeout: Annotated[
        float, typer.Option(min=0.1, max=600, help="Timeout of each request to the server, in seconds.")
    ] = 5.0,
    credentials: Credentials,
    host: Annotated[str, typer.Option(help="Address that a server would listen on.")] = ServeOptions.host,
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port that should be free for a server.")
    ] = ServeOptions.port,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Check what this machine can run, its setup and a --model; or only a --server.

    Exits 6 if something is wrong, and prints how to fix it.
    """
    if server is not None:
        from ..client.channel import checked_address

        checked_address(server)
    # A client's machine needs none of what a server's does.
    findings = [] if server is not None and model is None else list(check_machine(host, port, placement.device))
    if model is not None:
        findings += check_model(model, placement)
    if server is not None:
        findings += check_server(server, timeout, credentials)
    wrong = [finding for finding in findings if finding.state == "wrong"]
    try:
        _print(findings, passed=not wrong, as_json=as_json)
    finally:  # also if the reader of stdout has closed it
        if wrong:
            raise _failure(wrong, len(findings), as_json=as_json)


def _print(findings: Sequence[Finding], *, passed: bool, as_json: bool) -> None:
    if as_json:
        echo(json.dumps({"passed": passed, "findings": [finding.to_json() for finding in findings]}))
        return
    given = {""}
    for finding in findings:
        echo(f"{finding.state:<6} {finding.name:<15} {finding.message}")
        if finding.fix not in given:
            echo(f"{'':<22} → {finding.fix}")
        given.add(finding.fix)


def _failure(wrong: Sequence[Finding], total: int, *, as_json: bool) -> CheckFailed:
    count = f"{len(wrong)} of {total} findings {'is' if len(wrong) == 1 else 'are'} wrong:"
    if as_json:
        lines = [f"- {finding.name}: {finding.message}. {finding.fix}" for finding in wrong]
        return CheckFailed("\n".join([count, *lines]))
    return CheckFailed(f"{count} {', '.join(finding.name for finding in wrong)}. How to fix this is printed with them")
