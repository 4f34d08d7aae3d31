"""Part `training`: images per second of training steps as in `training.loop.trainer`, at 224 pixels.

One step: subtract the mean, draw dropout, forward, cross entropy, backward, read the loss, SGD with momentum in our
parameter groups. The images are already on the device.
"""

import time
from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
import torch

from benchmarks.common.nets import MEAN
from benchmarks.common.rig import CROP, Rig, tf32
from benchmarks.common.runner import Case, Runner
from prelunet.training.data.augmentation import dropout_factors
from prelunet.training.distributed.base import StepOptions
from prelunet.training.distributed.data_parallel import build_parallel
from prelunet.training.distributed.process_group import ProcessGroup
from prelunet.training.net.dense_reference import subtract_mean
from prelunet.training.net.network import parameter_groups

NETS = ("A", "C")
PRECISIONS = ("bf16", "tf32", "fp32")
BATCHES = (32, 64, 128, 256, 512)
COMPILED_BATCHES = (128, 256)  # torch.compile takes a minute for each
RATE, MOMENTUM, DECAY, DROPOUT = 1e-4, 0.9, 5e-4, 0.5  # a low rate: the weights are random
STEPS, WARM = 6, 2
SECONDS = 6  # no further step is measured after this time

Settings = Mapping[str, Any]


def plan(rig: Rig) -> list[str]:
    """Describe what would be measured, one line per item."""
    return [
        f"{len(_all_settings(rig))} kinds of steps: {', '.join(NETS)} x {', '.join(PRECISIONS)} x channels_last or not "
        f"x batches of {', '.join(map(str, BATCHES))}, and some compiled",
        "about 10 minutes",
    ]


def run(rig: Rig, runner: Runner) -> None:
    """Measure all cases; larger batches only if the smaller ones fit into memory."""
    full: set[tuple[Any, ...]] = set()
    for settings in _all_settings(rig):
        kind = (settings["net"], settings["precision"], settings["channels_last"], settings["compile"])
        if kind in full:
            continue
        seconds = (12 if settings["net"] == "C" else 8) + 60 * settings["compile"]
        found = runner.measure(Case(settings, partial(_measure, rig, settings), seconds))
        if rig.on_gpu:
            torch.cuda.empty_cache()
        if found and found.get("out_of_memory"):
            full.add(kind)


def _all_settings(rig: Rig) -> list[dict[str, Any]]:
    kinds = [(precision, last, False) for precision in PRECISIONS for last in (True, False)]
    kinds.insert(1, ("bf16", True, True))
    return [
        {
            "what": "training", "net": net, "precision": precision, "channels_last": last, "compile": compiled,
            "batch": batch,
        }
        for net in NETS[: rig.reduced(len(NETS), 1)]
        for precision, last, compiled in kinds
        for batch in ((2,) if rig.tiny else COMPILED_BATCHES if compiled else BATCHES)
        if not (rig.tiny and compiled)  # compiling takes a minute; test_parallel.py compiles smaller nets
    ]  # fmt: skip


def _measure(rig: Rig, settings: Settings) -> dict[str, Any]:
    """Time the steps of one case."""
    batch, precision = settings["batch"], settings["precision"]
    net = rig.torch_net(settings["net"]).train()
    options = StepOptions("bf16" if precision == "bf16" else "fp32", settings["channels_last"], settings["compile"])
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
