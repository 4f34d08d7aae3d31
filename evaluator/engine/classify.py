"""The path of one image from pixels to its five best classes; server, `classify` and `validate` share it.

    1  decode_image             bytes → Pillow's RGB image                       any thread
    2, 3  make_views            resized to each scale, plain and mirrored        any thread
    4  plan_views, pack_batch   views of all waiting images on few canvases      any thread
    5  Session.run              (N, H, W, 3), sizes → scores, logits             one thread at a time, or in lanes
    6  average_image            mirrored pair → scale → image                    any thread
    7  top_k                    ties to the lower index                          any thread

`run_views` covers steps 4 and 5, `classify_images` steps 2 to 6, for callers without threads. `validation.pipeline`
overlaps all steps for an endless stream of images.
evaluator/README.md explains the path with an example.
"""

from collections.abc import Iterable, Sequence
from functools import cached_property
from itertools import islice

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from ..answer import Answer, AveragedView, Prediction
from ..arrays import Float32Array, Int64Array, UInt8Array
from ..imaging.resize import DecodedImage
from ..imaging.views import ViewImage, make_views, pack
from ..protocols import Averaging, EvaluationProtocol, View
from .batching import Batch, BatchPlan, BatchRules, plan_batches
from .scores import (
    average_views,
    best_ranks,
    check_finite,
    nine_windows,
    restrict,
    shortest_decimal,
    softmax,
    top_k,
    view_weights,
)
from .session import Outputs, Session
from .shape_buckets import ShapeBuckets


class ViewResult(Struct, frozen=True):
    """The model's result for one view.

    scores, logits: float32 (classes,), means over the view's windows; windows: rows and columns of their grid;
    height, width: of the view in pixels; capped: a long side was cut to its center;
    window_scores: float32 (rows, columns, classes) of the whole grid, even if only nine of its windows count; None
    unless requested.
    """

    view: View
    height: int
    width: int
    capped: bool
    windows: tuple[int, int]
    scores: Float32Array
    logits: Float32Array
    window_scores: Float32Array | None = None


class Classification(Struct, frozen=True, dict=True):
    """The result for one image.

    scores: float32 (classes,), which sum to 1; views: in the protocol's order; candidates: the class indices among
    which it was classified, None for all.
    """

    scores: Float32Array
    views: tuple[ViewResult, ...]
    averaging: Averaging
    candidates: tuple[int, ...] | None = None

    def among(self, candidates: tuple[int, ...] | None) -> "Classification":
        """Return the result among some classes only, as `scores.restrict` defines it."""
        if candidates is None:
            return self
        return replace(self, scores=restrict(self.scores[None], candidates)[0], candidates=candidates)

    @cached_property
    def view_scores(self) -> Float32Array:
        """Return the scores of each view alone, float32 (views, classes); each row sums to 1."""
        if self.averaging == "logit":
            scores = softmax([view.logits for view in self.views]).astype(np.float32)
        else:
            scores = np.stack([view.scores for view in self.views])
        return restrict(scores, self.candidates)

    @property
    def capped(self) -> bool:
        """Return whether any view was cut because the image is too elongated."""
        return any(view.capped for view in self.views)

    def rank(self, *labels: int) -> int:
        """Return the rank of a class, 1 for the best; of several classes, that of the best one."""
        return int(best_ranks(self.scores[None], [labels])[0])

    def view_ranks(self, *labels: int) -> list[int]:
        """Return the rank of a class, or of the best one of several, in each view alone."""
        ranks: list[int] = best_ranks(self.view_scores, [labels] * len(self.views)).tolist()
        return ranks

    def top(self, k: int) -> list[tuple[int, float]]:
        """Return the k best classes as (class index, score), best first; ties go to the lower index."""
        return top_k(self.scores, k)


def classify_images(
    session: Session,
    images: Iterable[DecodedImage],
    protocol: EvaluationProtocol,
    *,
    keep_windows: bool = False,
) -> list[Classification]:
    """Classify decoded images, uint8 (H, W, 3) or Pillow RGB images; their views share batches.

    images: a generator that decodes them needs memory for one of them and the views of all;
    keep_windows: keep each view's window scores, which a heat map needs (0.5 to 2 MB per view at 1000 classes).
    Raises ContractError when the model returns NaN.
    """
    views = [make_views(image, protocol) for image in images]
    results = iter(run_views(session, [view for of_image in views for view in of_image], keep_windows=keep_windows))
    return [average_image(protocol, list(islice(results, len(of_image)))) for of_image in views]


def run_views(session: Session, views: Sequence[ViewImage], *, keep_windows: bool = False) -> list[ViewResult]:
    """Run views of any images and protocols in as few batches as memory allows; results keep the order of the views.

    `average_image` checks for NaN, not this function: NaN in one image must not fail the others of its batch.
    """
    results: dict[int, ViewResult] = {}
    for batch in plan_views(session, views).batches:
        packed = pack_batch(batch, views)
        outputs = session.run(packed.images, packed.sizes)
        results.update(unpack_results(packed.packed_views, outputs, keep_windows=keep_windows))
    return [results[index] for index in range(len(views))]


def plan_views(
    session: Session,
    views: Sequence[ViewImage],
    shape_buckets: ShapeBuckets | None = None,
    rules: BatchRules | None = None,
) -> BatchPlan:
    """Plan the batches of views; shape_buckets: allowed canvases and rows, if any; rules: if not the session's."""
    contract = session.contract
    shapes = [(view.image.shape[0], view.image.shape[1]) for view in views]
    return plan_batches(
        shapes, contract.window_grid, rules or session.rules, max_side=contract.max_side, shape_buckets=shape_buckets
    )


class PackedView(Struct, frozen=True):
    """A view in a batch, without its pixels. index: its position among the planned views."""

    index: int
    view: View
    height: int
    width: int
    capped: bool


class PackedBatch(Struct, frozen=True):
    """Arguments of `Session.stage` for one batch. packed_views: the view of each row; blank rows follow them."""

    images: UInt8Array
    sizes: Int64Array
    packed_views: tuple[PackedView, ...]


def pack_batch(batch: Batch, views: Sequence[ViewImage]) -> PackedBatch:
    """Copy a batch of the planned views onto its canvases."""
    chosen = [views[index] for index in batch.indices]
    images, sizes = pack([view.image for view in chosen], batch.height, batch.width, rows=batch.rows)
    packed_views = (
        PackedView(index, view.view, view.image.shape[0], view.image.shape[1], view.capped)
        for index, view in zip(batch.indices, chosen, strict=True)
    )
    return PackedBatch(images, sizes, tuple(packed_views))


def unpack_results(
    packed_views: Sequence[PackedView], outputs: Outputs, *, keep_windows: bool = False
) -> dict[int, ViewResult]:
    """Return the results of a batch by view index, as copies, so that the batch's memory can be freed."""
    results = {}
    all_scores, all_logits = outputs.scores.copy(), outputs.logits.copy()
    for row, packed in enumerate(packed_views):
        scores, logits = all_scores[row], all_logits[row]
        windows = rows, columns = int(outputs.windows[row, 0]), int(outputs.windows[row, 1])
        kept = None
        if keep_windows or packed.view.part == "nine":  # otherwise they stay where they are, perhaps on a GPU
            window_scores = outputs.window_scores[row, :rows, :columns]
            if packed.view.part == "nine":
                windows, scores, logits = nine_windows(window_scores)
            kept = window_scores.copy() if keep_windows else None
        results[packed.index] = ViewResult(
            packed.view, packed.height, packed.width, packed.capped, windows, scores, logits, kept
        )
    return results


def average_image(protocol: EvaluationProtocol, views: Sequence[ViewResult]) -> Classification:
    """Average the views of one image as the protocol defines. Raises ContractError when the model returned NaN."""
    for view in views:
        check_finite(view.scores, f"the {view.height}x{view.width} view of an image")
    if len(views) == 1 and protocol.averaging == "softmax":
        return Classification(views[0].scores, tuple(views), protocol.averaging)
    weights = view_weights([view.view for view in views], [view.windows for view in views], protocol.weights)
    scores = average_views(
        [view.scores for view in views], [view.logits for view in views], weights, protocol.averaging
    )
    return Classification(scores, tuple(views), protocol.averaging)


def build_answer(
    session: Session,
    name: str,
    protocol: EvaluationProtocol,
    classified: Classification,
    top: int,
    heatmap: bytes = b"",
) -> Answer:
    """Return the answer for one image. name: of the model; top: number of classes to return."""
    classes = session.contract.classes
    return Answer(
        predictions=tuple(
            Prediction(index, classes[index].wnid, classes[index].name, shortest_decimal(score))
            for index, score in classified.top(top)
        ),
        model={"name": name, "sha256": session.model_sha256},
        protocol=protocol.to_json(),
        views=tuple(
            AveragedView(**seen.view.to_json(), windows={"rows": seen.windows[0], "columns": seen.windows[1]})
            for seen in classified.views
        ),
        capped=classified.capped,
        circumstances=session.circumstances.to_json(),
        heatmap=heatmap,
    )
