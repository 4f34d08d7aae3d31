"""The contract of a model file: the `prelunet.*` keys of an ONNX file's metadata.

Every value is JSON. docs/formats.md defines the contract; `export/` writes it, the evaluator reads it, and nothing
else passes between the two. Pure functions; no runtime is imported here.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property, partial
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias, get_type_hints

from msgspec import UNSET, Meta, Struct, UnsetType, convert, to_builtins
from msgspec.structs import astuple

from .answer import ClassEntry as ClassEntry  # noqa: PLC0414 - there, so that a client loads no contract
from .architectures import (
    Architecture,
    OpaqueNet,
    TrunkLayer,
    feature_map_side,
    multiply_adds,
    net_from_json,
    trunk_stride,
)
from .errors import ContractError
from .json_checks import parse_json, read_stored, require_same
from .preparation import FILTERS, USUAL, Interpolation, Preparation, preparation_from_json

if TYPE_CHECKING:
    from .arrays import UInt8Array

# 3: of adopted nets that state how images are prepared or that are quantized; 2: of our int8 files. All others remain
# readable by readers of 1.
CONTRACT_VERSION = 3
PREFIX = "prelunet."
MAX_CANVAS_SIDE = 65536  # pixels
MAX_CROPS_PER_SIDE = 16  # limit of a cropped scale, in crops; at larger scales a crop shows almost nothing of the image
MAX_SCALES = 32  # of `multi-scale`; SPP-net uses six
MAX_GOLDEN_IMAGES = 16
MAX_MULTIPLY_ADDS = 2**63 - 1  # of one crop; larger numbers would overflow in float arithmetic
MAX_NAME_LENGTH = 1000  # characters
# They could control a terminal or forge a log line; the last ones stand for bytes of a command line that are not UTF-8.
_FORBIDDEN_CHARACTERS = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")
INPUTS = ("images", "sizes")
OUTPUTS = ("scores", "logits", "windows", "window_scores")

Sha256: TypeAlias = Annotated[str, Meta(pattern=r"^[0-9a-f]{64}\Z")]
_Positive: TypeAlias = Annotated[int, Meta(ge=1)]
_Side: TypeAlias = Annotated[int, Meta(ge=1, le=MAX_CANVAS_SIDE)]  # pixels, or cells of the feature map
Canvas = Literal["ragged", "exact"]
FilePrecision = Literal["fp32", "fp16", "int8"]
MeanKind = Literal["channel", "image"]


@dataclass(frozen=True)
class GoldenImage:
    """One golden image: the size for `golden_image`, and the results of a float64 reference.

    scores, logits: one number per class; the mean over windows of softmax probabilities and of logits.
    """

    height: int
    width: int
    scores: tuple[float, ...]
    logits: tuple[float, ...]


_Deviation: TypeAlias = Annotated[float, Meta(ge=0)]


@dataclass(frozen=True)
class Tolerance:
    """Allowed deviation of a result, or a measured one.

    scores: absolute, because scores are probabilities; logits: relative to the largest, because logits have any
    magnitude.
    """

    scores: _Deviation
    logits: _Deviation


@dataclass(frozen=True)
class Calibration:
    """Where the activation ranges of an int8 file come from, and what int8 does to its golden images.

    dataset_fingerprint: of the dataset; images: number of images chosen from it; protocol: name of the one that defined
    their views; rule: how a range follows from the values of an activation; tolerance: of the golden images, derived at
    export; cost: how far int8 itself moves their scores and logits from those of the unrounded net. All but the
    tolerance is None in an adopted net, whose file does not tell.
    """

    dataset_fingerprint: Sha256 | None
    images: _Positive | None
    protocol: str | None
    rule: str | None
    tolerance: Tolerance
    cost: Tolerance | None

    def __post_init__(self) -> None:
        facts = (self.dataset_fingerprint, self.images, self.protocol, self.rule, self.cost)
        if 0 < facts.count(None) < len(facts):
            raise ValueError("of a calibration, everything or only the tolerance should be stated")
        _check_names(text for text in (self.protocol, self.rule) if text is not None)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        if self.rule is None:
            return "those of the adopted net"
        return (
            f"{self.rule} of {self.images} from the dataset with fingerprint {self.dataset_fingerprint}, "
            f"{self.protocol}"
        )


@dataclass(frozen=True)
class ModelContract:
    """The metadata of a model file, in the units of docs/formats.md (sides in pixels).

    The types of the fields declare what the keys of that name hold.
    """

    architecture: Architecture | OpaqueNet
    classes: tuple[ClassEntry, ...]
    mean_kind: MeanKind
    trunk: tuple[TrunkLayer, ...]
    window: _Side  # rows and columns of the feature map that are pooled together
    spp_levels: tuple[_Positive, ...]  # bins per side, in the order of fc1's input
    crop: _Side  # side of a training crop
    default_scales: tuple[_Positive, ...]  # the scales of `multi-scale` for this model
    max_side: _Side
    canvas: Canvas
    precision: FilePrecision
    checkpoint_sha256: Sha256
    interpolation: Interpolation = "bilinear"  # for resizing images
    preparation: Preparation = USUAL
    center_scale: _Positive | None = None  # of `center` and `ten-crop`; None for 8/7 of the crop, as in the paper
    training: Mapping[str, Any] = field(default_factory=dict)  # recipe, dataset, metrics, slopes, provenance, if known
    golden: tuple[GoldenImage, ...] = ()
    calibration: Calibration | None = None  # of an int8 file

    spp_order = "level,row,column,channel"
    bin_rule = "floor-ceil"

    def __post_init__(self) -> None:
        """Raise ValueError for values that no graph could have; the rest of the evaluator relies on this check."""
        faults = [text for broken, text in _contradictions(self) if broken]
        if faults:
            raise ValueError("; ".join(faults))

    def __hash__(self) -> int:
        return hash((self.checkpoint_sha256, self.crop, self.default_scales))

    @property
    def name(self) -> str:
        """Return the architecture's name, as in the paper: A, B, C, E, ..."""
        return self.architecture.name

    @property
    def trunk_stride(self) -> int:
        """Return the distance in pixels between two neighboring cells of the feature map."""
        return trunk_stride(self.trunk)

    @property
    def min_side(self) -> int:
        """Return the shortest accepted image side: the training crop, which contains one window."""
        return self.crop

    @property
    def fixed_size(self) -> bool:
        """Whether the model takes only its crop size: an adopted classifier that is not dense."""
        return self.max_side == self.crop

    def feature_map_side(self, side: int) -> int:
        if (found := self._feature_map_sides.get(side)) is None:
            found = self._feature_map_sides[side] = feature_map_side(self.trunk, side)
        return found

    @cached_property
    def _feature_map_sides(self) -> dict[int, int]:
        return {}

    def window_grid(self, height: int, width: int) -> tuple[int, int]:
        """Return the rows and columns of the grid of windows of an image; both are >= 1 from `min_side` on."""
        return (self.feature_map_side(height) - self.window + 1, self.feature_map_side(width) - self.window + 1)

    def multiply_adds(self, height: int, width: int) -> int | None:
        """Return the multiply-adds of a view: from the layers or, of an adopted net, those of a crop times the area."""
        net = self.architecture
        if not isinstance(net, OpaqueNet):
            return multiply_adds(net, height, width, len(self.classes))
        return None if net.multiply_adds is None else net.multiply_adds * height * width // self.crop**2

    def class_index(self, wnid: str) -> int | None:
        """Return the index of the class with this wnid, or None."""
        return self._index_by_wnid.get(wnid)

    @cached_property
    def _index_by_wnid(self) -> dict[str, int]:
        return {entry.wnid: index for index, entry in enumerate(self.classes)}

    @property
    def _version(self) -> int:
        """Return the lowest version whose readers understand the file."""
        if self.preparation != USUAL or (self.center_scale or 0) > self.max_side:
            return 3
        return 1 if self.calibration is None else 3 if self.calibration.rule is None else 2

    def _stored(self) -> dict[str, Any]:
        """Return the value of each key of the file."""
        own = {key: getattr(self, key) for key in _TYPES}
        return {
            **{key: value for key, value in own.items() if key not in _OPTIONAL or value != _OPTIONAL[key]},
            "contract_version": self._version,
            "architecture": self.architecture.to_json(),
            **{key: getattr(self, key) for key in _DERIVED},
        }

    def to_metadata(self) -> dict[str, str]:
        """Return the metadata of the file: key to JSON text, keys sorted, deterministic."""
        return {PREFIX + key: _json(value) for key, value in sorted(self._stored().items())}


def _json(value: Any) -> str:
    return json.dumps(value, sort_keys=True, allow_nan=False, default=_members)


def _members(value: Any) -> Any:
    return astuple(value) if isinstance(value, TrunkLayer) else vars(value)


_TYPES = get_type_hints(ModelContract, include_extras=True)
_OPTIONAL = {"preparation": USUAL, "center_scale": None, "calibration": None}  # without a key at these values
_DERIVED = ("trunk_stride", "min_side", "spp_order", "bin_rule")  # stated for other readers


def _contradictions(contract: ModelContract) -> Iterator[tuple[bool, str]]:
    """Yield (whether the check fails, what is wrong); each check relies on those before it."""
    crop, window, wnids = contract.crop, contract.window, [entry.wnid for entry in contract.classes]
    _check_names([contract.name, *(text for entry in contract.classes for text in (entry.wnid, entry.name))])
    net = contract.architecture
    if isinstance(net, Architecture):
        stated = (contract.trunk, window, contract.spp_levels, crop)
        derived = (net.layers, net.window, net.spp_levels, net.crop)
        yield stated != derived, "trunk, window, spp_levels and crop should be those of the architecture"
    count = contract.multiply_adds(crop, crop)
    yield count is not None and count > MAX_MULTIPLY_ADDS, f"multiply_adds should be at most {MAX_MULTIPLY_ADDS}"
    yield not wnids or len(set(wnids)) < len(wnids), "there should be classes, with different wnids"
    sane = all(layer.kernel >= 1 and layer.stride >= 1 and 0 <= layer.pad < layer.kernel for layer in contract.trunk)
    if not contract.trunk or not sane or not 1 <= crop <= contract.max_side <= MAX_CANVAS_SIDE:
        yield True, f"there should be a trunk of valid layers, and 1 <= crop <= max_side <= {MAX_CANVAS_SIDE}"
        return
    yield (
        contract.feature_map_side(crop) != window or window < 1,
        f"a crop of {crop} does not give a window of {window} cells",
    )
    yield not all(1 <= level <= window for level in contract.spp_levels), "spp_levels should be from 1 to the window"
    scales = contract.default_scales
    yield (
        not 1 <= len(set(scales)) == len(scales) <= MAX_SCALES,
        f"there should be 1 to {MAX_SCALES} scales",
    )
    yield not all(crop <= scale <= contract.max_side for scale in scales), "scales should be from crop to max_side"
    center = contract.center_scale or crop
    yield (
        not crop <= center <= MAX_CROPS_PER_SIDE * crop,
        f"center_scale should be from crop to {MAX_CROPS_PER_SIDE} crops",
    )
    preparation = contract.preparation
    yield preparation.whole and not contract.fixed_size, "a net that takes whole images should take only its crop size"
    odd = contract.interpolation not in FILTERS[preparation.antialias]
    yield odd, f"{contract.interpolation} is not supported with antialias {preparation.antialias}"
    is_int8 = contract.precision == "int8"
    yield is_int8 != (contract.calibration is not None), "an int8 file, and no other, should state its calibration"
    yield is_int8 and contract.canvas != "exact", "an int8 file should have an exact canvas"
    yield len(contract.golden) > MAX_GOLDEN_IMAGES, f"there should be at most {MAX_GOLDEN_IMAGES} golden images"
    for golden in contract.golden:
        sides = (golden.height, golden.width)
        yield not all(crop <= side <= contract.max_side for side in sides), "golden: sides out of range"
        counts = {len(golden.scores), len(golden.logits)}
        yield counts != {len(wnids)}, "golden: there should be one number per class"


def _check_names(texts: Iterable[str]) -> None:
    """Raise ValueError for a text that cannot be a name in a file."""
    for text in texts:
        if not isinstance(text, str) or len(text) > MAX_NAME_LENGTH or _FORBIDDEN_CHARACTERS.search(text):
            raise ValueError(
                f"{text!a:.60} is not a valid name: names should be text of up to {MAX_NAME_LENGTH} characters, "
                "without control characters and lone surrogates"
            )


_Count: TypeAlias = Annotated[int, Meta(ge=0, le=10**9)]


class _Environment(Struct, forbid_unknown_fields=True):
    """Where steps of a training were completed (evaluator/contract.md, "Provenance")."""

    from_step: _Count
    versions: dict[str, str]
    device: str
    processes: _Count
    threads: _Count
    precision: str
    deterministic: bool
    cudnn_benchmark: bool

    def __post_init__(self) -> None:
        _check_names((self.device, self.precision, *self.versions, *self.versions.values()))


class Provenance(Struct, forbid_unknown_fields=True):
    """Where the weights of a net come from. Imported weights, and files of earlier versions, lack the last three."""

    parent_sha256: Sha256 | None
    environments: list[_Environment]
    step: _Count | None = None
    total_steps: _Count | None = None
    dataset_fingerprint: Sha256 | None = None


def parse_provenance(value: Any) -> dict[str, Any] | None:
    """Check a provenance, None if that was not recorded; return it with ordered keys. Raises ValueError."""
    found: dict[str, Any] | None = to_builtins(convert(value, Provenance | None))
    return found


def parse_environments(value: Any) -> list[dict[str, Any]]:
    """Check the environments of a provenance as `parse_provenance` does."""
    found: list[dict[str, Any]] = to_builtins(convert(value, list[_Environment]))
    return found


def parse_calibration(value: Any) -> Calibration:
    """Read the output of `Calibration.to_json`. Raises ValueError with the fault."""
    return read_stored(value, Calibration)


def provenance_lines(provenance: Mapping[str, Any]) -> list[str]:
    """Return the training of a provenance in lines for the user: steps and dataset if known, and each environment."""
    lines = []
    if provenance["step"] is not None:
        total = provenance["total_steps"]
        lines.append(f"{provenance['step']}{'' if total is None else f' of {total}'} steps")
    if provenance["dataset_fingerprint"]:
        lines.append(f"dataset with fingerprint {provenance['dataset_fingerprint']}")
    for part in provenance["environments"]:
        counts = f"processes: {part['processes']}, threads of each: {part['threads']}"
        flags = "".join(f", {flag.replace('_', ' ')}" for flag in ("deterministic", "cudnn_benchmark") if part[flag])
        versions = ", ".join(f"{name} {version}" for name, version in part["versions"].items())
        device = f"{part['device']} ({counts}), {part['precision']}{flags}"
        lines.append(f"from step {part['from_step']}: {device}; {versions}")
    return lines


def rewrite_hint(where: str) -> str:
    """Return how to fix a model file that is damaged or of another version; `where` is its path."""
    return f"Write the file again with: prelunet export CHECKPOINT -o {where} (an adopted net: with prelunet adopt)"


def contract_from_metadata(metadata: Mapping[str, str], where: str) -> ModelContract:
    """Read the contract from a file's metadata; `where` names the file in errors.

    Raises ContractError if a key is missing or unreadable, or if the file has a newer version.
    """
    fix = rewrite_hint(where)
    if not any(key.startswith(PREFIX) for key in metadata):
        raise ContractError(
            f"{where}: not a model file of prelunet. An ONNX classifier of another origin is wrapped first: "
            f"prelunet adopt {where} --classes FILE -o NEW.onnx"
        )

    def read(key: str, parse: Callable[[Any], Any]) -> Any:
        if (text := metadata.get(PREFIX + key)) is None:
            raise ContractError(f"{where}: no '{PREFIX}{key}' in the ONNX metadata. {fix}")
        try:
            return parse(parse_json(text))
        except ValueError as error:
            raise ContractError(f"{where}: '{PREFIX}{key}' is malformed ({error}). {fix}") from error

    version = read("contract_version", partial(convert, type=_Positive))
    if version > CONTRACT_VERSION:
        raise ContractError(
            f"{where}: contract version {version}, but this prelunet supports versions up to {CONTRACT_VERSION}. "
            f"Install a newer prelunet. Or keep this one: {fix}"
        )
    if PREFIX + "resize" in metadata:  # of adopted nets that squash, for a day
        raise ContractError(f"{where}: written by a development version. {fix}")
    values = {
        key: read(key, _PARSERS.get(key) or partial(convert, type=kind))
        for key, kind in _TYPES.items()
        if key not in _OPTIONAL or PREFIX + key in metadata
    }
    try:
        contract = ModelContract(**values)
        written = {key: parse_json(_json(value)) for key, value in contract._stored().items() if key not in _READ_WHOLE}
        stated = [key for key in (*values, *_DERIVED) if key not in _READ_WHOLE]
        require_same({key: read(key, lambda value: value) for key in stated}, written)
        return contract
    except ValueError as error:
        raise ContractError(f"{where}: the '{PREFIX}*' metadata are malformed ({error}). {fix}") from error


class _Training(Struct):
    """What is known of `training`, whose other keys are free."""

    provenance: Provenance | UnsetType | None = UNSET  # absent in files of earlier versions


def _parse_training(value: Any) -> dict[str, Any]:
    found = convert(value, _Training).provenance
    return {**value, **({} if found is UNSET else {"provenance": to_builtins(found)})}


# Of keys whose types are not enough.
_PARSERS: dict[str, Callable[[Any], Any]] = {
    "architecture": net_from_json,
    "training": _parse_training,
    "preparation": preparation_from_json,
    "calibration": parse_calibration,
}
# Lists that may be long, objects whose parsers compare them or know defaults, and a number that depends on the writer.
_READ_WHOLE = {"classes", "golden", *_PARSERS, "contract_version"}


def center_scale(crop: int, trained: tuple[int, int] | None = None) -> int:
    """Return the scale of `center` and `ten-crop`, in pixels: 256 for a crop of 224, in proportion elsewhere.

    trained: the lowest and highest shorter side in training, which the scale does not leave.
    """
    scale = int(crop * 256 / 224 + 0.5)
    return scale if trained is None else min(max(scale, trained[0]), trained[1])


def default_scales(crop: int, trained: tuple[int, int] | None = None) -> tuple[int, ...]:
    """Return the scales of `multi-scale`, in pixels.

    trained: the lowest and highest shorter side in training. The paper trains at shorter sides of 256 to 512 and tests
    at 256, 384 and 480 (section 4; Table 4): the lowest, the middle, and 7/8 of the way up. These are the same places
    in the net's own range; a net has seen nothing similar far outside of it. Without `trained`, the paper's scales in
    proportion to the crop.
    """
    if trained is None:
        places = [crop * scale / 224 for scale in (256, 384, 480)]
    else:
        low, high = trained
        places = [low + (high - low) * part for part in (0, 1 / 2, 7 / 8)]
    return tuple(sorted({int(place + 0.5) for place in places}))


def golden_sizes(crop: int) -> tuple[tuple[int, int], ...]:
    """Return height and width of the three golden images: one crop exactly, a landscape, a tall portrait."""
    return ((crop, crop), (crop + crop // 7, crop + crop // 2 + 1), (crop + crop // 3 + 2, crop + 5))


def golden_image(height: int, width: int) -> "UInt8Array":
    """Create a golden image, uint8 (height, width, 3), with integer arithmetic only, so that any language can.

    pixel(row, column, channel) = triangle((5 + 2c)·row + (3 + 4c)·column + 90c + (row·column) // 23), where
    triangle(t) = |t mod 510 − 255|: smooth slopes, in different directions per channel, no symmetry, all of 0..255.
    """
    import numpy as np  # here, so that a client can read a model's classes without numpy

    row = np.arange(height, dtype=np.int64)[:, None, None]
    column = np.arange(width, dtype=np.int64)[None, :, None]
    channel = np.arange(3, dtype=np.int64)[None, None, :]
    t = (5 + 2 * channel) * row + (3 + 4 * channel) * column + 90 * channel + (row * column) // 23
    image: UInt8Array = np.abs(t % 510 - 255).astype(np.uint8)
    return image
