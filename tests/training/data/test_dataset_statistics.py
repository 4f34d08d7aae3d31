"""Statistics of a dataset, compared with plain numpy."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from prelunet.evaluator import cli
from prelunet.evaluator.datasets.dataset import Dataset
from prelunet.evaluator.errors import DatasetError
from prelunet.evaluator.imaging.decode import decode_rgb
from prelunet.training.data.dataset_statistics import DatasetStatistics, compute_statistics
from prelunet.training.data.image_cache import ImageCache
from prelunet.training.data.splits import open_splits
from tests.training.training_folders import make_dataset

compute = partial(compute_statistics, split="train/", scale=14, crop=12)


@pytest.fixture
def dataset(data: Path) -> Dataset:
    return open_splits(data).train


def slow_central_view(image: np.ndarray, scale: int, crop: int) -> np.ndarray:
    """Oracle for an image below 4:1, with Pillow only."""
    height, width = image.shape[:2]
    short = min(height, width)
    size = [int(side * scale / short + 0.5) for side in (width, height)]
    resized = np.asarray(Image.fromarray(image).resize(size, Image.Resampling.BILINEAR))
    top, left = ((side - crop) // 2 for side in resized.shape[:2])
    return resized[top : top + crop, left : left + crop]


def slow_views(dataset: Dataset) -> np.ndarray:
    images = [decode_rgb(dataset.read(sample)) for sample in dataset.samples]
    return np.stack([slow_central_view(image, scale=14, crop=12) for image in images]).astype(np.float64)


def assert_equal(found: DatasetStatistics, expected: DatasetStatistics) -> None:
    """Compare bit for bit: all sums are integers."""
    assert found.refused == expected.refused
    for name in ("mean_image", "mean_channels", "axes"):
        np.testing.assert_array_equal(getattr(found, name), getattr(expected, name), strict=True)


# Statistics


def test_means_and_axes_are_those_of_the_central_views(dataset: Dataset) -> None:
    narrow = [sample for sample in dataset.samples if "003.png" not in sample.file]  # the oracle has no cap at 4:1
    part = replace(dataset, samples=narrow)
    views = slow_views(part)
    found = compute(part, workers=2)
    assert found.refused == {}
    np.testing.assert_array_equal(found.mean_image, views.mean(axis=0).astype(np.float32), strict=True)
    np.testing.assert_array_equal(found.mean_channels, views.mean(axis=(0, 1, 2)).astype(np.float32), strict=True)
    covariance = np.cov(views.reshape(-1, 3).T, bias=True)
    # float32 axes, up to 100 levels long
    np.testing.assert_allclose(found.axes.astype(np.float64) @ found.axes.T, covariance, rtol=1e-6, atol=1e-3)


def test_the_statistics_do_not_depend_on_the_number_of_threads(dataset: Dataset) -> None:
    plain = compute(dataset, workers=1)
    assert_equal(compute(dataset, workers=4), plain)


def test_an_image_that_cannot_be_decoded_is_named_and_skipped(tmp_path: Path) -> None:
    root = make_dataset(tmp_path)
    whole = (root / "train/dog/002.png").read_bytes()
    (root / "train/dog/002.png").write_bytes(whole[: len(whole) // 2])
    dataset = open_splits(root).train
    found = compute(dataset)
    assert list(found.refused) == ["dog/002.png"]
    assert "truncated" in found.refused["dog/002.png"]
    others = replace(dataset, samples=[sample for sample in dataset.samples if sample.file != "dog/002.png"])
    assert_equal(replace(found, refused={}), compute(others))
    image_cache = ImageCache(dataset, found.refused)
    assert len(image_cache) == 20
    assert "dog/002.png" not in {sample.file for sample in image_cache.samples}


@pytest.mark.parametrize(("split", "undecodable"), [("train", 3), ("train", 21), ("val", 1)])
def test_a_split_with_more_than_a_tenth_of_unreadable_images_is_refused(
    tmp_path: Path, split: str, undecodable: int
) -> None:
    root = make_dataset(tmp_path / "data")
    for path in sorted((root / split).rglob("*.png"))[:undecodable]:
        path.write_bytes(b"not an image")
    splits = open_splits(root)
    dataset = {"train": splits.train, "val": splits.val}[split]
    with pytest.raises(DatasetError, match=rf"{undecodable} of \d+ images in {split}/ cannot be decoded") as caught:
        compute_statistics(dataset, f"{split}/", scale=14, crop=12)
    assert "big-cat/000.png" in str(caught.value)


# The verb


def run(*words: object, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    code = cli.run([str(word) for word in words])
    out, err = capsys.readouterr()
    return code, out, err


def test_stats_prints_the_statistics_for_people_and_as_json(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run("stats", "--data", data, "--crop", 12, "--json", capsys=capsys)
    assert code == 0
    found = json.loads(out)
    dataset = open_splits(data).train
    expected = compute(dataset)
    assert (found["images"], found["refused"], found["scale"], found["crop"]) == (21, {}, 14, 12)
    assert found["fingerprint"] == dataset.fingerprint
    np.testing.assert_allclose(found["mean"], expected.mean_channels, atol=1e-4)  # four digits
    np.testing.assert_allclose(np.transpose(found["axes"]), expected.axes, atol=1e-4)
    narrow_too = np.stack([ImageCache(dataset, {}).central_view(index, 14, 12) for index in range(21)])
    np.testing.assert_allclose(found["deviation"], narrow_too.reshape(-1, 3).std(axis=0), atol=1e-3)
    code, out, _ = run("stats", "--data", data, "--crop", 12, capsys=capsys)
    assert code == 0
    assert "21 images, 0 refused" in out
    assert f"{'mean':9}" + "".join(f"{value:9.2f}" for value in expected.mean_channels) in out


def test_stats_lists_the_unreadable_images_of_val(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = make_dataset(tmp_path / "data", val=4)
    (root / "val/dog/002.png").write_bytes(b"?")
    words = ("stats", "--data", root, "--crop", 12)
    code, out, _ = run(*words, capsys=capsys)
    assert code == 0
    assert "val/: 12 images, 1 refused\n  dog/002.png: " in out
    code, out, _ = run(*words, "--json", capsys=capsys)
    assert code == 0
    of_val = json.loads(out)["val"]
    assert (of_val["fingerprint"], of_val["images"]) == (open_splits(root).val.fingerprint, 12)
    assert list(of_val["refused"]) == ["dog/002.png"]


def test_stats_of_a_training_set_without_val_reports_that_only_train_is_measured(
    data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = run("stats", "--data", data / "train", "--crop", 12, "--json", capsys=capsys)
    assert code == 0
    assert (json.loads(out)["images"], json.loads(out)["val"]) == (21, None)
    assert "only the training images are measured: " in err
    assert "no folders 'train' and 'val' here" in err


@pytest.mark.parametrize(
    ("words", "code", "text"),
    [
        (("--crop", 16, "--scale", 12), 2, "smaller than the crop of 16 pixels. Give a scale of 16 or more"),
        (("--crop", 0), 2, "--crop"),
    ],
)
def test_inconsistent_numbers_are_refused(
    data: Path, capsys: pytest.CaptureFixture[str], words: tuple[object, ...], code: int, text: str
) -> None:
    found, _, err = run("stats", "--data", data, *words, capsys=capsys)
    assert found == code
    assert text in err
