"""Terminal output: escaping of untrusted text, which must not control the terminal or forge lines; tables; progress."""

import re
import sys
import time
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
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
    """Print a message to stderr, so that stdout holds only the result."""
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
RATE_WINDOW = 60.0  # seconds over which the rate is averaged, but at least MIN_SAMPLES samples
MIN_SAMPLES = 10
SAMPLE_INTERVAL = 0.5  # seconds between two samples: many small steps are one sample


class Advance(Protocol):
    """Report that `count` more units are done; `note` is shown beside them, e.g. `loss 0.31`."""

    def __call__(self, count: int = 1, note: str = "") -> None: ...


@contextmanager
def progress(what: str, total: int, unit: str, *, done: int = 0) -> Iterator[Advance]:
    """Show the progress of `total` units while the block runs.

    done: units that an earlier, interrupted call finished. They do not count for the rate, which is that of the last
    minute.
    """
    reporter = _bar if sys.stderr is not None and sys.stderr.isatty() else _plain
    with reporter(escape_unprintable(what), total, unit, done) as advance:
        yield advance


@contextmanager
def _bar(what: str, total: int, unit: str, done: int) -> Iterator[Advance]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    # No markup: a path may contain brackets.
    texts = [TextColumn(text, markup=False) for text in ("{task.description}", "{task.fields[rate]}")]
    columns = (texts[0], BarColumn(), MofNCompleteColumn(), texts[1])
    with Progress(*columns, TimeElapsedColumn(), console=Console(stderr=True)) as bar:
        task = bar.add_task(what, total=total, completed=done, rate="")
        clock = _RateMeter(total, unit, done)

        def advance(count: int = 1, note: str = "") -> None:
            clock.advance(count)
            bar.update(task, advance=count, rate=f"{clock} {note}")

        yield advance


@contextmanager
def _plain(what: str, total: int, unit: str, done: int) -> Iterator[Advance]:
    clock = _RateMeter(total, unit, done)
    last = clock.start

    def advance(count: int = 1, note: str = "") -> None:
        nonlocal last
        clock.advance(count)
        now = time.monotonic()
        if now - last >= LINE_INTERVAL or clock.done == total:
            last = now
            sys.stderr.write(f"{what}: {clock.done}/{total} {unit} {clock} {note}".rstrip() + "\n")
            sys.stderr.flush()

    yield advance


class _RateMeter:
    """Computes the recent rate of this call and, from it, the remaining time.

    The rate is recent, not that since the start: images differ in size along a dataset, and workers come and go.
    """

    def __init__(self, total: int, unit: str, done: int) -> None:
        self.total, self.unit, self.done = total, unit, done
        self.start = time.monotonic()
        self._samples = deque([(self.start, done)])  # (time, units done) within the window

    def advance(self, count: int) -> None:
        self.done += count
        now = time.monotonic()
        if now - self._samples[-1][0] >= SAMPLE_INTERVAL:
            self._samples.append((now, self.done))
            while len(self._samples) > MIN_SAMPLES and now - self._samples[1][0] >= RATE_WINDOW:
                self._samples.popleft()

    def __str__(self) -> str:
        since, before = self._samples[0]
        rate = (self.done - before) / max(time.monotonic() - since, 1e-9)
        if rate == 0:
            return ""
        left = int((self.total - self.done) / rate)
        return f"{rate:.1f} {self.unit}/s, {left // 3600}:{left // 60 % 60:02}:{left % 60:02} left"
