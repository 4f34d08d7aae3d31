"""How a net's images are made from image files, beside the filter: part of the contract and of every protocol."""

from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, get_args

from .json_checks import require_bool, require_choice, require_int, require_keys, require_list

Interpolation = Literal["nearest", "bilinear", "bicubic", "lanczos"]
Antialias = Literal["pillow", "torch", "none"]
Resize = Literal["shorter", "squash", "pad"]
Rounding = Literal["half-up", "torchvision", "transformers"]
Transparency = Literal["white", "dropped"]
# The filters that each kind of antialiasing has.
FILTERS: dict[Antialias, tuple[Interpolation, ...]] = {
    "pillow": ("nearest", "bilinear", "bicubic", "lanczos"),
    "torch": ("bilinear", "bicubic"),
    "none": ("nearest", "bilinear", "bicubic"),
}
# What is said of each behind the filter's name.
ANTIALIASED: dict[Antialias, str] = {"pillow": "", "torch": ", antialiased as torch's", "none": ", not antialiased"}
Color = tuple[int, int, int]  # red, green, blue, from 0 to 255


@dataclass(frozen=True)
class Preparation:
    """What adopted nets may have seen in training; the defaults are what training/ shows to its nets.

    resize: what gets the scale. `shorter`: the shorter side, and the other one in proportion; `squash`: both sides;
    `pad`: the longer side, and the image lies in the middle of a square of `pad_color`;
    antialias: whether a filter that shrinks an image widens: as Pillow's do (`pillow`); as torch's do on uint8 tensors,
    in torchvision and transformers (`torch`); or not (`none`), so that it touches the nearest pixels only, as in
    torch's `interpolate`, OpenCV and TensorFlow;
    rounding: of the side in proportion, x, and the place of a central crop, y. `half-up`: floor(x + 1/2), floor(y);
    `torchvision`: floor(x), y to the nearest, halves to the even number, as its Resize and CenterCrop do;
    `transformers`: floor(x), floor(y), as its image processors do;
    transparency: over white, or dropped as by Pillow's `convert("RGB")`; gray: Pillow's luma in all channels.
    """

    resize: Resize = "shorter"
    antialias: Antialias = "pillow"
    rounding: Rounding = "half-up"
    pad_color: Color = (0, 0, 0)
    transparency: Transparency = "white"
    gray: bool = False

    @property
    def whole(self) -> bool:
        """Whether the net takes whole images, squashed or padded to a square, or the center of that square."""
        return self.resize != "shorter"

    def to_json(self) -> dict[str, Any]:
        """Return plain data."""
        return {**asdict(self), "pad_color": list(self.pad_color)}


USUAL = Preparation()


def preparation_from_json(data: Any) -> Preparation:
    """Read the output of `Preparation.to_json`. Raises ValueError for other data."""
    plain = require_keys(data, "preparation", {field.name for field in fields(Preparation)})
    color = [require_int(level, "pad_color", 0, 255) for level in require_list(plain["pad_color"], "pad_color")]
    if len(color) != 3:
        raise ValueError(f"pad_color should have three levels, not {len(color)}")
    return Preparation(
        resize=require_choice(plain["resize"], "resize", get_args(Resize)),
        antialias=require_choice(plain["antialias"], "antialias", get_args(Antialias)),
        rounding=require_choice(plain["rounding"], "rounding", get_args(Rounding)),
        pad_color=(color[0], color[1], color[2]),
        transparency=require_choice(plain["transparency"], "transparency", get_args(Transparency)),
        gray=require_bool(plain["gray"], "gray"),
    )
