"""Options and messages shared by several verbs."""

from pathlib import Path
from typing import Annotated, Any

import typer
import typer.core

from ...engine.session import Placement
from ...errors import UsageError
from ...protocols import ProtocolOverrides
from ...terminal import report
from ...validation.run import Run

_PLACEHOLDERS = {"int>": "N", "int range>": "N", "float>": "X", "float range>": "X", "path>": "PATH", "str>": "TEXT"}
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
