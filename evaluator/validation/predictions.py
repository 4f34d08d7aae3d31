"""The images of a run: one line of predictions.jsonl each. Build, write and read them, stored in columns."""

import os
from array import array
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import repeat
from pathlib import Path
from typing import Annotated, Any, overload

from msgspec import Meta, Struct, convert

from ..datasets.dataset import UNLABELLED
from ..engine.classify import Classification
from ..engine.scores import shortest_decimal
from ..errors import RunFolderError
from ..files import OpenFile, open_regular
from ..imaging.decode import TRAITS, Trait
from ..json_checks import parse_json

TOP_CLASSES = 5  # classes kept per image: the paper's top-5
_BLOCK = 1024  # images built at a time while iterating


@dataclass(frozen=True)
class Prediction:
    """One image of a run, as one line of predictions.jsonl.

    label: true class index, UNLABELLED (-1, in the file null) if unknown; top: up to five (class index, score), best
    first; rank: of the true class, from 1, or 0 if unknown; view_ranks: its rank in each view alone, in the order of
    `RunInfo.views`; refused: why the image could not be evaluated; such an image has neither top nor rank; also: its
    other true classes. With several, the ranks are those of the best one; traits: of its file, in the order of TRAITS.
    """

    file: str
    label: int
    top: tuple[tuple[int, float], ...] = ()
    rank: int = 0
    view_ranks: tuple[int, ...] = ()
    capped: bool = False
    refused: str | None = None
    also: tuple[int, ...] = ()
    traits: tuple[Trait, ...] = ()

    @property
    def labels(self) -> tuple[int, ...]:
        """Return the indices of all true classes, `label` first."""
        return (self.label, *self.also)

    def to_json(self) -> dict[str, Any]:
        """Return the line as plain data."""
        truth: dict[str, Any] = {"label": None if self.label == UNLABELLED else self.label}
        if self.also:
            truth["also"] = list(self.also)
        if self.refused is not None:
            return {"file": self.file, **truth, "refused": self.refused}
        return {
            "file": self.file,
            **truth,
            "top": [[index, score] for index, score in self.top],
            "rank": self.rank or None,
            "view_ranks": list(self.view_ranks),
            "capped": self.capped,
            **({"traits": list(self.traits)} if self.traits else {}),
        }


def build_prediction(
    file: str,
    label: int,
    classified: Classification,
    also: tuple[int, ...] = (),
    traits: tuple[Trait, ...] = (),
) -> Prediction:
    """Build the line of one classified image. label: true class index, or UNLABELLED; also: other true classes."""
    has_label = label != UNLABELLED
    return Prediction(
        file=file,
        label=label,
        top=tuple((index, shortest_decimal(score)) for index, score in classified.top(TOP_CLASSES)),
        rank=classified.rank(label, *also) if has_label else 0,
        view_ranks=tuple(classified.view_ranks(label, *also)) if has_label else (),
        capped=classified.capped,
        also=also,
        traits=traits,
    )


_TRAITS_OF = [tuple(t for place, t in enumerate(TRAITS) if bits >> place & 1) for bits in range(1 << len(TRAITS))]
_LARGEST_SCORE = 1.001  # a probability plus the rounding error of half precision
_Index = Annotated[int, Meta(ge=0, lt=2**31)]  # of a class
_Rank = Annotated[int, Meta(ge=1, lt=2**31)]
_Score = Annotated[float, Meta(ge=0, le=_LARGEST_SCORE)]


class _RefusedLine(Struct, forbid_unknown_fields=True):
    """A line of predictions.jsonl about an image that could not be evaluated."""

    file: str
    label: _Index | None
    refused: str
    also: tuple[_Index, ...] = ()


class _EvaluatedLine(Struct, forbid_unknown_fields=True):
    """A line of predictions.jsonl about any other image."""

    file: str
    label: _Index | None
    top: tuple[tuple[_Index, _Score], ...]
    rank: _Rank | None
    view_ranks: tuple[_Rank, ...]
    capped: bool
    also: tuple[_Index, ...] = ()
    traits: tuple[Trait, ...] = ()


def parse_prediction(text: bytes, classes: int, views: int, candidates: Collection[int] | None = None) -> Prediction:
    """Parse one line of a run. classes, views: their numbers in the run; candidates: see `RunInfo.candidates`.

    Raises ValueError with the fault.
    """
    data = parse_json(text)
    refused = type(data) is dict and "refused" in data
    line = convert(data, _RefusedLine) if refused else convert(data, _EvaluatedLine)
    if not {"", ".", ".."}.isdisjoint(line.file.split("/")) or "\0" in line.file:
        raise ValueError(f"file should be a relative name inside the dataset, not {line.file[:100]!r}")
    label = UNLABELLED if line.label is None else line.label
    candidates = range(classes) if candidates is None else candidates
    truth = () if line.label is None else (line.label, *line.also)
    _check_classes("label", truth, classes, candidates)
    if len(set(truth)) < len(truth) or (line.label is None and line.also):
        raise ValueError("also should contain other classes than label, none of them twice")
    if isinstance(line, _RefusedLine):
        return Prediction(line.file, label, refused=line.refused, also=line.also)
    if len(line.top) != (number := min(TOP_CLASSES, len(candidates))):
        raise ValueError(f"top should have {number} answers, not {len(line.top)}")
    _check_classes("a class index in top", [index for index, _ in line.top], classes, candidates)
    if (line.rank is None) != (label == UNLABELLED) or (label == UNLABELLED and line.view_ranks):
        raise ValueError("rank and view_ranks should be given with a label, and only then")
    if max(line.rank or 0, *line.view_ranks, 0) > (worst := len(candidates) - len(line.also)):
        raise ValueError(f"rank and view_ranks should be at most {worst}")
    if line.rank is not None and len(line.view_ranks) != views:
        raise ValueError(f"view_ranks should be those of the run's {views} views, not {len(line.view_ranks)}")
    return Prediction(
        line.file, label, line.top, line.rank or 0, line.view_ranks, line.capped, also=line.also, traits=line.traits
    )


def _check_classes(what: str, indices: Collection[int], classes: int, candidates: Collection[int]) -> None:
    if max(indices, default=0) >= classes:
        raise ValueError(f"{what} should be less than {classes}, not {max(indices)}")
    if outside := [index for index in indices if index not in candidates]:
        raise ValueError(f"{what} should be among the classes to which the run is restricted, not {outside[0]}")


class Predictions(Sequence[Prediction]):
    """The lines of a run, stored in columns. Each `Prediction` is built on access and not kept.

    An image takes about 100 bytes plus its name and 2 bytes per view, where an object takes 1000: ImageNet's training
    set stays below 250 MB. classes, views: their numbers; candidates: number of classes that `top` can contain.
    """

    def __init__(self, classes: int, views: int, candidates: int = TOP_CLASSES) -> None:
        self._answers, self._views = min(TOP_CLASSES, classes, candidates), views
        small = "H" if classes < 2**16 else "I"  # fits a class index and a rank
        self._files = bytearray()  # names, each followed by a zero byte, which names cannot contain
        self._ends = array("Q", [0])  # of names in `_files`
        self._label = array("i")
        self._classes, self._scores = array(small), array("d")  # `_answers` for each image
        self._rank, self._view_ranks = array(small), array(small)  # `_views` for each image
        self._capped = array("B")
        self._traits = array("B")  # a bit for each of TRAITS
        self._refused: dict[int, str] = {}
        self._also: dict[int, tuple[int, ...]] = {}

    def append(self, prediction: Prediction) -> None:
        """Append a line as returned by `parse_prediction`."""
        if prediction.refused is not None:
            self._refused[len(self)] = prediction.refused
        if prediction.also:
            self._also[len(self)] = prediction.also
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
        self._traits.append(sum(1 << TRAITS.index(trait) for trait in prediction.traits))

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
        of_views = iter(self._view_ranks[first * self._views : stop * self._views])
        columns = zip(
            range(first, stop),
            files[:-1],
            self._label[span],
            zip(*[answers] * self._answers, strict=True),  # of one iterator: consecutive answers are grouped
            self._rank[span],
            zip(*[of_views] * self._views, strict=True) if self._views else repeat((), stop - first),
            self._capped[span],
            self._traits[span],
            strict=True,
        )
        for number, file, label, top, rank, ranks, capped, bits in columns:
            also = self._also.get(number, ())
            if number in self._refused:
                yield Prediction(file, label, refused=self._refused[number], also=also)
            else:
                view_ranks = ranks if rank else ()
                yield Prediction(file, label, top, rank, view_ranks, bool(capped), also=also, traits=_TRAITS_OF[bits])


def read_predictions(
    path: Path,
    classes: int,
    views: int,
    candidates: Collection[int] | None = None,
    open_file: OpenFile = open_regular,
) -> Predictions:
    """Read predictions.jsonl, whose lines are in the order of the file names. A missing file has no lines.

    classes, views: their numbers in the run; candidates: see `RunInfo.candidates`.
    Raises RunFolderError with the number of a damaged line.
    """
    candidates = range(classes) if candidates is None else frozenset(candidates)
    predictions = Predictions(classes, views, len(candidates))
    if not os.path.lexists(path):
        return predictions
    last = ""
    try:
        file = open_file(path)
    except OSError as error:
        raise RunFolderError(
            f"{path}: cannot be read ({error.strerror}). Restore the file, or repeat the run in another folder"
        ) from error
    with file as lines:
        for number, line in enumerate(lines, start=1):
            try:
                prediction = parse_prediction(line, classes, views, candidates)
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
