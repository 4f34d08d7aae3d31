"""`prelunet init`: write an initialized, untrained checkpoint."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated, cast

import numpy as np
import typer
from rich.console import Console

from ...evaluator.architectures import ACTIVATIONS, MAX_SIDE, Activation, architecture
from ...evaluator.errors import UsageError
from ...evaluator.files import require_new
from ...evaluator.terminal import echo
from ..net.architecture_file import ARCHITECTURE_HELP, find_architecture
from ..net.checkpoints import size_summary
from ..net.initialization import (
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
    output: Annotated[Path, typer.Option("--output", "-o", help="Checkpoint to write.", metavar="CKPT")],
    arch: Annotated[str, typer.Option(help=ARCHITECTURE_HELP, metavar="NAME|FILE.toml|CKPT")],
    classes: Annotated[
        str,
        typer.Option(
            help="Number of classes, imagenet-1k, or a file that lists them: text with one class per line (wnid and "
            "name, or name), or JSON.",
            metavar="N|imagenet-1k|FILE",
        ),
    ],
    activation: Annotated[str, typer.Option(help=f"Activation: {', '.join(ACTIVATIONS)}.")] = "prelu",
    seed: Annotated[int, typer.Option(min=0, help="Random seed; the same seed gives the same bytes.")] = 0,
    crop: Annotated[
        int | None,
        typer.Option(
            min=1, max=MAX_SIDE, help="Side of a training crop, in pixels.", show_default="the architecture's"
        ),
    ] = None,
    rule: Annotated[
        str,
        typer.Option(
            "--init",
            help=f"Initialization of the convolutions: {', '.join(RULES)}. The first two preserve the variance of "
            "gradients (Eq. 14) or of responses (Eq. 10); xavier is Caffe's, and xavier-all draws the fc layers by it "
            "too.",
            metavar="RULE",
        ),
    ] = "fan-out",
    std: Annotated[
        float | None,
        typer.Option("--init-std", help="Standard deviation of the weights for --init gaussian.", show_default="0.01"),
    ] = None,
    first_layer: Annotated[
        str,
        typer.Option(
            help="Variance of the first convolution: half keeps the factor 1/2 of the other layers, as in the paper; "
            "exact drops it, as no activation precedes this layer.",
            metavar="|".join(FIRST_LAYERS),
        ),
    ] = "half",
    force: Annotated[bool, typer.Option("--force", help="Replace an existing file.")] = False,
) -> None:
    """Write an initialized, untrained checkpoint with ImageNet's channel mean."""
    from ..inspection.tables import print_layers
    from ..net.checkpoints import Checkpoint, write_checkpoint

    net = architecture(find_architecture(arch), activation=cast(Activation, activation), crop=crop)
    initialization = Initialization(cast(Rule, rule), first_layer=cast(FirstLayer, first_layer))
    if std is not None:
        if rule != "gaussian":
            raise UsageError(
                f"--init-std {std}: not used by --init {rule}, which computes its own deviations. Add --init gaussian, "
                "or omit --init-std"
            )
        initialization = replace(initialization, std=std)
    entries = parse_classes(classes)
    require_new(output, force=force)
    tensors = initial_tensors(net, len(entries), seed, initialization)
    drawn = {"init": rule, "first_layer": first_layer, "seed": seed, **({} if std is None else {"init_std": std})}
    checkpoint = Checkpoint(net, entries, np.array(CHANNEL_MEAN, dtype=np.float32), tensors, recipe=drawn)
    write_checkpoint(output, checkpoint)
    count = "1 class" if len(entries) == 1 else f"{len(entries)} classes"
    echo(
        f"{output}: {net.name}, {net.activation}, {count}, untrained ({rule}, seed {seed})\n"
        f"  {size_summary(checkpoint, output)}\n"
    )
    print_layers(net, len(entries), Console())
