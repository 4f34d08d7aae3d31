"""Adoption as a user asks for it: the options of a foreign net, what they mean for its file, and the model file."""

import hashlib
import importlib.metadata
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import msgspec

from ..evaluator.cli_option import option
from ..evaluator.engine.runtimes.onnx_metadata import is_model_file
from ..evaluator.engine.verify import TOLERANCES
from ..evaluator.errors import CheckFailed, UsageError, import_from_extra
from ..evaluator.files import create_folder
from ..evaluator.machine import onnxruntime_supports_int8
from ..evaluator.preparation import Antialias, Color, Interpolation, Resize
from ..training.importing.preprocessing import (
    PRESETS,
    Channels,
    ChannelValues,
    Layout,
    Preprocessing,
    Preset,
    parse_channel_values,
)
from .foreign.sidecars import ClassList, Stated, find_net, read_classes, read_sidecars

if TYPE_CHECKING:
    from .foreign.adopt import AdoptOptions, AdoptResult


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
        "hf-vit (mean and std 0.5, squashed, antialiased as by torch). The options below override its values.",
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

    def __post_init__(self) -> None:
        """Raise UsageError for options without what they belong to."""
        if self.find_input is None and (self.reference or self.find_images or self.find_log):
            raise UsageError("--reference, --find-images and --find-log need --find-input DATA. Give that too")
        if self.reference is not None and self.find_images is not None:
            raise UsageError("--find-images with --reference, which needs all of its images. Omit one of them")


@dataclass(frozen=True)
class NetOptions:
    """What a user says about a foreign net; None: as its file or the files beside it have it."""

    classes: Path | None = option(
        None,
        "Classes in the order of the net's outputs: imagenet-1k, or a file: text, one per line (wnid and name, or "
        "name), JSON or YAML.",
        metavar="imagenet-1k|FILE",
        default="from what its makers wrote beside it",
    )
    crop: int | None = option(
        None, "Side of the net's input images, in pixels.", default="from the input's shape", min=1, max=4096
    )
    preprocessing: PreprocessingOptions = PreprocessingOptions()
    find: FindOptions = FindOptions()
    layout: Layout | None = option(None, "Axes of the net's input.", default="from the input's shape")
    net_output: str | None = option(None, "Output with the scores, if the net has several.")
    kind: Literal["auto", "logits", "softmax", "sigmoid"] = option(
        "auto", "Type of the net's output (sigmoid: one score); auto: detected by running the net."
    )
    name: str | None = option(None, "Name of the architecture in reports.", default="the file name")
    dense: bool = option(
        False, "Also score every window of larger images: protocols dense-S and multi-scale, heat maps."
    )


def net_options(keywords: Mapping[str, Any]) -> NetOptions:
    """Return options given by the names of their fields. Raises UsageError for other names, and for wrong values."""
    values, names = (
        {name: _spread(name, value) for name, value in keywords.items()},
        {each.name for each in fields(NetOptions)} - {"preprocessing", "find"},
    )
    for part, kind in (("preprocessing", PreprocessingOptions), ("find", FindOptions)):
        inner = {each.name for each in fields(kind)}
        values[part], names = {name: values.pop(name) for name in inner & keywords.keys()}, names | inner
    if unknown := keywords.keys() - names:
        raise UsageError(f"{', '.join(sorted(unknown))}: no such option. There are: {', '.join(sorted(names))}")
    try:
        return msgspec.convert(values, NetOptions, dec_hook=lambda kind, value: kind(value))  # of paths
    except msgspec.ValidationError as error:
        raise UsageError(f"options of the net: {error}. prelunet adopt --help lists what each may be") from error


def _spread(name: str, value: Any) -> Any:
    """Return one number as that of all three channels, as on the command line."""
    return (value,) * 3 if name in {"mean", "std", "pad_color"} and isinstance(value, int | float) else value


def resolve_options(
    net: Path,
    own: NetOptions,
    report: Callable[[str], None],
    *,
    classes_needed: bool = True,
    check: Callable[[ClassList], None] | None = None,
) -> tuple[ClassList | None, "AdoptOptions"]:
    """Return a net's classes, None if it has none and they are not needed, and how to adopt it.

    report: receives what was read beside the net, and what was found with `--find-input`; check: is called with the
    classes before anything is found, which may take minutes.
    Raises UsageError for options that contradict each other, and for what neither they nor the net state.
    """
    from .foreign.adopt import HOW_TO_STATE, AdoptOptions

    stated = read_sidecars(net, values=own.preprocessing.preset is None, classes=own.classes is None)
    listed = stated.classes if own.classes is None else read_classes(own.classes)
    chosen, stated_crop, scale = _chosen(own.preprocessing, stated, own.crop)
    if listed is None and classes_needed:
        too = ""
        if chosen.mean is None and own.find.find_input is None:
            too = f". Nor do they state the preprocessing: give {HOW_TO_STATE}, unless the net takes bytes"
        raise UsageError(
            f"{net}: no classes. Give --classes; neither the net's metadata nor a file beside it has them{too}"
        )
    if str(stated):
        report(f"beside the net: {stated}")
    if check is not None and listed is not None:
        check(listed)
    crop = own.crop or stated_crop
    options = AdoptOptions(chosen, crop, own.layout, own.net_output, own.kind, own.name, own.dense, scale)
    return listed, options if own.find.find_input is None else _with_found(net, own.find, listed, options, report)


def ensure_model_file(
    net: Path,
    own: NetOptions,
    folder: Path,
    report: Callable[[str], None],
    check: Callable[[ClassList], None] | None = None,
) -> Path:
    """Return the model file of a net: itself if it is one, else the file in a folder to which it is adopted.

    A net is adopted only if its file is not there yet: the name ends with a digest of the net with its weights, what is
    stated about it, and prelunet's version. The digest is not of the file, because a runtime need not return the same
    bits twice, and a run that is resumed needs the same file.
    report: receives sentences; check: is called with the classes before the work.
    Raises UsageError for options with a model file, MissingExtra without onnx, and otherwise as `adopt` does.
    """
    net = find_net(net)
    if is_model_file(net):
        if own != NetOptions():
            raise UsageError(
                f"{net}: a model file, which states its classes and preprocessing. Omit the options of adopt, such as "
                "--preset and --classes (--only-classes selects some), or give the original net"
            )
        return net
    import_from_extra("onnx")
    from .foreign.adopt import adopt
    from .foreign.read_net import digest_of, read_net

    weights = digest_of(read_net(net))
    classes, options = resolve_options(net, own, report, check=check)
    assert classes is not None
    stated = repr((weights, classes.entries, options, importlib.metadata.version("prelunet")))
    output = folder / f"{net.stem}-{hashlib.sha256(stated.encode()).hexdigest()[:8]}.onnx"
    if output.exists():
        report(f"{net}: already adopted, as {output}")
        return output
    create_folder(folder, "--run")
    adopted = adopt(net, output, classes, options)
    for text in (describe(output, adopted, detected=own.kind == "auto"), *warnings_of(adopted)):
        report(text)
    return output


def _chosen(
    preprocessing: PreprocessingOptions, stated: Stated, crop: int | None
) -> tuple[Preprocessing, int | None, int | None]:
    """Return the preprocessing, its crop as stated beside the net, and its scale, both in pixels."""
    values = dict(stated.values)
    stated_crop, stated_scale = values.pop("crop", None), values.pop("center_scale", None)
    given = {name: value for name, value in vars(preprocessing).items() if value is not None}
    preset, scale = given.pop("preset", None), given.pop("scale", None)
    # The scale stated is that of the way to resize, for the crop stated.
    if given.get("resize", values.get("resize")) == values.get("resize") and crop in {None, stated_crop}:
        scale = scale or stated_scale
    usual = _changed(Preprocessing(None, None) if preset is None else PRESETS[preset], values)
    chosen = _changed(usual, given)
    if "pad_color" in given and chosen.preparation.resize != "pad":
        raise UsageError("--pad-color is of --resize pad. Give both, or neither")
    return chosen, stated_crop, scale


def _with_found(
    net: Path, find: FindOptions, classes: ClassList | None, options: "AdoptOptions", report: Callable[[str], None]
) -> "AdoptOptions":
    """Report how the net's images were prepared, and return the options with that."""
    from .finding.find import IMAGES, find_input

    own = options.preprocessing
    if own.mean is None and own != Preprocessing(None, None):
        raise UsageError(
            "--find-input with some values of the preprocessing: they join the answers if --preset, or --mean and "
            "--std, are given, too. Give all or none"
        )
    assert find.find_input is not None
    found = find_input(
        net, find.find_input, classes=() if classes is None else classes.entries, reference=find.reference,
        images=IMAGES if find.find_images is None else find.find_images, log=find.find_log or Path(),
        crop=options.crop, layout=options.layout, net_output=options.net_output, kind=options.kind, dense=options.dense,
        given=None if own.mean is None else own, given_scale=options.center_scale,
    )  # fmt: skip
    report(str(found))
    if find.reference is not None and not found.exact:
        raise CheckFailed(f"{net}: the outputs of {find.reference} were not reproduced, so no model file is written")
    best = found.candidate
    return replace(options, preprocessing=best.preprocessing, center_scale=best.scale, found=found.to_json())


def _changed(usual: Preprocessing, values: Mapping[str, Any]) -> Preprocessing:
    """Return the preprocessing with some values of its own and of its preparation."""
    inner = {name: value for name, value in values.items() if name in vars(usual.preparation)}
    own = {name: value for name, value in values.items() if name not in inner}
    return replace(usual, preparation=replace(usual.preparation, **inner), **own)


def describe(output: Path, adopted: "AdoptResult", *, detected: bool) -> str:
    """Return what was detected, in lines, so that the user can check it. detected: also the kind of output."""
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
    return (
        f"input '{net.input}': {net.layout}, crops of {net.crop}x{net.crop} pixels; {adopted.preprocessing}\n"
        f"output '{net.output}': {kind}{'' if net.one_score else f' of {len(contract.classes)} classes'}{how}\n"
        f"images of a batch run through the net {batches}\n{dense}{int8}"
        f"{output}: {contract.name}, {output.stat().st_size / 1e6:.1f} MB, opset {adopted.opset}, "
        f"{contract.precision}, {cost}; {len(adopted.deviations)} runs agree with the original net, largest "
        f"score deviation {worst.scores:.1e} ({worst.case})"
    )


def warnings_of(adopted: "AdoptResult") -> Iterator[str]:
    """Yield what an adopted net makes doubtful."""
    if adopted.int8_moves is not None and adopted.int8_moves.scores > TOLERANCES["bf16"].scores:  # 8 bits, too
        yield (
            "warning: int8 and fp32 differ so much that runs on processors with and without VNNI cannot be compared, "
            "and prelunet verify notices only larger errors"
        )
    if adopted.alike:
        yield (
            "warning: the net gives the same scores to all test images, among them black, white and noise. Its weights "
            "may be missing, or --mean, --std and --range may be far from those of its training"
        )
