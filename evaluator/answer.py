"""The answer for one classified image, the same from a model file and through a server.

`prelunet classify --json` prints `Answer.to_json`. Its field names are those of `prelunet.v1.ClassifyResponse`.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from html import escape
from typing import Any, SupportsIndex

from .cards import bar, table
from .errors import UsageError
from .terminal import escape_unprintable

DEFAULT_TOP_K = 5  # classes in an answer, unless another number is requested


@dataclass(frozen=True)
class ClassEntry:
    """One class; its index is its place in the model's list (ImageNet: sorted wnid order, 0-based)."""

    wnid: str
    name: str

    def to_json(self) -> dict[str, str]:
        return {"wnid": self.wnid, "name": self.name}


@dataclass(frozen=True)
class Prediction:
    """One class and its score, 0 to 1."""

    class_index: int
    wnid: str
    name: str
    score: float


@dataclass(frozen=True)
class AveragedView:
    """One view that was averaged. scale: pixels; part: see `View`; windows: `rows` and `columns` of its grid."""

    scale: int
    mirrored: bool
    part: str
    windows: Mapping[str, int]


@dataclass(frozen=True)
class ClassMap:
    """Where the model sees a class: scores at rows x columns points, row by row, 0 to 1, -1 where no view looked.

    image_height, image_width: of the image in pixels, which the points cover.
    """

    class_index: int
    rows: int
    columns: int
    scores: tuple[float, ...]
    image_height: int
    image_width: int


@dataclass(frozen=True)
class Timings:
    """How a server spent its time on one image, in seconds.

    queue: waiting for a decoding thread, then for the device; decode: decoding and resizing; compute: the whole
    duration of each batch that contained a view of the image; total: from arrival to answer; batches: number of
    batches that contained a view of the image.
    """

    queue_seconds: float
    decode_seconds: float
    compute_seconds: float
    total_seconds: float
    batches: int


@dataclass(frozen=True, repr=False)
class Answer:
    """The answer for one image.

    predictions: best first; model: its `name` and `sha256`, in a server's answer also its `version`; protocol:
    `EvaluationProtocol.to_json()`; capped: whether a long side was cut to its center; circumstances: provider,
    precision, versions; heatmap: a PNG file, empty unless requested; maps: of a server's answer, empty unless
    requested; timings: of a server's answer, ignored when answers are compared.
    """

    predictions: tuple[Prediction, ...]
    model: Mapping[str, Any]
    protocol: Mapping[str, Any]
    views: tuple[AveragedView, ...]
    capped: bool
    circumstances: Mapping[str, Any]
    heatmap: bytes = b""
    timings: Timings | None = field(default=None, compare=False)
    maps: tuple[ClassMap, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return the answer as plain data, without the heat maps; with timings if there are any."""
        plain = asdict(self)
        del plain["heatmap"], plain["maps"]
        if self.timings is None:
            del plain["timings"]
        return plain

    def __repr__(self) -> str:
        found = ", ".join(f"{prediction.name} {prediction.score:.1%}" for prediction in self.predictions)
        return escape_unprintable(f"<Answer: {found}>")

    def _repr_html_(self) -> str:
        """Return the best classes as a table with bars, for notebooks."""
        return table((escape(found.name), f"{found.score:.1%}", bar(found.score)) for found in self.predictions)


def answer_from_json(data: Mapping[str, Any], heatmap: bytes = b"") -> Answer:
    """Create an answer from the output of `Answer.to_json`."""
    predictions = tuple(Prediction(**entry) for entry in data["predictions"])
    views = tuple(AveragedView(**view) for view in data["views"])
    timings = Timings(**data["timings"]) if data.get("timings") is not None else None
    return Answer(**{**data, "predictions": predictions, "views": views, "heatmap": heatmap, "timings": timings})


def resolve_top_k(requested: int | None, classes: int) -> int:
    """Return the number of classes in an answer; UsageError unless 1 <= requested <= classes."""
    if requested is None:
        return min(DEFAULT_TOP_K, classes)
    if not (isinstance(requested, SupportsIndex) and 1 <= requested.__index__() <= classes):
        raise UsageError(f"top_k is {requested!r}, but it must be 1 to {classes}, the number of this model's classes")
    return requested
