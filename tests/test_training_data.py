"""What the net is shown: splits, surveys, and views that depend on (seed, epoch, image) alone."""

import threading
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from evaluator.datasets.opening import open_dataset
from evaluator.errors import DatasetError, UsageError
from evaluator.imaging.decode import decode_rgb
from evaluator.imaging.resize import Picture, resize_shorter_side
from training.augmentation import (
    epoch_order,
    evaluation_batches,
    make_batch,
    places_of_step,
    random_stream,
    training_batches,
    training_view,
)
from training.pictures import Pictures, map_ahead, survey
from training.splits import median_shorter_side, open_splits
from training_folders import RECIPE, make_dataset, write_image


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_dataset(tmp_path_factory.mktemp("data"))


@pytest.fixture
def pictures(folder: Path) -> Pictures:
    return Pictures(open_splits(folder).train, {})


def ramp(height: int, width: int) -> np.ndarray:
    """An image in which every pixel says where it is: red grows to the right, green downwards."""
    image = np.zeros((height, width, 3), np.uint8)
    image[..., 0] = np.arange(width) % 256
    image[..., 1] = (np.arange(height) % 256)[:, None]
    return image


# Views


def test_a_view_depends_on_seed_epoch_and_image_and_on_nothing_else() -> None:
    image = np.random.default_rng(0).integers(0, 256, (40, 50, 3), dtype=np.uint8)
    view = training_view(image, RECIPE, epoch=2, index=5)
    np.testing.assert_array_equal(view, training_view(image, RECIPE, epoch=2, index=5))
    for recipe, epoch, index in ((RECIPE, 3, 5), (RECIPE, 2, 6), (replace(RECIPE, seed=4), 2, 5)):
        assert not np.array_equal(view, training_view(image, recipe, epoch, index))


def test_the_streams_of_one_seed_differ_even_where_numbers_are_zero() -> None:
    keys = [(3, 0, 1, 0), (3, 1, 0, 0), (3, 0, 0, 1), (0, 3, 0, 0), (3, 0, 0, 0)]
    assert len({int(random_stream(*key).integers(2**62)) for key in keys}) == len(keys)


def test_half_of_the_views_are_mirrored_and_crops_reach_every_corner() -> None:
    recipe = replace(RECIPE, scales=(16, 16))
    views = [training_view(ramp(16, 20), recipe, epoch, 0) for epoch in range(1000)]
    mirrored = [int(view[0, 0, 0]) > int(view[0, -1, 0]) for view in views]
    assert 430 < sum(mirrored) < 570  # 4.4 standard deviations of a fair coin
    left = Counter(int(view[..., 0].min()) for view in views)
    top = Counter(int(view[..., 1].min()) for view in views)
    assert set(left) == set(range(9))  # 20 − 12 + 1 places
    assert set(top) == set(range(5))
    assert min(left.values()) > 1000 / 9 / 2


def test_all_scales_of_the_range_occur_alike() -> None:
    recipe = replace(RECIPE, scales=(12, 15), mirror=False)
    image = ramp(60, 60)
    # At scale S neighbours differ by 60/S grey levels, so 11 steps tell the scale.
    spans = [training_view(image, recipe, epoch, 0)[5, :, 0] for epoch in range(400)]
    scales = Counter(round(60 * 11 / (int(span[-1]) - int(span[0]))) for span in spans)
    assert set(scales) == {12, 13, 14, 15}
    assert min(scales.values()) > 60  # 100 expected, standard deviation 8.7


def test_without_mirroring_no_view_is_mirrored() -> None:
    recipe = replace(RECIPE, mirror=False)
    views = [training_view(ramp(16, 20), recipe, epoch, 0) for epoch in range(50)]
    assert all(int(view[0, 0, 0]) < int(view[0, -1, 0]) for view in views)


@pytest.mark.parametrize("size", [(5, 28), (28, 5), (1, 300), (300, 1), (1, 1), (2, 1000)])
def test_images_of_any_shape_give_a_whole_crop(size: tuple[int, int]) -> None:
    for epoch in range(5):
        view = training_view(ramp(*size), RECIPE, epoch, 0)
        assert view.shape == (12, 12, 3)


def test_crops_of_a_wide_image_reach_beyond_the_evaluations_cap() -> None:
    image = np.zeros((10, 100, 3), np.uint8)
    image[:, 95:] = 255  # the centre of 4:1 ends at column 70
    assert any(training_view(image, RECIPE, epoch, 0).max() > 0 for epoch in range(200))


# Order and batches


def test_each_image_comes_once_in_an_epoch_and_epochs_follow_without_a_gap() -> None:
    images, recipe = 21, replace(RECIPE, batch=5, steps=100)
    places = [place for step in range(42) for place in places_of_step(recipe, step, images)]  # 210 = 10 epochs
    assert Counter(places) == {(epoch, index): 1 for epoch in range(10) for index in range(images)}
    assert [epoch for epoch, _ in places] == sorted(epoch for epoch, _ in places)


def test_epochs_have_different_orders() -> None:
    assert len({tuple(epoch_order(0, epoch, 21)) for epoch in range(5)}) == 5


def test_batches_are_the_same_from_the_first_step_and_from_the_middle_with_any_number_of_threads(folder: Path) -> None:
    dataset = open_splits(folder).train
    plain = [make_batch(Pictures(dataset, {}), RECIPE, step) for step in range(RECIPE.steps)]
    for first, workers, memory in ((0, 1, 0), (0, 3, 2**30), (7, 2, 2000)):
        pictures = Pictures(dataset, {}, memory)
        batches = list(training_batches(pictures, RECIPE, first, workers))
        assert len(batches) == RECIPE.steps - first
        for batch, expected in zip(batches, plain[first:], strict=True):
            np.testing.assert_array_equal(batch.images, expected.images)
            np.testing.assert_array_equal(batch.labels, expected.labels)


def test_labels_follow_their_images(pictures: Pictures) -> None:
    batch = make_batch(pictures, RECIPE, 0)
    for (epoch, index), image, label in zip(
        places_of_step(RECIPE, 0, len(pictures)), batch.images, batch.labels, strict=True
    ):
        sample = pictures.samples[index]
        decoded = decode_rgb(pictures.dataset.read(sample))
        np.testing.assert_array_equal(image, training_view(decoded, RECIPE, epoch, index))
        assert pictures.dataset.classes[label] == sample.file.split("/")[0]


def test_evaluation_shows_every_image_once_in_dataset_order_at_its_centre(folder: Path) -> None:
    pictures = Pictures(open_splits(folder).val, {})
    batches = list(evaluation_batches(pictures, RECIPE, size=4, workers=2))
    images = np.concatenate([batch.images for batch in batches])
    labels = np.concatenate([batch.labels for batch in batches])
    assert [len(batch.labels) for batch in batches] == [4, 4, 1]
    assert labels.tolist() == [sample.label for sample in pictures.samples]
    np.testing.assert_array_equal(images[3], _slow_central_view(np.array(pictures.picture(3)), scale=14, crop=12))


def _slow_central_view(image: np.ndarray, scale: int, crop: int) -> np.ndarray:
    """Oracle for an image below 4:1, in Pillow alone."""
    height, width = image.shape[:2]
    short = min(height, width)
    size = [int(side * scale / short + 0.5) for side in (width, height)]
    resized = np.asarray(Image.fromarray(image).resize(size, Image.Resampling.BILINEAR))
    top, left = ((side - crop) // 2 for side in resized.shape[:2])
    return resized[top : top + crop, left : left + crop]


def test_items_are_worked_on_ahead_but_never_all_at_once() -> None:
    started: list[int] = []
    lock = threading.Lock()

    def note(item: int) -> int:
        with lock:
            started.append(item)
        return item * item

    results = map_ahead(note, range(1000), workers=3)
    assert [next(results) for _ in range(4)] == [0, 1, 4, 9]
    results.close()
    assert len(started) < 20


# Memory


def test_decoded_images_are_kept_up_to_the_bound_and_no_further(folder: Path) -> None:
    dataset = open_splits(folder).train
    pictures = Pictures(dataset, {}, memory=5000)
    first = [pictures.picture(index) for index in range(len(pictures))]
    again = [pictures.picture(index) for index in range(len(pictures))]
    kept = [one for one, other in zip(first, again, strict=True) if one is other]
    assert 0 < len(kept) < len(first)
    assert sum(np.asarray(image).nbytes for image in kept) <= 5000
    for one, other in zip(first, again, strict=True):
        np.testing.assert_array_equal(one, other)


def test_an_image_that_is_not_kept_is_never_copied_whole_into_an_array(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pillow resizes its own image: the way through an array takes half of the memory of a large photo once more."""
    given: list[bool] = []

    def noting(image: Picture, scale: int, cap: int = 4) -> tuple[np.ndarray, bool]:
        given.append(isinstance(image, Image.Image))
        return resize_shorter_side(image, scale, cap)

    for module in ("pictures", "augmentation"):
        monkeypatch.setattr(f"training.{module}.resize_shorter_side", noting)
    dataset = open_splits(folder).train
    survey(dataset, "train/", scale=14, crop=12)
    pictures = Pictures(dataset, {}, memory=0)
    list(evaluation_batches(pictures, RECIPE, size=4, workers=2))
    make_batch(pictures, RECIPE, 0)
    assert given == [True] * (2 * len(dataset.samples) + RECIPE.batch)


# The survey


def test_the_mean_image_is_the_mean_of_the_central_views(folder: Path) -> None:
    dataset = open_splits(folder).train
    narrow = [sample for sample in dataset.samples if "003.png" not in sample.file]  # the oracle knows no cap at 4:1
    images = [decode_rgb(dataset.read(sample)) for sample in narrow]
    views = [_slow_central_view(image, scale=14, crop=12) for image in images]
    found = survey(replace(dataset, samples=narrow), "train/", scale=14, crop=12, workers=2)
    assert found.refused == {}
    assert found.mean.dtype == np.float32
    # Sums of whole numbers are exact, so equal to the last bit.
    np.testing.assert_array_equal(found.mean, np.mean(views, axis=0, dtype=np.float64).astype(np.float32))


def test_an_image_that_cannot_be_decoded_is_named_and_left_out(tmp_path: Path) -> None:
    root = make_dataset(tmp_path)
    whole = (root / "train/dog/002.png").read_bytes()
    before = survey(open_splits(root).train, "train/", scale=14, crop=12)
    (root / "train/dog/002.png").write_bytes(whole[: len(whole) // 2])
    dataset = open_splits(root).train
    found = survey(dataset, "train/", scale=14, crop=12)
    assert list(found.refused) == ["dog/002.png"]
    assert "truncated" in found.refused["dog/002.png"]
    assert not np.array_equal(found.mean, before.mean)
    pictures = Pictures(dataset, found.refused)
    assert len(pictures) == 20
    assert "dog/002.png" not in {sample.file for sample in pictures.samples}


@pytest.mark.parametrize(("split", "spoiled"), [("train", 3), ("train", 21), ("val", 1)])
def test_a_split_with_more_than_a_tenth_of_unreadable_images_is_refused(
    tmp_path: Path, split: str, spoiled: int
) -> None:
    root = make_dataset(tmp_path)
    for path in sorted((root / split).rglob("*.png"))[:spoiled]:
        path.write_bytes(b"not an image")
    splits = open_splits(root)
    with pytest.raises(DatasetError, match=rf"{spoiled} of \d+ images in {split}/ cannot be decoded") as caught:
        survey({"train": splits.train, "val": splits.val}[split], f"{split}/", scale=14, crop=12)
    assert "big-cat/000.png" in str(caught.value)


def test_an_image_that_breaks_after_the_survey_is_an_error_that_names_it(tmp_path: Path) -> None:
    root = make_dataset(tmp_path)
    pictures = Pictures(open_splits(root).train, {})
    broken = root / "train/big-cat/000.png"
    broken.write_bytes(b"?" * broken.stat().st_size)
    with pytest.raises(DatasetError, match=r"big-cat/000\.png: could be read when the training began"):
        pictures.picture(0)


# Splits


def test_val_labels_are_places_in_the_training_classes(tmp_path: Path) -> None:
    root = make_dataset(tmp_path)
    for path in (root / "val/big-cat").iterdir():
        path.unlink()
    (root / "val/big-cat").rmdir()
    splits = open_splits(root)
    assert {sample.file.split("/")[0]: sample.label for sample in splits.val.samples} == {"dog": 1, "ox": 2}
    assert splits.val.classes == splits.train.classes == ("big-cat", "dog", "ox")
    assert splits.val.fingerprint == open_dataset(root, split="val", class_names=splits.train.classes).fingerprint


def test_a_class_of_val_that_train_lacks_is_refused_by_name(tmp_path: Path) -> None:
    root = make_dataset(tmp_path)
    write_image(root / "val/zebra/1.png", 0, (20, 20), 0)
    with pytest.raises(DatasetError, match="1 classes that train/ lacks: zebra"):
        open_splits(root)


def test_a_folder_without_train_and_val_is_refused_with_what_to_do(tmp_path: Path) -> None:
    root = make_dataset(tmp_path) / "train"
    with pytest.raises(DatasetError, match="no folders 'train' and 'val' here") as caught:
        open_splits(root)
    assert str(root / "train") in str(caught.value)


@pytest.mark.parametrize("missing", ["train", "val"])
def test_a_folder_with_one_of_the_two_only_is_refused(tmp_path: Path, missing: str) -> None:
    root = make_dataset(tmp_path)
    (root / missing).rename(root / "other")
    with pytest.raises(DatasetError, match=f"'{missing}'"):
        open_splits(root)


def test_a_class_folder_with_a_control_character_in_its_name_is_refused(tmp_path: Path) -> None:
    root = make_dataset(tmp_path)
    name = next((root / "train").iterdir()).name
    for split in ("train", "val"):
        (root / split / name).rename(root / split / "big\x1b[31mcat")
    with pytest.raises(DatasetError, match=r"'big\\x1b\[31mcat' has control characters"):
        open_splits(root)


def test_a_single_class_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match=r"one class only \(dog\)"):
        open_splits(make_dataset(tmp_path, classes=("dog",)))


def test_an_empty_class_folder_is_refused_by_name(tmp_path: Path) -> None:
    root = make_dataset(tmp_path)
    (root / "train/yak").mkdir()
    with pytest.raises(DatasetError, match="yak"):
        open_splits(root)


def test_a_path_that_does_not_exist_is_refused() -> None:
    with pytest.raises(UsageError, match="no such file or folder"):
        open_splits(Path("nowhere"))


def test_the_median_shorter_side_is_read_from_headers(tmp_path: Path) -> None:
    root = make_dataset(tmp_path)
    data = (root / "train/ox/000.png").read_bytes()
    (root / "train/ox/000.png").write_bytes(data[:60])  # the header is whole, the pixels are not
    (root / "train/ox/001.png").write_bytes(b"?")  # nothing at all: left out
    sides = sorted([14, 13, 12, 9, 16, 14, 13] * 3)
    sides.remove(13)
    assert median_shorter_side(open_splits(root).train) == np.median(sides)


def test_without_any_readable_header_there_is_no_median(tmp_path: Path) -> None:
    root = make_dataset(tmp_path)
    for path in (root / "train").rglob("*.png"):
        path.write_bytes(b"?")
    with pytest.raises(DatasetError, match="none of 21 training images can be read"):
        median_shorter_side(open_splits(root).train)
