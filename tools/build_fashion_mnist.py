"""Build the embedded dataset, training/data/fashion_mnist.zip, from Debian's package `dataset-fashion-mnist`.

    python tools/build_fashion_mnist.py /usr/share/datasets/fashion-mnist

A balanced part of Fashion-MNIST (Xiao, Rasul, Vollgraf 2017; MIT license): per class the first 600 pictures of the
training file as `train/` and the first 200 of the t10k file as `val/`. Each is cropped to its content, the bounding box
of all pixels above 0, so that sizes and shapes vary as in photographs: trousers are tall, shoes are wide.

The bytes depend only on this file, the package and zlib: fixed dates, sorted names, PNGs written here (an image library
has its own compressor, whose output changes with its version). With zlib 1.2.13 the archive's sha256 is
    ba705ce7a12f27962d7d0cbdbd2b62691c4b34850e1b974210022db0b2e2a1dc
"""

import argparse
import gzip
import hashlib
import struct
import sys
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt

GrayImage = npt.NDArray[np.uint8]  # (rows, columns)

CLASSES = (  # folder names in the order of the labels, 0 to 9; the names are those of the dataset's README
    "t-shirt",
    "trouser",
    "pullover",
    "dress",
    "coat",
    "sandal",
    "shirt",
    "sneaker",
    "bag",
    "ankle-boot",
)
SPLITS = {"train": ("train", 600), "val": ("t10k", 200)}  # folder: (file of the package, pictures per class)
CONTENT_ABOVE = 0  # gray level; the background is exactly 0
ZIP_DATE = (2017, 8, 25, 0, 0, 0)  # any fixed date: this is the dataset's


def main() -> None:
    """Write the archive and print its sha256."""
    parser = argparse.ArgumentParser(description="Build the embedded dataset from Debian's dataset-fashion-mnist.")
    parser.add_argument("package", type=Path, help="folder of the *-ubyte.gz files")
    parser.add_argument("-o", "--output", type=Path, default=Path("training/data/fashion_mnist.zip"))
    options = parser.parse_args()
    files = dict(archive_files(options.package))
    with zipfile.ZipFile(options.output, "w", zipfile.ZIP_STORED) as archive:  # PNGs do not shrink further
        for name in sorted(files):
            archive.writestr(zipfile.ZipInfo(name, ZIP_DATE), files[name])
    data = options.output.read_bytes()
    print(f"{options.output}: {len(files)} images, {len(data)} bytes, sha256 {hashlib.sha256(data).hexdigest()}")


def archive_files(package: Path) -> Iterator[tuple[str, bytes]]:
    """Yield name and bytes of every picture of the archive; the number in the name is its index in the package."""
    for split, (source, per_class) in SPLITS.items():
        images = read_idx(package / f"{source}-images-idx3-ubyte.gz")
        labels = read_idx(package / f"{source}-labels-idx1-ubyte.gz")
        for label, class_name in enumerate(CLASSES):
            for place in np.flatnonzero(labels == label)[:per_class]:
                yield f"{split}/{class_name}/{place:05}.png", encode_png(crop_to_content(images[place]))


def read_idx(path: Path) -> npt.NDArray[np.uint8]:
    """Read a gzipped IDX file of bytes: two zeros, type 8, the number of axes, each axis's length, the values."""
    data = gzip.decompress(path.read_bytes())
    if data[:3] != b"\0\0\x08":
        sys.exit(f"{path}: not an IDX file of bytes")
    axes = data[3]
    shape = struct.unpack(f">{axes}I", data[4 : 4 + 4 * axes])
    return np.frombuffer(data, np.uint8, offset=4 + 4 * axes).reshape(shape)


def crop_to_content(image: GrayImage) -> GrayImage:
    """Crop an image to the smallest rectangle that contains all pixels above CONTENT_ABOVE."""
    rows, columns = (np.flatnonzero((image > CONTENT_ABOVE).any(axis=axis)) for axis in (1, 0))
    return image[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]


def encode_png(image: GrayImage) -> bytes:
    """Encode an 8-bit gray PNG with whichever of the row filters None, Sub and Up gives the smallest file."""
    left = np.pad(image, ((0, 0), (1, 0)))[:, :-1]
    above = np.pad(image, ((1, 0), (0, 0)))[:-1]
    filtered = (image, image - left, image - above)  # None, Sub, Up (PNG specification, section 9); modulo 256
    rows = (np.pad(pixels, ((0, 0), (1, 0)), constant_values=kind) for kind, pixels in enumerate(filtered))
    body = min((zlib.compress(row.tobytes(), 9) for row in rows), key=len)
    header = struct.pack(">IIBBBBB", image.shape[1], image.shape[0], 8, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + _chunk(b"IHDR", header) + _chunk(b"IDAT", body) + _chunk(b"IEND", b"")


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


if __name__ == "__main__":
    main()
