"""Part `training`: images per second of training steps as in `training.loop.trainer`, at 224 pixels.

One step: subtract the mean, draw dropout, forward, cross entropy, backward, read the loss, SGD with momentum in our
parameter groups. The images are already on the device.
"""

import time
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch

from benchmarks.common.nets import MEAN
from benchmarks.common.rig import CROP, Rig, tf32
from benchmarks.common.runner import Case
from prelunet.training.data.augmentation import dropout_factors
from prelunet.training.distributed.base import StepOptions
from prelunet.training.distributed.data_parallel import build_parallel
from prelunet.training.distributed.process_group import ProcessGroup
from prelunet.training.net.dense_reference import subtract_mean
from prelunet.training.net.network import parameter_groups

PRECISIONS = ("bf16", "tf32")
BATCH = 128
RATE, MOMENTUM, DECAY, DROPOUT = 1e-4, 0.9, 5e-4, 0.5  # a low rate: the weights are random
STEPS, WARM = 6, 2
SECONDS = 6  # no further step is measured after this time
PLAN = (f"a step of A on {BATCH} images, in {' and '.join(PRECISIONS)}, channels last; about 20 seconds",)

Settings = Mapping[str, Any]


def cases(rig: Rig) -> Iterator[Case]:
    """Yield the cases."""
    for precision in PRECISIONS:
        settings = {"what": "training", "net": "A", "precision": precision, "batch": rig.reduced(BATCH)}
        yield Case(settings, partial(_measure, rig, settings), 12)


def _measure(rig: Rig, settings: Settings) -> dict[str, Any]:
    """Time the steps of one case."""
    batch, precision = settings["batch"], settings["precision"]
    net = rig.torch_net(settings["net"]).train()
    options = StepOptions("bf16" if precision == "bf16" else "fp32", channels_last=True)
    parallel = build_parallel("ddp", net, ProcessGroup(0, 1, torch.device(rig.device)), options)
    optimizer = torch.optim.SGD(parameter_groups(net, DECAY), lr=RATE, momentum=MOMENTUM)
    side = rig.px(CROP)
    rng = np.random.default_rng(0)
    images = torch.from_numpy(rng.integers(0, 256, (batch, side, side, 3), np.uint8)).to(rig.device)
    labels = torch.from_numpy(rng.integers(0, rig.classes, batch)).to(rig.device)
    mean = torch.from_numpy(MEAN).to(rig.device)
    widths = net.architecture.widths

    def step() -> float:
        pixels = subtract_mean(images, mean)
        taken = parallel.gradients(pixels, labels, lambda rows: dropout_factors(0, 0, rows, widths, DROPOUT), batch)
        optimizer.step()
        return taken.loss

    with tf32(precision == "tf32"):
        return _timed(rig, step, settings)


def _timed(rig: Rig, step: Any, settings: Settings) -> dict[str, Any]:
    """Time steps; operations count as three forward passes."""
    if rig.on_gpu:
        torch.cuda.reset_peak_memory_stats()
    for _ in range(rig.reduced(WARM, 1)):
        loss = step()
    rig.wait()
    took: list[float] = []
    while len(took) < rig.reduced(STEPS, 1) and sum(took) < SECONDS:
        begun = time.perf_counter()
        loss = step()
        rig.wait()
        took.append(time.perf_counter() - begun)
    seconds, side = float(np.median(took)), rig.px(CROP)
    batch = settings["batch"]
    flop = 3 * rig.flop(settings["net"], [(side, side)] * batch)
    return {
        "ms": 1e3 * seconds,
        **rig.rates(batch, flop, seconds, settings["precision"]),
        "memory_gb": round(torch.cuda.max_memory_allocated() / 1e9, 2) if rig.on_gpu else None,
        "loss": float(loss),
    }
