"""Options and messages shared by several verbs."""

from pathlib import Path
from typing import Annotated

import typer

from ...engine.session import Placement
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
