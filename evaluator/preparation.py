"""How a net's images are made from image files, beside the filter: part of the contract and of every protocol."""

from dataclasses import asdict, dataclass
from typing import Annotated, Any, Literal, TypeAlias

from msgspec import Meta

from .json_checks import read_stored

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
_Level: TypeAlias = Annotated[int, Meta(ge=0, le=255)]
Color = tuple[_Level, _Level, _Level]  # red, green, blue


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
    return read_stored(data, Preparation)
