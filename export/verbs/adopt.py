"""`prelunet adopt`: wrap another ONNX classifier into a model file."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from ...evaluator.datasets.labels.class_file import read_class_list
from ...evaluator.errors import UsageError
from ...evaluator.files import check_not_input, require_new
from ...evaluator.preparation import Color, Interpolation, Resize
from ...evaluator.terminal import echo, report
from ...training.importing.preprocessing import (
    PRESETS,
    Channels,
    Layout,
    Preprocessing,
    Preset,
    parse_channel_values,
)

if TYPE_CHECKING:
    from ..foreign.adopt import AdoptResult

PANEL = "Preprocessing"


def adopt(
    *,
    net: Annotated[
        Path,
        typer.Argument(
            help="ONNX classifier with a fixed input size, or a folder with one and what its makers wrote beside it.",
            metavar="NET.onnx|DIR",
        ),
    ],
    output: Annotated[Path, typer.Option("-o", "--output", help="Model file to write.")],
    classes: Annotated[
        Path | None,
        typer.Option(
            help="Classes in the order of the net's outputs: imagenet-1k, or a file: text, one per line (wnid and "
            "name, or name), JSON or YAML.",
            metavar="imagenet-1k|FILE",
            show_default="from what its makers wrote beside it",
        ),
    ] = None,
    crop: Annotated[
        int | None,
        typer.Option(
            min=1, max=4096, help="Side of the net's input images, in pixels.", show_default="from the input's shape"
        ),
    ] = None,
    scale: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Side to which an image is resized before its central crop, in pixels.",
            show_default="crop·256/224; of whole images, the crop",
            rich_help_panel=PANEL,
        ),
    ] = None,
    preset: Annotated[
        Preset | None,
        typer.Option(
            help="Usual preprocessing: torchvision (ImageNet's mean and std, bilinear), timm (the same, bicubic), "
            "timm-inception (mean and std 0.5, bicubic), keras-tf (mean and std 0.5, bilinear), keras-caffe (BGR, "
            "pixels from 0 to 255 minus the mean, bilinear), ultralytics (pixels from 0 to 1), clip (its mean and std, "
            "bicubic), hf-vit (mean and std 0.5, squashed). The options below override its values.",
            rich_help_panel=PANEL,
        ),
    ] = None,
    mean: Annotated[
        str | None,
        typer.Option(
            help="Mean per channel, in the net's channel order, or one number.", metavar="M,M,M", rich_help_panel=PANEL
        ),
    ] = None,
    std: Annotated[
        str | None,
        typer.Option(
            help="Standard deviation per channel, by which the difference is divided.",
            metavar="S,S,S",
            rich_help_panel=PANEL,
        ),
    ] = None,
    pixel_range: Annotated[
        Literal["1", "255"] | None,
        typer.Option(
            "--range",
            help="Largest pixel value when the mean is subtracted.",
            show_default="1",
            rich_help_panel=PANEL,
        ),
    ] = None,
    channels: Annotated[
        Channels | None,
        typer.Option(
            help="Channel order of the net's input.",
            show_default="rgb, gray if it has one channel",
            rich_help_panel=PANEL,
        ),
    ] = None,
    interpolation: Annotated[
        Interpolation | None,
        typer.Option(help="Resize filter used in the net's training.", show_default="bilinear", rich_help_panel=PANEL),
    ] = None,
    resize: Annotated[
        Resize | None,
        typer.Option(
            help="What was resized in the net's training. shorter: the shorter side, before a crop; squash: both "
            "sides, to the net's own; pad: the longer side, with a border around the image.",
            show_default="shorter",
            rich_help_panel=PANEL,
        ),
    ] = None,
    pad_color: Annotated[
        str | None,
        typer.Option(
            help="Color of the border, levels from 0 to 255, or one for gray.",
            metavar="R,G,B",
            show_default="0,0,0",
            rich_help_panel=PANEL,
        ),
    ] = None,
    antialias: Annotated[
        bool | None,
        typer.Option(
            "--antialias/--no-antialias",
            help="Resize as Pillow does, or as OpenCV, TensorFlow and torch's interpolate.",
            show_default="antialias",
            rich_help_panel=PANEL,
        ),
    ] = None,
    layout: Annotated[
        Layout | None,
        typer.Option(help="Axes of the net's input.", show_default="from the input's shape"),
    ] = None,
    net_output: Annotated[str | None, typer.Option(help="Output with the scores, if the net has several.")] = None,
    kind: Annotated[
        Literal["auto", "logits", "softmax", "sigmoid"],
        typer.Option(help="Type of the net's output (sigmoid: one score); auto: detected by running the net."),
    ] = "auto",
    name: Annotated[
        str | None, typer.Option(help="Name of the architecture in reports.", show_default="the file name")
    ] = None,
    dense: Annotated[
        bool,
        typer.Option(
            "--dense", help="Also score every window of larger images: protocols dense-S and multi-scale, heat maps."
        ),
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing file.")] = False,
) -> None:
    """Wrap an ONNX classifier into a model file, for the protocols center and ten-crop, or with --dense for all.

    The file is checked against the original net in onnxruntime before it is put in place; a mismatch leaves no file.
    """
    from ..foreign.adopt import AdoptOptions
    from ..foreign.adopt import adopt as adopt_net
    from ..foreign.sidecars import ClassList, find_net, read_sidecars

    require_new(output, force=force)
    net = find_net(net)
    stated = read_sidecars(net, values=preset is None, classes=classes is None)
    if classes is not None:
        check_not_input(output, [classes])
        listed = ClassList(read_class_list(classes), str(classes))
    elif stated.classes is not None:
        listed = stated.classes
    else:
        raise UsageError(f"{net}: no classes. Give --classes; neither the net's metadata nor a file beside it has them")
    given: dict[str, Any] = {
        "mean": None if mean is None else parse_channel_values(mean, "--mean"),
        "std": None if std is None else parse_channel_values(std, "--std"),
        "pixel_range": None if pixel_range is None else int(pixel_range),
        "channels": channels,
        "interpolation": interpolation,
        "resize": resize,
        "pad_color": None if pad_color is None else _parse_color(pad_color),
        "antialias": antialias,
    }
    values = dict(stated.values)
    stated_crop, stated_scale = values.pop("crop", None), values.pop("center_scale", None)
    usual = _changed(Preprocessing(None, None) if preset is None else PRESETS[preset], values)
    preprocessing = _changed(usual, {name: value for name, value in given.items() if value is not None})
    if pad_color is not None and preprocessing.preparation.resize != "pad":
        raise UsageError("--pad-color is of --resize pad. Give both, or neither")
    if resize is not None:  # the scale was that of another way to resize
        stated_scale = None
    center_scale = scale or stated_scale
    if str(stated):
        echo(f"beside the net: {stated}")
    options = AdoptOptions(preprocessing, crop or stated_crop, layout, net_output, kind, name, dense, center_scale)
    _report(output, adopt_net(net, output, listed, options), detected=kind == "auto")


def _changed(usual: Preprocessing, values: Mapping[str, Any]) -> Preprocessing:
    """Return the preprocessing with some values of its own and of its preparation."""
    inner = {name: value for name, value in values.items() if name in vars(usual.preparation)}
    own = {name: value for name, value in values.items() if name not in inner}
    return replace(usual, preparation=replace(usual.preparation, **inner), **own)


def _parse_color(text: str) -> Color:
    """Parse `124,116,104`, or one level for all channels; raises UsageError for anything else."""
    levels = parse_channel_values(text, "--pad-color")
    if any(level not in range(256) for level in levels):
        raise UsageError(f"--pad-color {text}: should be whole numbers from 0 to 255")
    red, green, blue = map(int, levels)
    return red, green, blue


def _report(output: Path, adopted: "AdoptResult", *, detected: bool) -> None:
    """Print what was detected, so that the user can check it."""
    contract, net = adopted.contract, adopted.interface
    kind = "probabilities (logits are their logarithms)" if adopted.probabilities else "logits"
    if net.one_score:
        kind = f"one {'probability' if adopted.probabilities else 'logit'}, of '{contract.classes[1].name}' "
        kind += f"(from {'0.5' if adopted.probabilities else '0'} on; else '{contract.classes[0].name}')"
    count = contract.multiply_adds(contract.crop, contract.crop)
    how = ", detected by running the net" if detected else ""
    cost = "multiply-adds unknown" if count is None else f"{count:.4g} multiply-adds per crop"
    batches = f"sequentially ({adopted.sequential_reason})" if adopted.sequential_reason else "together"
    dense = ""
    if not contract.fixed_size:
        scales = ", ".join(map(str, contract.default_scales))
        dense = (
            f"dense: windows of {contract.window}x{contract.window} cells of its feature map, {contract.trunk_stride} "
            f"pixels apart; multi-scale at {scales}\n"
        )
    worst = max(adopted.deviations, key=lambda d: d.scores)
    echo(
        f"input '{net.input}': {net.layout}, crops of {net.crop}x{net.crop} pixels; {adopted.preprocessing}\n"
        f"output '{net.output}': {kind}{'' if net.one_score else f' of {len(contract.classes)} classes'}{how}\n"
        f"images of a batch run through the net {batches}\n{dense}"
        f"{output}: {contract.name}, {output.stat().st_size / 1e6:.1f} MB, opset {adopted.opset}, "
        f"{contract.precision}, {cost}; {len(adopted.deviations)} runs agree with the original net, largest "
        f"score deviation {worst.scores:.1e} ({worst.case})"
    )
    if adopted.alike:
        report(
            "warning: the net gives the same scores to all test images, among them black, white and noise. Its weights "
            "may be missing, or --mean, --std and --range may be far from those of its training"
        )
