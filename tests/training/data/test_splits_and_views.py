"""What the net is shown: splits, order, and views that depend on (seed, epoch, image) alone."""

import io
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from prelunet.evaluator.datasets.dataset import Dataset, Sample
from prelunet.evaluator.datasets.open import open_dataset
from prelunet.evaluator.errors import DatasetError, ImageError, UsageError
from prelunet.evaluator.imaging.resize import resize_shorter_side
from prelunet.training.data.augmentation import VIEW, epoch_order, random_stream, training_view, view_keys_of_step
from prelunet.training.data.image_cache import TRAINING_LONG_SIDE_CAP, ImageCache, map_in_threads
from prelunet.training.data.splits import median_shorter_side, open_splits
from tests.helpers.tiny_datasets import write_tar
from tests.training.training_folders import RECIPE, make_dataset, write_image


def ramp(height: int, width: int) -> np.ndarray:
    """Return an image whose pixels encode their position: red increases to the right, green downward."""
    image = np.zeros((height, width, 3), np.uint8)
    image[..., 0] = np.arange(width) % 256
    image[..., 1] = (np.arange(height) % 256)[:, None]
    return image


# Views


def test_a_view_depends_on_seed_epoch_and_image() -> None:
    image = np.random.default_rng(0).integers(0, 256, (40, 50, 3), dtype=np.uint8)
    view = training_view(image, RECIPE, epoch=2, index=5)
    np.testing.assert_array_equal(view, training_view(image, RECIPE, epoch=2, index=5))
    for recipe, epoch, index in ((RECIPE, 3, 5), (RECIPE, 2, 6), (replace(RECIPE, seed=4), 2, 5)):
        assert not np.array_equal(view, training_view(image, recipe, epoch, index))


def test_the_streams_of_one_seed_differ_even_with_trailing_zeros() -> None:
    keys = [(3, 0, 1, 0), (3, 1, 0, 0), (3, 0, 0, 1), (0, 3, 0, 0), (3, 0, 0, 0)]
    assert len({int(random_stream(*key).integers(2**62)) for key in keys}) == len(keys)


@pytest.mark.parametrize("size", [(40, 50), (61, 33), (13, 900), (200, 14)])  # also beyond 1:64
def test_a_view_is_a_crop_of_the_whole_resized_image(size: tuple[int, int]) -> None:
    image = np.random.default_rng(1).integers(0, 256, (*size, 3), dtype=np.uint8)
    for epoch in range(20):
        random = random_stream(RECIPE.seed, VIEW, epoch, 4)
        low, high = RECIPE.scales
        whole, _ = resize_shorter_side(image, int(random.integers(low, high, endpoint=True)), TRAINING_LONG_SIDE_CAP)
        top, left = (int(random.integers(0, side - RECIPE.crop, endpoint=True)) for side in whole.shape[:2])
        expected = whole[top : top + RECIPE.crop, left : left + RECIPE.crop]
        if random.random() < 0.5:
            expected = expected[:, ::-1]
        # 2: part and whole are each within 1 of the exact filter (tests/imaging/test_resize.py)
        view = training_view(image, RECIPE, epoch, 4)
        assert np.abs(view.astype(np.int64) - expected).max() <= 2
        np.testing.assert_array_equal(view, training_view(Image.fromarray(image), RECIPE, epoch, 4))


def test_half_of_the_views_are_mirrored_and_crops_reach_every_corner() -> None:
    recipe = replace(RECIPE, scales=(16, 16))
    views = [training_view(ramp(16, 20), recipe, epoch, 0) for epoch in range(1000)]
    mirrored = [int(view[0, 0, 0]) > int(view[0, -1, 0]) for view in views]
    assert 430 < sum(mirrored) < 570  # 4.4 standard deviations
    left = Counter(int(view[..., 0].min()) for view in views)
    top = Counter(int(view[..., 1].min()) for view in views)
    assert set(left) == set(range(9))  # 20 − 12 + 1 positions
    assert set(top) == set(range(5))
    assert min(left.values()) > 1000 / 9 / 2


def test_all_scales_of_the_range_are_equally_frequent() -> None:
    recipe = replace(RECIPE, scales=(12, 15), mirror=False)
    image = ramp(60, 60)
    # At scale S adjacent pixels differ by 60/S levels, so 11 steps reveal the scale.
    spans = [training_view(image, recipe, epoch, 0)[5, :, 0] for epoch in range(400)]
    scales = Counter(round(60 * 11 / (int(span[-1]) - int(span[0]))) for span in spans)
    assert set(scales) == {12, 13, 14, 15}
    assert min(scales.values()) > 60  # 100 expected, standard deviation 8.7


def test_without_mirroring_no_view_is_mirrored() -> None:
    recipe = replace(RECIPE, mirror=False)
    views = [training_view(ramp(16, 20), recipe, epoch, 0) for epoch in range(50)]
    assert all(int(view[0, 0, 0]) < int(view[0, -1, 0]) for view in views)


@pytest.mark.parametrize("size", [(5, 28), (28, 5), (1, 300), (300, 1), (1, 1), (2, 1000)])
def test_images_of_any_shape_give_a_full_crop(size: tuple[int, int]) -> None:
    for epoch in range(5):
        view = training_view(ramp(*size), RECIPE, epoch, 0)
        assert view.shape == (12, 12, 3)


def test_crops_of_a_wide_image_reach_beyond_the_evaluations_cap() -> None:
    image = np.zeros((10, 100, 3), np.uint8)
    image[:, 95:] = 255  # the central 4:1 part ends at column 70
    assert any(training_view(image, RECIPE, epoch, 0).max() > 0 for epoch in range(200))


# Order


def test_each_image_occurs_once_per_epoch_and_epochs_follow_without_a_gap() -> None:
    images, recipe = 21, replace(RECIPE, batch=5, steps=100)
    places = [place for step in range(42) for place in view_keys_of_step(recipe, step, images)]  # 210 = 10 epochs
    assert Counter(places) == {(epoch, index): 1 for epoch in range(10) for index in range(images)}
    assert [epoch for epoch, _ in places] == sorted(epoch for epoch, _ in places)


def test_epochs_have_different_orders() -> None:
    assert len({tuple(epoch_order(0, epoch, 21)) for epoch in range(5)}) == 5


def test_threads_work_ahead_but_not_on_all_items_at_once() -> None:
    started: list[int] = []
    lock = threading.Lock()

    def note(item: int) -> int:
        with lock:
            started.append(item)
        return item * item

    results = map_in_threads(note, range(1000), workers=3)
    assert [next(results) for _ in range(4)] == [0, 1, 4, 9]
    results.close()
    assert len(started) < 20


# Memory


def test_decoded_images_are_cached_up_to_the_limit(data: Path) -> None:
    dataset = open_splits(data).train
    image_cache = ImageCache(dataset, {}, memory=5000)
    first = [image_cache.image(index) for index in range(len(image_cache))]
    again = [image_cache.image(index) for index in range(len(image_cache))]
    kept = [one for one, other in zip(first, again, strict=True) if one is other]
    assert 0 < len(kept) < len(first)
    assert sum(np.asarray(image).nbytes for image in kept) <= 5000
    for one, other in zip(first, again, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize(("memory", "fit"), [(0, False), (2**30, True)])
def test_file_sizes_decide_whether_all_images_fit_in_memory(data: Path, memory: int, fit: bool) -> None:
    assert ImageCache(open_splits(data).train, {}, memory).fits_in_memory is fit


def test_an_image_that_becomes_unreadable_raises_an_error(tmp_path: Path) -> None:
    root = make_dataset(tmp_path)
    image_cache = ImageCache(open_splits(root).train, {})
    broken = root / "train/big-cat/000.png"
    broken.write_bytes(b"?" * broken.stat().st_size)
    with pytest.raises(ImageError, match="not a readable image"):
        image_cache.image(0)
    broken.unlink()
    with pytest.raises(DatasetError, match=r"big-cat/000\.png: no longer exists"):
        image_cache.image(0)


# Splits


def test_val_labels_index_the_training_classes(tmp_path: Path) -> None:
    root = make_dataset(tmp_path)
    for path in (root / "val/big-cat").iterdir():
        path.unlink()
    (root / "val/big-cat").rmdir()
    splits = open_splits(root)
    assert {sample.file.split("/")[0]: sample.label for sample in splits.val.samples} == {"dog": 1, "ox": 2}
    assert splits.val.classes == splits.train.classes == ("big-cat", "dog", "ox")
    assert splits.val.fingerprint == open_dataset(root, split="val", wnids=splits.train.classes).fingerprint


def test_a_class_of_val_that_is_missing_from_train_is_refused_by_name(tmp_path: Path) -> None:
    root = make_dataset(tmp_path)
    write_image(root / "val/zebra/1.png", 0, (20, 20), 0)
    with pytest.raises(DatasetError, match="1 classes that train/ does not have: zebra"):
        open_splits(root)


def test_a_folder_without_train_and_val_is_refused_with_advice(tmp_path: Path) -> None:
    root = make_dataset(tmp_path) / "train"
    with pytest.raises(DatasetError, match="no folders 'train' and 'val' here") as caught:
        open_splits(root)
    assert str(root / "train") in str(caught.value)


@pytest.mark.parametrize("missing", ["train", "val"])
def test_a_folder_with_only_one_of_the_splits_is_refused(tmp_path: Path, missing: str) -> None:
    root = make_dataset(tmp_path)
    (root / missing).rename(root / "other")
    with pytest.raises(DatasetError, match=f"'{missing}'"):
        open_splits(root)


def test_a_single_class_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match=r"only one class \(dog\)"):
        open_splits(make_dataset(tmp_path, classes=("dog",)))


def test_an_empty_class_folder_is_refused_by_name(tmp_path: Path) -> None:
    root = make_dataset(tmp_path)
    (root / "train/yak").mkdir()
    with pytest.raises(DatasetError, match="yak"):
        open_splits(root)


def test_a_path_that_does_not_exist_is_refused() -> None:
    with pytest.raises(UsageError, match="no such file or folder"):
        open_splits(Path("nowhere"))


# Splits in shards


def write_shards(folder: Path, root: Path, split: str, name: str, label: Callable[[str], tuple[str, bytes]]) -> None:
    """Pack the images of class folders into three shards. label: class → suffix and content of the label file."""
    files = sorted((root / split).rglob("*.png"))
    for number in range(3):
        members: dict[str, bytes] = {}
        for place, path in enumerate(files[number::3]):
            suffix, data = label(path.parent.name)
            members |= {f"{place:04}.png": path.read_bytes(), f"{place:04}{suffix}": data}
        write_tar(folder / f"{name}-{number:03}.tar", members)


CLASS_NUMBERS = {"big-cat": 0, "dog": 1, "ox": 2}
LABELS: dict[str, tuple[Callable[[str], tuple[str, bytes]], tuple[str, ...]]] = {
    "indices": (lambda name: (".cls", b"%d" % CLASS_NUMBERS[name]), ("0", "1", "2")),
    "names": (lambda name: (".cls", name.encode()), ("big-cat", "dog", "ox")),
    "json": (lambda name: (".json", b'{"label": %d}' % CLASS_NUMBERS[name]), ("0", "1", "2")),
}


@pytest.mark.parametrize("way", LABELS)
@pytest.mark.parametrize("folders", [True, False])
def test_shards_train_as_class_folders_do(data: Path, tmp_path: Path, way: str, folders: bool) -> None:
    label, classes = LABELS[way]
    for split in ("train", "val"):
        if folders:
            write_shards(tmp_path / split, data, split, "shard", label)
        else:
            write_shards(tmp_path, data, split, f"pets-{split}", label)
    splits, expected = open_splits(tmp_path), open_splits(data)
    assert splits.train.classes == splits.val.classes == classes
    assert splits.train.layout == "webdataset shards"
    for found, plain in ((splits.train, expected.train), (splits.val, expected.val)):
        images = Counter((plain.read(sample), sample.label) for sample in plain.samples)
        assert Counter((found.read(sample), sample.label) for sample in found.samples) == images
    again = open_dataset(tmp_path, split="val", wnids=classes)  # as `validate` opens it
    assert again.fingerprint == splits.val.fingerprint


def test_numeric_labels_sort_as_numbers_and_val_may_miss_some(tmp_path: Path) -> None:
    root = make_dataset(tmp_path / "plain", train=1, val=1, classes=tuple(map(str, range(12))))
    numbered = lambda name: (".cls", name.encode())  # noqa: E731
    write_shards(tmp_path / "train", root, "train", "a", numbered)
    for path in (root / "val/3").iterdir():
        path.unlink()
    write_shards(tmp_path / "val", root, "val", "a", numbered)
    splits = open_splits(tmp_path)
    assert splits.train.classes == tuple(map(str, range(12)))  # not 0, 1, 10, 11, 2
    assert sorted(sample.label for sample in splits.val.samples) == [0, 1, 2, *range(4, 12)]


@pytest.mark.parametrize(
    ("label", "message"),
    [
        (lambda name: (".cls", b"%d" % (CLASS_NUMBERS[name] + 1)), r"no image of class 0 \(1 such classes\).*from 0"),
        (lambda name: (".cls", b"%d" % (3 * CLASS_NUMBERS[name])), r"no image of class 1 \(4 such classes\)"),
        (lambda name: (".cls", b"-1"), "the label '-1' is not a class"),
        (lambda name: (".cls", b""), "the label '' is not a class"),
        (lambda name: (".cls", b"7" if name == "ox" else name.encode()), "is not a class index, but other labels are"),
        (lambda name: (".cls", b"0%d" % CLASS_NUMBERS[name]), "the label '00' is not a class index"),
        (lambda name: (".cls", b"0"), r"only one class \(0\)"),
    ],
)
def test_inconsistent_shard_labels_are_refused(
    data: Path, tmp_path: Path, label: Callable[[str], tuple[str, bytes]], message: str
) -> None:
    for split in ("train", "val"):
        write_shards(tmp_path / split, data, split, "a", label)
    with pytest.raises(DatasetError, match=message):
        open_splits(tmp_path)


def test_shards_without_a_split_in_their_names_are_refused(data: Path, tmp_path: Path) -> None:
    write_shards(tmp_path, data, "train", "pets", LABELS["names"][0])
    with pytest.raises(DatasetError, match=r"\(or webdataset shards\)"):
        open_splits(tmp_path)


def test_the_median_shorter_side_is_read_from_headers(tmp_path: Path) -> None:
    root = make_dataset(tmp_path)
    data = (root / "train/ox/000.png").read_bytes()
    (root / "train/ox/000.png").write_bytes(data[:60])  # an intact header without pixels
    (root / "train/ox/001.png").write_bytes(b"?")  # no header: skipped
    sides = sorted([14, 13, 12, 9, 16, 14, 13] * 3)
    sides.remove(13)
    assert median_shorter_side(open_splits(root).train) == np.median(sides)


def test_the_median_of_a_large_set_is_that_of_a_thousand_images_spread_evenly() -> None:
    asked: list[str] = []

    class Reader:
        def read(self, file: str) -> bytes:
            asked.append(file)
            coded = io.BytesIO()
            Image.new("L", (300, 1 + int(file) // 20)).save(coded, "PNG")
            return coded.getvalue()

    samples = [Sample(f"{number:04}", 0, 1) for number in range(4000)]
    large = Dataset(Path("data"), ("a",), samples, Reader(), exact_sizes=False)
    assert median_shorter_side(large) == pytest.approx(100, abs=1)  # of 1 to 200
    assert len(asked) == 1000


def test_without_any_readable_header_there_is_no_median(tmp_path: Path) -> None:
    root = make_dataset(tmp_path)
    for path in (root / "train").rglob("*.png"):
        path.write_bytes(b"?")
    with pytest.raises(DatasetError, match="none of 21 training images can be read"):
        median_shorter_side(open_splits(root).train)
