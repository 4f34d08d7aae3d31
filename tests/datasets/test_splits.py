"""Which of several sets is evaluated: `val`, its other usual names, a labeled `test`; or a question, never a guess."""

import re
from pathlib import Path

import pytest

from prelunet.evaluator.contract import ClassEntry
from prelunet.evaluator.datasets import Dataset, DatasetSpec, open_dataset, open_from_spec, open_images
from prelunet.evaluator.errors import DatasetError
from prelunet.training.data.splits import open_splits
from tests.helpers.opened_datasets import opened, refusal
from tests.helpers.tiny_datasets import (
    CLASSES,
    DATA,
    LABELS,
    WNIDS,
    kaggle_files,
    name_of,
    tiny_imagenet_files,
    write_folder,
    write_list,
    write_tar,
    write_zip,
)

# One image of each of two classes, of other bytes in each set.
SETS = {
    name: {f"{name}/{wnid}/a.png": f"{name} {wnid}".encode() for wnid in (WNIDS[3], WNIDS[9])}
    for name in ("train", "val", "valid", "validation", "test")
}


def sets(*names: str) -> dict[str, bytes]:
    return {file: data for name in names for file, data in SETS[name].items()}


def first_bytes(dataset: Dataset) -> bytes:
    assert [sample.label for sample in dataset.samples] == [3, 9]
    return dataset.read(dataset.samples[0]).split()[0]


# The name of the set


@pytest.mark.parametrize(
    ("names", "chosen"),
    [
        (("train", "val", "test"), "val"),
        (("train", "valid", "test"), "valid"),
        (("train", "validation"), "validation"),
        (("train", "val", "valid"), "val"),
        (("valid",), "valid"),
        (("train", "test"), "test"),
        (("test",), "test"),
    ],
)
@pytest.mark.parametrize("top", ["", "pets/"])
def test_the_set_to_evaluate_is_found_and_said(tmp_path: Path, names: tuple[str, ...], chosen: str, top: str) -> None:
    path = write_zip(tmp_path / "a.zip", {top + file: data for file, data in sets(*names).items()})
    dataset = opened(path)
    assert first_bytes(dataset).decode() == chosen
    said = [remark for remark in dataset.remarks if f"the images are those in '{chosen}'" in remark]
    assert len(said) == ({"train", "val", "test"} != set(names))
    assert all(f"contains {', '.join(sorted(names))};" in remark for remark in said)


def test_several_validation_sets_are_a_question_with_its_answer(tmp_path: Path) -> None:
    data = write_folder(tmp_path / "data", sets("train", "valid", "validation"))
    message = refusal(data)
    assert "contains the sets valid and validation; it is not clear which one to use as 'val'" in message
    assert message.endswith(f"Pass the folder of one set: {data / 'validation'}")
    assert first_bytes(opened(data / "valid")) == b"valid"
    with pytest.raises(DatasetError, match="for training, rename that one to 'val'"):
        open_splits(data)


def test_a_training_set_alone_is_never_evaluated(tmp_path: Path) -> None:
    data = write_folder(tmp_path / "data", sets("train"))
    assert "class folders in 'train' but none in 'val'" in refusal(data)
    write_folder(data / "test", {"a.png": b"a", "b.png": b"b"})  # a test set whose labels nobody has
    assert "class folders in 'train' but none in 'val'" in refusal(data)


def test_a_test_set_alone_needs_labels_or_the_option_without_them(tmp_path: Path) -> None:
    data = write_folder(tmp_path / "lone" / "data", {"test/a.png": b"a", "test/b.png": b"b"})
    message = refusal(data)
    assert "data/test: 2 images without class folders, and no label file" in message
    assert "use validate --no-labels" in message
    assert len(open_from_spec(DatasetSpec(data, no_labels=True), CLASSES).samples) == 2


def test_a_test_folder_of_other_classes_is_refused_by_their_names(tmp_path: Path) -> None:
    data = write_folder(tmp_path / "data", {"test/zebra/a.png": b"a", f"test/{WNIDS[3]}/a.png": b"b"})
    assert "1 of 2 class folders are not among the model's 12 classes: zebra" in refusal(data)


def test_without_labels_each_usual_name_counts_as_a_set(tmp_path: Path) -> None:
    data = write_folder(tmp_path / "data", sets("valid", "test"))
    with pytest.raises(DatasetError, match=r"contains the sets test and valid; .* which one to use without labels"):
        open_from_spec(DatasetSpec(data, no_labels=True), CLASSES)
    dataset = open_images(data, CLASSES)
    assert {dataset.read(sample)[:5] for sample in dataset.samples} == {b"valid"}


@pytest.mark.parametrize("beside", ["boats/b.png", "b.png", "boats/notes.txt"])
def test_without_labels_images_beside_the_only_set_are_images_too(tmp_path: Path, beside: str) -> None:
    files = {"train/a.png": b"a", beside: b"b"}  # photos of trains, say
    dataset = opened(write_folder(tmp_path / "photos", files), no_labels=True)
    expected = set(files) if beside.endswith("png") else {"a.png"}
    assert {sample.file for sample in dataset.samples} == expected


def test_class_folders_beside_a_validation_set_are_not_used_and_this_is_said(tmp_path: Path) -> None:
    data = write_folder(tmp_path / "data", sets("val") | {f"{WNIDS[1]}/b.png": b"b"})
    assert first_bytes(opened(data)) == b"val"
    assert f"{data}: beside 'val', these are not used: {WNIDS[1]}" in opened(data).remarks


# Classes with the name of a set


def named(*names: str) -> list[ClassEntry]:
    return [ClassEntry(name, name) for name in names]


@pytest.mark.parametrize("name", ["train", "val", "valid", "validation", "test"])
def test_a_class_may_have_the_name_of_a_set(tmp_path: Path, name: str) -> None:
    data = write_folder(tmp_path / "data", {f"{name}/a.png": b"a", "ship/b.png": b"b"})
    dataset = opened(data, classes=named("car", "ship", name))
    assert [(sample.file, sample.label) for sample in dataset.samples] == [("ship/b.png", 1), (f"{name}/a.png", 2)]


@pytest.mark.parametrize("held_out", ["val", "valid", "test"])
def test_sets_beside_a_class_named_train_are_still_found(tmp_path: Path, held_out: str) -> None:
    files = {f"{name}/{word}/a.png": name.encode() for name in ("train", held_out) for word in ("train", "ship")}
    dataset = opened(write_folder(tmp_path / "data", files), classes=named("ship", "train"))  # as CIFAR-100
    assert [sample.label for sample in dataset.samples] == [0, 1]
    assert {dataset.read(sample).decode() for sample in dataset.samples} == {held_out}


@pytest.mark.parametrize("name", ["valid", "validation", "test"])
def test_a_set_beside_class_folders_is_not_chosen_over_them(tmp_path: Path, name: str) -> None:
    data = write_folder(tmp_path / "data", sets(name) | {f"{WNIDS[1]}/b.png": b"b"})
    expected = "none in 'val'" if name == "test" else f"class folders are not among the model's 12 classes: {name}"
    assert expected in refusal(data)


# Training


@pytest.mark.parametrize("name", ["val", "valid", "validation"])
def test_training_finds_its_validation_set_under_each_usual_name(tmp_path: Path, name: str) -> None:
    data = write_folder(tmp_path / "data", sets("train", name, "test"))
    splits = open_splits(data)
    assert splits.classes == (ClassEntry(WNIDS[3], WNIDS[3]), ClassEntry(WNIDS[9], WNIDS[9]))
    assert splits.val.read(splits.val.samples[1]) == f"{name} {WNIDS[9]}".encode()
    assert any("the images are those in" in remark for remark in splits.val.remarks) == (name != "val")


def test_training_does_not_validate_on_the_test_set(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match="class folders in 'train' but none in 'val'"):
        open_splits(write_folder(tmp_path / "data", sets("train", "test")))


@pytest.mark.parametrize("name", ["validation", "test"])
def test_a_training_class_may_have_the_name_of_a_set(tmp_path: Path, name: str) -> None:
    files = {f"{split}/{word}/deep/a.png": b"a" for split in ("train", "val") for word in (name, "train", "ship")}
    assert open_splits(write_folder(tmp_path / "data", files)).train.classes == tuple(sorted((name, "train", "ship")))
    lone = {f"{word}/deep/a.png": b"a" for word in (name, "ship")}
    assert open_dataset(write_folder(tmp_path / "lone", lone), split="train").classes == tuple(sorted((name, "ship")))


@pytest.mark.parametrize(
    ("files", "top"), [(tiny_imagenet_files(), "tiny-imagenet-200"), (kaggle_files(), ""), (kaggle_files(), "ILSVRC")]
)
@pytest.mark.parametrize("packed", [False, True])
def test_published_trees_train_as_class_folders_do(
    tmp_path: Path, files: dict[str, bytes], top: str, packed: bool
) -> None:
    splits = open_splits(write_zip(tmp_path / "p.zip", files) if packed else write_folder(tmp_path / "p", files) / top)
    assert splits.train.classes == tuple(sorted({WNIDS[label] for label in LABELS.values()}))
    assert all(splits.train.classes[sample.label] in sample.file for sample in splits.train.samples)
    assert len(splits.train.samples) == len(splits.train.classes)
    found = {sample.file: splits.val.classes[sample.label] for sample in splits.val.samples}
    assert found == {name: WNIDS[label] for name, label in LABELS.items()}


# Tiny-ImageNet and Kaggle's tree


def test_the_training_set_of_tiny_imagenet_has_nested_folders_and_lists_of_boxes(tmp_path: Path) -> None:
    data = write_folder(tmp_path, tiny_imagenet_files()) / "tiny-imagenet-200" / "train"
    dataset = opened(data)
    assert dataset.layout == "class folders"
    assert [sample.label for sample in dataset.samples] == sorted(set(LABELS.values()))
    assert dataset.samples[1].file == f"{WNIDS[1]}/images/{WNIDS[1]}_0.JPEG"


def test_the_images_of_tiny_imagenet_have_the_same_names_wherever_the_command_points(tmp_path: Path) -> None:
    data = write_folder(tmp_path, tiny_imagenet_files()) / "tiny-imagenet-200"
    packed = write_zip(tmp_path / "tiny-imagenet-200.zip", tiny_imagenet_files())
    prints = {opened(path).fingerprint for path in (data, data / "val", data / "val" / "images", packed)}
    listed = DatasetSpec(data / "val", data / "val" / "val_annotations.txt")
    assert prints == {open_from_spec(listed, CLASSES).fingerprint}


@pytest.mark.parametrize("start", ["", "val"])
def test_images_of_tiny_imagenet_are_no_class_even_if_a_class_is_named_so(tmp_path: Path, start: str) -> None:
    data = write_folder(tmp_path, tiny_imagenet_files()) / "tiny-imagenet-200"
    dataset = opened(data / start, classes=[*CLASSES, ClassEntry("images", "images")])
    assert {sample.file: sample.label for sample in dataset.samples} == LABELS
    (data / "val" / "val_annotations.txt").unlink()
    dataset = opened(data / start, classes=[*CLASSES, ClassEntry("images", "images")])
    assert {sample.label for sample in dataset.samples} == {12}


def test_a_rearranged_validation_set_of_tiny_imagenet_is_read_from_its_folders(tmp_path: Path) -> None:
    files = {f"val/{WNIDS[label]}/images/{name}": DATA[name] for name, label in LABELS.items()}
    files["val/val_annotations.txt"] = tiny_imagenet_files()["tiny-imagenet-200/val/val_annotations.txt"]
    dataset = opened(write_folder(tmp_path / "tiny", files))
    assert dataset.layout == "class folders"
    assert {sample.file.rpartition("/")[2]: sample.label for sample in dataset.samples} == LABELS


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("val_9.JPEG\tn00000005\t0\t0\t9\t9", "names none of the 2 images"),
        ("a.JPEG\tn00000005\t0\t0\t9\t9\nb.JPEG\tn00000042\t0\t0\t9", "line 2 should be"),
        ("a.JPEG\tn00000005\t0\t0\t9\t9\na.JPEG\tn00000042\t0\t0\t9\t9", "line 2 names a.JPEG a second time"),
        ("a.JPEG\tn00000005\t0\t0\t9\t9", "no label for 1 of 2 images: b.JPEG"),
        ("a.JPEG\tn09999999\t0\t0\t9\t9", "the label 'n09999999' is not one of the model's 12 classes"),
        ("a.JPEG\tn00000005\t0\t0\t9\tx", "line 1 should be"),
        ("a.JPEG\t3\t0\t0\t9\t9", "line 1 should be"),
    ],
)
def test_annotations_that_do_not_fit_are_refused_with_their_line(tmp_path: Path, line: str, message: str) -> None:
    files = {"val/images/a.JPEG": b"a", "val/images/b.JPEG": b"b", "val/val_annotations.txt": line.encode()}
    found = refusal(write_folder(tmp_path / "tiny", files))
    assert "val/val_annotations.txt: " in found
    assert message in found


def test_labels_of_kaggles_validation_set_do_not_fit_its_test_set(tmp_path: Path) -> None:
    data = write_folder(tmp_path / "top", kaggle_files())
    message = refusal(data / "ILSVRC/Data/CLS-LOC/test", data / "LOC_val_solution.csv")
    assert "LOC_val_solution.csv: names none of the 1 images (it lists ILSVRC2012_val_000000" in message
    assert "the images are ILSVRC2012_test_00000001.JPEG). Pass the list for these images with --labels FILE" in message
    assert len(open_from_spec(DatasetSpec(data / "ILSVRC/Data/CLS-LOC/test", no_labels=True), CLASSES).samples) == 1


def test_the_numbers_of_images_in_kaggles_lists_are_not_taken_for_labels(tmp_path: Path) -> None:
    data = write_folder(tmp_path / "top", kaggle_files())
    message = refusal(data, data / "ILSVRC/ImageSets/CLS-LOC/val.txt")
    assert "val.txt: " in message


def test_kaggles_tree_without_its_lists_asks_for_labels(tmp_path: Path) -> None:
    files = {name: data for name, data in kaggle_files().items() if not name.startswith("LOC")}
    message = refusal(write_tar(tmp_path / "lone" / "imagenet.tar", files))
    assert "ILSVRC/Data/CLS-LOC/val: 30 images without class folders, and no label file" in message


def test_kaggles_validation_set_may_have_been_sorted_into_folders(tmp_path: Path) -> None:
    files = {
        re.sub(r"/val/(\w+\.JPEG)$", lambda m: f"/val/{WNIDS[LABELS[m[1]]]}/{m[1]}", name): data
        for name, data in kaggle_files().items()
    }
    dataset = opened(write_folder(tmp_path / "top", files))
    assert dataset.layout == "class folders"
    assert {sample.file.rpartition("/")[2]: sample.label for sample in dataset.samples} == LABELS


def test_lists_beside_kaggles_inner_folder_that_compete_are_a_question(tmp_path: Path) -> None:
    data = write_folder(tmp_path / "top", kaggle_files())
    write_list(data / "val.txt", lambda name, label: f"{name} {label}")
    message = refusal(data / "ILSVRC")
    assert f"several files may contain the labels: {data}/val.txt, {data}/LOC_val_solution.csv" in message
    assert name_of(1) in {sample.file for sample in opened(data / "ILSVRC", data / "val.txt").samples}
