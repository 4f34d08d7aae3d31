"""Compressed tars are unpacked once, beside themselves; lists of members stay small."""

import gzip
import os
import stat
import tarfile
import tracemalloc
import zipfile
from pathlib import Path

import pytest

from evaluator.datasets import DatasetPlace, open_dataset, open_place
from evaluator.datasets.members import Member, MemberTable
from evaluator.datasets.unpacking import unpacked_path
from evaluator.errors import DatasetError, EnvironmentFault
from miniature import CLASSES, DATA, FOLDERS, WNIDS, write_folder, write_tar, write_zip

MANY = 20_000


@pytest.mark.parametrize("mode", ["w:gz", "w:bz2", "w:xz"])
def test_a_compressed_tar_is_the_same_dataset_and_says_where_it_was_unpacked(mode: str, tmp_path: Path) -> None:
    path = write_tar(tmp_path / "val.tar.z", FOLDERS, mode)
    dataset = open_place(DatasetPlace(path), CLASSES)
    plain = open_place(DatasetPlace(write_folder(tmp_path / "val", FOLDERS)), CLASSES)
    assert dataset.fingerprint == plain.fingerprint
    assert dataset.location == path
    assert unpacked_path(path) == tmp_path / "val.tar.z.unpacked.tar"
    size = unpacked_path(path).stat().st_size
    assert f"{path}: compressed, so it was unpacked to {unpacked_path(path)} ({size:,} bytes)" in dataset.remarks[0]
    path.unlink()
    assert all(dataset.read(sample) == FOLDERS[sample.file] for sample in dataset.samples)


def test_a_compressed_tar_is_unpacked_once_and_anew_when_it_changes(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "val.tgz", FOLDERS, "w:gz")
    open_place(DatasetPlace(path), CLASSES)
    first = unpacked_path(path).stat()
    open_place(DatasetPlace(path), CLASSES)
    assert unpacked_path(path).stat().st_ino == first.st_ino
    write_tar(path, {name: data for name, data in FOLDERS.items() if name[:9] != WNIDS[0]}, "w:gz")
    os.utime(path, ns=(first.st_mtime_ns + 10**9,) * 2)
    assert len(open_place(DatasetPlace(path), CLASSES).samples) < len(DATA)


def test_a_compressed_tar_in_a_folder_that_may_not_be_written_goes_to_the_temporary_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "closed").mkdir()
    monkeypatch.setattr("evaluator.datasets.unpacking.tempfile.gettempdir", lambda: os.fspath(tmp_path))
    monkeypatch.setattr(os, "access", lambda path, _mode: os.fspath(path) != os.fspath(tmp_path / "closed"))
    path = write_tar(tmp_path / "closed" / "val.tar.gz", FOLDERS, "w:gz")
    open_place(DatasetPlace(path), CLASSES)
    assert [entry.name for entry in (tmp_path / "closed").iterdir()] == ["val.tar.gz"]
    assert (tmp_path / "val.tar.gz.unpacked.tar").exists()


def test_damaged_and_foreign_compressed_files_are_refused_and_leave_nothing(tmp_path: Path) -> None:
    whole = write_tar(tmp_path / "val.tar.gz", FOLDERS, "w:gz").read_bytes()
    flipped = bytes(byte ^ (0x55 if place == len(whole) // 2 else 0) for place, byte in enumerate(whole))
    damaged = {
        "cut": whole[:-900],
        "flipped": flipped,
        "text": gzip.compress(b"a list\n" * 99),
        "empty": gzip.compress(b""),
    }
    for name, data in damaged.items():
        path = tmp_path / name
        path.write_bytes(data)
        with pytest.raises(DatasetError, match=r"damaged or cut|compressed, but no tar") as refused:
            open_place(DatasetPlace(path), CLASSES)
        assert str(refused.value).startswith(f"{path}: ")
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*damaged, "val.tar.gz"])
    (tmp_path / "cut").write_bytes(b"\x28\xb5\x2f\xfd" + whole)
    with pytest.raises(DatasetError, match="compressed with zstd, which cannot be unpacked here"):
        open_place(DatasetPlace(tmp_path / "cut"), CLASSES)


def test_a_full_disk_while_unpacking_is_told_as_such(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_tar(tmp_path / "val.tar.gz", FOLDERS, "w:gz")

    def full(_descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(EnvironmentFault, match=r"val\.tar\.gz\.unpacked\.tar: the disk is full"):
        open_place(DatasetPlace(path), CLASSES)
    assert not unpacked_path(path).exists()


def test_listing_an_archive_holds_less_than_300_bytes_an_image(tmp_path: Path) -> None:
    path = tmp_path / "many.tar"
    with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT) as archive:
        for number in range(MANY):
            archive.addfile(tarfile.TarInfo(f"{WNIDS[number % 12]}/ILSVRC2012_val_{number * 7919 % MANY:08}.JPEG"))
    tracemalloc.start()
    dataset = open_dataset(path, split="val", class_names=WNIDS)
    held, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(dataset.samples) == MANY
    assert held < 300 * MANY
    assert peak < 450 * MANY


def test_members_are_found_by_name_however_they_came() -> None:
    table = MemberTable()
    expected = {}
    for number in (5, 3, 9, 1, 7):
        expected[f"a/{number}"] = Member(number, number + 1, number + 2, 1, number % 2, 2**32 - number, number)
        table.add(f"a/{number}", expected[f"a/{number}"])
    table.add("a", Member(1, 2, 3))
    table.add("a-b/c", Member(4, 5, 6))
    table.add("b/c", Member(7, 8, 9))
    assert table.sort() is None
    assert all(table.find(name) == member for name, member in expected.items())
    assert table.find("a/4") is None
    assert table.find("z") is None
    below = table.below("a")
    assert below.names == ["1", "3", "5", "7", "9"]
    assert all(below.find(name.removeprefix("a/")) == member for name, member in expected.items())
    table.add("b/c", Member(0, 0, 0))
    assert table.sort() == "b/c"


@pytest.mark.parametrize("kind", ["link", "encrypted", "packed"])
def test_a_text_that_cannot_be_read_in_place_is_left_out_of_a_zip(kind: str, tmp_path: Path) -> None:
    path = write_zip(tmp_path / "val.zip", FOLDERS)
    info = zipfile.ZipInfo("val.txt")
    if kind == "link":
        info.external_attr = (stat.S_IFLNK | 0o777) << 16
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr(info, "a.txt", zipfile.ZIP_LZMA if kind == "packed" else zipfile.ZIP_STORED)
    if kind == "encrypted":
        data = bytearray(path.read_bytes())
        data[data.rindex(b"PK\x01\x02") + 8] |= 1
        path.write_bytes(data)
    assert len(open_place(DatasetPlace(path), CLASSES).samples) == len(DATA)


def test_notes_beside_images_in_class_folders_make_no_shard(tmp_path: Path) -> None:
    notes = {name.replace(".JPEG", ".json"): b'{"author": "x"}' for name in FOLDERS}
    dataset = open_place(DatasetPlace(write_tar(tmp_path / "val.tar", FOLDERS | notes)), CLASSES)
    assert (dataset.layout, len(dataset.samples)) == ("class folders", len(DATA))
