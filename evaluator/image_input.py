"""Images as callers have them, encoded for sending or decoding. Imports Pillow only for images that need it."""

import io
import os
import sys
from typing import TYPE_CHECKING, TypeAlias, TypeGuard

from .errors import ImageError, UsageError
from .files import open_regular

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    from PIL import Image

ImageInput: TypeAlias = "bytes | bytearray | memoryview | str | os.PathLike[str] | Image.Image | npt.NDArray[np.uint8]"
"""An encoded image, the path of an image file, a Pillow image, or its pixels: uint8 (H, W, 3) RGB or (H, W) gray."""

_MAX_BYTES = 2**29  # the largest image that any server can be configured to accept
_PNG_MODES = ("1", "L", "LA", "P", "RGB", "RGBA", "I;16")  # of Pillow; a PNG holds them without loss
_ORIENTATION = 274  # Exif 2.32, section 4.6.4


def is_image(image: object) -> bool:
    """Return whether `encoded_image` accepts objects of this type."""
    return (
        isinstance(image, bytes | bytearray | memoryview | str | os.PathLike) or _is_pillow(image) or _is_array(image)
    )


def encoded_image(image: object) -> bytes:
    """Return an `ImageInput` as the bytes of an image file: those of its file, or a PNG of its pixels.

    Raises ImageError for a file that cannot be read, and for pixels that a PNG cannot hold without loss; UsageError for
    an object of another type. The bytes of files are not checked.
    """
    if isinstance(image, bytes | bytearray | memoryview):
        data = bytes(image)
    elif isinstance(image, str | os.PathLike):
        path = os.fsdecode(image)
        try:
            with open_regular(path) as file:
                data = file.read(_MAX_BYTES + 1)
        except (OSError, ValueError) as error:  # ValueError: a NUL in the name
            reason = getattr(error, "strerror", None) or error
            raise ImageError(f"{path}: cannot be read ({reason}). Give the path of an image file") from error
    elif _is_array(image):
        data = _png(_from_array(image))
    elif _is_pillow(image):
        data = _png(image)
    else:
        raise UsageError(
            f"an image cannot be of type {type(image).__name__}; give a path, the bytes of an image file, a Pillow "
            "image or a NumPy array"
        )
    if len(data) > _MAX_BYTES:
        raise ImageError(f"the image has more than {_MAX_BYTES} bytes, which no server accepts. Give a smaller image")
    return data


def _is_a(image: object, module: str, name: str) -> bool:
    """Return whether an object is of a class of a module that its creator must have imported."""
    return module in sys.modules and isinstance(image, getattr(sys.modules[module], name))


def _is_array(image: object) -> "TypeGuard[npt.NDArray[np.uint8]]":
    return _is_a(image, "numpy", "ndarray")


def _is_pillow(image: object) -> "TypeGuard[Image.Image]":
    return _is_a(image, "PIL.Image", "Image")


def _from_array(pixels: "npt.NDArray[np.uint8]") -> "Image.Image":
    """Return a Pillow image of an array."""
    from PIL import Image

    if pixels.dtype != "uint8":
        fix = "for values from 0 to 255 give array.round().astype('uint8')"
        if pixels.dtype.kind == "f":
            fix = f"for values from 0 to 1 give (array * 255).round().astype('uint8'), {fix}"
        raise ImageError(f"the array's type is {pixels.dtype}, but it must be uint8, 0 to 255; {fix}")
    if 0 in pixels.shape or not (pixels.ndim == 2 or (pixels.ndim == 3 and pixels.shape[2] == 3)):
        hint = ""
        if pixels.ndim == 3 and pixels.shape[2] == 4:
            hint = "; leave out the fourth channel, as in array[..., :3]"
        elif pixels.ndim == 3 and pixels.shape[0] in {1, 3}:
            hint = "; move the channels last, as in array.transpose(1, 2, 0)"
        elif pixels.ndim == 4:
            hint = "; give each image by itself, as in list(array)"
        raise ImageError(
            f"the array's shape is {pixels.shape}, but it must be (height, width, 3) for RGB or (height, width) for "
            f"gray{hint}"
        )
    return Image.fromarray(pixels)


def _png(image: "Image.Image") -> bytes:
    from PIL import Image

    if image.mode not in _PNG_MODES:
        raise ImageError(
            f"the Pillow image's mode is {image.mode}, which a PNG cannot hold. Convert it, as in image.convert('RGB')"
        )
    exif = Image.Exif()
    encoded = io.BytesIO()
    try:
        image.load()  # also applies a TIFF's orientation
        if (orientation := image.getexif().get(_ORIENTATION)) is not None:
            exif[_ORIENTATION] = orientation  # for `apply_exif`
        image.save(encoded, "PNG", compress_level=1, exif=exif)  # 1: a quarter of the default's time
    except Exception as error:  # the decoders of files that Pillow has opened have no common base class
        raise ImageError(f"the Pillow image cannot be read ({error}). Open it again, or give its path") from error
    return encoded.getvalue()
