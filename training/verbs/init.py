"""`prelunet init`: write an initialized, untrained checkpoint."""

from dataclasses import replace
from typing import Annotated

import numpy as np
import typer
from rich.console import Console

from ...evaluator.architectures import architecture
from ...evaluator.errors import UsageError
from ...evaluator.files import require_new
from ...evaluator.terminal import echo
from ..net.architecture_file import find_architecture
from ..net.checkpoints import size_summary
from ..net.initialization import CHANNEL_MEAN, FirstLayer, Initialization, Rule, initial_tensors, parse_classes
from .net_options import ActivationOption, ArchOption, ClassesOption, CropOption, OutputOption


def init(
    *,
    output: OutputOption,
    arch: ArchOption,
    classes: ClassesOption,
    activation: ActivationOption = "prelu",
    seed: Annotated[int, typer.Option(min=0, help="Random seed; the same seed gives the same bytes.")] = 0,
    crop: CropOption = None,
    rule: Annotated[
        Rule,
        typer.Option(
            "--init",
            help="Initialization of the convolutions. The first two preserve the variance of gradients (Eq. 14) or of "
            "responses (Eq. 10); xavier is Caffe's, and xavier-all draws the fc layers by it too.",
        ),
    ] = "fan-out",
    std: Annotated[
        float | None,
        typer.Option("--init-std", help="Standard deviation of the weights for --init gaussian.", show_default="0.01"),
    ] = None,
    first_layer: Annotated[
        FirstLayer,
        typer.Option(
            help="Variance of the first convolution: half keeps the factor 1/2 of the other layers, as in the paper; "
            "exact drops it, as no activation precedes this layer."
        ),
    ] = "half",
    force: Annotated[bool, typer.Option("--force", help="Replace an existing file.")] = False,
) -> None:
    """Write an initialized, untrained checkpoint with ImageNet's channel mean."""
    from ..inspection.tables import print_layers
    from ..net.checkpoints import Checkpoint, write_checkpoint

    net = architecture(find_architecture(arch), activation=activation, crop=crop)
    initialization = Initialization(rule, first_layer=first_layer)
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
