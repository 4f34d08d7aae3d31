"""The same images in every layout give the same report, and remarks describe how labels were found."""

import io
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from prelunet.evaluator.datasets import Dataset, DatasetSpec, open_from_spec
from prelunet.evaluator.imaging.decode import decode_rgb
from prelunet.evaluator.protocols import build_protocol
from prelunet.evaluator.reporting.gallery import build_gallery
from prelunet.evaluator.reporting.report import build_report
from prelunet.evaluator.validation.run_log import find_dataset
from tests.helpers.fakes import FakeSession, fake_contract, validated
from tests.helpers.tiny_datasets import (
    BAD,
    CLASSES,
    DATA,
    DEVKIT,
    FOLDERS,
    IMAGES,
    LABELS,
    NAMES,
    WNIDS,
    as_both,
    as_cls,
    as_json,
    kaggle_files,
    name_of,
    shard_files,
    tiny_imagenet_files,
    write_devkit,
    write_folder,
    write_list,
    write_tar,
    write_zip,
)

CONTRACT = replace(fake_contract(), classes=CLASSES)
CENTER = build_protocol("center", CONTRACT)


def class_folders(place: Path) -> DatasetSpec:
    return DatasetSpec(write_folder(place / "val", FOLDERS))


def class_folders_in_a_zip(place: Path) -> DatasetSpec:
    return DatasetSpec(write_zip(place / "val.zip", {f"imagenet/{name}": data for name, data in FOLDERS.items()}))


def folders_named_by_class(place: Path) -> DatasetSpec:
    # The folders of cranes and maillots are named by wnid, because those class names are ambiguous.
    names = {WNIDS[index]: name.replace(" ", "_").upper() for index, name in enumerate(NAMES) if name != "crane"}
    files = {f"{names.get(name[:9], name[:9])}/{name[10:]}": data for name, data in FOLDERS.items()}
    return DatasetSpec(write_folder(place / "val", files))


def flat_with_a_devkit(place: Path) -> DatasetSpec:
    return DatasetSpec(write_folder(place / "images", DATA), write_devkit(place / "devkit_t12"))


def flat_with_a_devkit_beside(place: Path) -> DatasetSpec:
    write_devkit(place / "ILSVRC2012_devkit_t12")
    return DatasetSpec(write_folder(place / "images", DATA))


def root_with_val_and_devkit(place: Path) -> DatasetSpec:
    write_devkit(place / "root" / "ILSVRC2012_devkit_t12")
    write_folder(place / "root" / "train" / "n01", {"a.png": b""})
    write_folder(place / "root" / "val", DATA)
    return DatasetSpec(place / "root")


def original_tar_with_a_text_mapping(place: Path) -> DatasetSpec:
    data = write_devkit(place / "kit") / "data"
    (data / "meta.mat").unlink()
    (data / "synsets.txt").write_text("".join(f"{DEVKIT[i]} {wnid} {NAMES[i]}\n" for i, wnid in enumerate(WNIDS)))
    return DatasetSpec(write_tar(place / "ILSVRC2012_img_val.tar", DATA), data)


def tar_gz_with_a_list_beside(place: Path) -> DatasetSpec:
    write_list(place / "val.txt", lambda name, label: f"{name} {label}")
    return DatasetSpec(write_tar(place / "val.tar.gz", DATA, "w:gz"))


def zip_with_a_list_inside(place: Path) -> DatasetSpec:
    listed = write_list(place / "l", lambda name, label: f"{name},{WNIDS[label]}", "file,wnid\n").read_bytes()
    return DatasetSpec(write_zip(place / "val.zip", {"labels.csv": listed} | DATA))


def flat_with_wnids(place: Path) -> DatasetSpec:
    listed = write_list(place / "answers.txt", lambda name, label: f"val/{name}\t{WNIDS[label]}")
    return DatasetSpec(write_folder(place / "images", DATA), listed)


def flat_with_kaggle_csv(place: Path) -> DatasetSpec:
    def line(name: str, label: int) -> str:
        return f"{name.removesuffix('.JPEG')},{WNIDS[label]} 85 1 499 272 {WNIDS[label]} 0 0 9 9 "

    return DatasetSpec(
        write_folder(place / "images", DATA),
        write_list(place / "LOC_val_solution.csv", line, "ImageId,PredictionString\n"),
    )


def flat_with_positions(place: Path) -> DatasetSpec:
    (place / "indices.txt").write_text("".join(f"{label}\n" for label in LABELS.values()))
    return DatasetSpec(write_folder(place / "images", DATA), place / "indices.txt")


def wnids_in_the_names(place: Path) -> DatasetSpec:
    files = {f"{name.removesuffix('.JPEG')}_{WNIDS[LABELS[name]]}.JPEG": data for name, data in DATA.items()}
    return DatasetSpec(write_tar(place / "val_images.tar", files))


def class_folders_in_valid(place: Path) -> DatasetSpec:
    write_folder(place / "pets" / "train" / WNIDS[2], {"a.png": b""})
    write_folder(place / "pets" / "test", {"b.png": b""})
    write_folder(place / "pets" / "valid", FOLDERS)
    return DatasetSpec(place / "pets")


def flat_images_in_validation(place: Path) -> DatasetSpec:
    listed = write_list(place / "l", lambda name, label: f"{name},{WNIDS[label]}", "file,wnid\n").read_bytes()
    files = {f"set/validation/{name}": data for name, data in DATA.items()} | {"set/train/x/a.png": b""}
    return DatasetSpec(write_tar(place / "set.tar", files | {"set/validation/labels.csv": listed}))


def class_folders_in_test(place: Path) -> DatasetSpec:
    write_folder(place / "cifar" / "train" / WNIDS[2], {"a.png": b""})
    write_folder(place / "cifar" / "test", FOLDERS)
    return DatasetSpec(place / "cifar")


def tiny_imagenet(place: Path) -> DatasetSpec:
    return DatasetSpec(write_folder(place, tiny_imagenet_files()) / "tiny-imagenet-200")


def tiny_imagenet_in_its_zip(place: Path) -> DatasetSpec:
    return DatasetSpec(write_zip(place / "tiny-imagenet-200.zip", tiny_imagenet_files()))


def val_of_tiny_imagenet(place: Path) -> DatasetSpec:
    return DatasetSpec(write_folder(place, tiny_imagenet_files()) / "tiny-imagenet-200" / "val")


def kaggle(place: Path) -> DatasetSpec:
    return DatasetSpec(write_folder(place / "top", kaggle_files()))


def kaggle_from_the_inner_folder(place: Path) -> DatasetSpec:
    return DatasetSpec(write_folder(place / "top", kaggle_files()) / "ILSVRC")


def kaggle_in_its_zip(place: Path) -> DatasetSpec:
    return DatasetSpec(write_zip(place / "imagenet-object-localization-challenge.zip", kaggle_files()))


def kaggle_in_a_tar_below_one_folder(place: Path) -> DatasetSpec:
    return DatasetSpec(write_tar(place / "k.tar", {f"kaggle/{name}": data for name, data in kaggle_files().items()}))


def shards(place: Path) -> DatasetSpec:
    parts = (range(1, 12), range(12, 13), range(13, IMAGES + 1))
    for number, part in enumerate(parts):
        write_tar(place / "shards" / f"imagenet-val-{number:03}.tar", shard_files(part, as_both))
        write_tar(place / "shards" / f"imagenet-train-{number:03}.tar", shard_files(range(1, 3), as_cls))
    return DatasetSpec(place / "shards")


def one_shard(place: Path) -> DatasetSpec:
    return DatasetSpec(write_tar(place / "one.tar", shard_files(range(1, IMAGES + 1), as_cls)))


def one_shard_with_json(place: Path) -> DatasetSpec:
    return DatasetSpec(write_tar(place / "one.tar", shard_files(range(1, IMAGES + 1), as_json)))


LAYOUTS: dict[Callable[[Path], DatasetSpec], str] = {
    class_folders: "class folders",
    class_folders_in_a_zip: "class folders",
    folders_named_by_class: "class folders",
    flat_with_a_devkit: "flat, devkit labels",
    flat_with_a_devkit_beside: "flat, devkit labels",
    root_with_val_and_devkit: "flat, devkit labels",
    original_tar_with_a_text_mapping: "flat, devkit labels",
    tar_gz_with_a_list_beside: "flat, labels from val.txt",
    zip_with_a_list_inside: "flat, labels from labels.csv",
    flat_with_wnids: "flat, labels from answers.txt",
    flat_with_kaggle_csv: "flat, labels from LOC_val_solution.csv",
    flat_with_positions: "flat, labels from indices.txt",
    wnids_in_the_names: "flat, wnids in the names",
    class_folders_in_valid: "class folders",
    flat_images_in_validation: "flat, labels from labels.csv",
    class_folders_in_test: "class folders",
    tiny_imagenet: "flat, labels from val_annotations.txt",
    tiny_imagenet_in_its_zip: "flat, labels from val_annotations.txt",
    val_of_tiny_imagenet: "flat, labels from val_annotations.txt",
    kaggle: "flat, labels from LOC_val_solution.csv",
    kaggle_from_the_inner_folder: "flat, labels from LOC_val_solution.csv",
    kaggle_in_its_zip: "flat, labels from LOC_val_solution.csv",
    kaggle_in_a_tar_below_one_folder: "flat, labels from LOC_val_solution.csv",
    shards: "webdataset shards",
    one_shard: "webdataset shards",
    one_shard_with_json: "webdataset shards",
}


def opened(place: DatasetSpec) -> Dataset:
    return open_from_spec(place, CLASSES)


def figures(dataset: Dataset, folder: Path) -> dict[str, Any]:
    """Return the parts of a report that depend on the model: everything but the file names."""
    report = build_report(validated(FakeSession(CONTRACT), dataset, CENTER, folder))
    kept = ("images", "evaluated", "refused", "top1_error", "top5_error", "top1_interval", "classes", "confusions")
    return {key: report[key] for key in kept}


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    place = tmp_path_factory.mktemp("expected")
    return figures(opened(class_folders(place)), place / "run")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_gives_the_same_report_from_the_same_images(
    layout: Callable[[Path], DatasetSpec], tmp_path: Path, expected: dict[str, Any]
) -> None:
    place = layout(tmp_path)
    dataset = opened(place)
    assert dataset.layout == LAYOUTS[layout]
    assert [sample.file for sample in dataset.samples] == sorted(sample.file for sample in dataset.samples)
    found = sorted((dataset.read(sample), sample.label) for sample in dataset.samples)
    assert found == sorted((data, LABELS[name]) for name, data in DATA.items())
    assert all(sample.size == len(dataset.read(sample)) for sample in dataset.samples)
    assert figures(dataset, tmp_path / "run") == expected
    assert (expected["images"], expected["refused"]) == (IMAGES, 1)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_images_of_a_run_are_found_again_for_its_report(
    layout: Callable[[Path], DatasetSpec], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = replace(layout(tmp_path), limit=11, classes=(WNIDS[1], WNIDS[3], WNIDS[6], WNIDS[9], WNIDS[10]))
    monkeypatch.chdir(tmp_path)  # a path that was relative is still found from another folder
    labels = given.labels and given.labels.relative_to(tmp_path)
    dataset = opened(replace(given, path=given.path.relative_to(tmp_path), labels=labels))
    assert len(dataset.samples) == 11
    run = validated(FakeSession(CONTRACT), dataset, CENTER, tmp_path / "run")
    monkeypatch.chdir("/")
    assert find_dataset(tmp_path / "run") is not None
    gallery = build_gallery(run, None)
    assert gallery.missing is None
    assert gallery.mistakes
    assert all(mistake.thumbnail is not None for mistake in gallery.mistakes)
    assert build_gallery(run, given.path) == gallery


def test_the_tiny_dataset_contains_odd_files_that_decode() -> None:
    kinds: set[str] = set()
    for name, data in DATA.items():
        if name != name_of(BAD):
            assert decode_rgb(data).shape[2] == 3
            image = Image.open(io.BytesIO(data))
            kinds.add(f"{image.mode} {image.format}")
    assert kinds == {"RGB JPEG", "L JPEG", "CMYK JPEG", "RGB PNG"}


def test_remarks_describe_what_was_found(tmp_path: Path) -> None:
    def remarks(layout: Callable[[Path], DatasetSpec]) -> str:
        (tmp_path / layout.__name__).mkdir()
        return "\n".join(opened(layout(tmp_path / layout.__name__)).remarks)

    few_folders = remarks(class_folders)
    assert (
        f"no folders for 2 of the model's 12 classes ({WNIDS[4]}, {WNIDS[11]}); class indices are still those"
        in few_folders
    )
    assert "matched to the model's classes by class names" in remarks(folders_named_by_class)
    beside = remarks(flat_with_a_devkit_beside)
    assert "ILSVRC2012_devkit_t12/data/ILSVRC2012_validation_ground_truth.txt, ids mapped by" in beside
    assert "meta.mat" in beside
    assert "val.txt, read as class indices, counted from 0 (found 0 to 10)" in remarks(tar_gz_with_a_list_beside)
    assert "labels.csv, read as wnids" in remarks(zip_with_a_list_inside)
    assert "line i is the label of the i-th name in sorted order" in remarks(flat_with_positions)
    assert "3 shards, imagenet-val-000.tar to imagenet-val-002.tar" in remarks(shards)
    assert "/pets: contains test, train, valid; the images are those in 'valid'" in remarks(class_folders_in_valid)
    assert "/cifar: contains test, train; the images are those in 'test'" in remarks(class_folders_in_test)
    assert "val/val_annotations.txt, read as wnids" in remarks(tiny_imagenet)
    of_kaggle = remarks(kaggle)
    assert "top: Kaggle's copy of ILSVRC; the images are those in ILSVRC/Data/CLS-LOC/val" in of_kaggle
    assert "top/LOC_val_solution.csv, read as wnids (columns 'ImageId' and 'PredictionString')" in of_kaggle


@pytest.mark.parametrize("layout", [flat_with_positions, one_shard, shards, class_folders])
def test_images_are_opened_without_labels_only_on_request(
    layout: Callable[[Path], DatasetSpec], tmp_path: Path
) -> None:
    dataset = opened(DatasetSpec(layout(tmp_path).path, no_labels=True))
    assert dataset.layout == "unlabelled"
    assert sorted(dataset.read(sample) for sample in dataset.samples) == sorted(DATA.values())
    assert {sample.label for sample in dataset.samples} == {-1}
    run = validated(FakeSession(CONTRACT), dataset, CENTER, tmp_path / "run")
    assert not run.has_labels
    assert find_dataset(tmp_path / "run") == dataset.spec


def test_a_log_with_classes_unknown_to_the_model_does_not_prevent_a_report(tmp_path: Path) -> None:
    dataset = opened(class_folders(tmp_path))
    run = validated(FakeSession(CONTRACT), dataset, CENTER, tmp_path / "run")
    (tmp_path / "run" / "log.jsonl").write_text(
        json.dumps({"event": "start", "dataset": str(dataset.location), "classes": ["n99"]}) + "\n"
    )
    gallery = build_gallery(run, None)
    assert gallery.missing is not None
    assert gallery.mistakes[0].thumbnail is None
