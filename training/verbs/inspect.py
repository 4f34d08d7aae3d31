"""`prelunet inspect`: what a checkpoint or a model file says of itself."""

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from evaluator.terminal import say
from training.inspection import inspect_file, print_inspection


def inspect(
    file: Annotated[Path, typer.Argument(help="A checkpoint or an exported model.", metavar="CKPT|MODEL.onnx")],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show what a checkpoint or a model file says of itself, and its learned slopes beside the paper's."""
    inspection = inspect_file(file)
    if as_json:
        say(json.dumps(inspection, indent=2))
    else:
        print_inspection(inspection, Console())
