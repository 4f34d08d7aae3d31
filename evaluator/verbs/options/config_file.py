"""Options that can also be set in a file and in the environment.

Precedence: command line, environment, file, default. The parser itself implements it (`default_map`,
`auto_envvar_prefix`); this module adds the file, and errors that name the source of a wrong value.
"""

import json
import os
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import typer

from ...errors import UsageError
from ...files import read_regular
from ...terminal import echo
from .shared import VerbCommand

_COMMAND_LINE_ONLY = frozenset({"config", "show_config"})
# Variables that Kubernetes sets in every pod for a Service whose name begins like ours; not meant for us.
_KUBERNETES = re.compile(r"(.+_)?(SERVICE_(HOST|PORT(_.+)?)|PORT_\d+_(TCP|UDP|SCTP)(_.+)?)")
_SERVICE_LINK_URL = re.compile(r"(tcp|udp|sctp)://")


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
    try:
        settings = tomllib.loads(read_regular(path).decode())
    except OSError as error:
        raise UsageError(f"--config {path}: {error.strerror or error}. Give the path of a TOML file") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"--config {path}: not TOML: {error}") from error
    options = options_by_key(ctx)
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
