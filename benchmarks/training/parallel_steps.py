"""One process of benchmarks.training.parallel, which starts it with torchrun; the first process writes the results.

torchrun --nproc-per-node 2 -m benchmarks.training.parallel_steps hybrid --steps 10 --output FILE
"""

import argparse
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from prelunet.evaluator.architectures import Architecture, Conv, architecture
from prelunet.training.distributed.base import StepOptions
from prelunet.training.distributed.data_parallel import build_parallel
from prelunet.training.distributed.process_group import ProcessGroup, open_process_group
from prelunet.training.net.initialization import initial_tensors
from prelunet.training.net.network import PreluNet, load_tensors, parameter_groups

CLASSES, BATCH = 100, 32
WARM = 2  # untimed steps
PURPOSES = ("gradients", "features", "feature gradients", "labels")


def small_a() -> Architecture:
    """Return A with an eighth of its channels, an eighth of its fc units, and half of its crop."""
    a = architecture("A")
    trunk = tuple(replace(one, channels=one.channels // 8) if isinstance(one, Conv) else one for one in a.trunk)
    return replace(a, name="A-small", trunk=trunk, hidden=a.hidden // 8, crop=a.crop // 2)


def main() -> None:
    """Train on random images, and write seconds, losses and bytes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", help="ddp or hybrid")
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with open_process_group("cpu") as group:
        found = measure(options.kind, group, options.steps)
    if group.is_first:
        options.output.write_text(json.dumps(found), encoding="utf-8")


def measure(kind: Any, group: ProcessGroup, steps: int) -> dict[str, Any]:
    """Return seconds and loss of each step, the bytes that all processes sent in one step, and those through `lo`."""
    net = PreluNet(small_a(), CLASSES)
    load_tensors(net, initial_tensors(small_a(), CLASSES, seed=0))
    parallel = build_parallel(kind, net, group, StepOptions(channels_last=True))
    optimizer = torch.optim.SGD(parameter_groups(net, 5e-4), lr=1e-3, momentum=0.9)
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(BATCH, 3, net.architecture.crop, net.architecture.crop, generator=generator) * 50
    labels = torch.randint(CLASSES, (BATCH,), generator=generator)
    own = slice(parallel.rows(BATCH).start, parallel.rows(BATCH).stop)
    seconds, losses = [], []
    on_wire = 0
    for number in range(WARM + steps):
        if number == WARM:
            group.wait()
            on_wire = _loopback_bytes()
        begun = time.perf_counter()
        losses.append(parallel.gradients(images[own], labels[own], None, BATCH).loss)
        optimizer.step()
        seconds.append(time.perf_counter() - begun)
    group.wait()
    on_wire = _loopback_bytes() - on_wire
    sent = group.total(*(parallel.traffic[purpose] for purpose in PURPOSES))
    return {
        "seconds": seconds[WARM:],
        "losses": losses,
        "sent_by_all": dict(zip(PURPOSES, sent, strict=True)),
        "loopback_per_step": on_wire / steps,
    }


def _loopback_bytes() -> int:
    """Return the bytes that the loopback interface has carried since boot, of all programs."""
    lines = Path("/proc/self/net/dev").read_text(encoding="utf-8").splitlines()
    return next(int(line.split(":")[1].split()[0]) for line in lines if line.strip().startswith("lo:"))


if __name__ == "__main__":
    main()
