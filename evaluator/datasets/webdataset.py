"""Read webdataset shards: tars that contain `key.jpg` together with its label, `key.cls` or `key.json`.

The key is the name up to the first dot of its last part, as in the webdataset library. `.cls` contains a class index.
`.json` contains an object with a `label`, which is used if there is no `.cls`.
"""

import re
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path

from ..errors import DatasetError
from ..json_checks import parse_json, require_object
from ..terminal import progress
from .labels.class_names import NUMBER
from .sources.archive import ArchiveSource, open_archive
from .sources.archive_index import ArchiveIndex
from .sources.base import format_names, join

_SUFFIXES = (".cls", ".json")


def is_shard(source: ArchiveSource, subfolder: str = "") -> bool:
    """Return whether an archive is a shard: it contains a .cls, or a .json with the key of its first image."""
    images, labels = source.members.subtree(subfolder).names, source.labels.subtree(subfolder)
    if not images:
        return False
    return labels.find(_key(images[0]) + ".json") is not None or any(name.endswith(".cls") for name in labels.names)


def shards_of_split(paths: Sequence[Path], split: str, *, or_test: bool = False) -> tuple[list[Path], list[str]]:
    """Return the shards of a split among a folder's tars, or its parquet files, sorted by name, and remarks.

    Files whose names differ only in numbers belong together (Hugging Face appended a digest until 2023). or_test: use
    `test` where no name contains the split's. Raises DatasetError when there are several such groups and not exactly
    one has the name, and when the only group is the training set's instead.
    """
    kinds: dict[str, list[Path]] = {}
    for path in sorted(paths, key=lambda path: f"{path.name}/"):  # the sort order of the samples' names
        kinds.setdefault(re.sub(r"(?<=-of-)\d+-[0-9a-f]{16}|\d+", "*", path.name), []).append(path)
    named, remarks = [kind for kind in kinds if split in kind.lower()], list[str]()
    if not named and len(kinds) == 1:
        named = list(kinds)
        if "train" in named[0].lower():
            raise DatasetError(
                f"{paths[0].parent}: contains only training images ({named[0]}), not the {split} images. To use them, "
                f"pass one file as --data, or rename the files from 'train' to '{split}'"
            )
    if or_test and not named and (named := [kind for kind in kinds if "test" in kind.lower()]):
        remarks = [f"{paths[0].parent}: contains {format_names(list(kinds))}; the images are those in {named[0]}"]
    if len(named) != 1:
        raise DatasetError(
            f"{paths[0].parent}: shards of {len(kinds)} kinds ({format_names(list(kinds))}), and it is not clear which "
            f"contain the {split} images. Move those into a separate folder, or pass one of them as --data"
        )
    return kinds[named[0]], remarks


def classes_of_labels(found_at: Mapping[str, str], *, complete: bool) -> tuple[str, ...]:
    """Return the classes that the labels of training shards name, in label order.

    Words become classes in sorted order. Class indices become classes named "0", "1", …. found_at: label → where it
    first occurs; complete: whether every index from 0 to the highest needs an image, because a net's classes have no
    gaps. Raises DatasetError for labels of several kinds, gaps, and labels that are not classes.
    """
    invalid = {
        word: place for word, place in found_at.items() if not word or (NUMBER.fullmatch(word) and int(word) < 0)
    }
    if invalid:
        word, place = next(iter(invalid.items()))
        raise DatasetError(f"{place}: the label {word!a} is not a class. Repack the shard without such images")
    numbers = {word: int(word) for word in found_at if NUMBER.fullmatch(word)}
    if not numbers:
        return tuple(sorted(found_at))
    if len(numbers) < len(found_at) or any(str(number) != word for word, number in numbers.items()):
        word = next(word for word in found_at if str(numbers.get(word)) != word)
        raise DatasetError(
            f"{found_at[word]}: the label {word!a:.80} is not a class index, but other labels are (0, 1, …). "
            "Repack the shards with labels of one kind"
        )
    indices = sorted(numbers.values())
    if complete and (missing := indices[-1] + 1 - len(indices)):
        first = next(index for index, number in enumerate(indices) if index != number)
        raise DatasetError(
            f"{next(iter(found_at.values()))}: labels from {indices[0]} to {indices[-1]} in these shards, but no image "
            f"of class {first} ({missing:,} such classes). Class indices count from 0 without gaps: repack the shards, "
            "or add the missing ones"
        )
    return tuple(map(str, indices))


def read_shards(paths: Sequence[Path], *, no_labels: bool) -> tuple[ArchiveIndex, list[str], dict[str, str]]:
    """Return the images as `shard.tar/key.jpg`, the label of each, and where each label first occurs.

    no_labels: return no labels, and accept tars without labels. Raises DatasetError when a tar is not a shard, or an
    image has no label or a label no image.
    """
    table, words, found_at = ArchiveIndex(), list[str](), dict[str, str]()
    with progress("read shards", len(paths), "shards") as advance:
        for volume, path in enumerate(paths):
            source = open_archive(path)
            if not no_labels:
                if not is_shard(source):
                    raise DatasetError(
                        f"{path}: not a webdataset shard: it has no .cls, and no .json for its first image. Pass an "
                        "archive of images itself as --data, or move it out of the folder of shards"
                    )
                own_words, places = read_labels(source, "")
                words += own_words
                found_at |= {word: place for word, place in places.items() if word not in found_at}
            table.extend(f"{path.name}/", volume, source.members)
            advance()
    return table, words, found_at


def read_labels(source: ArchiveSource, subfolder: str) -> tuple[list[str], dict[str, str]]:
    """Return the label of each image of a shard, in the order of the names, and where each label first occurs.

    Raises DatasetError when an image has no label or a label no image.
    """
    images, labels = source.members.subtree(subfolder).names, source.labels.subtree(subfolder)
    suffix = next(suffix for suffix in _SUFFIXES if any(name.endswith(suffix) for name in labels.names))
    keys, names = list(map(_key, images)), set(labels.names)
    for position, (key, following) in enumerate(pairwise(keys)):
        if key == following:
            both = " and ".join(images[position : position + 2])
            raise DatasetError(f"{source.path}: {both} have the same key. Repack the shard")
    if missing := [name for name, key in zip(images, keys, strict=True) if key + suffix not in names]:
        raise DatasetError(
            f"{source.path}: no {suffix} for {len(missing):,} of {len(images):,} images: {format_names(missing)}. "
            "Repack the shard with a label for each image"
        )
    owners = set(keys)
    if orphans := [name for name in labels.names if name.endswith(suffix) and _key(name) not in owners]:
        raise DatasetError(
            f"{source.path}: {len(orphans):,} labels without an image: {format_names(orphans)}. Repack the shard"
        )
    words, found_at = list[str](), dict[str, str]()
    for key in keys:
        file = key + suffix
        place = f"{source.path}: {file}"
        data = source.read(join(subfolder, file))
        try:
            label = data.decode().strip() if suffix == ".cls" else require_object(parse_json(data), "it").get("label")
            if type(label) not in {int, str}:
                raise ValueError("its 'label' should be a class index or a wnid")
        except ValueError as error:
            raise DatasetError(f"{place}: cannot read a label ({error}). Repack the shard") from error
        found_at.setdefault(str(label), place)
        words.append(str(label))
    return words, found_at


def _key(name: str) -> str:
    folder, slash, base = name.rpartition("/")
    return folder + slash + base.partition(".")[0]
