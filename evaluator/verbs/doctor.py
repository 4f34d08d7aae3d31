"""`prelunet doctor`: what this machine can run, and whether it is set up right."""

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from prelunet.evaluator.engine.session import Session
from prelunet.evaluator.errors import CheckFailed
from prelunet.evaluator.serving.memory import memory_of_serving
from prelunet.evaluator.serving.options import ModelFile, ServeOptions
from prelunet.evaluator.terminal import printable, say
from prelunet.evaluator.verbs.doctor_checks import Finding, examine_machine, examine_model, examine_server
from prelunet.evaluator.verbs.options import (
    DeviceOption,
    MaybeModelOption,
    PrecisionOption,
    ThreadsOption,
    placement_asked,
)


def doctor(
    *,
    model: MaybeModelOption = None,
    device: DeviceOption = "auto",
    precision: PrecisionOption = None,
    threads: ThreadsOption = 0,
    server: Annotated[str | None, typer.Option(help="HOST:PORT of a running server, which is asked too.")] = None,
    timeout: Annotated[float, typer.Option(min=0.1, max=600, help="Seconds for each of a server's answers.")] = 5.0,
    host: Annotated[str, typer.Option(help="Address on which a server should listen.")] = ServeOptions.host,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port that should be free for it.")] = ServeOptions.port,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Say what this machine can run and whether it is set up right; with --model and --server, these too.

    Exits 6 when something is wrong, with what to do about it.
    """
    if server is not None:
        from prelunet.evaluator.client.channel import checked_address

        checked_address(server)
    findings = list(examine_machine(host, port))
    if model is not None:
        placement = placement_asked(device, precision, threads, None, None)
        findings.append(examine_model(model, placement, lambda session: _need(model, session)))
    if server is not None:
        findings += examine_server(server, timeout)
    wrong = [finding for finding in findings if finding.state == "wrong"]
    if as_json:
        say(json.dumps({"passed": not wrong, "findings": [finding.to_json() for finding in findings]}))
    else:
        _print(findings)
    if wrong:
        count = f"{len(wrong)} of {len(findings)} findings {'is' if len(wrong) == 1 else 'are'} wrong:"
        if as_json:
            raise CheckFailed("\n".join([count, *map(_line, wrong)]))
        raise CheckFailed(f"{count} {', '.join(finding.name for finding in wrong)}. The table says what to do")


def _need(path: Path, session: Session) -> int:
    return memory_of_serving([session], ServeOptions((ModelFile("model", path),))).total


def _line(finding: Finding) -> str:
    return f"- {finding.name}: {finding.told}. {finding.mend}"


def _print(findings: list[Finding]) -> None:
    table = Table("", "", "", show_header=False)
    for finding in findings:
        mend = f"\n→ {finding.mend}" if finding.mend else ""
        table.add_row(finding.state, finding.name, printable(finding.told + mend, newlines=True))
    Console(markup=False, highlight=False).print(table)
