"""How a net's images are made from image files, beside the filter: part of the contract and of every protocol."""

from typing import Annotated, Any, Literal

import msgspec

Interpolation = Literal["nearest", "bilinear", "bicubic"]
Resize = Literal["shorter", "squash", "pad"]
Rounding = Literal["half-up", "torchvision"]
Transparency = Literal["white", "dropped"]
_Level = Annotated[int, msgspec.Meta(ge=0, le=255)]
Color = tuple[_Level, _Level, _Level]  # red, green, blue


class Preparation(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What adopted nets may have seen in training; the defaults are what training/ shows to its nets.

    resize: what gets the scale. `shorter`: the shorter side, and the other one in proportion; `squash`: both sides;
    `pad`: the longer side, and the image lies in the middle of a square of `pad_color`;
    antialias: a filter that shrinks an image widens, as Pillow's do; otherwise it touches the nearest pixels only, as
    in torch's `interpolate`, OpenCV and TensorFlow;
    rounding: of the side in proportion, x, and the place of a central crop, y. `half-up`: floor(x + 1/2), floor(y);
    `torchvision`: floor(x), y to the nearest, halves to the even number, as its Resize and CenterCrop do;
    transparency: over white, or dropped as by Pillow's `convert("RGB")`; gray: Pillow's luma in all channels.
    """

    resize: Resize = "shorter"
    antialias: bool = True
    rounding: Rounding = "half-up"
    pad_color: Color = (0, 0, 0)
    transparency: Transparency = "white"
    gray: bool = False

    @property
    def whole(self) -> bool:
        """Whether the net takes whole images, which have no crops and no other scales."""
        return self.resize != "shorter"

    def to_json(self) -> dict[str, Any]:
        """Return plain data."""
        plain: dict[str, Any] = msgspec.to_builtins(self)
        return {**plain, "pad_color": list(self.pad_color)}


USUAL = Preparation()


def preparation_from_json(data: Any) -> Preparation:
    """Read the output of `Preparation.to_json`; what is missing has its default. Raises ValueError for other data."""
    try:
        return msgspec.convert(data, Preparation)
    except msgspec.ValidationError as error:
        raise ValueError(f"preparation: {error}") from error
