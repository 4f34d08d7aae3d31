"""What verbs say of the memory that a run takes."""

from evaluator.engine.footprint import Runtime
from evaluator.engine.memory import MemoryNeed, in_bytes, machine_memory, memory_need, require_fits
from evaluator.engine.session import Session
from evaluator.protocols import Protocol
from evaluator.terminal import say


def foretold(session: Session, protocol: Protocol, chunk: int) -> MemoryNeed | None:
    """Return what a run takes at most, in chunks of so many images; None on a GPU, of whose memory nothing is known.

    Raises UsageError when that is more than `--memory-limit`.
    """
    contract, (device, limit) = session.contract, (session.placement.device, session.placement.memory)
    if device == "cuda":
        return None
    size = session.model_bytes
    runtime: Runtime = "openvino" if device == "openvino" else "cpu"
    if limit is not None:
        return require_fits(contract, protocol, chunk, limit, file_bytes=size, runtime=runtime)
    return memory_need(contract, protocol, chunk, None, file_bytes=size, runtime=runtime)


def tell_memory(need: MemoryNeed | None) -> None:
    """Say what is needed at most, with a warning where the machine has less."""
    if need is None:
        return
    say(f"memory: at most {need}", err=True)
    if need.total > (there := machine_memory()):
        say(
            f"warning: this machine has {in_bytes(there)}. If images are as elongated as the protocol lets them be, "
            "that is too little: give --memory-limit, or smaller --scales",
            err=True,
        )
