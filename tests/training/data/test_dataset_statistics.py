"""Statistics of a dataset, compared with plain numpy; cached ones are used, resumed or recomputed."""

import json
import os
from collections.abc import Callable, Iterator
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
from prelunet.training.data import dataset_statistics
from prelunet.training.data.dataset_statistics import DatasetStatistics, cache_folder, compute_statistics
from prelunet.training.data.image_cache import ImageCache
from prelunet.training.data.splits import open_splits
from prelunet.training.loop.execution import Execution
from prelunet.training.loop.train import train
from tests.training.training_folders import RECIPE, make_dataset, write_image

compute = partial(compute_statistics, split="train/", scale=14, crop=12)


@pytest.fixture
def dataset(data: Path) -> Dataset:
    return open_splits(data).train


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """Record the files that are decoded."""
    files: list[bytes] = []

    def recording(data: bytes) -> Image.Image:
        files.append(data)
        return Image.fromarray(decode_rgb(data))

    monkeypatch.setattr(dataset_statistics, "decode_image", recording)
    return files


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
        compute_statistics(dataset, f"{split}/", scale=14, crop=12, cache=tmp_path / "cache")
    assert "big-cat/000.png" in str(caught.value)
    assert cached_files(tmp_path / "cache") == []  # repaired images must not stay refused


# The cache


def cached_files(cache: Path) -> list[Path]:
    return sorted((cache / "surveys").iterdir())


def test_statistics_are_computed_once_per_dataset_scale_and_crop(
    dataset: Dataset, tmp_path: Path, decoded: list[bytes]
) -> None:
    expected = compute(dataset)
    for scale, crop, expected_count in ((14, 12, 21), (14, 12, 0), (15, 12, 21), (14, 11, 21), (14, 12, 0)):
        decoded.clear()
        found = compute_statistics(dataset, "train/", scale=scale, crop=crop, cache=tmp_path / "new/cache")
        assert len(decoded) == expected_count
        if (scale, crop) == (14, 12):
            assert_equal(found, expected)
    assert len(cached_files(tmp_path / "new/cache")) == 3
    decoded.clear()
    assert_equal(compute(dataset, cache=tmp_path / "new/cache", fresh=True), expected)
    assert len(decoded) == 21


def test_another_dataset_has_its_own_statistics(tmp_path: Path) -> None:
    root = make_dataset(tmp_path / "data")
    first = compute(open_splits(root).train, cache=tmp_path)
    write_image(root / "train/dog/new.png", 77, (20, 20), 200)
    second = compute(open_splits(root).train, cache=tmp_path)
    assert not np.array_equal(first.mean_image, second.mean_image)
    assert len(cached_files(tmp_path)) == 2


def test_refused_images_are_cached_with_their_reasons(tmp_path: Path) -> None:
    root = make_dataset(tmp_path / "data")
    (root / "train/dog/002.png").write_bytes(b"?")
    dataset = open_splits(root).train
    first = compute(dataset, cache=tmp_path)
    assert list(first.refused) == ["dog/002.png"]
    assert_equal(compute(dataset, cache=tmp_path), first)


@pytest.mark.parametrize("stopped_at", [1, 8, 20])
def test_an_interrupted_pass_resumes_where_it_was_saved(
    dataset: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, decoded: list[bytes], stopped_at: int
) -> None:
    expected = compute(dataset)
    monkeypatch.setattr(dataset_statistics, "SAVE_EVERY", -1.0)  # after each image
    in_order = dataset_statistics.map_in_threads

    def interrupted(*arguments: object) -> Iterator[object]:
        for number, found in enumerate(in_order(*arguments)):  # type: ignore[arg-type]
            if number == stopped_at:
                raise KeyboardInterrupt
            yield found

    monkeypatch.setattr(dataset_statistics, "map_in_threads", interrupted)
    with pytest.raises(KeyboardInterrupt):
        compute(dataset, cache=tmp_path, workers=1)
    monkeypatch.setattr(dataset_statistics, "map_in_threads", in_order)
    decoded.clear()
    assert_equal(compute(dataset, cache=tmp_path), expected)
    assert len(decoded) == 21 - stopped_at


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda _data: b"",
    "cut": lambda data: data[:-5],
    "more seen than there are": lambda data: data.replace(b'"seen":"21"', b'"seen":"99"'),
    "no number": lambda data: data.replace(b'"seen":"21"', b'"seen":"xx"'),
}


@pytest.mark.parametrize("way", DAMAGES)
def test_a_damaged_cache_file_is_reported_and_recomputed(dataset: Dataset, tmp_path: Path, way: str) -> None:
    expected = compute(dataset, cache=tmp_path)
    (path,) = cached_files(tmp_path)
    data = path.read_bytes()
    path.write_bytes(DAMAGES[way](data))
    assert path.read_bytes() != data
    messages: list[str] = []
    assert_equal(compute(dataset, cache=tmp_path, report=messages.append), expected)
    assert f"{path}: damaged (" in messages[0]
    assert "are recomputed" in messages[0]
    messages.clear()
    assert_equal(compute(dataset, cache=tmp_path, report=messages.append), expected)
    assert messages == []  # the file was rewritten


def test_images_overwritten_with_garbage_of_the_same_length_invalidate_cached_statistics(tmp_path: Path) -> None:
    root, cache = make_dataset(tmp_path / "data"), tmp_path / "cache"
    before = open_splits(root)
    for split, dataset in (("train/", before.train), ("val/", before.val)):
        compute_statistics(dataset, split, scale=14, crop=12, cache=cache)
    for path in (root / "train" / "dog").iterdir():
        path.write_bytes(b"?" * path.stat().st_size)
    assert open_splits(root).train.fingerprint == before.train.fingerprint
    messages: list[str] = []
    with pytest.raises(DatasetError, match="7 of 21 images in train/ cannot be decoded"):
        train(RECIPE, root, tmp_path / "run", execution=Execution(cache=cache), report=messages.append)
    assert messages[-1] == "train/: images have changed since their statistics were cached; recomputing"


def test_a_cache_folder_that_cannot_be_written_is_reported_and_does_not_stop_the_run(
    dataset: Dataset, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("in the way")
    messages: list[str] = []
    found = compute(dataset, cache=tmp_path / "file", report=messages.append)
    assert_equal(found, compute(dataset))
    assert len(messages) == 1
    assert "cannot be cached" in messages[0]
    assert "PRELUNET_CACHE" in messages[0]


def test_the_cache_folder_follows_the_environment() -> None:
    home, caches = {"HOME": "/h"}, {"HOME": "/h", "XDG_CACHE_HOME": "/x"}
    assert cache_folder(home) == Path("/h/.cache/prelunet")
    assert cache_folder(caches) == Path("/x/prelunet")
    assert cache_folder({**caches, "PRELUNET_CACHE": "own"}) == Path("own")
    assert cache_folder({"HOME": "/h", "XDG_CACHE_HOME": "relative"}) == Path("/h/.cache/prelunet")
    assert cache_folder({}) is None


# The verb


def run(*words: object, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    code = cli.run([str(word) for word in words])
    out, err = capsys.readouterr()
    return code, out, err


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setitem(os.environ, "PRELUNET_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_stats_prints_the_statistics_and_caches_them_for_training(
    data: Path, cache: Path, capsys: pytest.CaptureFixture[str], decoded: list[bytes]
) -> None:
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
    decoded.clear()
    code, out, _ = run("stats", "--data", data, "--crop", 12, capsys=capsys)
    assert code == 0
    assert decoded == []
    assert "21 images, 0 refused" in out
    assert f"{'mean':9}" + "".join(f"{value:9.2f}" for value in expected.mean_channels) in out
    compute(dataset, cache=cache)
    assert decoded == []


def test_stats_caches_the_statistics_of_val_and_fresh_recomputes_them(
    tmp_path: Path, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = make_dataset(tmp_path / "data", val=4)
    path = root / "val/dog/002.png"
    whole = path.read_bytes()
    words = ("stats", "--data", root, "--crop", 12)
    path.write_bytes(bytes(len(whole)))  # the same length, so the same fingerprint
    code, out, _ = run(*words, capsys=capsys)
    assert code == 0
    assert "val/: 12 images, 1 refused\n  dog/002.png: " in out
    val = open_splits(root).val

    def refused() -> list[list[str]]:
        """Return what is refused at the crops of two recipes."""
        sizes = ((14, 12), (16, 13))
        return [list(compute_statistics(val, "val/", scale=s, crop=c, cache=cache).refused) for s, c in sizes]

    refused()
    path.write_bytes(whole)
    assert refused() == [["dog/002.png"], ["dog/002.png"]], "cached"
    code, out, _ = run(*words, "--fresh", "--json", capsys=capsys)
    assert code == 0
    assert json.loads(out)["val"] == {"fingerprint": val.fingerprint, "images": 12, "refused": {}}
    assert refused() == [[], []]


def test_stats_of_a_training_set_without_val_reports_that_only_train_is_measured(
    data: Path, cache: Path, capsys: pytest.CaptureFixture[str]
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
    data: Path, cache: Path, capsys: pytest.CaptureFixture[str], words: tuple[object, ...], code: int, text: str
) -> None:
    found, _, err = run("stats", "--data", data, *words, capsys=capsys)
    assert found == code
    assert text in err
