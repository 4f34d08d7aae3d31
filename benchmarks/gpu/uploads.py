"""Part of `sweep`: how fast pixels reach the GPU, and whether uploads overlap with computing.

A batch is uploaded from pageable memory, from pinned memory by torch (the fastest way), and by the engine's
`Session.stage`. Then batches are staged and computed one after the other, and with staging in a separate thread.
"""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import torch

from benchmarks.common.rig import Rig
from benchmarks.common.runner import Case
from benchmarks.gpu.device import noise_batch
from prelunet.evaluator.engine.runtimes.onnx import import_runtime
from prelunet.evaluator.engine.session import Session

SHAPE = (8, 480, 640)  # images, height, width: 7.4 MB
ROUNDS = 12

Batch = tuple[np.ndarray, np.ndarray]


def upload_case(rig: Rig, net: str) -> Case:
    """Return the case of a net."""
    return Case({"what": "upload", "net": net, "precision": "fp16"}, partial(_measure, rig, net), 25)


def _measure(rig: Rig, net: str) -> dict[str, Any]:
    session = rig.session(net, "fp16")
    shape = rig.reduced(SHAPE[0]), rig.px(SHAPE[1]), rig.px(SHAPE[2])
    batches = [noise_batch(*shape, seed) for seed in range(4)]
    megabytes = batches[0][0].nbytes / 1e6
    value = import_runtime().OrtValue
    uploads: dict[str, Callable[[], Any]] = {
        "pageable": lambda: value.ortvalue_from_numpy(batches[0][0], rig.device, 0)
    }
    if rig.on_gpu:
        pinned = torch.from_numpy(batches[0][0]).pin_memory()
        uploads["pinned_by_torch"] = lambda: pinned.to(rig.device, non_blocking=True)
    result: dict[str, Any] = {"megabytes": megabytes}
    for name, upload in uploads.items():
        result[f"{name}_ms"] = rig.timed(upload, seconds=0.3)["ms"]
        result[f"{name}_gb_per_second"] = megabytes / max(result[f"{name}_ms"], 1e-6)
    result |= _stage_and_compute(rig, session, batches)
    result["stage_gb_per_second"] = megabytes / max(result["stage_ms"], 1e-6)
    return {**result, **_overlap(rig, session, batches, result["stage_ms"], result["compute_ms"])}


def _stage_and_compute(rig: Rig, session: Session, batches: list[Batch]) -> dict[str, float]:
    """Time staging and computing in turn: staging without computing may wait forever for a free buffer."""
    took: dict[str, list[float]] = {"stage_ms": [], "compute_ms": []}
    for index in range(rig.reduced(2 * ROUNDS)):
        begun = time.perf_counter()
        staged = session.stage(*batches[index % len(batches)])
        between = time.perf_counter()
        session.compute(staged)
        took["stage_ms"].append(1e3 * (between - begun))
        took["compute_ms"].append(1e3 * (time.perf_counter() - between))
    return {name: float(np.median(values)) for name, values in took.items()}


def _overlap(rig: Rig, session: Session, batches: list[Batch], stage_ms: float, compute_ms: float) -> dict[str, float]:
    """Time batches one after the other, and with the next one staged meanwhile.

    hidden: share of the shorter of the two that overlaps, 0 to 1.
    """
    rounds = rig.reduced(ROUNDS)

    def in_turn() -> None:
        for index in range(rounds):
            session.compute(session.stage(*batches[index % len(batches)]))

    def at_once() -> None:
        with ThreadPoolExecutor(1) as pool:
            pending = pool.submit(session.stage, *batches[0])
            for index in range(rounds):
                staged = pending.result()
                if index + 1 < rounds:  # no batch stays staged and keeps a buffer that others wait for
                    pending = pool.submit(session.stage, *batches[(index + 1) % len(batches)])
                session.compute(staged)

    found = {}
    for name, work in (("in_turn", in_turn), ("at_once", at_once)):
        work()
        begun = time.perf_counter()
        work()
        found[f"{name}_ms"] = 1e3 * (time.perf_counter() - begun) / rounds
    found["hidden"] = (found["in_turn_ms"] - found["at_once_ms"]) / max(min(stage_ms, compute_ms), 1e-6)
    return found
