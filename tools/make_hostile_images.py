"""Write tests/data/hostile/: small image files on which a careless decoder crashes, hangs or errs.

    python tools/make_hostile_images.py

The files are committed; this script documents their origin and reproduces them with the same version of Pillow.
tests/imaging/test_decode.py has the expected result for each.
"""

import io
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

HOSTILE = Path(__file__).parent.parent / "tests" / "data" / "hostile"
HEIGHT, WIDTH = 24, 37  # not square, and no multiple of a JPEG block
PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"


def main() -> None:
    """Write all files and print their sizes."""
    HOSTILE.mkdir(parents=True, exist_ok=True)
    files = {**plain_oddities(), **color_oddities(), **cut_files(), **bombs(), **no_images()}
    for name, data in sorted(files.items()):
        (HOSTILE / name).write_bytes(data)
        print(f"{len(data):6} {name}")


def picture() -> npt.NDArray[np.uint8]:
    """Return smooth, asymmetric gradients that differ by channel: uint8 (HEIGHT, WIDTH, 3)."""
    row, column = np.mgrid[:HEIGHT, :WIDTH]
    return np.stack([row * 10, column * 6, 255 - row * 4 - column * 3], axis=2).astype(np.uint8)


def encode(image: Image.Image, kind: str, **options: Any) -> bytes:
    """Encode an image with Pillow."""
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def chunk(kind: bytes, data: bytes) -> bytes:
    """Return one PNG chunk."""
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(width: int, height: int, depth: int, color: int, rows: bytes, extra: bytes = b"") -> bytes:
    """Return a PNG with this header and arbitrary rows. color: 0 gray, 2 RGB, 3 palette, 4 gray + alpha."""
    header = struct.pack(">IIBBBBB", width, height, depth, color, 0, 0, 0)
    body = extra + chunk(b"IDAT", zlib.compress(rows, 9))
    return PNG_SIGNATURE + chunk(b"IHDR", header) + body + chunk(b"IEND", b"")


def plain_oddities() -> dict[str, bytes]:
    """Return valid images of unusual size, name or structure."""
    image = Image.fromarray(picture())
    frames = [image, Image.new("RGB", image.size, (255, 0, 0)), Image.new("RGB", image.size, (0, 0, 255))]
    long = Image.fromarray((np.arange(20000) % 251).astype(np.uint8)[None, :])
    exif = Image.Exif()
    exif[274] = 6  # orientation: rotate by 90 degrees
    return {
        "one-pixel.png": encode(Image.new("RGB", (1, 1), (200, 100, 50)), "PNG"),
        "one-row-20000-columns.png": encode(long, "PNG"),
        "one-column-20000-rows.png": encode(long.transpose(Image.Transpose.TRANSPOSE), "PNG"),
        "png-named.jpg": encode(image, "PNG"),
        "animated.gif": encode(frames[0], "GIF", save_all=True, append_images=frames[1:], duration=50),
        "animated.png": encode(frames[0], "PNG", save_all=True, append_images=frames[1:], duration=50),
        "animated.webp": encode(frames[0], "WEBP", save_all=True, append_images=frames[1:], duration=50, lossless=True),
        "exif-rotated.jpg": encode(image, "JPEG", quality=95, exif=exif),
        "exif-rotated.png": encode(image, "PNG", exif=exif),
        "exif-damaged.jpg": encode(image, "JPEG", quality=95, exif=b"Exif\0\0MM\0\x2a\xff\xff\xff\xff"),
        "two-pictures.mpo.jpg": encode(frames[0], "MPO", save_all=True, append_images=frames[1:2], quality=95),
        "progressive.jpg": encode(image, "JPEG", quality=95, progressive=True),
        "lzw.tif": encode(image, "TIFF", compression="tiff_lzw"),
    }


def color_oddities() -> dict[str, bytes]:
    """Return images whose pixels are not 8-bit RGB."""
    image = Image.fromarray(picture())
    gray16 = (np.arange(HEIGHT * WIDTH) * 73 % 65536).astype(np.uint16).reshape(HEIGHT, WIDTH)
    alpha = Image.fromarray(picture()[:, ::-1, 1].copy())
    rgba = image.copy()
    rgba.putalpha(alpha)
    cmyk = Image.merge("CMYK", [*image.split(), image.getchannel("R").transpose(Image.Transpose.FLIP_TOP_BOTTOM)])
    palette = b"\xc8\x14\x14\x14\xc8\x14\x14\x14\xc8"  # red, green, blue
    indices = b"".join(b"\0" + bytes((row + column) % 3 for column in range(WIDTH)) for row in range(HEIGHT))
    bits = b"".join(b"\0" + bytes([0xA5, 0x0F, 0xF0, row, 0x80]) for row in range(HEIGHT))
    return {
        "grey.jpg": encode(image.convert("L"), "JPEG", quality=95),
        "cmyk-adobe.jpg": encode(cmyk, "JPEG", quality=95),
        "cmyk.tif": encode(cmyk, "TIFF"),
        "palette.png": png(WIDTH, HEIGHT, 8, 3, indices, chunk(b"PLTE", palette)),
        "palette-alpha.png": png(
            WIDTH, HEIGHT, 8, 3, indices, chunk(b"PLTE", palette) + chunk(b"tRNS", b"\x00\x80\xff")
        ),
        "palette-transparent.gif": encode(image.quantize(8), "GIF", transparency=3),
        "rgba.png": encode(rgba, "PNG"),
        "rgba.webp": encode(rgba, "WEBP", lossless=True, exact=True),
        "grey-alpha.png": encode(rgba.convert("LA"), "PNG"),
        "grey-16-bit.png": encode(Image.fromarray(gray16), "PNG"),
        "grey-16-bit.tif": encode(Image.fromarray(gray16), "TIFF"),
        "grey-16-bit.ppm": encode(Image.fromarray(gray16.astype(np.int32)), "PPM"),
        "one-bit.png": png(WIDTH, HEIGHT, 1, 0, bits),
        "float.tif": encode(Image.fromarray(picture()[:, :, 0].astype(np.float32)), "TIFF"),
        "grey-32-bit.tif": encode(Image.fromarray(picture()[:, :, 0].astype(np.int32) * 1_000_000), "TIFF"),
    }


def cut_files() -> dict[str, bytes]:
    """Return truncated images, cut at places where decoders behave differently."""
    jpeg = encode(Image.fromarray(picture()), "JPEG", quality=95)
    scan = jpeg.index(b"\xff\xda")
    whole_png = encode(Image.fromarray(picture()), "PNG")
    gif = encode(Image.fromarray(picture()), "GIF")
    webp = encode(Image.fromarray(picture()), "WEBP", lossless=True)
    tiff = encode(Image.fromarray(picture()), "TIFF")
    return {
        "cut-in-first-marker.jpg": jpeg[:3],
        "cut-in-tables.jpg": jpeg[:200],
        "cut-before-scan.jpg": jpeg[:scan],
        "cut-in-scan.jpg": jpeg[: (scan + len(jpeg)) // 2],
        "cut-before-end-marker.jpg": jpeg[:-2],
        "cut-in-header.png": whole_png[:20],
        "cut-in-data.png": whole_png[: len(whole_png) // 2],
        "cut-in-data.gif": gif[: len(gif) * 3 // 4],
        "cut-in-data.webp": webp[: len(webp) // 2],
        "cut-in-data.tif": tiff[: len(tiff) // 2],
    }


def bombs() -> dict[str, bytes]:
    """Return small files that need much memory or time to decode."""
    some_rows = zlib.compress(bytes(60_000), 9)
    jpeg = encode(Image.fromarray(picture()), "JPEG", quality=95, progressive=True)
    last_scan = jpeg[jpeg.rindex(b"\xff\xda") : -2]
    text = b"Comment\0\0" + zlib.compress(bytes(8_000_000), 9)  # 8 MB of text in 8 KB
    profile = b"icc\0\0" + zlib.compress(bytes(8_000_000), 9)
    gray = b"".join(b"\0" + bytes(WIDTH) for _ in range(HEIGHT))
    frames = [Image.new("RGB", (8, 8), (9, 9, 9)), Image.new("RGB", (8, 8), (99, 9, 9))]
    webp = bytearray(encode(frames[0], "WEBP", save_all=True, append_images=frames[1:], lossless=True))
    webp[24:30] = b"\x70\x23\x00\x70\x23\x00"  # canvas of 9073 x 9073: above our limit, below Pillow's
    return {
        "bomb-header.png": PNG_SIGNATURE
        + chunk(b"IHDR", struct.pack(">IIBBBBB", 100_000, 100_000, 8, 2, 0, 0, 0))
        + chunk(b"IDAT", some_rows)
        + chunk(b"IEND", b""),
        "bomb-just-over-the-limit.png": png(8_001, 8_000, 8, 0, bytes(60_000)),
        "bomb-screen.gif": b"GIF89a"
        + struct.pack("<HHBBB", 60_000, 60_000, 0x80, 0, 0)
        + bytes(6)
        + b","
        + struct.pack("<HHHHB", 0, 0, 60_000, 60_000, 0)
        + b"\x02\x02\x44\x01\x00;",
        "bomb-canvas.webp": bytes(webp),
        "bomb-size.bmp": b"BM"
        + struct.pack("<IHHI", 54, 0, 0, 54)
        + struct.pack("<IiiHHIIiiII", 40, 50_000, 50_000, 1, 24, 0, 0, 0, 0, 0, 0),
        "bomb-size.ppm": b"P6 90000 90000 255\n" + bytes(64),
        "bomb-text.png": png(WIDTH, HEIGHT, 8, 0, gray, chunk(b"zTXt", text)),
        "bomb-profile.png": png(WIDTH, HEIGHT, 8, 0, gray, chunk(b"iCCP", profile)),
        "bomb-scans.jpg": jpeg[:-2] + last_scan * 150 + jpeg[-2:],
        "bomb-tile.tif": huge_tile(),
    }


def huge_tile() -> bytes:
    """Return a TIFF of one pixel in a tile of 40000 x 40000."""
    entries = [
        (256, 3, 1),
        (257, 3, 1),
        (258, 3, 8),
        (259, 3, 8),
        (262, 3, 1),
        (277, 3, 1),
        (322, 4, 40_000),
        (323, 4, 40_000),
        (324, 4, 0),
        (325, 4, 0),
    ]  # tag, type, value; 324 and 325 are filled in below
    data = zlib.compress(bytes(100_000), 9)
    start = 8 + 2 + 12 * len(entries) + 4
    values = {324: start, 325: len(data)}
    directory = b"".join(struct.pack("<HHII", tag, kind, 1, values.get(tag, value)) for tag, kind, value in entries)
    return b"II*\0" + struct.pack("<IH", 8, len(entries)) + directory + bytes(4) + data


def no_images() -> dict[str, bytes]:
    """Return files that are not images, or whose format is never passed to a decoder."""
    return {
        "empty.jpg": b"",
        "text.jpg": b"This is no image.\n" * 20,
        "page.png": b"<!DOCTYPE html><html><body>404 Not Found</body></html>",
        "zeros.jpg": bytes(1000),
        "drawing.svg.png": b'<svg xmlns="http://www.w3.org/2000/svg" width="9" height="9"/>',
        # Pillow would start Ghostscript for this one.
        "program.eps.jpg": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\nshowpage\n%%EOF\n",
    }


if __name__ == "__main__":
    main()
