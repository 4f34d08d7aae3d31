"""Progress shows a recent rate and the remaining time at that rate."""

import io

import pytest

from prelunet.evaluator import terminal as progress_module
from prelunet.evaluator.terminal import progress, report


class Clock:
    """A clock that a test sets."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(progress_module, "time", made)
    return made


def last_line(capsys: pytest.CaptureFixture[str]) -> str:
    """Return the last plain line."""
    return capsys.readouterr().err.splitlines()[-1]


def test_work_of_an_earlier_call_counts_for_the_total_but_not_for_the_rate(
    clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    with progress("validate", 1000, "images", done=400) as advance:
        for _ in range(2):
            clock.now += 10
            advance(50, "loss 0.31")
    assert last_line(capsys) == "validate: 500/1000 images 5.0 images/s, 0:01:40 left loss 0.31"


@pytest.mark.parametrize(("seconds", "steps"), [(1, 1000), (0.005, 1000), (64, 10)])
def test_the_rate_is_a_recent_one(
    clock: Clock, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, seconds: float, steps: int
) -> None:
    monkeypatch.setattr(progress_module, "LINE_INTERVAL", 0)
    with progress("validate", 10_000_000, "images") as advance:
        for slower in (4, 1):
            for _ in range(steps):
                clock.now += slower * seconds
                advance(64)
    rate = float(last_line(capsys).split()[3])
    assert 0.8 * 64 / seconds < rate <= 64 / seconds + 0.1


class Terminal(io.StringIO):
    """A stderr that is a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("terminal", [False, True])
def test_a_path_is_shown_verbatim_and_cannot_control_the_terminal(
    monkeypatch: pytest.MonkeyPatch, terminal: bool
) -> None:
    stderr = Terminal() if terminal else io.StringIO()
    monkeypatch.setattr("sys.stderr", stderr)
    with progress("check a[/nope]\x1b]0;b\x07[red]c", 3, "images") as advance:
        advance(3, "[/]")
    assert r"check a[/nope]\x1b]0;b\x07[red]c" in stderr.getvalue()
    assert "[/]" in stderr.getvalue()
    assert "\x1b]0;" not in stderr.getvalue()


class Closed(io.StringIO):
    """A stderr whose reader is gone."""

    def write(self, text: str) -> int:
        raise BrokenPipeError


@pytest.mark.parametrize("stderr", [None, Closed()])
def test_work_goes_on_if_nobody_can_read_its_progress(monkeypatch: pytest.MonkeyPatch, stderr: object) -> None:
    monkeypatch.setattr("sys.stderr", stderr)
    with progress("validate", 3, "images") as advance:
        advance(3)
    report("done")


def test_plain_lines_are_printed_every_ten_seconds_and_at_the_end(
    clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    with progress("validate", 100, "images") as advance:
        for _ in range(100):
            clock.now += 0.25
            advance()
    lines = capsys.readouterr().err.splitlines()
    assert [line.split()[1] for line in lines] == ["40/100", "80/100", "100/100"]
