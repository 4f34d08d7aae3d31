"""What a server does on a GPU before it says that it is ready: every batch that can come has run once."""

import logging
import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from prelunet.evaluator.engine.batching import BatchRules
from prelunet.evaluator.engine.session import Session
from prelunet.evaluator.engine.shape_buckets import ShapeBuckets, build_shape_buckets

# Of a batch of a server, in pixels: four times what a plan costs to change (model C in fp16), and some 50 ms that
# whoever comes next has to wait. Assumed, not measured here.
MAX_BATCH_PIXELS = 2**23

log = logging.getLogger(__name__)


def shape_buckets_of(session: Session) -> ShapeBuckets | None:
    """Return the ladder to which batches of a server keep; None where shapes cost nothing, as on a CPU.

    In a file for exact canvases images fill their canvas, whatever its size; so the crop alone is on its ladder.
    """
    contract = session.contract
    if not session.circumstances.on_gpu:
        return None
    scales = contract.default_scales if contract.canvas != "exact" else ()
    return build_shape_buckets(contract.crop, scales, session.rules.canvas_step, contract.max_side)


def serving_rules(session: Session) -> BatchRules:
    """Return the rules of a server's batches: smaller ones on a GPU, for the sake of who waits behind them."""
    rules = session.rules
    if not session.circumstances.on_gpu or rules.max_pixels <= MAX_BATCH_PIXELS:
        return rules
    share = MAX_BATCH_PIXELS / rules.max_pixels
    return replace(rules, max_pixels=MAX_BATCH_PIXELS, max_windows=max(1, int(share * rules.max_windows)))


def warm_up(session: Session, shape_buckets: ShapeBuckets, on_progress: Callable[[int, int], None]) -> int:
    """Run every rung once, those of most pixels first, so that memory is taken in regions into which the others fit.

    told: called with how many have run, and of how many. Returns how many they are. Raises what `Session.run` does.
    """
    rules, contract = session.rules, session.contract

    def max_rows(height: int, width: int) -> int:
        return rules.max_rows(height * width, math.prod(contract.window_grid(height, width)))

    batch_shapes = shape_buckets.batch_shapes(max_rows)
    for done, (rows, height, width) in enumerate(batch_shapes, 1):
        session.run(np.zeros((rows, height, width, 3), np.uint8), np.full((rows, 2), (height, width), np.int64))
        on_progress(done, len(batch_shapes))
    return len(batch_shapes)
