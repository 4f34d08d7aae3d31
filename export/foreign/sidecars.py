"""What the makers of a net wrote beside it: its classes, and how its images are prepared.

Hugging Face's `config.json` and `preprocessor_config.json` (transformers, image processors), and timm's `config.json`,
with `pretrained_cfg` (timm/data/config.py). What no model file can state, such as another filter, is refused.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from ...evaluator.errors import UsageError, from_os_error
from ...evaluator.files import read_regular
from ...evaluator.json_checks import parse_json, require_object

_RESAMPLING = {2: "bilinear", 3: "bicubic"}  # of Pillow
_CONVNEXT_SQUASHES = 384  # pixels, from which on this processor resizes both sides
_Read: TypeAlias = Callable[[Mapping[str, Any]], dict[str, Any]]


@dataclass(frozen=True)
class Stated:
    """What the files beside a net state.

    values: of `Preprocessing` and `Preparation`, by their names there; crop and center_scale in pixels;
    classes: a file for `read_class_list`, None if there is none; sources: name of the file of each value.
    """

    values: dict[str, Any] = field(default_factory=dict)
    classes: Path | None = None
    sources: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        by_file: dict[str, list[str]] = {}
        for name, file in self.sources.items():
            by_file.setdefault(file, []).append(f"{name} {_shown(self.values[name])}")
        if self.classes is not None:
            by_file.setdefault(self.classes.name, []).append("classes")
        return "; ".join(f"{file}: {', '.join(parts)}" for file, parts in by_file.items())


def find_net(path: Path) -> Path:
    """Return the ONNX file that a path means: itself, or the only one of a folder or of `onnx` in it, or model.onnx.

    Raises UsageError if a folder has none, or several.
    """
    if not path.is_dir():
        return path
    found = sorted([*path.glob("*.onnx"), *path.glob("onnx/*.onnx")])
    chosen = [file for file in found if file.name == "model.onnx"] if len(found) > 1 else found
    if len(chosen) != 1:
        names = ", ".join(str(file.relative_to(path)) for file in found[:5]) or "none"
        raise UsageError(f"{path}: a folder with several ONNX files, or none ({names}). Give the file of the net")
    return chosen[0]


def read_sidecars(net: Path) -> Stated:
    """Read what lies beside a net, or in the folder above if it lies in `onnx`.

    Raises UsageError for a value that cannot be used, and for files that contradict each other.
    """
    folder = net.parent.parent if net.parent.name == "onnx" else net.parent
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    classes = None
    for name, read in _READERS.items():
        if not (file := folder / name).is_file():
            continue
        data, found = _read(file, read)
        if "id2label" in data or "label_names" in data:
            classes = file
        for key, value in found.items():
            if value is not None and values.setdefault(key, value) != value:
                raise UsageError(
                    f"{file}: {key} {_shown(value)}, but {sources[key]}: {_shown(values[key])}. Correct one of "
                    "them, or move it away"
                )
            if value is not None:
                sources.setdefault(key, name)
    return Stated(values, classes, sources)


def _read(file: Path, read: _Read) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the object in a file, and the values that `read` finds in it."""
    try:
        data = require_object(parse_json(read_regular(file)), "it")
        return data, read(data)
    except OSError as error:
        raise from_os_error(error) from error
    except (ValueError, TypeError, KeyError, IndexError) as error:
        reason = f"it lacks {error}" if isinstance(error, KeyError) else error
        raise UsageError(f"{file}: cannot be used: {reason}. Move it away and give the values as options") from error


def _shown(value: Any) -> str:
    return ",".join(f"{number:g}" for number in value) if isinstance(value, tuple) else str(value)


def _of_processor(data: Mapping[str, Any]) -> dict[str, Any]:
    """Read an image processor of transformers; its steps are resize, center crop, rescale, normalize."""
    values: dict[str, Any] = {"pixel_range": _range(data.get("rescale_factor", 1 / 255), data.get("do_rescale", True))}
    if data.get("do_normalize", True):
        values |= {key: tuple(map(float, data[f"image_{key}"])) for key in ("mean", "std")}
    else:
        values |= {"mean": (0.0, 0.0, 0.0), "std": (1.0, 1.0, 1.0)}
    if data.get("rescale_offset"):
        raise ValueError("it rescales images to -1 to 1 ('rescale_offset')")
    if not data.get("do_resize", True):
        raise ValueError("it does not resize images ('do_resize' is false)")
    if (resample := data["resample"]) not in _RESAMPLING:  # its default depends on the processor
        raise ValueError(f"'resample' is {resample}, but only 2 (bilinear) and 3 (bicubic) are supported")
    return {**values, "interpolation": _RESAMPLING[resample], **_geometry_of(data)}


def _geometry_of(data: Mapping[str, Any]) -> dict[str, Any]:
    """Read how an image processor resizes and crops."""
    size, crop = data["size"], data.get("crop_size") if data.get("do_center_crop", False) else None
    if isinstance(size, int):  # the form of old files
        size = {"height": size, "width": size} if crop is None else {"shortest_edge": size}
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
        return {"resize": "shorter", "crop": _square(crop), "center_scale": size["shortest_edge"]}
    side = _square(size)
    if crop is not None and _square(crop) != side:
        raise ValueError(f"it squashes images to {side} pixels and crops {_square(crop)} of them")
    return {"resize": "squash", "crop": side}


def _of_config(data: Mapping[str, Any]) -> dict[str, Any]:
    """Read timm's `pretrained_cfg`, or the size that a model of transformers states."""
    if "pretrained_cfg" not in data:
        return {"crop": data.get("image_size") if isinstance(data.get("image_size"), int) else None}
    stated = require_object(data["pretrained_cfg"], "pretrained_cfg")
    interpolation = stated.get("interpolation", "bilinear")
    if interpolation not in _RESAMPLING.values():
        raise ValueError(f"'interpolation' is {interpolation}, but only bilinear and bicubic are supported")
    _, rows, columns = stated["input_size"]
    crop, part, mode = (
        _square({"height": rows, "width": columns}),
        stated["crop_pct"],
        stated.get("crop_mode", "center"),
    )
    values: dict[str, Any] = {key: tuple(map(float, stated[key])) for key in ("mean", "std")}
    values |= {"pixel_range": 1, "interpolation": interpolation, "crop": crop}
    if mode == "squash" and part == 1:
        return values | {"resize": "squash"}
    if mode != "center":
        raise ValueError(f"'crop_mode' is {mode} with 'crop_pct' {part}, which is not supported")
    return values | {"resize": "shorter", "center_scale": math.floor(crop / part)}


def _range(factor: float, rescaled: bool) -> int:
    if rescaled and not math.isclose(factor, 1 / 255, rel_tol=1e-6):
        raise ValueError(f"'rescale_factor' is {factor}, but only 1/255 is supported")
    return 1 if rescaled else 255


def _square(size: Any) -> int:
    """Return the side of a square, given as a number or as height and width."""
    rows, columns = (size, size) if isinstance(size, int) else (size["height"], size["width"])
    if rows != columns or not isinstance(rows, int):
        raise ValueError(f"images of {rows}x{columns} pixels, but crops are square")
    return rows


_READERS: Mapping[str, _Read] = {
    "preprocessor_config.json": _of_processor,
    "config.json": _of_config,
}
