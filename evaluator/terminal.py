"""Terminal output: escaping of untrusted text, which must not control the terminal or forge lines; tables; progress."""

import re
import sys
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from datetime import timedelta
from typing import Protocol

# C0 and C1 controls, line and paragraph separators, bidirectional controls, lone surrogates.
_UNPRINTABLE = re.compile("[\0-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
_UNPRINTABLE_BUT_NEWLINES = re.compile(_UNPRINTABLE.pattern.replace("\0-\x1f", "\0-\x09\x0b-\x1f"))


def escape_unprintable(text: str, *, newlines: bool = False) -> str:
    r"""Escape the characters that control a terminal: `\x1b`, `\u202e`, `\udcff`.

    newlines: keep newlines, for our own multi-line text.
    """
    return (_UNPRINTABLE_BUT_NEWLINES if newlines else _UNPRINTABLE).sub(_escaped, text)


def echo(text: str, *, err: bool = False, end: str = "\n") -> None:
    """Print a text after `escape_unprintable`, keeping newlines. err: print to stderr."""
    import typer  # here, because libraries use `escape_unprintable` without typer

    typer.echo(escape_unprintable(text, newlines=True) + end, err=err, nl=False)


def report(text: str) -> None:
    """Print a message to stderr, so that stdout holds only the result. Work goes on if nobody can read it."""
    with suppress(OSError):
        echo(text, err=True)


def table_lines(rows: Sequence[Sequence[str]], right_aligned: Collection[str]) -> list[str]:
    """Return the lines of a table. The first row holds the headers; right_aligned: those of numbers."""
    headers, widths = rows[0], [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if header in right_aligned else cell.ljust(width)
            for cell, header, width in zip(row, headers, widths, strict=True)
        ).rstrip()
        for row in rows
    ]


def _escaped(match: re.Match[str]) -> str:
    code = ord(match[0])
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"


# Progress of long work on stderr: rate and remaining time; plain lines if stderr is not a terminal.

LINE_INTERVAL = 10.0  # seconds between two plain lines
RATE_WINDOW = 600.0  # seconds over which the rate is averaged, if these have no more than a thousand steps


class Advance(Protocol):
    """Report that `count` more units are done; `note` is shown beside them, e.g. `loss 0.31`."""

    def __call__(self, count: int = 1, note: str = "") -> None: ...


@contextmanager
def progress(what: str, total: int, unit: str, *, done: int = 0) -> Iterator[Advance]:
    """Show the progress of `total` units while the block runs.

    done: units that an earlier, interrupted call finished. They do not count for the rate, which is a recent one:
    images differ in size along a dataset, and workers come and go.
    """
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    # No markup: a path may contain brackets.
    texts = [TextColumn(text, markup=False) for text in ("{task.description}", "{task.fields[rate]}")]
    columns = (texts[0], BarColumn(), MofNCompleteColumn(), texts[1], TimeElapsedColumn())
    bar = Progress(*columns, console=Console(stderr=True), get_time=time.monotonic, speed_estimate_period=RATE_WINDOW)
    bar.add_task(escape_unprintable(what), total=total, completed=done, rate="")
    (task,), last = bar.tasks, bar.get_time()
    on_terminal = sys.stderr is not None and sys.stderr.isatty()

    def advance(count: int = 1, note: str = "") -> None:
        nonlocal last
        bar.advance(task.id, count)
        left = timedelta(seconds=int(task.time_remaining or 0))
        rate = f"{task.speed:.1f} {unit}/s, {left} left {note}" if task.speed else note
        bar.update(task.id, rate=rate)
        if not on_terminal and (bar.get_time() - last >= LINE_INTERVAL or task.finished):
            last = bar.get_time()
            report(f"{task.description}: {task.completed:g}/{total} {unit} {rate}".rstrip())

    with bar if on_terminal else nullcontext():
        yield advance
