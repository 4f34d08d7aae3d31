"""A session on each of several GPUs."""

import ctypes
from dataclasses import replace
from pathlib import Path

from prelunet.evaluator.differences import differences, shown
from prelunet.evaluator.engine.session import Placement, Session, open_placed
from prelunet.evaluator.errors import EnvironmentFault, UsageError

_DRIVER = "libcuda.so.1"  # comes with the driver, whichever CUDA the runtime brings
_ON_A_CPU = "There one session uses all cores: leave --gpus out, and see --threads"


def open_sessions(path: Path, placement: Placement, gpus: int = 1) -> list[Session]:
    """Load a model file once for each GPU, to evaluate many images; one after the other, as loading takes most memory.

    gpus: how many, from the placement's on; 0 for all that are visible. 1 is any device, GPU or not.
    Raises UsageError when several are asked for on a CPU, EnvironmentFault when there are fewer or when they are not
    alike, else as `open_placed`.
    """
    if gpus != 1 and placement.device in {"cpu", "openvino"}:
        raise UsageError(f"--gpus {gpus}: --device {placement.device} has no GPUs. {_ON_A_CPU}")
    if placement.device == "cuda" and gpus:
        _require_visible(gpus, placement.gpu)  # before anything is loaded
    first = open_placed(path, placement, for_many=True)
    if gpus == 1:
        return [first]
    if first.placement.device != "cuda":
        raise EnvironmentFault(f"--gpus {gpus}: CUDA did not come up, and this would run on the CPU. {_ON_A_CPU}")
    _require_visible(gpus, placement.gpu)
    last = placement.gpu + gpus if gpus else visible_gpus()
    sessions = [first]
    for gpu in range(placement.gpu + 1, last):
        where = replace(first.placement, gpu=gpu)
        sessions.append(open_placed(path, where, for_many=True, digest=first.model_sha256))
        _check_alike(first, sessions[-1])
    return sessions


def _require_visible(gpus: int, first: int) -> None:
    """Refuse to use more GPUs than there are, from the first on; 1 is left to the runtime, which says what it lacks."""
    if gpus > 1 and first + gpus > visible_gpus():
        raise EnvironmentFault(
            f"--gpus {gpus}: {visible_gpus()} are visible here (CUDA_VISIBLE_DEVICES can hide some). Ask for fewer, or "
            "for all of them with --gpus 0"
        )


def _check_alike(first: Session, other: Session) -> None:
    """Refuse cards of two kinds, or with different room: a run states one kind and one way of batching."""
    places = f"GPU {first.placement.gpu}", f"GPU {other.placement.gpu}"
    facts = [{**each.circumstances.to_json(), "batching": each.rules.to_json()} for each in (first, other)]
    if found := differences(*facts, places=places):
        raise EnvironmentFault(
            f"--gpus: {' and '.join(places)} would not compute alike:\n{shown(found)}\n"
            "Choose equal ones with CUDA_VISIBLE_DEVICES. Where one has less free memory, end what takes it, or give "
            "all of them less with --gpu-memory-limit"
        )


def visible_gpus() -> int:
    """Return how many GPUs CUDA shows to this process, 0 where there is no driver."""
    try:
        driver = ctypes.CDLL(_DRIVER)
    except OSError:
        return 0
    count = ctypes.c_int(0)
    failed = driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count))
    return 0 if failed else count.value
