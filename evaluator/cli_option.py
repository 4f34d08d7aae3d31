"""Command-line options that are declared at the fields of dataclasses."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class CliOption:
    """How the command line sets a field: `max_calls: int = option(2048, "Maximum …", min=1)`.

    evaluator/verbs/options.py makes options of them. `HELP_GROUP: ClassVar[str]` of the dataclass is their
    heading in `--help`; `ENVIRONMENT_PREFIX: ClassVar[str]` and the flag's name are the variable that sets each, too.
    help: for `--help`, with the unit; flag: without its dashes, by default the field's name; for a bool also
    `flip/--no-flip`; min, max: inclusive range; metavar: placeholder of the value; default: description of a default
    that is None; units: number of the option's units in one of the field's, e.g. 1000 for milliseconds and seconds;
    kind, parse: the type of the option, if it differs from the field's, and the function that converts it.
    """

    help: str
    flag: str = ""
    min: float | None = None
    max: float | None = None
    metavar: str | None = None
    default: str = ""
    units: float = 1
    kind: Any = None
    parse: Callable[[Any], Any] | None = None


def option(value: Any, text: str, /, **details: Any) -> Any:
    """Return a field with a default, which the command line sets. text: the help; details: of `CliOption`."""
    return field(default=value, metadata={"option": CliOption(text, **details)})


def split_commas(values: Sequence[str] | None) -> list[str]:
    """Return the parts of a repeatable option whose values may be lists: `A,B` and `C` are A, B and C."""
    return [part.strip() for value in values or () for part in value.split(",")]
