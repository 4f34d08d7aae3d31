"""The options of verbs: shared ones, those that fields of dataclasses declare, and what a file and the environment set.

The command line comes first, then the environment, the file, the default. The parser itself implements this
(`default_map`, `auto_envvar_prefix`); here are the file, and errors that name the source of a wrong value.
"""

import inspect
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, fields, is_dataclass
from functools import partial, wraps
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin

import typer
import typer.core

from ..cli_option import CliOption
from ..engine.session import Placement
from ..errors import UsageError
from ..files import read_toml
from ..protocols import ProtocolOverrides
from ..terminal import echo, report
from ..validation.run import Run

Verb = Callable[..., None]

_PLACEHOLDERS = {"int>": "N", "int range>": "N", "float>": "X", "float range>": "X", "path>": "PATH", "str>": "TEXT"}
_COMMAND_LINE_ONLY = frozenset({"config", "show_config"})
# Variables that Kubernetes sets in every pod for a Service whose name begins like ours; not meant for us.
_KUBERNETES = re.compile(r"(.+_)?(SERVICE_(HOST|PORT(_.+)?)|PORT_\d+_(TCP|UDP|SCTP)(_.+)?)")
_SERVICE_LINK_URL = re.compile(r"(tcp|udp|sctp)://")

# Options of several verbs.

_MODEL_HELP = "Model file written by `prelunet export` or `prelunet adopt`."
ModelOption = Annotated[Path, typer.Option("--model", help=_MODEL_HELP)]
OptionalModelOption = Annotated[Path | None, typer.Option("--model", help=_MODEL_HELP)]

VerboseOption = Annotated[bool, typer.Option("--verbose", help="Print the estimated peak memory, too.")]
ProtocolOption = Annotated[
    str | None,
    typer.Option(
        help="Evaluation protocol: center, ten-crop, multi-scale, spp-18, spp-net, resnet or dense-S (e.g. "
        "dense-256); `prelunet protocols` describes them.",
        show_default="multi-scale; center for a net adopted without --dense",
        rich_help_panel=ProtocolOverrides.HELP_GROUP,
    ),
]
GpusOption = Annotated[
    int,
    typer.Option(
        min=0,
        max=64,
        help="With cuda: number of GPUs, one session on each; 0 uses all visible GPUs.",
        rich_help_panel=Placement.HELP_GROUP,
    ),
]


def report_next_command(run: Run, folder: Path) -> None:
    """Print the command that usually follows a complete run in this folder."""
    if run.has_labels:
        report(f"per-class report: prelunet report {folder}")
    else:
        report(f"for the ILSVRC server: prelunet submission {folder} -o FILE --devkit DIR")


# Options that the fields of dataclasses declare.


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


# The parser of a verb.


class VerbCommand(typer.core.TyperCommand):
    """A verb. words: names of options that may also be given as words, in this order, anywhere on the command line."""

    words: tuple[str, ...] = ()

    def make_parser(self, ctx: typer.Context) -> Any:  # type: ignore[override]
        """Return the parser, which takes what is left for the options of `words`.

        It raises UsageError for an option that is given both with and without its name.
        """
        parser = super().make_parser(ctx)
        parse, several = parser.parse_args, {each.name: getattr(each, "multiple", False) for each in self.params}

        def parse_words(args: list[str]) -> tuple[dict[str, Any], list[str], list[Any]]:
            values, left, order = parse(args=args)
            for name in self.words:
                taken = left if several[name] else left[:1]
                if taken and name in values:
                    raise UsageError(f"{taken[0]}: --{name} is given too. Give one of them")
                if taken:
                    values[name] = taken if several[name] else taken[0]
                left = left[len(taken) :]
            return values, left, order

        parser.parse_args = parse_words  # type: ignore[method-assign]
        return parser

    def collect_usage_pieces(self, ctx: typer.Context) -> list[str]:  # type: ignore[override]
        """Return the parts of the usage line after the verb's name."""
        pieces = super().collect_usage_pieces(ctx)
        own = [_as_placeholder(piece.replace("{", "").replace("}", "")) for piece in pieces]
        return [*own, *(f"[{name.upper()}]" for name in self.words)]

    def format_options(self, ctx: typer.Context, formatter: Any) -> None:  # type: ignore[override]
        """Write the options under the headings of their help panels."""
        sections: dict[str, list[tuple[str, str]]] = {"Arguments": [], "Options": []}
        for parameter in self.get_params(ctx):
            if (record := parameter.get_help_record(ctx)) is not None:
                usual = "Arguments" if parameter.param_type_name == "argument" else "Options"
                heading = getattr(parameter, "rich_help_panel", None) or usual
                sections.setdefault(heading, []).append((_with_placeholder(record[0], usual), record[1]))
        for heading, records in sections.items():
            if records:
                with formatter.section(heading):
                    formatter.write_dl(records)


def _with_placeholder(name: str, kind: str) -> str:
    """Return the name of an option, or of an argument, with a placeholder where the parser has a type."""
    name, _, shown = name.partition(" <")
    if kind == "Arguments":
        return _as_placeholder(name)
    return f"{name} {_PLACEHOLDERS.get(shown, f'<{shown}')}" if shown else name


def _as_placeholder(name: str) -> str:
    return name.upper() if name.islower() else name


# Options from a file and the environment.


class ConfigurableCommand(VerbCommand):
    """A command whose options may come from the environment and from the file of its `--config`."""

    def __init__(self, name: str | None, *, context_settings: dict[str, Any] | None = None, **settings: Any) -> None:
        prefix = {"auto_envvar_prefix": f"PRELUNET_{(name or '').upper()}"}
        super().__init__(name, context_settings={**prefix, **(context_settings or {})}, **settings)

    def invoke(self, ctx: typer.Context) -> Any:  # type: ignore[override]
        """Run the verb; with `--show-config` print its configuration instead."""
        if not ctx.params["show_config"]:
            return super().invoke(ctx)
        echo(show_config(ctx))
        return None

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:  # type: ignore[override]
        """Parse the arguments; an error about a wrong value names its source."""
        _refuse_unknown_variables(ctx)
        try:
            return super().parse_args(ctx, args)
        except typer.BadParameter as error:
            name = error.param.name if error.param is not None else None
            if name is None or (source := _describe_source(ctx, name)) is None:
                raise
            text = f"{source}: {error.message.rstrip('.')}"
            if _SERVICE_LINK_URL.match(os.environ.get(_variable(ctx, name), "")):
                text += (
                    ". Kubernetes sets this variable in every pod because of a Service's name: set enableServiceLinks: "
                    "false in the pod, or rename the Service"
                )
            raise UsageError(text) from error


def read_config(ctx: typer.Context, path: Path | None) -> Path | None:
    """Use the values of a TOML file as defaults; the callback of the eager option `--config`.

    Each key is an option without its dashes, e.g. `max-calls = 100`; a repeatable option is a list. Raises UsageError
    for an unreadable file, an unknown key or a value of the wrong type.
    """
    if path is None:
        return None
    settings, options = read_toml(path, "Give --config the path of a TOML file"), options_by_key(ctx)
    if unknown := sorted(settings.keys() - options.keys()):
        raise UsageError(
            f"{path}: unknown option {', '.join(repr(key) for key in unknown)}. Valid options: {', '.join(options)}"
        )
    ctx.default_map = {options[key].name: _as_typed(value, options[key], path, key) for key, value in settings.items()}
    return path


def options_by_key(ctx: typer.Context) -> Mapping[str, Any]:
    options = [option for option in ctx.command.params if option.name not in _COMMAND_LINE_ONLY]
    return {str(max(option.opts, key=len).lstrip("-")): option for option in options}


def show_config(ctx: typer.Context) -> str:
    """Return all values as a file for `--config`, each with its source."""
    lines = []
    for key, option in options_by_key(ctx).items():
        value = ctx.params[option.name]
        shown = {"DEFAULT": "default", "DEFAULT_MAP": ctx.params["config"], "ENVIRONMENT": _variable(ctx, option.name)}
        source = shown.get(_source(ctx, option.name), "command line")
        lines.append(f"# {key} is not set" if value in (None, (), []) else f"{key} = {_toml(value)}  # {source}")
    return "\n".join(lines)


def _as_typed(value: Any, option: Any, path: Path, key: str) -> str | list[str]:
    """Return a value of the file as it would be typed, so that file, environment and flags are parsed alike."""
    several, multiple = value if isinstance(value, list) else [value], getattr(option, "multiple", False)
    if isinstance(value, list) and not multiple:
        raise UsageError(f"{path}: {key}: expected one value, not a list")
    if not all(isinstance(each, str | int | float) for each in several):
        raise UsageError(f"{path}: {key}: expected a string, a number, true or false, or a list of these")
    typed = [json.dumps(each) if isinstance(each, bool) else str(each) for each in several]
    return typed if multiple else typed[0]


def _describe_source(ctx: typer.Context, name: str) -> str | None:
    """Return the source of a value, and the value; None for the command line and for defaults."""
    source = _source(ctx, name)
    if source == "ENVIRONMENT":
        return f"environment variable {_variable(ctx, name)} is {os.environ[_variable(ctx, name)]!r}"
    if source != "DEFAULT_MAP":
        return None
    key = next(key for key, option in options_by_key(ctx).items() if option.name == name)
    return f"{ctx.params.get('config')}: {key} is {(ctx.default_map or {})[name]!r}"


def _source(ctx: typer.Context, name: str) -> str:
    """Return where a value comes from, in the parser's words: DEFAULT, DEFAULT_MAP, ENVIRONMENT, COMMANDLINE."""
    return str(getattr(ctx.get_parameter_source(name), "name", ""))


def _variable(ctx: typer.Context, name: str) -> str:
    return f"{ctx.auto_envvar_prefix}_{name.upper()}"


def _refuse_unknown_variables(ctx: typer.Context) -> None:
    """Refuse a misspelled variable, which would otherwise be silently ignored."""
    prefix = f"{ctx.auto_envvar_prefix}_"
    names = [str(option.name).upper() for option in ctx.command.params]
    found = {name.removeprefix(prefix): value for name, value in os.environ.items() if name.startswith(prefix)}
    if unknown := sorted(
        name
        for name, value in found.items()
        if name not in names and not _KUBERNETES.fullmatch(name) and not _SERVICE_LINK_URL.match(value)
    ):
        raise UsageError(
            f"environment variable {', '.join(prefix + name for name in unknown)}: no such option of this verb. Valid "
            f"names after {prefix}: {', '.join(names)}"
        )


def _toml(value: Any) -> str:
    if isinstance(value, list | tuple):
        return f"[{', '.join(_toml(each) for each in value)}]"
    return json.dumps(value if isinstance(value, bool | int | float) else str(value), ensure_ascii=False)
