"""Images like ImageNet's validation set: 5,000 pictures by a formula, ten copies each, in three layouts.

The sizes of the pictures are those of `imagenet_sizes`; a picture has ImageNet's mean of 110 kB. Picture n shows class
n modulo 1,000. The ten copies of a picture are images of its class at random places among them.
"""

import io
import json
import shutil
import tarfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

from benchmarks.common.imagenet_sizes import LONGEST, draw
from benchmarks.common.nets import CLASSES
from prelunet.evaluator.arrays import Float32Array, UInt8Array

PICTURES, COPIES = 5000, 10
QUALITY = 90  # of the JPEGs
CONTRAST = 31.0  # standard deviation of a channel; with this quality a picture has 110 kB on average
TARS, PARQUET_FILES = 50, 14  # 1,000 images a tar; Hugging Face's imagenet-1k has 14 files of validation images
ROW_GROUP = 100  # rows, as Hugging Face writes images


@dataclass(frozen=True)
class LabelledImage:
    """An image of the dataset. name: without suffix; label: class index."""

    name: str
    label: int
    picture: Path


def pixels(number: int, seed: int) -> UInt8Array:
    """Return picture `number`, uint8 (height, width, 3).

    Noise whose amplitudes fall as 1/frequency, as those of photos do (Field 1987). Its tint and how the color channels
    mix are the class's, with a little of the picture's own.
    """
    own, shared = np.random.default_rng((seed, 1, number)), np.random.default_rng((seed, 2, number % CLASSES))
    height, width = _sizes(seed)[number]
    noise = _noise(seed)
    row, column = (int(own.integers(LONGEST - side + 1)) for side in (height, width))
    mix = np.eye(3) + shared.normal(scale=0.5, size=(3, 3)) + own.normal(scale=0.1, size=(3, 3))
    mix *= CONTRAST / np.linalg.norm(mix, axis=0)
    tint = 128 + shared.normal(scale=30, size=3) + own.normal(scale=10, size=3)
    values = noise[row : row + height, column : column + width] @ mix.astype(np.float32) + tint.astype(np.float32)
    return np.clip(values, 0, 255).astype(np.uint8)


@cache
def _sizes(seed: int) -> list[tuple[int, int]]:
    return draw(PICTURES, seed)


@cache
def _noise(seed: int) -> Float32Array:
    """Return noise with a 1/f spectrum, float32 (LONGEST, LONGEST, 3), of mean 0 and standard deviation 1."""
    white = np.random.default_rng(seed).normal(size=(3, LONGEST, LONGEST)).astype(np.float32)
    frequency = np.hypot(np.fft.fftfreq(LONGEST)[:, None], np.fft.rfftfreq(LONGEST)[None, :])
    frequency[0, 0] = np.inf
    noise = np.fft.irfft2(np.fft.rfft2(white) / frequency, s=(LONGEST, LONGEST)).transpose(1, 2, 0)
    return np.ascontiguousarray(noise / noise.std((0, 1)), np.float32)


def write_pictures(folder: Path, count: int, seed: int) -> list[Path]:
    """Write the first `count` pictures as JPEGs and return their paths."""
    folder.mkdir()
    paths = [folder / f"{number:04}.jpg" for number in range(count)]
    for number, path in enumerate(paths):
        Image.fromarray(pixels(number, seed)).save(path, quality=QUALITY)
    return paths


def label_images(pictures: Sequence[Path], images: int, seed: int) -> list[LabelledImage]:
    """Return the images of the dataset in the order of their names: each picture `images` / pictures times.

    Numbers run through the classes, so that any part of the dataset has the same images in every layout.
    """
    order = np.random.default_rng(seed).permutation(images) % len(pictures)
    order = order[np.argsort(order % CLASSES, kind="stable")]
    return [
        LabelledImage(f"ILSVRC2012_val_{number:08}", picture % CLASSES, pictures[picture])
        for number, picture in enumerate(order.tolist(), start=1)
    ]


def write_folders(folder: Path, images: Sequence[LabelledImage], wnids: Sequence[str]) -> None:
    """Copy the images into class folders: `n01440764/ILSVRC2012_val_00000293.JPEG`.

    Copies instead of links: each layout reads as many bytes from the disk as the others.
    """
    for wnid in {wnids[image.label] for image in images}:
        (folder / wnid).mkdir(parents=True)
    for image in images:
        shutil.copyfile(image.picture, folder / wnids[image.label] / f"{image.name}.JPEG")


def write_shards(folder: Path, images: Sequence[LabelledImage], _wnids: Sequence[str]) -> None:
    """Write webdataset shards: tars of `key.jpg` and `key.cls`."""
    folder.mkdir()
    for number, part in enumerate(_parts(images, TARS)):
        with tarfile.open(folder / f"imagenet-val-{number:06}.tar", "w") as tar:
            for image in part:
                for suffix, data in (("jpg", image.picture.read_bytes()), ("cls", str(image.label).encode())):
                    member = tarfile.TarInfo(f"{image.name}.{suffix}")
                    member.size = len(data)
                    tar.addfile(member, io.BytesIO(data))


def write_parquet(folder: Path, images: Sequence[LabelledImage], wnids: Sequence[str]) -> None:
    """Write Hugging Face's parquet files, with the features in the schema's metadata."""
    (folder / "data").mkdir(parents=True)
    features = {"image": {"_type": "Image"}, "label": {"names": list(wnids), "_type": "ClassLabel"}}
    fields = {"image": pa.struct({"bytes": pa.binary(), "path": pa.string()}), "label": pa.int64()}
    schema = pa.schema(fields, {"huggingface": json.dumps({"info": {"features": features}})})
    for number, part in enumerate(_parts(images, PARQUET_FILES)):
        file = folder / "data" / f"validation-{number:05}-of-{PARQUET_FILES:05}.parquet"
        with pq.ParquetWriter(file, schema, use_dictionary=False) as writer:  # or copies would be stored once
            for start in range(0, len(part), ROW_GROUP):
                rows = [
                    {"image": {"bytes": one.picture.read_bytes(), "path": f"{one.name}.JPEG"}, "label": one.label}
                    for one in part[start : start + ROW_GROUP]
                ]
                writer.write_table(pa.Table.from_pylist(rows, schema))


def _parts(images: Sequence[LabelledImage], count: int) -> list[Sequence[LabelledImage]]:
    ends = [len(images) * number // count for number in range(count + 1)]
    return [images[start:end] for start, end in pairwise(ends)]
