"""The embedded dataset is as documented."""

import hashlib
import re
import tomllib
import zipfile
from collections import Counter
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from prelunet.evaluator.imaging.decode import decode_rgb
from prelunet.training.data.splits import embedded_dataset_path, open_splits

ROOT = Path(__file__).parents[3]
LICENSE_FILES = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["license-files"]
CLASSES = ["ankle-boot", "bag", "coat", "dress", "pullover", "sandal", "shirt", "sneaker", "t-shirt", "trouser"]


@cache
def images() -> dict[str, np.ndarray]:
    """Decode all images once: name → uint8 (H, W, 3)."""
    with zipfile.ZipFile(embedded_dataset_path()) as archive:
        return {name: decode_rgb(archive.read(name)) for name in archive.namelist()}


def test_every_class_has_600_training_and_200_validation_images() -> None:
    counts = Counter(tuple(name.split("/")[:2]) for name in images())
    assert counts == {(split, name): count for split, count in (("train", 600), ("val", 200)) for name in CLASSES}


def test_no_image_occurs_twice_so_val_is_disjoint_from_train() -> None:
    digests = {hashlib.sha256(repr(image.shape).encode() + image.tobytes()).digest() for image in images().values()}
    assert len(digests) == len(images()) == 8000


def test_images_are_cropped_to_their_content() -> None:
    for name, image in images().items():
        for edge in (image[0], image[-1], image[:, 0], image[:, -1]):
            assert edge.max() > 0, name


def test_sizes_and_shapes_vary_as_in_photographs() -> None:
    sizes = Counter(image.shape[:2] for image in images().values())
    aspects = [width / height for height, width in sizes]
    assert len(sizes) > 60
    assert min(aspects) < 0.3
    assert max(aspects) > 5
    assert max(max(size) for size in sizes) == 28
    assert max(sizes.values()) < len(images()) / 10  # no size dominates


@pytest.mark.parametrize(("name", "tall"), [("trouser", True), ("sneaker", False)])
def test_trousers_are_tall_and_sneakers_are_wide(name: str, tall: bool) -> None:
    shapes = [image.shape for file, image in images().items() if f"/{name}/" in file]
    assert np.mean([(height > width) == tall for height, width, _ in shapes]) > 0.95


def test_the_archive_stays_below_5_megabytes_and_its_bytes_are_those_of_the_build_tool() -> None:
    data = embedded_dataset_path().read_bytes()
    assert len(data) < 5_000_000
    # The digest that tools/build_fashion_mnist.py states in its docstring.
    assert hashlib.sha256(data).hexdigest() == "ba705ce7a12f27962d7d0cbdbd2b62691c4b34850e1b974210022db0b2e2a1dc"


def test_names_are_sorted_and_dates_are_fixed_so_that_a_rebuild_gives_the_same_bytes() -> None:
    with zipfile.ZipFile(embedded_dataset_path()) as archive:
        assert archive.namelist() == sorted(archive.namelist())
        assert len({info.date_time for info in archive.infolist()}) == 1


def test_class_names_are_the_folder_names_in_plain_words() -> None:
    splits = open_splits(embedded_dataset_path())
    assert [entry.wnid for entry in splits.classes] == CLASSES
    assert splits.classes[0].name == "ankle boot"
    assert (len(splits.train.samples), len(splits.val.samples)) == (6000, 2000)


@pytest.mark.parametrize("name", LICENSE_FILES)
def test_every_license_file_of_the_package_has_a_copyright_line(name: str) -> None:
    assert re.search(r"^ *Copyright ", (ROOT / name).read_text(encoding="utf-8"), re.MULTILINE)
