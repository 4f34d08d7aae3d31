"""`prelunet adopt`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from prelunet.evaluator.contract import Interpolation
from prelunet.evaluator.errors import UsageError
from prelunet.evaluator.terminal import echo

if TYPE_CHECKING:
    from prelunet.export.foreign.adopt import AdoptResult


def adopt(
    *,
    net: Annotated[Path, typer.Argument(help="An ONNX classifier of one image size.", metavar="NET.onnx")],
    classes: Annotated[
        Path,
        typer.Option(
            help="The classes in the order of the net's outputs: text, one a line (wnid and name, or name), or JSON."
        ),
    ],
    output: Annotated[Path, typer.Option("-o", "--output", help="The model file to write.")],
    crop: Annotated[
        int | None, typer.Option(min=1, max=4096, help="Side of its images in pixels; else as its input says.")
    ] = None,
    mean: Annotated[
        str | None,
        typer.Option(help="Of each channel, in the net's order of channels; or one number.", metavar="M,M,M"),
    ] = None,
    std: Annotated[str | None, typer.Option(help="What is divided by afterwards.", metavar="S,S,S")] = None,
    pixel_range: Annotated[
        str, typer.Option("--range", help="Largest pixel when the mean is subtracted: 1 or 255.", metavar="1|255")
    ] = "1",
    channels: Annotated[Literal["rgb", "bgr"], typer.Option(help="Order in which the net takes its channels.")] = "rgb",
    interpolation: Annotated[
        Interpolation, typer.Option(help="Filter with which images were resized in its training.")
    ] = "bilinear",
    layout: Annotated[
        Literal["NCHW", "NHWC"] | None, typer.Option(help="Axes of its input; else as its shape says.")
    ] = None,
    net_output: Annotated[str | None, typer.Option(help="Which output holds the scores, if it has several.")] = None,
    kind: Annotated[
        Literal["auto", "logits", "softmax"], typer.Option(help="What its outputs are; auto: found by running it.")
    ] = "auto",
    name: Annotated[str | None, typer.Option(help="Of the architecture, in reports; else the file's name.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing file.")] = False,
) -> None:
    """Wrap an ONNX classifier of one image size into a model file, for center and ten-crop, reports and the server.

    The file is compared with the net itself in onnxruntime before it gets its name; on a mismatch no file is left.
    """
    from prelunet.export.foreign.adopt import AdoptOptions
    from prelunet.export.foreign.adopt import adopt as adopt_net
    from prelunet.training.importing.preprocessing import Preprocessing, parse_channel_values

    if output.exists() and not force:
        raise UsageError(f"{output}: exists already. Choose another name, or replace it with --force")
    preprocessing = Preprocessing(
        mean=None if mean is None else parse_channel_values(mean, "--mean"),
        std=None if std is None else parse_channel_values(std, "--std"),
        pixel_range=_pixel_range(pixel_range),
        channels=channels,
        interpolation=interpolation,
    )
    options = AdoptOptions(preprocessing, crop, layout, net_output, kind, name)
    _report(output, adopt_net(net, output, classes, options), preprocessing)


def _pixel_range(given: str) -> int:
    if given not in {"1", "255"}:
        raise UsageError(f"--range {given}: pixels run to 1 or to 255")
    return int(given)


def _report(output: Path, adopted: "AdoptResult", preprocessing: object) -> None:
    """Say what was found out, so that a wrong guess is seen."""
    contract, net = adopted.contract, adopted.interface
    kind = "probabilities (logits are their logarithms)" if adopted.probabilities else "logits"
    count = contract.architecture.get("multiply_adds")
    cost = "multiply-adds not countable" if count is None else f"{count:.4g} multiply-adds"
    batches = (
        "together" if not adopted.sequential_reason else f"one by one inside the graph ({adopted.sequential_reason})"
    )
    worst = max(adopted.deviations, key=lambda d: d.scores)
    echo(
        f"input '{net.input}': {net.layout}, crops of {net.crop}x{net.crop} pixels; {preprocessing}\n"
        f"output '{net.output}': {kind} of {len(contract.classes)} classes, found by running it\n"
        f"images of a batch go through the net {batches}\n"
        f"{output}: {contract.name}, {output.stat().st_size / 1e6:.1f} MB, opset {adopted.opset}, "
        f"{contract.precision}, {cost} a crop; {len(adopted.deviations)} runs agree with the plain net, worst score "
        f"off by {worst.scores:.1e} ({worst.case})"
    )
