"""What is told of one classified image: the same from a model file and through a server.

`Answer.to_json` is what `prelunet classify --json` prints, and the twin of `prelunet.v1.ClassifyResponse`, with the
same field names.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from prelunet.evaluator.errors import UsageError

DEFAULT_TOP_K = 5  # classes that are told unless another number is asked for


@dataclass(frozen=True)
class ClassScore:
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
class Timings:
    """Where a server's time for one image went, in seconds.

    queue: waiting for a thread that decodes, then for the device; decode: with resizing; compute: the whole duration of
    each batch that held a view of it; total: from arrival to answer; batches: that held a view of it.
    """

    queue_seconds: float
    decode_seconds: float
    compute_seconds: float
    total_seconds: float
    batches: int


@dataclass(frozen=True)
class Answer:
    """What is told of one image.

    predictions: best first; model: `name` and `sha256` of what answered; protocol: `Protocol.to_json()`;
    capped: a long side was cut to its centre; circumstances: provider, precision, versions;
    heatmap: a PNG file, empty unless asked for; timings: of a server's answer. Answers that differ in nothing else are
    equal.
    """

    predictions: tuple[ClassScore, ...]
    model: Mapping[str, str]
    protocol: Mapping[str, Any]
    views: tuple[AveragedView, ...]
    capped: bool
    circumstances: Mapping[str, Any]
    heatmap: bytes = b""
    timings: Timings | None = field(default=None, compare=False)

    def to_json(self) -> dict[str, Any]:
        """Return the answer as plain data, without the heat map; with timings where there are any."""
        plain = asdict(self)
        del plain["heatmap"]
        if self.timings is None:
            del plain["timings"]
        return plain


def answer_from_json(data: Mapping[str, Any], heatmap: bytes = b"") -> Answer:
    """Read what `Answer.to_json` wrote."""
    predictions = tuple(ClassScore(**entry) for entry in data["predictions"])
    views = tuple(AveragedView(**view) for view in data["views"])
    timings = Timings(**data["timings"]) if data.get("timings") is not None else None
    return Answer(**{**data, "predictions": predictions, "views": views, "heatmap": heatmap, "timings": timings})


def resolve_top_k(requested: int | None, classes: int) -> int:
    """Return how many classes to tell; UsageError for a number outside 1 to `classes`, the number there is."""
    if requested is None:
        return min(DEFAULT_TOP_K, classes)
    if not 1 <= requested <= classes:
        raise UsageError(f"top_k is {requested}, but this model can tell 1 to {classes} classes")
    return requested
