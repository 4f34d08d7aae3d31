"""Folders and lists as they lie there: what is read, what is left out by choice, and what is said about it."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from prelunet.evaluator.contract import ClassEntry
from prelunet.evaluator.datasets import DatasetSpec, open_dataset
from prelunet.evaluator.datasets.dataset import Dataset
from prelunet.evaluator.datasets.open import open_from_spec
from prelunet.evaluator.errors import DatasetError, UsageError
from tests.helpers.tiny_datasets import write_folder, write_tar, write_zip

NAMES = ("red", "green", "blue")
COLORS = [ClassEntry(f"n0000000{index}", name) for index, name in enumerate(NAMES)]
PNG, JPEG = b"\x89PNG\r\n\x1a\n and so on", b"\xff\xd8\xff\xe0 and so on"
IMAGES = {f"{color}/{name}.png": PNG for color in NAMES for name in ("a", "b")}


def opened(
    path: Path, *, classes: tuple[str, ...] = (), labels: Path | None = None, listed_only: bool = False
) -> Dataset:
    return open_from_spec(DatasetSpec(path, labels, classes=classes, listed_only=listed_only), COLORS)


def labels_of(dataset: Dataset) -> dict[str, int]:
    return {sample.file: sample.label for sample in dataset.samples}


def test_all_suffixes_of_images_are_read_and_so_are_images_without_one(tmp_path: Path) -> None:
    more = {"red/c.jfif": JPEG, "red/d.PGM": b"P5 ", "red/e": JPEG, "red/f.pnm": b"P6 ", "red/deep/g": b"RIFF1234WEBP"}
    more |= {
        "red/m.avif": JPEG,
        "red/n.jp2": JPEG,
        "red/o": b"\0\0\0\x20ftypavif",
        "red/p": b"\0\0\0\x0cjP  \r\n\x87\n",
    }
    others = {"red/h": b"no image", "red/empty": b"", "red/i.heic": b"x", "red/j.HEIC": b"x", "red/l.heic": b"x"}
    folder = write_folder(
        tmp_path / "data", IMAGES | more | others | {"green/k.psd": b"x", "red/notes.txt": b"a list?"}
    )
    dataset = opened(folder)
    assert labels_of(dataset).keys() == {*IMAGES, *more}
    said = f"{folder}: skipped files of other formats, by suffix: .heic 3, no suffix 2, .psd 1"
    assert said in dataset.remarks
    assert {dataset.read(sample) for sample in dataset.samples} == {PNG, *more.values()}


@pytest.mark.parametrize("pack", [write_tar, write_zip])
def test_what_is_skipped_in_an_archive_is_counted(tmp_path: Path, pack: Callable[..., Path]) -> None:
    others = {"red/i.heic": b"x", "red/j.heic": b"x", "red/h": b"no image", "notes.txt": b"words"}
    dataset = opened(pack(tmp_path / "data.archive", IMAGES | others))
    assert labels_of(dataset).keys() == {*IMAGES}
    assert any(
        "skipped files of other formats, by suffix: .heic 2, no suffix 1" in remark for remark in dataset.remarks
    )


def test_nothing_is_said_where_nothing_is_skipped(tmp_path: Path) -> None:
    dataset = opened(write_folder(tmp_path / "data", IMAGES))
    assert not any("skipped" in remark for remark in dataset.remarks)


LISTED = ["red/a.png red", "green/b.png green", "blue/b.png blue"]


def test_a_list_of_some_images_or_of_more_is_used_by_choice_only(tmp_path: Path) -> None:
    folder, file = write_folder(tmp_path / "data", IMAGES), tmp_path / "list.txt"
    file.write_text("\n".join([*LISTED, "yellow/a.png red"]))
    with pytest.raises(DatasetError, match=r"line 4 is the first of 1 lines that name missing images.*--listed-only"):
        opened(folder, labels=file)
    file.write_text("\n".join(LISTED))
    with pytest.raises(DatasetError, match=r"no label for 3 of 6 images.*use --listed-only"):
        opened(folder, labels=file)
    file.write_text("\n".join([*LISTED, "yellow/a.png red"]))
    dataset = opened(folder, labels=file, listed_only=True)
    assert labels_of(dataset) == {"red/a.png": 0, "green/b.png": 1, "blue/b.png": 2}
    assert f"{file}: left out 3 images that it does not list, and 1 lines without an image" in dataset.remarks
    assert dataset.selection == "images listed in list.txt"


def test_listed_only_needs_a_list(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"--listed-only: .* is not labeled by a list of image names"):
        opened(write_folder(tmp_path / "data", IMAGES), listed_only=True)


def test_only_the_most_frequent_of_many_suffixes_are_named(tmp_path: Path) -> None:
    others = {f"red/{number}.{suffix}": b"x" for suffix in ("a1", "a2", "a3", "a4", "a5", "a6") for number in (1, 2)}
    dataset = opened(write_folder(tmp_path / "data", IMAGES | others))
    assert any(remark.endswith("2, …") and remark.count(" 2") == 5 for remark in dataset.remarks)


def test_folders_of_other_classes_are_left_out_where_classes_are_selected(tmp_path: Path) -> None:
    more = {"orange/a.png": PNG, "orange/b.png": PNG, "violet/a.png": PNG}
    folder = write_folder(tmp_path / "data", IMAGES | more)
    with pytest.raises(
        DatasetError, match=r"2 of 5 class folders are not among the model's 3 classes.*with --only-classes"
    ):
        opened(folder)
    dataset = opened(folder, classes=("n00000000", "n00000002"))
    assert labels_of(dataset) == {"red/a.png": 0, "red/b.png": 0, "blue/a.png": 2, "blue/b.png": 2}
    said = "left out 3 images in 2 folders that are not classes of the model: orange, violet"
    assert any(said in remark for remark in dataset.remarks)


LISTS = {
    "semicolons": "name;label\nred/a.png;red\n",
    "UTF-16": "red/a.png red\n".encode("utf-16"),
    "JSON lines": '{"file_name": "red/a.png", "label": "red"}\n',
    "JSON lines with more keys": '{"file_name": "red/a.png", "label": 0, "source": "web"}\n',
    "an object": '{"red/a.png": "red"}',
    "a list of objects": '[{"image": "red/a.png", "class": "red"}]',
}


@pytest.mark.parametrize("name", LISTS)
def test_lists_are_read_as_programs_write_them(name: str, tmp_path: Path) -> None:
    content = LISTS[name]
    (tmp_path / "list.any").write_bytes(content if isinstance(content, bytes) else content.encode())
    folder = write_folder(tmp_path / "data", {"red/a.png": PNG})
    assert labels_of(opened(folder, labels=tmp_path / "list.any")) == {"red/a.png": 0}


def test_metadata_beside_the_images_label_them(tmp_path: Path) -> None:
    lines = [{"file_name": name, "label": label} for name, label in (("b.png", "green"), ("a.png", "blue"))]
    data = {"a.png": PNG, "b.png": PNG, "metadata.jsonl": "\n".join(map(json.dumps, lines)).encode()}
    assert labels_of(opened(write_folder(tmp_path / "data", data))) == {"a.png": 2, "b.png": 1}


@pytest.mark.parametrize("content", ["blue\nred\ngreen\n", '["blue", "red", "green"]', "[2, 0, 1]", "2\n0\n1\n"])
def test_a_list_of_labels_alone_labels_by_position(content: str, tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "data", {f"{number}.png": PNG for number in (1, 2, 3)})
    (tmp_path / "list.any").write_text(content)
    assert labels_of(opened(folder, labels=tmp_path / "list.any")) == {"1.png": 2, "2.png": 0, "3.png": 1}


def test_a_list_of_wnids_alone_labels_by_position(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "data", {f"{number}.png": PNG for number in (1, 2, 3)})
    (tmp_path / "list.txt").write_text("n00000002\nn00000000\nn00000001\n")
    assert labels_of(opened(folder, labels=tmp_path / "list.txt")) == {"1.png": 2, "2.png": 0, "3.png": 1}
    (tmp_path / "list.txt").write_text("n00000002\nred\n")
    with pytest.raises(DatasetError, match="line 2 should be one wnid, like the first line, not 'red'"):
        opened(folder, labels=tmp_path / "list.txt")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            '{"annotations": [], "images": []}',
            "entry 1 is no image with a label, and this is not a list of lists of class",
        ),
        ('{"": "red", "b.png": "blue"}', "entry 1 is no image with a label"),
        ('{"red/a.png": null}', "entry 1 is no image with a label"),
        ('{"red/a.png": true}', "entry 1 is no image with a label"),
        ('[{"file_name": "red/a.png", "label": "red"}, {"file_name": "b.png"}]', "entry 2 is no image with a label"),
        ('[{"file_name": "red/a.png"}]', "its first object looks like a header"),
        ('{"file_name": "red/a.png", "label": "  "}', "line 1 has no label"),
        ("{}", "empty. Use a list"),
        ('{"a": ', "neither JSON nor JSON in each line"),
        ("red/a.png red".encode("utf-16-le").decode("latin-1"), "perhaps UTF-16 without its mark"),
    ],
)
def test_other_json_is_refused_with_what_would_be_read(content: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "list.json").write_text(content)
    with pytest.raises(DatasetError, match=message):
        opened(write_folder(tmp_path / "data", {"red/a.png": PNG}), labels=tmp_path / "list.json")


@pytest.mark.parametrize("name", ["VAL", "Validation", "valid", "Test"])
def test_sets_are_found_in_any_case(name: str, tmp_path: Path) -> None:
    files = {f"{name}/{file}": data for file, data in IMAGES.items()}
    folder = write_folder(tmp_path / "data", files | {f"train/{file}": data for file, data in IMAGES.items()})
    assert labels_of(opened(folder)) == {file: NAMES.index(file.split("/")[0]) for file in IMAGES}
    if name != "Test":
        assert [sample.file for sample in open_dataset(folder, split="val").samples] == sorted(IMAGES)
