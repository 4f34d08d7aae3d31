"""`prelunet init`: an initialised, untrained checkpoint."""

from pathlib import Path
from typing import Annotated, cast

import numpy as np
import typer

from evaluator.complexity import multiply_adds
from evaluator.errors import UsageError
from evaluator.terminal import say
from training.architectures import ACTIVATIONS, ARCHITECTURES, MAX_SIDE, Activation, architecture
from training.initialization import CHANNEL_MEAN, initial_tensors, parse_classes


def init(
    *,
    output: Annotated[Path, typer.Option("--output", "-o", help="The checkpoint to write.", metavar="CKPT")],
    arch: Annotated[str, typer.Option(help=f"One of {', '.join(ARCHITECTURES)}.")],
    classes: Annotated[
        str,
        typer.Option(
            help="How many, or a file of them: text, one a line (wnid and name, or name), or JSON.", metavar="N|FILE"
        ),
    ],
    activation: Annotated[str, typer.Option(help=f"One of {', '.join(ACTIVATIONS)}.")] = "prelu",
    seed: Annotated[int, typer.Option(min=0, help="Same seed, same bytes.")] = 0,
    crop: Annotated[
        int | None,
        typer.Option(min=1, max=MAX_SIDE, help="Side of a training crop in pixels; else the architecture's own."),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing file.")] = False,
) -> None:
    """Write an initialised, untrained checkpoint with ImageNet's channel mean."""
    from training.checkpoints import Checkpoint, write_checkpoint  # here, so that --help needs no safetensors

    net = architecture(arch, activation=cast(Activation, activation), crop=crop)  # which refuses unknown names
    entries = parse_classes(classes)
    if output.exists() and not force:
        raise UsageError(f"{output}: exists already. Choose another name, or replace it with --force")
    tensors = initial_tensors(net, len(entries), seed)
    write_checkpoint(output, Checkpoint(net, entries, np.array(CHANNEL_MEAN, dtype=np.float32), tensors))
    parameters = sum(tensor.size for tensor in tensors.values())
    operations = multiply_adds(net.to_json(), net.crop, net.crop, len(entries))
    say(
        f"{output}: {net.name}, {net.activation}, {len(entries)} classes, untrained (seed {seed})\n"
        f"  {parameters:,} parameters, {operations:.4g} multiply-adds for one {net.crop}x{net.crop} crop, "
        f"{output.stat().st_size / 1e6:,.1f} MB"
    )
