"""Odd and hostile datasets are read as intended, or refused with the fault and the fix."""

import re
import unicodedata
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from prelunet.evaluator.contract import ClassEntry
from prelunet.evaluator.datasets import Dataset, DatasetSpec, open_from_spec, parse_class_selection
from prelunet.evaluator.datasets.labels.imagenet_devkit import read_devkit_ids
from prelunet.evaluator.datasets.sources.base import format_names
from prelunet.evaluator.datasets.webdataset import classes_of_labels
from prelunet.evaluator.errors import DatasetError, UsageError
from tests.helpers.opened_datasets import opened, refusal
from tests.helpers.tiny_datasets import (
    CLASSES,
    DATA,
    FOLDERS,
    GROUND_TRUTH,
    LABELS,
    WNIDS,
    as_cls,
    shard_files,
    write_devkit,
    write_folder,
    write_list,
    write_tar,
)

FEW = {f"{letter}.png": letter.encode() for letter in "abcdefghi"}
TEN = [ClassEntry(f"class{index:04}", f"thing {index}") for index in range(10)]


@pytest.fixture
def few(tmp_path: Path) -> Path:
    """Return a folder with nine images."""
    return write_folder(tmp_path / "lone" / "images", FEW)


def table(place: Path, *lines: str, name: str = "t.csv") -> Path:
    (place / name).write_text("".join(f"{line}\n" for line in lines))
    return place / name


def labels_of(dataset: Dataset) -> list[int]:
    return [sample.label for sample in dataset.samples]


# Headers of lists


@pytest.mark.parametrize("header", ["index,filename,label", "INDEX,filename,Label", ",filename,label"])
def test_the_row_number_is_not_read_as_the_label(few: Path, tmp_path: Path, header: str) -> None:
    rows = [f"{row},{name},{(row + 5) % 12}" for row, name in enumerate(FEW)]
    dataset = opened(few, table(tmp_path, header, *rows))
    assert labels_of(dataset) == [(row + 5) % 12 for row in range(9)]
    label = header.rpartition(",")[2]
    assert f"(columns 'filename' and '{label}'" in dataset.remarks[0]


def test_a_lone_index_is_the_label(few: Path, tmp_path: Path) -> None:
    rows = [f"{name},{(row + 5) % 12}" for row, name in enumerate(FEW)]
    assert labels_of(opened(few, table(tmp_path, "filename,index", *rows)))[0] == 5


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ("filename,class,label", "line 1: the columns 'class' and 'label' could both hold the labels. Remove all"),
        ("filename,Wnid,class_id", "the columns 'Wnid' and 'class_id' could both hold the labels"),
        ("id,filename,label", "the columns 'id' and 'filename' could both hold the names"),
        (
            "path,category,split",
            r"line 1 looks like a header \(path, category, split\), but does not say which .*names",
        ),
        ("img,klass,x", "line 1 should be `name label`"),
        ("picture,label,x", r"line 1 looks like a header.* one of file, .*path for names, and one of class, .*label"),
    ],
)
def test_an_ambiguous_header_is_refused(few: Path, tmp_path: Path, header: str, message: str) -> None:
    assert re.search(message, refusal(few, table(tmp_path, header, *(f"{name},3,4" for name in FEW))))


# Class labels


def test_numbers_without_the_first_and_the_last_class_are_refused(few: Path, tmp_path: Path) -> None:
    rows = [f"{name} {row + 1}" for row, name in enumerate(FEW)]
    assert "the labels are numbers 1 to 9, and none of them is 0" in refusal(few, table(tmp_path, *rows), TEN)
    assert labels_of(opened(few, table(tmp_path, *rows[:-1], "i.png 2"), TEN))[-1] == 2  # two classes have no images
    assert parse_class_selection("1,2,3,4,5,6,7,8,9", TEN) == tuple(entry.wnid for entry in TEN[1:])
    message = refusal(write_tar(tmp_path / "s.tar", shard_of([1, 2, 3])), classes=TEN[:4])
    assert "the labels are numbers 1 to 3, and none of them is 0" in message


def shard_of(labels: Sequence[int]) -> dict[str, bytes]:
    return {
        name: data
        for row, label in enumerate(labels)
        for name, data in ((f"{row}.jpg", b"x"), (f"{row}.cls", str(label).encode()))
    }


def test_a_long_list_of_classes_is_no_file_name() -> None:
    classes = [ClassEntry(f"n{index:08}", f"class {index}") for index in range(1000)]
    asked = tuple(entry.wnid for entry in classes[::2])
    assert parse_class_selection(",".join(asked), classes) == asked


def test_no_labels_leave_no_classes_to_choose(few: Path) -> None:
    with pytest.raises(UsageError, match="--classes with --no-labels: without labels no image has a class"):
        open_from_spec(DatasetSpec(few, no_labels=True, classes=(WNIDS[0],)), CLASSES)


def test_gaps_below_a_very_large_class_index_are_counted_without_listing_them() -> None:
    found_at = {"1": "a.tar: b.cls", "999999999": "a.tar: c.cls", "0": "a.tar: a.cls"}
    with pytest.raises(DatasetError, match=r"labels from 0 to 999999999 .* class 2 \(999,999,997 such classes\)"):
        classes_of_labels(found_at, complete=True)


def test_names_in_messages_are_short_and_escaped() -> None:
    assert format_names(["a\x1b[2Jb", "c\nd", "é", "x" * 81, "\udcff\u202e"]) == (
        "a\\x1b[2Jb, c\\x0ad, é, " + "x" * 79 + "…, \\udcff\\u202e"
    )
    assert format_names(["y" * 80, *"abcde"]) == "y" * 80 + ", a, b, c, d, …"


def test_an_image_that_changed_since_the_dataset_was_opened_is_named(tmp_path: Path) -> None:
    data = write_folder(tmp_path / "val", FOLDERS)
    dataset = opened(data)
    sample = dataset.samples[4]
    for changed in (FOLDERS[sample.file] + b"x", FOLDERS[sample.file][:-1]):
        (data / sample.file).write_bytes(changed)
        with pytest.raises(DatasetError, match=rf"{sample.file} has {len(changed):,} bytes, but had {sample.size:,}"):
            dataset.read(sample)


# The devkit


@pytest.mark.parametrize("order", ["{0} {1}", "{1} {0}", "{0} {1} and more words"])
@pytest.mark.parametrize("wnids", ["class{:04}", "{}"])
def test_a_text_mapping_takes_every_wnid_of_the_model(few: Path, tmp_path: Path, order: str, wnids: str) -> None:
    classes = [ClassEntry(wnids.format(index + 100), f"thing {index}") for index in range(10)]
    ids = {entry.wnid: (3 * index) % 10 + 1 for index, entry in enumerate(classes)}
    table(tmp_path, *(order.format(number, wnid) for wnid, number in ids.items()), name="synsets.txt")
    truth = table(tmp_path, *(str(ids[classes[9 - row].wnid]) for row in range(9)), name=GROUND_TRUTH)
    assert labels_of(opened(few, truth, classes)) == [9 - row for row in range(9)]
    assert read_devkit_ids(tmp_path / "synsets.txt", list(ids)) == ids


def test_a_text_mapping_without_wnids_or_without_ids_is_refused(tmp_path: Path) -> None:
    path = table(tmp_path, "1 class0001", "class0002 words", name="synsets.txt")
    with pytest.raises(DatasetError, match="line 2 should be `id wnid`"):
        read_devkit_ids(path, ["class0001", "class0002"])
    with pytest.raises(DatasetError, match="line 1 should be `id wnid`"):
        read_devkit_ids(table(tmp_path, "4 5"), ["4", "5"])


def test_a_test_set_beside_the_devkit_is_not_paired_with_its_ground_truth(tmp_path: Path) -> None:
    write_devkit(tmp_path / "ILSVRC2012_devkit_t12")
    twice = [(name.replace("_val_", kind), data) for name, data in DATA.items() for kind in ("_test_", "_test_1")]
    message = refusal(write_folder(tmp_path / "test", dict(twice)))
    assert f"{GROUND_TRUTH}: 30 labels for 60 images" in message
    assert "--no-labels" in message


def test_labels_that_were_found_by_name_and_do_not_fit_point_to_no_labels(tmp_path: Path) -> None:
    images = write_folder(tmp_path / "images", FEW)
    labels = table(tmp_path, *map(str, range(8)), name="labels.txt")
    found = refusal(images)
    assert "labels.txt: 8 labels for 9 images" in found
    assert "This label file was found by its name" in found
    assert "use validate --no-labels" in found
    assert "--no-labels" not in refusal(images, labels)


# Folders


@pytest.mark.parametrize("files", [{}, {"README.md": b"x"}, {"notes.txt": b"x"}])
@pytest.mark.parametrize("pack", [write_folder, lambda path, files: write_tar(path.with_suffix(".tar"), files)])
def test_a_folder_of_images_beside_its_labels_is_entered(
    tmp_path: Path, pack: Callable[[Path, dict[str, bytes]], Path], files: dict[str, bytes]
) -> None:
    labels = write_list(tmp_path / "l.csv", lambda name, label: f"{name},{label}", "name,label\n").read_bytes()
    inner = {f"images/{name}": data for name, data in DATA.items()}
    dataset = opened(pack(tmp_path / "data", inner | {"labels.csv": labels} | files))
    assert dataset.layout == "flat, labels from labels.csv"
    assert {sample.file: sample.label for sample in dataset.samples} == LABELS


def test_folders_without_images_beside_the_images_do_not_hide_the_labels(tmp_path: Path) -> None:
    labels = write_list(tmp_path / "l.csv", lambda name, label: f"{name},{label}", "name,label\n").read_bytes()
    boxes = {f"boxes/{name}.xml": b"<a/>" for name in DATA}
    inner = {f"JPEGImages/{name}": data for name, data in DATA.items()}
    dataset = opened(write_folder(tmp_path / "data", inner | boxes | {"labels.csv": labels}))
    assert {sample.file: sample.label for sample in dataset.samples} == LABELS
    assert "2 of 2 class folders are not among the model's 12" in refusal(
        write_folder(tmp_path / "bare", inner | boxes)
    )


def test_labels_beside_an_archive_and_around_nested_folders_are_found(tmp_path: Path) -> None:
    write_list(tmp_path / "val.txt", lambda name, label: f"{name} {label}")
    packed = write_tar(tmp_path / "val.tar", {f"val/{name}": data for name, data in DATA.items()})
    assert {sample.file: sample.label for sample in opened(packed).samples} == LABELS
    inner = {f"images/val/{name}": data for name, data in DATA.items()}
    data = write_folder(tmp_path / "other", inner | {"labels.txt": (tmp_path / "val.txt").read_bytes()})
    (tmp_path / "val.txt").unlink()
    assert {sample.file: sample.label for sample in opened(data).samples} == LABELS


def test_names_may_begin_with_the_folder_that_was_entered(tmp_path: Path) -> None:
    files = {"images/x/a.png": b"1", "images/y/a.png": b"2", "images/y/b.png": b"3"}
    data = write_folder(tmp_path / "data", files)
    labels = table(data, "images/x/a.png,4", "images/y/a.png,2", "images/y/b.png,7", name="labels.csv")
    dataset = opened(data, labels)
    assert {sample.file: sample.label for sample in dataset.samples} == {"x/a.png": 4, "y/a.png": 2, "y/b.png": 7}


def test_a_dataset_whose_labels_were_found_is_the_same_when_it_is_opened_again(tmp_path: Path) -> None:
    inner = {f"images/{name}": data for name, data in DATA.items()}
    listed = write_list(tmp_path / "l.csv", lambda name, label: f"{name},{label}", "name,label\n").read_bytes()
    dataset = opened(write_folder(tmp_path / "data", inner | {"labels.csv": listed}))
    assert dataset.spec is not None
    assert open_from_spec(dataset.spec, CLASSES).samples == dataset.samples


def test_a_note_beside_the_one_folder_of_class_folders_hides_nothing(tmp_path: Path) -> None:
    inner = {f"imagenet/{name}": data for name, data in FOLDERS.items()}
    assert len(opened(write_folder(tmp_path / "data", inner | {"README.txt": b"x"})).samples) == len(DATA)


def test_a_link_that_leads_to_itself_is_named(tmp_path: Path) -> None:
    data = write_folder(tmp_path / "val", FOLDERS)
    (data / "around").symlink_to("around")
    assert f"{data}/around: a link that points to itself; remove it" in refusal(data)


def test_folders_with_differently_encoded_accents_are_the_classes(tmp_path: Path) -> None:
    classes = [ClassEntry(name, name) for name in ("cote", "côte", "été")]
    names = [unicodedata.normalize("NFD", entry.wnid) for entry in classes]
    dataset = opened(write_folder(tmp_path / "val", {f"{name}/a.png": b"a" for name in names}), classes=classes)
    assert {sample.file.partition("/")[0]: sample.label for sample in dataset.samples} == {
        name: label for label, name in enumerate(names)
    }
    assert any("matched to the model's classes by class names" in remark for remark in dataset.remarks)


def test_names_that_are_too_long_and_folders_that_are_closed_are_no_labels(tmp_path: Path) -> None:
    (tmp_path / "devkit_of_another").symlink_to("devkit_of_another")
    images = write_folder(tmp_path / ("x" * 253), FEW)
    assert "no label file in or next to the dataset" in refusal(images)
    with pytest.raises(UsageError, match=r"no such file or folder\. Pass a list of labels"):
        opened(images, tmp_path / ("y" * 300))
    with pytest.raises(UsageError, match=r"no such file or folder\. Pass the devkit's folder"):
        read_devkit_ids(tmp_path / ("y" * 300))


# Truncated shards


def test_the_error_for_a_truncated_shard_gives_the_position(tmp_path: Path) -> None:
    data = write_tar(tmp_path / "s" / "a-000.tar", shard_files(range(1, 9), as_cls)).read_bytes()
    end = max(place for place, byte in enumerate(data) if byte) // 512 * 512 + 512
    for cut in (512, 700, 1100, 2048, end - 600, end):
        (tmp_path / "s" / "a-000.tar").write_bytes(data[:cut])
        message = refusal(tmp_path / "s")
        place = re.search(r"a-000\.tar: damaged or truncated at byte (\d+)\. Get a fresh copy of the archive", message)
        assert place is not None, message
        assert int(place[1]) <= cut
    (tmp_path / "s" / "a-000.tar").write_bytes(b"text" * 300)
    assert "Get a fresh copy, or pass a folder or an archive of images" in refusal(tmp_path / "s")
