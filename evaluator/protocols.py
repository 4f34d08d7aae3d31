"""Evaluation protocols: which views of an image, at which scales, and how their scores are averaged.

A protocol is frozen data, stored in every run. Sources: PReLU-nets, section 4 "Testing"; SPP-net, section 3.1.5.
"""

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

from msgspec import Meta, to_builtins

from .cli_option import option
from .contract import MAX_CANVAS_SIDE, MAX_CROPS_PER_SIDE, MAX_SCALES, ModelContract, center_scale
from .errors import UsageError
from .json_checks import read_stored
from .preparation import USUAL, Interpolation, Preparation

ProtocolKind = Literal["dense", "spp-18", "center", "ten-crop"]
ViewPart = Literal["whole", "nine", "top-left", "top-right", "bottom-left", "bottom-right", "center"]
Averaging = Literal["softmax", "logit"]
Weighting = Literal["scale", "view"]

LONG_SIDE_CAP = 4  # shorter sides; a longer image is cut to its center, so that no panorama can fill the memory

_MAX_NAME_LENGTH = 16 + 6 * MAX_SCALES  # characters: a kind, and scales of five digits each

PARTS: Mapping[ProtocolKind, tuple[ViewPart, ...]] = {
    "dense": ("whole",),
    "spp-18": ("nine",),
    "center": ("center",),
    "ten-crop": ("top-left", "top-right", "bottom-left", "bottom-right", "center"),
}
# Presets of `dense`, as shorter sides for a crop of 224: SPP-net, section 3.1.5; ResNet (He et al. 2016), section 3.4.
_SCALE_SETS = {"spp-net": (224, 256, 300, 360, 448, 560), "resnet": (224, 256, 384, 480, 640)}


_Side: TypeAlias = Annotated[int, Meta(ge=1, le=MAX_CROPS_PER_SIDE * MAX_CANVAS_SIDE)]  # in pixels


@dataclass(frozen=True)
class View:
    """One view of an image: resized to a scale, mirrored or not, the whole image or a part of it.

    part: `whole`: every window of the image; `nine`: the windows at the corners, the middles of the sides and the
    center; otherwise the crop at that place, which is one window.
    """

    scale: int  # shorter side in pixels after resizing
    mirrored: bool
    part: ViewPart = "whole"

    def to_json(self) -> dict[str, Any]:
        return dict(vars(self))


@dataclass(frozen=True)
class EvaluationProtocol:
    """The views of one image and how they become one score per class.

    name: as typed on the command line; kind: `dense` uses every window of the whole image, `spp-18` nine of them,
    `center` the central crop, `ten-crop` also the crops at the corners;
    averaging: `softmax` averages probabilities (SPP-net, section 3.1.5), `logit` the logits before the softmax;
    weights: `scale` gives every scale the same weight, `view` every window of every view (SPP-net's 96 views).
    """

    name: str
    kind: ProtocolKind
    scales: tuple[_Side, ...]
    mirror: bool
    averaging: Averaging = "softmax"
    weights: Weighting = "scale"
    long_side_cap: Annotated[int, Meta(ge=1, le=MAX_CANVAS_SIDE)] = LONG_SIDE_CAP
    crop: _Side | None = None  # side of the crops in pixels; None if the whole image is used
    interpolation: Interpolation = "bilinear"  # the filter of that name
    apply_exif: bool = False  # whether to apply EXIF orientation; ImageNet's evaluations do not
    preparation: Preparation = USUAL

    def __post_init__(self) -> None:
        _check_scale_count(self.scales)
        if not self.scales or len(set(self.scales)) != len(self.scales) or min(self.scales) < 1:
            raise UsageError(f"protocol {self.name}: scales must be different positive numbers, not {self.scales}")
        if (self.kind in {"center", "ten-crop"}) != (self.crop is not None):
            raise UsageError(f"protocol {self.name}: kinds 'center' and 'ten-crop' need a crop; other kinds have none")

    @cached_property
    def views(self) -> tuple[View, ...]:
        """Return the views in fixed order: scale by scale, part by part, unmirrored before mirrored."""
        mirrors = (False, True) if self.mirror else (False,)
        return tuple(
            View(scale, mirrored, part) for scale in self.scales for part in PARTS[self.kind] for mirrored in mirrors
        )

    def to_json(self) -> dict[str, Any]:
        """Return the protocol as plain data for run.json and messages; without `preparation` if it is usual."""
        plain = {**to_builtins(self), "scales": list(self.scales), "preparation": self.preparation.to_json()}
        if self.preparation == USUAL:
            del plain["preparation"]
        return plain


def _check_scale_count(scales: Sequence[int]) -> None:
    if len(scales) > MAX_SCALES:
        raise UsageError(f"a protocol with {len(scales)} scales: give at most {MAX_SCALES}")


def protocol_from_json(data: Any) -> EvaluationProtocol:
    """Create a protocol from the output of `EvaluationProtocol.to_json`; UsageError for other data."""
    try:
        return read_stored(data, EvaluationProtocol)
    except ValueError as error:
        raise UsageError(f"not a protocol: {error}") from error


def _parse_scales(text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    if not re.fullmatch(r"[1-9]\d{0,4}(,[1-9]\d{0,4})*", text, re.ASCII):
        raise UsageError(f"--scales {text}: give shorter sides in pixels, separated by commas, e.g. --scales 256,384")
    return tuple(map(int, text.split(",")))


@dataclass(frozen=True)
class ProtocolOverrides:
    """A user's changes to a protocol; None keeps the protocol's value."""

    HELP_GROUP: ClassVar[str] = "Protocol"
    scales: tuple[int, ...] | None = option(
        None,
        "Scales (shorter sides in pixels) that replace the protocol's, e.g. 256,384.",
        kind=str | None,
        parse=_parse_scales,
    )
    mirror: bool | None = option(
        None, "Add a mirrored copy of every view, or not.", flag="flip/--no-flip", default="set by the protocol"
    )
    averaging: Averaging | None = option(
        None, "Average the softmax scores of the windows or their logits.", default="softmax"
    )
    weights: Weighting | None = option(
        None, "Give equal weight to each scale or to each window of every view.", default="scale; view for spp-18"
    )
    apply_exif: bool | None = option(None, "Apply EXIF orientation.", flag="exif", kind=bool)


PROTOCOL_NAMES = ("center", "ten-crop", "multi-scale", "spp-18", "spp-net", "resnet", "dense-S")
_NAME_WITH_SCALES = re.compile(r"(center|ten-crop|dense|spp-18)((?:-[1-9]\d{0,4})+)", re.ASCII)


def default_protocol_name(contract: ModelContract) -> str:
    return "center" if contract.fixed_size else "multi-scale"


def supported_protocols(contract: ModelContract) -> tuple[str, ...]:
    """Return the names of the protocols that a model supports, its default first; `dense-S` at its default scales."""
    dense = [f"dense-{scale}" for scale in contract.default_scales]
    names = [default_protocol_name(contract), *(name for name in PROTOCOL_NAMES if name != "dense-S"), *dense]
    supported = []
    for name in dict.fromkeys(names):
        with suppress(UsageError):
            supported.append(build_protocol(name, contract).name)
    return tuple(supported)


@lru_cache(256)  # for a server, where most calls name the same few
def build_protocol(
    name: str, contract: ModelContract, overrides: ProtocolOverrides | None = None
) -> EvaluationProtocol:
    """Build the protocol of that name for a model, with a user's changes.

    `center`: scale round(crop·256/224), within the range that the net was trained at, if that is known; central crop,
    not mirrored; of a net that takes whole images, that image. `ten-crop`: the same scale; the crops at the corners of
    the whole resized image and at its center, also mirrored (Tables 2 and 5). `dense-S`: the whole image at shorter
    side S, also mirrored; several scales as in dense-256-384. `multi-scale`, `spp-net`, `resnet`: dense at the model's
    default scales, at SPP-net's six, at ResNet's five. `spp-18`: SPP-net's 96 views, 18 windows of the feature map at
    each of its six scales. `center`, `ten-crop` and `spp-18` with other scales: center-240, ten-crop-300,
    spp-18-256-360. `overrides.scales` changes the name accordingly. Raises UsageError for an unknown name, for scales
    both in the name and in `overrides`, and, with the reason, for a scale or a view that the model does not support.
    """
    overrides = overrides or ProtocolOverrides()
    if len(name) > _MAX_NAME_LENGTH:
        raise UsageError(f"a protocol name of {len(name)} characters: give at most {_MAX_NAME_LENGTH}")
    kind, scales = _kind_and_scales(name, contract)
    if overrides.scales is not None:
        _check_scale_count(overrides.scales)  # before they become part of the name
        if _NAME_WITH_SCALES.fullmatch(name):
            raise UsageError(f"protocol {name} already names its scales. Give scales either in the name or separately")
        scales, name = overrides.scales, "-".join(map(str, (kind, *overrides.scales)))
    crops = kind in {"center", "ten-crop"}
    changes = {key: value for key, value in vars(overrides).items() if value is not None}
    protocol = EvaluationProtocol(
        name=name,
        kind=kind,
        scales=scales,
        mirror=kind != "center",
        weights="view" if kind == "spp-18" else "scale",
        crop=contract.crop if crops else None,
        interpolation=contract.interpolation,
        preparation=contract.preparation,
    )
    protocol = replace(protocol, **changes)
    _check_supported(protocol, contract)
    return protocol


def title_of(protocol: EvaluationProtocol) -> str:
    """Return the protocol's name and what differs from the protocol of that name."""
    changes = {
        "mirrored" if protocol.mirror else "not mirrored": protocol.mirror != (protocol.kind != "center"),
        f"equal weight to each {protocol.weights}": (protocol.weights == "view") != (protocol.kind == "spp-18"),
        "logits averaged": protocol.averaging == "logit",
        "EXIF orientation applied": protocol.apply_exif,
    }
    return ", ".join([protocol.name, *(words for words, changed in changes.items() if changed)])


def _kind_and_scales(name: str, contract: ModelContract) -> tuple[ProtocolKind, tuple[int, ...]]:
    """Return the kind and the scales that a protocol's name stands for."""
    if match := _NAME_WITH_SCALES.fullmatch(name):
        kind = next(kind for kind in PARTS if kind == match[1])
        return kind, tuple(map(int, match[2].split("-")[1:]))
    if name in {"center", "ten-crop"}:
        kind = "center" if name == "center" else "ten-crop"
        usual = contract.crop if contract.preparation.whole else center_scale(contract.crop)
        return kind, (contract.center_scale or usual,)
    if name == "multi-scale":
        return "dense", contract.default_scales
    if name in {"spp-18", "spp-net", "resnet"}:
        places = _SCALE_SETS["resnet" if name == "resnet" else "spp-net"]
        return "spp-18" if name == "spp-18" else "dense", tuple(int(contract.crop * s / 224 + 0.5) for s in places)
    raise UsageError(
        f"unknown protocol '{name}'. Valid protocols: {', '.join(PROTOCOL_NAMES)} (S in pixels, as in dense-256; "
        "several as in dense-256-384). `prelunet protocols` describes them"
    )


def _check_supported(protocol: EvaluationProtocol, contract: ModelContract) -> None:
    """Raise UsageError, with the reason, if the model does not support the protocol."""
    side = contract.center_scale or contract.crop
    if contract.preparation.whole and (protocol.kind, protocol.scales) != ("center", (side,)):
        how = "padded" if contract.preparation.resize == "pad" else "squashed"
        raise UsageError(
            f"protocol {protocol.name}: this model takes whole images, {how} to {side}x{side} pixels, so they have no "
            "other crops and no other scales. It supports: center"
        )
    if protocol.crop is not None:
        if not contract.crop <= min(protocol.scales) <= max(protocol.scales) <= MAX_CROPS_PER_SIDE * contract.crop:
            raise UsageError(
                f"protocol {protocol.name}: crops of {contract.crop} pixels need scales from {contract.crop} to "
                f"{MAX_CROPS_PER_SIDE * contract.crop} pixels"
            )
        return
    if contract.fixed_size:
        raise UsageError(
            f"protocol {protocol.name}: this model takes only crops of {contract.crop}x{contract.crop} pixels and has "
            "no windows in a larger image. It supports: center, ten-crop. Adopted with --dense, a convnet has windows"
        )
    largest = contract.max_side // protocol.long_side_cap
    if not contract.min_side <= min(protocol.scales) <= max(protocol.scales) <= largest:
        raise UsageError(
            f"protocol {protocol.name}: this model takes scales from {contract.min_side} (its crop) to {largest} "
            f"(its largest canvas side {contract.max_side} holds images up to 1:{protocol.long_side_cap})"
        )
