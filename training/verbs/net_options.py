"""Options of `init` and `import`, which both write the checkpoint of a net."""

from pathlib import Path
from typing import Annotated

import typer

from ...evaluator.architectures import MAX_SIDE, Activation
from ..net.architecture_file import ARCHITECTURE_HELP

OutputOption = Annotated[Path, typer.Option("--output", "-o", help="Checkpoint to write.", metavar="CKPT")]
ArchOption = Annotated[str, typer.Option(help=ARCHITECTURE_HELP, metavar="NAME|FILE.toml|CKPT")]
ClassesOption = Annotated[
    str,
    typer.Option(
        help="Number of classes, imagenet-1k, or a file that lists them in the order of the net's outputs: text "
        "with one class per line (wnid and name, or name), or JSON.",
        metavar="N|imagenet-1k|FILE",
    ),
]
ActivationOption = Annotated[Activation, typer.Option(help="Activation of the convolutions, fc1 and fc2.")]
CropOption = Annotated[
    int | None,
    typer.Option(min=1, max=MAX_SIDE, help="Side of a training crop, in pixels.", show_default="the architecture's"),
]
