"""`prelunet adopt`: wrap another ONNX classifier into a model file."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import typer

from ...evaluator.cli_option import option
from ...evaluator.engine.verify import TOLERANCES
from ...evaluator.errors import CheckFailed, UsageError
from ...evaluator.files import check_not_input, require_new
from ...evaluator.machine import onnxruntime_supports_int8
from ...evaluator.preparation import Antialias, Color, Interpolation, Resize
from ...evaluator.terminal import echo, report
from ...evaluator.verbs.options.derive import derive_options
from ...training.importing.preprocessing import (
    PRESETS,
    Channels,
    ChannelValues,
    Layout,
    Preprocessing,
    Preset,
    parse_channel_values,
)

if TYPE_CHECKING:
    from ..foreign.adopt import AdoptOptions, AdoptResult
    from ..foreign.sidecars import ClassList, Stated


def _numbers(option: str) -> Callable[[str | None], ChannelValues | None]:
    return lambda text: None if text is None else parse_channel_values(text, option)


def _parse_color(text: str | None) -> Color | None:
    """Parse `124,116,104`, or one level for all channels; raises UsageError for anything else."""
    if text is None:
        return None
    levels = parse_channel_values(text, "--pad-color")
    if any(level not in range(256) for level in levels):
        raise UsageError(f"--pad-color {text}: should be whole numbers from 0 to 255")
    red, green, blue = map(int, levels)
    return red, green, blue


@dataclass(frozen=True)
class PreprocessingOptions:
    """How the net's images were made in training; None: as the makers' files, the preset or the usual has it."""

    HELP_GROUP: ClassVar[str] = "Preprocessing"
    preset: Preset | None = option(
        None,
        "Usual preprocessing: torchvision (ImageNet's mean and std, bilinear), timm (the same, bicubic), "
        "timm-inception (mean and std 0.5, bicubic), keras-tf (mean and std 0.5, bilinear), keras-caffe (BGR, pixels "
        "from 0 to 255 minus the mean, bilinear), ultralytics (pixels from 0 to 1), clip (its mean and std, bicubic), "
        "hf-vit (mean and std 0.5, squashed). The options below override its values.",
    )
    mean: ChannelValues | None = option(
        None,
        "Mean per channel, in the net's channel order, or one number.",
        metavar="M,M,M",
        kind=str | None,
        parse=_numbers("--mean"),
    )
    std: ChannelValues | None = option(
        None,
        "Standard deviation per channel, by which the difference is divided.",
        metavar="S,S,S",
        kind=str | None,
        parse=_numbers("--std"),
    )
    pixel_range: int | None = option(
        None,
        "Largest pixel value when the mean is subtracted.",
        flag="range",
        default="1",
        kind=Literal["1", "255"] | None,
        parse=lambda text: text and int(text),
    )
    channels: Channels | None = option(
        None, "Channel order of the net's input.", default="rgb, gray if it has one channel"
    )
    resize: Resize | None = option(
        None,
        "What was resized. shorter: the shorter side, before a crop; squash: both sides, to a square; pad: the longer "
        "side, with a border around the image.",
        default="shorter",
    )
    scale: int | None = option(
        None,
        "Pixels of that side before the central crop.",
        default="crop·256/224; of whole images, the crop",
        min=1,
    )
    interpolation: Interpolation | None = option(None, "Filter of resizing.", default="bilinear")
    antialias: Antialias | None = option(
        None,
        "How the filter widens where images shrink. pillow: as Pillow's; torch: as torchvision's and transformers' on "
        "tensors; none: not, as in OpenCV, TensorFlow and torch's interpolate.",
        default="pillow",
    )
    pad_color: Color | None = option(
        None,
        "Color of the border, levels from 0 to 255, or one for gray.",
        metavar="R,G,B",
        default="0,0,0",
        kind=str | None,
        parse=_parse_color,
    )


@dataclass(frozen=True)
class FindOptions:
    """How to find the preprocessing."""

    HELP_GROUP: ClassVar[str] = "Finding the preprocessing"
    find_input: Path | None = option(
        None,
        "Find how the net's images were prepared, from these labeled images, or from those of --reference "
        "(docs/finding.md). Without -o only print it.",
        metavar="DATA",
    )
    reference: Path | None = option(
        None, "Outputs of the original pipeline for these images, (images, classes), by name.", metavar="FILE.npy"
    )
    find_images: int | None = option(None, "Labeled images to draw.", default="400", min=1)
    find_log: Path | None = option(
        None,
        "Folder for a file with every run of the net, from which a repeated command goes on.",
        default="the current folder",
    )

    def check(self) -> None:
        """Raise UsageError for options without what they belong to."""
        if self.find_input is None and (self.reference or self.find_images or self.find_log):
            raise UsageError("--reference, --find-images and --find-log need --find-input DATA. Give that too")
        if self.reference is not None and self.find_images is not None:
            raise UsageError("--find-images with --reference, which needs all of its images. Omit one of them")


@derive_options
def adopt(
    *,
    net: Annotated[
        Path,
        typer.Argument(
            help="ONNX classifier with a fixed input size, or a folder with one and what its makers wrote beside it.",
            metavar="NET.onnx|DIR",
        ),
    ],
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Model file to write; may be omitted with --find-input.")
    ] = None,
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
    preprocessing: PreprocessingOptions,
    find: FindOptions,
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
    from ..foreign.sidecars import find_net, read_classes, read_sidecars

    find.check()
    if output is not None:
        require_new(output, force=force)
    elif find.find_input is None:
        raise UsageError("no -o: give the model file to write")
    net = find_net(net)
    stated = read_sidecars(net, values=preprocessing.preset is None, classes=classes is None)
    if classes is not None and output is not None:
        check_not_input(output, [classes])
    listed = stated.classes if classes is None else read_classes(classes)
    if listed is None and (output is not None or find.reference is None):
        raise UsageError(f"{net}: no classes. Give --classes; neither the net's metadata nor a file beside it has them")
    if str(stated):
        echo(f"beside the net: {stated}")
    chosen, stated_crop, scale = _chosen(preprocessing, stated, crop)
    options = AdoptOptions(chosen, crop or stated_crop, layout, net_output, kind, name, dense, scale)
    if find.find_input is not None:
        options = _with_found(net, find.find_input, find, listed, options)
    if output is not None and listed is not None:
        _report(output, adopt_net(net, output, listed, options), detected=kind == "auto")


def _chosen(
    preprocessing: PreprocessingOptions, stated: "Stated", crop: int | None
) -> tuple[Preprocessing, int | None, int | None]:
    """Return the preprocessing, its crop as stated beside the net, and its scale, both in pixels."""
    values = dict(stated.values)
    stated_crop, stated_scale = values.pop("crop", None), values.pop("center_scale", None)
    given = {name: value for name, value in vars(preprocessing).items() if value is not None}
    preset, scale = given.pop("preset", None), given.pop("scale", None)
    if "resize" not in given and crop is None:  # the scale stated is that of the way to resize, for the crop stated
        scale = scale or stated_scale
    usual = _changed(Preprocessing(None, None) if preset is None else PRESETS[preset], values)
    chosen = _changed(usual, given)
    if "pad_color" in given and chosen.preparation.resize != "pad":
        raise UsageError("--pad-color is of --resize pad. Give both, or neither")
    return chosen, stated_crop, scale


def _with_found(
    net: Path, data: Path, find: FindOptions, classes: "ClassList | None", options: "AdoptOptions"
) -> "AdoptOptions":
    """Print how the net's images were prepared, and return the options with that."""
    from ..finding.find import IMAGES, find_input

    own = options.preprocessing
    if own.mean is None and own != Preprocessing(None, None):
        raise UsageError(
            "--find-input with some values of the preprocessing: they join the answers if --preset, or --mean and "
            "--std, are given, too. Give all or none"
        )
    found = find_input(
        net, data, classes=() if classes is None else classes.entries, reference=find.reference,
        images=find.find_images or IMAGES, log=find.find_log or Path(), crop=options.crop, layout=options.layout,
        net_output=options.net_output, kind=options.kind, dense=options.dense,
        given=None if own.mean is None else own, given_scale=options.center_scale,
    )  # fmt: skip
    echo(str(found))
    if find.reference is not None and not found.exact:
        raise CheckFailed(f"{net}: the outputs of {find.reference} were not reproduced, so no model file is written")
    best = found.candidate
    return replace(options, preprocessing=best.preprocessing, center_scale=best.scale, found=found.to_json())


def _changed(usual: Preprocessing, values: Mapping[str, Any]) -> Preprocessing:
    """Return the preprocessing with some values of its own and of its preparation."""
    inner = {name: value for name, value in values.items() if name in vars(usual.preparation)}
    own = {name: value for name, value in values.items() if name not in inner}
    return replace(usual, preparation=replace(usual.preparation, **inner), **own)


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
    int8 = ""
    if adopted.form is not None and adopted.int8_moves is not None:
        here = "int8, as the original"
        if not onnxruntime_supports_int8():
            instead = "fp32, on the rounded numbers" if adopted.form == "qdq" else "int8, slowly, but without overflow"
            here = f"{instead}, because this processor has neither VNNI nor AMX"
        if adopted.form == "qdq":
            here += f" (int8 and fp32 differ by up to {adopted.int8_moves.scores:.1e} in a score)"
        int8 = f"quantized to int8; on this processor onnxruntime computes it in {here}\n"
    worst = max(adopted.deviations, key=lambda d: d.scores)
    echo(
        f"input '{net.input}': {net.layout}, crops of {net.crop}x{net.crop} pixels; {adopted.preprocessing}\n"
        f"output '{net.output}': {kind}{'' if net.one_score else f' of {len(contract.classes)} classes'}{how}\n"
        f"images of a batch run through the net {batches}\n{dense}{int8}"
        f"{output}: {contract.name}, {output.stat().st_size / 1e6:.1f} MB, opset {adopted.opset}, "
        f"{contract.precision}, {cost}; {len(adopted.deviations)} runs agree with the original net, largest "
        f"score deviation {worst.scores:.1e} ({worst.case})"
    )
    if adopted.int8_moves is not None and adopted.int8_moves.scores > TOLERANCES["bf16"].scores:  # 8 bits, too
        report(
            "warning: int8 and fp32 differ so much that runs on processors with and without VNNI cannot be compared, "
            "and prelunet verify notices only larger errors"
        )
    if adopted.alike:
        report(
            "warning: the net gives the same scores to all test images, among them black, white and noise. Its weights "
            "may be missing, or --mean, --std and --range may be far from those of its training"
        )
