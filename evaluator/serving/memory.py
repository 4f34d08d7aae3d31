"""How much main memory a server takes at most, told before it answers."""

from collections.abc import Sequence

from prelunet.evaluator.engine.memory import (
    MemoryEstimate,
    Runtime,
    Workload,
    estimate_memory,
    format_bytes,
    image_bytes,
)
from prelunet.evaluator.engine.session import Session
from prelunet.evaluator.errors import UsageError
from prelunet.evaluator.imaging.decode import MAX_DECODE_BYTES
from prelunet.evaluator.imaging.limits import DecodeLimits
from prelunet.evaluator.machine import cores
from prelunet.evaluator.protocols import build_protocol, default_protocol_name
from prelunet.evaluator.serving.options import ServeOptions
from prelunet.evaluator.serving.scheduling.admission import with_reserve

# Times that an encoded image lies in memory while it waits: by itself, and for a moment in the message that it came in.
# Measured with 150 images of 1.3 MB: 1.3.
_COPIES = 2


def serving_memory(sessions: Sequence[Session], options: ServeOptions) -> MemoryEstimate:
    """Return what a server of these models takes of the main memory at most, at each model's default protocol.

    Beside what validation takes (`evaluator.engine.memory`): a full queue of encoded images for each model, the views
    that are decoded ahead, and those that are being made. Not counted: of each call the message that has come and is
    not let in yet; heat maps, of which an unread call holds one (0.8 MB) and an unread stream four at most, and the
    window scores that they are drawn from; answers with thousands of classes, a few MB for a stream; the predictions
    of evaluations that go on; and what an image takes that is too large for the room for decoding
    (`max_decode_memory`).
    Raises UsageError when that is more than `--memory-limit`.
    """
    needs = [_model_memory(session) for session in sessions]
    protocols = [build_protocol(default_protocol_name(session.contract), session.contract) for session in sessions]
    queue = options.queue
    before, loading = 0, 0
    for need in needs:  # one after the other
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
    limit = options.placement.memory
    if limit is not None and total.total > limit:
        raise UsageError(
            f"--memory-limit {format_bytes(limit)}: serving takes up to {total}. Give {format_bytes(total.total)} or more, or "
            "a smaller --queue-bytes, or fewer models"
        )
    return total


def max_decode_memory(limits: DecodeLimits) -> int:
    """Return the bytes of main memory that decoding the largest image of these limits takes."""
    return MAX_DECODE_BYTES * limits.max_pixels // DecodeLimits.max_pixels


def _model_memory(session: Session) -> MemoryEstimate:
    """Return what one model takes; of its parts those of weights, batches and decoding are used."""
    contract, placement = session.contract, session.placement
    on_gpu = placement.device == "cuda"
    runtime: Runtime = "cuda" if on_gpu else "openvino" if placement.device == "openvino" else "cpu"
    workload = Workload(
        runtime, session.circumstances.precision, session.model_bytes, session.rules if on_gpu else None
    )
    protocol = build_protocol(default_protocol_name(contract), contract)
    return estimate_memory(contract, protocol, 1, placement.memory, workload)
