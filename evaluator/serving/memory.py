"""An upper estimate of a server's main memory, computed before it answers calls."""

from collections.abc import Sequence

from prelunet.evaluator.byte_sizes import format_bytes
from prelunet.evaluator.engine.memory import MemoryEstimate, estimate_memory, image_bytes
from prelunet.evaluator.engine.session import Session
from prelunet.evaluator.errors import UsageError
from prelunet.evaluator.imaging.decode import MAX_DECODE_BYTES
from prelunet.evaluator.imaging.limits import DecodeLimits
from prelunet.evaluator.machine import cores
from prelunet.evaluator.protocols import build_protocol, default_protocol_name
from prelunet.evaluator.serving.options import ServeOptions
from prelunet.evaluator.serving.scheduling.admission import with_reserve

# Copies of an encoded image in memory while it waits: the image and, briefly, its message. Measured with 150 images of
# 1.3 MB: 1.3.
_COPIES = 2


def serving_memory(sessions: Sequence[Session], options: ServeOptions) -> MemoryEstimate:
    """Return the main memory that a server of these models takes at most, at each model's default protocol.

    In addition to what validation takes (`evaluator.engine.memory`): a full queue of encoded images for each model, the
    ready views, and the views being created. Not counted: messages received and not yet admitted; heat maps (0.8 MB
    each; at most one for an unread call and four for an unread stream) and the window scores that they are drawn from;
    answers with thousands of classes (a few MB for a stream); predictions of unfinished evaluations; and an image too
    large for the decoding memory (`max_decode_memory`).
    Raises UsageError if the total is more than `--memory-limit`.
    """
    limit = options.placement.memory
    protocols = [build_protocol(default_protocol_name(session.contract), session.contract) for session in sessions]
    needs = [
        estimate_memory(session, protocol, 1, limit) for session, protocol in zip(sessions, protocols, strict=True)
    ]
    queue = options.queue
    before, loading = 0, 0
    for need in needs:  # models are loaded one after the other
        loading = max(loading, before + need.loading)
        before += need.weights
    total = MemoryEstimate(
        base=max(need.base for need in needs),
        loading=loading,
        weights=before,
        batch=sum(need.batch for need in needs),
        packed=sum(need.packed for need in needs),
        images=_COPIES * len(needs) * with_reserve(queue.max_bytes)
        + queue.ready_bytes
        + cores() * max(map(image_bytes, protocols)),
        decoding=max(need.decoding for need in needs),
        results=sum(8 * with_reserve(queue.max_views) * len(session.contract.classes) for session in sessions),
        listed=0,
    )
    if limit is not None and total.total > limit:
        raise UsageError(
            f"--memory-limit {format_bytes(limit)}: serving takes up to {total}. Give {format_bytes(total.total)} or "
            "more, or a smaller --queue-bytes, or fewer models"
        )
    return total


def max_decode_memory(limits: DecodeLimits) -> int:
    """Return the bytes of main memory that decoding the largest image within these limits takes."""
    return MAX_DECODE_BYTES * limits.max_pixels // DecodeLimits.max_pixels
