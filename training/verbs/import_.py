"""`prelunet import`: convert third-party weights of a supported architecture to a checkpoint."""

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from ...evaluator.architectures import architecture
from ...evaluator.files import require_new
from ...evaluator.terminal import echo
from ..net.architecture_file import find_architecture
from ..net.checkpoints import size_summary
from ..net.initialization import parse_classes
from .net_options import ActivationOption, ArchOption, ClassesOption, CropOption, OutputOption

if TYPE_CHECKING:
    from ..importing.import_net import ImportResult


def import_(
    *,
    file: Annotated[
        Path,
        typer.Argument(
            help="State dict written by torch.save, or a .safetensors file.", metavar="FILE.pt|.safetensors"
        ),
    ],
    output: OutputOption,
    arch: ArchOption,
    classes: ClassesOption,
    mean: Annotated[
        str,
        typer.Option(
            help="Mean subtracted from pixels in training: one value per channel in the net's channel order, one "
            "value for all channels, or a mean image.",
            metavar="M,M,M|FILE.npy",
        ),
    ],
    std: Annotated[str, typer.Option(help="Divisor after mean subtraction; folded into conv1.", metavar="S,S,S")] = "1",
    pixel_range: Annotated[
        Literal["1", "255"], typer.Option("--range", help="Largest pixel value when the mean is subtracted.")
    ] = "1",
    channels: Annotated[
        Literal["rgb", "bgr"], typer.Option(help="Channel order of the net's input; Caffe uses bgr.")
    ] = "rgb",
    activation: ActivationOption = "prelu",
    crop: CropOption = None,
    name_map: Annotated[
        Path | None,
        typer.Option(
            "--map",
            help="Table that maps tensor names in FILE to prelunet's, in TOML or JSON.",
            metavar="FILE.toml|.json",
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing file.")] = False,
) -> None:
    """Convert a torch state dict or .safetensors file of a supported architecture to a checkpoint.

    Code in the file is never run. If tensors are missing, unexpected or have the wrong shape, all of them are listed.
    """
    # Imported here so that --help needs neither torch nor safetensors.
    from ..importing.import_net import import_net, parse_preprocessing
    from ..importing.name_map import read_name_map
    from ..net.checkpoints import write_checkpoint

    net = architecture(find_architecture(arch), activation=activation, crop=crop)
    entries = parse_classes(classes)
    require_new(output, force=force)
    preprocessing, mean_image = parse_preprocessing(mean, std, int(pixel_range), channels, net.crop)
    table = None if name_map is None else read_name_map(name_map)
    imported = import_net(file, net, entries, preprocessing, mean=mean_image, name_map=table)
    write_checkpoint(output, imported.checkpoint)
    _report(file, output, imported)


def _report(file: Path, output: Path, imported: "ImportResult") -> None:
    """Print how the file was interpreted, so that a wrong guess is noticed, and suggest the next commands."""
    net, mean = imported.checkpoint.architecture, imported.checkpoint.mean
    of_channels = mean.reshape(-1, 3).mean(axis=0, dtype="f8")
    label = "channel means of the mean image" if mean.ndim == 3 else "mean"
    source, method = imported.source, imported.method
    assigned = [f"{len(source)} tensors, assigned {method}"]
    if method == "by order":  # the full list, as equal shapes may hide a mistake
        assigned = [
            f"{len(source)} tensors, assigned by order because all shapes match; check the list:",
            *(f"  {name} -> {own}" for own, name in source.items()),
        ]
    for remark in (*imported.remarks, *assigned):
        echo(remark)
    echo(
        f"{output}: {net.name}, {net.activation}, {len(imported.checkpoint.classes)} classes, imported from {file}\n"
        f"  {size_summary(imported.checkpoint, output)}\n"
        f"  {label} {', '.join(f'{value:.2f}' for value in of_channels)} (R, G, B; 0 to 255)\n"
        "Next steps:\n"
        f"  prelunet inspect {shlex.quote(str(output))}\n"
        f"  prelunet export {shlex.quote(str(output))} -o {shlex.quote(str(output.with_suffix('.onnx')))}"
    )
