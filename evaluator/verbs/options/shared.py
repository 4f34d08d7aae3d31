"""Options and messages shared by several verbs."""

from itertools import takewhile
from pathlib import Path
from typing import Annotated, Any

import typer
import typer.core

from ...engine.session import Placement
from ...errors import UsageError
from ...protocols import ProtocolOverrides
from ...terminal import report
from ...validation.run import Run

_MODEL_HELP = "Model file written by `prelunet export` or `prelunet adopt`."
ModelOption = Annotated[Path, typer.Option("--model", help=_MODEL_HELP)]
OptionalModelOption = Annotated[Path | None, typer.Option("--model", help=_MODEL_HELP)]

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
