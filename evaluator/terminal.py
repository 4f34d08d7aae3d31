"""Text on its way to a terminal: what others wrote must not steer it, nor forge a line."""

import re
import sys
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

# C0 and C1, separators of lines and paragraphs, marks that turn the direction of writing, halves of characters.
_UNPRINTABLE = re.compile("[\0-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
_UNPRINTABLE_BUT_NEWLINES = re.compile(_UNPRINTABLE.pattern.replace("\0-\x1f", "\0-\x09\x0b-\x1f"))


def escape_unprintable(text: str, *, newlines: bool = False) -> str:
    r"""Return a text in which characters that steer a terminal are written out: `\x1b`, `\u202e`, `\udcff`.

    newlines: leave these as they are, in a text of ours that has several lines.
    """
    return (_UNPRINTABLE_BUT_NEWLINES if newlines else _UNPRINTABLE).sub(_escaped, text)


def echo(text: str, *, err: bool = False, end: str = "\n") -> None:
    """Print a text of ours, of any lines, with what others wrote made `escape_unprintable`. err: to stderr."""
    import typer  # here, since `escape_unprintable` is for libraries too, which should load where only they are needed

    typer.echo(escape_unprintable(text, newlines=True) + end, err=err, nl=False)


def _escaped(found: re.Match[str]) -> str:
    code = ord(found[0])
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"


# Progress of long work on stderr: rate and remaining time; plain lines where stderr is no terminal.


LINE_INTERVAL = 10.0  # seconds between two plain lines
RATE_WINDOW = 60.0  # seconds over which the rate is taken, and at least MIN_SAMPLES steps, however long they last
MIN_SAMPLES = 10
SAMPLE_INTERVAL = 0.5  # seconds between two marks: many small steps are one


class Advance(Protocol):
    """Tell that `count` more units are done; `note` is shown beside, as `loss 0.31`."""

    def __call__(self, count: int = 1, note: str = "") -> None:
        """Advance by `count`."""
        ...


@contextmanager
def progress(what: str, total: int, unit: str, *, done: int = 0) -> Iterator[Advance]:
    """Show progress of `total` units while the block runs.

    done: units that an earlier, interrupted call finished; they do not count for the rate, which is that of the last
    minute.
    """
    reporter = _bar if sys.stderr is not None and sys.stderr.isatty() else _plain
    with reporter(escape_unprintable(what), total, unit, done) as advance:
        yield advance


@contextmanager
def _bar(what: str, total: int, unit: str, done: int) -> Iterator[Advance]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    # Not markup: a path may have brackets.
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
    """Counts units of this call alone and says the rate of late and, from it, the remaining time.

    Of late and not since the start: images differ in size along a dataset, and workers come and go.
    """

    def __init__(self, total: int, unit: str, done: int) -> None:
        self.total, self.unit, self.done = total, unit, done
        self.start = time.monotonic()
        self._samples = deque([(self.start, done)])  # what was done when, in the time that counts

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
