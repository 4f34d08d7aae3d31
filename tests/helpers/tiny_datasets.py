"""The same thirty images in every layout of docs/datasets.md, written without the code that reads them."""

import io
import json
import tarfile
import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import scipy.io
from PIL import Image

from prelunet.evaluator.contract import ClassEntry

# Twelve classes, so that "10" sorts before "2" and devkit ids differ from indices. Two are cranes, as in ImageNet.
NAMES = (
    "tench",
    "crane",
    "bottle",
    "crane",
    "abacus",
    "fox terrier",
    "owl",
    "maillot, tank suit",
    "ant",
    "cat",
    "ox",
    "yak",
)
CLASSES = tuple(ClassEntry(f"n{index * 37 + 5:08}", name) for index, name in enumerate(NAMES))
WNIDS = tuple(entry.wnid for entry in CLASSES)
DEVKIT = [(5 * index + 7) % 12 + 1 for index in range(12)]  # the devkit id of each class index, in another order
IMAGES = 30
GROUND_TRUTH = "ILSVRC2012_validation_ground_truth.txt"
BAD = 7  # the number of the damaged image


def name_of(number: int) -> str:
    """Return the name of an image, numbered from 1."""
    return f"ILSVRC2012_val_{number:08}.JPEG"


def label_of(number: int) -> int:
    """Return the class index of an image. Classes 4 and 11 have none."""
    return (0, 1, 2, 3, 5, 6, 7, 8, 9, 10)[number * number % 97 % 10]


def encoded(number: int) -> bytes:
    """Return an image: JPEG, gray, CMYK, or a PNG named like a JPEG; one is damaged."""
    rng = np.random.default_rng(number)
    size = (30 + number % 5 * 7, 33 + number % 3 * 9)
    pixels = Image.fromarray(rng.integers(0, 256, (*size, 3), np.uint8))
    if number == BAD:
        return b"no image"
    coded = io.BytesIO()
    mode = {1: "CMYK", 2: "L"}.get(number % 6, "RGB")
    pixels.convert(mode).save(coded, "PNG" if number % 6 == 3 else "JPEG")
    return coded.getvalue()


DATA = {name_of(number): encoded(number) for number in range(1, IMAGES + 1)}
LABELS = {name_of(number): label_of(number) for number in range(1, IMAGES + 1)}
# ReaL's form: line n has the true classes of image n: none of every seventh, several of others; not all have the label.
REAL = [
    []
    if number % 7 == 3
    else [(label_of(number) + number // 9) % 12, *((number * 5 + 2 * i) % 12 for i in range(number % 3))]
    for number in range(1, IMAGES + 1)
]
REAL = [list(dict.fromkeys(truth)) for truth in REAL]
FOLDERS = {f"{WNIDS[LABELS[name]]}/{name}": data for name, data in DATA.items()}


def write_folder(folder: Path, files: Mapping[str, bytes]) -> Path:
    """Write files, in no particular order."""
    for name, data in reversed(files.items()):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    return folder


def write_tar(path: Path, files: Mapping[str, bytes], mode: str = "w") -> Path:
    """Write a tar with the files in reverse order; mode: of `tarfile.open`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, mode) as archive:  # type: ignore[call-overload]
        for name, data in reversed(files.items()):
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return path


def write_zip(path: Path, files: Mapping[str, bytes]) -> Path:
    """Write a zip."""
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in files.items():
            archive.writestr(name, data, zipfile.ZIP_DEFLATED)
    return path


def tiny_imagenet_files() -> dict[str, bytes]:
    """Return the files of tiny-imagenet-200, whose validation images are labeled by a list with boxes."""
    lines = [f"{name}\t{WNIDS[label]}\t0\t{label}\t44\t62\n" for name, label in reversed(LABELS.items())]
    files = {"wnids.txt": "\n".join(WNIDS).encode(), "words.txt": b"n00000005\ttench\n"}
    files |= {f"val/images/{name}": data for name, data in DATA.items()}
    files |= {"val/val_annotations.txt": "".join(lines).encode(), "test/images/test_0.JPEG": DATA[name_of(1)]}
    for label in sorted(set(LABELS.values())):
        wnid = WNIDS[label]
        files[f"train/{wnid}/{wnid}_boxes.txt"] = f"{wnid}_0.JPEG\t0\t0\t62\t62\n".encode()
        files[f"train/{wnid}/images/{wnid}_0.JPEG"] = DATA[name_of(label + 1)]
    return {f"tiny-imagenet-200/{name}": data for name, data in files.items()}


def kaggle_files() -> dict[str, bytes]:
    """Return the files of Kaggle's ILSVRC: flat validation images, labeled by a CSV at the top."""
    rows = [f"{name.removesuffix('.JPEG')},{WNIDS[label]} 85 1 499 272 " for name, label in reversed(LABELS.items())]
    names = [name.removesuffix(".JPEG") for name in DATA]
    files = {f"ILSVRC/Data/CLS-LOC/val/{name}": data for name, data in DATA.items()}
    files |= {f"ILSVRC/Annotations/CLS-LOC/val/{name}.xml": b"<annotation/>" for name in names}
    for label in sorted(set(LABELS.values())):
        files[f"ILSVRC/Data/CLS-LOC/train/{WNIDS[label]}/{WNIDS[label]}_9.JPEG"] = DATA[name_of(label + 1)]
    return files | {
        "ILSVRC/Data/CLS-LOC/test/ILSVRC2012_test_00000001.JPEG": DATA[name_of(1)],
        "ILSVRC/ImageSets/CLS-LOC/val.txt": "".join(f"{x} {i}\n" for i, x in enumerate(names, start=1)).encode(),
        "ILSVRC/ImageSets/CLS-LOC/test.txt": b"ILSVRC2012_test_00000001 1\n",
        "LOC_val_solution.csv": "\n".join(["ImageId,PredictionString", *rows]).encode(),
        "LOC_train_solution.csv": b"ImageId,PredictionString\nn01_9,n01 1 2 3 4\n",
        "LOC_sample_submission.csv": b"ImageId,PredictionString\nILSVRC2012_test_00000001,1 1 1 1 1\n",
        "LOC_synset_mapping.txt": "".join(f"{entry.wnid} {entry.name}\n" for entry in CLASSES).encode(),
    }


def write_devkit(folder: Path) -> Path:
    """Write a devkit: the ground truth, and meta.mat with the classes and two of their ancestors."""
    (folder / "data").mkdir(parents=True)
    ids = [DEVKIT[label] for label in LABELS.values()]
    (folder / "data" / GROUND_TRUTH).write_text("".join(f"{devkit_id}\n" for devkit_id in ids))
    rows = [(DEVKIT[index], wnid, NAMES[index], "a gloss", 0) for index, wnid in enumerate(WNIDS)]
    rows += [(13, "n09000001", "animal", "a gloss", 5), (14, "n09000002", "thing", "a gloss", 7)]
    kinds = [(key, "O") for key in ("ILSVRC2012_ID", "WNID", "words", "gloss", "num_children")]
    scipy.io.savemat(folder / "data" / "meta.mat", {"synsets": np.array(sorted(rows), kinds)})
    return folder


def write_real(path: Path, lists: Sequence[Sequence[int]] = REAL) -> Path:
    """Write labels in ReaL's form."""
    path.write_text(json.dumps([list(truth) for truth in lists]))
    return path


def write_list(path: Path, line: Callable[[str, int], str], header: str = "") -> Path:
    """Write a list of labels, one line per image, shuffled."""
    names = sorted(LABELS, key=lambda name: (LABELS[name], name))
    path.write_text(header + "".join(f"{line(name, LABELS[name])}\n" for name in names))
    return path


def shard_files(numbers: range, label: Callable[[int], Mapping[str, bytes]]) -> dict[str, bytes]:
    """Return the files of a webdataset shard. label: returns the label files of an image, suffix → data."""
    files = {}
    for number in numbers:
        key = f"{number:06}"
        files[f"{key}.jpg"] = DATA[name_of(number)]
        files |= {f"{key}{suffix}": data for suffix, data in label(label_of(number)).items()}
    return files


def as_cls(label: int) -> dict[str, bytes]:
    """Return a label in webdataset's format."""
    return {".cls": str(label).encode()}


def as_json(label: int) -> dict[str, bytes]:
    """Return a label among other fields."""
    return {".json": json.dumps({"filename": "x.JPEG", "label": label, "width": 500}).encode()}


def as_both(label: int) -> dict[str, bytes]:
    """Return a label in the format of timm's copies of ImageNet."""
    return as_cls(label) | as_json(label)
