"""What the makers of a net wrote beside it or into it: its classes, and how its images are prepared.

Hugging Face's `config.json` and `preprocessor_config.json` (transformers, image processors); timm's `config.json`, with
`pretrained_cfg` (timm/data/config.py); Keras's `class_indices.json`, torchvision's `class_to_idx.json`, TorchServe's
`index_to_name.json`, YAML with `names`; the ONNX file's own metadata: Ultralytics' (its exporter), PaddleOCR's
`character`, and ONNX's `Image.*` (docs/MetadataProps.md of onnx). What no model file can state, such as another
filter, is refused.
"""

import ast
import math
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from ...evaluator.contract import ClassEntry
from ...evaluator.datasets.labels.class_file import parse_class_list, read_class_list
from ...evaluator.engine.runtimes.onnx_metadata import is_model_file, read_metadata
from ...evaluator.errors import UsageError, from_os_error
from ...evaluator.files import read_regular
from ...evaluator.json_checks import parse_json, require_int, require_object
from ...training.importing.preprocessing import PRESETS

_RESAMPLING = {0: "nearest", 1: "lanczos", 2: "bilinear", 3: "bicubic"}  # of Pillow
_ANTIALIASING = {0: "none", 1: "pillow", 2: "torch", 3: "torch"}  # of transformers, which resizes tensors where it can
# Image processors of transformers that resize, crop, rescale and normalize, → whether they crop if their file does not
# say. Others do more, such as dividing by the std twice (EfficientNet) or resizing to another size (LeViT).
_PROCESSORS = {
    **dict.fromkeys(("ViT", "Beit", "ConvNext", "Pvt", "Siglip"), False),
    **dict.fromkeys(("DeiT", "CLIP", "Bit", "MobileNetV1", "MobileNetV2"), True),
}
_BY_SHORTER_SIDE = {"ConvNext", "Siglip", "CLIP", "Bit", "MobileNetV1", "MobileNetV2"}  # what a size alone is of
_CONVNEXT_SQUASHES = 384  # pixels, from which on this processor resizes both sides
_CLASS_FILES = ("class_indices.json", "class_to_idx.json", "index_to_name.json", "metadata.yaml", "data.yaml")
# ONNX's Image.NominalPixelRange → mean, std and largest value of the pixels
_RANGES = {"NominalRange_0_255": (0.0, 1.0, 255), "Normalized_0_1": (0.0, 1.0, 1), "Normalized_1_1": (0.5, 0.5, 1)}
_FORMATS = {"Rgb8": "rgb", "Bgr8": "bgr", "Gray8": "gray"}  # its Image.BitmapPixelFormat
_Read: TypeAlias = Callable[[Mapping[str, Any]], dict[str, Any]]


@dataclass(frozen=True)
class ClassList:
    """The classes of a net, in the order of its outputs. source: where they come from, for messages."""

    entries: tuple[ClassEntry, ...]
    source: str


@dataclass(frozen=True)
class Stated:
    """What the makers of a net state.

    values: of `Preprocessing` and `Preparation`, by their names there; crop and center_scale in pixels; sources: name
    of the source of each value.
    """

    values: dict[str, Any] = field(default_factory=dict)
    classes: ClassList | None = None
    sources: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        by_source: dict[str, list[str]] = {}
        for name, source in self.sources.items():
            by_source.setdefault(source, []).append(f"{name} {_shown(self.values[name])}")
        if self.classes is not None:
            by_source.setdefault(self.classes.source, []).append(f"{len(self.classes.entries)} classes")
        return "; ".join(f"{source}: {', '.join(parts)}" for source, parts in by_source.items())


def read_classes(file: Path) -> ClassList:
    """Read a class list that the user gave. Raises UsageError."""
    return ClassList(read_class_list(file), str(file))


def find_net(path: Path) -> Path:
    """Return the ONNX file that a path means: itself, or the only one of a folder or of `onnx` in it, or model.onnx.

    Raises UsageError if a folder has none, or several.
    """
    if not path.is_dir():
        return path
    found = sorted([*path.glob("*.onnx"), *path.glob("onnx/*.onnx")])
    if len(found) > 1:
        found = [file for file in found if not is_model_file(file)] or found  # ours may be adopted from the net
    chosen = [file for file in found if file.name == "model.onnx"] if len(found) > 1 else found
    if len(chosen) != 1:
        names = ", ".join(str(file.relative_to(path)) for file in found[:5])
        what = f"several ONNX files ({names})" if found else "no ONNX file, also not in its folder `onnx`"
        raise UsageError(f"{path}: a folder with {what}. Give the file of the net")
    return chosen[0]


def read_sidecars(net: Path, *, values: bool = True, classes: bool = True) -> Stated:
    """Read what a net's file states, and what lies beside it, or in the folder above if it lies in `onnx`.

    values, classes: what to read. Raises UsageError for a value that cannot be used, and for sources that contradict
    each other.
    """
    beside = net.absolute().parent
    folder = beside.parent if beside.name == "onnx" and not _states_something(beside) else beside
    found = Stated(classes=_agreed(_class_lists(net, folder)) if classes else None)
    for source, stated in _stated_values(net, folder) if values else ():
        for key, value in stated.items():
            if value is not None and found.values.setdefault(key, value) != value:
                there, other = found.sources[key], _shown(found.values[key])
                raise UsageError(
                    f"{source}: {key} {_shown(value)}, but {there}: {other}. Correct one of them, or move it away"
                )
            if value is not None:
                found.sources.setdefault(key, source)
    return found


def _states_something(folder: Path) -> bool:
    return any((folder / name).is_file() for name in (*_READERS, *_CLASS_FILES))


def _stated_values(net: Path, folder: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each source and its values."""
    for name, read in _READERS.items():
        if (file := folder / name).is_file():
            data = _json_object(file)
            with _usable(file):
                values = read(data)
            yield name, values
    metadata = read_metadata(net)
    with _usable(f"{net}: its metadata"):
        values = _of_metadata(metadata)
    yield f"metadata of {net.name}", values


def _class_lists(net: Path, folder: Path) -> Iterator[ClassList]:
    """Yield each list of the net's classes."""
    for name in _READERS:
        if (file := folder / name).is_file() and not {"id2label", "label_names"}.isdisjoint(_json_object(file)):
            yield ClassList(read_class_list(file), name)
    for name in _CLASS_FILES:
        if (file := folder / name).is_file():
            yield ClassList(read_class_list(file), name)
    metadata = read_metadata(net)
    for key in ("names", "character"):  # of Ultralytics and PaddleOCR
        if key in metadata:
            source = f"metadata of {net.name}"
            yield ClassList(parse_class_list(metadata[key], f"{net}: '{key}' of its metadata"), source)


def _agreed(lists: Iterator[ClassList]) -> ClassList | None:
    """Return the first list. Raises UsageError for another one with other names."""
    if (first := next(lists, None)) is None:
        return None
    for other in lists:
        names, others = ([entry.name for entry in each.entries] for each in (first, other))
        if len(names) != len(others):
            raise UsageError(
                f"{other.source}: {len(others)} classes, but {len(names)} in {first.source}. Give --classes"
            )
        for index, (name, another) in enumerate(zip(names, others, strict=True)):
            if name != another:
                raise UsageError(
                    f"{other.source}: class {index} is '{another}', but '{name}' in {first.source}. Give --classes"
                )
    return first


def _json_object(file: Path) -> dict[str, Any]:
    with _usable(file):
        return require_object(parse_json(read_regular(file)), "it")


@contextmanager
def _usable(where: Path | str) -> Iterator[None]:
    """Turn what is wrong with data into a UsageError. where: names them."""
    try:
        yield
    except OSError as error:
        raise from_os_error(error) from error
    except (ValueError, TypeError, LookupError, ArithmeticError, SyntaxError, RecursionError, MemoryError) as error:
        reason = f"it lacks {error}" if isinstance(error, KeyError) else str(error) or type(error).__name__
        raise UsageError(f"{where}: cannot be used: {reason}. Pass --preset, and options for what differs") from error


def _shown(value: Any) -> str:
    return ",".join(f"{number:g}" for number in value) if isinstance(value, tuple) else str(value)


def _of_processor(data: Mapping[str, Any]) -> dict[str, Any]:
    """Read an image processor of transformers; its steps are resize, center crop, rescale, normalize."""
    kind = data.get("image_processor_type", data.get("feature_extractor_type", "ViTImageProcessor"))
    if (name := re.sub("(ImageProcessor|FeatureExtractor).*", "", kind)) not in _PROCESSORS:
        raise ValueError(f"'image_processor_type' is {kind}, but only those of {', '.join(_PROCESSORS)} are supported")
    data = {"do_center_crop": _PROCESSORS[name], **data}
    values: dict[str, Any] = {"pixel_range": _range(data.get("rescale_factor", 1 / 255), data.get("do_rescale", True))}
    if data.get("do_normalize", True):
        values |= {key: _channels(f"image_{key}", data) for key in ("mean", "std")}
    else:
        values |= {"mean": (0.0, 0.0, 0.0), "std": (1.0, 1.0, 1.0)}
    if data.get("rescale_offset"):
        raise ValueError("it rescales images to -1 to 1 ('rescale_offset')")
    if not data.get("do_resize", True):
        raise ValueError("it does not resize images ('do_resize' is false)")
    if (
        resample := require_int(data["resample"], "resample", 0)
    ) not in _RESAMPLING:  # its default depends on the processor
        raise ValueError(f"'resample' is {resample}, but only 0 to 3 (Pillow's nearest to bicubic) are supported")
    filtered = {"interpolation": _RESAMPLING[resample], "antialias": _ANTIALIASING[resample]}
    return {**values, **filtered, "rounding": "transformers", **_geometry_of(data, name)}


def _geometry_of(data: Mapping[str, Any], processor: str) -> dict[str, Any]:
    """Read how an image processor resizes and crops."""
    size, crop = data["size"], data.get("crop_size") if data.get("do_center_crop", False) else None
    if isinstance(size, int):  # the form of old files
        size = {"shortest_edge": size} if processor in _BY_SHORTER_SIDE else {"height": size, "width": size}
    if "crop_pct" in data:  # ConvNeXt's processor
        if crop is not None:
            raise ValueError("it has both 'crop_pct' and 'crop_size'")
        side = size["shortest_edge"]
        if side < _CONVNEXT_SQUASHES:
            scale = int(side / (data["crop_pct"] or 224 / 256))
            return {"resize": "shorter", "crop": side, "center_scale": scale}
        size = {"height": side, "width": side}
    if "shortest_edge" in size:
        if crop is None:
            raise ValueError("it crops nothing ('do_center_crop' is false), so images have different sizes")
        scale = require_int(size["shortest_edge"], "shortest_edge", 1)
        return {"resize": "shorter", "crop": _square(crop), "center_scale": scale}
    side = _square(size)
    return {"resize": "squash", "crop": side if crop is None else _square(crop), "center_scale": side}


def _of_config(data: Mapping[str, Any]) -> dict[str, Any]:
    """Read timm's `pretrained_cfg`. The `image_size` of transformers' models need not be that of their images."""
    if "pretrained_cfg" not in data:
        return {}
    stated = require_object(data["pretrained_cfg"], "pretrained_cfg")
    interpolation = stated.get("interpolation", "bicubic")  # as timm
    if interpolation not in _RESAMPLING.values():
        raise ValueError(f"'interpolation' is {interpolation}, but only Pillow's four filters are supported")
    _, rows, columns = stated["input_size"]
    crop, part, mode = (
        _square({"height": rows, "width": columns}),
        stated["crop_pct"],
        stated.get("crop_mode", "center"),
    )
    values: dict[str, Any] = {key: _channels(key, stated) for key in ("mean", "std")}
    values |= {"pixel_range": 1, "interpolation": interpolation, "crop": crop}
    values["center_scale"] = math.floor(crop / part)
    if mode == "border":
        if values["center_scale"] != crop:  # each side is padded or cropped to the crop, not to a square before it
            raise ValueError(f"'crop_mode' is border with 'crop_pct' {part}, but only 1 is supported")
        return values | {"resize": "pad", "pad_color": tuple(round(255 * level) for level in values["mean"])}
    return values | {"resize": _known("crop_mode", mode, {"center": "shorter", "squash": "squash"})}


def _channels(key: str, data: Mapping[str, Any]) -> tuple[float, ...]:
    """Return three numbers; those of gray images are given as one, in a list or alone."""
    numbers = data[key] if isinstance(data[key], list) else [data[key]]
    if len(numbers) not in {1, 3} or not {*map(type, numbers)} <= {int, float}:
        raise ValueError(f"'{key}' should be three numbers, or one of gray images")
    return tuple(map(float, numbers)) * (3 // len(numbers))


def _range(factor: float, rescaled: bool) -> int:
    if rescaled and not math.isclose(factor, 1 / 255, rel_tol=1e-6):
        raise ValueError(f"'rescale_factor' is {factor}, but only 1/255 is supported")
    return 1 if rescaled else 255


def _square(size: Any) -> int:
    """Return the side of a square, given as a number or as height and width."""
    rows, columns = (size, size) if isinstance(size, int) else (size["height"], size["width"])
    if rows != columns:
        raise ValueError(f"images of {rows}x{columns} pixels, but crops are square")
    return require_int(rows, "their side", 1)


def _of_metadata(data: Mapping[str, str]) -> dict[str, Any]:
    """Read the metadata of an ONNX file: of Ultralytics, or ONNX's own about images."""
    if data.get("author") == "Ultralytics" and data.get("task") == "classify":
        usual = PRESETS["ultralytics"]
        side = _square(dict(zip(("height", "width"), ast.literal_eval(data["imgsz"]), strict=True)))
        return {
            "mean": usual.mean, "std": usual.std, "interpolation": usual.interpolation, "crop": side,
            "center_scale": side, "resize": "shorter",
        }  # fmt: skip
    values: dict[str, Any] = {}
    if (pixels := data.get("Image.BitmapPixelFormat")) is not None:
        values["channels"] = _known("Image.BitmapPixelFormat", pixels, _FORMATS)
    if (nominal := data.get("Image.NominalPixelRange")) is not None:
        mean, std, values["pixel_range"] = _known("Image.NominalPixelRange", nominal, _RANGES)
        values |= {"mean": (mean,) * 3, "std": (std,) * 3}
    return values


def _known(key: str, value: str, known: Mapping[str, Any]) -> Any:
    if value not in known:
        raise ValueError(f"'{key}' is {value}, but only {', '.join(known)} are supported")
    return known[value]


_READERS: Mapping[str, _Read] = {
    "preprocessor_config.json": _of_processor,
    "processor_config.json": lambda data: (
        _of_processor(require_object(data["image_processor"], "image_processor")) if "image_processor" in data else {}
    ),
    "config.json": _of_config,
}
