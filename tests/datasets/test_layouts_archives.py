"""Compressed tars are unpacked once, next to the archive. Lists of members stay small."""

import gzip
import hashlib
import os
import stat
import tarfile
import time
import tracemalloc
import zipfile
from pathlib import Path

import pytest

from prelunet.evaluator.datasets import DatasetSpec, open_dataset, open_from_spec
from prelunet.evaluator.datasets.sources.archive_index import ArchiveIndex, ArchiveMember
from prelunet.evaluator.datasets.sources.decompress import unpacked_path
from prelunet.evaluator.errors import DatasetError, EnvironmentFault
from tests.helpers.tiny_datasets import CLASSES, DATA, FOLDERS, WNIDS, write_folder, write_tar, write_zip

MANY = 8_000


@pytest.mark.parametrize("mode", ["w:gz", "w:bz2", "w:xz"])
def test_a_compressed_tar_is_the_same_dataset_and_a_remark_names_the_unpacked_copy(mode: str, tmp_path: Path) -> None:
    path = write_tar(tmp_path / "val.tar.z", FOLDERS, mode)
    dataset = open_from_spec(DatasetSpec(path), CLASSES)
    plain = open_from_spec(DatasetSpec(write_folder(tmp_path / "val", FOLDERS)), CLASSES)
    assert dataset.fingerprint == plain.fingerprint
    assert dataset.location == path
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    assert unpacked_path(path) == tmp_path / f"val.tar.z.{digest[:12]}.unpacked.tar"
    copy = unpacked_path(path)
    remark = f"{path}: compressed, so it was unpacked to {copy} ({copy.stat().st_size:,} bytes)"
    assert remark in dataset.remarks[0]
    path.unlink()
    assert all(dataset.read(sample) == FOLDERS[sample.file] for sample in dataset.samples)


def test_a_compressed_tar_is_unpacked_once_and_anew_when_it_changes(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "val.tgz", FOLDERS, "w:gz")
    open_from_spec(DatasetSpec(path), CLASSES)
    first = unpacked_path(path).stat()
    open_from_spec(DatasetSpec(path), CLASSES)
    assert unpacked_path(path).stat().st_ino == first.st_ino
    date = path.stat().st_mtime_ns
    write_tar(path, {name: data for name, data in FOLDERS.items() if name[:9] != WNIDS[0]}, "w:gz")
    os.utime(path, ns=(date, date))  # as `cp -p` or a build with a fixed date would
    assert len(open_from_spec(DatasetSpec(path), CLASSES).samples) < len(DATA)


def test_a_compressed_tar_where_nothing_may_be_written_says_how_to_read_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_tar(tmp_path / "closed" / "val.tar.gz", FOLDERS, "w:gz")
    monkeypatch.setattr(os, "access", lambda path, _mode: Path(path) != tmp_path / "closed")
    with pytest.raises(EnvironmentFault, match=r"val\.tar\.gz: compressed, and .*closed, .*writable\. Link the"):
        open_from_spec(DatasetSpec(path), CLASSES)
    (tmp_path / "val.tar.gz").symlink_to(path)
    assert len(open_from_spec(DatasetSpec(tmp_path / "val.tar.gz"), CLASSES).samples) == len(DATA)


def test_leftovers_of_a_killed_process_are_removed_when_they_are_stale(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "val [2].tar.gz", FOLDERS, "w:gz")
    rests = [tmp_path / f".val [2].tar.gz.{digit * 12}.unpacked.tar.0123abcd.tmp" for digit in "0af"]
    foreign = tmp_path / ".train.tar.gz.000000000000.unpacked.tar.0123abcd.tmp"
    for rest in (*rests, foreign):
        rest.write_bytes(b"half")
    for rest in (*rests[1:], foreign):
        os.utime(rest, (time.time() - 4000,) * 2)
    open_from_spec(DatasetSpec(path), CLASSES)
    assert [rest.exists() for rest in (*rests, foreign)] == [True, False, False, True]


def test_the_error_for_a_damaged_copy_advises_deleting_it(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "val.tar.gz", FOLDERS, "w:gz")
    open_from_spec(DatasetSpec(path), CLASSES)
    os.truncate(unpacked_path(path), 5000)
    with pytest.raises(
        DatasetError, match=r"unpacked\.tar: damaged or truncated at byte 5000\. Delete this copy to unpack"
    ):
        open_from_spec(DatasetSpec(path), CLASSES)


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
        with pytest.raises(DatasetError, match=r"damaged or truncated|compressed, but not a tar") as refused:
            open_from_spec(DatasetSpec(path), CLASSES)
        assert str(refused.value).startswith(f"{path}: ")
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*damaged, "val.tar.gz"])
    (tmp_path / "cut").write_bytes(b"\x28\xb5\x2f\xfd" + whole)
    with pytest.raises(DatasetError, match="compressed with zstd, which is not supported"):
        open_from_spec(DatasetSpec(tmp_path / "cut"), CLASSES)


def test_a_full_disk_while_unpacking_is_reported_as_such(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_tar(tmp_path / "val.tar.gz", FOLDERS, "w:gz")

    def full(_descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(EnvironmentFault, match=r"val\.tar\.gz\.[0-9a-f]{12}\.unpacked\.tar: the disk is full"):
        open_from_spec(DatasetSpec(path), CLASSES)
    assert not unpacked_path(path).exists()


def test_listing_an_archive_takes_less_than_300_bytes_per_image(tmp_path: Path) -> None:
    path = tmp_path / "many.tar"
    with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT) as archive:
        for number in range(MANY):
            archive.addfile(tarfile.TarInfo(f"{WNIDS[number % 12]}/ILSVRC2012_val_{number * 7919 % MANY:08}.JPEG"))
    tracemalloc.start()
    dataset = open_dataset(path, split="val", wnids=WNIDS)
    held, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(dataset.samples) == MANY
    assert held < 300 * MANY
    assert peak < 450 * MANY


def test_members_are_found_by_name_in_whatever_order_they_were_added() -> None:
    table = ArchiveIndex()
    expected = {}
    for number in (5, 3, 9, 1, 7):
        expected[f"a/{number}"] = ArchiveMember(number, number + 1, number + 2, 1, number % 2, 2**32 - number, number)
        table.add(f"a/{number}", expected[f"a/{number}"])
    table.add("a", ArchiveMember(1, 2, 3))
    table.add("a-b/c", ArchiveMember(4, 5, 6))
    table.add("b/c", ArchiveMember(7, 8, 9))
    assert table.sort() is None
    assert all(table.find(name) == member for name, member in expected.items())
    assert table.find("a/4") is None
    assert table.find("z") is None
    subtree = table.subtree("a")
    assert subtree.names == ["1", "3", "5", "7", "9"]
    assert all(subtree.find(name.removeprefix("a/")) == member for name, member in expected.items())
    table.add("b/c", ArchiveMember(0, 0, 0))
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
    assert len(open_from_spec(DatasetSpec(path), CLASSES).samples) == len(DATA)


def test_json_files_beside_images_in_class_folders_do_not_make_a_shard(tmp_path: Path) -> None:
    notes = {name.replace(".JPEG", ".json"): b'{"author": "x"}' for name in FOLDERS}
    dataset = open_from_spec(DatasetSpec(write_tar(tmp_path / "val.tar", FOLDERS | notes)), CLASSES)
    assert (dataset.layout, len(dataset.samples)) == ("class folders", len(DATA))
