"""Parquet files of Hugging Face: what is read as images and labels, how often, and what is refused."""

import multiprocessing
import os
import pickle
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from prelunet.evaluator.datasets import Dataset, DatasetSpec, open_dataset, open_from_spec, open_images
from prelunet.evaluator.errors import DatasetError, EnvironmentFault, ImageError
from prelunet.evaluator.imaging.limits import DecodeLimits
from prelunet.training.data.splits import open_splits
from tests.helpers.opened_datasets import opened, refusal
from tests.helpers.parquet_files import images_of, with_class_labels, write_shards
from tests.helpers.tiny_datasets import (
    CLASSES,
    DATA,
    FOLDERS,
    LABELS,
    NAMES,
    WNIDS,
    as_cls,
    shard_files,
    write_folder,
    write_tar,
)

IMAGES, POSITIONS = list(DATA.values()), list(LABELS.values())
LIKE_IMAGENET = [f"{name}, second name" if name == "tench" else name.upper().replace(" ", "_") for name in NAMES]
OTHER_ORDER = [*sorted(set(NAMES) - {"crane", "owl"}), "Owl, bird of prey"]


def write(path: Path, columns: dict[str, Any], names: dict[str, Sequence[str]] | None = None, **options: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(with_class_labels(pa.table(columns), names or {}), path, **options)
    return path


# Layouts and labels


@pytest.mark.parametrize(
    ("labels", "names", "remark"),
    [
        (POSITIONS, NAMES, "class names in the order of the model's classes"),
        (POSITIONS, WNIDS, "class names in the order of the model's classes"),
        (POSITIONS, LIKE_IMAGENET, "class names in the order of the model's classes"),
        (POSITIONS, [*NAMES[:3], "crane2", *NAMES[4:]], "class names in the order of the model's classes"),
        (POSITIONS, [str(index) for index in range(12)], "class indices, counted from 0 (found 0 to 10)"),
        (POSITIONS, (), "class indices, counted from 0 (found 0 to 10)"),
        ([11 - label for label in POSITIONS], WNIDS[::-1], "wnids"),
        ([WNIDS[label] for label in POSITIONS], (), "wnids"),
        (pa.array([WNIDS[label] for label in POSITIONS]).dictionary_encode(), (), "wnids"),
    ],
)
def test_images_and_labels_are_those_of_class_folders(
    tmp_path: Path, labels: Sequence[Any], names: Sequence[str], remark: str
) -> None:
    dataset = opened(write_shards(tmp_path, IMAGES, labels, names))
    assert [dataset.read(sample) for sample in dataset.samples] == IMAGES
    assert [sample.label for sample in dataset.samples] == POSITIONS
    assert dataset.layout == "parquet"
    assert dataset.remarks[1] == f"{tmp_path}: labels from the column label, read as {remark}"
    folders = opened(write_folder(tmp_path / "folders", FOLDERS))
    of_folders = {(folders.read(sample), sample.label) for sample in folders.samples}
    assert {(dataset.read(sample), sample.label) for sample in dataset.samples} == of_folders


def test_names_in_another_order_are_matched_by_name_or_first_synonym(tmp_path: Path) -> None:
    labels = [number % len(OTHER_ORDER) for number in range(30)]
    dataset = opened(write_shards(tmp_path, IMAGES, labels, OTHER_ORDER))
    expected = [{"Owl, bird of prey": "owl"}.get(OTHER_ORDER[label], OTHER_ORDER[label]) for label in labels]
    assert [NAMES[sample.label] for sample in dataset.samples] == expected
    assert "class names" in dataset.remarks[1]


def test_images_are_named_by_file_and_row_in_the_order_of_the_run(tmp_path: Path) -> None:
    dataset = opened(write_shards(tmp_path, IMAGES, POSITIONS))
    files = [sample.file for sample in dataset.samples]
    assert files == sorted(set(files))
    assert files[0] == "validation-00000-of-00002.parquet/00"
    assert files[29] == "validation-00001-of-00002.parquet/14"
    assert opened(tmp_path).fingerprint == dataset.fingerprint


def test_an_image_has_the_mean_size_of_its_row_group_and_none_is_read_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(3)
    images = [rng.bytes(1000 + 10 * number) for number in range(10)]
    columns = {"image": images_of(images), "label": POSITIONS[:10]}
    plain: dict[str, Any] = {"use_dictionary": False, "write_statistics": False}  # both hold copies of images
    path = write(tmp_path / "a.parquet", columns, row_group_size=4, **plain)
    with monkeypatch.context() as patched:
        patched.delattr(pq.ParquetFile, "iter_batches")
        dataset = opened(path)
    means = [np.mean(list(map(len, images[start : start + 4]))) for start in (0, 0, 0, 0, 4, 4, 4, 4, 8, 8)]
    # A page has a header and each image a length of 4 bytes.
    np.testing.assert_allclose([sample.size for sample in dataset.samples], means, atol=50)
    assert [dataset.read(sample) for sample in dataset.samples] == images


def test_an_image_beyond_the_limit_is_refused_though_its_row_group_is_small_on_average(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DecodeLimits, "max_bytes", 2000)
    images = [b"a", bytes(range(250)) * 9, b"c"]
    dataset = opened(write(tmp_path / "a.parquet", {"image": images_of(images), "label": POSITIONS[:3]}))
    assert dataset.read(dataset.samples[2]) == b"c"
    with pytest.raises(ImageError, match="2250 bytes are more than the limit of 2000"):
        dataset.read(dataset.samples[1])


@pytest.mark.parametrize("place", ["", "data", "val", "data/val"])
def test_files_are_found_at_the_top_and_in_the_usual_folders(tmp_path: Path, place: str) -> None:
    write_shards(tmp_path / place, IMAGES, POSITIONS)
    (tmp_path / "README.md").write_text("a dataset card")
    assert len(opened(tmp_path).samples) == 30


def test_the_split_is_chosen_by_the_names_of_the_files(tmp_path: Path) -> None:
    for split, count in (("train", 12), ("validation", 9), ("test", 6)):
        write_shards(tmp_path / "data", IMAGES[:count], POSITIONS[:count], split=split)
    assert len(opened(tmp_path).samples) == 9
    assert len(open_dataset(tmp_path, split="train", wnids=WNIDS).samples) == 12


def test_without_validation_files_the_test_set_is_read_and_this_is_printed(tmp_path: Path) -> None:
    for split, count in (("train", 12), ("test", 6)):
        write_shards(tmp_path, IMAGES[:count], POSITIONS[:count], split=split)
    dataset = opened(tmp_path)
    assert len(dataset.samples) == 6
    assert dataset.remarks[0] == (
        f"{tmp_path}: contains test-*-of-*.parquet, train-*-of-*.parquet; the images are those in test-*-of-*.parquet"
    )
    with pytest.raises(DatasetError, match="not clear which contain the val images"):
        open_dataset(tmp_path, split="val")  # for training, which never uses a test set


def test_a_training_set_alone_is_never_evaluated_silently(tmp_path: Path) -> None:
    write_shards(tmp_path, IMAGES, POSITIONS, split="train")
    message = refusal(tmp_path)
    assert f"{tmp_path}: contains only training images (train-*-of-*.parquet), not the val images" in message
    assert "pass one file as --data, or rename the files from 'train' to 'val'" in message
    assert len(open_dataset(tmp_path, split="train", wnids=WNIDS).samples) == 30
    for path in sorted(tmp_path.iterdir()):
        assert len(opened(path).samples) == 15
        path.rename(path.with_name(path.name.replace("train", "val")))
    assert len(opened(tmp_path).samples) == 30


@pytest.mark.parametrize("picture", ["logo.png", "assets/logo.png"])
def test_a_picture_beside_the_folder_of_parquet_files_does_not_count(tmp_path: Path, picture: str) -> None:
    for split, count in (("train", 12), ("validation", 9)):
        write_shards(tmp_path / "data", IMAGES[:count], POSITIONS[:count], WNIDS, split=split)
    write_folder(tmp_path, {picture: IMAGES[0]})
    assert len(opened(tmp_path).samples) == 9
    assert len(open_splits(tmp_path).train.samples) == 12


def test_parquet_files_beside_images_or_shards_are_left_alone(tmp_path: Path) -> None:
    write_folder(tmp_path / "images" / "top", FOLDERS)
    write_tar(tmp_path / "tars" / "00000.tar", shard_files(range(1, 11), as_cls))
    for folder, layout in (("images", "class folders"), ("tars", "webdataset shards")):
        write(tmp_path / folder / "00000.parquet", {"url": ["http://x"]})
        assert opened(tmp_path / folder).layout == layout


@pytest.mark.parametrize("name", ["val-000.tar", "val.parquet"])
def test_a_picture_beside_shards_does_not_hide_them_silently(tmp_path: Path, name: str) -> None:
    write_folder(tmp_path, {"preview.png": IMAGES[0], name: b"not read"})
    dataset = opened(tmp_path, no_labels=True)
    assert len(dataset.samples) == 1
    assert dataset.remarks == (f"{tmp_path}: only loose images are used; not read: {name}",)


def test_one_file_is_a_dataset_and_one_with_digests_in_its_names_too(tmp_path: Path) -> None:
    write_shards(tmp_path, IMAGES, POSITIONS)
    paths = sorted(tmp_path.iterdir())
    assert len(opened(paths[1]).samples) == 15
    for path, digest in zip(paths, ("0123456789abcdef", "f" * 16), strict=True):
        path.rename(path.with_name(f"{path.stem}-{digest}.parquet"))
    assert len(opened(tmp_path).samples) == 30


def test_plain_binary_and_large_binary_columns_hold_images_too(tmp_path: Path) -> None:
    for number, kind in enumerate((pa.binary(), pa.large_binary(), pa.binary_view())):
        path = write(tmp_path / f"{number}.parquet", {"jpg": pa.array(IMAGES, kind), "cls": POSITIONS})
        dataset = opened(path)
        assert [dataset.read(sample) for sample in dataset.samples] == IMAGES


def test_of_two_class_labels_the_one_with_the_models_number_of_classes_counts(tmp_path: Path) -> None:
    columns = {"img": images_of(IMAGES), "coarse_label": [0] * 30, "fine_label": POSITIONS}
    names = {"coarse_label": ["animal", "thing"], "fine_label": NAMES}
    dataset = opened(write(tmp_path / "a.parquet", columns, names))
    assert [sample.label for sample in dataset.samples] == POSITIONS
    names["coarse_label"] = NAMES
    message = refusal(write(tmp_path / "a.parquet", columns, names))
    assert (
        "the columns coarse_label, fine_label could all be the labels. Keep one, e.g. with `remove_columns`" in message
    )


def test_a_class_label_of_something_else_does_not_hide_a_plain_column_of_labels(tmp_path: Path) -> None:
    columns = {"image": images_of(IMAGES), "camera": [0, 1] * 15, "label": POSITIONS}
    path = write(tmp_path / "a.parquet", columns, {"camera": ["tench", "owl"]})
    assert "the columns camera, label could all be the labels" in refusal(path)
    del columns["label"]
    write(path, columns, {"camera": ["tench", "owl"]})
    assert {NAMES[sample.label] for sample in opened(path).samples} == {"tench", "owl"}


def test_a_test_set_is_opened_without_its_labels(tmp_path: Path) -> None:
    for names in (NAMES, ()):
        write_shards(tmp_path, IMAGES, [-1] * 30, names, split="test")
        assert "the label -1 means that the class is unknown" in refusal(tmp_path)
        assert "--no-labels" in refusal(tmp_path)
    assert {sample.label for sample in opened(tmp_path, no_labels=True).samples} == {-1}
    path = write(tmp_path / "x" / "a.parquet", {"image": images_of(IMAGES)})
    assert len(open_images(path, CLASSES).samples) == 30
    assert "no label column (a ClassLabel, or one named label, labels," in refusal(path)
    for labels, kind in (([1.0, None] * 15, "double"), ([[1]] * 30, "list<")):
        write(path, {"image": images_of(IMAGES), "label": labels})
        assert f"the column label has the type {kind}" in refusal(path)


# Reading


def test_each_row_group_is_decoded_once_when_threads_read_in_run_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "a.parquet", {"image": images_of(IMAGES), "label": POSITIONS}, row_group_size=4)
    dataset, started = opened(path), list[int]()
    iter_batches = pq.ParquetFile.iter_batches

    def counted(*arguments: Any, **options: Any) -> Any:
        started.extend(options["row_groups"])
        return iter_batches(*arguments, **options)

    monkeypatch.setattr(pq.ParquetFile, "iter_batches", counted)
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(dataset.read, dataset.samples)) == IMAGES
    assert sorted(started) == list(range(8))


def test_a_huge_row_group_is_read_forwards_backwards_and_at_random_in_little_memory(tmp_path: Path) -> None:
    rng, count = np.random.default_rng(4), 20_000
    images = [rng.bytes(5_000 + number % 7) for number in range(count)]
    path = write(tmp_path / "a.parquet", {"image": images_of(images), "label": [3] * count}, row_group_size=count)
    most = before = pa.total_allocated_bytes()
    dataset = opened(path)
    for number in (*range(0, count, 500), count - 1, 5, count // 2, *rng.integers(0, count, 5).tolist()):
        assert dataset.read(dataset.samples[number]) == images[number]
        most = max(most, pa.total_allocated_bytes())
    assert 0 < most - before < 64 * 2**20, "of 100 MB"


def _read_all(dataset: Dataset) -> list[bytes]:
    return [dataset.read(sample) for sample in dataset.samples]


def test_a_reader_in_use_can_be_pickled_and_forked(tmp_path: Path) -> None:
    dataset = opened(write_shards(tmp_path, IMAGES, POSITIONS))
    dataset.read(dataset.samples[17])
    copy = pickle.loads(pickle.dumps(dataset))
    assert copy.reader == dataset.reader
    assert _read_all(copy) == IMAGES
    with multiprocessing.get_context("fork").Pool(1) as pool:
        assert pool.apply(_read_all, (dataset,)) == IMAGES


# Training


def test_training_takes_the_class_labels_names_as_classes(tmp_path: Path) -> None:
    names = [f"kind {number}" for number in range(12)]
    write_shards(tmp_path / "data", IMAGES, POSITIONS, names, split="train")
    write_shards(tmp_path / "data", IMAGES[:9], POSITIONS[:9], names)
    splits = open_splits(tmp_path)
    assert splits.train.classes == tuple(names)
    assert [sample.label for sample in splits.train.samples] == POSITIONS
    assert [sample.label for sample in splits.val.samples] == POSITIONS[:9]
    assert splits.val.read(splits.val.samples[8]) == IMAGES[8]
    assert "random order, which is slow in parquet" in splits.train.remarks[1]
    assert "random order" not in splits.val.remarks[1]


@pytest.mark.parametrize("names", [["a", "crane", "b", "crane"], ["a", "", "b", "c"]])
def test_training_refuses_class_names_that_repeat_or_are_empty(tmp_path: Path, names: list[str]) -> None:
    for split in ("train", "validation"):
        write_shards(tmp_path, IMAGES, [0, 1, 2, 3, 3, 0] * 5, names, split=split)
    with pytest.raises(DatasetError, match=r"the class name '(crane)?' is empty or occurs twice"):
        open_splits(tmp_path)


def test_training_takes_words_as_classes_in_sorted_order(tmp_path: Path) -> None:
    words = [WNIDS[11 - label] for label in POSITIONS]
    dataset = open_dataset(write_shards(tmp_path, IMAGES, words), split="train")
    assert dataset.classes == tuple(sorted(set(words)))
    assert [dataset.classes[sample.label] for sample in dataset.samples] == words


# Bad input


def test_columns_without_images_or_with_several_are_named(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", {"url": ["http://x"], "label": [0]})
    assert "no image column (binary, or a struct with 'bytes' and 'path'), only url, label" in refusal(path)
    text = pa.StructArray.from_arrays([pa.array(["base64"]), pa.array(["a.png"])], ["bytes", "path"])
    path = write(tmp_path / "a.parquet", {"image": text, "label": [0]})
    assert "no image column (binary, or a struct with 'bytes' and 'path'), only image, label" in refusal(path)
    columns = {"image": images_of(IMAGES), "thumbnail": pa.array(IMAGES, pa.binary()), "label": POSITIONS}
    path = write(tmp_path / "a.parquet", columns)
    assert "the columns image, thumbnail could all be the images. Keep one of them" in refusal(path)


def test_files_without_rows_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", {"image": images_of([]), "label": pa.array([], pa.int64())})
    assert f"{path}: no rows. Pass files with images" in refusal(path)


def test_a_row_without_an_image_is_refused_by_file_and_row_when_it_is_read(tmp_path: Path) -> None:
    images = [*IMAGES[:4], None, *IMAGES[5:]]
    path = write(tmp_path / "a.parquet", {"image": images_of(images), "label": POSITIONS}, row_group_size=3)
    dataset = opened(path)
    assert dataset.read(dataset.samples[3]) == IMAGES[3]
    with pytest.raises(DatasetError, match=rf"{path}: row 4 has no image\. .*path of a file, embed it"):
        dataset.read(dataset.samples[4])


@pytest.mark.parametrize("kept", [0.0, 0.3, 0.999])
def test_a_truncated_file_is_refused(tmp_path: Path, kept: float) -> None:
    path = sorted(write_shards(tmp_path, IMAGES, POSITIONS).iterdir())[1]
    os.truncate(path, int(path.stat().st_size * kept))
    for data in (path, tmp_path):
        message = refusal(data)
        assert f"{path}: damaged or truncated" in message
        assert "Get a fresh copy of the file" in message


def test_a_file_that_changes_while_it_is_used_is_refused(tmp_path: Path) -> None:
    path = sorted(write_shards(tmp_path, IMAGES, POSITIONS).iterdir())[0]
    dataset = opened(tmp_path)
    write(path, {"image": images_of([*IMAGES[:3], IMAGES[20], *IMAGES[4:15]]), "label": [0] * 15}, row_group_size=3)
    with pytest.raises(DatasetError, match=r"was replaced after the dataset was opened\. Do not change"):
        dataset.read(dataset.samples[3])
    write(path, {"image": images_of(IMAGES[:15]), "label": [0] * 15}, row_group_size=4)
    with pytest.raises(DatasetError, match=r"was replaced after the dataset was opened\. Do not change"):
        dataset.read(dataset.samples[14])
    os.truncate(path, 3_000)
    with pytest.raises(DatasetError, match="damaged or truncated"):
        dataset.read(dataset.samples[8])
    path.unlink()
    with pytest.raises(DatasetError, match="no longer exists"):
        dataset.read(dataset.samples[11])


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"jpg": pa.array([None] * 30, pa.binary())}, "was replaced after the dataset was opened"),
        ({"jpg": ["text"] * 30}, "was replaced after the dataset was opened"),
        ({"png": pa.array(IMAGES, pa.binary())}, "damaged or truncated"),
    ],
)
def test_a_file_replaced_by_one_with_other_columns_is_refused(
    tmp_path: Path, columns: dict[str, Any], message: str
) -> None:
    path = write(tmp_path / "a.parquet", {"jpg": pa.array(IMAGES, pa.binary()), "cls": POSITIONS})
    dataset = opened(path)
    write(path, columns | {"cls": POSITIONS})
    with pytest.raises(DatasetError, match=message):
        dataset.read(dataset.samples[17])


def test_damage_inside_the_images_is_a_dataset_error_never_another(tmp_path: Path) -> None:
    table = {"image": images_of(IMAGES), "label": POSITIONS}
    path = write(tmp_path / "a.parquet", table, compression="zstd", write_page_checksum=True)
    whole, rng = path.read_bytes(), np.random.default_rng(8)
    refused = 0
    for _ in range(60):
        damaged = bytearray(whole)
        position = int(rng.integers(len(whole)))  # the checksums of the pages see what hits the images
        damaged[position : position + 40] = rng.bytes(40)
        path.write_bytes(damaged)
        try:
            dataset = opened(path)
            list(map(dataset.read, dataset.samples))
        except DatasetError:
            refused += 1
    assert refused > 50, "some bytes have no meaning"


def test_files_that_do_not_belong_together_or_are_missing_are_refused(tmp_path: Path) -> None:
    first, second = sorted(write_shards(tmp_path, IMAGES, POSITIONS, NAMES).iterdir())
    write(second, {"image": images_of(IMAGES), "label": POSITIONS}, {"label": NAMES[::-1]})
    assert f"{second}: has other columns or class names than {first.name}" in refusal(tmp_path)
    second.unlink()
    message = refusal(tmp_path)
    assert f"1 files, but {first.name} is one of 2. Get all of them" in message
    assert len(opened(first).samples) == 15


@pytest.mark.parametrize(
    ("labels", "names", "message"),
    [
        ([None] * 30, NAMES, "row 0: the label is None, which is not a class"),
        ([0, 12] * 15, NAMES, "row 1: the label is 12, which is not a class"),
        ([0, 12] * 15, (), "the label 12 is not one of the model's 12 classes"),
        ([1, 2] * 15, ["tench", "crane", "owl"], "row 0: 'crane' could be"),
        ([0, 1] * 15, ["tench", "unicorn"], "row 1: the label 'unicorn' is not one of the model's 12 classes"),
        ([3] * 30, [*NAMES[:3], "unicorn", *NAMES[4:]], "row 0: the label 'unicorn' is not one of the model's"),
        ([3] * 30, [*NAMES[:3], "unicorn3", *NAMES[4:]], "row 0: the label 'unicorn3' is not one of the model's"),
        ([0, 1] * 15, ["owl", "OWL, a bird"], "the class names owl, OWL, a bird both stand for the model's class"),
        ([number % 12 + 1 for number in range(30)], (), "are they devkit ids"),
    ],
)
def test_labels_that_are_not_classes_of_the_model_are_refused_with_their_row(
    tmp_path: Path, labels: Sequence[Any], names: Sequence[str], message: str
) -> None:
    assert message in refusal(write_shards(tmp_path, IMAGES, pa.array(labels, pa.int64()), names))


def test_a_label_list_beside_parquet_files_is_refused(tmp_path: Path) -> None:
    write_shards(tmp_path / "data", IMAGES, POSITIONS)
    (tmp_path / "my.txt").write_text("a 0\n")
    with pytest.raises(DatasetError, match=r"parquet files contain their own labels\. Remove --labels"):
        open_from_spec(DatasetSpec(tmp_path / "data", tmp_path / "my.txt"), CLASSES)


def test_without_pyarrow_the_error_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_shards(tmp_path, IMAGES, POSITIONS)
    for name in ("pyarrow", "pyarrow.parquet"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(EnvironmentFault, match=r"needs pyarrow, which is not installed.*\[parquet\]"):
        opened(tmp_path)


def test_pyarrow_is_not_imported_before_it_is_needed(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, FOLDERS)
    code = (
        "import sys; from pathlib import Path\n"
        "import prelunet.evaluator.verbs.validate, prelunet.evaluator.verbs.serve\n"
        "from prelunet.evaluator.datasets import open_dataset\n"
        "open_dataset(Path(sys.argv[1]), split='train'); sys.exit('pyarrow' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code, folder], check=True)
