"""What verbs say of the main memory that a run takes."""

from collections.abc import Sequence

from prelunet.evaluator.datasets.sample import Sample
from prelunet.evaluator.engine.footprint import Runtime
from prelunet.evaluator.engine.memory import MemoryNeed, Running, in_bytes, memory_need, require_fits
from prelunet.evaluator.engine.session import Session
from prelunet.evaluator.imaging.decode import LARGEST_DECODING
from prelunet.evaluator.imaging.room import decoding_room
from prelunet.evaluator.machine import machine_memory
from prelunet.evaluator.protocols import Protocol
from prelunet.evaluator.terminal import say
from prelunet.evaluator.validation.pipeline import decoding_threads


def foretold(
    session: Session,
    protocol: Protocol,
    chunk: int,
    samples: Sequence[Sample] = (),
    *,
    sessions: int = 1,
    pipelines: int = 1,
) -> MemoryNeed:
    """Return what a run takes of the main memory at most, in chunks of so many images.

    samples: all that the dataset lists; sessions: like this one in the process; pipelines: that each of them serves.
    Raises UsageError when that is more than `--memory-limit`.
    """
    contract, placement = session.contract, session.placement
    on_gpu = session.circumstances.on_gpu
    runtime: Runtime = "cuda" if on_gpu else "openvino" if placement.device == "openvino" else "cpu"
    readers = pipelines * decoding_threads(placement.threads)
    running = Running(
        runtime,
        session.circumstances.precision,
        session.model_bytes,
        session.rules if on_gpu else None,
        sessions=sessions,
        pipelines=pipelines,
        images=len(samples),
        encoded=readers * max((sample.size for sample in samples), default=0),
    )
    if placement.memory is None:
        return memory_need(contract, protocol, chunk, None, running)
    return require_fits(contract, protocol, chunk, placement.memory, running)


def tell_memory(need: MemoryNeed, *, gpu: bool = False) -> None:
    """Say what is needed at most, with a warning where the machine has less."""
    room = decoding_room(gpu=gpu).size
    say(f"memory: at most {need}", err=True)
    say(
        f"memory: an image that alone takes more than {in_bytes(room)} to decode (docs/performance.md) is decoded by "
        f"itself and takes up to {in_bytes(LARGEST_DECODING - room)} more",
        err=True,
    )
    if need.total > (there := machine_memory()):
        say(
            f"warning: this machine has {in_bytes(there)}. If images are as elongated as the protocol lets them be, "
            "that is too little: give --memory-limit, or smaller --scales",
            err=True,
        )
