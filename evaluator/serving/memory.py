"""An upper estimate of a server's main memory, computed before it answers calls."""

from collections.abc import Sequence
from pathlib import Path

from ..engine.memory import MemoryEstimate, estimate_memory, image_bytes, loading_bytes
from ..engine.runtimes.onnx_metadata import read_precision
from ..engine.session import Session
from ..errors import UsageError
from ..imaging.decode import max_decode_bytes
from ..imaging.decode_memory import decode_semaphore
from ..imaging.header import EASY_DECODE_BYTES
from ..machine import cores, format_bytes, machine_memory
from ..protocols import build_protocol, default_protocol_name
from .decoding import PROCESS_BYTES, SMALL_BYTES
from .network import UNREAD_BYTES
from .options import ServeOptions
from .scheduling.admission import with_reserve
from .scheduling.device import decode_processes

# Copies of an encoded image in memory while it waits: the image and, briefly, its message. Measured with 150 images of
# 1.3 MB: 1.3. The rest is room for the images of streams that wait for admission.
_COPIES = 2


def require_room_to_load(file: Path, sessions: Sequence[Session], options: ServeOptions, queues: int) -> None:
    """Refuse a model file that cannot be loaded beside these sessions; UsageError states the required memory.

    Within `--memory-limit` there must be room for all that serving them takes, without it on the machine for their
    weights. queues: as in `serving_memory`.
    """
    if not sessions:
        return  # as at the start of a server, where `require_loadable` applies
    limit = options.placement.memory
    estimate = _estimate(sessions, options, limit, queues)
    used = estimate.total if limit is not None else estimate.base + estimate.weights
    device = sessions[0].placement.device
    loading = loading_bytes(file.stat().st_size, read_precision(file) or "fp32", device)
    if used + loading > (available := limit or machine_memory()):
        source = "--memory-limit is" if limit is not None else "this machine has"
        raise UsageError(
            f"loading it takes up to {format_bytes(loading)} beside the {format_bytes(used)} of the models in memory, "
            f"but {source} {format_bytes(available)}. Unload a model, or give the server more memory"
        )


def serving_memory(sessions: Sequence[Session], options: ServeOptions, queues: int | None = None) -> MemoryEstimate:
    """Return the main memory that a server of these sessions takes at most, at each model's default protocol.

    queues: number of models that they are versions of, by default as many.

    In addition to what validation takes (`evaluator.engine.memory`): a full queue of encoded images for each model, the
    ready views, the views being created, and messages that are still arriving. Not counted: heat maps (0.8 MB each; at
    most one for an unread call and four for an unread stream) and the window scores that they are drawn from; answers
    with thousands of classes (a few MB for a stream); and predictions of unfinished evaluations.
    Raises UsageError if the total is more than `--memory-limit`.
    """
    limit = options.placement.memory
    queues = len(sessions) if queues is None else queues
    total = _estimate(sessions, options, limit, queues)
    if limit is None or total.total <= limit:
        return total
    enough = total
    while (sufficient := enough.total) < (enough := _estimate(sessions, options, sufficient, queues)).total:
        pass  # a higher limit allows larger batches; this ends, because they grow more slowly than the limit
    raise UsageError(
        f"--memory-limit {format_bytes(limit)}: serving needs at least {format_bytes(sufficient)}, most of it room for "
        f"images and batches ({total}). Give that, or a smaller --queue-bytes or --max-image-pixels"
        f"{', or fewer models' * (len(sessions) > 1)}"
    )


def _estimate(sessions: Sequence[Session], options: ServeOptions, limit: int | None, queues: int) -> MemoryEstimate:
    protocols = [build_protocol(default_protocol_name(session.contract), session.contract) for session in sessions]
    needs = [
        estimate_memory(session, protocol, 1, limit) for session, protocol in zip(sessions, protocols, strict=True)
    ]
    queue, on_gpu = options.queue, any(session.circumstances.on_gpu for session in sessions)
    before, loading = 0, 0
    for need in needs:  # models are loaded one after the other
        loading = max(loading, before + need.loading)
        before += need.weights
    return MemoryEstimate(
        base=max(need.base for need in needs),
        loading=loading,
        weights=before,
        batch=sum(need.batch for need in needs),
        packed=sum(need.packed for need in needs),
        images=_COPIES * queues * with_reserve(queue.max_bytes)
        + queue.ready_bytes
        + options.limits.max_arriving_bytes
        + with_reserve(options.limits.max_calls) * UNREAD_BYTES
        + cores() * max(map(image_bytes, protocols)),
        decoding=max(decode_semaphore(gpu=on_gpu).capacity, max_decode_bytes(options.limits.image))
        + decode_processes() * (PROCESS_BYTES + SMALL_BYTES)
        + cores() * EASY_DECODE_BYTES,
        results=sum(8 * with_reserve(queue.max_views) * len(session.contract.classes) for session in sessions),
        listed=0,
    )
