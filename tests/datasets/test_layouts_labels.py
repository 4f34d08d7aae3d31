"""Labels that do not match their images, and confusions of label orders, are refused with file, line and fix."""

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prelunet.evaluator.contract import ClassEntry
from prelunet.evaluator.datasets import open_dataset
from prelunet.evaluator.datasets.labels.imagenet_devkit import read_devkit_ids
from prelunet.evaluator.errors import DatasetError, PreluNetError, UsageError
from prelunet.evaluator.reporting.report import label_order_suspicion
from tests.helpers.opened_datasets import opened, refusal
from tests.helpers.tiny_datasets import (
    DATA,
    DEVKIT,
    FOLDERS,
    GROUND_TRUTH,
    IMAGES,
    LABELS,
    NAMES,
    WNIDS,
    as_cls,
    name_of,
    shard_files,
    write_devkit,
    write_folder,
    write_list,
    write_tar,
    write_zip,
)


@pytest.fixture(scope="module")
def flat(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with only the images, without labels."""
    return write_folder(tmp_path_factory.mktemp("flat") / "lone" / "images", DATA)


def listed(place: Path, lines: Sequence[str], name: str = "list.txt") -> Path:
    (place / name).write_text("".join(f"{line}\n" for line in lines))
    return place / name


GOOD = [f"{name} {label}" for name, label in LABELS.items()]


# Lists


def test_labels_of_images_that_do_not_exist_are_named_with_their_line(flat: Path, tmp_path: Path) -> None:
    bad = listed(tmp_path, [*GOOD[:4], "gone.JPEG 3", *GOOD[4:], "lost.JPEG 3"])
    message = refusal(flat, bad)
    assert f"{bad}: line 5 is the first of 2 lines that name missing images: gone.JPEG, lost.JPEG" in message
    assert "Restore the images, or remove the lines" in message


def test_images_without_a_label_are_named(flat: Path, tmp_path: Path) -> None:
    message = refusal(flat, listed(tmp_path, GOOD[2:]))
    assert f"no label for 2 of 30 images: {name_of(1)}, {name_of(2)}. Add lines for them" in message


@pytest.mark.parametrize(("number", "label"), [(3, LABELS[name_of(3)]), (3, 1), (1, 1), (30, 0)])
def test_a_name_that_is_listed_twice_is_refused_with_both_lines(
    flat: Path, tmp_path: Path, number: int, label: int
) -> None:
    message = refusal(flat, listed(tmp_path, ["", *GOOD, f"{name_of(number)} {label}"]))
    assert f"line 32 names {name_of(number)} a second time, after line {number + 1}" in message


@pytest.mark.parametrize(
    ("label", "expected"),
    [
        ("13", "the label 13 is not one of the model's 12 classes, 0 to 11"),
        ("-2", "the label -2 is not one of the model's 12 classes"),
        ("-1", "the label -1 means that the class is unknown.*--no-labels"),
        ("n09999999", "the label 'n09999999' is not one of the model's 12 classes, which start with n00000005"),
        ("1.5", "the label '1.5' is not"),
    ],
)
def test_a_label_that_is_no_class_is_refused_with_its_line(
    flat: Path, tmp_path: Path, label: str, expected: str
) -> None:
    bad = listed(tmp_path, [*GOOD[:6], f"{name_of(7)} {label}", *GOOD[7:]])
    message = refusal(flat, bad)
    if label[0] == "n" or "." in label:  # among class indices, another kind of label is refused differently
        bad = write_list(tmp_path / "w.txt", lambda n, k: f"{n} {label if n == name_of(7) else WNIDS[k]}")
        message = refusal(flat, bad)
    assert re.search(rf"{bad}: line \d+: {expected}", message)


def test_labels_counted_from_one_are_refused_not_guessed(flat: Path, tmp_path: Path) -> None:
    for lines in (
        [f"{name} {DEVKIT[label]}" for name, label in LABELS.items()],
        [str(DEVKIT[label]) for label in LABELS.values()],
    ):
        assert {line.split()[-1] for line in lines} >= {"1", "12"}
        message = refusal(flat, listed(tmp_path, lines))
        assert "the labels are numbers 1 to 12, and none of them is 0: are they devkit ids" in message
        assert "--labels DIR" in message
        assert "subtract 1 from each" in message


def test_devkit_ids_of_another_file_name_are_not_taken_for_indices(flat: Path, tmp_path: Path) -> None:
    devkit = write_devkit(tmp_path / "kit") / "data"
    renamed = (devkit / GROUND_TRUTH).rename(devkit / "gt.txt")
    assert "are they devkit ids" in refusal(flat, renamed)
    # A subset of the classes need contain neither 0 nor 12, but labels by position without a 0 are still suspicious.
    few = write_folder(tmp_path / "few", {name: data for name, data in DATA.items() if DEVKIT[LABELS[name]] < 9})
    renamed.write_text("".join(f"{DEVKIT[LABELS[path.name]]}\n" for path in sorted(few.iterdir())))
    assert "the labels are numbers 1 to 8, and none of them is 0" in refusal(few, renamed)
    renamed.write_text("".join(f"{path.name} {LABELS[path.name]}\n" for path in few.iterdir() if LABELS[path.name]))
    for path in few.iterdir():
        if not LABELS[path.name]:
            path.unlink()
    assert [s.label for s in opened(few, renamed).samples] == [LABELS[path.name] for path in sorted(few.iterdir())]


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ([], "empty. Use a list with a line `name label`"),
        (["name,label"], "contains only a header"),
        ([name_of(1)], r"line 1 should be `name label` or `name,label`, not 'ILSVRC2012_val_00000001.JPEG'"),
        ([f"{name_of(1)},3,4"], "line 1 should be `name label`.*name the columns in the first line"),
        (["name,label", f"{name_of(1)},"], "line 2 has no label"),
        (["name,label", name_of(1)], "line 2 should be"),
        ([f"{name_of(1)},3", f"{name_of(2)},3,4"], "line 2 should be"),
        (["3", "4", "five"], "line 3 should be one number, like the first line, not 'five'"),
        (["x.png 3", "y.png 4"], r"names none of the 30 images \(it lists x\.png, y\.png; the images are ILSVRC"),
        (['"a,3'], "line 1"),
        (["ImageId,PredictionString", f"{name_of(1)},{WNIDS[0]} 1 2 3 4 {WNIDS[1]} 1 2 3 4"], "boxes of 2 classes"),
    ],
)
def test_a_list_that_cannot_be_read_is_refused_with_its_line(
    flat: Path, tmp_path: Path, lines: list[str], expected: str
) -> None:
    assert re.search(expected, refusal(flat, listed(tmp_path, lines)))


def test_a_list_that_is_no_text_is_refused(flat: Path, tmp_path: Path) -> None:
    (tmp_path / "l.txt").write_bytes(DATA[name_of(1)])
    assert "not UTF-8 text" in refusal(flat, tmp_path / "l.txt")
    with pytest.raises(UsageError, match=r"no such file or folder\. Pass a list of labels"):
        opened(flat, tmp_path / "nowhere.txt")
    with pytest.raises(UsageError, match="--labels and --no-labels cannot be combined"):
        opened(flat, tmp_path / "l.txt", no_labels=True)


def test_labels_by_position_are_refused_where_text_and_numbers_order_the_images_differently(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "images", {f"img{number}.png": b"x" for number in (1, 2, 3, 10, 11)})
    numbers = listed(tmp_path, ["0", "1", "2", "3", "4"])
    message = refusal(folder, numbers)
    assert f"{numbers}: line i is the label of the i-th image, but the order of the images is not clear: " in message
    assert "as text img1.png, img10.png, img11.png, img2.png, but by number img1.png, img2.png, img3.png," in message
    named = listed(tmp_path, [f"img{number}.png {label}" for label, number in enumerate((1, 2, 3, 10, 11))])
    assert [(s.file, s.label) for s in opened(folder, named).samples][:3] == [
        ("img1.png", 0), ("img10.png", 3), ("img11.png", 4)
    ]  # fmt: skip


@pytest.mark.parametrize("count", [IMAGES - 1, IMAGES + 1])
def test_labels_by_position_must_be_as_many_as_the_images(flat: Path, tmp_path: Path, count: int) -> None:
    lines = [*map(str, LABELS.values()), "1"][:count]
    assert f"{count} labels for 30 images, so labels cannot be matched to images by position" in refusal(
        flat, listed(tmp_path, lines)
    )


@pytest.mark.parametrize(("inside", "path"), [("", "."), ("sub", "..")])
def test_a_dataset_given_as_the_current_folder_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, inside: str, path: str
) -> None:
    data = write_folder(tmp_path / "data", {"a.png": b"1"})
    (data / "sub").mkdir()
    (tmp_path / "data.csv").write_text("name,label\na.png,7\n")
    monkeypatch.chdir(data / inside)
    dataset = opened(Path(path))
    assert (dataset.location.name, [sample.label for sample in dataset.samples]) == ("data", [7])


def test_a_list_without_folders_is_refused_where_two_images_share_a_name(tmp_path: Path) -> None:
    data = write_folder(tmp_path / "data", {"x/a.png": b"1", "y/a.png": b"2", "y/b.png": b"3"})
    assert "several images match the name a.png. Name them with folders" in refusal(
        data, listed(tmp_path, ["a.png 1", "b.png 2"])
    )
    two = write_folder(tmp_path / "two", {"a.png": b"1", "a.bmp": b"2"})
    assert "several images match the name a. Name them with suffixes" in refusal(two, listed(tmp_path, ["a 1", "b 2"]))
    dataset = opened(data, listed(tmp_path, ["./y/a.png 1", "x/a.png 2", "y\\b.png 3"]))
    assert [(sample.file, sample.label) for sample in dataset.samples] == [
        ("x/a.png", 2),
        ("y/a.png", 1),
        ("y/b.png", 3),
    ]
    assert dataset.layout == "folders, labels from list.txt"


def test_a_list_passed_as_an_option_overrides_class_folders_with_a_remark(tmp_path: Path) -> None:
    data = write_folder(tmp_path / "data", {f"{WNIDS[0]}/a.png": b"1", f"{WNIDS[1]}/b.png": b"2"})
    dataset = opened(data, listed(tmp_path, ["a.png 5", "b.png 6"]))
    assert [sample.label for sample in dataset.samples] == [5, 6]
    assert any("some folders are named after classes, but the labels come from" in remark for remark in dataset.remarks)


@settings(max_examples=200)
@given(st.lists(st.text(st.sampled_from("ab0123456789.,\"' \t-nJPEG_\r\x00é"), max_size=30), max_size=5))
def test_any_text_is_a_list_or_is_refused_and_raises_nothing_else(
    tmp_path_factory: pytest.TempPathFactory, lines: list[str]
) -> None:
    place = tmp_path_factory.getbasetemp() / "fuzz"
    data = write_folder(place / "data", {"a.png": b"1", "b.png": b"2"})
    (place / "list.txt").write_bytes("\n".join(lines).encode())
    try:
        assert len(opened(data, place / "list.txt").samples) == 2
    except PreluNetError as error:
        assert isinstance(error, DatasetError)  # noqa: PT017 - either outcome is right


# The devkit


def test_ground_truth_with_another_number_of_lines_is_refused(flat: Path, tmp_path: Path) -> None:
    devkit = write_devkit(tmp_path / "kit")
    with (devkit / "data" / GROUND_TRUTH).open("a") as file:
        file.write("3\n")
    assert f"{GROUND_TRUTH}: 31 labels for 30 images" in refusal(flat, devkit)


def test_an_image_that_is_missing_in_the_middle_is_noticed_by_the_numbers_of_the_others(tmp_path: Path) -> None:
    data = write_folder(
        tmp_path / "images", {name: d for name, d in DATA.items() if name != name_of(9)} | {"z.png": b""}
    )
    message = refusal(data, write_devkit(tmp_path / "kit"))
    assert f"{name_of(10)} is image 9 in sorted order" in message


def test_devkit_ids_go_through_the_devkits_own_order(flat: Path, tmp_path: Path) -> None:
    dataset = opened(flat, write_devkit(tmp_path / "kit"))
    assert [sample.label for sample in dataset.samples] == list(LABELS.values())
    wrong = sum(DEVKIT[label] - 1 != label for label in LABELS.values())
    assert wrong > 25, "or the order would not matter here"


def test_devkit_without_a_mapping_or_with_two_is_refused(flat: Path, tmp_path: Path) -> None:
    devkit = write_devkit(tmp_path / "kit")
    (devkit / "data" / "meta.mat").unlink()
    message = refusal(flat, devkit)
    assert (
        "no meta.mat to map devkit ids to wnids, and no text file (synsets.txt, map_clsloc.txt, wnids.txt)" in message
    )
    listed(devkit / "data", WNIDS, "synsets.txt")  # like Caffe's synsets.txt, which is in the order of class indices
    assert "synsets.txt: line 1 should be `id wnid`" in refusal(flat, devkit)
    listed(devkit / "data", [f"{wnid} {DEVKIT[i]} {NAMES[i]}" for i, wnid in enumerate(WNIDS)], "map_clsloc.txt")
    assert "map_clsloc.txt could both map devkit ids to wnids" in refusal(flat, devkit)
    (devkit / "data" / "synsets.txt").unlink()
    assert [sample.label for sample in opened(flat, devkit).samples] == list(LABELS.values())


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ([f"1 {WNIDS[0]}", f"2 {WNIDS[0]}"], "contains an id or a wnid twice"),
        ([f"1 {WNIDS[0]}", f"1 {WNIDS[1]}"], "contains an id or a wnid twice"),
        ([f"1 {WNIDS[0]}", WNIDS[1]], "line 2 should be `id wnid`"),
        (["1 tench"], "line 1 should be `id wnid`, as `1 n02119789`, not '1 tench'"),
        ([], "empty"),
        ([f"{index + 1} {wnid}" for index, wnid in enumerate(WNIDS[:10])], "has the id 1[12], which is not in "),
        ([f"{index + 1} n1{wnid[2:]}" for index, wnid in enumerate(WNIDS)], "which is n1.*, not one of the model's 12"),
    ],
)
def test_a_mapping_without_wnids_is_refused(flat: Path, tmp_path: Path, lines: list[str], expected: str) -> None:
    devkit = write_devkit(tmp_path / "kit")
    (devkit / "data" / "meta.mat").unlink()
    listed(devkit / "data", lines, "synsets.txt")
    assert re.search(expected, refusal(flat, devkit))


def test_damaged_devkit_files_are_named(flat: Path, tmp_path: Path) -> None:
    devkit = write_devkit(tmp_path / "kit")
    (devkit / "data" / GROUND_TRUTH).write_text("3\nfox\n")
    assert f"{GROUND_TRUTH}: line 2 should be a devkit id, a positive integer, not 'fox'" in refusal(flat, devkit)
    (devkit / "data" / GROUND_TRUTH).write_text("0\n" * IMAGES)
    assert "line 1 should be a devkit id" in refusal(flat, devkit)
    write_devkit(tmp_path / "other")
    whole = (tmp_path / "other" / "data" / "meta.mat").read_bytes()
    for damaged in (b"", b"text", whole[:200], whole[:-40]):
        (tmp_path / "other" / "data" / "meta.mat").write_bytes(damaged)
        assert "meta.mat: cannot read ILSVRC's `synsets`" in refusal(flat, tmp_path / "other")
    assert f"no {GROUND_TRUTH} in this folder" in refusal(flat, flat)


def test_devkit_ids_are_read_for_a_submission(tmp_path: Path) -> None:
    devkit = write_devkit(tmp_path / "kit")
    expected = {wnid: DEVKIT[index] for index, wnid in enumerate(WNIDS)}
    for path in (devkit, devkit / "data", devkit / "data" / "meta.mat"):
        assert read_devkit_ids(path) == expected
    text = listed(tmp_path, [f"{devkit_id} {wnid}" for wnid, devkit_id in expected.items()], "my ids.txt")
    assert read_devkit_ids(text) == expected
    with pytest.raises(UsageError, match=r"no such file or folder. Pass the devkit's folder, its meta\.mat"):
        read_devkit_ids(tmp_path / "nowhere")


# Choosing the label file


def test_flat_images_without_labels_are_refused_with_both_fixes(flat: Path) -> None:
    message = refusal(flat)
    assert "30 images without class folders, and no label file in or next to the dataset" in message
    assert "--labels FILE" in message
    assert "--no-labels" in message
    dataset = opened(flat, no_labels=True)
    assert (dataset.layout, {sample.label for sample in dataset.samples}) == ("unlabelled", {-1})


def test_two_candidates_for_the_label_file_are_both_named(tmp_path: Path) -> None:
    data = write_folder(tmp_path / "images", DATA)
    first = write_list(tmp_path / "val.txt", lambda name, label: f"{name} {label}")
    devkit = write_devkit(tmp_path / "ILSVRC2012_devkit_t12")
    message = refusal(data)
    assert f"several files may contain the labels: {first}, {devkit}/data/{GROUND_TRUTH}" in message
    assert "Choose one with --labels FILE" in message
    assert opened(data, first).layout == "flat, labels from val.txt"
    assert opened(data, first).spec.labels == first


@pytest.mark.parametrize("place", ["images.csv", "images/images.csv"])
def test_the_output_of_classify_beside_or_among_images_is_no_candidate(tmp_path: Path, place: str) -> None:
    data = write_folder(tmp_path / "images", DATA)
    write_list(tmp_path / "val.txt", lambda name, label: f"{name} {label}")
    (tmp_path / place).write_text("file,wnid_1,name_1,score_1,refused\n")
    assert opened(data).layout == "flat, labels from val.txt"


def test_loose_images_beside_class_folders_are_skipped_with_a_remark(tmp_path: Path) -> None:
    data = write_folder(tmp_path / "val", FOLDERS | {"loose.png": b"a", "other.png": b"b"})
    dataset = opened(data)
    assert len(dataset.samples) == IMAGES
    assert f"{data}: skipped 2 images that are outside the class folders" in dataset.remarks


def test_loose_images_beside_folders_that_are_not_classes_are_refused(tmp_path: Path) -> None:
    data = write_folder(tmp_path / "data", {"a.png": b"a", "more/b.png": b"b", "more/c.png": b"c"})
    message = refusal(data)
    assert "1 images are outside any folder, and 2 are in folders that are not classes of the model (more)" in message
    assert "--labels FILE" in message


def test_a_folder_without_images_and_unlabeled_sets_side_by_side_are_refused(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    assert "no images found" in refusal(tmp_path / "data")
    write_folder(tmp_path / "data" / "val", {"a.png": b"a"})
    write_folder(tmp_path / "data" / "test", {"b.png": b"b"})
    with pytest.raises(DatasetError, match="contains the sets test and val; it is not clear which"):
        opened(tmp_path / "data", no_labels=True)
    assert [s.file for s in opened(tmp_path / "data" / "test", no_labels=True).samples] == ["b.png"]
    archive = write_zip(tmp_path / "both.zip", {"val/a.png": b"a", "test/b.png": b"b"})
    with pytest.raises(DatasetError, match=rf"Unpack it, and pass the folder of one set: {tmp_path / 'val'}$"):
        opened(archive, no_labels=True)


# Class folders


def test_numbered_folders_are_numbers_and_not_text(tmp_path: Path) -> None:
    files = {f"{label}/{name}": DATA[name] for name, label in LABELS.items()} | {"4/x.png": b"x", "11/x.png": b"y"}
    dataset = opened(write_folder(tmp_path / "val", files))
    assert all(sample.label == int(sample.file.split("/")[0]) for sample in dataset.samples)
    assert len(dataset.samples) == IMAGES + 2
    assert any("named 0 to 11; the names are read as class indices, in numeric order" in r for r in dataset.remarks)
    # A training set defines its own classes, in text order; a model trained on it has these wnids.
    trained = open_dataset(tmp_path / "val", split="val")
    assert trained.classes[:4] == ("0", "1", "10", "11")
    again = opened(tmp_path / "val", classes=[ClassEntry(wnid, wnid) for wnid in trained.classes])
    assert [sample.label for sample in again.samples] == [sample.label for sample in trained.samples]


def test_numbered_folders_from_one_on_are_refused(tmp_path: Path) -> None:
    files = {f"{number}/a.png": b"a" for number in range(1, 13)}
    assert "the folders are numbers 1 to 12, and none of them is 0: are they devkit ids" in refusal(
        write_folder(tmp_path / "one", files)
    )
    files = {f"{number}/a.png": b"a" for number in range(1, 4)}
    assert "the folders are numbers 1 to 3, and none of them is 0" in refusal(write_folder(tmp_path / "few", files))
    files = {f"{number}/a.png": b"a" for number in range(2, 14)}
    assert "12 of 12 class folders are not among the model's 12 classes" in refusal(
        write_folder(tmp_path / "beyond", files)
    )


@pytest.mark.parametrize("numbers", [[1, 2, 3, 4, 5, 7, 8, 9, 10, 11], [3, 10], [4, 12]])
def test_numbered_folders_without_a_0_may_be_counted_from_1_and_are_refused(
    tmp_path: Path, numbers: Sequence[int]
) -> None:
    files = {f"{number}/a.png": b"a" for number in numbers}
    message = refusal(write_folder(tmp_path / "some", files))
    assert f"the folders are numbers {min(numbers)} to {max(numbers)}, and none of them is 0" in message


@pytest.mark.parametrize("numbers", [[0, 1, 2, 3, 4, 6, 7, 8, 9, 10, 11], range(5), [0, 10]])
def test_some_of_the_numbered_folders_are_class_indices_and_it_is_said(tmp_path: Path, numbers: Sequence[int]) -> None:
    files = {f"{number}/a.png": b"a" for number in numbers}
    dataset = opened(write_folder(tmp_path / "some", files))
    assert {sample.file: sample.label for sample in dataset.samples} == {f"{n}/a.png": n for n in numbers}
    said = f"the folders are named {min(numbers)} to {max(numbers)}; the names are read as class indices, in numeric"
    assert any(said in remark for remark in dataset.remarks)
    assert any(f"no folders for {12 - len(numbers)} of the model's 12 classes" in r for r in dataset.remarks)


def test_a_name_of_two_classes_is_refused_with_the_pair(tmp_path: Path) -> None:
    for name in ("crane", "CRANE"):
        message = refusal(write_folder(tmp_path / name, {f"{name}/a.png": b"a", "tench/b.png": b"b"}))
        assert (
            f"{name!r} could be {WNIDS[1]} (crane) and {WNIDS[3]} (crane), class indices 1 and 3. Use wnids" in message
        )


def test_folders_are_matched_by_any_way_to_write_a_name(tmp_path: Path) -> None:
    files = {
        "Fox-Terrier/a.png": b"a",
        "maillot, tank suit/c.png": b"c",
        f"{WNIDS[1]}/d.png": b"d",
    }
    dataset = opened(write_folder(tmp_path / "val", files))
    assert {sample.file[-5]: sample.label for sample in dataset.samples} == {"a": 5, "c": 7, "d": 1}


@pytest.mark.parametrize("pair", [("maillot", "maillot, tank suit"), ("Tench", "tench"), (WNIDS[0], "tench")])
def test_two_folders_that_mean_one_class_are_refused_with_the_pair(tmp_path: Path, pair: tuple[str, str]) -> None:
    files = {f"{folder}/a.png": folder.encode() for folder in (*pair, "ox")}
    message = refusal(write_folder(tmp_path / "val", files))
    first, second = sorted(pair)
    assert (
        f"the folders {first} and {second} both stand for the class {WNIDS[7 if 'maillot' in pair else 0]}" in message
    )


def test_names_that_are_numbers_are_names(tmp_path: Path) -> None:
    digits = [ClassEntry(f"n{index:08}", str((index + 1) % 10)) for index in range(10)]
    data = write_folder(tmp_path / "val", {f"{number}/a.png": b"a" for number in range(10)})
    assert [sample.label for sample in opened(data, classes=digits).samples] == [9, *range(9)]


def test_numbers_beside_names_are_refused_as_labels_of_another_kind(tmp_path: Path) -> None:
    data = write_folder(tmp_path / "data", {"a.png": b"a", "b.png": b"b"})
    text = refusal(data, listed(tmp_path, ["a.png tench", "b.png 2"]))
    assert "line 2: 2 is a class index, but others are names or wnids. Use one kind for all" in text
    assert "the label '99' is not one of" in refusal(data, listed(tmp_path, ["a.png tench", "b.png 99"]))
    assert "line 2: the label 'trench' is not one" in refusal(data, listed(tmp_path, ["a.png 2", "b.png trench"]))


def test_numbers_beside_wnids_that_are_numbers_are_damaged_wnids_and_no_indices(tmp_path: Path) -> None:
    trained = [ClassEntry(wnid, f"digit {wnid}") for wnid in sorted(map(str, range(12)))]  # 0, 1, 10, 11, 2, ...
    data = write_folder(tmp_path / "data", {"a.png": b"a", "b.png": b"b"})
    assert [s.label for s in opened(data, listed(tmp_path, ["a.png 2", "b.png 10"]), trained).samples] == [4, 2]
    assert "the label '002' is not" in refusal(data, listed(tmp_path, ["a.png 002", "b.png 10"]), trained)


# Shards


def test_shards_whose_labels_and_images_do_not_fit_are_refused(tmp_path: Path) -> None:
    files = shard_files(range(1, 5), as_cls)

    def message_for(changed: dict[str, bytes | None]) -> str:
        kept = {name: data for name, data in (files | changed).items() if data is not None}
        return refusal(write_tar(tmp_path / "s.tar", kept))

    assert "no .cls for 1 of 4 images: 000003.jpg" in message_for({"000003.cls": None})
    assert "1 labels without an image: 000009.cls" in message_for({"000009.cls": b"3"})
    assert "000002.jpg and 000002.png have the same key" in message_for({"000002.png": b""})
    assert "s.tar: 000002.cls: the label 12 is not one of the model's 12 classes" in message_for(
        {"000002.cls": b"12", "000001.cls": b"0"}
    )
    assert "s.tar: 000002.cls: cannot read a label" in message_for({"000002.cls": b"\xff\xfe"})
    jsons = {f"{key:06}.cls": None for key in range(1, 5)} | {f"{key:06}.json": b'{"label": 1}' for key in range(1, 5)}
    assert "000004.json: cannot read a label (its 'label' should be" in message_for(jsons | {"000004.json": b"{}"})
    assert "000004.json: cannot read a label" in message_for(jsons | {"000004.json": b"{"})


def test_a_folder_of_tars_that_are_not_shards_or_of_several_kinds_is_refused(tmp_path: Path) -> None:
    write_tar(tmp_path / "a" / "ILSVRC2012_img_val.tar", DATA)
    assert "not a webdataset shard" in refusal(tmp_path / "a")
    assert "Pass an archive of images itself as --data" in refusal(tmp_path / "a")
    for name in ("dogs-1.tar", "dogs-2.tar", "cats-1.tar"):
        write_tar(tmp_path / "b" / name, shard_files(range(1, 5), as_cls))
    assert "shards of 2 kinds (cats-*.tar, dogs-*.tar), and it is not clear which contain the val images" in refusal(
        tmp_path / "b"
    )
    with pytest.raises(DatasetError, match=r"webdataset shards contain their own labels\. Remove --labels"):
        opened(tmp_path / "b", write_devkit(tmp_path / "kit"))


def test_shards_of_a_training_set_are_refused_alone_and_a_test_set_beside_them_is_read(tmp_path: Path) -> None:
    write_tar(tmp_path / "train-1.tar", shard_files(range(1, 5), as_cls))
    assert "contains only training images (train-*.tar), not the val images" in refusal(tmp_path)
    assert len(opened(tmp_path / "train-1.tar").samples) == 4
    write_tar(tmp_path / "test-1.tar", shard_files(range(1, 8), as_cls))
    dataset = opened(tmp_path)
    assert len(dataset.samples) == 7
    assert dataset.remarks[0] == f"{tmp_path}: contains test-*.tar, train-*.tar; the images are those in test-*.tar"
    assert len(open_dataset(tmp_path, split="train", wnids=WNIDS).samples) == 4


# After the run


@pytest.mark.parametrize(("error", "classes"), [(None, 1000), (98.9, 1000), (100.0, 99)])
def test_an_error_that_can_be_true_is_not_suspicious(error: float | None, classes: int) -> None:
    assert label_order_suspicion(error, classes) is None


def test_an_error_of_guessing_names_the_order_of_the_labels_and_the_check() -> None:
    message = label_order_suspicion(99.9, 1000)
    assert message is not None
    assert "99.90 % over 1,000 classes" in message
    assert "devkit ids instead of sorted wnids" in message
    assert "To check, look at" in message


def test_the_zip_and_the_folder_of_the_same_images_have_the_same_fingerprint(flat: Path, tmp_path: Path) -> None:
    labels = write_list(tmp_path / "l.txt", lambda name, label: f"{name} {label}")
    zipped = opened(write_zip(tmp_path / "images.zip", DATA), labels)
    assert zipped.fingerprint == opened(flat, labels).fingerprint
    assert replace(zipped, samples=zipped.samples[1:]).fingerprint != zipped.fingerprint
