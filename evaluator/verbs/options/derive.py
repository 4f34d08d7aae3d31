"""Options of verbs that are derived from the fields of dataclasses."""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, fields, is_dataclass
from functools import partial, wraps
from typing import Annotated, Any, get_args, get_origin

import typer

from ...cli_option import CliOption

Verb = Callable[..., None]


class Only:
    """Restricts a verb's parameter to some fields, as in `Annotated[Placement, Only("device", "precision")]`."""

    def __init__(self, *names: str) -> None:
        self.names = names


def derive_options(verb: Verb) -> Verb:
    """Return the verb with options in place of its parameters that are dataclasses.

    A parameter `limits: ServerLimits` becomes an option for each field that declares a `CliOption`, also in nested
    dataclasses. The verb receives the dataclass with their values; other fields keep their defaults.
    """
    for name, parameter in inspect.signature(verb).parameters.items():
        kind, *details = (
            get_args(parameter.annotation) if get_origin(parameter.annotation) is Annotated else [parameter.annotation]
        )
        if is_dataclass(kind):
            only = next((detail.names for detail in details if isinstance(detail, Only)), None)
            prefix = getattr(kind, "ENVIRONMENT_PREFIX", None)
            options = [_parameter(field, option, group, prefix) for field, option, group in _declared(kind, only)]
            verb = replace_parameter(verb, name, options, partial(_build, kind))
    return verb


def replace_parameter(
    verb: Verb, name: str, options: Sequence[inspect.Parameter], build: Callable[[Mapping[str, Any]], Any]
) -> Verb:
    """Return the verb with options in place of one parameter. build: returns its value, given the options' by name."""

    @wraps(verb)
    def with_options(**values: Any) -> None:
        own = {option.name: values.pop(option.name) for option in options}
        verb(**values, **{name: build(own)})

    parameters: list[inspect.Parameter] = []
    for parameter in inspect.signature(verb).parameters.values():
        parameters += options if parameter.name == name else [parameter]
    with_options.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    with_options.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return with_options


def _declared(
    kind: Any, only: Sequence[str] | None = None, group: str | None = None
) -> Iterator[tuple["Field[Any]", CliOption, str | None]]:
    """Yield the fields of a dataclass that declare options, with their heading in `--help`.

    Those of nested dataclasses come in their place; they are under the outer heading if they have none.
    """
    group = getattr(kind, "HELP_GROUP", group)
    for field in fields(kind):
        if only is not None and field.name not in only:
            continue
        if (option := field.metadata.get("option")) is not None:
            yield field, option, group
        elif is_dataclass(field.type):
            yield from _declared(field.type, group=group)


def _name(field: "Field[Any]", option: CliOption) -> str:
    return (option.flag or field.name).partition("/")[0].replace("-", "_")


def _parameter(
    field: "Field[Any]", option: CliOption, group: str | None, prefix: str | None = None
) -> inspect.Parameter:
    default: Any = inspect.Parameter.empty if field.default is MISSING else field.default
    if option.parse is not None:
        default = None
    elif option.units != 1:
        default = option.units * default
    shown = typer.Option(
        f"--{option.flag or field.name.replace('_', '-')}",
        help=option.help,
        min=option.min,
        max=option.max,
        metavar=option.metavar,
        show_default=option.default or True,
        rich_help_panel=group,
        envvar=prefix and prefix + (option.flag or field.name).replace("-", "_").upper(),
    )
    annotation: Any = Annotated[option.kind or field.type, shown]
    return inspect.Parameter(
        _name(field, option), inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation
    )


def _build(kind: Any, values: Mapping[str, Any]) -> Any:
    """Build a dataclass and those in it from the values of the options, by name."""
    own: dict[str, Any] = {}
    for field in fields(kind):
        option: CliOption | None = field.metadata.get("option")
        if option is None and is_dataclass(field.type):
            own[field.name] = _build(field.type, values)
        elif option is not None and (name := _name(field, option)) in values:
            value = values[name] if option.parse is None else option.parse(values[name])
            own[field.name] = value / option.units if option.units != 1 else value
    return kind(**own)
