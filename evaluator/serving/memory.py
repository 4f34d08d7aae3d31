"""The main memory that a server takes at most: the number of its start line, in four parts, each with its limits.

Not counted: heat maps (0.8 MB each, four for an unread stream) and their window scores; answers with thousands of
classes (a few MB for a stream); predictions of unfinished evaluations.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ..engine.load import lanes_within
from ..engine.memory import (
    MemoryEstimate,
    base_bytes,
    image_bytes,
    largest_batch_bytes,
    loading_bytes,
    sufficient_limit,
    weights_bytes,
)
from ..engine.runtimes.onnx_metadata import read_precision
from ..engine.session import Session
from ..errors import UsageError
from ..imaging.decode import max_decode_bytes
from ..imaging.decode_memory import decode_capacity
from ..imaging.header import EASY_DECODE_BYTES
from ..machine import format_bytes, machine_memory
from ..protocols import build_protocol, default_protocol_name
from .decoding import PROCESS_BYTES, SMALL_BYTES, TOTAL_PIXELS_FACTOR
from .models import serving_rules
from .options import ServeOptions
from .scheduling.admission import with_reserve
from .scheduling.model import largest_own_view
from .scheduling.shared_cores import worker_threads

PARENT_BYTES = 2**27  # of `--memory-limit`, for the parent of several processes
_COPIES = 2  # of an encoded image: in the queue, and in its message or a decoding process (measured: 1.3)


def fit_limits(options: ServeOptions, memory: int | None) -> ServeOptions:
    """Return the options with limits that are parts of `memory` (`--memory-limit`), where the user gave none.

    The largest image always fits into a queue, and the largest message is always read (`max_arriving_bytes`).
    """
    if memory is None:
        return options
    queue, clients = options.queue, options.limits
    queued = max(memory // 32, 4 * clients.image.max_bytes // 5)
    unread = max(2**14, memory // 16 // with_reserve(clients.max_calls))
    queue = replace(
        queue,
        queue_bytes=queue.queue_bytes or min(queue.max_bytes, queued),
        ready_bytes=min(queue.ready_bytes, memory // 32),
        decode_threads=max(1, min(queue.decode_threads, memory // 2**29)),
        decode_processes=max(2, min(queue.decode_processes, 1 + memory // 2**29)),
    )
    arriving = clients.arriving_bytes or min(clients.max_arriving_bytes, memory // 16)
    clients = replace(clients, arriving_bytes=arriving, unread_bytes=min(clients.unread_bytes, unread))
    return replace(options, queue=queue, limits=clients)


def serving_memory(sessions: Sequence[Session], options: ServeOptions, queues: int | None = None) -> MemoryEstimate:
    """Return the main memory that a server of these sessions takes at most.

    queues: number of models that they are versions of, by default as many. Raises UsageError, which names a limit that
    is enough, if the total is more than `--memory-limit`.
    """
    limit, queues = options.placement.memory, queues or len(sessions)
    need = _estimate(sessions, options, queues, limit)
    if limit is None or need.total <= limit:
        return need
    enough = sufficient_limit(lambda memory: _estimate(sessions, options, queues, memory).total, limit)
    need, given, each = _estimate(sessions, options, queues, enough), limit, ""
    if options.processes > 1:
        given, enough = (PARENT_BYTES + options.processes * part for part in (limit, enough))
        each = f" in each of {options.processes} processes"
    raise UsageError(
        f"--memory-limit {format_bytes(given)}: serving needs at least {need}{each}. "
        f"Give {format_bytes(enough)}, or a smaller --queue-bytes, --arriving-bytes, --max-calls or --max-image-bytes"
        f"{', or fewer models' * (len(sessions) > 1)}"
    )


def require_room_to_load(file: Path, sessions: Sequence[Session], options: ServeOptions, queues: int) -> None:
    """Refuse a model file that cannot be loaded beside these sessions; UsageError states the required memory.

    Within `--memory-limit` there must be room for all that serving them takes, without it on the machine for their
    weights. queues: as in `serving_memory`.
    """
    if not sessions:
        return  # as at the start of a server, where `require_loadable` applies
    limit = options.placement.memory
    need = _estimate(sessions, options, queues, limit)
    used, available, source = need.total, limit, "--memory-limit leaves this process"
    if available is None:
        used, available, source = need.parts["models"], machine_memory(), "this machine has"
    loading = loading_bytes(file.stat().st_size, read_precision(file) or "fp32", sessions[0].placement.device)
    if used + loading > available:
        raise UsageError(
            f"loading it takes up to {format_bytes(loading)} beside the {format_bytes(used)} of the models in memory, "
            f"but {source} {format_bytes(available)}. Unload a model, or give the server more memory"
        )


def _estimate(sessions: Sequence[Session], options: ServeOptions, queues: int, memory: int | None) -> MemoryEstimate:
    options = fit_limits(options, memory)
    queue, clients, gpu = options.queue, options.limits, any(session.circumstances.on_gpu for session in sessions)
    protocols = [build_protocol(default_protocol_name(session.contract), session.contract) for session in sessions]
    lanes = [lanes_within(session, memory) > 0 for session in sessions]
    weights = [weights_bytes(session, lanes=has) for session, has in zip(sessions, lanes, strict=True)]
    threads = queue.decode_threads if gpu else worker_threads()
    models = max(base_bytes(session.placement.device) for session in sessions) + sum(kept for _, kept in weights)
    # `BatchRules` limit batches; `ready_bytes`, and one image of each decoder, the views that wait for them.
    views = [0 if s.contract.fixed_size else queue.max_view_pixels or largest_own_view(s.contract) for s in sessions]
    image = max(*map(image_bytes, protocols), 3 * TOTAL_PIXELS_FACTOR * max(views))
    batches = queue.ready_bytes + (2 * threads + 1) * image
    for session, protocol, view, has in zip(sessions, protocols, views, lanes, strict=True):
        batches += largest_batch_bytes(session, protocol, serving_rules(session, memory), view=view, lanes=has)
        batches += 8 * with_reserve(queue.max_views) * len(session.contract.classes)  # scores
    # `decode_semaphore` limits the pixels in processes, but for small images. An image that exceeds it is decoded
    # alone: counted without a limit, and with one beyond it, as the help of --memory-limit says.
    decoding = decode_capacity(memory, gpu=gpu)
    if memory is None:
        decoding = max(decoding, max_decode_bytes(clients.image))
    decoding += queue.decode_processes * (PROCESS_BYTES + SMALL_BYTES) + threads * EASY_DECODE_BYTES
    # `AdmissionController` limits the queue of each model, and gRPC what a call sends before it is read.
    messages = clients.max_arriving_bytes + with_reserve(clients.max_calls) * clients.unread_bytes
    messages += _COPIES * queues * max(with_reserve(queue.max_bytes), clients.image.max_bytes)
    # One model is loaded after the other, before the first batch; later ones: `require_room_to_load`.
    loading = models + max(most - kept for most, kept in weights)
    parts = {"models": models, "batches": batches, "decoding": decoding, "messages": messages}
    return MemoryEstimate(parts, loading)
