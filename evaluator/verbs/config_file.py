"""Options that can stand in a file and in the environment too: flag before environment before file before default.

The parser's own mechanism does it (`default_map`, `auto_envvar_prefix`); here are the file, and errors that name the
place where a wrong value stands.
"""

import json
import os
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import typer
import typer.core

from prelunet.evaluator.errors import UsageError

_COMMAND_LINE_ONLY = frozenset({"config", "show_config", "help"})
# What Kubernetes sets in every pod for a Service whose name begins like our variables; not meant for us.
_KUBERNETES = re.compile(r"(.+_)?(SERVICE_(HOST|PORT(_.+)?)|PORT_\d+_(TCP|UDP|SCTP)(_.+)?)")
_SERVICE_LINK_URL = re.compile(r"(tcp|udp|sctp)://")


class ConfigurableCommand(typer.core.TyperCommand):
    """A command whose options may come from the environment and from the file of its `--config`."""

    def __init__(self, name: str | None, *, context_settings: dict[str, Any] | None = None, **settings: Any) -> None:
        prefix = {"auto_envvar_prefix": f"PRELUNET_{(name or '').upper()}"}
        super().__init__(name, context_settings={**prefix, **(context_settings or {})}, **settings)

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:  # type: ignore[override]
        """Parse as usual; a wrong value is told with its place."""
        _refuse_unknown_variables(ctx)
        try:
            return super().parse_args(ctx, args)
        except typer.BadParameter as error:
            name = error.param.name if error.param is not None else None
            if name is None or (place := _describe_source(ctx, name)) is None:
                raise
            raise UsageError(". ".join([f"{place}: {error.message.rstrip('.')}", *_hint(ctx, name)])) from error


def read_config(ctx: typer.Context, path: Path | None) -> Path | None:
    """Take the values of a TOML file as defaults; the callback of an eager option `--config`.

    Each key is an option without its dashes, as `max-calls = 100`; what may be given several times is a list. Raises
    UsageError for a file that cannot be read, a key that is no option and a value of a wrong type.
    """
    if path is None:
        return None
    try:
        with path.open("rb") as file:
            settings = tomllib.load(file)
    except OSError as error:
        raise UsageError(f"--config {path}: {error.strerror or error}. Give the path of a TOML file") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"--config {path}: not TOML: {error}") from error
    options = options_by_key(ctx)
    if unknown := sorted(settings.keys() - options.keys()):
        raise UsageError(
            f"{path}: no option is called {', '.join(repr(key) for key in unknown)}. There are: {', '.join(options)}"
        )
    ctx.default_map = {options[key].name: _as_typed(value, options[key], path, key) for key, value in settings.items()}
    return path


def options_by_key(ctx: typer.Context) -> Mapping[str, Any]:
    """Return a command's options by the names that they have in a file, in their order."""
    options = [option for option in ctx.command.params if option.name not in _COMMAND_LINE_ONLY]
    return {_key(option): option for option in options}


def show_config(ctx: typer.Context) -> str:
    """Return all values as a file for `--config`, with the place where each comes from."""
    lines = []
    for key, option in options_by_key(ctx).items():
        value = ctx.params[option.name]
        there = value not in (None, (), [])
        lines.append(f"{key} = {_toml(value)}  # {_source(ctx, option.name)}" if there else f"# {key} is not set")
    return "\n".join(lines)


def _key(option: Any) -> str:
    return str(max(option.opts, key=len).lstrip("-"))


def _as_typed(value: Any, option: Any, path: Path, key: str) -> str | list[str]:
    """Return a value of the file as one would type it, so that file, environment and flags are read alike."""
    several = value if isinstance(value, list) else [value]
    if isinstance(value, list) and not getattr(option, "multiple", False):
        raise UsageError(f"{path}: {key}: a list, but it takes one value")
    for each in several:
        if not isinstance(each, str | int | float):
            raise UsageError(f"{path}: {key}: should be text, a number, true or false, or a list of these")
    typed = [json.dumps(each) if isinstance(each, bool) else str(each) for each in several]
    return typed if getattr(option, "multiple", False) else typed[0]


def _describe_source(ctx: typer.Context, name: str) -> str | None:
    """Return where the value in use stands, and the value; None for the command line and for defaults."""
    source = getattr(ctx.get_parameter_source(name), "name", None)
    if source == "ENVIRONMENT":
        return f"environment variable {_variable(ctx, name)} is {os.environ[_variable(ctx, name)]!r}"
    if source != "DEFAULT_MAP":
        return None
    key = next(key for key, option in options_by_key(ctx).items() if option.name == name)
    return f"{ctx.params.get('config')}: {key} is {(ctx.default_map or {})[name]!r}"


def _source(ctx: typer.Context, name: str) -> str:
    source = getattr(ctx.get_parameter_source(name), "name", None)
    if source == "ENVIRONMENT":
        return _variable(ctx, name)
    if source == "DEFAULT_MAP":
        return str(ctx.params.get("config"))
    return "default" if source == "DEFAULT" else "command line"


def _variable(ctx: typer.Context, name: str) -> str:
    return f"{ctx.auto_envvar_prefix}_{name.upper()}"


def _hint(ctx: typer.Context, name: str) -> list[str]:
    """Explain the one value that nobody typed: a link that Kubernetes sets for a Service."""
    if not _SERVICE_LINK_URL.match(os.environ.get(_variable(ctx, name), "")):
        return []
    return [
        "Kubernetes sets this in every pod when a Service has such a name: give the pod enableServiceLinks: false, or "
        "the Service another name"
    ]


def _refuse_unknown_variables(ctx: typer.Context) -> None:
    """Refuse a misspelt variable, which would else be ignored in silence."""
    prefix = f"{ctx.auto_envvar_prefix}_"
    names = [str(option.name).upper() for option in ctx.command.params]
    found = {name.removeprefix(prefix) for name in os.environ if name.startswith(prefix)}
    unknown = sorted(name for name in found.difference(names) if not _is_kubernetes(name, os.environ[prefix + name]))
    if unknown:
        raise UsageError(
            f"environment variable {', '.join(prefix + name for name in unknown)}: no option of this verb. There are, "
            f"behind {prefix}: {', '.join(names)}"
        )


def _is_kubernetes(name: str, value: str) -> bool:
    return bool(_KUBERNETES.fullmatch(name) or _SERVICE_LINK_URL.match(value))


def _toml(value: Any) -> str:
    if isinstance(value, list | tuple):
        return f"[{', '.join(_toml(each) for each in value)}]"
    return json.dumps(value if isinstance(value, bool | int | float) else str(value), ensure_ascii=False)
