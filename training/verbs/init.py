"""`prelunet init`: an initialised, untrained checkpoint."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated, cast

import numpy as np
import typer

from prelunet.evaluator.architectures import ACTIVATIONS, ARCHITECTURES, MAX_SIDE, Activation, architecture
from prelunet.evaluator.errors import UsageError
from prelunet.evaluator.files import require_writable
from prelunet.evaluator.terminal import echo
from prelunet.training.net.checkpoints import size_summary
from prelunet.training.net.initialization import (
    CHANNEL_MEAN,
    FIRST_LAYERS,
    RULES,
    FirstLayer,
    Initialization,
    Rule,
    initial_tensors,
    parse_classes,
)


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
    rule: Annotated[
        str,
        typer.Option(
            "--init",
            help=f"How convolutions are drawn: {', '.join(RULES)}. The first three keep the variance of gradients, of "
            "responses, or about both (Eq. 14, Eq. 10, their average); xavier is Caffe's.",
            metavar="RULE",
        ),
    ] = "fan-out",
    std: Annotated[
        float | None, typer.Option("--init-std", help="Deviation of the weights with --init gaussian; else 0.01.")
    ] = None,
    first_layer: Annotated[
        str,
        typer.Option(
            help=f"{' or '.join(FIRST_LAYERS)}: whether the first convolution's variance counts that no activation "
            "halves the image. The paper: half, as one layer does not matter.",
            metavar="|".join(FIRST_LAYERS),
        ),
    ] = "half",
    force: Annotated[bool, typer.Option("--force", help="Replace an existing file.")] = False,
) -> None:
    """Write an initialised, untrained checkpoint with ImageNet's channel mean."""
    from prelunet.training.net.checkpoints import Checkpoint, write_checkpoint

    net = architecture(arch, activation=cast(Activation, activation), crop=crop)  # which refuses unknown names
    initialization = _initialization(rule, std, first_layer)
    entries = parse_classes(classes)
    if require_writable(output).exists() and not force:
        raise UsageError(f"{output}: exists already. Choose another name, or replace it with --force")
    tensors = initial_tensors(net, len(entries), seed, initialization)
    checkpoint = Checkpoint(net, entries, np.array(CHANNEL_MEAN, dtype=np.float32), tensors)
    write_checkpoint(output, checkpoint)
    echo(
        f"{output}: {net.name}, {net.activation}, {len(entries)} classes, untrained ({rule}, seed {seed})\n"
        f"  {size_summary(checkpoint, output)}"
    )


def _initialization(rule: str, std: float | None, first_layer: str) -> Initialization:
    """Return what the options ask for; raises UsageError for a deviation that the rule would not use."""
    chosen = Initialization(cast(Rule, rule), first_layer=cast(FirstLayer, first_layer))  # which refuses unknown names
    if std is None:
        return chosen
    if rule != "gaussian":
        raise UsageError(
            f"--init-std {std}: --init {rule} has its own deviations. Add --init gaussian, or leave it out"
        )
    return replace(chosen, std=std)
