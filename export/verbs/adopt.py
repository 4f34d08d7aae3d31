"""`prelunet adopt`: wrap another ONNX classifier into a model file."""

from pathlib import Path
from typing import Annotated

import typer

from ...evaluator.errors import UsageError
from ...evaluator.files import check_not_input, require_new
from ...evaluator.terminal import echo, report
from ...evaluator.verbs.options import derive_options
from ..adoption import NetOptions, describe, resolve_options, warnings_of
from ..foreign.sidecars import find_net


@derive_options
def adopt(
    *,
    net: Annotated[
        Path,
        typer.Argument(
            help="ONNX classifier, or a folder with one and what its makers wrote beside it.",
            metavar="NET.onnx|DIR",
        ),
    ],
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Model file to write; may be omitted with --find-input.")
    ] = None,
    own: NetOptions,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing file.")] = False,
) -> None:
    """Wrap an ONNX classifier into a model file, for the protocols center and ten-crop, or with --dense for all.

    The file is checked against the original net in onnxruntime before it is put in place; a mismatch leaves no file.
    """
    from ..foreign.adopt import adopt as adopt_net

    if output is not None:
        require_new(output, force=force)
    elif own.find.find_input is None:
        raise UsageError("no -o: give the model file to write")
    if own.classes is not None and output is not None:
        check_not_input(output, [own.classes])
    net = find_net(net)
    needed = output is not None or own.find.reference is None
    classes, options = resolve_options(net, own, echo, classes_needed=needed)
    if output is not None and classes is not None:
        adopted = adopt_net(net, output, classes, options)
        echo(describe(output, adopted, detected=own.kind == "auto"))
        for warning in warnings_of(adopted):
            report(warning)
