"""A folder, a tar and a zip of the same images are the same dataset. Ambiguous or damaged datasets are refused."""

import io
import os
import pickle
import stat
import tarfile
import zipfile
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prelunet.evaluator.datasets import Dataset, Sample, open_dataset
from prelunet.evaluator.errors import DatasetError, EnvironmentFault, PreluNetError, UsageError

# Contents need not be images, because a dataset returns bytes. Unsorted, of different lengths.
VAL = {
    "owl/b.JPG": b"owl b" * 300,
    "owl/a.png": b"owl a",
    "ant/2020/deep/x.webp": b"ant x" * 7,
    "ant/y.Tiff": b"",
    "cat/z.ppm": bytes(range(256)) * 9,
}
TRAIN = {"owl/t.gif": b"owl t", "ant/t.bmp": b"ant tt", "cat/t.jpeg": b"cat"}
IGNORED = {
    "owl/notes.txt": b"no image",
    "owl/.hidden.png": b"no",
    "owl/._b.JPG": b"resource fork",
    ".git/objects/a.png": b"no",
    "__MACOSX/owl/b.JPG": b"no",
    "loose.png": b"in no class",
}

Pack = Callable[[Path, dict[str, bytes]], Path]


def as_folder(place: Path, files: dict[str, bytes]) -> Path:
    for name, data in files.items():
        path = place / "folder" / name
        if name.endswith("/"):
            path.mkdir(parents=True, exist_ok=True)
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
    return place / "folder"


def as_tar(place: Path, files: dict[str, bytes], *, prefix: str = "") -> Path:
    with tarfile.open(place / "data.tar", "w") as archive:
        for name, data in files.items():
            info = tarfile.TarInfo(prefix + name.rstrip("/"))
            info.type = tarfile.DIRTYPE if name.endswith("/") else tarfile.REGTYPE
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return place / "data.tar"


def as_tar_with_dots(place: Path, files: dict[str, bytes]) -> Path:
    return as_tar(place, files, prefix="./")


def as_zip(place: Path, files: dict[str, bytes]) -> Path:
    with zipfile.ZipFile(place / "data.zip", "w") as archive:
        for number, (name, data) in enumerate(files.items()):
            method = zipfile.ZIP_STORED if number % 2 or name.endswith("/") else zipfile.ZIP_DEFLATED
            archive.writestr(zipfile.ZipInfo(name), data, method)
    return place / "data.zip"


PACKS = [as_folder, as_tar, as_tar_with_dots, as_zip]
packed = pytest.mark.parametrize("pack", PACKS)


def within(folder: str, files: dict[str, bytes]) -> dict[str, bytes]:
    return {f"{folder}/{name}": data for name, data in files.items()}


def contents(dataset: Dataset) -> dict[str, bytes]:
    return {sample.file: dataset.read(sample) for sample in dataset.samples}


@packed
def test_samples_are_the_images_sorted_by_name_with_labels_in_folder_order(pack: Pack, tmp_path: Path) -> None:
    path = pack(tmp_path, VAL | IGNORED)
    dataset = open_dataset(path, split="val")
    assert dataset.location == path
    assert dataset.classes == ("ant", "cat", "owl")
    assert list(dataset.samples) == [
        Sample("ant/2020/deep/x.webp", 0, 35),
        Sample("ant/y.Tiff", 0, 0),
        Sample("cat/z.ppm", 1, 2304),
        Sample("owl/a.png", 2, 5),
        Sample("owl/b.JPG", 2, 1500),
    ]
    assert contents(dataset) == VAL


@packed
@pytest.mark.parametrize("top", ["", "archive-1.0/"])
def test_folder_of_the_split_is_entered_also_below_a_single_top_folder(pack: Pack, top: str, tmp_path: Path) -> None:
    files = within("val", VAL) | within("train", TRAIN) | {"README.md": b"hello"}
    path = pack(tmp_path, {top + name: data for name, data in files.items()})
    for split, expected in (("val", VAL), ("train", TRAIN)):
        dataset = open_dataset(path, split=split)
        assert dataset.location == path
        assert contents(dataset) == expected


@packed
def test_single_top_folder_is_entered_without_splits_too(pack: Pack, tmp_path: Path) -> None:
    assert contents(open_dataset(pack(tmp_path, within("flowers", VAL)), split="val")) == VAL


@packed
def test_packing_does_not_change_the_fingerprint(pack: Pack, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    plain = open_dataset(as_folder(tmp_path / "other", VAL), split="val")
    assert open_dataset(pack(tmp_path, within("top/val", VAL)), split="val").fingerprint == plain.fingerprint


@packed
def test_class_named_like_a_split_stays_a_class(pack: Pack, tmp_path: Path) -> None:
    files = {"train/a.png": b"a", "ship/b.png": b"b"}
    assert open_dataset(pack(tmp_path, files), split="train").classes == ("ship", "train")


@packed
def test_another_split_is_never_used_instead_of_the_requested_one(pack: Pack, tmp_path: Path) -> None:
    path = pack(tmp_path, within("train", TRAIN) | {"val/flat.png": b"in no class"})
    with pytest.raises(DatasetError, match="class folders in 'train' but none in 'val'"):
        open_dataset(path, split="val")


@packed
def test_labels_follow_the_class_list_of_the_model(pack: Pack, tmp_path: Path) -> None:
    model = ("owl", "bee", "cat", "ant")
    dataset = open_dataset(pack(tmp_path, VAL), split="val", wnids=model)
    assert dataset.classes == model
    assert [(sample.file, sample.label) for sample in dataset.samples] == [
        ("ant/2020/deep/x.webp", 3),
        ("ant/y.Tiff", 3),
        ("cat/z.ppm", 2),
        ("owl/a.png", 0),
        ("owl/b.JPG", 0),
    ]


@packed
def test_folders_that_the_model_does_not_know_are_named(pack: Pack, tmp_path: Path) -> None:
    path = pack(tmp_path, VAL | {f"new{number}/a.png": b"a" for number in range(6)})
    with pytest.raises(DatasetError) as refusal:
        open_dataset(path, split="val", wnids=["owl", "bee", "cat", "ant"])
    assert "6 of 9 class folders are not among the model's 4 classes: new0, new1, new2, new3, new4, …" in str(
        refusal.value
    )
    assert "The model's classes start with owl, bee, cat, ant" in str(refusal.value)


@packed
@pytest.mark.parametrize("rubbish", [{}, {"empty/notes.txt": b"no image"}, {"empty/.hidden.png": b"no"}])
def test_class_folder_without_images_is_named(pack: Pack, rubbish: dict[str, bytes], tmp_path: Path) -> None:
    path = pack(tmp_path, VAL | {"empty/": b""} | rubbish)
    with pytest.raises(DatasetError, match="no images in 1 of 4 class folders: empty"):
        open_dataset(path, split="val")


@packed
def test_an_empty_class_folder_is_a_note_where_images_are_evaluated(pack: Pack, tmp_path: Path) -> None:
    path = pack(tmp_path, {**VAL, "empty/": b"", "empty/notes.txt": b"no image"})
    dataset = open_dataset(path, split="val", wnids=[*sorted({name.split("/")[0] for name in VAL}), "empty"])
    assert contents(dataset) == VAL
    assert f"{path}: 1 class folders are empty: empty" in dataset.remarks


@packed
def test_what_systems_keep_in_folders_is_no_image_and_no_class(pack: Pack, tmp_path: Path) -> None:
    kept = {
        "cat/@eaDir/a.png/THUMB.jpg": b"small", "@eaDir/b.png": b"small", "cat/deep/@eaDir/c.png": b"small",
        "lost+found/d.png": b"found", "__MACOSX/cat/._a.png": b"mac", "$RECYCLE.BIN/e.png": b"thrown away",
        "System Volume Information/f.png": b"windows",
    }  # fmt: skip
    dataset = open_dataset(pack(tmp_path, VAL | kept), split="val", wnids=sorted({n.split("/")[0] for n in VAL}))
    assert contents(dataset) == VAL


@packed
def test_images_without_class_folders_are_refused_with_their_number(pack: Pack, tmp_path: Path) -> None:
    path = pack(tmp_path, {"a.png": b"a", "b.jpg": b"b", "c.txt": b"c"})
    with pytest.raises(DatasetError, match=r"no class folders found \(2 images outside any folder\). Put"):
        open_dataset(path, split="val")


def test_missing_path_is_a_usage_error(tmp_path: Path) -> None:
    for path in (tmp_path / "nowhere", as_tar(tmp_path, VAL) / "val"):
        with pytest.raises(UsageError, match=r"no such file or folder\. Pass a folder"):
            open_dataset(path, split="val")


@packed
def test_reader_works_in_threads_and_other_processes(pack: Pack, tmp_path: Path) -> None:
    dataset = open_dataset(pack(tmp_path, VAL), split="val")
    samples = list(dataset.samples) * 40
    expected = [VAL[sample.file] for sample in samples]
    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(dataset.read, samples)) == expected
    with ProcessPoolExecutor(1, mp_context=get_context("fork")) as processes:
        assert list(processes.map(dataset.read, samples, chunksize=50)) == expected
    assert contents(pickle.loads(pickle.dumps(dataset))) == VAL


def test_links_to_files_and_to_folders_are_followed_at_any_depth(tmp_path: Path) -> None:
    root = as_folder(tmp_path, VAL)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "bee.png").write_bytes(b"bee")
    (root / "bee").symlink_to(elsewhere)
    (root / "cat" / "link.png").symlink_to(elsewhere / "bee.png")
    (root / "cat" / "more").symlink_to(elsewhere)
    (root / "cat" / "loop").symlink_to(root)  # links to a folder around them are not followed, or this would not end
    (elsewhere / "self").symlink_to(elsewhere)
    linked = {"bee/bee.png": b"bee", "cat/link.png": b"bee", "cat/more/bee.png": b"bee"}
    assert contents(open_dataset(root, split="val")) == VAL | linked


def test_all_broken_links_are_named_at_once_with_their_likely_cause(tmp_path: Path) -> None:
    root = as_folder(tmp_path, VAL)
    for number in range(7):
        (root / "cat" / f"gone{number}.png").symlink_to(tmp_path / "nowhere")
    with pytest.raises(
        DatasetError, match=r"do not exist: 7, cat/gone0\.png.*cat/gone4\.png, …\. The copy may lack what"
    ):
        open_dataset(root, split="val")


def test_pipe_with_an_image_name_is_named(tmp_path: Path) -> None:
    root = as_folder(tmp_path, VAL)
    os.mkfifo(root / "cat" / "pipe.png")
    with pytest.raises(DatasetError, match=r"cat/pipe\.png: named like an image, but not a regular file"):
        open_dataset(root, split="val")
    with pytest.raises(DatasetError, match="neither a folder nor a regular file"):
        open_dataset(root / "cat" / "pipe.png", split="val")


def test_name_that_is_not_utf8_is_refused_in_printable_words(tmp_path: Path) -> None:
    root = as_folder(tmp_path, VAL)
    Path(os.fsdecode(os.fsencode(root) + b"/cat/caf\xe9.png")).write_bytes(b"a")
    with pytest.raises(DatasetError, match=r"caf\\udce9\.png' is not valid UTF-8") as refusal:
        open_dataset(root, split="val")
    str(refusal.value).encode()


def test_unreadable_folder_and_failing_disk_give_different_errors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = as_folder(tmp_path, VAL)

    def failing(number: int) -> Callable[[Path], None]:
        def scandir(path: Path) -> None:
            raise OSError(number, os.strerror(number), str(path))

        return scandir

    monkeypatch.setattr(os, "scandir", failing(13))
    with pytest.raises(DatasetError, match=r"folder: permission denied; make it readable for this user"):
        open_dataset(root, split="val")
    monkeypatch.setattr(os, "scandir", failing(5))
    with pytest.raises(EnvironmentFault, match="the device failed"):
        open_dataset(root, split="val")


def test_file_that_vanished_is_named(tmp_path: Path) -> None:
    dataset = open_dataset(as_folder(tmp_path, VAL), split="val")
    (tmp_path / "folder" / "cat" / "z.ppm").unlink()
    with pytest.raises(DatasetError, match=r"cat/z\.ppm: no longer exists"):
        dataset.read(dataset.samples[2])


@pytest.mark.parametrize("pack", [as_tar, as_zip])
def test_archive_that_vanished_or_shrank_is_named(pack: Pack, tmp_path: Path) -> None:
    path = pack(tmp_path, VAL)
    dataset = open_dataset(path, split="val")
    os.truncate(path, 250)
    with pytest.raises(DatasetError, match=r"the member cat/z\.ppm is damaged"):
        dataset.read(dataset.samples[2])
    path.unlink()
    with pytest.raises(DatasetError, match=rf"{path.name}: no longer exists"):
        dataset.read(dataset.samples[2])


def test_every_changed_byte_of_a_zipped_image_is_noticed(tmp_path: Path) -> None:
    files = {"cat/a.png": b"cat a" * 9, "owl/b.png": b"owl b" * 9}  # the first is deflated, the second stored
    path = as_zip(tmp_path, files)
    dataset = open_dataset(path, split="val")
    whole = path.read_bytes()
    with zipfile.ZipFile(path) as archive:
        end = archive.start_dir
    noticed = 0
    for place in range(end):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 0x10]) + whole[place + 1 :])
        try:
            assert contents(dataset) == files
        except DatasetError as error:
            noticed += "is damaged" in str(error)
    assert noticed >= len(files["owl/b.png"])


def test_zip_bomb_is_not_unpacked_beyond_the_promised_size(tmp_path: Path) -> None:
    path = as_zip(tmp_path, {"cat/a.png": bytes(50_000_000), "owl/b.png": b"b"})
    data = bytearray(path.read_bytes())
    directory = data.index(b"PK\x01\x02")
    data[directory + 24 : directory + 28] = (1000).to_bytes(4, "little")  # uncompressed size
    path.write_bytes(data)
    dataset = open_dataset(path, split="val")
    with pytest.raises(DatasetError, match=r"cat/a\.png is damaged"):
        dataset.read(dataset.samples[0])


@pytest.mark.parametrize("name", ["../evil.png", "/etc/evil.png", "cat/../../evil.png", "../../etc/passwd"])
@pytest.mark.parametrize("pack", [as_tar, as_zip])
def test_member_that_leads_out_of_the_archive_is_refused(pack: Pack, name: str, tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match="points outside the archive"):
        open_dataset(pack(tmp_path, VAL | {name: b"evil"}), split="val")


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.FIFOTYPE])
def test_link_or_device_in_a_tar_is_refused_if_named_as_an_image_else_ignored(kind: bytes, tmp_path: Path) -> None:
    def add(name: str) -> Path:
        path = as_tar(tmp_path, VAL)
        with tarfile.open(path, "a") as archive:
            info = tarfile.TarInfo(name)
            info.type, info.linkname = kind, "owl/a.png"
            archive.addfile(info)
        return path

    assert contents(open_dataset(add("cat/link"), split="val")) == VAL
    with pytest.raises(DatasetError, match=r"cat/link\.png has an image's name but is not a regular file.*tar --deref"):
        open_dataset(add("cat/link.png"), split="val")


def test_link_and_encrypted_or_oddly_packed_member_of_a_zip_are_refused(tmp_path: Path) -> None:
    path = as_zip(tmp_path, VAL)
    link = zipfile.ZipInfo("cat/link.png")
    link.external_attr = (stat.S_IFLNK | 0o777) << 16
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr(link, "z.ppm")
    with pytest.raises(DatasetError, match=r"cat/link\.png has an image's name but is not a regular file"):
        open_dataset(path, split="val")

    path = as_zip(tmp_path, VAL)
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("cat/packed.png", b"a", zipfile.ZIP_LZMA)
    with pytest.raises(
        DatasetError, match=r"cat/packed\.png is encrypted, or compressed with a method other than deflate"
    ):
        open_dataset(path, split="val")

    data = bytearray(as_zip(tmp_path, VAL).read_bytes())
    data[data.index(b"PK\x01\x02") + 8] |= 1
    path.write_bytes(data)
    with pytest.raises(DatasetError, match=r"owl/b\.JPG is encrypted"):
        open_dataset(path, split="val")


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_two_members_of_one_name_are_refused(tmp_path: Path) -> None:
    with tarfile.open(as_tar(tmp_path, VAL), "a") as archive:
        archive.addfile(tarfile.TarInfo("owl/a.png"))
    with zipfile.ZipFile(as_zip(tmp_path, VAL), "a") as archive:
        archive.writestr("owl/a.png", b"another")
    for name in ("data.tar", "data.zip"):
        with pytest.raises(DatasetError, match=r"two members are named owl/a\.png"):
            open_dataset(tmp_path / name, split="val")


@pytest.mark.parametrize("data", [b"", b"text " * 300, b"PK\x03\x04" + bytes(99), bytes(300), b"\xff\xd8\xff\xe0" * 99])
def test_file_that_is_no_archive_is_refused(data: bytes, tmp_path: Path) -> None:
    (tmp_path / "data.tar").write_bytes(data)
    with pytest.raises(DatasetError, match=r"not a \.tar or \.zip, or a damaged one"):
        open_dataset(tmp_path / "data.tar", split="val")


def test_tar_cut_anywhere_is_refused_and_never_a_smaller_dataset(tmp_path: Path) -> None:
    whole = as_tar(tmp_path, VAL).read_bytes()
    end = max(place for place, byte in enumerate(whole) if byte) // 512 * 512 + 512
    for cut in [*range(0, end, 256), *range(3, end, 1000)]:
        (tmp_path / "data.tar").write_bytes(whole[:cut])
        with pytest.raises(DatasetError, match="damaged"):
            open_dataset(tmp_path / "data.tar", split="val")


def test_tar_with_a_damaged_header_is_refused_and_never_a_smaller_dataset(tmp_path: Path) -> None:
    data = bytearray(as_tar(tmp_path, VAL).read_bytes())
    data[data.index(b"ant/y.Tiff")] ^= 1
    (tmp_path / "data.tar").write_bytes(data)
    with pytest.raises(DatasetError, match=r"damaged or truncated at byte \d+\. Get a fresh copy of the archive"):
        open_dataset(tmp_path / "data.tar", split="val")


def test_tar_whose_member_has_a_negative_size_does_not_loop(tmp_path: Path) -> None:
    data = bytearray(as_tar(tmp_path, {"cat/a.png": b"", "owl/b.png": b""}).read_bytes())
    header = data[512:1024]
    header[124:136] = (-512).to_bytes(12, "big", signed=True)  # the size field in base 256
    header[148:156] = b" " * 8
    header[148:156] = f"{sum(header):06o}\0 ".encode()
    data[512:1024] = header
    (tmp_path / "data.tar").write_bytes(data)
    with pytest.raises(DatasetError, match="damaged"):
        open_dataset(tmp_path / "data.tar", split="val")


@settings(max_examples=300)
@given(st.sampled_from([as_tar, as_zip]), st.data())
def test_damaged_archive_opens_or_is_refused_and_raises_nothing_else(
    tmp_path_factory: pytest.TempPathFactory, pack: Pack, draw: st.DataObject
) -> None:
    place = tmp_path_factory.getbasetemp()
    path = pack(place, VAL)
    data = bytearray(path.read_bytes())
    for _ in range(draw.draw(st.integers(1, 4))):
        start = draw.draw(st.integers(0, len(data)))
        data[start : start + draw.draw(st.integers(0, 3))] = draw.draw(st.binary(max_size=3))
    path.write_bytes(data)
    try:
        dataset = open_dataset(path, split="val")
        for sample in dataset.samples:
            assert len(dataset.read(sample)) == sample.size
    except PreluNetError as error:
        assert isinstance(error, DatasetError)  # noqa: PT017 - either outcome is right
