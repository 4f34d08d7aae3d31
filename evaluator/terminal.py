"""Text on its way to a terminal: what others wrote must not steer it, nor forge a line."""

import re

# C0 and C1, separators of lines and paragraphs, marks that turn the direction of writing, halves of characters.
_STEERING = re.compile("[\0-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
_STEERING_BUT_NEWLINES = re.compile(_STEERING.pattern.replace("\0-\x1f", "\0-\x09\x0b-\x1f"))


def printable(text: str, *, newlines: bool = False) -> str:
    r"""Return a text in which characters that steer a terminal are written out: `\x1b`, `\u202e`, `\udcff`.

    newlines: leave these as they are, in a text of ours that has several lines.
    """
    return (_STEERING_BUT_NEWLINES if newlines else _STEERING).sub(_written_out, text)


def say(text: str, *, err: bool = False, end: str = "\n") -> None:
    """Print a text of ours, of any lines, with what others wrote made `printable`. err: to stderr."""
    import typer  # here, since `printable` is for libraries too, which should load where only they are needed

    typer.echo(printable(text, newlines=True) + end, err=err, nl=False)


def _written_out(found: re.Match[str]) -> str:
    code = ord(found[0])
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"
