"""The parser's command of a verb: leading words may stand for options, and `--help` groups the options."""

from itertools import takewhile
from typing import Any

import typer
import typer.core

from ...errors import UsageError


class VerbCommand(typer.core.TyperCommand):
    """A verb. words: names of options that the words before the first option stand for, in order."""

    words: tuple[str, ...] = ()

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:  # type: ignore[override]
        """Parse the arguments; raises UsageError for an option that is given both with and without its name."""
        leading = list(takewhile(lambda argument: not argument.startswith("-"), args))
        named, rest = list[str](), args
        for name, word in zip(self.words, leading, strict=False):
            named, rest = [*named, f"--{name}={word}"], rest[1:]
            if any(argument.partition("=")[0] == f"--{name}" for argument in rest):
                raise UsageError(f"{word}: --{name} is given too. Give one of them")
        return super().parse_args(ctx, [*named, *rest])

    def collect_usage_pieces(self, ctx: typer.Context) -> list[str]:  # type: ignore[override]
        """Return the parts of the usage line after the verb's name."""
        return [*(f"[{name.upper()}]" for name in self.words), *super().collect_usage_pieces(ctx)]

    def format_options(self, ctx: typer.Context, formatter: Any) -> None:  # type: ignore[override]
        """Write the options under the headings of their help panels."""
        sections: dict[str, list[tuple[str, str]]] = {"Arguments": [], "Options": []}
        for parameter in self.get_params(ctx):
            if (record := parameter.get_help_record(ctx)) is not None:
                usual = "Arguments" if parameter.param_type_name == "argument" else "Options"
                sections.setdefault(getattr(parameter, "rich_help_panel", None) or usual, []).append(record)
        for heading, records in sections.items():
            if records:
                with formatter.section(heading):
                    formatter.write_dl(records)
