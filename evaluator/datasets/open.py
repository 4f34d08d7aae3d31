"""Open a dataset: open the folder or archive, find the folder of the split in it, and label every image."""

import stat
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ..contract import ClassEntry
from ..errors import DatasetError, UsageError
from .dataset import Dataset, DatasetSpec
from .labels.class_names import ClassList
from .labels.real_labels import is_real
from .layouts import (
    KAGGLE_IMAGES,
    TINY_IMAGENET_LABELS,
    Choice,
    ImageListing,
    has_label_file,
    label_images,
    label_training_images,
    list_images,
    with_real_labels,
)
from .parquet import find_parquet, label_parquet
from .selection import first_images, restrict, select
from .sources.archive import ArchiveSource, open_archive
from .sources.base import PARQUET, TAR, Source, describe_place, format_names, join
from .sources.folder import FolderSource, reading_error

SPLITS = ("train", "val")
VALIDATION = ("val", "valid", "validation")  # the usual names of a validation set
_SETS = ("train", *VALIDATION, "test")


def open_from_spec(spec: DatasetSpec, classes: Sequence[ClassEntry]) -> Dataset:
    """Open the dataset of a spec, labeled with a model's classes.

    Raises as `open_dataset`, `select` and `restrict` do.
    """
    if spec.no_labels and (spec.classes or spec.restrict_classes is not None):
        option = "--classes" if spec.classes else "--restrict-classes"
        raise UsageError(f"{option} with --no-labels: without labels no image has a class. Remove one of them")
    dataset = open_dataset(
        spec.path,
        split="val",
        wnids=[entry.wnid for entry in classes],
        names=[entry.name for entry in classes],
        labels=spec.labels,
        no_labels=spec.no_labels,
        choice=Choice(spec.listed_only, of_some_classes=bool(spec.classes)),
    )
    part = select(dataset, limit=spec.limit, classes=spec.classes)
    if spec.first_random is not None:
        part = first_images(part, *spec.first_random)
    return restrict(part, dataset, spec.restrict_classes, classes)


def open_images(path: Path, classes: Sequence[ClassEntry]) -> Dataset:
    """Open images without labels. Where there are several sets, open `val`. Raises as `open_dataset` does."""
    wnids, names = [entry.wnid for entry in classes], [entry.name for entry in classes]
    return open_dataset(path, split="val", wnids=wnids, names=names, no_labels=True, any_split=False)


def open_dataset(
    path: Path,
    *,
    split: str,
    wnids: Sequence[str] | None = None,
    names: Sequence[str] = (),
    labels: Path | None = None,
    no_labels: bool = False,
    choice: Choice = Choice(),
    any_split: bool = True,
) -> Dataset:
    """Open a folder, .tar, .tar.gz, .zip or .parquet of images in any layout of docs/datasets.md.

    split: `train` or `val`; a folder of that name at the top, or inside a single top folder, is entered. Where there
    is no `val`, `valid` or `validation` is used, or else, with `wnids`, a `test` with class folders.
    wnids: of the model's classes, in label order; None (a training set) accepts only class folders, in sorted order,
    webdataset shards, parquet files, and for `val` a label list. names: of these classes, in the same order. labels: a
    label list or devkit; None searches in and next to the dataset where labels are needed. no_labels: ignore labels, as
    for a test set; choice: see `Choice`; any_split: with no_labels, require that only one set exists, instead of
    choosing `split`.
    The samples are all files with an image suffix, at any depth, sorted by name. Hidden files, `__MACOSX` and other
    files are skipped.
    Raises UsageError when `path` or `labels` does not exist. Raises DatasetError when something cannot be read, the
    layout is ambiguous, labels and images do not match one to one, or a label is not a class of the model.
    """
    if labels is not None and no_labels:
        raise UsageError("--labels and --no-labels cannot be combined. Remove one of them")
    path = path.resolve() if path.name in {"", ".."} else path  # a name for labels, reports and clients
    source = _open_source(path)
    classes = None if wnids is None else ClassList(tuple(wnids), tuple(names))
    if classes is None:
        subfolder, found_remarks = _find_class_folders(source, path, split)
    else:
        subfolder, found_remarks = _find_image_folder(source, path, split, classes, any_split=no_labels and any_split)
    images = list_images(source, path, subfolder)
    found_remarks = [*found_remarks, *_remarks_on_others(source, images)]
    real = labels if labels is not None and is_real(labels) else None
    if parquet := find_parquet(images):
        if real is not None:
            raise DatasetError(
                f"{images.place}: ReaL's labels go by the numbers in ILSVRC's file names, which parquet files do not "
                "keep. Use the images as files with their names, in a folder or an archive"
            )
        if labels is not None:
            raise DatasetError(f"{images.place}: parquet files contain their own labels. Remove --labels")
        dataset = label_parquet(images, parquet, split, classes, no_labels=no_labels)
    elif classes is None:
        dataset = label_training_images(images, split)
    else:
        own = labels if real is None else None
        dataset = label_images(images, split, classes, own, choice, no_labels=no_labels or real is not None)
    if real is not None and classes is not None:
        dataset = with_real_labels(dataset, real, classes)
    if choice.listed_only and "labels from" not in dataset.layout:
        raise UsageError(
            f"--listed-only: {path} is not labeled by a list of image names. Omit it, or give --labels FILE"
        )
    remarks = (*found_remarks, *dataset.remarks)
    if isinstance(source, ArchiveSource) and source.path != path:
        unpacked = (
            f"{path}: compressed, so it was unpacked to {source.path} ({source.path.stat().st_size:,} bytes). Images "
            "are read from that file; delete it when the run and its reports are done"
        )
        remarks = (unpacked, *remarks)
    spec = dataset.spec and replace(dataset.spec, no_labels=no_labels, listed_only=choice.listed_only)
    return replace(dataset, remarks=remarks, spec=spec)


def _remarks_on_others(source: Source, images: ImageListing) -> list[str]:
    """Return remarks about files beside the images that are not read."""
    remarks = list[str]()
    if not images.names:
        return remarks
    if unread := [name for name in source.other_files(images.subfolder) if name.endswith((TAR, PARQUET))]:
        remarks.append(f"{images.place}: only loose images are used; not read: {format_names(unread)}")
    if skipped := source.skipped(images.subfolder):
        kinds = ", ".join(f"{suffix or 'no suffix'} {count:,}" for suffix, count in skipped.most_common(5))
        more = ", …" if len(skipped) > 5 else ""
        remarks.append(f"{images.place}: skipped files of other formats, by suffix: {kinds}{more}")
    return remarks


def _open_source(path: Path) -> Source:
    try:
        mode = path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError) as error:
        raise UsageError(
            f"{path}: no such file or folder. Pass a folder of images, or a .tar, .tar.gz, .zip or .parquet"
        ) from error
    except OSError as error:
        raise reading_error(error, path) from error
    if stat.S_ISDIR(mode):
        return FolderSource(path)
    if stat.S_ISREG(mode):
        return ArchiveSource(path) if path.suffix == PARQUET else open_archive(path)
    raise DatasetError(
        f"{path}: neither a folder nor a regular file. Pass a folder of images, or a .tar, .tar.gz, .zip or .parquet"
    )


def _find_image_folder(
    source: Source, path: Path, split: str, classes: ClassList, *, any_split: bool
) -> tuple[str, list[str]]:
    """Return the folder with the images of the split, which will be labeled with a model's classes, and remarks.

    any_split: return the only set, whatever its name.
    """
    subfolder = _kaggle_root(source) or _hub_root(source) or _single_root(source, path, classes)
    subfolders = source.folders(subfolder)
    beside_classes = any(classes.contains(name) for name in subfolders if name.lower() not in _SETS)
    # CIFAR-100 has a class "train". Beside class folders, `valid` may be a class of another list.
    names = (*SPLITS, "test") if beside_classes else _SETS
    sets = [name for name in subfolders if name.lower() in names and not classes.contains(name)]
    if any_split:
        if len(sets) > 1:
            raise _several_sets_error(source, path, subfolder, sets, "without labels")
        alone = bool(sets) and all(name.startswith(f"{sets[0]}/") for name, _ in source.images(subfolder))
        return _enter(source, path, subfolder, sets, sets[0] if alone else None)
    chosen = _find_split(source, path, subfolder, sets, split)
    test = next((name for name in sets if name.lower() == "test"), None)
    if chosen is None and test is not None and not beside_classes:
        folders = source.folders(join(subfolder, test))
        if len(sets) == 1 or len(folders) > 1 or any(map(classes.contains, folders)):
            chosen = test
    if chosen is None and sets:
        raise _missing_split_error(describe_place(path, subfolder), sets[-1], split)
    inside, remarks = _enter(source, path, subfolder, sets, chosen)
    if chosen is not None and beside_classes:
        unused = format_names([name for name in subfolders if name.lower() not in _SETS and classes.contains(name)])
        remarks.append(f"{describe_place(path, subfolder)}: beside '{chosen}', these are not used: {unused}")
    return inside, remarks


def _find_split(source: Source, path: Path, subfolder: str, sets: Sequence[str], split: str) -> str | None:
    """Return the set of a split, under any usual name; None if there is none. Raises DatasetError for several."""
    if split in sets:
        return split
    wanted = VALIDATION if split in VALIDATION else (split,)
    found = [name for name in sets if name.lower() in wanted]
    if len(found) > 1:
        purpose = f"as '{split}' (for training, rename that one to '{split}')"
        raise _several_sets_error(source, path, subfolder, found, purpose)
    return found[0] if found else None


def _enter(
    source: Source, path: Path, subfolder: str, sets: Sequence[str], chosen: str | None
) -> tuple[str, list[str]]:
    """Return the folder with the images of the chosen set, and remarks where its name does not explain the choice."""
    remarks = []
    if chosen is not None:
        place, is_kaggle = describe_place(path, subfolder), subfolder.endswith(KAGGLE_IMAGES)
        if chosen not in SPLITS or not {*VALIDATION[1:]}.isdisjoint(name.lower() for name in sets):
            remarks.append(f"{place}: contains {', '.join(sets)}; the images are those in '{chosen}'")
        subfolder = join(subfolder, chosen)
        if is_kaggle:
            remarks.append(f"{path}: Kaggle's copy of ILSVRC; the images are those in {subfolder}")
    if source.folders(subfolder) == ["images"] and TINY_IMAGENET_LABELS in source.other_files(subfolder):
        subfolder = join(subfolder, "images")
    return subfolder, remarks


def _kaggle_root(source: Source) -> str:
    """Return the folder with the sets in Kaggle's copy of ILSVRC, '' if the source is not that copy."""
    tops = source.folders("")
    bases = ("", "ILSVRC", *(f"{top}/ILSVRC" for top in tops if len(tops) == 1))
    roots = (join(base, KAGGLE_IMAGES) for base in bases)
    return next((root for root in roots if root.partition("/")[0] in tops and _contains_folder(source, root)), "")


def _contains_folder(source: Source, folder: str) -> bool:
    parent, _, name = folder.rpartition("/")
    return (not parent or _contains_folder(source, parent)) and name in source.folders(parent)


def _hub_root(source: Source) -> str:
    """Return the folder of parquet files in a copy from Hugging Face's Hub; pictures may lie beside it. '' if none."""
    top = source.folders("")
    return "data" if "data" in top and not {*_SETS} & {*top} and _has_shards(source, "data", PARQUET) else ""


def _single_root(source: Source, path: Path, classes: ClassList) -> str:
    """Return the single top folder that most archives have, or the folder next to a label file; '' if none."""
    subfolders = source.folders("")
    if any(name.lower() in _SETS or classes.contains(name) for name in subfolders):
        return ""
    if _has_shards(source, "", TAR):
        return ""
    if len(subfolders) != 1 and not has_label_file(source, path, ""):
        return ""
    filled = {name.partition("/")[0] if "/" in name else "" for name, _ in source.images("")}
    if not filled and len(subfolders) == 1:
        return "" if _has_shards(source, "", PARQUET) else subfolders[0]  # may contain shards
    return filled.pop() if len(filled) == 1 else ""


def _find_class_folders(source: Source, path: Path, split: str) -> tuple[str, list[str]]:
    """Return the folder with the class folders of the split, when the classes are not known in advance, and remarks."""
    kaggle, top = _kaggle_root(source), source.folders("")
    subfolder = kaggle or _hub_root(source)
    if not subfolder and split not in top and len(top) == 1 and top[0].lower() not in SPLITS:
        subfolder = top[0] if source.folders(top[0]) or _has_shards(source, top[0]) else ""
    subfolders = source.folders(subfolder)
    names = {*SPLITS, split, *(VALIDATION if "train" in map(str.lower, subfolders) else ())}
    places = {name: join(subfolder, name) for name in subfolders if name.lower() in names}
    # A folder named `train` or `val` without folders or shards inside is a class.
    splits = [name for name, place in places.items() if kaggle or source.folders(place) or _has_shards(source, place)]
    chosen = _find_split(source, path, subfolder, splits, split)
    if chosen is None and splits:
        raise _missing_split_error(describe_place(path, subfolder), splits[0], split)
    return _enter(source, path, subfolder, splits, chosen)


def _has_shards(source: Source, subfolder: str, *suffixes: str) -> bool:
    return any(name.endswith(suffixes or (TAR, PARQUET)) for name in source.other_files(subfolder))


def _several_sets_error(source: Source, path: Path, subfolder: str, sets: Sequence[str], purpose: str) -> DatasetError:
    is_folder = isinstance(source, FolderSource)
    return DatasetError(
        f"{describe_place(path, subfolder)}: contains the sets {' and '.join(sets)}; it is not clear which one "
        f"to use {purpose}. {'Pass' if is_folder else 'Unpack it, and pass'} the folder of one set: "
        f"{(path if is_folder else path.parent) / subfolder / sets[-1]}"
    )


def _missing_split_error(place: str, other: str, split: str) -> DatasetError:
    return DatasetError(
        f"{place}: class folders in '{other}' but none in '{split}'. "
        f"Put the {split} images into class folders in '{split}', next to '{other}', or pass the folder of another set"
    )
