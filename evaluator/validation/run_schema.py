"""The parts of run.json and of a line of predictions.jsonl, checked: of the right kind, and agreeing with each other.

Everything raises ValueError that says what is wrong; the caller says in which file.
"""

import re
from collections.abc import Mapping
from typing import Any

from prelunet.evaluator.contract import CONTROL, LONGEST_NAME, ClassEntry
from prelunet.evaluator.datasets.dataset import UNLABELLED
from prelunet.evaluator.json_checks import a_list, an_object, check_plain, record, text, whole
from prelunet.evaluator.terminal import printable

MOST_SHARDS = 999_999
_NOWHERE = {"", ".", ".."}  # parts of a path that lead out of a folder, or to itself
_LARGEST_SCORE = 1.001  # a probability, and what half precision may add to it


def fitting(name: str) -> str:
    """Return a name as run.json takes it: what `words` would refuse is written out, and what is too long is cut."""
    shown = printable(name)
    return shown if len(shown) <= LONGEST_NAME else f"{shown[: LONGEST_NAME - 3]}..."


def words(value: Any, what: str) -> str:
    """Return the value, a text of no more than LONGEST_NAME characters, none of which steers a terminal."""
    check_plain(text(value, what))
    if len(value) > LONGEST_NAME or CONTROL.search(value):
        raise ValueError(f"{what} should be text of up to {LONGEST_NAME} characters without control characters")
    return str(value)


def class_entries(data: Any) -> tuple[ClassEntry, ...]:
    """Return the classes of a run, at least one."""
    classes = [record(entry, "a class", {"wnid", "name"}) for entry in a_list(data, "classes")]
    if not classes:
        raise ValueError("classes should not be empty")
    return tuple(ClassEntry(words(entry["wnid"], "wnid"), words(entry["name"], "name")) for entry in classes)


def model_part(data: Any) -> dict[str, Any]:
    """Return what is said of the model."""
    model = record(data, "model", {"file", "sha256", "architecture", "activation"})
    for key, value in model.items():
        words(value, key)
    _check_file_name(model["file"], "file")
    _check_digest(model["sha256"], "sha256")
    return model


def dataset_part(data: Any) -> dict[str, Any]:
    """Return what is said of the dataset."""
    dataset = record(data, "dataset", {"name", "fingerprint", "images", "layout", "selection"})
    _check_file_name(words(dataset["name"], "name of the dataset"), "name of the dataset")
    words(dataset["layout"], "layout")
    whole(dataset["images"], "images", 1)
    _check_digest(dataset["fingerprint"], "fingerprint")
    if dataset["selection"] is not None:
        words(dataset["selection"], "selection")
    return dataset


def circumstances_part(data: Any) -> dict[str, Any]:
    """Return what is said of the machine."""
    circumstances = record(data, "circumstances", {"provider", "precision", "versions"})
    versions = an_object(circumstances["versions"], "versions")
    for key, value in (*versions.items(), *((key, circumstances[key]) for key in ("provider", "precision"))):
        words(value, words(key, "the name of a version"))
    return circumstances


def shard_part(data: Any) -> tuple[int, int] | None:
    """Return which of how many shards it is, or None."""
    if data is None:
        return None
    shard = record(data, "shard", {"number", "of"})
    of = whole(shard["of"], "of", 1, MOST_SHARDS)
    return whole(shard["number"], "number of the shard", 1, of), of


def member_part(data: Any) -> Mapping[str, Any]:
    """Return what is said of one member of an ensemble."""
    member = record(data, "a member", {"model", "weight"})
    model_part(member["model"])
    if type(member["weight"]) not in {int, float} or not 0 < member["weight"] <= 1:
        raise ValueError("the weight of a member should be above 0 and at most 1")
    return member


def _check_file_name(name: str, what: str) -> None:
    if "/" in name:
        raise ValueError(f"{what} should be a name without folders, not {name[:100]!r}")


def _check_digest(digest: Any, key: str) -> None:
    if not re.fullmatch("[0-9a-f]{64}", text(digest, key)):
        raise ValueError(f"{key} should be 64 hexadecimal digits")


def label_of(data: Any, classes: int) -> int:
    """Return the class index of the truth, or UNLABELLED."""
    return UNLABELLED if data is None else whole(data, "label", 0, classes - 1)


def relative_name(file: Any) -> str:
    """Return the name of a file inside its dataset; whoever joins it to a folder stays in that folder."""
    if not _NOWHERE.isdisjoint(text(file, "file").split("/")) or "\0" in file:
        raise ValueError(f"file should be a relative name inside the dataset, not {file[:100]!r}")
    return str(file)


def answers_of(data: Any, classes: int, number: int) -> tuple[tuple[int, float], ...]:
    """Return the best answers: so many different classes with their scores, in the order in which `top_k` has them."""
    answers: list[tuple[int, float]] = []
    before, last = _LARGEST_SCORE, -1
    for answer in a_list(data, "top"):
        if type(answer) is not list or len(answer) != 2:
            raise ValueError("each answer in top should be [class index, score]")
        index, score = answer
        if type(score) not in {float, int} or not 0 <= score <= _LARGEST_SCORE:
            raise ValueError("a score should be a number from 0 to 1")
        whole(index, "a class index in top", 0, classes - 1)
        if score > before or (score == before and index <= last):
            raise ValueError("top should have the best answer first, and of equal scores the lower class index")
        before, last = score, index
        answers.append((index, float(score)))
    if len(answers) != number:
        raise ValueError(f"top should have {number} answers, not {len(answers)}")
    if len({index for index, _ in answers}) != number:
        raise ValueError("top should have no class twice")
    return tuple(answers)


def checked_rank(data: Any, label: int, top: tuple[tuple[int, float], ...], classes: int) -> int:
    """Return the rank of the truth, which must be its place in `top`, or beyond it."""
    rank = whole(data, "rank", 1, classes)
    for place, (index, _) in enumerate(top, start=1):
        if (place == rank) != (index == label):
            raise ValueError(f"rank {rank} of class {label} is not its place in top")
    return rank


def view_ranks_of(data: Any, rank: int, classes: int, views: int) -> tuple[int, ...]:
    """Return the rank of the truth in each view; that of an only view is `rank`."""
    ranks = a_list(data, "view_ranks")
    if len(ranks) != views:
        raise ValueError(f"view_ranks should be those of the run's {views} views, not {len(ranks)}")
    found = tuple(whole(each, "rank of a view", 1, classes) for each in ranks)
    if views == 1 and found != (rank,):
        raise ValueError(f"view_ranks of the only view should be [{rank}], not [{found[0]}]")
    return found
