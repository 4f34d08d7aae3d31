"""Ways of looking at an image: which views, at which scales, and how their scores are averaged.

A protocol is frozen data that is stored in every run. Sources: PReLU-nets, section 4 "Testing"; SPP-net, section 3.1.5.
"""

import re
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

from evaluator.contract import ModelContract, center_scale
from evaluator.errors import UsageError
from evaluator.strict import a_list, an_object, flag, one_of, text, whole

Kind = Literal["dense", "center"]
Averaging = Literal["softmax", "logit"]
Weights = Literal["scale", "view"]

DEFAULT_PROTOCOL = "multi-scale"
LONG_SIDE_CAP = 4  # shorter sides; of a longer image the centre is kept, so that no panorama can fill the memory


@dataclass(frozen=True)
class View:
    """One way in which the model sees an image: resized to a scale, mirrored or not."""

    scale: int  # shorter side in pixels after resizing
    mirrored: bool


@dataclass(frozen=True)
class Protocol:
    """How one image is looked at and how its views become one score per class.

    name: as typed on the command line; kind: `dense` shows the whole image, `center` its central crop;
    averaging: `softmax` averages probabilities (SPP-net, section 3.1.5), `logit` the logits before the softmax;
    weights: `scale` gives every scale the same weight, `view` every window of every view (SPP-net's 96 views).
    """

    name: str
    kind: Kind
    scales: tuple[int, ...]
    mirror: bool
    averaging: Averaging = "softmax"
    weights: Weights = "scale"
    long_side_cap: int = LONG_SIDE_CAP
    crop: int | None = None  # side of the central crop; None for dense
    apply_exif: bool = False  # whether a camera's note on rotation is obeyed; ImageNet's evaluations do not

    def __post_init__(self) -> None:
        if not self.scales or len(set(self.scales)) != len(self.scales) or min(self.scales) < 1:
            raise UsageError(f"protocol {self.name}: scales must be different positive numbers, not {self.scales}")
        if (self.kind == "center") != (self.crop is not None):
            raise UsageError(f"protocol {self.name}: a crop belongs to kind 'center' and to no other")

    @property
    def views(self) -> tuple[View, ...]:
        """Return the views in their fixed order: scale by scale, plain before mirrored."""
        mirrors = (False, True) if self.mirror else (False,)
        return tuple(View(scale, mirrored) for scale in self.scales for mirrored in mirrors)

    def to_json(self) -> dict[str, Any]:
        """Return the protocol as plain data for run.json and the wire."""
        return {**asdict(self), "scales": list(self.scales)}


def protocol_from_json(data: Any) -> Protocol:
    """Read what `Protocol.to_json` wrote; raises UsageError when it is not that."""
    try:
        return Protocol(**{key: _value_of(key, value) for key, value in an_object(data, "it").items()})
    except (ValueError, TypeError) as error:  # Python names the keys that are missing
        raise UsageError(f"not a protocol: {error}") from error


def _value_of(key: str, value: Any) -> Any:
    match key:
        case "name":
            return text(value, key)
        case "kind" | "averaging" | "weights":
            return one_of(value, key, get_args({"kind": Kind, "averaging": Averaging, "weights": Weights}[key]))
        case "scales":
            return tuple(whole(scale, "a scale", 1) for scale in a_list(value, key))
        case "mirror" | "apply_exif":
            return flag(value, key)
        case "crop" | "long_side_cap":
            return None if key == "crop" and value is None else whole(value, key, 1)
    raise ValueError(f"unknown key '{key}'")


PROTOCOL_NAMES = ("center", "dense-S", "multi-scale")


def make_protocol(name: str, contract: ModelContract, *, apply_exif: bool = False) -> Protocol:
    """Build the protocol of that name for a model.

    `center`: scale round(crop·256/224), central crop, not mirrored (Table 3's training-time check).
    `dense-S`: the whole image at shorter side S, and mirrored. `multi-scale`: the same at the model's default scales.
    Raises UsageError for an unknown name or a scale outside the model's range.
    """
    dense = re.fullmatch(r"dense-([1-9]\d{0,4})", name, re.ASCII)
    if name == "center":
        scales: tuple[int, ...] = (center_scale(contract.crop),)
        return Protocol(name, "center", scales, mirror=False, crop=contract.crop, apply_exif=apply_exif)
    if name == "multi-scale":
        scales = contract.default_scales
    elif dense:
        scales = (int(dense[1]),)
    else:
        raise UsageError(f"no protocol '{name}'. There are: {', '.join(PROTOCOL_NAMES)} (S in pixels, as in dense-256)")
    largest = contract.max_side // LONG_SIDE_CAP
    if not contract.min_side <= min(scales) <= max(scales) <= largest:
        raise UsageError(
            f"protocol {name}: this model takes scales from {contract.min_side} (its crop) to {largest} "
            f"(its largest canvas side {contract.max_side} holds images up to 1:{LONG_SIDE_CAP})"
        )
    return Protocol(name, "dense", scales, mirror=True, apply_exif=apply_exif)
