"""The files of the rehearsal at ImageNet's size, and its rule of flat memory."""

import json
from collections import Counter
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from benchmarks.common.nets import class_entries
from benchmarks.rehearsal import images as rehearsal
from benchmarks.rehearsal import run
from benchmarks.rehearsal.images import LabelledImage
from benchmarks.rehearsal.processes import Watched
from prelunet.evaluator.datasets import Dataset, DatasetSpec, open_from_spec
from prelunet.evaluator.imaging.decode import decode_rgb

CLASSES = class_entries(1000)
WNIDS = [entry.wnid for entry in CLASSES]
IMAGES, PICTURES = 230, 23  # five tars of four images and 45 of five; row groups of less than 100


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> list[LabelledImage]:
    pictures = rehearsal.write_pictures(tmp_path_factory.mktemp("work") / "pictures", PICTURES, 0)
    return rehearsal.label_images(pictures, IMAGES, 0)


def contents(dataset: Dataset) -> list[tuple[int, bytes]]:
    """Return label and bytes of each image in the order of the names without folders."""
    samples = sorted(dataset.samples, key=lambda sample: sample.file.rpartition("/")[2])
    return [(sample.label, dataset.read(sample)) for sample in samples]


def test_each_picture_has_ten_copies_and_numbers_run_through_the_classes(images: list[LabelledImage]) -> None:
    assert set(Counter(image.picture for image in images).values()) == {IMAGES // PICTURES}
    assert [image.name for image in images[:2]] == ["ILSVRC2012_val_00000001", "ILSVRC2012_val_00000002"]
    assert [image.label for image in images] == sorted(image.label for image in images)


def test_pictures_have_the_sizes_of_photos_and_differ(images: list[LabelledImage]) -> None:
    decoded = [decode_rgb(picture.read_bytes()) for picture in sorted({image.picture for image in images})]
    assert Counter(picture.shape for picture in decoded).most_common(1)[0][0] == (375, 500, 3)
    assert len({picture[:200, :200].tobytes() for picture in decoded}) == PICTURES
    assert min(picture.std() for picture in decoded) > 15  # no flat colors


def test_folders_and_shards_hold_the_same_labels_and_bytes(images: list[LabelledImage], tmp_path: Path) -> None:
    expected = [(image.label, image.picture.read_bytes()) for image in images]
    for name, write in (("folders", rehearsal.write_folders), ("shards", rehearsal.write_shards)):
        write(tmp_path / name, images, WNIDS)
        assert contents(open_from_spec(DatasetSpec(tmp_path / name), CLASSES)) == expected
    assert len(list((tmp_path / "shards").iterdir())) == rehearsal.TARS


def test_parquet_has_hugging_faces_columns_class_names_and_row_groups(
    images: list[LabelledImage], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rehearsal, "PARQUET_FILES", 2)
    rehearsal.write_parquet(tmp_path / "parquet", images, WNIDS)
    first, second = (pq.ParquetFile(path) for path in sorted((tmp_path / "parquet" / "data").iterdir()))
    assert [first.metadata.row_group(number).num_rows for number in range(2)] == [100, 15]
    rows = [row for file in (first, second) for row in file.read().to_pylist()]
    assert [(row["label"], row["image"]["bytes"]) for row in rows] == [
        (image.label, image.picture.read_bytes()) for image in images
    ]
    assert rows[1]["image"]["path"] == "ILSVRC2012_val_00000002.JPEG"
    features = json.loads(first.schema_arrow.metadata[b"huggingface"])["info"]["features"]
    assert features["label"] == {"names": WNIDS, "_type": "ClassLabel"}


@pytest.mark.parametrize(
    ("memory", "flat"),
    [
        ([100.0] * 4 + [160.0] * 12, True),  # exactly the limit: 1.10 times and 50 MB
        ([100.0] * 4 + [160.0] * 11 + [161.0], False),
        ([100.0] * 15 + [300.0], True),  # the last sample comes after the last image
        ([100.0, 300.0] * 3, True),  # too short to tell
    ],
)
def test_memory_is_flat_within_the_limit_while_images_are_written(memory: list[float], flat: bool) -> None:
    writing = 15 if memory[-1] == 300 and len(memory) == 16 else len(memory)
    assert Watched(0, 60.0, 2.0, 1.0, tuple(memory), writing, 900).is_flat == flat


def test_a_dataset_too_small_for_its_parts_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        run.main(["--images", "999", "--output", str(tmp_path / "result.json")])
    assert "give 1000 to 50000" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_disk_that_is_too_small_is_refused_before_anything_is_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(run, "DISK", 10**15)
    with pytest.raises(SystemExit, match=r"needs 1000000000\.0 GB, has .* choose another"):
        run.main(["--images", "1000", "--output", str(tmp_path / "result.json"), "--work", str(tmp_path)])
    assert not list(tmp_path.iterdir())
