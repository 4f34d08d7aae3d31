"""A verb's options are derived from the fields of dataclasses."""

import shlex
from collections.abc import Sequence
from dataclasses import MISSING, dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
import typer
from typer.testing import CliRunner, Result

from prelunet.evaluator.cli_option import option
from prelunet.evaluator.verbs.options import Only, derive_options


@dataclass(frozen=True)
class Limits:
    calls: int = option(3, "Number of calls.", min=1, max=9)
    wait: float = option(0.002, "Milliseconds.", units=1000)
    hidden: int = 7


@dataclass(frozen=True)
class Options:
    path: Path = option(MISSING, "A file.", flag="data")
    limits: Limits = field(default_factory=Limits)
    kind: Literal["a", "b"] | None = option(None, "A kind.", default="the file's")
    names: tuple[str, ...] = option(
        (), "Names.", flag="name", kind=list[str] | None, parse=lambda names: tuple(names or ())
    )
    turn: bool | None = option(None, "Turn.", flag="turn/--no-turn")
    loud: bool = option(False, "Loud.")


def call(*arguments: str, only: Sequence[str] = ()) -> tuple[Result, list[Any]]:
    """Run a verb with the arguments; return the parser's result and what the verb received."""
    received: list[Any] = []

    def verb(*, options: Options, rest: str = "default") -> None:
        received.extend([options, rest])

    if only:
        verb.__annotations__["options"] = Annotated[Options, Only(*only)]
    app = typer.Typer(rich_markup_mode=None)
    app.command()(derive_options(verb))
    return CliRunner().invoke(app, arguments), received


def test_without_options_every_field_has_its_default() -> None:
    assert call("--data", "d")[1] == [Options(Path("d")), "default"]


def test_options_set_their_fields_also_in_nested_dataclasses() -> None:
    words = shlex.split("--data d --calls 9 --wait 4 --kind b --name x --name y --no-turn --loud --rest own")
    expected = Options(Path("d"), Limits(9, 0.004), "b", ("x", "y"), turn=False, loud=True)
    assert call(*words)[1] == [expected, "own"]


def test_a_field_without_default_is_required() -> None:
    result, received = call()
    assert (result.exit_code, received) == (2, [])
    assert "--data" in result.stderr


@pytest.mark.parametrize("words", [("--calls", "10"), ("--calls", "0"), ("--kind", "c"), ("--hidden", "1")])
def test_values_out_of_range_and_fields_without_option_are_refused(words: tuple[str, str]) -> None:
    result, received = call("--data", "d", *words)
    assert (result.exit_code, received) == (2, [])


def test_a_verb_may_take_only_some_fields() -> None:
    assert call("--data", "d", "--kind", "a", only=("path", "kind"))[1] == [Options(Path("d"), kind="a"), "default"]
    for words in (("--loud",), ("--calls", "4")):
        assert call("--data", "d", *words, only=("path", "kind"))[0].exit_code == 2


def test_help_shows_ranges_and_defaults_in_the_options_units() -> None:
    text = " ".join(call("--help")[0].stdout.split())
    for part in (
        "[default: 3; 1<=x<=9]",
        "Milliseconds. [default: 2.0]",
        "[default: (the file's)]",
        "--turn / --no-turn",
    ):
        assert part in text
