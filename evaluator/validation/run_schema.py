"""Parse the parts of run.json and of a line of predictions.jsonl, and check their types, ranges and consistency.

All functions raise ValueError with the fault; the caller adds the file.
"""

import re
from collections.abc import Mapping
from typing import Any

from prelunet.evaluator.contract import CONTROL_CHARACTERS, MAX_NAME_LENGTH, ClassEntry
from prelunet.evaluator.datasets.dataset import UNLABELLED
from prelunet.evaluator.json_checks import (
    check_plain,
    require_int,
    require_keys,
    require_list,
    require_object,
    require_str,
)
from prelunet.evaluator.terminal import escape_unprintable

MAX_SHARDS = 999_999
_NOWHERE = {"", ".", ".."}  # path parts that point outside a folder, or to itself
_LARGEST_SCORE = 1.001  # a probability plus the rounding error of half precision


def sanitize_name(name: str) -> str:
    """Make a name acceptable to `check_text`: escape unprintable characters, and truncate it if it is too long."""
    shown = escape_unprintable(name)
    return shown if len(shown) <= MAX_NAME_LENGTH else f"{shown[: MAX_NAME_LENGTH - 3]}..."


def check_text(value: Any, what: str) -> str:
    """Return the value if it is text of up to MAX_NAME_LENGTH characters without control characters."""
    check_plain(require_str(value, what))
    if len(value) > MAX_NAME_LENGTH or CONTROL_CHARACTERS.search(value):
        raise ValueError(f"{what} should be text of up to {MAX_NAME_LENGTH} characters without control characters")
    return str(value)


def parse_classes(data: Any) -> tuple[ClassEntry, ...]:
    """Parse the classes of a run, at least one."""
    classes = [require_keys(entry, "a class", {"wnid", "name"}) for entry in require_list(data, "classes")]
    if not classes:
        raise ValueError("classes should not be empty")
    return tuple(ClassEntry(check_text(entry["wnid"], "wnid"), check_text(entry["name"], "name")) for entry in classes)


def parse_model(data: Any) -> dict[str, Any]:
    """Check the description of the model."""
    model = require_keys(data, "model", {"file", "sha256", "architecture", "activation"})
    for key, value in model.items():
        check_text(value, key)
    _check_file_name(model["file"], "file")
    _check_digest(model["sha256"], "sha256")
    return model


def parse_dataset(data: Any) -> dict[str, Any]:
    """Check the description of the dataset."""
    dataset = require_keys(data, "dataset", {"name", "fingerprint", "images", "layout", "selection"})
    _check_file_name(check_text(dataset["name"], "name of the dataset"), "name of the dataset")
    check_text(dataset["layout"], "layout")
    require_int(dataset["images"], "images", 1)
    _check_digest(dataset["fingerprint"], "fingerprint")
    if dataset["selection"] is not None:
        check_text(dataset["selection"], "selection")
    return dataset


def parse_circumstances(data: Any) -> dict[str, Any]:
    """Check the description of the machine."""
    circumstances = require_keys(data, "circumstances", {"provider", "precision", "versions"})
    versions = require_object(circumstances["versions"], "versions")
    for key, value in (*versions.items(), *((key, circumstances[key]) for key in ("provider", "precision"))):
        check_text(value, check_text(key, "the name of a version"))
    return circumstances


def parse_shard(data: Any) -> tuple[int, int] | None:
    """Return the number of the shard and the number of shards, or None."""
    if data is None:
        return None
    shard = require_keys(data, "shard", {"number", "of"})
    of = require_int(shard["of"], "of", 1, MAX_SHARDS)
    return require_int(shard["number"], "number of the shard", 1, of), of


def parse_member(data: Any) -> Mapping[str, Any]:
    """Check the description of one member of an ensemble."""
    member = require_keys(data, "a member", {"model", "weight"})
    parse_model(member["model"])
    if type(member["weight"]) not in {int, float} or not 0 < member["weight"] <= 1:
        raise ValueError("the weight of a member should be above 0 and at most 1")
    return member


def _check_file_name(name: str, what: str) -> None:
    if "/" in name:
        raise ValueError(f"{what} should be a name without folders, not {name[:100]!r}")


def _check_digest(digest: Any, key: str) -> None:
    if not re.fullmatch("[0-9a-f]{64}", require_str(digest, key)):
        raise ValueError(f"{key} should be 64 hexadecimal digits")


def parse_label(data: Any, classes: int) -> int:
    """Return the index of the true class, or UNLABELLED."""
    return UNLABELLED if data is None else require_int(data, "label", 0, classes - 1)


def parse_file(file: Any) -> str:
    """Return a file name inside a dataset. Joined to a folder, it cannot point outside the folder."""
    if not _NOWHERE.isdisjoint(require_str(file, "file").split("/")) or "\0" in file:
        raise ValueError(f"file should be a relative name inside the dataset, not {file[:100]!r}")
    return str(file)


def parse_top(data: Any, classes: int, number: int) -> tuple[tuple[int, float], ...]:
    """Return the best answers: `number` distinct classes with their scores, in the order of `top_k`."""
    answers: list[tuple[int, float]] = []
    before, last = _LARGEST_SCORE, -1
    for answer in require_list(data, "top"):
        if type(answer) is not list or len(answer) != 2:
            raise ValueError("each answer in top should be [class index, score]")
        index, score = answer
        if type(score) not in {float, int} or not 0 <= score <= _LARGEST_SCORE:
            raise ValueError("a score should be a number from 0 to 1")
        require_int(index, "a class index in top", 0, classes - 1)
        if score > before or (score == before and index <= last):
            raise ValueError("top should have the best answer first, and of equal scores the lower class index")
        before, last = score, index
        answers.append((index, float(score)))
    if len(answers) != number:
        raise ValueError(f"top should have {number} answers, not {len(answers)}")
    if len({index for index, _ in answers}) != number:
        raise ValueError("top should not contain a class twice")
    return tuple(answers)


def parse_rank(data: Any, label: int, top: tuple[tuple[int, float], ...], classes: int) -> int:
    """Return the rank of the true class, which must be its position in `top`, or beyond `top`."""
    rank = require_int(data, "rank", 1, classes)
    for position, (index, _) in enumerate(top, start=1):
        if (position == rank) != (index == label):
            raise ValueError(f"rank {rank} of class {label} is not its position in top")
    return rank


def parse_view_ranks(data: Any, rank: int, classes: int, views: int) -> tuple[int, ...]:
    """Return the rank of the true class in each view; with a single view, it must be `rank`."""
    ranks = require_list(data, "view_ranks")
    if len(ranks) != views:
        raise ValueError(f"view_ranks should be those of the run's {views} views, not {len(ranks)}")
    checked = tuple(require_int(each, "rank of a view", 1, classes) for each in ranks)
    if views == 1 and checked != (rank,):
        raise ValueError(f"view_ranks of the only view should be [{rank}], not [{checked[0]}]")
    return checked
