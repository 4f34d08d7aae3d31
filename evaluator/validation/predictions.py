"""The images of a run: one line of predictions.jsonl each. Build, write and read them, stored in columns."""

import os
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import repeat
from pathlib import Path
from typing import Any, BinaryIO, overload

from prelunet.evaluator.datasets.dataset import UNLABELLED
from prelunet.evaluator.engine.classify import Classification
from prelunet.evaluator.engine.scores import shortest_decimal
from prelunet.evaluator.errors import RunFolderError
from prelunet.evaluator.json_checks import parse_json, require_bool, require_keys, require_str
from prelunet.evaluator.validation.run_schema import parse_file, parse_label, parse_rank, parse_top, parse_view_ranks

TOP_CLASSES = 5  # classes kept per image: the paper's top-5
_BLOCK = 1024  # images built at a time while iterating


@dataclass(frozen=True)
class Prediction:
    """One image of a run, as one line of predictions.jsonl.

    label: true class index, UNLABELLED (-1, in the file null) if unknown; top: up to five (class index, score), best
    first; rank: of the true class, from 1, or 0 if unknown; view_ranks: its rank in each view alone, in the order of
    `RunInfo.views`; refused: why the image could not be evaluated; such an image has neither top nor rank.
    """

    file: str
    label: int
    top: tuple[tuple[int, float], ...] = ()
    rank: int = 0
    view_ranks: tuple[int, ...] = ()
    capped: bool = False
    refused: str | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the line as plain data."""
        label = None if self.label == UNLABELLED else self.label
        if self.refused is not None:
            return {"file": self.file, "label": label, "refused": self.refused}
        return {
            "file": self.file,
            "label": label,
            "top": [[index, score] for index, score in self.top],
            "rank": self.rank or None,
            "view_ranks": list(self.view_ranks),
            "capped": self.capped,
        }


def build_prediction(file: str, label: int, classified: Classification) -> Prediction:
    """Build the line of one classified image. label: true class index, or UNLABELLED."""
    has_label = label != UNLABELLED
    return Prediction(
        file=file,
        label=label,
        top=tuple((index, shortest_decimal(score)) for index, score in classified.top(TOP_CLASSES)),
        rank=classified.rank(label) if has_label else 0,
        view_ranks=tuple(classified.view_ranks(label)) if has_label else (),
        capped=classified.capped,
    )


_REFUSED_KEYS = {"file", "label", "refused"}
_EVALUATED_KEYS = {"file", "label", "top", "rank", "view_ranks", "capped"}


def prediction_from_json(data: Any, classes: int, views: int) -> Prediction:
    """Parse one line of a run. classes, views: their numbers in the run.

    Strict, because run folders are untrusted. Raises ValueError with the fault.
    """
    if type(data) is dict and "refused" in data:
        entry = require_keys(data, "it", _REFUSED_KEYS)
        return Prediction(
            file=parse_file(entry["file"]),
            label=parse_label(entry["label"], classes),
            refused=require_str(entry["refused"], "refused"),
        )
    entry = require_keys(data, "it", _EVALUATED_KEYS)
    label, top = parse_label(entry["label"], classes), parse_top(entry["top"], classes, min(TOP_CLASSES, classes))
    if label == UNLABELLED and (entry["rank"] is not None or entry["view_ranks"] != []):
        raise ValueError("rank and view_ranks need a label")
    rank = 0 if label == UNLABELLED else parse_rank(entry["rank"], label, top, classes)
    return Prediction(
        file=parse_file(entry["file"]),
        label=label,
        top=top,
        rank=rank,
        view_ranks=() if label == UNLABELLED else parse_view_ranks(entry["view_ranks"], rank, classes, views),
        capped=require_bool(entry["capped"], "capped"),
    )


class Predictions(Sequence[Prediction]):
    """The lines of a run, stored in columns. Each `Prediction` is built on access and not kept.

    An image takes about 100 bytes plus its name and 2 bytes per view, where an object takes 1000: ImageNet's training
    set stays below 250 MB.
    """

    def __init__(self, classes: int, views: int) -> None:
        self._answers, self._views = min(TOP_CLASSES, classes), views
        small = "H" if classes < 2**16 else "I"  # fits a class index and a rank
        self._files = bytearray()  # names, each followed by a zero byte, which names cannot contain
        self._ends = array("Q", [0])  # of names in `_files`
        self._label = array("i")
        self._classes, self._scores = array(small), array("d")  # `_answers` for each image
        self._rank, self._view_ranks = array(small), array(small)  # `_views` for each image
        self._capped = array("B")
        self._refused: dict[int, str] = {}

    def append(self, prediction: Prediction) -> None:
        """Append a line as returned by `prediction_from_json`."""
        if prediction.refused is not None:
            self._refused[len(self)] = prediction.refused
        top = prediction.top or ((0, 0.0),) * self._answers  # empty for a refused image
        view_ranks = prediction.view_ranks or (0,) * self._views  # also empty without a label
        assert (len(top), len(view_ranks)) == (self._answers, self._views), "columns need a fixed width"
        self._files += prediction.file.encode("utf-8", "surrogatepass") + b"\0"
        self._ends.append(len(self._files))
        self._label.append(prediction.label)
        for index, score in top:
            self._classes.append(index)
            self._scores.append(score)
        self._rank.append(prediction.rank)
        self._view_ranks.extend(view_ranks)
        self._capped.append(prediction.capped)

    def __len__(self) -> int:
        return len(self._label)

    @overload
    def __getitem__(self, index: int) -> Prediction: ...
    @overload
    def __getitem__(self, index: slice) -> list[Prediction]: ...
    def __getitem__(self, index: int | slice) -> Prediction | list[Prediction]:
        if isinstance(index, int):
            number = range(len(self))[index]
            return next(self._build(number, number + 1))
        start, stop, step = index.indices(len(self))
        if step != 1:
            return [self[number] for number in range(start, stop, step)]
        return list(self._build(start, stop))

    def __iter__(self) -> Iterator[Prediction]:
        for first in range(0, len(self), _BLOCK):
            yield from self._build(first, min(first + _BLOCK, len(self)))

    def _build(self, first: int, stop: int) -> Iterator[Prediction]:
        """Yield the lines of the images from first to stop - 1."""
        span, tops = slice(first, stop), slice(first * self._answers, stop * self._answers)
        files = self._files[self._ends[first] : self._ends[stop]].decode("utf-8", "surrogatepass").split("\0")
        answers = zip(self._classes[tops], self._scores[tops], strict=True)
        view_ranks = iter(self._view_ranks[first * self._views : stop * self._views])
        columns = zip(
            range(first, stop),
            files[:-1],
            self._label[span],
            zip(*[answers] * self._answers, strict=True),  # of one iterator: consecutive answers are grouped
            self._rank[span],
            zip(*[view_ranks] * self._views, strict=True) if self._views else repeat((), stop - first),
            self._capped[span],
            strict=True,
        )
        for number, file, label, top, rank, ranks, capped in columns:
            if number in self._refused:
                yield Prediction(file, label, refused=self._refused[number])
            else:
                yield Prediction(file, label, top, rank, ranks if rank else (), bool(capped))


def read_predictions(path: Path, classes: int, views: int) -> Predictions:
    """Read predictions.jsonl, whose lines are in the order of the file names. A missing file has no lines.

    classes, views: their numbers in the run. Raises RunFolderError with the number of a damaged line.
    """
    predictions = Predictions(classes, views)
    if not os.path.lexists(path):
        return predictions
    last = ""
    with _opened(path) as lines:
        for number, line in enumerate(lines, start=1):
            try:
                prediction = prediction_from_json(parse_json(line), classes, views)
                if prediction.file <= last:
                    raise ValueError(f"{prediction.file[:100]!r} should not follow {last[:100]!r} (sorted names)")
            except ValueError as error:
                raise RunFolderError(
                    f"{path}: line {number} is damaged ({error}). Restore the file, or run the command of this run "
                    "again to repeat the images from there"
                ) from error
            predictions.append(prediction)
            last = prediction.file
    return predictions


def _opened(path: Path) -> BinaryIO:
    """Open an existing file of a run, which may be a broken link."""
    try:
        if path.exists() and not path.is_file():
            raise RunFolderError(f"{path}: not a regular file. Restore it, or repeat the run in another folder")
        return path.open("rb")
    except OSError as error:
        raise RunFolderError(
            f"{path}: cannot be read ({error.strerror}). Restore the file, or repeat the run in another folder"
        ) from error
