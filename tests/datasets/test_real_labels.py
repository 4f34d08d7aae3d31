"""ReaL's labels: several true classes of an image, matched by ILSVRC's number in its name, whatever the layout."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from prelunet.evaluator.contract import ClassEntry
from prelunet.evaluator.datasets import DatasetSpec, Sample, select
from prelunet.evaluator.datasets.labels.class_file import read_class_list
from prelunet.evaluator.errors import DatasetError, PreluNetError, UsageError
from prelunet.evaluator.validation.run_log import find_dataset, spec_to_log
from tests.helpers.opened_datasets import opened
from tests.helpers.tiny_datasets import (
    DATA,
    FOLDERS,
    IMAGES,
    REAL,
    WNIDS,
    as_cls,
    name_of,
    write_folder,
    write_real,
    write_tar,
    write_zip,
)

BUILT_IN = Path("imagenet-real")
IMAGENET = read_class_list(Path("imagenet-1k"))
FIRST_FOUR = {f"ILSVRC2012_val_{number:08}.JPEG": bytes(number) for number in (1, 2, 3, 4)}


def named_shards(folder: Path) -> Path:
    """Write shards whose keys are the images' names; their own labels are wrong."""
    for first in (1, 12, 23):
        files = {}
        for number in range(first, min(first + 11, IMAGES + 1)):
            key = name_of(number).removesuffix(".JPEG")
            files[f"{key}.jpg"] = DATA[name_of(number)]
            files |= {f"{key}{suffix}": data for suffix, data in as_cls(11).items()}
        write_tar(folder / f"val-{first:03}.tar", files)
    return folder


LAYOUTS: dict[str, tuple[Callable[[Path], Path], str]] = {
    "flat": (lambda place: write_folder(place / "val", DATA), "ReaL labels"),
    "class folders": (lambda place: write_folder(place / "val", FOLDERS), "ReaL labels"),
    "a val folder": (lambda place: write_folder(place / "top" / "val", FOLDERS).parent, "ReaL labels"),
    "tar": (lambda place: write_tar(place / "val.tar", DATA), "ReaL labels"),
    "zip of class folders": (lambda place: write_zip(place / "val.zip", FOLDERS), "ReaL labels"),
    "shards": (lambda place: named_shards(place / "shards"), "ReaL labels"),
    "names with wnids": (
        lambda place: write_folder(
            place / "val", {name.replace(".", "_n00000005."): data for name, data in DATA.items()}
        ),
        "ReaL labels",
    ),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_images_of_every_layout_have_the_labels_of_their_number_and_empty_ones_are_left_out(
    layout: str, tmp_path: Path
) -> None:
    write, words = LAYOUTS[layout]
    dataset = opened(write(tmp_path), write_real(tmp_path / "real.json"))
    found = sorted((dataset.read(sample), sample.labels) for sample in dataset.samples)
    assert found == sorted((DATA[name_of(number)], tuple(truth)) for number, truth in enumerate(REAL, start=1) if truth)
    assert (dataset.layout, dataset.selection) == (words, "images with ReaL labels")
    several, empty = sum(len(truth) > 1 for truth in REAL), REAL.count([])
    assert f"{several} images have several true classes; {empty} without a class are left out" in "\n".join(
        dataset.remarks
    )


def test_an_image_is_selected_by_any_of_its_true_classes(tmp_path: Path) -> None:
    whole = opened(write_folder(tmp_path / "val", DATA), write_real(tmp_path / "real.json"))
    label = next(truth[1] for truth in REAL if len(truth) > 1)
    part = select(whole, limit=None, classes=(WNIDS[label],))
    assert [sample.file for sample in part.samples] == [name_of(n) for n, truth in enumerate(REAL, 1) if label in truth]


def test_the_built_in_labels_are_those_of_the_publication(tmp_path: Path) -> None:
    data = write_folder(tmp_path / "val", FIRST_FOUR)
    dataset = opened(data, BUILT_IN, IMAGENET)
    names = sorted(FIRST_FOUR)
    assert dataset.samples == [  # image 1 has no label
        Sample(names[1], 970, 2, (795,)),
        Sample(names[2], 230, 3, (231,)),
        Sample(names[3], 809, 4),
    ]
    reversed_classes = opened(data, BUILT_IN, IMAGENET[::-1])
    assert [sample.labels for sample in reversed_classes.samples] == [(29, 204), (769, 768), (190,)]


@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize("labels", ["imagenet-real", "real.json"])
def test_a_model_that_has_only_imagenets_names_has_the_same_labels(labels: str, order: int, tmp_path: Path) -> None:
    classes = IMAGENET[::order]
    names = [ClassEntry(f"{index}", entry.name) for index, entry in enumerate(classes)]
    data = write_folder(tmp_path / "val", FIRST_FOUR)
    (tmp_path / "real.json").write_text("[[], [970, 795], [230, 231], [809]]")
    path = tmp_path / labels if labels.endswith("json") else Path(labels)
    assert opened(data, path, names).samples == opened(data, BUILT_IN, classes).samples


def test_a_file_for_a_model_of_imagenets_classes_is_read_in_imagenets_order(tmp_path: Path) -> None:
    data = write_folder(tmp_path / "val", FIRST_FOUR)
    (tmp_path / "real.json").write_text("[[], [970, 795], [230, 231], [809]]")
    whole = opened(data, tmp_path / "real.json", IMAGENET[::-1])
    assert whole.samples == opened(data, BUILT_IN, IMAGENET[::-1]).samples
    some = [entry for index, entry in enumerate(IMAGENET) if index in {230, 231, 809, 970}]
    with pytest.raises(DatasetError, match=rf"1 classes that the model lacks: {IMAGENET[795].wnid}"):
        opened(data, tmp_path / "real.json", some)


def test_the_whole_built_in_list_has_the_published_counts() -> None:
    samples = [Sample(name_of(number), 0, 0) for number in range(1, 50_001)]
    from prelunet.evaluator.datasets.labels.class_names import ClassList
    from prelunet.evaluator.datasets.labels.real_labels import labels_of_real

    classes = ClassList(tuple(entry.wnid for entry in IMAGENET))
    truths, _ = labels_of_real(BUILT_IN, [sample.file for sample in samples], classes)
    assert (len(truths), truths.count(())) == (50_000, 3_163)  # 46,837 images are evaluated in the paper


def test_the_fingerprint_covers_every_label(tmp_path: Path) -> None:
    data = write_folder(tmp_path / "val", DATA)
    prints = {opened(data, write_real(tmp_path / "real.json")).fingerprint}
    for number, changed in ((5, [*REAL[4], 11]), (5, REAL[4][::-1]), (5, REAL[4][:1]), (4, [])):
        lists = [*REAL[: number - 1], changed, *REAL[number:]]
        prints.add(opened(data, write_real(tmp_path / "real.json", lists)).fingerprint)
    assert len(REAL[4]) > 1
    assert len(prints) == 5


def test_a_part_of_the_images_needs_no_other_lists_and_the_limit_counts_labeled_ones(tmp_path: Path) -> None:
    data = write_folder(tmp_path / "val", {name: DATA[name] for name in sorted(DATA)[:9]})
    labels = write_real(tmp_path / "real.json")
    assert [sample.labels for sample in opened(data, labels).samples] == [tuple(truth) for truth in REAL[:9] if truth]
    part = opened(data, labels, limit=3)
    assert len(part.samples) == 3
    assert part.selection == "images with ReaL labels, of these 3 images spread evenly"


REFUSED: dict[str, tuple[dict[str, bytes], Any, str]] = {
    "another length": (DATA, REAL[:-1], f"has labels of 29 images, but {name_of(30)} is image 30. Pass real.json as"),
    "number 0": ({name_of(0): b""}, REAL, "is image 0"),
    "no numbers": ({"a.JPEG": b""}, REAL, "a.JPEG is not named like ILSVRC2012_val_00000293.JPEG"),
    "training images": ({"n00000005_7.JPEG": b""}, REAL, "is not named like ILSVRC2012_val"),
    "test images": ({"ILSVRC2012_test_00000001.JPEG": b""}, REAL, "is not named like ILSVRC2012_val"),
    "one image twice": (
        {f"{folder}/{name_of(2)}": b"" for folder in WNIDS[:2]},
        REAL,
        f"{WNIDS[0]}/{name_of(2)}, {WNIDS[1]}/{name_of(2)} are the same image",
    ),
    "no image has a label": ({name_of(3): b""}, REAL, "none of the 1 images has a label"),
    "a class beyond": (DATA, [[12]] * IMAGES, "the label 12 is not a class index from 0 to 11"),
    "a class below": (DATA, [[-1]] * IMAGES, "not a list of lists of class indices"),
    "a class twice": (DATA, [[3, 4], [5, 3, 5]], "list 2 has a class twice"),
    "no lists": (DATA, [1, [2], 3], "not a list of lists of class indices"),
    "an object": (DATA, {"1": [2]}, "not a list of lists of class indices"),
    "words": (DATA, [["tench"]], "not a list of lists of class indices"),
}


@pytest.mark.parametrize("why", REFUSED)
def test_labels_that_do_not_fit_the_images_are_refused(why: str, tmp_path: Path) -> None:
    files, lists, message = REFUSED[why]
    labels = tmp_path / "real.json"
    labels.write_text(json.dumps(lists))
    with pytest.raises(DatasetError) as refused:
        opened(write_folder(tmp_path / "val", files), labels)
    assert message in str(refused.value)
    assert str(refused.value).startswith(str(labels))


def test_text_that_is_not_json_and_a_missing_file_are_refused(tmp_path: Path) -> None:
    data = write_folder(tmp_path / "val", DATA)
    (tmp_path / "cut.json").write_text("[[1], [2")
    with pytest.raises(DatasetError, match=r"cut\.json: not a list of lists of class indices .*imagenet-real"):
        opened(data, tmp_path / "cut.json")
    with pytest.raises(UsageError, match=r"none\.json: no such file"):
        opened(data, tmp_path / "none.json")


def test_a_model_without_imagenets_classes_cannot_use_the_built_in_labels(tmp_path: Path) -> None:
    with pytest.raises(PreluNetError, match=r"imagenet-real: the images show 3\d classes that the model lacks: n0"):
        opened(write_folder(tmp_path / "val", DATA), BUILT_IN)


def test_the_log_keeps_the_name_of_the_built_in_labels_and_the_place_of_a_file(tmp_path: Path) -> None:
    for labels, kept in ((BUILT_IN, BUILT_IN), (tmp_path / "x" / ".." / "real.json", tmp_path / "real.json")):
        line = {"event": "start", **spec_to_log(DatasetSpec(tmp_path, labels))}
        (tmp_path / "log.jsonl").write_text(json.dumps(line) + "\n")
        assert find_dataset(tmp_path) == DatasetSpec(tmp_path, kept)
