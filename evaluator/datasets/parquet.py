"""Label images in parquet files: by Hugging Face's ClassLabel, or by class indices, wnids or class names."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from string import digits
from typing import Any

from ..errors import DatasetError
from ..json_checks import parse_json
from .dataset import UNLABELLED, Dataset
from .labels.class_names import NO_LABEL, ClassList
from .layouts import ImageListing, shard_files
from .sources.archive import ArchiveSource
from .sources.base import PARQUET, TAR, format_names
from .sources.parquet import ParquetFiles, huggingface_metadata, open_parquet
from .webdataset import classes_of_labels, shards_of_split

_COLUMNS = ("label", "labels", "fine_label", "class", "class_id", "cls", "wnid", "synset", "target")


def find_parquet(images: ImageListing) -> list[Path]:
    """Return the parquet files of all splits; [] if the dataset is of another kind.

    Beside images or tars, parquet files describe these (img2dataset writes them).
    """
    if images.path.suffix == PARQUET and isinstance(images.source, ArchiveSource):
        return [images.path]
    return [] if shard_files(images, TAR) else shard_files(images, PARQUET)


def label_parquet(
    images: ImageListing, paths: Sequence[Path], split: str, classes: ClassList | None, *, no_labels: bool
) -> Dataset:
    """Open and label the images in parquet files. classes: of the model; None for training: the files name them.

    Raises DatasetError as `shards_of_split`, `open_parquet`, `ClassList.resolve_labels` and `classes_of_labels` do,
    when no column or several could hold the labels, and for a row without a label.
    """
    remarks, complete = list[str](), images.path not in paths
    if complete:
        paths, remarks = shards_of_split(paths, split, or_test=classes is not None and split == "val")
    files = open_parquet(paths, complete=complete)
    several = f"{len(paths):,} parquet files, {paths[0].name} to {paths[-1].name}"
    remarks.append(f"{images.place}: {several if len(paths) > 1 else paths[0].name}")
    wnids, labels = classes.wnids if classes else (), list[int]()
    if not no_labels:
        wnids, labels, remark = _label_rows(files, split, classes)
        remarks.append(f"{images.place}: {remark}")
    names, sizes, reader = files.images()
    listed = replace(images, names=names, sizes=sizes, reader=reader, exact_sizes=False)
    layout = "parquet" if labels else "parquet, unlabelled"
    return listed.labeled(wnids, labels or [UNLABELLED] * len(names), layout, remarks)


def _label_rows(files: ParquetFiles, split: str, classes: ClassList | None) -> tuple[tuple[str, ...], list[int], str]:
    """Return the wnids of the classes, the label of each row, and a remark on how they were found."""
    column, names = _label_column(files, len(classes.wnids) if classes else None)
    values, found_at = list[Any](), dict[str, str]()
    for place, value in files.column(column):
        if value is None or (names and not -1 <= value < len(names)):
            raise DatasetError(f"{place}: the {column} is {value}, which is not a class. Remove such rows")
        values.append(value)
        found_at.setdefault(str(value), place)
    remark = f"labels from the column {format_names([column])}"
    if names and NO_LABEL in found_at:
        names = ()  # refused below
    if classes is None:
        wnids = names or classes_of_labels(found_at, complete=split == "train")
        index = {word: int(word) if names else wnids.index(word) for word in found_at}
        if split == "train":
            remark += ". Training reads images in random order, which is slow in parquet, and fast in class folders"
    else:
        wnids = classes.wnids
        index, kind = _resolve_names(names, found_at, classes) if names else classes.resolve_labels(found_at)
        remark += f", read as {kind}"
    return wnids, [index[str(value)] for value in values], remark


def _label_column(files: ParquetFiles, classes: int | None) -> tuple[str, tuple[str, ...]]:
    """Return the name of the label column, and the names of its ClassLabel or ().

    If there are several, the one with a name for each of the model's classes is meant.
    """
    schema = files.schema
    integers = {each.name for each in schema if re.fullmatch(r"u?int\d+", str(each.type))}
    texts = {each.name for each in schema if re.match(r"(large_)?string|dictionary<values=string", str(each.type))}
    try:
        features = parse_json(huggingface_metadata(schema)).get("info", {}).get("features", {})
        found = {
            column: tuple(map(str, feature["names"]))
            for column, feature in features.items()
            if column in integers and feature.get("_type") == "ClassLabel" and feature.get("names")
        }
    except (ValueError, AttributeError, TypeError) as error:
        raise DatasetError(f"{files.paths[0]}: malformed Hugging Face metadata ({error}). Get a fresh copy") from error
    if found.keys().isdisjoint(_COLUMNS):
        found |= {column: () for column in _COLUMNS if column in integers | texts}
    types = {each.name: str(each.type) for each in schema if each.name in _COLUMNS}
    if not found and types:
        name, kind = next(iter(types.items()))
        raise DatasetError(
            f"{files.paths[0]}: the column {name} has the type {kind}. Save labels as integers, none missing, or texts"
        )
    if not found:
        raise DatasetError(
            f"{files.paths[0]}: no label column (a ClassLabel, or one named {', '.join(_COLUMNS)}), only "
            f"{format_names(schema.names)}. Rename the column of labels"
        )
    chosen = found if len(found) == 1 else {name: names for name, names in found.items() if len(names) == classes}
    if len(chosen) != 1:
        raise DatasetError(
            f"{files.paths[0]}: the columns {format_names(list(found))} could all be the labels. Keep one, e.g. "
            "with `remove_columns` of Hugging Face's datasets"
        )
    return next(iter(chosen.items()))


def _resolve_names(names: Sequence[str], found_at: Mapping[str, str], classes: ClassList) -> tuple[dict[str, int], str]:
    """Return the class index of each position in a ClassLabel's names, and the kind of the names as text.

    Names in the order of the model's classes are taken by position, because two classes may share a name: lists rename
    one of the two cranes, e.g. crane2.
    """
    matches = [{classes.by_wnid[name]} if name in classes.by_wnid else set[int]() for name in names]
    for form, positions in ClassList((), tuple(names)).by_name.items():
        for position in positions:
            matches[position].update(classes.by_name.get(form) or classes.by_name.get(form.rstrip(f" {digits}"), []))
    if len(names) == len(classes.wnids) and all(position in match for position, match in enumerate(matches)):
        return {word: int(word) for word in found_at}, "class names in the order of the model's classes"
    known = {word: names[int(word)] for word in found_at}
    known |= {word: name.partition(",")[0] for word, name in known.items() if not classes.contains(name)}
    index, kind = classes.resolve_labels({known[word]: place for word, place in found_at.items()})
    word_of: dict[int, str] = {}
    for word, name in known.items():
        if (first := word_of.setdefault(index[name], word)) != word:
            raise DatasetError(
                f"{found_at[word]}: the class names {format_names([names[int(first)], names[int(word)]])} both stand "
                f"for the model's class {classes.wnids[index[name]]}. Use wnids as class names"
            )
    return {word: index[name] for word, name in known.items()}, kind
