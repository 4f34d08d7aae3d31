"""`prelunet runs`: all runs below a folder in one table."""

import os
from collections.abc import Iterator, Sequence
from itertools import groupby, islice
from pathlib import Path
from typing import Annotated
from urllib.parse import quote

import typer

from ..errors import UsageError
from ..files import require_writable, write_atomically
from ..reporting.html import json_bytes
from ..reporting.runs import Row, cells, group_of, read_runs, render_runs, runs_csv
from ..terminal import echo, report, table_lines

_HEADERS = ("model", "run", "top-1 error, %", "top-5 error, %", "images/s", "computed by", "date (UTC)")
_NUMBERS = _HEADERS[2:5]


def runs(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder with run folders, at any depth.")],
    html: Annotated[Path | None, typer.Option(help="HTML file for the table, which a click on a header sorts.")] = None,
    csv: Annotated[
        Path | None, typer.Option(help="CSV file for the table: plain numbers, one row for each run.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the rows of the CSV file as JSON.")] = False,
) -> None:
    """Show all runs below a folder in one table: lowest top-1 error first within each dataset and protocol."""
    if not folder.is_dir():
        raise UsageError(f"{folder}: not a folder. Give one with runs, such as runs/")
    for path in filter(None, (html, csv)):
        require_writable(path)
    rows = list(read_runs(folder).values())
    if not rows:
        raise UsageError(
            f"{folder}: no run in this folder or below. Create one: prelunet evaluate NET DATA -o {folder}/NAME"
        )
    if html is not None:
        top, place = folder.resolve(), html.resolve().parent

        def link(page: str) -> str:
            return quote(os.fsencode(os.path.relpath(top / page, place)))

        write_atomically(html, render_runs(rows, top.name, link))
    if csv is not None:
        write_atomically(csv, runs_csv(rows))
    echo(json_bytes({"runs": rows}).decode("ascii") if as_json else "".join(map("{}\n".format, _lines(rows))), end="")
    for row in rows:
        if row["status"] == "damaged":
            report(f"left out: {row['problem']}")


def _lines(rows: Sequence[Row]) -> Iterator[str]:
    """Yield the lines of the table: a heading for each dataset and protocol, and a line for each run."""
    shown = [(row, cells(row)) for row in rows if row["status"] != "damaged"]
    header, *lines = table_lines([_HEADERS, *(_line(row, texts) for row, texts in shown)], _NUMBERS)
    rest = iter(lines)
    yield header
    for _, group in groupby(shown, lambda each: group_of(each[0])):
        (row, texts), *_ = of_group = list(group)
        yield from ("", f"{texts['dataset']}, {row['protocol']}:", *islice(rest, len(of_group)))


def _line(row: Row, texts: dict[str, str]) -> list[str]:
    errors = [texts["top1"], texts["top5"]] if texts["top1"] else [texts["state"], ""]
    computed = ", ".join(filter(None, (texts["computed"], texts["versions"])))
    return [f"{row['model']} ({row['architecture']})", row["run"], *errors, texts["speed"], computed, texts["date"]]
