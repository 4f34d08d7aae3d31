"""Where the time goes: how long threads are at each stage of the path of an image, and how much passes through.

Always on: what it takes, some 3 microseconds a stage of an image, is far below what it measures.
"""

import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

# In the order of the path. upload: `Session.stage`; write: lines and scores onto the disk; wait: for lack of batches.
Stage = Literal["read", "decode", "resize", "pack", "upload", "compute", "average", "write", "wait"]
STAGES: tuple[Stage, ...] = get_args(Stage)


@dataclass(frozen=True)
class StageTotals:
    """What was done up to a moment, or between two.

    seconds: of threads at each stage, waiting for a core included, all threads together; what is begun does not count;
    images: that were prepared, refused ones included; views, batches: that were packed;
    changes: of the shape of a session's input, its first included; each may cost a GPU new plans;
    view_pixels, canvas_pixels: of the packed views, and of their canvases, blank ones included.
    """

    seconds: Mapping[Stage, float] = field(default_factory=dict)
    images: int = 0
    views: int = 0
    batches: int = 0
    changes: int = 0
    view_pixels: int = 0
    canvas_pixels: int = 0

    @property
    def padding(self) -> float:
        """Return the share of the computed pixels that belong to no view, 0 to 1."""
        return 1 - self.view_pixels / self.canvas_pixels if self.canvas_pixels else 0.0

    def since(self, before: "StageTotals") -> "StageTotals":
        """Return what was done after an earlier moment."""
        return StageTotals(
            {stage: self.seconds[stage] - before.seconds.get(stage, 0.0) for stage in self.seconds},
            self.images - before.images,
            self.views - before.views,
            self.batches - before.batches,
            self.changes - before.changes,
            self.view_pixels - before.view_pixels,
            self.canvas_pixels - before.canvas_pixels,
        )

    def to_json(self) -> dict[str, Any]:
        """Return it as plain data, stages at which nobody was left out."""
        return {
            "stages": {stage: round(seconds, 3) for stage, seconds in self.seconds.items() if seconds},
            "prepared": self.images,
            "views": self.views,
            "batches": self.batches,
            "canvas_changes": self.changes,
            "padding": round(self.padding, 4),
        }


class StageTimer:
    """A stopwatch for many threads at once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seconds: dict[Stage, float] = dict.fromkeys(STAGES, 0.0)
        self._counts: Counter[str] = Counter()
        self._views: Counter[tuple[int, int]] = Counter()
        self._canvases: Counter[tuple[int, int, int]] = Counter()

    @contextmanager
    def timed(self, stage: Stage) -> Iterator[None]:
        """Count the time of a block, also of one that fails."""
        begun = time.perf_counter()
        try:
            yield
        finally:
            self.add(stage, time.perf_counter() - begun)

    def add(self, stage: Stage, seconds: float) -> None:
        """Count time that was measured elsewhere."""
        with self._lock:
            self._seconds[stage] += seconds

    def image_prepared(self) -> None:
        """Count an image that was decoded and resized, or refused."""
        with self._lock:
            self._counts["images"] += 1

    def batch_packed(self, canvas: tuple[int, int, int], views: list[tuple[int, int]], *, changed: bool) -> None:
        """Count a batch.

        canvas: rows, height and width; views: height and width of each; changed: the session's batch before had
        another canvas, or there was none.
        """
        rows, height, width = canvas
        with self._lock:
            self._views.update(views)
            self._canvases[canvas] += 1
            self._counts["views"] += len(views)
            self._counts["batches"] += 1
            self._counts["changes"] += changed
            self._counts["view_pixels"] += sum(high * wide for high, wide in views)
            self._counts["canvas_pixels"] += rows * height * width

    def totals(self) -> StageTotals:
        """Return what was done so far."""
        with self._lock:
            return StageTotals(dict(self._seconds), **self._counts)

    def view_shapes(self) -> dict[tuple[int, int], int]:
        """Return how many views of each height and width there were; no more shapes than the protocol allows."""
        with self._lock:
            return dict(self._views)

    def canvases(self) -> dict[tuple[int, int, int], int]:
        """Return how many batches of each rows, height and width there were."""
        with self._lock:
            return dict(self._canvases)
