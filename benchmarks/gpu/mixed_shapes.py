"""Photos of mixed shapes: eager torch on them, and what a change of shape costs onnxruntime.

Torch has its default settings (cudnn.benchmark, which tries convolutions, would take minutes for so many shapes). It
computes in half precision with channels last, and is written as good torch code: exact shapes, in pairs (a view and its
mirror image) or in groups of equal shapes, uploaded asynchronously from page-locked memory, and all scores read back
once. Of three passes the faster of the last two counts, in which no shape is new.
"""

import time
from collections.abc import Sequence
from functools import partial
from itertools import cycle, islice
from typing import Any

import numpy as np
import torch

from benchmarks.common.dense_torch import DenseNet
from benchmarks.common.nets import MEAN
from benchmarks.common.rig import Rig
from benchmarks.gpu.device import noise_batch, raw_session
from prelunet.evaluator.contract import INPUTS, OUTPUTS
from prelunet.evaluator.engine.runtimes.onnx import import_runtime

WAYS = ("pairs", "groups")
MAX_PIXELS = 16 * 384 * 512  # limit for a group of equal shapes
ROWS = 32  # about as many as in a batch of `validate`
SHAPES = ((256, 352), (352, 256), (256, 384), (384, 512), (512, 384), (384, 576))
TURNS = 24  # calls with a change of shape before each; a multiple of the number of shapes


def torch_seconds(rig: Rig, net: str, views: Sequence[np.ndarray], way: str) -> tuple[float, float]:
    """Return the seconds of the first pass over the views, and of a later one. views: mirrored pairs in order."""
    dense = DenseNet(rig.torch_net(net), MEAN, dtype=torch.float16, channels_last=True).to(rig.device).eval()
    batches = _batches(views, way)
    passes = [_torch_pass(rig, dense, batches) for _ in range(3)]
    return passes[0], min(passes[1:])


def _batches(views: Sequence[np.ndarray], way: str) -> list[np.ndarray]:
    """Return the views as arrays (N, H, W, 3) of exact shapes."""
    if way == "pairs":
        return [np.stack(views[first : first + 2]) for first in range(0, len(views), 2)]
    groups: dict[tuple[int, ...], list[np.ndarray]] = {}
    for view in views:
        groups.setdefault(view.shape, []).append(view)
    return [
        np.stack(some[start : start + limit])
        for (height, width, _), some in groups.items()
        for limit in (max(1, MAX_PIXELS // (height * width)),)
        for start in range(0, len(some), limit)
    ]


@torch.inference_mode()
def _torch_pass(rig: Rig, net: DenseNet, batches: Sequence[np.ndarray]) -> float:
    """Return the seconds for uploading and computing the batches and reading the scores back."""
    begun, scores = time.perf_counter(), []
    for images in batches:
        pixels = torch.from_numpy(images)
        scores.append(net((pixels.pin_memory() if rig.on_gpu else pixels).to(rig.device, non_blocking=True)))
    torch.cat(scores).cpu()
    return time.perf_counter() - begun


def changes_of_shape(rig: Rig, settings: dict[str, Any]) -> dict[str, Any]:
    """Time batches of six shapes in onnxruntime: each repeated, then all in turn. Nothing leaves the device.

    switch_ms: extra time of a call after one of another shape; `evaluator.engine.memory.GPU_SWITCH_SECONDS` assumes it;
    tflops: of the repeated calls; `GPU_FLOPS` there assumes it.
    """
    session = raw_session(rig, rig.model_file(settings["net"], settings["precision"]))
    sizes = [(rig.px(height), rig.px(width)) for height, width in SHAPES]
    bindings = []
    for seed, size in enumerate(sizes):
        binding = session.io_binding()
        for name, array in zip(INPUTS, noise_batch(rig.reduced(ROWS), *size, seed), strict=True):
            value = import_runtime().OrtValue.ortvalue_from_numpy(array, rig.device, 0)
            binding.bind_ortvalue_input(name, value)
        for name in OUTPUTS:
            binding.bind_output(name, rig.device, 0)
        bindings.append(binding)
    run = session.run_with_iobinding
    repeated = [rig.timed(partial(run, binding), seconds=0.2)["ms"] for binding in bindings]
    for binding in bindings:
        run(binding)  # so that the first of the turns below follows another shape too
    order = islice(cycle(bindings), rig.reduced(TURNS, len(bindings)))
    took = [rig.timed(partial(run, binding), seconds=0, min_calls=1, warm=0)["ms"] for binding in order]
    flop = rig.flop(settings["net"], [size for size in sizes for _ in range(rig.reduced(ROWS))])
    return {
        "repeated_ms": float(np.mean(repeated)),
        "switch_ms": float(np.mean(took) - np.mean(repeated)),
        "tflops": flop / sum(repeated) / 1e9,
    }
