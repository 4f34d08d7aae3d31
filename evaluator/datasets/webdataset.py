"""Webdataset shards: tars in which `key.jpg` and its label, `key.cls` or `key.json`, lie side by side.

The key is the name up to the first dot of its last part, as the webdataset library reads it. `.cls` holds a class
index; `.json` an object whose `label` is one, which counts where there is no `.cls`.
"""

import re
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path

from prelunet.evaluator.datasets.dataset import UNLABELLED
from prelunet.evaluator.datasets.labels.class_names import NUMBER, ClassList
from prelunet.evaluator.datasets.sources.archive import ArchiveReader, ArchiveSource, open_archive
from prelunet.evaluator.datasets.sources.archive_index import ArchiveIndex
from prelunet.evaluator.datasets.sources.base import format_names, join
from prelunet.evaluator.errors import DatasetError
from prelunet.evaluator.json_checks import parse_json, require_object
from prelunet.evaluator.terminal import progress

_SUFFIXES = {".cls": 64 * 1024, ".json": 1024**2}  # and the most bytes that one may have


def is_shard(source: ArchiveSource, subfolder: str = "") -> bool:
    """Say whether an archive is a shard: whether it has a .cls, or a .json of the same key as its first image."""
    images, labels = source.members.subtree(subfolder).names, source.labels.subtree(subfolder)
    if not images:
        return False
    return labels.find(_key(images[0]) + ".json") is not None or any(name.endswith(".cls") for name in labels.names)


def shards_of_split(paths: Sequence[Path], split: str) -> list[Path]:
    """Choose the shards of a split among a folder's tars, in the order of their names.

    Tars whose names differ in their numbers alone belong together. Raises DatasetError where there are several such
    kinds and not just one of them has the split in its name.
    """
    kinds: dict[str, list[Path]] = {}
    for path in sorted(paths, key=lambda path: f"{path.name}/"):  # as the names of the samples will sort
        kinds.setdefault(re.sub(r"\d+", "*", path.name), []).append(path)
    asked = [kind for kind in kinds if split in kind.lower()]
    if len(kinds) > 1 and len(asked) != 1:
        raise DatasetError(
            f"{paths[0].parent}: tars of {len(kinds)} kinds ({format_names(list(kinds))}), and it is not clear which are the "
            f"{split} images. Put those into a folder of their own, or give one of them as --data"
        )
    return kinds[asked[0] if len(kinds) > 1 else next(iter(kinds))]


def open_shards(
    paths: Sequence[Path], classes: ClassList, *, no_labels: bool
) -> tuple[ArchiveIndex, list[int], ArchiveReader]:
    """Read the lists of a folder's shards: their images as `shard.tar/key.jpg`, their labels, and a reader.

    Raises DatasetError where one is no shard, an image has no label or the reverse, or a label is none of the classes.
    """
    table, words, found_at = _read_shards(paths, no_labels=no_labels)
    return table, _labels(words, found_at, classes, len(table.names)), ArchiveReader(tuple(paths), table)


def open_training_shards(
    paths: Sequence[Path], *, complete: bool
) -> tuple[ArchiveIndex, list[int], ArchiveReader, tuple[str, ...]]:
    """Read shards as `open_shards` does, where the classes are not known beforehand; return them, too.

    Words are classes in sorted order. Class indices are classes named by their numbers, "0", "1", …; complete: whether
    each from 0 to the highest must have an image, since a net's classes are counted without gaps. Raises DatasetError.
    """
    table, words, found_at = _read_shards(paths, no_labels=False)
    classes = _classes_of(found_at, complete=complete)
    index = {word: place for place, word in enumerate(classes)}
    return table, [index[word] for word in words], ArchiveReader(tuple(paths), table), classes


def _classes_of(found_at: Mapping[str, str], *, complete: bool) -> tuple[str, ...]:
    """Return the classes that words name, in the order of their labels. found_at: each word and where it stands."""
    strange = {
        word: place for word, place in found_at.items() if not word or (NUMBER.fullmatch(word) and int(word) < 0)
    }
    if strange:
        word, place = next(iter(strange.items()))
        raise DatasetError(f"{place}: the label {word!a} is no class. Pack the shard anew, without such images")
    numbers = {word: int(word) for word in found_at if NUMBER.fullmatch(word)}
    if not numbers:
        return tuple(sorted(found_at))
    if len(numbers) < len(found_at) or any(str(number) != word for word, number in numbers.items()):
        word = next(word for word in found_at if str(numbers.get(word)) != word)
        raise DatasetError(
            f"{found_at[word]}: the label {word!a:.80} is no class index as the others are, 0, 1, …. "
            "Pack the shards anew, with labels of one kind"
        )
    missing = sorted(set(range(max(numbers.values()) + 1)) - set(numbers.values()))
    if complete and missing:
        raise DatasetError(
            f"{next(iter(found_at.values()))}: labels from {min(numbers.values())} to {max(numbers.values())} in these "
            f"shards, but no image of class {missing[0]} ({len(missing):,} such classes). Class indices are counted "
            "from 0: pack the shards anew, or give all of them"
        )
    return tuple(sorted(numbers, key=numbers.__getitem__))


def _read_shards(paths: Sequence[Path], *, no_labels: bool) -> tuple[ArchiveIndex, list[str], dict[str, str]]:
    """Return the images, the word for the class of each, and each word with the place where it stands first."""
    table, words, found_at = ArchiveIndex(), list[str](), dict[str, str]()
    with progress("read shards", len(paths), "shards") as advance:
        for volume, path in enumerate(paths):
            source = open_archive(path)
            if not no_labels:
                if not is_shard(source):
                    raise DatasetError(
                        f"{path}: no webdataset shard: it has no .cls, nor a .json beside its first image. Give an "
                        "archive of images itself as --data, or take it out of the folder of shards"
                    )
                _read_words(source, "", words, found_at)
            table.extend(f"{path.name}/", volume, source.members)
            advance()
    return table, words, found_at


def labels_in_shard(source: ArchiveSource, subfolder: str, classes: ClassList) -> list[int]:
    """Return the labels of a single shard's images in the order of their names; errors as of `open_shards`."""
    words, found_at = list[str](), dict[str, str]()
    _read_words(source, subfolder, words, found_at)
    return _labels(words, found_at, classes, len(words))


def _labels(words: list[str], found_at: dict[str, str], classes: ClassList, images: int) -> list[int]:
    if not words:
        return [UNLABELLED] * images
    resolved = classes.resolve_labels(found_at)
    return [resolved.index[word] for word in words]


def _read_words(source: ArchiveSource, subfolder: str, words: list[str], found_at: dict[str, str]) -> None:
    """Append the word for the class of each image of a shard. found_at: each word and where it stands first."""
    images, labels = source.members.subtree(subfolder).names, source.labels.subtree(subfolder)
    suffix = next(suffix for suffix in _SUFFIXES if any(name.endswith(suffix) for name in labels.names))
    for name, following in pairwise(images):
        if _key(name) == _key(following):
            raise DatasetError(f"{source.path}: {name} and {following} are two images of one key. Pack the shard anew")
    missing = [name for name in images if labels.find(_key(name) + suffix) is None]
    if missing:
        raise DatasetError(
            f"{source.path}: no {suffix} beside {len(missing):,} of {len(images):,} images: {format_names(missing)}. "
            "Pack the shard anew, with a label for each image"
        )
    lonely = _without_image(labels.names, images, suffix)
    if lonely:
        raise DatasetError(
            f"{source.path}: {len(lonely):,} labels of images that do not exist: {format_names(lonely)}. Pack the shard anew"
        )
    for name in images:
        file = _key(name) + suffix
        place = f"{source.path}: {file}"
        word = _word(source.read(join(subfolder, file), _SUFFIXES[suffix]), suffix, place)
        found_at.setdefault(word, place)
        words.append(word)


def _without_image(labels: Sequence[str], images: Sequence[str], suffix: str) -> list[str]:
    """Return the labels whose image is missing; both are sorted, so that two counts tell most often."""
    of_kind = [name for name in labels if name.endswith(suffix)]
    if len(of_kind) == len(images):  # and each image has its own
        return []
    keys = set(map(_key, images))
    return [name for name in of_kind if _key(name) not in keys]


def _word(data: bytes, suffix: str, place: str) -> str:
    """Return the word for a class in a .cls or .json."""
    try:
        if suffix == ".cls":
            return data.decode().strip()
        label = require_object(parse_json(data), "it").get("label")
        if type(label) not in {int, str}:
            raise ValueError("its 'label' should be a class index or a wnid")
        return str(label)
    except ValueError as error:
        raise DatasetError(f"{place}: no label can be read here ({error}). Pack the shard anew") from error


def _key(name: str) -> str:
    folder, slash, base = name.rpartition("/")
    return folder + slash + base.partition(".")[0]
