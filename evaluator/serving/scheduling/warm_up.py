"""Warm-up on a GPU: a server runs every batch shape once before it reports that it is ready."""

import logging
import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from prelunet.evaluator.engine.batching import BatchRules
from prelunet.evaluator.engine.session import Session
from prelunet.evaluator.engine.shape_buckets import ShapeBuckets, build_shape_buckets

# Pixels of a server's largest batch: four times the cost of switching plans (model C in fp16), and a wait of some 50 ms
# for the next caller. Assumed, not measured here.
MAX_BATCH_PIXELS = 2**23

log = logging.getLogger(__name__)


def shape_buckets_of(session: Session) -> ShapeBuckets | None:
    """Return the shape buckets of a server's batches; None where a new shape costs nothing, as on a CPU.

    With a file for exact canvases an image fills its canvas, whatever its size, so only the crop has a bucket.
    """
    contract = session.contract
    if not session.circumstances.on_gpu:
        return None
    scales = contract.default_scales if contract.canvas != "exact" else ()
    return build_shape_buckets(contract.crop, scales, session.rules.canvas_step, contract.max_side)


def serving_rules(session: Session) -> BatchRules:
    """Return the rules of a server's batches: smaller batches on a GPU, to shorten the wait behind them."""
    rules = session.rules
    if not session.circumstances.on_gpu or rules.max_pixels <= MAX_BATCH_PIXELS:
        return rules
    share = MAX_BATCH_PIXELS / rules.max_pixels
    return replace(rules, max_pixels=MAX_BATCH_PIXELS, max_windows=max(1, int(share * rules.max_windows)))


def warm_up(session: Session, shape_buckets: ShapeBuckets, on_progress: Callable[[int, int], None]) -> int:
    """Run every batch shape once, the largest first, so that the others fit into the memory regions that it allocates.

    on_progress: called with the number of shapes run so far and their total. Returns the total. Raises the errors of
    `Session.run`.
    """
    rules, contract = session.rules, session.contract

    def max_rows(height: int, width: int) -> int:
        return rules.max_rows(height * width, math.prod(contract.window_grid(height, width)))

    batch_shapes = shape_buckets.batch_shapes(max_rows)
    for done, (rows, height, width) in enumerate(batch_shapes, 1):
        session.run(np.zeros((rows, height, width, 3), np.uint8), np.full((rows, 2), (height, width), np.int64))
        on_progress(done, len(batch_shapes))
    return len(batch_shapes)
