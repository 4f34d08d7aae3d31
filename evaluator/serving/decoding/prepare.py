"""From an encoded image to the resized pixels of its views, in a thread of the server or in another process."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from prelunet.evaluator.arrays import UInt8Array
from prelunet.evaluator.errors import UsageError
from prelunet.evaluator.imaging.decode import decode_image
from prelunet.evaluator.imaging.limits import DecodeLimits
from prelunet.evaluator.imaging.resize import panel_picture, resize_to_scales, resized_size
from prelunet.evaluator.protocols import EvaluationProtocol


@dataclass(frozen=True)
class PrepareOptions:
    """What to do with an image.

    max_view_pixels: of a view; twice that for all scales together; picture: whether to make one for heat maps.
    """

    protocol: EvaluationProtocol
    limits: DecodeLimits
    max_view_pixels: int
    picture: bool


@dataclass(frozen=True)
class PreparedImage:
    """An image at each scale.

    height, width: of the decoded image; resized: by scale, the pixels, uint8 (h, w, 3), and whether they were capped;
    picture: the whole image at the size of a heat map's panel, None if not requested.
    """

    height: int
    width: int
    resized: Mapping[int, tuple[UInt8Array, bool]]
    picture: UInt8Array | None


def prepare_image(
    image: bytes, options: PrepareOptions, reserve: Callable[[int], None] = lambda _bytes: None
) -> PreparedImage:
    """Decode and resize an image.

    reserve: called before any pixel is decoded with the most bytes that this takes; may block.
    Raises ImageError for bytes that are not an acceptable image, UsageError if a view would be too large.
    """
    protocol = options.protocol
    decoded = decode_image(image, options.limits, apply_exif=protocol.apply_exif, reserve=reserve)
    _check_size(decoded.height, decoded.width, protocol, options.max_view_pixels)
    resized = resize_to_scales(decoded, protocol.scales, protocol.long_side_cap, protocol.interpolation)
    picture = panel_picture(decoded) if options.picture else None
    return PreparedImage(decoded.height, decoded.width, resized, picture)


def _check_size(height: int, width: int, protocol: EvaluationProtocol, limit: int) -> None:
    """Refuse views that would take gigabytes. All scales of an image wait together, so their total is limited too."""
    sizes = [resized_size(height, width, scale, protocol.long_side_cap) for scale in protocol.scales]
    rows, columns = max(sizes, key=lambda size: size[0] * size[1])
    if rows * columns > limit:
        raise UsageError(
            f"protocol {protocol.name}: a view of this image would have {rows}x{columns} pixels, more than this "
            f"server's limit of {limit}. Use a smaller scale, or `prelunet classify --model`"
        )
    if (total := sum(rows * columns for rows, columns in sizes)) > 2 * limit:
        raise UsageError(
            f"protocol {protocol.name}: all scales of this image together have {total} pixels, more than this "
            f"server's limit of {2 * limit}. Use fewer or smaller scales, or `prelunet classify --model`"
        )
