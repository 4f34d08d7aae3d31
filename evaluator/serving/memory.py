"""How much main memory a server takes at most, told before it answers."""

from collections.abc import Sequence

from prelunet.evaluator.engine.memory import MemoryNeed, Running, Runtime, image_bytes, in_bytes, memory_need
from prelunet.evaluator.engine.session import Session
from prelunet.evaluator.errors import UsageError
from prelunet.evaluator.imaging.decode import LARGEST_DECODING
from prelunet.evaluator.imaging.limits import DecodeLimits
from prelunet.evaluator.machine import cores
from prelunet.evaluator.protocols import default_protocol, make_protocol
from prelunet.evaluator.serving.options import ServeOptions
from prelunet.evaluator.serving.scheduling.admission import with_reserve

# Times that an encoded image lies in memory while it waits: by itself, and for a moment in the message that it came in.
# Measured with 150 images of 1.3 MB: 1.3.
_COPIES = 2


def memory_of_serving(sessions: Sequence[Session], options: ServeOptions) -> MemoryNeed:
    """Return what a server of these models takes of the main memory at most, at each model's default protocol.

    Beside what validation takes (`evaluator.engine.memory`): a full queue of encoded images for each model, the views
    that are decoded ahead, and those that are being made. Not counted: of each call the message that has come and is
    not let in yet; heat maps, of which an unread call holds one (0.8 MB) and an unread stream four at most, and the
    window scores that they are drawn from; answers with thousands of classes, a few MB for a stream; the predictions
    of evaluations that go on; and what an image takes that is too large for the room for decoding
    (`largest_decoding`).
    Raises UsageError when that is more than `--memory-limit`.
    """
    needs = [_of_one(session) for session in sessions]
    protocols = [make_protocol(default_protocol(session.contract), session.contract) for session in sessions]
    queue = options.queue
    before, loading = 0, 0
    for need in needs:  # one after the other
        loading = max(loading, before + need.loading)
        before += need.weights
    total = MemoryNeed(
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
            f"--memory-limit {in_bytes(limit)}: serving takes up to {total}. Give {in_bytes(total.total)} or more, or "
            "a smaller --queue-bytes, or fewer models"
        )
    return total


def largest_decoding(limits: DecodeLimits) -> int:
    """Return the bytes of main memory that decoding the largest image of these limits takes."""
    return LARGEST_DECODING * limits.max_pixels // DecodeLimits.max_pixels


def _of_one(session: Session) -> MemoryNeed:
    """Return what one model takes; of its parts those of weights, batches and decoding are used."""
    contract, placement = session.contract, session.placement
    on_gpu = placement.device == "cuda"
    runtime: Runtime = "cuda" if on_gpu else "openvino" if placement.device == "openvino" else "cpu"
    running = Running(runtime, session.circumstances.precision, session.model_bytes, session.rules if on_gpu else None)
    protocol = make_protocol(default_protocol(contract), contract)
    return memory_need(contract, protocol, 1, placement.memory, running)
