"""Command-line options derived from the keys of a recipe."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, fields, replace
from types import UnionType
from typing import Annotated, Any, get_args, get_origin

import typer

from ...evaluator.verbs.options import replace_parameter
from ..recipe import CHOICES, LIMITS, Recipe, convert_value, format_limits

PANEL = "Recipe overrides (defaults are for keys that the recipe omits)"


def with_recipe_options(verb: Callable[..., None], exclude: tuple[str, ...]) -> Callable[..., None]:
    """Return the verb with an option for each recipe key, except those in `exclude`.

    The verb receives the options that the user gave in its parameter `keys`, as text or bool, for `override_keys`.
    """
    options = [
        inspect.Parameter(key.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=_option(key))
        for key in fields(Recipe)
        if key.name not in exclude
    ]
    return replace_parameter(
        verb, "keys", options, lambda keys: {name: value for name, value in keys.items() if value is not None}
    )


def override_keys(recipe: Recipe, keys: Mapping[str, Any], **changes: Any) -> Recipe:
    """Return the recipe with keys replaced by the values of options; raises UsageError for an invalid value.

    changes: values of keys for which there is no option. A key that excludes another one removes it: steps removes
    epochs, epochs removes steps, and the rate policy `plateau` removes rate_drops.
    """
    values = dict(changes)
    for key in fields(Recipe):
        if (given := keys.get(key.name)) is not None:
            where = f"--{key.name.replace('_', '-')} {given}"
            if get_origin(get_args(key.type)[0]) is tuple:
                given = [part for part in given.split(",") if part]
            values[key.name] = convert_value(key.name, given, where, from_text=True)
    if "steps" in values and "epochs" not in values:
        values["epochs"] = None
    elif "epochs" in values and "steps" not in values:
        values["steps"] = None
    if values.get("rate_policy") == "plateau":
        values.setdefault("rate_drops", ())
    return replace(recipe, **values)


def _option(key: Field[Any]) -> Any:
    kind, meaning = get_args(key.type)
    if kind is bool:
        flag = key.name.replace("_", "-")
        return Annotated[bool | None, typer.Option(f"--{flag}/--no-{flag}", help=meaning, rich_help_panel=PANEL)]
    choices = f" One of {', '.join(CHOICES[key.name])}." if key.name in CHOICES else ""
    limits = f" {format_limits(LIMITS[key.name]).capitalize()}." if key.name in LIMITS else ""
    default = "" if key.default in (MISSING, None) else f"  [default: {_format_value(key.default)}]"
    option = typer.Option(help=meaning + choices + limits + default, metavar=_metavar(kind), rich_help_panel=PANEL)
    return Annotated[str | None, option]


def _metavar(kind: Any) -> str:
    if isinstance(kind, UnionType):
        return _metavar(get_args(kind)[0])
    if get_origin(kind) is tuple:
        return ",".join("N" if item is int else "X" for item in get_args(kind) if item is not ...) + (
            ",..." if ... in get_args(kind) else ""
        )
    return {int: "N", float: "X"}.get(kind, "NAME")


def _format_value(value: Any) -> str:
    return ",".join(map(str, value)) or "none" if isinstance(value, tuple) else str(value)
