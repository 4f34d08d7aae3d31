"""The images of a run: one line of predictions.jsonl each. Build, write and read them."""

import os
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from msgspec import Meta, Struct, convert

from ..datasets.dataset import UNLABELLED
from ..engine.classify import Classification
from ..engine.scores import shortest_decimal
from ..errors import RunFolderError
from ..files import OpenFile, open_regular
from ..imaging.decode import Trait
from ..json_checks import parse_json

TOP_CLASSES = 5  # classes kept per image: the paper's top-5


@dataclass(frozen=True, slots=True)
class Prediction:
    """One image of a run, as one line of predictions.jsonl. It takes about 1 kB.

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
    data = parse_json(text, file_names=True)
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


def read_predictions(
    path: Path,
    classes: int,
    views: int,
    candidates: Collection[int] | None = None,
    open_file: OpenFile = open_regular,
) -> list[Prediction]:
    """Read predictions.jsonl, whose lines are in the order of the file names. A missing file has no lines.

    classes, views: their numbers in the run; candidates: see `RunInfo.candidates`.
    Raises RunFolderError with the number of a damaged line.
    """
    candidates = range(classes) if candidates is None else frozenset(candidates)
    predictions: list[Prediction] = []
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
